"""A run that goes on: what it was begun with, and whether its files are still what was written."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from surgery.adaptation import inputs
from surgery.adaptation.monitoring import METRICS
from surgery.adaptation.phases import Options, is_finished, is_started, phase_folder
from surgery.checkpoint.checksums import COMPLETE, about, damage, entry, first_of, write_checksums
from surgery.checkpoint.manifest import PhaseRecord, RunManifest, read_manifest
from surgery.errors import UsageError
from surgery.recipe import Recipe, load_recipe

RECIPE = "recipe.yaml"
FREE = ("evaluation", "export", "phases", "max_drift", "inspection")  # sections that may change after the swap


def differences(old: Any, new: Any, path: str = "") -> Iterator[str]:
    """The YAML paths at which two recipes differ, with both values."""
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        for key in [*old, *(key for key in new if key not in old)]:
            yield from differences(old.get(key), new.get(key), f"{path}.{key}" if path else str(key))
    elif isinstance(old, (list, tuple)) and isinstance(new, (list, tuple)) and len(old) == len(new):
        for number, (one, other) in enumerate(zip(old, new, strict=True)):
            yield from differences(one, other, f"{path}[{number}]")
    elif old != new:
        yield f"{path}: {_shown(old)} before, {_shown(new)} now"


def _plain(recipe: Recipe) -> dict[str, Any]:
    return recipe.model_dump(mode="json", by_alias=True, warnings=False)


def _shown(value: Any) -> str:
    text = "nothing" if value is None else str(value)
    return text if len(text) <= 60 else text[:57] + "..."


def continued(recipe: Recipe, run: Path, base: Path) -> RunManifest:
    """The manifest of a run that was begun before, if ``recipe``, its base and its data agree with what has been done.

    The fingerprints of the base and of the data of phases that have begun are brought up to date.

    Raises:
        UsageError: they do not; the message names the first difference.
    """
    manifest = read_manifest(run)
    if not (run / RECIPE).is_file():
        raise UsageError(
            f"{run / RECIPE}: is missing, so it is not known with which settings the run was begun\n"
            "  put it back, or name a new --run"
        )
    before = load_recipe(run / RECIPE, manifest.overrides)
    old, new = _plain(before), _plain(recipe)
    fixed = [d for key in old if key not in FREE for d in differences(old[key], new[key], key)]
    for index, phase in enumerate(before.phases):
        if not is_started(phase_folder(run, index, phase)):
            continue
        path = f"phases[{index}]"
        if index >= len(recipe.phases):
            fixed.append(f"{path}: {phase.label} before, absent now")
            continue
        fixed += differences(old["phases"][index], new["phases"][index], path)
        doses = before.doses()[index], recipe.doses()[index]
        fixed += differences(*map(list, doses), f"{path}.dose") if before.phases[index].dose is None else []
        if not fixed:
            fixed += _data_changes(recipe, index, manifest, is_finished(phase_folder(run, index, phase)))
    if manifest.inputs is not None:
        now = inputs.of_base(base, manifest.inputs)
        fixed += inputs.changes(manifest.inputs, now, f"model: {base}")
        manifest.inputs = now
    if fixed:
        more = f" (and {len(fixed) - 1} more)" if len(fixed) > 1 else ""
        raise UsageError(
            f"{recipe.path}: {run} was begun with other settings or inputs\n  {fixed[0]}{more}\n"
            "  restore them, name another --run, or remove the directory of a phase to start that phase over"
        )
    return manifest


def _data_changes(recipe: Recipe, index: int, manifest: RunManifest, finished: bool) -> list[str]:
    """How the data of a phase that has begun differs from what it read; a finished phase may do without its data."""
    record = manifest.phases[index] if index < len(manifest.phases) else None
    if record is None or record.data is None:
        return []
    try:
        now = inputs.of_phase(recipe, index, record.data)
    except UsageError:
        if finished:
            return []
        raise
    before, record.data = record.data, now
    return list(inputs.changes(before, now, f"phases[{index}], its data"))


def remove_leftovers(run: Path) -> None:
    """Remove the files that a killed process was about to put in the place of others."""
    for folder in (run, run / "applied", *run.glob("phases/*")):
        for file in folder.glob(".*.partial-*"):
            if file.is_file():
                file.unlink(missing_ok=True)


def goes_on_from(recipe: Recipe, run: Path) -> Path:
    """The model that the next phase starts from, or that is the run's result: the last finished phase's, otherwise the
    applied checkpoint."""
    folders = [phase_folder(run, index, phase) for index, phase in enumerate(recipe.phases)]
    done = list(itertools.takewhile(is_finished, folders))
    return done[-1] / "model" if done else run / "applied"


def check_files(recipe: Recipe, run: Path, options: Options, *, old: bool) -> None:
    """Compare the applied checkpoint and the finished phases with their checksums, every byte of them.

    A damaged model that the run goes on from ends it: to compute a phase again takes as long as it took, so that is for
    the user to decide. Any other damage is told, and the run goes on.

    Args:
        old: the run is of a version that kept no checksums: they are made now, of the files as they are.

    Raises:
        UsageError: the model is damaged that the next phase starts from, or, without a next phase, the run's result.
    """
    folders = [phase_folder(run, index, phase) for index, phase in enumerate(recipe.phases)]
    models = [run / "applied", *(folder / "model" for folder in folders if is_finished(folder))]
    used = goes_on_from(recipe, run)
    bare = [model for model in models if not (model / COMPLETE).is_file()]
    if old and bare:
        options.say(
            f"{run}: an earlier version began it and kept no checksums, so its files are taken as they are; "
            "from now on they carry checksums"
        )
        for model in bare:
            write_checksums(model)
    for model in models:
        found = damage(model)
        if found and model == used:
            raise UsageError(f"{model}: damaged: {first_of(found)}\n  {_remedy(run, model, folders)}")
        if found:
            options.say(f"{model}: damaged: {first_of(found)}; nothing more is made from it, so the run goes on")
        elif model.parent in folders:
            kept = about(model).get("metrics")
            metrics = model.parent / METRICS
            if kept is not None and (not metrics.is_file() or entry(metrics) != kept):
                options.say(f"{metrics}: is not what was written; the phase's figures in run.json are those measured")


def _remedy(run: Path, model: Path, folders: list[Path]) -> str:
    back = f"put the file back from a copy, or remove {model if model == run / 'applied' else model.parent}"
    later = [folder for folder in folders if folder > model.parent and is_started(folder)]
    if model == run / "applied":
        return f"{back} and run again, which makes it again from its base"
    more = f" and {', '.join(map(str, later))}, made from it," if later else ""
    return f"{back}{more} and run again, which trains the phase again"


def phase_records(recipe: Recipe, run: Path, manifest: RunManifest) -> list[PhaseRecord]:
    """The manifest's entries of the recipe's phases: what is known of those before, and what they read.

    Raises:
        UsageError: a phase that is not finished names data that is not there.
    """
    before = {record.name: record for record in manifest.phases}
    known = [found for record in manifest.phases for found in record.data or ()]
    records = []
    for index, phase in enumerate(recipe.phases):
        folder = phase_folder(run, index, phase)
        old, finished = before.get(phase.label), is_finished(folder)
        record = PhaseRecord(
            name=phase.label,
            kind=phase.kind,
            status="finished" if finished else "pending",
            steps=phase.total_steps,
            tokens=phase.total_tokens,
            figures=old.figures if old else {},
            data=old.data if old else None,
        )
        if finished:
            with contextlib.suppress(OSError, ValueError):  # a damaged one is told elsewhere
                record.figures = record.figures or about(folder / "model").get("figures", {})
        elif record.data is None or not is_started(folder):
            record.data = inputs.of_phase(recipe, index, known)
        records.append(record)
    return records


def note_in_force(manifest: RunManifest, now: dict[str, Any], options: Options) -> None:
    """Add what work begins with to the manifest, where it is not what it was last; a change is told."""
    last = {key: value for key, value in manifest.in_force[-1].items() if key != "since"} if manifest.in_force else None
    if last == now:
        return
    if last is not None:
        changed = list(differences(last, now))
        more = f" (and {len(changed) - 1} more, see run.json)" if len(changed) > 1 else ""
        options.say(f"the run goes on with other means: {changed[0]}{more}")
    since = datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    manifest.in_force.append({"since": since, **now})
