"""``surgery reproduce collision``: the paper's figures, its options, its outputs and its errors."""

from __future__ import annotations

import json
import math
import subprocess
import sys

import numpy
import pytest
import typer
from typer.testing import CliRunner

from surgery.cli.reproduce import register
from surgery.errors import UsageError
from surgery.experiments.collision import PRINTED as PAPER
from surgery.experiments.collision import Settings, collision

PRINTED = {"boost": 0.73106, "bayesian_flood": 0.72309, "reset_flood": 0.35138}  # Memory by Design, Appendix E
ABLATED = {"diagonal_flood": 0.690373, "raw_flood": 0.394727}  # by hand, in float64


@pytest.fixture
def run():
    app = typer.Typer()
    register(app)

    @app.callback()
    def root() -> None:
        pass

    runner = CliRunner()

    def call(*arguments: str):
        return runner.invoke(app, ["reproduce", "collision", *arguments])

    return call


def filter_by_hand(overlap, boost, flood, dim, r2, l2, p0, pairs, rounds) -> dict[str, float]:
    """The four rules as matrices, one write after another, with numpy alone."""
    keys = numpy.eye(pairs, dim)
    keys[1, :2] = overlap, math.sqrt(1 - overlap**2)
    writes = [*range(pairs)] * rounds + [1] * boost + [0] * flood
    figures = {}
    for rule in ("bayesian", "reset", "diagonal", "raw"):
        mean, covariance = numpy.zeros((dim, pairs)), p0 * numpy.eye(dim)
        curve, gains, variances = [], [], []
        for index in writes:
            predicted = (0 if rule == "reset" else covariance) + l2 * numpy.eye(dim)
            key = keys[index]
            gain = predicted @ key / (r2 + key @ predicted @ key)
            gains.append(key @ gain)
            along = key * (key @ gain) if rule == "raw" else gain
            mean = mean + numpy.outer(along, numpy.eye(pairs)[index] - key @ mean)
            covariance = predicted - numpy.outer(gain, key @ predicted)
            if rule == "diagonal":
                covariance = numpy.diag(numpy.diag(covariance))
            read = keys[1] @ mean
            curve.append(1 / (1 + math.exp(read[0] - read[1])))
            variances.append(keys[1] @ covariance @ keys[1])
        figures[f"{rule}_flood"] = curve[-1]
        if rule == "bayesian":
            figures["boost"] = curve[rounds * pairs + boost - 1]
            figures["gain"], figures["growth"] = gains[-1], variances[-1] - variances[-2]
    return figures


def test_the_papers_figures(run):
    result = run("--json", "-")
    assert result.exit_code == 0
    figures = json.loads(result.stdout)
    for name, value in PRINTED.items():
        assert figures[name] == pytest.approx(value, abs=5e-6)
        assert figures["expected"][name] == pytest.approx(figures[name], abs=1e-12)
    assert figures["boost"] == pytest.approx(1 / (1 + math.exp(-1)), abs=1e-12)
    for name, value in ABLATED.items():
        assert figures[name] == pytest.approx(value, abs=5e-7)
        assert figures["expected"][name] == pytest.approx(figures[name], abs=1e-12)
    assert figures["gain"] == pytest.approx(0.618, abs=5e-5) and figures["growth"] == pytest.approx(0.00768, abs=1e-10)
    assert figures["expected"]["gain"] == pytest.approx((math.sqrt(5) - 1) / 2, abs=1e-12)
    assert figures["expected"]["growth"] == pytest.approx((1 - 0.92**2) * 0.05, abs=1e-12)
    assert figures["paper"] == PRINTED | {"gain": 0.618, "growth": 0.00768}


