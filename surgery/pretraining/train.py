"""Train bases: windows of contiguous rows of tokens, the memory carried from window to window; several at once."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from surgery.errors import JobError
from surgery.pretraining.loop import Settings, Training, device_data
from surgery.pretraining.report import say

__all__ = ["Settings", "Training", "run", "train"]


PACED = 20, 120  # steps between which the pace is measured, after those that compile and record
MARGIN = 0.97  # of the steps that there is time for


def run(
    trainings: Sequence[Training], *, checkpoint_every: int = 500, until: float | None = None, fit: bool = False
) -> bool:
    """Take the trainings forward step by step in turn until all are finished.

    Args:
        checkpoint_every: steps after which those that have a checkpoint renew it.
        until: a time of ``time.monotonic`` at which to stop, after a last checkpoint.
        fit: shorten all trainings alike so that they are finished by then, as the pace of the first steps tells.

    Returns:
        Whether all are finished.

    Raises:
        JobError: as :meth:`Training.advance`, of a training that is alone. One of several that fails has ``failed`` say
            so, and the others go on.
    """

    def left() -> list[Training]:
        return [training for training in trainings if not (training.finished or training.failed)]

    rounds, paced = 0, 0.0
    while going := left():
        rounds += 1
        if fit and until is not None and rounds in PACED:
            for training in going:
                training.wait()
            if rounds == PACED[1]:
                pace = (PACED[1] - PACED[0]) / (time.monotonic() - paced)
                possible = int(MARGIN * pace * (until - time.monotonic()))
                say(f"{pace:.2f} rounds a second: time for {possible} more")
                for training in going:
                    training.shorten(training.done + possible)
            paced = time.monotonic()
        for training in going:
            try:
                training.advance()
            except JobError as error:
                if len(trainings) == 1:
                    raise
                training.failed = str(error)
                say(f"{training.name}: {error}")
                continue
            if training.checkpoint is not None and training.done % checkpoint_every == 0 and not training.finished:
                training.save()
        if until is not None and time.monotonic() > until:
            break
    for training in left():
        say(f"{training.name}: time is up after step {training.done}/{training.steps}")
        if training.checkpoint is not None:
            training.save()
    return all(training.finished for training in trainings)


def train(
    name: str,
    stream: np.ndarray,
    settings: Settings,
    device: str,
    *,
    config: dict[str, Any] | None = None,
    horizons: tuple[float, ...] | None = None,
    checkpoint: Path | None = None,
    checkpoint_every: int = 500,
) -> tuple[torch.nn.Module, dict[str, Any]]:
    """Train base ``name`` on ``stream``, uint16 tokens in one piece or rows of documents, to the end, and return the
    float32 model and what happened. Arguments and errors are those of :class:`Training` and :func:`run`."""
    training = Training(
        name,
        device_data(stream, settings.batch, device),
        settings,
        device,
        documents=stream.ndim == 2,
        config=config,
        horizons=horizons,
        checkpoint=checkpoint,
    )
    run([training], checkpoint_every=checkpoint_every)
    training.release()
    return training.model, training.report()
