"""``surgery reproduce geometry``: where writes go, their gain and what they leave, against matrices by hand."""

from __future__ import annotations

import json
import math

import numpy
import pytest

# Memory by Design, Appendix E: the gain's limit, and the variance that a write adds along B at overlap 0.92
GAIN, GROWTH = 0.618, 0.00768


def by_hand(overlap: float, boost: int, flood: int, r2: float, l2: float) -> dict[str, float]:
    """D = 3, two pairs, one round, p0 = 1, with numpy alone."""
    a, b = numpy.array([1.0, 0, 0]), numpy.array([overlap, math.sqrt(1 - overlap**2), 0])
    covariance = numpy.eye(3)
    directions = []
    for key in [a, b] + [b] * boost + [a] * flood:
        before = b @ covariance @ b
        predicted = covariance + l2 * numpy.eye(3)
        u = predicted @ key
        gain = key @ u / (r2 + key @ u)
        covariance = predicted - numpy.outer(u, u) / (r2 + key @ u)
        directions.append(u)
    first = directions[2 + boost]
    return {
        "along_b": b @ first / numpy.linalg.norm(first),
        "moves_b": (b @ first) / (a @ first),
        "gain": gain,
        "growth": b @ covariance @ b - before,
    }


def test_the_papers_figures(surgery):
    result = surgery("reproduce", "geometry", "--overlaps", "0,0.6,0.92", "--json", "-")
    assert result.code == 0
    figures = json.loads(result.out)
    apart, some, near = figures["writes"]
    assert figures["paper"] == {"gain": GAIN, "growth": GROWTH, "growth_overlap": 0.92}
    assert near["gain"] == pytest.approx(GAIN, abs=5e-5) and near["growth"] == pytest.approx(GROWTH, abs=5e-6)
    assert some["growth"] == pytest.approx((1 - 0.6**2) * 0.05, abs=5e-6)
    for write in (apart, some, near):  # Eq. (15), exact once B has been written often
        assert write["along_b"] == pytest.approx(write["predicted_b"], abs=1e-6)
        assert write["along_perp"] == pytest.approx(write["predicted_perp"], abs=1e-6)
        assert write["along_b"] ** 2 + write["along_perp"] ** 2 == pytest.approx(1, abs=1e-9)
    # nearer keys draw the write towards B, and always by less than the raw key does
    assert 0 == apart["moves_b"] < some["moves_b"] < near["moves_b"] < 0.92 / 4


@pytest.mark.parametrize("settings", ((0.5, 3, 2, 0.2, 0.1), (-0.8, 0, 1, 0.05, 0.3)))
def test_every_option_reaches_the_filter(surgery, settings):
    overlap, boost, flood, r2, l2 = map(str, settings)
    words = ("--boost", boost, "--flood", flood, "--r2", r2, "--l2", l2, "--p0", "1", "--dim", "3", "--pairs", "2")
    result = surgery("reproduce", "geometry", "--overlaps", overlap, *words, "--rounds", "1", "--json", "-")
    figures = json.loads(result.out)
    (write,) = figures["writes"]
    for name, value in by_hand(*settings).items():
        assert write[name] == pytest.approx(value, abs=1e-10), name
    assert figures["paper"] is None


def test_the_table_and_the_picture(surgery, tmp_path):
    path = tmp_path / "geometry.svg"
    result = surgery("reproduce", "geometry", "--overlaps", "0.92", "--plot", str(path))
    assert result.code == 0 and "<svg" in path.read_text()
    assert "0.6180" in result.out and result.out.count("0.00768") == 3 and "Paper: gain 0.618" in result.out


@pytest.mark.parametrize(
    ("arguments", "says"),
    (
        (("--overlaps", "1"), "--overlaps 1.0"),
        (("--overlaps", "near"), "--overlaps near"),
        (("--flood", "0"), "--flood 0"),
        (("--l2", "0"), "--l2"),
        (("--plot", "picture.txt"), "--plot"),
    ),
)
def test_bad_values_are_usage_errors(surgery, arguments, says, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = surgery("reproduce", "geometry", *arguments)
    assert result.code == 2 and says in result.err and len(result.err.strip().splitlines()) == 1
    assert not list(tmp_path.iterdir())
