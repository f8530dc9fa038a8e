"""One phase, from the model it starts with to the model it leaves."""

from __future__ import annotations

import functools
import re
import shutil
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from safetensors.torch import load_file

from surgery.adaptation import capacity, checkpoints, data, saving, teaching
from surgery.adaptation.distiller import Distiller
from surgery.adaptation.monitoring import (
    METRICS,
    MetricsFile,
    TensorBoard,
    Watcher,
    Watchers,
    read_metrics,
    restore,
)
from surgery.adaptation.parameters import Selection, optimizer, select
from surgery.adaptation.schedules import BatchShape, DoseSchedule, batch_shape, learning_rate_factor
from surgery.adaptation.teaching import Body
from surgery.checkpoint import checksums
from surgery.checkpoint.reading import Checkpoint, raw_config
from surgery.checkpoint.staging import disk_errors_at
from surgery.errors import JobError, UsageError
from surgery.evaluation.loading import load_tokenizer
from surgery.graft.compiling import compiled_mixers, remark, wanted
from surgery.hosts import adapter_for, load_model, open_model
from surgery.recipe import Phase, Recipe
from surgery.recipe.kinds import objective

SAVES = 10  # checkpoints a phase, unless that leaves more than MOST_STEPS between two
MOST_STEPS = 200


@dataclass(frozen=True)
class Options:
    """How to run, none of which changes what is computed beyond rounding.

    Attributes:
        device: cpu or cuda. devices: processes that share the work; main: whether this one writes.
        micro_batch: sequences a forward; None: what fits.
        save_every: steps between checkpoints; None: a tenth of the phase.
        recompute: recompute activations in the backward pass: less memory, more time.
        watchers: made for each phase from its title; told of its steps.
        say: takes a remark for the user.
        measuring: a context within which a measurement runs; its value is told of stage, done and total.
    """

    device: str = "cpu"
    devices: int = 1
    main: bool = True
    micro_batch: int | None = None
    save_every: int | None = None
    recompute: bool = False
    watchers: Callable[[str], list[Watcher]] = field(default=lambda title: [])
    say: Callable[[str], None] = field(default=lambda text: None)
    measuring: Callable[[], AbstractContextManager] = nullcontext


def phase_folder(run: Path, index: int, phase: Phase) -> Path:
    """Where phase ``index`` (from 0) lives in a run directory."""
    return run / "phases" / f"{index + 1:02d}-{phase.label}"


def is_finished(folder: Path) -> bool:
    """Whether a phase has left its model; the directory gets its name when it is complete."""
    model = folder / "model"
    return model.is_dir() and any(model.iterdir())


def is_started(folder: Path) -> bool:
    """Whether a phase has a checkpoint or its model, so that its settings are fixed."""
    return is_finished(folder) or bool(checkpoints.complete(folder / "checkpoints"))


def dose_schedule(recipe: Recipe, index: int, current: float) -> DoseSchedule:
    """The dose of phase ``index`` for a model whose dose is ``current``.

    A phase that names no dose keeps the current one; where the start is exact and no phase names one, the first goes
    from the current dose to 1 over its first half.
    """
    start, stop, over = recipe.doses()[index]
    named = recipe.phases[index].dose
    if named is None or named.start is None:
        start = current
    if named is None and recipe.doses()[index][0] == recipe.doses()[index][1]:
        stop = current
    return DoseSchedule(start, stop, max(1, round(over * recipe.phases[index].total_steps)))


def current_dose(body: Body) -> float:
    """The dose of the swapped memories, which is one for all."""
    return float(body.model.get_submodule(next(iter(body.mixers.values())) + ".memory").dose)


def choose(recipe: Recipe, index: int, body: Body, dose: DoseSchedule) -> Selection:
    """The trained parameters of phase ``index``; all others are frozen.

    Raises:
        UsageError: see :func:`surgery.adaptation.parameters.select`; parameters outside the swapped mixers where the
            loss reaches these alone.
    """
    phase = recipe.phases[index]
    selection = select(body.model, body.mixers, phase.trainable, phase=phase.label, silent=dose.silent)
    if objective(phase.kind).mixers_only and selection.shared:
        raise recipe.error(
            ("phases", index, "trainable"),
            f"the loss of a {phase.kind} phase does not reach {sorted(selection.shared)[0]}",
            "name parameters of the swapped mixers, or use trainable: swapped",
        )
    return selection


