"""The commands of trained experiments: what they print, write and refuse, at sizes of seconds."""

from __future__ import annotations

import json

import pytest

# command -> its options at the smallest sizes, and the rules of its table
TINY = {
    "mqar": (
        "--lengths", "8", "--vocabulary", "16", "--width", "16", "--heads", "2", "--key-dim", "4", "--value-dim", "8",
        "--steps", "4", "--tokens", "32", "--tested", "4", "--rules", "delta,bayesian",
    ),
    "importance": (
        "--lengths", "8", "--vocabulary", "16", "--width", "16", "--heads", "2", "--key-dim", "4", "--value-dim", "8",
        "--steps", "4", "--tokens", "32", "--tested", "4", "--records", "2",
    ),
    "learned-collision": (
        "--pairs", "3", "--dim", "4", "--width", "8", "--steps", "3", "--batch", "4", "--trained-flood", "2",
        "--trained-overlaps", "0.1,0.5", "--floods", "0,3", "--overlaps", "0.3,0.9", "--tested", "4",
    ),
    "crowding": (
        "--dim", "3", "--values", "4", "--width", "8", "--steps", "3", "--batch", "4", "--trained", "2",
        "--occupancies", "3,4", "--tested", "4",
    ),
}  # fmt: skip


@pytest.mark.parametrize("command", TINY)
def test_measured_stands_beside_printed(command, surgery, tmp_path):
    picture, figures, folder = (tmp_path / name for name in ("figure.svg", "figures.json", "results"))
    words = ("reproduce", command, "--quick", *TINY[command], "--seeds", "0,1", "--device", "cpu", "--jobs", "1")
    result = surgery(*words, "--output", folder, "--plot", picture, "--json", figures)
    assert result.code == 0, result.err
    assert "<svg" in picture.read_text()
    written = json.loads(figures.read_text())
    assert written["sizes"] in " ".join(result.out.split())
    assert written["rows"] and "measured" in result.out and "paper" in result.out
    for row in written["rows"]:
        assert f"{row['mean']:.{row['digits']}f}" in result.out and len(row["each"]) == 2
        assert f"{row['deviation']:.{row['digits']}f}" in result.out and row["reading"] in result.out
    assert "of 2 seeds" in " ".join(result.out.split())
    again = surgery(*words, "--output", folder, "--json", "-")
    assert again.json == written  # from the files


@pytest.mark.parametrize("command", TINY)
@pytest.mark.parametrize(
    ("arguments", "says"),
    (
        (("--seeds", "a"), "--seeds a"),
        (("--rates", "fast"), "--rates fast"),
        (("--rates", "0"), "--rates 0"),
        (("--steps", "0"), "--steps 0"),
        (("--jobs", "0"), "--jobs 0"),
        (("--plot", "picture.txt"), "--plot"),
        (("--plot", "/nowhere/x.png"), "--plot"),
    ),
)
def test_bad_values_are_usage_errors(command, arguments, says, surgery, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = surgery("reproduce", command, "--quick", *arguments)
    assert result.code == 2 and says in result.err and len(result.err.strip().splitlines()) == 1, result.err
    assert not list(tmp_path.iterdir())


def test_lengths_are_whole_numbers(surgery):
    result = surgery("reproduce", "mqar", "--lengths", "16,long")
    assert result.code == 2 and "--lengths 16,long: write for example 128,256" in result.err


@pytest.mark.parametrize(
    ("arguments", "says"),
    (
        (("learned-collision", "--trained-overlaps", "0.5"), "--trained-overlaps 0.5: write lowest and highest"),
        (("learned-collision", "--trained-overlaps", "0.8,0.6"), "--trained-overlaps 0.8,0.6"),
        (("learned-collision", "--overlaps", "1"), "--overlaps 1.0"),
        (("learned-collision", "--floods", "-1"), "--floods -1"),
        (("learned-collision", "--dim", "7"), "--dim 7: 8 independent keys"),
        (("learned-collision", "--pairs", "1"), "--pairs 1"),
        (("crowding", "--occupancies", "0"), "--occupancies 0"),
        (("crowding", "--values", "1"), "--values 1"),
        (("crowding", "--trained", "0"), "--trained 0"),
        (("importance", "--records", "0"), "--records 0"),
        (("mqar", "--rules", "rwkv"), "--rules rwkv"),
    ),
)
def test_each_ones_own_values_are_checked(arguments, says, surgery):
    result = surgery("reproduce", *arguments)
    assert result.code == 2 and says in result.err and len(result.err.strip().splitlines()) == 1, result.err


@pytest.mark.parametrize("command", TINY)
def test_the_help_shows_examples(command, surgery):
    assert f"surgery reproduce {command} --quick" in surgery("reproduce", command, "--help").out
