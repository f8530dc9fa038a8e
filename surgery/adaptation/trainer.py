"""The trainer of one phase: transformers' Trainer with this project's batches, losses, dose and checkpoints."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments

from surgery.adaptation import checkpoints
from surgery.adaptation.batches import MicroBatches
from surgery.adaptation.distiller import Distiller
from surgery.adaptation.monitoring import METRICS, Step, Watcher
from surgery.adaptation.parameters import MAX_GRAD_NORM, Selection
from surgery.adaptation.schedules import BatchShape, DoseSchedule
from surgery.adaptation.watchdog import check_gradients, check_loss
from surgery.checkpoint.files import copy_file
from surgery.errors import JobError
from surgery.memory.base import MemoryRule

WEIGHTS = "model.safetensors"  # in a checkpoint: the trained parameters alone, everything else being in the run
LESSON_BYTES = 1 << 30  # the teacher's part of a whole step is kept up to this size, beyond it it is made twice


def arguments(
    folder: Path, *, steps: int, shape: BatchShape, save_every: int, seed: int, device: str
) -> TrainingArguments:
    """TrainingArguments for a phase: no evaluation, no logging and no integrations of its own; float32 weights, with
    bfloat16 autocast on a GPU."""
    args = TrainingArguments(
        output_dir=str(folder),
        max_steps=steps,
        per_device_train_batch_size=1,  # an item is a whole micro-batch
        gradient_accumulation_steps=shape.forwards,
        max_grad_norm=MAX_GRAD_NORM,
        train_sampling_strategy="sequential",  # the data set itself is in its final order
        dataloader_num_workers=0,
        dataloader_pin_memory=device == "cuda",
        remove_unused_columns=False,
        label_names=["targets"],
        save_strategy="steps",
        save_steps=save_every,
        logging_strategy="no",
        logging_nan_inf_filter=False,
        report_to="none",
        disable_tqdm=True,
        log_level="error",
        log_level_replica="error",
        bf16=device == "cuda",
        use_cpu=device == "cpu",
        seed=seed,
        ddp_find_unused_parameters=False,
        ddp_broadcast_buffers=False,
    )
    args.device  # noqa: B018 - decides the devices, which the next line corrects
    args._n_gpu = min(args._n_gpu, 1)  # one process drives one device; DataParallel would split micro-batches again
    return args


class PhaseTrainer(Trainer):
    """Runs the steps of one phase.

    Args:
        distiller: the module that is trained.
        selection: its trained parameters, under the names that a checkpoint gives them.
        data: a data set of ``steps`` x sequences items, in order.
        optimizer, scheduler: over the selection's parameters.
        dose: what every memory in ``memories`` is set to, step by step.
        layer_of: the name of a parameter -> how an error calls its layer.
        watcher: told of every step, on the main process.
        about: what each checkpoint keeps beside its files' checksums.

    Raises:
        JobError: from ``train``, where a loss or a gradient is not finite; it names step and layer, and the last
            complete checkpoint stays as it is.
    """

    loss_is_scaled_for_ga = True  # means are over the whole step already

    def __init__(
        self,
        distiller: Distiller,
        args: TrainingArguments,
        *,
        phase: str,
        selection: Selection,
        data: Any,
        optimizer: torch.optim.Optimizer,
        scheduler: torch.optim.lr_scheduler.LambdaLR,
        dose: DoseSchedule,
        memories: Mapping[int, MemoryRule],
        shape: BatchShape,
        layer_of: Callable[[str], str],
        watcher: Watcher,
        about: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(
            model=distiller,
            args=args,
            data_collator=itemgetter(0),
            train_dataset=MicroBatches(data, shape, args.max_steps),
            optimizers=(optimizer, scheduler),
            callbacks=[_Reporter(self)],
        )
        self.remove_callback(PrinterCallback)
        self.phase, self.selection, self.shape, self.data = phase, selection, shape, data
        self.dose, self.memories = dose, memories
        self.layer_of, self.watcher, self.about = layer_of, watcher, about
        self.terms: Tensor | None = None
        self.gradient_norm = 0.0
        self._saving = False

    # a step's batch: what its means are over, and the teacher's part

    def get_batch_samples(
        self, epoch_iterator: Iterator, num_batches: int, device: torch.device
    ) -> tuple[list, Tensor | None]:
        samples, _ = super().get_batch_samples(epoch_iterator, num_batches, device)
        if not samples:
            return samples, None
        distiller: Distiller = self.accelerator.unwrap_model(self.model)
        samples = [self._prepare_inputs(sample) for sample in samples]
        count = torch.stack([distiller.counted(**sample) for sample in samples]).sum()
        count = self.accelerator.reduce(count, "sum")
        if not count:
            raise JobError(
                f"phase {self.phase}, step {self.state.global_step + 1}: the batch holds no token that is scored\n"
                "raise batch, so that each holds an answer"
            )
        if distiller.has_boundaries and (len(samples) > 1 or self.shape.devices > 1):
            self._teach(distiller, samples)
        return samples, count

    def _teach(self, distiller: Distiller, samples: list[dict[str, Any]]) -> None:
        """Give each micro-batch the teacher's mean square over the whole step, and its lesson while there is room."""
        squares, lessons, size = None, [], 0
        for sample in samples:
            with self.accelerator.autocast():
                lesson = distiller.teach(**sample)
            part = distiller.squares_of(lesson, sample.get("mask"))
            squares = part if squares is None else squares + part
            size += lesson.nbytes()
            lessons.append(lesson if size <= LESSON_BYTES else None)
        squares = self.accelerator.reduce(squares, "sum")
        for sample, lesson in zip(samples, lessons, strict=True):
            sample["squares"], sample["lesson"] = squares, lesson

    def compute_loss(
        self, model: nn.Module, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        outputs = model(**inputs, count=num_items_in_batch)
        terms = outputs["terms"]
        self.terms = terms if self.terms is None else self.terms + terms
        # gradients are averaged over devices, and each device's loss is its share of the step's
        loss = outputs["loss"] * self.shape.devices
        return (loss, outputs) if return_outputs else loss

    def training_step(self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None) -> Tensor:
        loss = super().training_step(model, inputs, num_items_in_batch)
        where = f"phase {self.phase}, step {self.state.global_step + 1}"
        remedy = self._remedy()
        check_loss(loss, inputs, self.accelerator.unwrap_model(model), where, remedy)
        if self.accelerator.sync_gradients:
            self.gradient_norm = check_gradients(self.selection.trained, self.layer_of, where, remedy)
        return loss / self.shape.devices

    def _remedy(self) -> str:
        saved = checkpoints.complete(Path(self.args.output_dir))
        last = f"the checkpoint of step {checkpoints.step_of(saved[-1])} is untouched" if saved else "no checkpoint yet"
        return f"{last}; lower learning_rate or lengthen warmup, remove the phase's directory, and run again"

    # checkpoints

    def _get_output_dir(self, trial: Any = None) -> str:
        folder = Path(self.args.output_dir)
        return str(checkpoints.staging(folder) if self._saving else folder)

    def _save_checkpoint(self, model: nn.Module, trial: Any = None) -> None:
        folder = Path(self.args.output_dir)
        self._saving = True
        try:
            super()._save_checkpoint(model, trial)
        finally:
            self._saving = False
        self.accelerator.wait_for_everyone()
        if self.args.should_save:
            name = f"checkpoint-{self.state.global_step}"
            partial = checkpoints.staging(folder) / name
            if (metrics := folder.parent / METRICS).is_file():  # every step up to this one; a resume begins with them
                copy_file(metrics, partial / METRICS)
            checkpoints.publish(partial, folder / name, self.about)
            shutil.rmtree(checkpoints.staging(folder), ignore_errors=True)
            checkpoints.prune(folder)
        self.accelerator.wait_for_everyone()

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """The trained parameters, in float32."""
        if self.args.should_save:
            folder = Path(output_dir or self.args.output_dir)
            folder.mkdir(parents=True, exist_ok=True)
            tensors = {name: p.detach().cpu().contiguous() for name, p in self.selection.trained.items()}
            save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})

    @torch.no_grad()
    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        saved = load_file(Path(resume_from_checkpoint) / WEIGHTS)
        if saved.keys() != self.selection.trained.keys():
            odd = sorted(saved.keys() ^ self.selection.trained.keys())[0]
            raise JobError(f"{resume_from_checkpoint}: {odd} is trained now or then but not both; start the phase over")
        for name, parameter in self.selection.trained.items():
            parameter.copy_(saved[name])


