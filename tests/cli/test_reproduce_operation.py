"""``surgery reproduce operation``: what it prints, writes and refuses. The figures themselves are tested elsewhere."""

from __future__ import annotations

import json

import pytest
import typer
from typer.testing import CliRunner

from surgery.cli.lists import whole_list
from surgery.cli.reproduce import register
from surgery.cli.reproduce_operation import QUICK
from surgery.errors import UsageError
from surgery.experiments.study import Study

TINY = (
    "--quick", "--pairs", "2", "--vocabulary", "16", "--steps", "8", "--adapt", "4", "--batch", "4",
    "--control-rates", "1e-3",
)  # fmt: skip


@pytest.fixture
def run():
    app = typer.Typer()
    register(app)

    @app.callback()
    def root() -> None:
        pass

    runner = CliRunner()

    def call(*arguments: str):
        return runner.invoke(app, ["reproduce", "operation", *arguments])

    return call


def test_quick_prints_the_difference_and_its_interval(run, tmp_path):
    picture, figures, folder = (tmp_path / name for name in ("operation.svg", "figures.json", "study"))
    arguments = (*TINY, "--tested", "8", "--jobs", "1", "--output", str(folder), "--device", "cpu")
    result = run(*arguments, "--plot", str(picture), "--json", str(figures))
    assert result.exit_code == 0, result.exception
    assert "<svg" in picture.read_text()
    written = json.loads(figures.read_text())
    assert written["study"]["pairs"] == 2 and written["study"]["seeds"] == [0, 1]
    (row,) = written["rows"]
    assert "as trained" in result.stdout and row["arm"]["name"][:8] in result.stdout
    for reading in row["readings"].values():
        paired = reading["every"]
        difference = paired["difference"]
        assert paired["seeds"] == [0, 1] and difference["low"] <= difference["mean"] <= difference["high"]
        for bound in difference.values():
            assert f"{100 * bound:+.2f}" in result.stdout
    assert "of 2 hosts count" in result.stdout
    again = run(*arguments, "--json", "-")
    assert json.loads(again.stdout) == written  # from the files
    for path in folder.glob("seed1-control-0.001-8.json"):
        path.unlink()
    rest = json.loads(run(*arguments, "--summary", "--json", "-").stdout)["rows"][0]["readings"]
    assert rest["2 x steps"]["every"]["seeds"] == [0] and rest["as trained"]["every"]["seeds"] == [0, 1]
    assert not list(folder.glob("seed1-control-0.001-8.json"))


def test_quick_stays_small():
    study = Study(**QUICK)
    assert study.pairs <= 16 and len(study.seeds) == 2


def test_seeds_are_lists_and_ranges():
    assert whole_list("0-2,7,100-101", "--seeds") == (0, 1, 2, 7, 100, 101)


@pytest.mark.parametrize(
    ("arguments", "says"),
    (
        (("--host", "kda"), "--host kda"),
        (("--task", "swap"), "--task swap"),
        (("--pairs", "17", "--quick"), "--pairs 17: --quick"),
        (("--pairs", "600"), "--vocabulary 1024"),
        (("--length", "100"), "--length 100"),
        (("--seeds", "a"), "--seeds a"),
        (("--seeds", "1,1"), "--seeds 1, 1"),
        (("--seeds", "3-1"), "--seeds"),
        (("--control-rates", "fast"), "--control-rates fast"),
        (("--control-rates", "0"), "--control-rates 0"),
        (("--host-rate", "nan"), "--host-rate nan"),
        (("--steps", "0"), "--steps 0"),
        (("--batch", "0"), "--batch 0"),
        (("--tested", "0"), "--tested 0"),
        (("--jobs", "0"), "--jobs 0"),
        (("--arm", "x:rule=bayesian", "--arm", "x:rule=palimpsa"), "--arm"),
        (("--summary",), "--summary"),
        (("--summary", "--output", "nothing"), "holds no study.json"),
        (("--plot", "/nowhere/x.png"), "--plot"),
        (("--plot", "picture.txt"), "--plot"),
    ),
)
def test_bad_values_are_usage_errors(run, arguments, says, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    error = run(*arguments).exception
    assert isinstance(error, UsageError) and error.exit_code == 2
    assert says in str(error) and len(str(error).splitlines()) == 1
    assert not list(tmp_path.iterdir())


def test_a_folder_of_other_files_is_left_alone(run, tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    error = run(*TINY, "--output", str(tmp_path)).exception
    assert isinstance(error, UsageError) and "no study.json" in str(error)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_an_output_that_is_no_study_is_refused(run, tmp_path):
    file = tmp_path / "file"
    file.write_text("mine")
    assert "is a file" in str(run(*TINY, "--output", str(file)).exception)
    (tmp_path / "study.json").write_text("[1")
    assert "does not say" in str(run(*TINY, "--output", str(tmp_path)).exception)


def test_the_help_shows_examples(run):
    assert "surgery reproduce operation --quick" in run("--help").stdout
