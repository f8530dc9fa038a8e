"""``surgery distill``: apply a recipe and run its phases, resuming where an earlier call stopped."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from surgery.cli.common import AllowPickleOption, DeviceOption, JsonOption, TrustOption
from surgery.cli.validate import OfflineOption, RecipeArgument, SetOption

if TYPE_CHECKING:
    from surgery.adaptation.monitoring import Step

RunOption = Annotated[
    Path | None, typer.Option("--run", metavar="DIR", help="The run directory; default: runs/<recipe name>.")
]
FromOption = Annotated[
    str | None,
    typer.Option("--from", metavar="CHECKPOINT", help="Start from a swapped checkpoint or a run instead of applying."),
]
MicroOption = Annotated[
    int | None,
    typer.Option("--micro-batch", metavar="N", min=1, help="Sequences a device takes at once; default: what fits."),
]
SaveOption = Annotated[
    int | None,
    typer.Option("--save-every", metavar="STEPS", min=1, help="Steps between checkpoints; default: a tenth of each."),
]
RecomputeOption = Annotated[
    bool, typer.Option("--recompute", help="Recompute activations in the backward pass: less memory, more time.")
]
EvaluationOption = Annotated[
    bool, typer.Option("--evaluation/--no-evaluation", help="Measure the base before and the result after the phases.")
]


def distill(
    recipe: RecipeArgument,
    run: RunOption = None,
    start: FromOption = None,
    settings: SetOption = None,
    micro_batch: MicroOption = None,
    save_every: SaveOption = None,
    recompute: RecomputeOption = False,
    evaluation: EvaluationOption = True,
    allow_pickle: AllowPickleOption = False,
    trust_remote_code: TrustOption = False,
    offline: OfflineOption = False,
    device: DeviceOption = "auto",
    json_target: JsonOption = None,
) -> None:
    """Adapt a swapped model: the recipe's phases, in order.

    Applies the recipe first if the run directory holds no applied checkpoint. Stopped at any point, the same command
    goes on where it stopped and ends with the same weights. Each phase leaves metrics.jsonl, TensorBoard events and its
    model in RUN/phases.

    [dim]Examples[/dim]
      surgery distill demo-bayesian
      surgery distill mine.yaml --run runs/mine --set phases.0.tokens=1M
      surgery distill mine.yaml --run runs/again --from runs/mine/phases/01-align/model
      torchrun --nproc-per-node 8 --no-python -- surgery distill mine.yaml --run runs/mine
      tensorboard --logdir runs/mine/phases
    """
    import os

    from surgery.checkpoint.remote_code import recipe_says
    from surgery.checkpoint.staging import check_name
    from surgery.cli.common import err, pick_device, write_json
    from surgery.cli.progress import progress_bars
    from surgery.recipe import load_recipe

    loaded = load_recipe(recipe, settings or ())
    recipe_says(loaded.trust_remote_code)
    folder = run or Path("runs") / loaded.name
    check_name(folder, "--run")
    where = pick_device(device)

    from accelerate import PartialState

    from surgery.adaptation.phases import Options
    from surgery.adaptation.run import distill as run_recipe
    from surgery.environment import processes

    rank, devices = processes(os.environ)
    main = rank == 0
    if where == "cuda" and devices == 1:
        _mention_idle_devices()
    options = Options(
        device=where,
        devices=devices,
        main=main,
        micro_batch=micro_batch,
        save_every=save_every,
        recompute=recompute,
        watchers=lambda title: [ProgressBar(title)],
        say=lambda text: err.print(text, style="dim", highlight=False, soft_wrap=True) if main else None,
        measuring=progress_bars,
    )
    result = run_recipe(
        loaded, folder, start=start, options=options, evaluate=evaluation, offline=True if offline else None
    )
    if main and not write_json(result, json_target):
        print_result(result)
    PartialState().destroy_process_group()


def _mention_idle_devices() -> None:
    import torch

    from surgery.cli.common import err

    count = torch.cuda.device_count()
    if count > 1:
        all_of_them = f"torchrun --nproc-per-node {count} --no-python -- surgery distill ..."
        err.print(f"one of {count} GPUs is used; for all: {all_of_them}", style="dim", highlight=False)


@dataclass
class ProgressBar:
    """A phase's loss, speed and time left on stderr."""

    title: str
    _bar: Any = None
    _task: Any = None

    def begin(self, step: int, steps: int) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        from surgery.cli.common import err

        self._bar = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("loss {task.fields[loss]}", markup=False),
            TextColumn("{task.fields[speed]} tokens/s", markup=False),
            TimeRemainingColumn(),
            console=err,
        )
        self._bar.start()
        self._task = self._bar.add_task(self.title, total=steps, completed=step, loss="-", speed="-")

    def step(self, step: Step) -> None:
        self._bar.update(
            self._task, completed=step.step, loss=f"{step.loss:.4f}", speed=f"{step.tokens_per_second:,.0f}"
        )

    def end(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


def print_result(result: dict[str, Any]) -> None:
    """What the phases did, and the model before and after, as tables."""

    from rich.table import Table

    from surgery.cli.common import out
    from surgery.sizes import format_count

    phases = result["manifest"]["phases"]
    if phases:
        table = Table(box=None, pad_edge=False, header_style="bold")
        for title in ("phase", "kind", "steps", "tokens", "first loss", "last loss", "dose"):
            table.add_column(title, justify="left" if title in ("phase", "kind") else "right")
        for phase in phases:
            figures = phase["figures"]
            losses = (f"{figures[key]:.4f}" if key in figures else "" for key in ("first_loss", "last_loss"))
            dose = f"{figures['dose']:g}" if "dose" in figures else ""
            name, kind = phase["name"], phase["kind"]
            table.add_row(name, kind, str(phase["steps"]), format_count(phase["tokens"]), *losses, dose)
        out.print(table)
    path = result["evaluation"].get("after")
    if path is not None:
        from surgery.checkpoint.jsonfile import read_json
        from surgery.cli.eval_tables import print_report

        print_report(out, read_json(Path(path)))
    out.print(f"model: {result['model']}", highlight=False, soft_wrap=True)
    out.print(f"next:  surgery export {result['run']} --output DIR", highlight=False, soft_wrap=True)


def register(app: typer.Typer) -> None:
    app.command()(distill)