def run_phase(
    recipe: Recipe,
    index: int,
    start: Path,
    base: Path,
    run: Path,
    options: Options,
    content: Sequence[str] = (),
) -> dict[str, Any]:
    """Run or resume phase ``index`` and write its model.

    Args:
        start: the checkpoint that the phase starts from.
        base: the teacher's checkpoint.
        run: the run directory.
        content: SHA-256 of what the phase's sources hold.

    Returns:
        Figures of the phase: steps, tokens, passes over the text, first and last loss, dose.

    Raises:
        UsageError: data or parameters that do not fit.
        JobError: a number that is not finite, no memory, no space on the disk.
    """
    phase = recipe.phases[index]
    folder = phase_folder(run, index, phase)
    source = open_model(start)
    body = _student(source, teaching.layers_since(source.config, raw_config(base)), options)
    dose = dose_schedule(recipe, index, current_dose(body))
    selection = choose(recipe, index, body, dose)
    memories = {layer: body.model.get_submodule(f"{name}.memory") for layer, name in body.mixers.items()}
    stored = functools.partial(adapter_for(source.config).disk_tensors, source.config, body.model)
    saving.require_places(source, saving.trained_tensors(selection, memories, body.mixers, stored))
    steps = phase.total_steps
    micro = options.micro_batch or capacity.sequences_a_forward(body.model, phase.context, options.device)
    shape = batch_shape(phase.sequences, phase.context, options.devices, micro)
    with PartialState().main_process_first():
        saved = _resume_from(folder, phase, options)
    if saved is None or checkpoints.step_of(saved) != steps:
        distiller = _distiller(phase, body, selection, open_model(base), options)
        body.model.train()
        with PartialState().main_process_first():
            items = _items(recipe, index, run, steps * shape.sequences, body, source, options, content)
        about = {"tokens": items.digest, "start": checksums.identity(start)}
        _require_same(about, saved, folder, phase, start)
        trainer = _trainer(recipe, index, run, distiller, selection, memories, shape, dose, items, about, options)
        _train(trainer, phase, saved, folder, options)
        body.model.eval()
        saved = checkpoints.complete(folder / "checkpoints")[-1]
    # the last checkpoint holds what is written, whether this process trained it or an earlier one
    with torch.no_grad():
        for name, tensor in load_file(saved / "model.safetensors").items():
            selection.trained[name].copy_(tensor)
        for memory in memories.values():
            memory.dose.fill_(dose.at(steps - 1))
    figures = {
        "steps": steps,
        "tokens": steps * shape.tokens,
        "sequences_per_step": shape.sequences,
        "trained_parameters": sum(parameter.numel() for parameter in selection.trained.values()),
        "dose": dose.at(steps - 1),
        **_losses(folder / METRICS),
    }
    if options.main:
        changed = saving.trained_tensors(selection, memories, body.mixers, stored)
        ties = adapter_for(source.config).ties(source.config)
        metrics = checksums.entry(folder / METRICS) if (folder / METRICS).is_file() else None
        about = {"figures": figures, "metrics": metrics}
        saving.write_model(folder / "model", source, changed, about, ties=ties)
    PartialState().wait_for_everyone()
    if options.main:
        shutil.rmtree(folder / "checkpoints")
    return figures


def _resume_from(folder: Path, phase: Phase, options: Options) -> Path | None:
    """The checkpoint that a phase goes on from, every byte of it as it was written; None: it starts at its beginning.

    The metrics go on from the steps that the checkpoint kept, whatever has become of the file since.
    """
    if not options.main:  # the main process has looked and removed what is damaged
        saved = checkpoints.complete(folder / "checkpoints")
        return saved[-1] if saved else None
    begun = any((folder / "checkpoints").glob("checkpoint-*"))
    last = checkpoints.last_whole(folder / "checkpoints", options.say)
    if begun and last is None:
        options.say(f"phase {phase.label}: no whole checkpoint is left, so the phase starts over")
    if last is not None and (last / METRICS).is_file() and restore(folder / METRICS, last / METRICS):
        options.say(f"{folder / METRICS}: is not what was written; restored up to step {checkpoints.step_of(last)}")
    return last


def _items(
    recipe: Recipe,
    index: int,
    run: Path,
    length: int,
    body: Body,
    source: Checkpoint,
    options: Options,
    content: Sequence[str],
) -> Any:
    phase = recipe.phases[index]
    vocabulary = body.model.config.vocab_size
    tokenizer = load_tokenizer(source.directory, vocabulary)
    about = {"content": content, "verify": options.main, "say": options.say}
    items = data.build(recipe, index, length, tokenizer, vocabulary, run / "data", **about)
    dropped = getattr(items, "dropped", 0)
    if dropped:
        options.say(f"phase {phase.label}: {dropped} examples are longer than a context and are left out")
    again = max(items.passes(len(items)))
    if again:
        options.say(f"phase {phase.label}: its text is shorter than the phase and is begun {again} more times")
    return items


