"""Learning rate, dose and batch shape as functions of the step."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest

from surgery.adaptation.schedules import DoseSchedule, batch_shape, learning_rate_factor
from surgery.errors import UsageError


@pytest.mark.parametrize("schedule", ["cosine", "constant", "wsd"])
def test_every_step_learns_and_the_peak_is_one(schedule):
    factors = [learning_rate_factor(s, 50, 7, schedule) for s in range(50)]
    assert min(factors) > 0 and max(factors) == 1.0
    assert factors[:7] == [pytest.approx((s + 1) / 7) for s in range(7)]


def test_cosine_halves_halfway_and_falls():
    factors = [learning_rate_factor(s, 110, 10, "cosine") for s in range(10, 110)]
    assert factors[0] == 1.0 and factors[50] == pytest.approx(0.5)
    assert all(a > b for a, b in pairwise(factors))
    assert factors[-1] == pytest.approx(0.5 * (1 + math.cos(math.pi * 0.99)))


def test_wsd_decays_over_the_last_tenth():
    factors = [learning_rate_factor(s, 100, 10, "wsd") for s in range(100)]
    assert factors[10:91] == [1.0] * 81
    assert factors[90:] == [pytest.approx((100 - s) / 10) for s in range(90, 100)]


def test_dose_follows_the_schedule():
    dose = DoseSchedule(0.0, 1.0, 4)
    assert [dose.at(s) for s in range(6)] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
    down = DoseSchedule(1.0, 0.5, 2)
    assert [down.at(s) for s in range(3)] == [0.75, 0.5, 0.5]
    assert DoseSchedule(0.3, 0.3, 1).at(0) == 0.3


def test_dose_is_silent_only_at_zero():
    assert DoseSchedule(0.0, 0.0, 1).silent
    assert not DoseSchedule(0.0, 1.0, 10).silent and not DoseSchedule(1.0, 0.0, 1).silent


def test_batch_shape_fits_the_tokens_of_a_forward():
    shape = batch_shape(32, 512, 2, None, 2048)
    assert (shape.micro, shape.accumulation, shape.tokens) == (4, 4, 32 * 512)
    assert batch_shape(6, 4096, 1, None, 2048).micro == 1
    assert batch_shape(6, 4096, 1, 3, 2048).accumulation == 2


def test_batch_shape_refuses_what_does_not_divide():
    with pytest.raises(UsageError, match="3 devices"):
        batch_shape(32, 512, 3, None, 2048)
    with pytest.raises(UsageError, match="choose 1, 2, 4, 8"):
        batch_shape(8, 512, 1, 3, 2048)
