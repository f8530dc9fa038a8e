"""Confidence intervals: of a mean over groups of dependent values, of a share of successes, of two models' difference,
and of several seeds' mean.

The keys of one document are no independent samples, so tasks give one value per document, and what varies is that.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist

import torch
from torch import Tensor

LEVEL = 0.95


@dataclass(frozen=True)
class Interval:
    """An estimate and its confidence bounds; the bounds are None where one group says nothing of the spread."""

    mean: float
    low: float | None
    high: float | None

    def as_dict(self) -> dict[str, float | None]:
        return {"mean": self.mean, "low": self.low, "high": self.high}

    def map(self, function) -> Interval:
        """The interval of an increasing ``function`` of the estimate."""
        low, high = (None if bound is None else function(bound) for bound in (self.low, self.high))
        return Interval(function(self.mean), low, high)


def student_quantile(probability: float, freedom: int) -> float:
    """Quantile of Student's t: exact for 1 and 2 degrees of freedom, otherwise the Cornish-Fisher expansion around the
    normal quantile (Abramowitz and Stegun 26.7.5; within 1% at 3 degrees of freedom and 0.975, 0.01% from 8 on)."""
    if freedom < 1:
        raise ValueError(f"degrees of freedom must be at least 1, not {freedom}")
    if freedom == 1:
        return math.tan(math.pi * (probability - 0.5))
    if freedom == 2:
        return (2 * probability - 1) * math.sqrt(2 / (4 * probability * (1 - probability)))
    z = NormalDist().inv_cdf(probability)
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return z + sum(term / freedom ** (power + 1) for power, term in enumerate(terms))


def mean_interval(values: Tensor, groups: Tensor, level: float = LEVEL) -> Interval:
    """Mean of ``values`` [N] whose dependence stays inside ``groups`` [N]: a t interval on the groups' sums.

    The squared standard error is G/(G-1) * sum_g (sum of g's deviations)^2 / N^2 for G groups.
    """
    values = values.to(torch.float64)
    mean = values.mean().item()
    _, index = torch.unique(groups, return_inverse=True)
    count = int(index.max()) + 1
    if count < 2:
        return Interval(mean, None, None)
    sums = torch.zeros(count, dtype=torch.float64).index_add_(0, index, values - mean)
    error = math.sqrt(count / (count - 1) * float(sums.square().sum())) / values.numel()
    reach = student_quantile(0.5 + level / 2, count - 1) * error
    return Interval(mean, mean - reach, mean + reach)


def consecutive_blocks(count: int, length: int = 128, at_least: int = 16) -> Tensor:
    """Group numbers [count] that cut a sequence into blocks of ``length``, shorter where that makes fewer than
    ``at_least``. A remainder joins the last block."""
    length = max(1, min(length, count // at_least))
    return torch.arange(count).div(length, rounding_mode="floor").clamp_max(max(count // length - 1, 0))


def wilson(successes: float, trials: float, level: float = LEVEL) -> tuple[float, float]:
    """Wilson's score interval of a share; ``successes`` may be fractional (partly found answers)."""
    if trials <= 0:
        return 0.0, 1.0
    z = NormalDist().inv_cdf(0.5 + level / 2)
    share = successes / trials
    centre = (share + z * z / (2 * trials)) / (1 + z * z / trials)
    reach = z / (1 + z * z / trials) * math.sqrt(share * (1 - share) / trials + z * z / (4 * trials * trials))
    return max(0.0, min(share, centre - reach)), min(1.0, max(share, centre + reach))


def share_interval(values: Tensor, samples: int = 1, level: float = LEVEL) -> Interval:
    """Interval of the mean of ``values`` [G] in 0 to 1, the share of each document's ``samples`` that are right.

    For one sample that is right or wrong it is Wilson's. Otherwise it is Wilson's with as many trials as independent
    samples would need for the documents' own variance, p (1 - p) / (s^2 / G), at most G ``samples`` and scaled to
    Student's quantile of G - 1 degrees of freedom (Korn and Graubard 1998); G trials where all is right or all wrong.
    Of rare answers few documents hold any, and their variance comes out too small: a quarter of a document that is all
    right and of one that is all wrong is added to it, with which coverage stays at 94% or more (25 documents of 16
    keys, shares of 0.03 to 0.9, correlations of 0.1 to 0.6) where it falls to 85% without.
    """
    values = values.to(torch.float64)
    count, mean = values.numel(), values.mean().item()
    if samples == 1 and bool(((values == 0) | (values == 1)).all()):
        return Interval(mean, *wilson(values.sum().item(), count, level))
    if count < 2:
        return Interval(mean, None, None)
    trials: float = count
    if 0 < mean < 1:
        squares = (values - mean).square().sum().item() + 0.25 * (mean**2 + (1 - mean) ** 2)
        trials = min(mean * (1 - mean) * count * (count - 1) / squares, count * samples)
    z = NormalDist().inv_cdf(0.5 + level / 2)
    trials *= (z / student_quantile(0.5 + level / 2, count - 1)) ** 2
    return Interval(mean, *wilson(mean * trials, trials, level))


def paired_interval(values: Tensor, baseline: Tensor, level: float = LEVEL) -> Interval:
    """Interval of the mean of ``values`` minus ``baseline``, [G] each, document by document: Student's t.

    Where every difference is -1, 0 or 1, and where none differs from another, t says too much for few documents: then
    one document more in favour of each side is counted (Bonett and Price 2012).
    """
    difference = values.to(torch.float64) - baseline.to(torch.float64)
    count, mean = difference.numel(), difference.mean().item()
    single = bool(((difference == 0) | (difference.abs() == 1)).all())
    if not single and count < 2:
        return Interval(mean, None, None)
    if single or difference.var().item() == 0:
        centre = difference.sum().item() / (count + 2)
        spread = (difference.square().sum().item() + 2) / (count + 2) - centre**2
        reach = NormalDist().inv_cdf(0.5 + level / 2) * math.sqrt(spread / (count + 2))
        return Interval(mean, max(-1.0, min(mean, centre - reach)), min(1.0, max(mean, centre + reach)))
    reach = student_quantile(0.5 + level / 2, count - 1) * math.sqrt(difference.var().item() / count)
    return Interval(mean, mean - reach, mean + reach)


def seeds_interval(values: Tensor, same_documents: bool, level: float = LEVEL) -> Interval:
    """Interval of the mean of ``values`` [S, G], S models of different seeds on G documents each: seeds and documents
    both stand for more of their kind.

    Args:
        same_documents: column by column; then the squared standard error is (seeds' + documents' - residual mean
            square) / (S G), at least the larger of the first two, with Satterthwaite's degrees of freedom. With
            documents of its own for every seed it is the variance of the seeds' means / S, with S - 1.
    """
    values = values.to(torch.float64)
    seeds, count = values.shape
    mean = values.mean().item()
    if seeds < 2 or (same_documents and count < 2):
        return Interval(mean, None, None)
    rows = values.mean(1)
    if not same_documents:
        reach = student_quantile(0.5 + level / 2, seeds - 1) * math.sqrt(rows.var().item() / seeds)
        return Interval(mean, mean - reach, mean + reach)
    columns = values.mean(0)
    residual = (values - rows[:, None] - columns + mean).square().sum().item() / ((seeds - 1) * (count - 1))
    squares = (count * rows.var().item(), seeds * columns.var().item(), residual)
    total = max(squares[0] + squares[1] - squares[2], squares[0], squares[1])
    if total == 0:
        return Interval(mean, mean, mean)
    freedoms = (seeds - 1, count - 1, (seeds - 1) * (count - 1))
    freedom = total**2 / sum(square**2 / freedom for square, freedom in zip(squares, freedoms, strict=True))
    reach = student_quantile(0.5 + level / 2, max(1, int(freedom))) * math.sqrt(total / (seeds * count))
    return Interval(mean, mean - reach, mean + reach)
