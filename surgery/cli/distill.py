"""``surgery distill``: apply a recipe and run its phases, resuming where an earlier call stopped."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from surgery.cli.common import DeviceOption, JsonOption
from surgery.cli.validate import OfflineOption, RecipeArgument, SetOption

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

    from surgery.cli.common import err, pick_device, write_json
    from surgery.cli.progress import progress_bars
    from surgery.recipe import load_recipe

    loaded = load_recipe(recipe, settings or ())
    folder = run or Path("runs") / loaded.name
    where = pick_device(device)
    main = int(os.environ.get("RANK", "0")) == 0

    from accelerate import PartialState

    from surgery.adaptation.monitoring import ProgressBar
    from surgery.adaptation.phases import Options
    from surgery.adaptation.run import distill as run_recipe

    options = Options(
        device=where,
        devices=int(os.environ.get("WORLD_SIZE", "1")),
        main=main,
        micro_batch=micro_batch,
        save_every=save_every,
        recompute=recompute,
        watchers=lambda title: [ProgressBar(title)],
        say=lambda text: err.print(text, style="dim", highlight=False) if main else None,
        measuring=progress_bars,
    )
    result = run_recipe(
        loaded, folder, start=start, options=options, evaluate=evaluation, offline=True if offline else None
    )
    if main and not write_json(result, json_target):
        print_result(result)
    PartialState().destroy_process_group()


def print_result(result: dict[str, Any]) -> None:
    """What the phases did, and the model before and after, as tables."""
    import json

    from rich.markup import escape
    from rich.table import Table

    from surgery.cli.common import out
    from surgery.recipe import format_count

    phases = result["manifest"]["phases"]
    if phases:
        table = Table(box=None, pad_edge=False, header_style="bold")
        for title in ("phase", "kind", "steps", "tokens", "first loss", "last loss", "dose"):
            table.add_column(title, justify="left" if title in ("phase", "kind") else "right")
        for phase in phases:
            figures = phase["figures"]
            losses = (f"{figures[key]:.4f}" if key in figures else "" for key in ("first_loss", "last_loss"))
            dose = f"{figures['dose']:g}" if "dose" in figures else ""
            name, kind = escape(phase["name"]), phase["kind"]
            table.add_row(name, kind, str(phase["steps"]), format_count(phase["tokens"]), *losses, dose)
        out.print(table)
    path = result["evaluation"].get("after")
    if path is not None:
        from surgery.cli.eval import print_report

        print_report(out, json.loads(Path(path).read_text(encoding="utf-8")))
    out.print(f"model: {result['model']}", highlight=False, soft_wrap=True)
    out.print(f"next:  surgery export {result['run']} --output DIR", highlight=False, soft_wrap=True)


def register(app: typer.Typer) -> None:
    app.command()(distill)
