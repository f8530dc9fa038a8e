"""The steps of one phase: a short loop over accelerate, with this project's batches, losses, dose and checkpoints."""

from __future__ import annotations

import contextlib
import math
import shutil
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, DistributedDataParallelKwargs
from accelerate.utils import set_seed
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from surgery.adaptation import checkpoints
from surgery.adaptation.batches import MicroBatches
from surgery.adaptation.distiller import Distiller
from surgery.adaptation.monitoring import METRICS, Step, Watcher
from surgery.adaptation.parameters import MAX_GRAD_NORM, Selection
from surgery.adaptation.schedules import BatchShape, DoseSchedule
from surgery.adaptation.watchdog import explain_gradients, explain_loss, require_gradients
from surgery.checkpoint.files import copy_file
from surgery.errors import JobError
from surgery.memory.base import MemoryRule

WEIGHTS = "model.safetensors"  # in a checkpoint: the trained parameters alone, everything else being in the run
OPTIMIZER = "optimizer.pt"
RANDOM = "random-{}.pt"  # one a process: torch's generators, which dropout draws from
LESSON_BYTES = 1 << 30  # the teacher's part of a whole step is kept up to this size, beyond it it is made twice


@dataclass(frozen=True)
class Settings:
    """How a phase runs.

    Attributes:
        folder: where checkpoints go. save_every: steps between two; the last step always leaves one.
        steps: optimizer steps.
        seed: of torch's generators at the first step.
        device: cpu or cuda.
        half: forward passes under bfloat16 autocast; weights, gradients and the optimizer stay in float32.
    """

    folder: Path
    steps: int
    save_every: int
    seed: int
    device: str
    half: bool = False


