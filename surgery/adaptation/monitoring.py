"""What a phase reports while it runs: metrics.jsonl, TensorBoard events, and whoever else watches."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from surgery.checkpoint.staging import write_atomic
from surgery.results import strict

METRICS = "metrics.jsonl"


@dataclass
class Step:
    """One optimizer step's figures.

    Attributes:
        step: from 1; tokens: read up to and including this step; passes: times the text has begun again.
        loss: the phase's loss; terms: its parts by name, before weighting.
        learning_rate: by parameter group; dose; gradient_norm: before clipping.
        tokens_per_second: of this step, over all devices.
    """

    step: int
    tokens: int
    loss: float
    terms: dict[str, float]
    learning_rate: dict[str, float]
    dose: float
    gradient_norm: float
    tokens_per_second: float
    passes: int = 0

    def as_dict(self) -> dict[str, Any]:
        return dict(vars(self))


class Watcher(Protocol):
    """Something that is told of a phase's steps. It is told on the main process only."""

    def begin(self, step: int, steps: int) -> None:
        """The phase starts or resumes after ``step`` of ``steps``."""

    def step(self, step: Step) -> None: ...

    def end(self) -> None:
        """The phase stops, finished or not."""


def truncate(path: Path, step: int) -> None:
    """Drop the lines of a metrics.jsonl that belong to steps after ``step``, lines that cannot be read, as a last one
    that was cut short, and all but the last line of a step."""
    if not path.is_file():
        return
    kept: dict[int, bytes] = {}
    for line in path.read_bytes().splitlines():
        try:
            number = json.loads(line)["step"]
            if number <= step:
                kept[number] = line
        except (ValueError, KeyError, TypeError, RecursionError):
            continue
    write_atomic(path, b"".join(kept[number] + b"\n" for number in sorted(kept)))


def restore(path: Path, saved: Path) -> bool:
    """Let a metrics.jsonl begin with what a checkpoint kept of it; what follows is dropped.

    Returns:
        Whether the file had other content up to there: it was damaged, changed or lost.
    """
    kept = saved.read_bytes()
    with contextlib.suppress(FileNotFoundError):
        if path.stat().st_size == len(kept) and path.read_bytes() == kept:
            return False
    changed = not path.is_file() or not path.read_bytes().startswith(kept)
    write_atomic(path, kept)
    return changed


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The steps in a metrics.jsonl."""
    if not path.is_file():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@dataclass
class MetricsFile:
    """One JSON object a step. A resumed phase goes on after the step it resumes from, so no step stands twice."""

    path: Path
    _stream: Any = None

    def begin(self, step: int, steps: int) -> None:
        truncate(self.path, step)
        self._stream = self.path.open("a", encoding="utf-8")

    def step(self, step: Step) -> None:
        self._stream.write(json.dumps(strict(step.as_dict()), allow_nan=False) + "\n")
        self._stream.flush()

    def end(self) -> None:
        if self._stream is not None:
            self._stream.close()
            self._stream = None


@dataclass
class TensorBoard:
    """Events under ``folder``; those after the step that a phase resumes from are marked as void."""

    folder: Path
    _writer: Any = None

    def begin(self, step: int, steps: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(self.folder), purge_step=step + 1)

    def step(self, step: Step) -> None:
        scalars = {
            "loss": step.loss,
            "dose": step.dose,
            "gradient_norm": step.gradient_norm,
            "tokens_per_second": step.tokens_per_second,
            **{f"terms/{name.replace(' ', '_')}": value for name, value in step.terms.items()},
            **{f"learning_rate/{name}": value for name, value in step.learning_rate.items()},
        }
        for name, value in scalars.items():
            self._writer.add_scalar(name, value, step.step)

    def end(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None


@dataclass
class Watchers:
    """Several watchers as one."""

    members: list[Watcher] = field(default_factory=list)

    def begin(self, step: int, steps: int) -> None:
        for member in self.members:
            member.begin(step, steps)

    def step(self, step: Step) -> None:
        for member in self.members:
            member.step(step)

    def end(self) -> None:
        for member in self.members:
            member.end()


@dataclass
class Listener:
    """A function called with every step, for a caller that draws its own progress."""

    call: Callable[[Step, int], None]
    _steps: int = 0

    def begin(self, step: int, steps: int) -> None:
        self._steps = steps

    def step(self, step: Step) -> None:
        self.call(step, self._steps)

    def end(self) -> None:
        pass
