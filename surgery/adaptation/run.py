"""A run: a recipe's swap and its phases, in one directory, resumed where it stopped.

    RUN/recipe.yaml                       the recipe, word for word
    RUN/run.json                          what was resolved, and where each phase stands
    RUN/data.json                         the commits of the hub's data sets that it reads, where it reads any
    RUN/applied/                          the checkpoint that the phases start from
    RUN/phases/NN-name/metrics.jsonl      one line a step; tensorboard/ beside it
    RUN/phases/NN-name/checkpoints/       while the phase runs
    RUN/phases/NN-name/model/             once it is finished
    RUN/evaluation/before.json, after.json

A phase is finished when its model directory is there, which appears in one step. Settings and data of a phase that has
begun are fixed; those of later phases, and of evaluation and export, may still be changed. One process holds the run,
and every model and checkpoint in it carries the checksums of its files in complete.json.
"""

from __future__ import annotations

import shutil
from collections.abc import Collection, Mapping
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState

import surgery
from surgery import kernel_check
from surgery.adaptation import data, inputs, measuring
from surgery.adaptation.capacity import check_second_model
from surgery.adaptation.continuing import (
    RECIPE,
    check_files,
    continued,
    goes_on_from,
    note_in_force,
    phase_records,
    remove_leftovers,
)
from surgery.adaptation.phases import (
    Options,
    choose,
    current_dose,
    dose_schedule,
    is_finished,
    is_started,
    phase_folder,
    run_phase,
)
from surgery.adaptation.schedules import batch_shape
from surgery.adaptation.teaching import body_of, layers_since, shares_weights
from surgery.checkpoint.checksums import COMPLETE, require_whole, write_checksums
from surgery.checkpoint.manifest import FILE, SCHEMA, RunManifest, write_manifest
from surgery.checkpoint.reading import Checkpoint, raw_config
from surgery.checkpoint.staging import claimed_run, staged_directory, write_atomic
from surgery.environment import in_force, shielded
from surgery.errors import JobError, UsageError
from surgery.evaluation.loading import load_tokenizer, locate, reads_alike
from surgery.hosts import adapter_for, commit, load_model, open_model, read_config, resolve
from surgery.kernels import dispatch
from surgery.memory import create
from surgery.plan import why_inexact
from surgery.recipe import Recipe
from surgery.recipe.kinds import objective


def distill(
    recipe: Recipe,
    run: Path,
    *,
    start: str | None = None,
    options: Options | None = None,
    evaluate: bool = True,
    offline: bool | None = None,
) -> dict[str, Any]:
    """Apply a recipe where that has not been done, and run the phases that are not finished.

    Args:
        run: the run directory, new or of an earlier call with the same recipe.
        start: a checkpoint to start from instead of applying the recipe to its base.
        evaluate: measure the base before the phases and the result after them.

    Returns:
        What ``surgery distill --json`` writes: the run's manifest, its model, and the reports' figures.

    Raises:
        UsageError: the recipe, its data or its evaluation do not allow it, the run was begun with other settings or
            inputs, another process holds it, or the model that it goes on from is damaged.
        JobError: the swap drifts too far, a number is not finite, memory or disk are full.
    """
    options = options or Options()
    with claimed_run(run) if options.main else nullcontext(), shielded(options.device, options.say) as ignored:
        return _distill(recipe, run, start, options, evaluate, offline, ignored)


