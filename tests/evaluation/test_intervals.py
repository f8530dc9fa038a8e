"""Intervals cover what they claim to."""

from __future__ import annotations

import math

import pytest
import torch

from surgery.evaluation.intervals import (
    consecutive_blocks,
    mean_interval,
    paired_interval,
    seeds_interval,
    share_interval,
    student_quantile,
    wilson,
)


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


TRIALS = 1000
LEAST = 0.95 - 0.02 - 3 * math.sqrt(0.95 * 0.05 / TRIALS)  # 2 points are granted to the approximation


def coverage(intervals, truth):
    """The share of the intervals that hold the truth."""
    return sum(interval.low <= truth <= interval.high for interval in intervals) / TRIALS


def documents(mean, size, count=25, within=0.3):
    """[TRIALS, count] shares of right keys, ``size`` a document; the keys of one document correlate by ``within``."""
    scale = 1 / within - 1
    shares = torch.distributions.Beta(mean * scale, (1 - mean) * scale).sample((TRIALS, count)).double()
    return torch.distributions.Binomial(size, shares).sample() / size


@pytest.mark.parametrize("mean", [0.03, 0.3, 0.9])
def test_keys_of_one_document_are_no_independent_samples(mean):
    rows = documents(mean, 16)
    assert coverage([share_interval(row, 16) for row in rows], mean) > LEAST
    naive = [wilson(row.sum().item() * 16, row.numel() * 16) for row in rows]
    assert sum(low <= mean <= high for low, high in naive) / TRIALS < 0.8
    mixed = share_interval(torch.tensor([0.5, 0.75, 1.0, 0.25]), 4)
    assert 0 <= mixed.low < mixed.mean == 0.625 < mixed.high <= 1


def test_share_of_single_prompts_is_wilsons():
    interval = share_interval(torch.tensor([1.0, 0.0, 1.0, 1.0]))
    assert (interval.low, interval.high) == wilson(3, 4)
    for value in (0.0, 1.0):  # lists that are all right or all wrong say no more than as many single prompts
        ends = share_interval(torch.full((12,), value), 8)
        low, high = wilson(12 * value, 12)
        assert ends.low <= low and ends.high >= high and ends.mean == value
    assert share_interval(torch.tensor([0.5]), 4).low is None


@pytest.mark.parametrize("size", [1, 16])
@pytest.mark.parametrize("gain", [0.0, 0.2])
def test_paired_difference_covers(size, gain):
    """Two models on the same documents, which are hard or easy for both."""
    hard = torch.rand(TRIALS, 25, dtype=torch.float64) * 0.7
    one, two = (torch.distributions.Binomial(size, hard + more).sample() / size for more in (gain, 0.0))
    intervals = [paired_interval(a, b) for a, b in zip(one, two, strict=True)]
    assert coverage(intervals, gain) > LEAST
    if size > 1:  # narrower than as if the two had read different documents
        apart = [a.var().item() / 25 + b.var().item() / 25 for a, b in zip(one, two, strict=True)]
        width = sum(interval.high - interval.low for interval in intervals) / TRIALS
        assert width < 0.8 * sum(2 * 2.01 * math.sqrt(variance) for variance in apart) / TRIALS


def test_no_difference_in_few_documents_is_no_proof():
    same = paired_interval(torch.ones(10), torch.ones(10))
    assert same.mean == 0 and same.low < -0.1 and same.high > 0.1
    half = paired_interval(torch.full((10,), 0.5), torch.full((10,), 0.25))
    assert half.low < 0.25 == half.mean < half.high
    assert paired_interval(torch.tensor([0.5]), torch.tensor([0.25])).low is None


@pytest.mark.parametrize("same", [True, False])
@pytest.mark.parametrize("seed_spread", [0.0, 0.05])
def test_seeds_and_documents_both_vary(same, seed_spread):
    """Five seeds on 40 documents; taking all 200 figures as independent would claim too much wherever one varies."""
    shared = 0.15 * torch.randn(TRIALS, 1 if same else 5, 40, dtype=torch.float64)
    seeds = seed_spread * torch.randn(TRIALS, 5, 1, dtype=torch.float64)
    values = 0.5 + shared + seeds + 0.1 * torch.randn(TRIALS, 5, 40, dtype=torch.float64)
    covered = coverage([seeds_interval(trial, same) for trial in values], 0.5)
    assert LEAST < covered < 0.99
    if same or seed_spread:
        alone = torch.arange(200)
        assert coverage([mean_interval(trial.flatten(), alone) for trial in values], 0.5) < 0.9


def test_one_seed_says_nothing_of_seeds():
    assert seeds_interval(torch.rand(1, 9), True).low is None
    still = seeds_interval(torch.full((3, 4), 0.5), True)
    assert (still.low, still.mean, still.high) == (0.5, 0.5, 0.5)
