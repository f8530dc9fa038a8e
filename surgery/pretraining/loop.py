"""One training, step by step, so that several can share a GPU: each on its own stream, its steps CUDA graphs.

A step of a small model is a thousand kernels of microseconds. Recorded once and replayed, it needs nothing of Python:
the batch, the learning rates and the sums that are logged are found on the device by a counter that lives there.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from surgery.errors import UsageError
from surgery.experiments.device_loop import EAGER, record
from surgery.pretraining.bases import (
    CONTEXT,
    base_config,
    create,
    grafted_config,
    horizons_of,
    initialise,
    parts_of,
)
from surgery.pretraining.curriculum import tokens_and_kinds
from surgery.pretraining.drawing import ANSWER, RANDOM, TEXT
from surgery.pretraining.optimisation import optimisers, rate, set_rate
from surgery.pretraining.report import say
from surgery.pretraining.stream import Carry, StreamModel

KINDS = {"text": TEXT, "random": RANDOM, "answer": ANSWER}


@dataclass(frozen=True)
class Settings:
    """How a base is trained.

    Attributes:
        restart: on a plain stream, the share of rows whose memory starts anew at a window: a model is used from an
            empty memory as well as far into a text. In rows of documents each document starts anew.
        random_weight, answer_weight: of rows of documents, a token's weight in the loss where nothing before says what
            it is, and where a recall document did; text weighs 1. The loss of a random token is noise, and its gradient
            would be the most of a recall document's.
        dose: of a swapped memory, all through the training.
        warm: steps over which the learning rate rises again after weights without an optimiser's state.
    """

    tokens: int = 300_000_000
    context: int = CONTEXT
    batch: int = 64
    muon_lr: float = 0.01
    adam_lr: float = 0.005
    weight_decay: float = 0.1
    restart: float = 0.05
    random_weight: float = 0.1
    answer_weight: float = 3.0
    dose: float = 1.0
    warm: int = 100
    clip: float = 1.0
    seed: int = 0
    log_every: int = 50


def device_data(stream: np.ndarray, rows: int, device: str) -> Tensor:
    """A stream of tokens as [rows, tokens] on the device, each row a contiguous part and the first token of the next.

    int16 holds every stored token: ids of 12 bits and kinds of 2.
    """
    if stream.ndim == 2:
        return torch.from_numpy(np.array(stream).view(np.int16)).to(device)
    length = (len(stream) - 1) // rows
    flat = torch.from_numpy(stream[: rows * length + 1].astype(np.int16)).to(device)
    return flat.as_strided((rows, length + 1), (length, 1))


class Training:
    """The training of one base.

    Args:
        name: the base. data: as :func:`device_data` gives it. documents: the data are rows of documents with kinds
            (:mod:`surgery.pretraining.rows`), not a plain stream.
        config, horizons: in place of the base's own, for tests.
        memory: options of a swapped memory's rule; those that it does not have are left out.
        checkpoint: a file from which training continues if it exists, and which :meth:`save` renews.
        start: where there is no checkpoint yet, an exported base to continue from, with its training.json.
        compiled: None for what suits the device.

    Raises:
        UsageError: the data are shorter than one step, or a swapped memory is to read a plain stream.
    """

    def __init__(
        self,
        name: str,
        data: Tensor,
        settings: Settings,
        device: str,
        *,
        documents: bool = False,
        config: dict[str, Any] | None = None,
        horizons: tuple[float, ...] | None = None,
        memory: Mapping[str, Any] | None = None,
        checkpoint: Path | None = None,
        start: Path | None = None,
        compiled: bool | None = None,
    ) -> None:
        rows, context = settings.batch, settings.context
        self.name, self.data, self.settings, self.device, self.documents = name, data, settings, device, documents
        rule = parts_of(name)[1]
        if rule and not documents:
            raise UsageError(f"{name}: a memory that has a prior needs rows of documents (the command rows)")
        self.steps = min(settings.tokens // rows, data.shape[1] - 1) // context
        if self.steps < 1:
            raise UsageError(f"{data.numel()} tokens are no full step of {rows} x {context}")
        self.cuda = device.startswith("cuda")
        self.stream = torch.cuda.Stream(device) if self.cuda else None
        self.checkpoint = checkpoint
        self.config = grafted_config(config or base_config(name), rule, memory)
        torch.manual_seed(settings.seed)
        torch.set_float32_matmul_precision("high")
        model = create(self.config, settings.dose, settings.seed)
        initialise(model, horizons or horizons_of(name), settings.seed)
        self.model = model.to(device).train()
        self.parameters = list(model.parameters())
        self.runner = StreamModel(model, self.cuda if compiled is None else compiled, self.cuda)
        self.optimisers = optimisers(model, settings.muon_lr, settings.adam_lr, settings.weight_decay)
        dice = torch.Generator().manual_seed(settings.seed)
        self.restarts = (torch.rand(self.steps, rows, generator=dice) < settings.restart).to(device)
        self.weights = torch.tensor([1.0, settings.random_weight, settings.answer_weight], device=device)
        self.carries = self.runner.start(rows)
        self.fresh = torch.ones(1, dtype=torch.bool, device=device)  # the memories hold nothing yet
        self.step = torch.zeros(1, dtype=torch.int64, device=device)
        self.bad = torch.full((1,), -1, dtype=torch.int64, device=device)  # the first step that was not finite
        self.sums = torch.zeros(3, 2, device=device, dtype=torch.float64)  # by kind, nats and tokens
        self.done, self.history = 0, []
        factors = [rate(step, self.steps) for step in range(self.steps)]
        if checkpoint is not None and checkpoint.exists():
            self._continue(torch.load(checkpoint, map_location=device, weights_only=True), factors)
        elif start is not None:
            self._continue(exported(start, name), factors)
        self.factors = torch.tensor(factors, device=device)
        self._lead()
        self.graph: Any = None
        self.eager = EAGER
        self.failed: str | None = None  # why there is no going on
        self.mark, self.marked = time.monotonic(), self.done
        if self.cuda:
            torch.cuda.synchronize(device)  # what was made so far was made on another stream
        if compiled or (self.cuda and compiled is None):
            with self._on_stream():
                remark = self.runner.settle(*self._window(0)[:3])
                torch.cuda.empty_cache()  # other trainings' streams could not use it
            if remark:
                say(f"{name}: {remark}")
            say(f"{name}: compiled and compared in {time.monotonic() - self.mark:.0f} s")
            self.mark = time.monotonic()

    def _continue(self, saved: dict[str, Any], factors: list[float]) -> None:
        missing, unknown = self.model.load_state_dict(saved["model"], strict=False)
        if unknown or set(missing) - {"lm_head.weight"}:
            raise UsageError(f"{self.name}: weights of another base: {', '.join([*unknown, *missing][:3])}")
        self.done, self.history = saved["step"], saved["history"]
        self.step.fill_(self.done)
        if saved["optimisers"] is None:
            for step in range(self.done, min(self.steps, self.done + self.settings.warm)):
                factors[step] *= (step + 1 - self.done) / self.settings.warm
        else:
            for optimiser, state in zip(self.optimisers, saved["optimisers"], strict=True):
                optimiser.load_state_dict(state)
        if saved["carries"] is not None:
            self.carries = [Carry(*carry) for carry in saved["carries"]]
            self.fresh.fill_(False)
        say(f"{self.name}: continues at step {self.done}")

    def _lead(self) -> None:
        """Learning rates become numbers on the device, where a recorded step finds them."""
        if not self.cuda:
            return
        for optimiser in self.optimisers:
            for group in optimiser.param_groups:
                group["lr"] = torch.as_tensor(group["lr"], dtype=torch.float32, device=self.device)
                if "capturable" in group:
                    group["capturable"] = True

    def _on_stream(self):
        return torch.cuda.stream(self.stream) if self.cuda else contextlib.nullcontext()

    @property
    def finished(self) -> bool:
        return self.done >= self.steps

    def _window(self, step: int | Tensor) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        """Tokens and targets [rows, context], where memories start anew, and the targets' kinds, of a step."""
        context = self.settings.context
        places = step * context + torch.arange(context + 1, device=self.device)
        window = self.data.index_select(1, places).long()
        if not self.documents:
            return window[:, :-1], window[:, 1:], None, None
        ids, kinds = tokens_and_kinds(window)
        reset = ids[:, :-1] == 0  # END_OF_TEXT
        first = torch.arange(context, device=self.device) == 0
        return ids[:, :-1], ids[:, 1:], reset | (first & self.fresh), kinds[:, 1:]

    def _one(self) -> None:
        """One step, which depends on nothing but the device."""
        for optimiser in self.optimisers:
            optimiser.zero_grad(set_to_none=True)
        tokens, targets, reset, kinds = self._window(self.step)
        if self.documents:
            carries = self.carries
        else:
            keep = ~self.restarts.index_select(0, self.step)[0]
            carries = [carry.detached(keep) for carry in self.carries]
        losses, after = self.runner.losses(tokens, targets, carries, reset)
        loss = losses.mean() if kinds is None else (losses * self.weights[kinds]).mean()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.parameters, self.settings.clip)
        # no step is taken where something is not finite; asking the device each time would stall it
        finite = torch.isfinite(loss.detach()) & torch.isfinite(norm)
        self.bad.copy_(torch.where(finite | (self.bad >= 0), self.bad, self.step))
        for parameter in self.parameters:
            parameter.grad = torch.where(finite, parameter.grad, 0.0)
        set_rate(self.optimisers, self.factors.index_select(0, self.step)[0] if self.cuda else rate_at(self))
        for optimiser in self.optimisers:
            optimiser.step()
        losses = losses.detach().double()
        for kind in KINDS.values():
            among = torch.ones_like(losses) if kinds is None else (kinds == kind).double()
            self.sums[kind] += torch.stack(((losses * among).sum(), among.sum()))
            if kinds is None:
                break
        for carry, new in zip(self.carries, after, strict=True):
            for old, value in zip(carry, new, strict=True):
                old.copy_(value.detach())
        self.fresh.fill_(False)
        self.step += 1

    def advance(self) -> None:
        """Do a step, or on a GPU have it queued; log it where it is due.

        Raises:
            JobError: a loss that was not finite; names the step and the layer.
        """
        with self._on_stream():
            if self.eager == 0 and self.cuda:
                self._record()
            self.eager -= 1
            if self.graph is not None:
                self.graph.replay()
            else:
                self._one()
            self.done += 1
            if self.done % self.settings.log_every == 0 or self.finished or self.done == 1:
                self._log()

    def shorten(self, steps: int) -> None:
        """End after ``steps`` steps in all, if that is earlier, but not before the next one. The learning rate's
        schedule ends there too."""
        if steps < self.steps:
            self.steps = max(steps, self.done + 1)
            factors = [rate(step, self.steps) for step in range(self.done, self.steps)]
            with self._on_stream():
                self.factors[self.done : self.steps] = torch.tensor(factors, device=self.device)

    def _record(self) -> None:
        started = time.monotonic()
        try:
            self.graph = record(self._one)
        except RuntimeError as error:
            say(f"{self.name}: runs unrecorded, because recording a step failed: {' '.join(str(error).split())[:300]}")
        else:
            say(f"{self.name}: a step was recorded in {time.monotonic() - started:.0f} s")

    def _log(self) -> None:
        sums = self.sums.tolist()  # waits for the device
        bad = int(self.bad)
        self.runner.check_finite(bad, self._window(max(bad, 0))[0], self.carries)
        kinds = {kind: sums[at][0] / sums[at][1] for kind, at in KINDS.items() if sums[at][1]}
        tokens = (self.done - self.marked) * self.settings.batch * self.settings.context
        speed = tokens / (time.monotonic() - self.mark)
        left = (self.steps - self.done) * self.settings.batch * self.settings.context / speed
        loss = sum(nats for nats, _ in sums) / sum(count for _, count in sums)
        self.history.append({"step": self.done, "loss": loss, "tokens_per_second": speed})
        told = ""
        if self.documents:
            self.history[-1] |= kinds
            told = f" ({', '.join(f'{kind} {nats:.3f}' for kind, nats in kinds.items())})"
        memory = f", {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB" if self.cuda else ""
        say(
            f"{self.name}: step {self.done}/{self.steps}, loss {loss:.4f}{told}, {speed:,.0f} tokens/s, "
            f"{left:.0f} s left{memory}"
        )
        self.mark, self.marked = time.monotonic(), self.done
        self.sums.zero_()

    def wait(self) -> None:
        """Return when the device has done what was queued."""
        if self.cuda:
            self.stream.synchronize()

    def save(self) -> None:
        """Renew the checkpoint: all that continuing needs to the bit."""
        self.wait()
        state = {
            "model": self.model.state_dict(),
            "optimisers": [optimiser.state_dict() for optimiser in self.optimisers],
            "step": self.done,
            "history": self.history,
            "carries": [tuple(carry) for carry in self.carries],
        }
        self.checkpoint.parent.mkdir(parents=True, exist_ok=True)
        partial = self.checkpoint.with_suffix(".partial")
        torch.save(state, partial)
        partial.replace(self.checkpoint)

    def release(self) -> None:
        """Wait for the device, and give up the recording and its memory."""
        self.wait()
        self.graph = None
        for optimiser in self.optimisers:
            optimiser.zero_grad(set_to_none=True)
        self.optimisers, self.carries = [], []

    def report(self) -> dict[str, Any]:
        """What happened so far, as JSON values."""
        tokens = self.done * self.settings.batch * self.settings.context
        about = {"base": self.name, "settings": asdict(self.settings), "steps": self.done, "tokens": tokens}
        name = torch.cuda.get_device_name(self.device) if self.cuda else "CPU"
        if "surgery" in self.config:
            about["memory"] = self.config["surgery"]["options"]
        if self.failed:
            about["failed"] = self.failed
        return {**about, "torch": str(torch.__version__), "device": name, "history": self.history}


def exported(directory: Path, name: str) -> dict[str, Any]:
    """What a checkpoint holds, from an exported base: weights as they were rounded, no optimiser, empty memories.

    Raises:
        UsageError: the directory holds no such base.
    """
    try:
        report = json.loads((directory / "training.json").read_text(encoding="utf-8"))
        weights = load_file(directory / "model.safetensors")
    except (OSError, ValueError, SafetensorError) as error:
        raise UsageError(f"{directory}: no exported base with its training.json ({error})") from None
    if report.get("base") != name:
        raise UsageError(f"{directory}: base {report.get('base')}, not {name}")
    return {
        "model": weights, "optimisers": None, "step": report["steps"], "history": report["history"], "carries": None,
    }  # fmt: skip


def rate_at(training: Training) -> float:
    """The learning rate's factor at the step that comes next."""
    return training.factors[training.done].item()
