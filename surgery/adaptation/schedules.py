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
    """How an optimizer step's sequences are laid out.

    ``sequences`` a step over all devices = ``micro`` sequences a forward x ``accumulation`` x ``devices``.
    """

    sequences: int
    micro: int
    accumulation: int
    devices: int
    context: int

    @property
    def tokens(self) -> int:
        """Tokens a step."""
        return self.sequences * self.context


def batch_shape(sequences: int, context: int, devices: int, micro: int | None, most_tokens: int) -> BatchShape:
    """Split a step's sequences over devices and micro-batches.

    Args:
        sequences: a step's sequences over all devices.
        micro: sequences a device takes in one forward; None: as many as divide its share within ``most_tokens``.

    Raises:
        UsageError: the sequences do not divide over the devices, or over the micro-batches asked for.
    """
    if sequences % devices:
        raise UsageError(
            f"a step's {sequences} sequences of {context} tokens do not divide over {devices} devices\n"
            f"run on a number of devices that divides {sequences}, or change batch"
        )
    share = sequences // devices
    if micro is None:
        fitting = [n for n in range(1, share + 1) if share % n == 0 and (n == 1 or n * context <= most_tokens)]
        micro = fitting[-1]
    if micro < 1 or share % micro:
        divisors = ", ".join(str(n) for n in range(1, share + 1) if share % n == 0)
        raise UsageError(f"--micro-batch {micro} does not divide a device's {share} sequences; choose {divisors}")
    return BatchShape(sequences, micro, share // micro, devices, context)