def _distill(
    recipe: Recipe,
    run: Path,
    start: str | None,
    options: Options,
    evaluate: bool,
    offline: bool | None,
    ignored: list[str],
) -> dict[str, Any]:
    # the other processes wait while the first tokenises or measures, however long that takes
    state = PartialState(cpu=options.device == "cpu", timeout=timedelta(days=7))
    with state.main_process_first(), recipe.at(("model",)):  # it downloads, or converts, where that is needed
        base = resolve(recipe.model, recipe.revision, offline)
    with state.main_process_first():
        manifest = _begin(recipe, run, base, start, options, evaluate)
    starts = [run / "applied", *(phase_folder(run, i, p) / "model" for i, p in enumerate(recipe.phases))]
    pending = [i for i, phase in enumerate(recipe.phases) if not is_finished(phase_folder(run, i, phase))]
    first = pending[0] if pending else len(recipe.phases)
    stale = [i for i in range(first + 1, len(recipe.phases)) if is_started(phase_folder(run, i, recipe.phases[i]))]
    if stale:
        raise UsageError(
            f"{run}: phase {recipe.phases[first].label} is not finished, but the later phase "
            f"{recipe.phases[stale[0]].label} has begun\n"
            f"  it was made from another model: remove {phase_folder(run, stale[0], recipe.phases[stale[0]])}"
        )
    after = run / "evaluation" / "after.json"
    evaluate = evaluate and bool(recipe.phases)
    if pending:
        check_kernels(manifest.rule, options.device, _mixer_widths(starts[first]))
    if pending or (evaluate and not measuring.is_report(after)):
        _check(recipe, starts[first], base, pending, options, evaluate)
    baseline = None
    if evaluate and options.main and not measuring.is_report(run / "evaluation" / "before.json"):
        baseline, report = measuring.figures(recipe, base, "base", options)
        measuring.write_report(run, "before", report, recipe)
    if pending:
        note_in_force(manifest, in_force(options.device, options.devices, ignored), options)
    state.wait_for_everyone()
    for index in range(len(recipe.phases)):
        record = manifest.phases[index]
        if index not in pending:
            continue
        after.unlink(missing_ok=True)
        record.status = "running"
        _write(run, manifest, options)
        content = [found.sha256 for found in record.data or ()]
        figures = run_phase(recipe, index, starts[index], base, run, options, content)
        record.status, record.figures = "finished", figures
        _write(run, manifest, options)
        state.wait_for_everyone()
    if evaluate and options.main and not measuring.is_report(after):
        if baseline is None:
            baseline, _ = measuring.figures(recipe, base, "base", options)
        _, report = measuring.figures(recipe, starts[-1], recipe.name, options, baseline)
        measuring.write_report(run, "after", report, recipe, starts[-1])
    if options.main:
        shutil.rmtree(run / "data", ignore_errors=True)
    return {
        "schema": 1,
        "kind": "distill",
        "run": str(run),
        "model": str(starts[-1]),
        "manifest": manifest.model_dump(mode="json", by_alias=True),
        "evaluation": {
            name: str(path) for name in ("before", "after") if (path := run / "evaluation" / f"{name}.json").is_file()
        },
    }


def _begin(
    recipe: Recipe, run: Path, base: Path, start: str | None, options: Options, evaluate: bool
) -> RunManifest:
    """The manifest of a new run, or of an old one that the recipe may continue. Applies where nothing is applied."""
    if (run / FILE).is_file():
        manifest = continued(recipe, run, base)
    elif _holds_others(run, recipe):
        raise UsageError(f"--run {run}: holds files but no {FILE}, so it is no run\n  name a new or empty directory")
    else:
        manifest = None
    applied = run / "applied"
    drift = manifest.drift if manifest else None
    made = manifest is None and not (applied / COMPLETE).is_file()
    if not applied.is_dir() or not any(applied.iterdir()):
        if start is None:
            drift = _apply(recipe, applied, base, options, evaluate)
        else:
            source = _start(start)
            _swap(recipe, source, base)  # before it is copied
            drift = _copy(source, applied)
        made = True
    elif manifest is None and start is not None:
        _check_same(_start(start), applied)
    if options.main:
        remove_leftovers(run)
        if made:
            write_checksums(applied)
        check_files(recipe, run, options, old=manifest is not None and manifest.schema_version == 1)
    swap = _swap(recipe, goes_on_from(recipe, run), base)
    if manifest is None:
        manifest = RunManifest(
            surgery=surgery.__version__,
            recipe=recipe.name,
            base=recipe.model,
            revision=commit(base),
            layers=swap["layers"],
            rule=swap["rule"],
            exact=_is_exact(open_model(applied), open_model(base)),
            drift=drift,
            inputs=inputs.of_base(base),
        )
    manifest.schema_version = SCHEMA
    manifest.recipe, manifest.overrides = recipe.name, list(recipe.overrides)
    manifest.phases = phase_records(recipe, run, manifest)
    if options.main:
        write_atomic(run / RECIPE, recipe.text)
        write_manifest(run, manifest)
    return manifest