def _require_same(about: dict[str, Any], saved: Path | None, folder: Path, phase: Phase, start: Path) -> None:
    """Refuse to go on from another model, or with other tokens, than those of the steps before.

    Args:
        about: what the phase has now; see :func:`surgery.adaptation.checkpoints.publish`.

    Raises:
        UsageError: naming the phase.
    """
    before = {} if saved is None else checksums.about(saved)
    why = {
        "tokens": "its data gives other tokens than before: a hub's data set or the library that tokenises has changed",
        "start": f"it was begun from another model than {start} is now",
    }
    for key, reason in why.items():
        if before.get(key) not in (None, about[key]):
            raise UsageError(
                f"phase {phase.label}: {reason}\n"
                f"  restore it, or remove {folder} to start the phase over from its beginning"
            )


def _student(source: Checkpoint, layers: list[int], options: Options) -> Body:
    model = load_model(source.directory, dtype=torch.float32, device=options.device)
    model.config.use_cache = False
    if options.recompute:
        # transformers 5.24 renames it
        getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
    return teaching.body_of(model, source.config, layers)


def _distiller(phase: Phase, body: Body, selection: Selection, base: Checkpoint, options: Options) -> Distiller:
    teacher, chosen = None, objective(phase.kind)
    if chosen.teaches:
        if selection.shared or not teaching.shares_weights(body, base):
            size = sum(entry.numel for entry in base.tensors.values())
            trained = sum(parameter.numel() for parameter in selection.trained.values())
            options.say(capacity.check_second_model(size, trained, phase.label, options.device))
            teacher = teaching.teacher_model(base, list(body.mixers), options.device)
            if chosen.mixers_only:
                students = {layer: body.model.get_submodule(name) for layer, name in body.mixers.items()}
                teacher.seat(students=students)
        else:
            body.seat(teachers=teaching.teacher_mixers(body, base))
    return Distiller(body, chosen.of(phase), teacher=teacher)


def _trainer(
    recipe: Recipe,
    index: int,
    run: Path,
    distiller: Distiller,
    selection: Selection,
    memories: dict[int, Any],
    shape: BatchShape,
    dose: DoseSchedule,
    items: Any,
    about: dict[str, Any],
    options: Options,
) -> Any:
    from surgery.adaptation.trainer import PhaseTrainer, Settings

    phase = recipe.phases[index]
    folder = phase_folder(run, index, phase)
    steps = phase.total_steps
    if options.main:
        (folder / "checkpoints").mkdir(parents=True, exist_ok=True)
        checkpoints.discard_unfinished(folder / "checkpoints")
    rates = phase.rates
    adam = optimizer(selection, rates.memory, rates.host)
    warmup, schedule = phase.warmup_steps, phase.schedule
    title = f"{index + 1}/{len(recipe.phases)} {phase.label}"
    members = [MetricsFile(folder / METRICS), TensorBoard(folder / "tensorboard"), *options.watchers(title)]
    return PhaseTrainer(
        distiller,
        Settings(
            folder / "checkpoints",
            steps,
            save_every=options.save_every or min(MOST_STEPS, max(1, steps // SAVES)),
            seed=data.phase_seed(recipe, index) % 2**32,
            device=options.device,
            half=options.device == "cuda",
        ),
        phase=phase.label,
        selection=selection,
        data=items,
        optimizer=adam,
        factor=lambda step: learning_rate_factor(step, steps, warmup, schedule),
        dose=dose,
        memories=memories,
        shape=shape,
        layer_of=layer_of,
        watcher=Watchers(members if options.main else []),
        about=about,
    )


def _train(trainer: Any, phase: Phase, saved: Path | None, folder: Path, options: Options) -> None:
    done = checkpoints.step_of(saved) if saved else 0
    if done:
        options.say(f"phase {phase.label}: resuming after step {done} of {phase.total_steps}")
    if note := remark(options.device):
        options.say(f"phase {phase.label}: {note}")
    trainer.watcher.begin(done, phase.total_steps)
    try:
        with disk_errors_at(folder), compiled_mixers(wanted(options.device)):
            trainer.train(saved)
    except torch.cuda.OutOfMemoryError as error:
        raise JobError(
            f"phase {phase.label}: out of GPU memory with {trainer.shape.micro} sequences of {phase.context} tokens a "
            "forward\nuse a smaller --micro-batch, or --recompute"
        ) from error
    finally:
        trainer.watcher.end()


def layer_of(name: str) -> str:
    """How an error calls the layer of a parameter."""
    match = re.search(r"\blayers\.(\d+)\.", name)
    return f"layer {match[1]}" if match else name


def _losses(path: Path) -> dict[str, Any]:
    rows = read_metrics(path)
    if not rows:
        return {}
    tail = rows[-max(1, len(rows) // 10) :]
    return {
        "first_loss": rows[0]["loss"],
        "last_loss": sum(row["loss"] for row in tail) / len(tail),
        "passes": rows[-1]["passes"],
    }