@pytest.mark.parametrize(
    "settings",
    (
        (0.92, 40, 60, 16, 0.05, 0.05, 3.0, 6, 2),
        (0.6, 3, 7, 6, 0.4, 0.1, 1.0, 6, 1),
        (-0.7, 1, 30, 9, 1e-3, 2e-3, 0.5, 4, 3),
        (0.95, 0, 5, 16, 2.0, 0.5, 10.0, 2, 2),
        (0.3, 4, 2, 8, 0.1, 3.0, 3.0, 8, 0),
    ),
)
def test_every_option_reaches_the_filter(run, settings):
    names = ("--overlap", "--boost", "--flood", "--dim", "--r2", "--l2", "--p0", "--pairs", "--rounds")
    arguments = [text for name, value in zip(names, settings, strict=True) for text in (name, str(value))]
    result = run(*arguments, "--json", "-")
    figures = json.loads(result.stdout)
    for name, value in filter_by_hand(*settings).items():
        assert figures[name] == pytest.approx(value, abs=1e-10), name
        if name not in ("gain", "growth"):  # of which the limits of many writes are expected
            assert figures["expected"][name] == pytest.approx(value, abs=1e-10), name
    assert (figures["paper"] is None) == (Settings(*settings) != Settings())


def test_the_curves_are_of_every_rule_and_write():
    """Each rule's gain follows from its variance along the key before the write."""
    settings = Settings(overlap=0.8, boost=3, flood=4, r2=0.2, l2=0.1)
    found = collision(settings)
    writes = [index for phase in settings.writes().values() for index in phase]
    for rule, along in found.variances.items():
        for at, index in enumerate(writes):
            if at == 0 or index > 1:
                continue
            before = 0.0 if rule == "reset" else along["AB"[index]][at - 1]
            expected = (before + settings.l2) / (settings.r2 + before + settings.l2)
            assert found.gains[rule][at] == pytest.approx(expected, abs=1e-12)
    assert found.gains["raw"] == found.gains["bayesian"]


def test_the_floods_figures_are_limits_from_the_state_after_the_boost():
    """Many more writes of A after 40 of B lead to the paper's figures; after few of B they lead elsewhere."""
    settled = collision(Settings(flood=2000)).measured
    for name in ("bayesian_flood", "reset_flood", "gain", "growth"):
        assert settled[name] == pytest.approx(PAPER[name], abs=5e-5)
    little = collision(Settings(boost=1, flood=2000)).measured
    assert abs(little["bayesian_flood"] - PRINTED["bayesian_flood"]) > 1e-3


def test_the_table_shows_measured_beside_expected(run):
    result = run()
    assert result.exit_code == 0
    for value in PRINTED.values():
        assert result.stdout.count(f"{value:.5f}") == 4  # measured, expected, the paper's, its note
    assert "from the state after 40 writes of B" in " ".join(result.stdout.split())
    assert "0.35138" not in run("--overlap", "0.9").stdout


def test_the_curves_are_drawn(run, tmp_path):
    path = tmp_path / "collision.svg"
    result = run("--plot", str(path), "--json", str(tmp_path / "figures.json"))
    assert result.exit_code == 0 and str(path) not in result.stdout
    assert "<svg" in path.read_text()
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert [len(curve) for curve in figures["curves"].values()] == [112] * 4
    assert [len(curve) for curve in figures["gains"].values()] == [112] * 4


@pytest.mark.parametrize(
    ("arguments", "says"),
    (
        (("--overlap", "1"), "--overlap"),
        (("--overlap", "-1"), "--overlap"),
        (("--overlap", "nan"), "--overlap"),
        (("--dim", "5"), "--dim"),
        (("--boost", "-1"), "--boost"),
        (("--flood", "-3"), "--flood"),
        (("--r2", "0"), "--r2"),
        (("--l2", "-0.05"), "--l2"),
        (("--p0", "inf"), "--p0"),
        (("--pairs", "1"), "--pairs"),
        (("--pairs", "17"), "--dim 16"),
        (("--rounds", "-1"), "--rounds"),
        (("--rounds", "0", "--boost", "0", "--flood", "0"), "nothing is written"),
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


def test_the_command_line_prints_one_line_for_a_bad_value():
    program = "import sys; from surgery.cli import main; sys.argv = ['surgery', *sys.argv[1:]]; main()"
    command = [sys.executable, "-c", program, "reproduce", "collision", "--dim", "3"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.splitlines() == ["error: --dim 3: 6 independent keys need at least 6 dimensions"]


def test_the_defaults_are_the_papers():
    assert Settings() == Settings(0.92, 40, 60, 16, 0.05, 0.05, 3.0, 6, 2)
    assert collision(Settings()).printed == PAPER
