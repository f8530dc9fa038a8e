"""A training loop that runs on the device alone: on a GPU one step is recorded as a CUDA graph and replayed.

A step of a small model is hundreds of kernels of microseconds, which Python cannot start as fast as a GPU runs them.
Here nothing of a step depends on Python: the batch, the learning rates and the dose are looked up on the device by a
counter that lives there. A recorded step therefore does what the same step does unrecorded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from surgery.adaptation.parameters import MAX_GRAD_NORM

BLOCK = 50  # steps whose sequences are drawn at once
EAGER = 3  # unrecorded steps before a recording: kernels are compiled and the optimiser's state is made in them


def autocast(device: str) -> torch.autocast:
    """Half precision as a phase uses it: bfloat16 on a GPU, none on a CPU. Casts are not kept, as a recording asks."""
    return torch.autocast(device.split(":")[0], torch.bfloat16, enabled=device.startswith("cuda"), cache_enabled=False)


class Task(Protocol):
    """What is trained on: ``draw`` gives the tensors of ``count`` sequences, on the generator's device, and ``answers``
    says how many answers of each are scored."""

    @property
    def answers(self) -> int: ...

    def draw(self, count: int, generator: torch.Generator) -> tuple[Tensor, ...]: ...


class DeviceLoop:
    """Optimiser steps of a loss on sequences of a task.

    Args:
        distiller: the loss; a module called with the task's tensors and the count of answers.
        adam: its optimiser; ``factors`` scale its groups' learning rates, a number per step.
        parameters: what the optimiser trains.
        doses: the value per step of each of the buffers ``targets``.

    Attributes:
        failed: the first step whose loss or gradient was not finite, None so far.
        losses: the mean loss of every block of steps.
    """

    def __init__(
        self,
        distiller: nn.Module,
        adam: torch.optim.Optimizer,
        parameters: Sequence[nn.Parameter],
        device: str,
        *,
        factors: Sequence[float],
        doses: Sequence[float],
        targets: Sequence[Tensor],
    ) -> None:
        self.distiller, self.adam, self.parameters, self.device = distiller, adam, parameters, device
        self.cuda = device.startswith("cuda")
        self.factors = torch.tensor(factors, device=device)
        self.doses = torch.tensor(doses, device=device)
        self.targets = targets
        self.peaks = [group["lr"] for group in adam.param_groups]
        for group in adam.param_groups:
            group["lr"] = torch.tensor(group["lr"], device=device)
            group["capturable"] = self.cuda
        self.step = torch.zeros(1, dtype=torch.int64, device=device)
        self.bad = torch.full((1,), -1, dtype=torch.int64, device=device)
        self.total = torch.zeros((), device=device)
        self.done = 0
        self.failed: int | None = None
        self.losses: list[float] = []
        self.graph: Any = None

    def run(self, task: Task, batch: int, generator: torch.Generator, stop: int) -> Iterator[None]:
        """Train on ``task`` until ``stop`` steps are done in all, or a step failed. Yields after each block."""
        buffers: list[Tensor] = []
        count = torch.tensor(batch * task.answers, device=self.device)
        first = torch.zeros(1, dtype=torch.int64, device=self.device)

        def one() -> None:
            at = self.step - first
            loss = self._loss([buffer.index_select(0, at)[0] for buffer in buffers], count)
            norm = torch.nn.utils.clip_grad_norm_(self.parameters, MAX_GRAD_NORM)
            finite = torch.isfinite(norm) & torch.isfinite(loss)
            self.bad.copy_(torch.where((self.bad < 0) & ~finite, self.step, self.bad))
            self.total += loss
            for group, peak in zip(self.adam.param_groups, self.peaks, strict=True):
                group["lr"].copy_(peak * self.factors.index_select(0, self.step)[0])
            self.adam.step()
            self.step += 1

        self.release()
        eager = EAGER
        while self.done < stop and self.failed is None:
            size = min(BLOCK, stop - self.done)
            drawn = [x.view(size, batch, *x.shape[1:]) for x in task.draw(size * batch, generator)]
            if not buffers:
                buffers += [x.new_zeros(BLOCK, *x.shape[1:]) for x in drawn]
            for buffer, new in zip(buffers, drawn, strict=True):
                buffer[:size].copy_(new)
            first.copy_(self.step)
            for _ in range(size):
                if self.graph is not None:
                    self.graph.replay()
                elif self.cuda and eager == 0:
                    self.release()
                    self.graph = record(one)
                    self.graph.replay()
                else:
                    eager -= 1
                    one()
            self.done += size
            yield
            self.losses.append(self.total.item() / size)
            self.total.zero_()
            if int(self.bad) >= 0:
                self.failed = int(self.bad)

    def release(self) -> None:
        """Give up the recording and its memory."""
        self.graph = None
        self.adam.zero_grad(set_to_none=True)

    def _loss(self, batch: list[Tensor], count: Tensor) -> Tensor:
        dose = self.doses.index_select(0, self.step)[0]
        for buffer in self.targets:
            buffer.copy_(dose)
        self.adam.zero_grad(set_to_none=True)
        with autocast(self.device):
            loss = self.distiller(*batch, count=count)["loss"]
        loss.backward()
        return loss.detach()


def record(step: Callable[[], None]) -> Any:
    """Record what ``step`` does on the current stream as a CUDA graph, without doing it: ``replay()`` does."""
    graph = torch.cuda.CUDAGraph()
    # other trainings of this process go on on their own streams meanwhile
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream(), capture_error_mode="thread_local"):
        step()
    return graph
