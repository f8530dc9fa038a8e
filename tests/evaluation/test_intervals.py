"""Intervals cover what they claim to."""

from __future__ import annotations

import math

import pytest
import torch

from surgery.evaluation.intervals import consecutive_blocks, mean_interval, student_quantile, wilson


@pytest.mark.parametrize(("freedom", "tolerance"), [(1, 1e-6), (2, 1e-6), (3, 0.01), (4, 0.005), (8, 2e-4), (40, 1e-6)])
def test_student_quantile_against_the_density(freedom, tolerance):
    for probability in (0.9, 0.975):
        quantile = student_quantile(probability, freedom)
        x = torch.linspace(0, quantile, 200_001, dtype=torch.float64)
        scale = math.gamma((freedom + 1) / 2) / (math.sqrt(freedom * math.pi) * math.gamma(freedom / 2))
        area = scale * torch.trapezoid((1 + x**2 / freedom) ** (-(freedom + 1) / 2), x).item()
        # a relative error of the quantile moves the area by at most that error times x f(x)
        reach = quantile * scale * (1 + quantile**2 / freedom) ** (-(freedom + 1) / 2)
        assert abs(0.5 + area - probability) <= tolerance * reach + 1e-9


def test_interval_of_dependent_values_covers_the_mean():
    """A stationary AR(1) sequence of correlation 0.8: blocks cover about 95%, which 3 standard errors bound below."""
    trials, length = 400, 4096
    noise = torch.randn(trials, length, dtype=torch.float64)
    values = torch.empty_like(noise)
    values[:, 0] = noise[:, 0] / math.sqrt(1 - 0.8**2)
    for t in range(1, length):
        values[:, t] = 0.8 * values[:, t - 1] + noise[:, t]
    blocks = consecutive_blocks(length)
    alone = torch.arange(length)
    covered = naive = 0
    for row in values:
        interval, plain = mean_interval(row, blocks), mean_interval(row, alone)
        covered += interval.low <= 0 <= interval.high
        naive += plain.low <= 0 <= plain.high
    assert covered / trials > 0.95 - 0.02 - 3 * math.sqrt(0.95 * 0.05 / trials)
    assert covered / trials < 0.995
    assert naive / trials < 0.75  # tokens taken as independent would claim far too much


def test_interval_of_unequal_groups():
    values = torch.tensor([1.0, 2.0, 3.0, 10.0])
    interval = mean_interval(values, torch.tensor([0, 0, 0, 7]))
    assert interval.mean == pytest.approx(4.0)
    # deviations sum to -6 and +6: error = sqrt(2/1 * 72) / 4, t of one degree of freedom
    assert interval.high - interval.mean == pytest.approx(math.tan(math.pi * 0.475) * math.sqrt(2 * 72) / 4)


def test_one_group_gives_no_bounds():
    interval = mean_interval(torch.randn(10), torch.zeros(10))
    assert interval.low is None and interval.high is None
    assert interval.map(math.exp).low is None


def test_blocks():
    assert consecutive_blocks(300, 128, 2).tolist() == [0] * 128 + [1] * 172
    assert consecutive_blocks(3).tolist() == [0, 1, 2]
    assert consecutive_blocks(5000).max() == 5000 // 128 - 1


@pytest.mark.parametrize(("right", "total"), [(0, 8), (3, 8), (8, 8), (97, 100)])
def test_wilson_bounds_solve_their_equation(right, total):
    """At each bound p inside (0, 1): |right/total - p| = z sqrt(p (1 - p) / total)."""
    low, high = wilson(right, total)
    assert 0 <= low <= right / total <= high <= 1
    for bound in (low, high):
        if 0 < bound < 1:
            reach = 1.959964 * math.sqrt(bound * (1 - bound) / total)
            assert abs(right / total - bound) == pytest.approx(reach, rel=1e-5)
    assert wilson(0, 0) == (0.0, 1.0)
