"""What a directory that holds no model is, and where a model lies instead: for messages."""

from __future__ import annotations

from pathlib import Path

CONFIG = "config.json"
RUN_FILE = "run.json"
DEEPEST = 4  # names from a run to phases/NN-name/checkpoints/checkpoint-N
# a directory inside a run -> what it holds
PARTS = {
    "checkpoints": "training checkpoints, for resuming alone,",
    "tensorboard": "training curves",
    "evaluation": "evaluation reports",
}


def models_of_run(run: Path) -> list[Path]:
    """The checkpoint directories of a run: the applied one, then its phases' in their order."""
    found = [run / "applied", *sorted(run.glob("phases/*/model"))]
    return [model for model in found if (model / CONFIG).is_file()]


def run_around(directory: Path) -> Path | None:
    """The run that a directory is, or is a part of; named as the user named the directory where that is possible."""
    whole = directory.absolute()
    for run in (directory, *directory.parents, *whole.parents):
        if (run / RUN_FILE).is_file() and len(whole.relative_to(run.absolute()).parts) <= DEEPEST:
            return run
    return None


def no_model(directory: Path) -> str:
    """What to tell a user who gave ``directory``, which holds no config.json, as a model: in one line what it is and
    which directory to give instead, where that is known."""
    run = run_around(directory)
    if run is not None:
        return _inside_run(directory, run)
    found = []
    for folder in sorted(path for path in directory.iterdir() if path.is_dir() and not path.name.startswith(".")):
        if (folder / CONFIG).is_file():
            found.append(folder)
        elif (folder / RUN_FILE).is_file():
            found += models_of_run(folder)[-1:]
    if found:
        more = f", or another of its {len(found)} models" if len(found) > 3 else ""
        return f"{directory}: holds models and is none itself; give {' or '.join(map(str, found[:3]))}{more}"
    return f"{directory / CONFIG}: no such file\n  a model is a directory with {CONFIG} and safetensors weights"


def _inside_run(directory: Path, run: Path) -> str:
    inside = directory.absolute().relative_to(run.absolute()).parts
    models = models_of_run(run)
    what = "is a run of surgery distill"
    if inside:
        held = next((held for name, held in PARTS.items() if name in inside), None)
        what = f"holds {held} of the run {run}" if held else f"is a part of the run {run}"
        if inside[0] == "phases" and len(inside) > 1:  # this phase's model, or what it starts from; no later one
            models = [model for model in models if model == run / "applied" or model.parent.name <= inside[1]]
            what = what if held else f"is a phase of the run {run}"
    instead = f"give {models[-1]}" if models else "there is none in the run yet: go on with surgery distill"
    return f"{directory}: {what}, not a model; {instead}"