class _Reporter(TrainerCallback):
    """Sets the dose before each step and reports after it."""

    def __init__(self, trainer: PhaseTrainer) -> None:
        self.trainer = trainer
        self.started = 0.0

    def on_train_begin(self, args, state, control, **_: Any) -> None:
        self.started = time.perf_counter()

    def on_step_begin(self, args, state, control, **_: Any) -> None:
        dose = self.trainer.dose.at(state.global_step)
        for memory in self.trainer.memories.values():
            memory.dose.fill_(dose)

    def on_optimizer_step(self, args, state, control, **_: Any) -> None:
        # the rates this step used; the scheduler moves on next
        self.rates = {group["name"]: group["lr"] for group in self.trainer.optimizer.param_groups}

    def on_step_end(self, args, state, control, **_: Any) -> None:
        trainer = self.trainer
        terms = trainer.accelerator.reduce(trainer.terms, "sum").tolist()
        trainer.terms = None
        now = time.perf_counter()
        seconds, self.started = now - self.started, now
        if not state.is_world_process_zero:
            return
        distiller: Distiller = trainer.accelerator.unwrap_model(trainer.model)
        sequences = trainer.shape.sequences * state.global_step
        trainer.watcher.step(
            Step(
                step=state.global_step,
                tokens=sequences * trainer.shape.context,
                loss=distiller.weighted(terms),
                terms=dict(zip(distiller.terms, terms, strict=True)),
                learning_rate=self.rates,
                dose=trainer.dose.at(state.global_step - 1),
                gradient_norm=trainer.gradient_norm,
                tokens_per_second=trainer.shape.tokens / seconds,
                passes=max(trainer.data.passes(sequences)),
            )
        )
