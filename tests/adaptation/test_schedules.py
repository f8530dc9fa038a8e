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


@pytest.mark.parametrize(
    ("sequences", "devices", "micro", "forwards"),
    [(32, 2, 4, 4), (31, 8, 4, 1), (31, 1, 8, 4), (9, 8, 1, 1), (6, 1, 1, 6), (7, 2, 2, 2)],
)
def test_every_sequence_is_dealt_once(sequences, devices, micro, forwards):
    shape = batch_shape(sequences, 512, devices, micro)
    assert shape.forwards == forwards and shape.tokens == sequences * 512
    bounds = [shape.bounds(part) for part in range(shape.parts)]
    assert [n for first, last in bounds for n in range(first, last)] == list(range(sequences))
    sizes = [last - first for first, last in bounds]
    assert min(sizes) >= 1 and max(sizes) - min(sizes) <= 1 and max(sizes) == shape.micro


def test_more_devices_than_sequences_are_refused():
    with pytest.raises(UsageError, match=r"3 sequences of 512 tokens.*4 devices\n.*raise batch to 2048"):
        batch_shape(3, 512, 4, 1)
