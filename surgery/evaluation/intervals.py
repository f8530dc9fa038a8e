"""Confidence intervals: of a mean over groups of dependent values, and of a share of successes."""

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


def wilson(successes: float, trials: int, level: float = LEVEL) -> tuple[float, float]:
    """Wilson's score interval of a share; ``successes`` may be fractional (partly found answers)."""
    if trials <= 0:
        return 0.0, 1.0
    z = NormalDist().inv_cdf(0.5 + level / 2)
    share = successes / trials
    centre = (share + z * z / (2 * trials)) / (1 + z * z / trials)
    reach = z / (1 + z * z / trials) * math.sqrt(share * (1 - share) / trials + z * z / (4 * trials * trials))
    return max(0.0, min(share, centre - reach)), min(1.0, max(share, centre + reach))