def _holds_others(run: Path, recipe: Recipe) -> bool:
    """Whether a directory holds anything but the beginnings of a run that was killed before it had its manifest."""
    if not run.is_dir():
        return False
    others = [entry for entry in run.iterdir() if entry.name != "applied" and not entry.name.startswith(".")]
    begun = [run / RECIPE] if (run / RECIPE).is_file() and (run / RECIPE).read_bytes() == recipe.text.encode() else []
    return others not in ([], begun)


def _apply(recipe: Recipe, applied: Path, base: Path, options: Options, evaluate: bool) -> dict[str, Any] | None:
    from surgery.operation import Events, apply
    from surgery.preflight import Job, preflight

    class Notes(Events):
        def note(self, text: str) -> None:
            options.say(text)

    options.say(f"applying {recipe.name}")
    job = Job(evaluates=evaluate, devices=options.devices)
    with options.measuring() as watch:
        ready = preflight(recipe, job, base=base, progress=watch)
    return apply(recipe, applied, device=options.device, events=Notes(), ready=ready).drift


def _start(name: str) -> Path:
    try:
        found = locate(name).path
        require_whole(found)
        return found
    except UsageError as error:
        raise UsageError(f"--from {error}") from None


def _copy(source: Path, applied: Path) -> None:
    """A run owns the checkpoint that it starts from."""
    checkpoint = open_model(source)
    with staged_directory(applied, checkpoint.weight_bytes) as staging:
        shutil.copytree(source, staging, dirs_exist_ok=True, ignore=shutil.ignore_patterns(COMPLETE))


def _check_same(source: Path, applied: Path) -> None:
    sizes = [
        {p.name: p.stat().st_size for p in folder.iterdir() if p.suffix in (".safetensors", ".json")}
        for folder in (source, applied)
    ]
    for found in sizes:
        found.pop(COMPLETE, None)
    if sizes[0] != sizes[1]:
        raise UsageError(f"--from {source}: {applied} holds another checkpoint already\n  name a new --run")


def _swap(recipe: Recipe, applied: Path, base: Path) -> dict[str, Any]:
    """What the starting checkpoint says was swapped, checked against the recipe; what the base had swapped before
    stays."""
    swap = raw_config(applied).get("surgery") or {}
    if not swap.get("layers"):
        raise UsageError(f"{applied}: no layer of this checkpoint was swapped\n  make one with: surgery apply RECIPE")
    earlier = (raw_config(base).get("surgery") or {}).get("layers", [])
    rules = {rule for layer, (rule, _) in _rules(applied).items() if layer not in earlier}
    if rules and rules != {recipe.memory.rule}:
        found = " and ".join(sorted(rules))
        raise recipe.error(("memory", "rule"), f"{applied} holds {found} memories", f"write rule: {found}")
    if isinstance(recipe.layers, tuple) and sorted({*recipe.layers, *earlier}) != sorted(swap["layers"]):
        raise recipe.error(("layers",), f"{applied} was swapped in layers {swap['layers']}", "name the same layers")
    return swap


def _rules(checkpoint: Path) -> Mapping[int, tuple[str, dict[str, Any]]]:
    """Swapped layer -> its rule and the rule's options."""
    from surgery.models.configuration import Swap

    config = read_config(checkpoint)
    return Swap.of(adapter_for(config).parse(config)).rules


def _is_exact(applied: Checkpoint, base: Checkpoint) -> bool:
    """Whether the starting checkpoint computes what the base does: its tensors, and memories at an exact limit."""
    adapter = adapter_for(base.config)
    earlier = (base.config.get("surgery") or {}).get("layers", [])
    for layer, (rule, options) in _rules(applied.directory).items():
        if layer in earlier:
            continue
        memory = create(rule, adapter.geometry(base.config, layer), **options)
        dose = float(applied.read(f"{adapter.tensor_prefix(applied.config, layer)}memory.dose"))
        if why_inexact(rule, adapter.name, dose, memory.exact_limit) is not None:
            return False
    return all(name in applied.tensors and applied.read(name).equal(base.read(name)) for name in base.tensors)