class PhaseTrainer:
    """Runs the steps of one phase.

    Args:
        distiller: the module that is trained.
        selection: its trained parameters, under the names that a checkpoint gives them.
        data: a data set of ``steps`` x sequences items, in order.
        optimizer: over the selection's parameters. Its groups' rates are the peaks.
        factor: step, from 0 -> what the rates are multiplied by.
        dose: what every memory in ``memories`` is set to, step by step.
        layer_of: the name of a parameter -> how an error calls its layer.
        watcher: told of every step, on the main process.
        about: what each checkpoint keeps beside its files' checksums.
    """

    def __init__(
        self,
        distiller: Distiller,
        settings: Settings,
        *,
        phase: str,
        selection: Selection,
        data: Any,
        optimizer: torch.optim.Optimizer,
        factor: Callable[[int], float],
        dose: DoseSchedule,
        memories: Mapping[int, MemoryRule],
        shape: BatchShape,
        layer_of: Callable[[str], str],
        watcher: Watcher,
        about: Mapping[str, Any] | None = None,
    ) -> None:
        self.distiller, self.settings, self.phase = distiller, settings, phase
        self.selection, self.data, self.shape = selection, data, shape
        self.optimizer, self.factor = optimizer, factor
        self.dose, self.memories = dose, memories
        self.layer_of, self.watcher, self.about = layer_of, watcher, about
        self.batches = MicroBatches(data, shape, settings.steps)
        self.peaks = [group["lr"] for group in optimizer.param_groups]
        sharing = DistributedDataParallelKwargs(find_unused_parameters=False, broadcast_buffers=False)
        self.accelerator = Accelerator(mixed_precision="no", cpu=settings.device == "cpu", kwargs_handlers=[sharing])
        with warnings.catch_warnings():
            # torch renames an argument that accelerate passes
            warnings.filterwarnings("ignore", "`broadcast_buffers` is deprecated", FutureWarning)
            self.model: nn.Module = self.accelerator.prepare_model(distiller, device_placement=False)

    def train(self, checkpoint: Path | None = None) -> None:
        """Run all steps, or those after ``checkpoint``.

        Raises:
            JobError: a loss or a gradient is not finite; it names step and layer, and the last complete checkpoint
                stays as it is. A batch that holds nothing to learn, or a checkpoint of other parameters.
        """
        set_seed(self.settings.seed)
        done = 0 if checkpoint is None else self._load(checkpoint)
        self.model.train()
        started = time.perf_counter()
        for step in range(done, self.settings.steps):
            self._set(step)
            figures = self.step(step)
            now = time.perf_counter()
            if self.accelerator.is_main_process:
                self._report(step, figures, now - started)
            started = now
            if (step + 1) % self.settings.save_every == 0 or step + 1 == self.settings.steps:
                self._save(step + 1)

    def step(self, step: int) -> tuple[float, list[float]]:
        """One optimizer step; the norm of its gradients before clipping, and the loss's terms over all devices."""
        samples, count = self._samples(step)
        losses, terms = [], None
        for number, sample in enumerate(samples):
            last = number + 1 == len(samples)
            with contextlib.nullcontext() if last else self.accelerator.no_sync(self.model):
                with self._autocast():
                    outputs = self.model(**sample, count=count)
                # gradients are averaged over devices, and each device's loss is its share of the step's
                loss = outputs["loss"].float() * self.shape.devices
                loss.backward()
            losses.append(loss.detach())
            part = outputs["terms"].float()
            terms = part if terms is None else terms + part
        terms = self.accelerator.reduce(terms, "sum")
        require_gradients(self.selection.trained, self.layer_of, self._where(step))
        norms = torch.stack(torch._foreach_norm([p.grad for p in self.selection.trained.values()]))
        norm = torch.linalg.vector_norm(norms)
        # what is looked at is read at once: each reading waits for all that a GPU has been given
        read = torch.cat([torch.stack(losses), norm[None], terms]).tolist()
        found, total, figures = read[: len(losses)], read[len(losses)], read[len(losses) + 1 :]
        if not all(map(math.isfinite, (*found, total))):
            self._explain(step, samples, found, norms)
        torch.nn.utils.clip_grads_with_norm_(self.selection.trained.values(), MAX_GRAD_NORM, norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return total, figures

    # a step's batch: what its means are over, and the teacher's part

    def _samples(self, step: int) -> tuple[list[dict[str, Any]], Tensor]:
        first = step * self.shape.parts + self.accelerator.process_index
        parts = range(first, (step + 1) * self.shape.parts, self.shape.devices)
        batches = [self.batches[part] for part in parts]
        count = torch.stack([self.distiller.counted(**batch) for batch in batches]).sum()
        if self.shape.devices > 1:
            count = self.accelerator.reduce(count.to(self.settings.device), "sum")
        if not count:
            raise JobError(
                f"{self._where(step)}: the batch holds no token that is scored\n"
                "raise batch, so that each holds an answer"
            )
        samples = [self._placed(batch) for batch in batches]
        if self.distiller.objective.reads_residuals and (len(samples) > 1 or self.shape.devices > 1):
            self._teach(samples)
        return samples, count.to(self.settings.device)

    def _placed(self, sample: dict[str, Tensor]) -> dict[str, Any]:
        if self.settings.device == "cpu":
            return dict(sample)
        return {key: tensor.pin_memory().to("cuda", non_blocking=True) for key, tensor in sample.items()}

    def _teach(self, samples: list[dict[str, Any]]) -> None:
        """Give each micro-batch the teacher's mean square over the whole step, and its lesson while there is room."""
        squares, lessons, size = None, [], 0
        for sample in samples:
            with self._autocast():
                lesson = self.distiller.teach(**sample)
            part = self.distiller.squares_of(lesson, sample.get("mask"))
            squares = part if squares is None else squares + part
            size += lesson.nbytes()
            lessons.append(lesson if size <= LESSON_BYTES else None)
        squares = self.accelerator.reduce(squares, "sum")
        for sample, lesson in zip(samples, lessons, strict=True):
            sample["squares"], sample["lesson"] = squares, lesson

    def _autocast(self) -> contextlib.AbstractContextManager:
        return torch.autocast(self.settings.device, torch.bfloat16, enabled=self.settings.half)

    def _set(self, step: int) -> None:
        """What depends on the step alone: rates and dose."""
        factor = self.factor(step)
        for group, peak in zip(self.optimizer.param_groups, self.peaks, strict=True):
            group["lr"] = peak * factor
        for memory in self.memories.values():
            memory.dose.fill_(self.dose.at(step))

    # what is said

    def _where(self, step: int) -> str:
        return f"phase {self.phase}, step {step + 1}"

    def _explain(self, step: int, samples: list[dict[str, Any]], losses: list[float], norms: Tensor) -> None:
        """Raise for the first number of a step that is not finite."""
        saved = checkpoints.complete(self.settings.folder)
        last = f"the checkpoint of step {checkpoints.step_of(saved[-1])} is untouched" if saved else "no checkpoint yet"
        remedy = f"{last}; lower learning_rate or lengthen warmup, remove the phase's directory, and run again"
        for sample, loss in zip(samples, losses, strict=True):
            if not math.isfinite(loss):
                explain_loss(loss, sample, self.distiller, self._where(step), remedy)
        explain_gradients(self.selection.trained, norms.tolist(), self.layer_of, self._where(step), remedy)

    def _report(self, step: int, figures: tuple[float, list[float]], seconds: float) -> None:
        norm, terms = figures
        sequences = self.shape.sequences * (step + 1)
        self.watcher.step(
            Step(
                step=step + 1,
                tokens=sequences * self.shape.context,
                loss=self.distiller.objective.weighted(terms),
                terms=dict(zip(self.distiller.terms, terms, strict=True)),
                learning_rate={group["name"]: group["lr"] for group in self.optimizer.param_groups},
                dose=self.dose.at(step),
                gradient_norm=norm,
                tokens_per_second=self.shape.tokens / seconds,
                passes=max(self.data.passes(sequences)),
            )
        )

    # checkpoints

    def _save(self, step: int) -> None:
        folder = self.settings.folder
        name = f"checkpoint-{step}"
        partial = checkpoints.staging(folder) / name
        if self.accelerator.is_main_process:
            partial.mkdir(parents=True, exist_ok=True)
        self.accelerator.wait_for_everyone()
        state = {"cpu": torch.get_rng_state()}
        if self.settings.device == "cuda":
            state["cuda"] = torch.cuda.get_rng_state()
        torch.save(state, partial / RANDOM.format(self.accelerator.process_index))
        self.accelerator.wait_for_everyone()
        if self.accelerator.is_main_process:
            tensors = {name: p.detach().cpu().contiguous() for name, p in self.selection.trained.items()}
            save_file(tensors, partial / WEIGHTS, metadata={"format": "pt"})
            torch.save(self.optimizer.state_dict(), partial / OPTIMIZER)
            if (metrics := folder.parent / METRICS).is_file():  # every step up to this one; a resume begins with them
                copy_file(metrics, partial / METRICS)
            checkpoints.publish(partial, folder / name, self.about)
            shutil.rmtree(checkpoints.staging(folder), ignore_errors=True)
            checkpoints.prune(folder)
        self.accelerator.wait_for_everyone()

    @torch.no_grad()
    def _load(self, checkpoint: Path) -> int:
        """Go back to what :meth:`_save` wrote; its step."""
        saved = load_file(checkpoint / WEIGHTS)
        if saved.keys() != self.selection.trained.keys():
            odd = sorted(saved.keys() ^ self.selection.trained.keys())[0]
            raise JobError(f"{checkpoint}: {odd} is trained now or then but not both; start the phase over")
        for name, parameter in self.selection.trained.items():
            parameter.copy_(saved[name])
        self.optimizer.load_state_dict(torch.load(checkpoint / OPTIMIZER, map_location="cpu", weights_only=True))
        # more processes than before begin with the seed's state, as do runs of a version that wrote another file
        if (file := checkpoint / RANDOM.format(self.accelerator.process_index)).is_file():
            state = torch.load(file, weights_only=True)
            torch.set_rng_state(state["cpu"])
            if "cuda" in state and self.settings.device == "cuda":
                torch.cuda.set_rng_state(state["cuda"])
        return checkpoints.step_of(checkpoint)
