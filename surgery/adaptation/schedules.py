"""Pure functions of the step: learning-rate factor, dose, batch shape. Nothing here is stored; a resumed run computes
the same values again."""

from __future__ import annotations

import math
from dataclasses import dataclass

from surgery.errors import UsageError

DECAY = 0.1  # share of the steps over which wsd falls to zero


def learning_rate_factor(step: int, steps: int, warmup: int, schedule: str) -> float:
    """The factor on the peak learning rate at ``step`` (from 0) of ``steps``.

    It rises linearly over the first ``warmup`` steps, reaching 1 at the last of them, so that no step is lost at zero;
    then ``cosine`` falls to zero at the end, ``constant`` stays, and ``wsd`` (warm-up, stable, decay) stays and falls
    linearly to zero over the last tenth of the steps.
    """
    if step < warmup:
        return (step + 1) / warmup
    if schedule == "constant":
        return 1.0
    if schedule == "cosine":
        return 0.5 * (1.0 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup)))
    if schedule == "wsd":
        decay = max(1, round(DECAY * steps))
        return min(1.0, max(0, steps - step) / decay)
    raise ValueError(f"unknown schedule {schedule!r}")


@dataclass(frozen=True)
class DoseSchedule:
    """The dose of a phase: ``start`` to ``stop`` over ``steps`` optimizer steps, then ``stop``."""

    start: float
    stop: float
    steps: int

    def at(self, step: int) -> float:
        """The dose at ``step`` (from 0): start + (stop - start) min(1, (step + 1)/steps); never ``start`` itself."""
        if step + 1 >= self.steps:
            return self.stop
        return self.start + (self.stop - self.start) * (step + 1) / self.steps

    @property
    def silent(self) -> bool:
        """Whether every step runs at dose 0, where nothing that a graft added has a gradient."""
        return self.start == 0.0 and self.stop == 0.0


@dataclass(frozen=True)
class BatchShape:
    """How an optimizer step's sequences are dealt: ``forwards`` micro-batches on each of ``devices``, as equal as they
    can be. Losses are means over the whole step, so unequal ones do no harm.

    Attributes:
        sequences: a step's, over all devices.
        context: tokens each.
    """

    sequences: int
    context: int
    devices: int
    forwards: int

    @property
    def tokens(self) -> int:
        """Tokens a step."""
        return self.sequences * self.context

    @property
    def parts(self) -> int:
        """Micro-batches a step, over all devices."""
        return self.devices * self.forwards

    @property
    def micro(self) -> int:
        """Sequences of the largest micro-batch."""
        return -(-self.sequences // self.parts)

    def bounds(self, part: int) -> tuple[int, int]:
        """First sequence of micro-batch ``part`` within its step, and the one after its last."""
        size, longer = divmod(self.sequences, self.parts)
        first = part * size + min(part, longer)
        return first, first + size + (part < longer)


def batch_shape(sequences: int, context: int, devices: int, micro: int) -> BatchShape:
    """Deal a step's sequences so that no forward takes more than ``micro`` of them, as far as each device then still
    has one in every forward.

    Raises:
        UsageError: fewer sequences than devices.
    """
    if sequences < devices:
        raise UsageError(
            f"a step's {sequences} sequences of {context} tokens do not reach {devices} devices\n"
            f"use at most {sequences} devices, or raise batch to {devices * context} tokens"
        )
    forwards = min(-(-sequences // (devices * max(1, micro))), sequences // devices)
    return BatchShape(sequences, context, devices, forwards)