def check_kernels(rule: str, device: str, widths: Collection[tuple[int, int]]) -> None:
    """Compare what runs in Triton with the sequential rules on the device, before hours are trained with it: the form
    of ``rule``, and the parts of the hosts' own rules, at the model's own widths, since a kernel is compiled for each.

    Args:
        widths: key and value width of every kind of mixer that is swapped.

    Raises:
        JobError: outputs or gradients are out of tolerance, or a kernel failed.
    """
    checks: list[tuple[str, torch.dtype]] = []
    if rule in dispatch.RULES and dispatch.picked(rule, device) == "triton":
        checks = [(rule, torch.float32), (rule, torch.bfloat16)]
    if device == "cuda":
        checks += [("additive", torch.bfloat16), ("delta", torch.bfloat16)]
    remedy = "  set SURGERY_KERNELS=chunked to train with the torch form; surgery check says more"
    for name, dtype in checks:
        for key_dim, value_dim in sorted(widths):
            place = f"{name}: its Triton kernels, at keys of {key_dim} and values of {value_dim} entries,"
            try:
                found = kernel_check.check(name, device, dtype, kernel_check.Sizes.of_width(key_dim, value_dim))
            except RuntimeError as error:  # a compiler's, or the device's
                raise JobError(f"{place} fail on this device: {str(error).splitlines()[0][:160]}\n{remedy}") from error
            if not found.passed:
                raise JobError(
                    f"{place} are out of tolerance on this device (outputs {found.output_error:.1e}, gradient of "
                    f"{found.worst_gradient} {found.gradient_error:.1e}, tolerance {found.tolerance:.0e})\n{remedy}"
                )


def _mixer_widths(model: Path) -> set[tuple[int, int]]:
    """Key and value widths of the swapped mixers of a checkpoint."""
    config = read_config(model)
    adapter = adapter_for(config)
    geometries = [adapter.geometry(config, layer) for layer in config["surgery"]["layers"]]
    return {(geometry.key_dim, geometry.value_dim) for geometry in geometries if not geometry.channel_decay}


def _check(
    recipe: Recipe, start: Path, base: Path, pending: list[int], options: Options, evaluate: bool
) -> None:
    """Everything that a later phase or the evaluation would refuse, found before the first step.

    Raises:
        UsageError, JobError: as the phases would.
    """
    options.say("checking the phases, their data and the evaluation")
    config = raw_config(start)
    tokenizer = load_tokenizer(start, adapter_for(config).parse(config).vocab_size)
    body = body_of(load_model(start), config, layers_since(config, raw_config(base)))
    trainable = [parameter for parameter in body.model.parameters() if parameter.requires_grad]
    original = open_model(base)
    taught = any(objective(recipe.phases[index].kind).teaches for index in pending)
    if taught and not reads_alike(tokenizer, base):
        raise recipe.error(
            ("model",),
            f"{base} has another tokenizer than {start}, and as the teacher it would read the student's tokens",
            "name the base that the checkpoint was made from, or train it with next-token phases alone",
        )
    moved = taught and not shares_weights(body, original)
    dose = current_dose(body)
    for index in pending:
        phase = recipe.phases[index]
        schedule = dose_schedule(recipe, index, dose)
        selection = choose(recipe, index, body, schedule)
        moved = moved or bool(selection.shared)
        if moved and objective(phase.kind).teaches:
            count = sum(parameter.numel() for parameter in selection.trained.values())
            check_second_model(sum(e.numel for e in original.tensors.values()), count, phase.label, options.device)
        batch_shape(phase.sequences, phase.context, options.devices, 1)
        with options.measuring() as watch:
            data.check(recipe, index, tokenizer, watch)
        dose = schedule.stop
        for parameter in trainable:
            parameter.requires_grad_(True)
    if evaluate:
        with options.measuring() as watch:
            measuring.check(recipe, tokenizer, watch)


def _write(run: Path, manifest: RunManifest, options: Options) -> None:
    if options.main:
        write_manifest(run, manifest)
