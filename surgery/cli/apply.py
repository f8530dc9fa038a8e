"""``surgery apply``: swap the memories that a recipe names and write the checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from surgery.cli.common import AllowPickleOption, DeviceOption, JsonOption, TrustOption
from surgery.cli.validate import OfflineOption, RecipeArgument, SetOption

if TYPE_CHECKING:
    from surgery.operation import ApplyReport
    from surgery.plan import Plan

OutputOption = Annotated[
    Path | None, typer.Option("--output", "-o", metavar="DIR", help="The checkpoint directory to write; must be new.")
]
DryRunOption = Annotated[bool, typer.Option("--dry-run", help="Print the plan and write nothing.")]
DriftOption = Annotated[
    str,
    typer.Option(
        "--drift",
        metavar="full|layerwise|skip",
        help="Measure how far the model moved: its whole output, each swapped mixer, or nothing.",
    ),
]
LinkOption = Annotated[
    bool,
    typer.Option(
        "--link",
        help="Let the base's weight files share their bytes with the new ones (reflinks or hard links) where the disk "
        "can. Programs that overwrite a hard-linked file in place change both; surgery never does.",
    ),
]


def apply(
    recipe: RecipeArgument,
    output: OutputOption = None,
    dry_run: DryRunOption = False,
    drift: DriftOption = "full",
    link: LinkOption = False,
    settings: SetOption = None,
    allow_pickle: AllowPickleOption = False,
    trust_remote_code: TrustOption = False,
    offline: OfflineOption = False,
    device: DeviceOption = "auto",
    json_target: JsonOption = None,
) -> None:
    """Swap the memory of a recipe's layers and write a checkpoint.

    Prints the plan, writes the base's files byte for byte and the added tensors in a shard of their own, loads the
    result back and measures its drift from the base on text. Above the recipe's max_drift nothing is left.

    [dim]Examples[/dim]
      surgery apply demo-bayesian --dry-run
      surgery apply demo-bayesian --output swapped
      surgery apply mine.yaml --output swapped --set memory.start=paper --drift layerwise
      surgery apply large.yaml --output swapped --link --drift skip
    """
    from surgery.cli.common import out, pick_device, write_json
    from surgery.errors import UsageError

    if drift not in ("full", "layerwise", "skip"):
        raise UsageError(f"--drift {drift}: choose full, layerwise or skip")
    if output is None and not dry_run:
        raise UsageError("--output is missing\n  name the directory to write, or use --dry-run to see the plan")
    from surgery.checkpoint.remote_code import recipe_says
    from surgery.recipe import load_recipe

    loaded = load_recipe(recipe, settings or ())
    recipe_says(loaded.trust_remote_code)
    from surgery.operation import apply as operate

    quiet = json_target == "-"
    where = pick_device(device)
    with _Progress(show_plan=not quiet, drift=drift, device=where) as events:
        report = operate(
            loaded,
            output,
            drift=drift,
            dry_run=dry_run,
            link=link,
            device=where,
            offline=True if offline else None,
            events=events,
        )
    write_json(report.as_dict(), json_target)
    if quiet:
        return
    if dry_run:
        out.print("Dry run: nothing was written.")
        return
    print_drift(report)
    shared = "" if report.weights == "copy" else f" (the base's weights shared by {report.weights})"
    out.print(f"Written: {report.output}{shared}", highlight=False, soft_wrap=True)


class _Progress:
    """The plan on stdout; on a terminal's stderr a bar for the copy and a line for each other stage."""

    def __init__(self, show_plan: bool, drift: str, device: str) -> None:
        from rich.progress import BarColumn, DownloadColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

        from surgery.cli.common import err

        text = TextColumn("{task.description}", markup=False)
        columns = (SpinnerColumn(), text, BarColumn(), DownloadColumn(), TimeElapsedColumn())
        self.progress = Progress(*columns, console=err, transient=True, disable=not err.is_terminal)
        self.task = self.progress.add_task("reading the recipe", total=None)
        self.show_plan, self.drift, self.device, self.plan = show_plan, drift, device, None

    def __enter__(self) -> _Progress:
        self.progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.progress.stop()

    def planned(self, plan: Plan) -> None:
        self.plan = plan
        if self.show_plan:
            print_plan(plan, self.drift, self.device)

    def stage(self, text: str) -> None:
        copying = text == "writing" and self.plan is not None
        total = self.plan.base.weight_bytes if copying else None
        self.progress.reset(self.task, description=text, total=total)

    def inspected(self, done: int, total: int) -> None:
        self.progress.update(self.task, description=f"measuring N_t, {done} of {total} tokens")

    def copied(self, nbytes: int) -> None:
        self.progress.advance(self.task, nbytes)

    def note(self, text: str) -> None:
        self.progress.console.print(text, style="dim", highlight=False, soft_wrap=True)


def print_plan(plan: Plan, drift: str, device: str) -> None:
    """What will be done, tensor by tensor for the swapped layers."""
    import torch
    from rich.table import Table
    from rich.text import Text

    from surgery.checkpoint.fitting import placement
    from surgery.cli.common import bold, out
    from surgery.sizes import format_bytes

    recipe = plan.recipe
    out.print(bold(recipe.model) + f" ({plan.adapter.name}, {len(plan.base.tensors)} tensors)", soft_wrap=True)
    layers = ", ".join(map(str, plan.layers))
    out.print(Text(f"layers {layers} take the rule ") + bold(recipe.memory.rule) + f" at dose {plan.dose:g}")
    if plan.horizons is not None:
        figures = plan.horizons[recipe.layers.by]
        shown = ", ".join(f"{layer}: {figures[layer]:.0f}" for layer in plan.layers)
        out.print(f"chosen as {recipe.layers_text}; N_t in tokens: {shown}")
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("tensor", "", "shape", "dtype", "bytes"):
        table.add_column(title, justify="right" if title == "bytes" else "left", no_wrap=title == "tensor")
    for layer in plan.layers:
        prefix = plan.adapter.tensor_prefix(plan.base.config, layer)
        table.add_row(bold(prefix))
        for tensor in (*plan.kept, *plan.added):
            if tensor.name.startswith(prefix):
                name = tensor.name.removeprefix(prefix)
                mark = Text("added", style="green") if name.startswith("memory.") else "kept"
                shape = " x ".join(map(str, tensor.shape)) or "scalar"
                table.add_row(f"  {name}", mark, shape, tensor.dtype, f"{tensor.nbytes:,}")
    out.print(table)
    streamed = placement(plan.base, device, torch.float32, 512)[0] != "whole"
    others = len(plan.base.tensors) - len(plan.kept)
    out.print(f"{others} other tensors stay as they are, byte for byte")
    out.print(
        f"adds {format_bytes(plan.added_bytes)}, writes {format_bytes(plan.bytes_written)}, "
        f"peak memory about {format_bytes(plan.peak_memory(drift, streamed))}"
    )
    out.print("starts as its base" if plan.exact else Text("approximate", style="yellow") + f": {plan.reason}")


def print_drift(report: ApplyReport) -> None:
    """The measured drift as a table."""
    from rich.table import Table

    from surgery.cli.common import out

    drift = report.drift
    if drift is None:
        out.print("drift: not measured")
        return
    out.print(f"drift on {drift['tokens']} tokens of {drift['text']}, float32:", soft_wrap=True)
    table = Table(box=None, pad_edge=False, header_style="bold")
    if drift["kind"] == "layerwise":
        table.add_column("layer", justify="right")
        table.add_column("relative error of the mixer's output", justify="right")
        for layer, error in drift["relative_error"].items():
            table.add_row(str(layer), f"{error:.3g}")
    else:
        table.add_column("figure")
        table.add_column("value", justify="right")
        limit = f" (at most {report.limit:.3g})" if report.limit is not None else ""
        table.add_row(f"KL, nats a token{limit}", f"{drift['kl']:.3g}")
        table.add_row("largest KL at one token", f"{drift['kl_max']:.3g}")
        table.add_row("largest logit difference", f"{drift['max_logit_difference']:.3g}")
        table.add_row("perplexity, base", f"{drift['base_perplexity']:.4f}")
        table.add_row("perplexity, swapped", f"{drift['perplexity']:.4f}")
        table.add_row("ratio", f"{drift['perplexity_ratio']:.6f}")
    out.print(table)
    if drift["kind"] == "full":
        from surgery.evaluation.finite import overflow_note

        perplexities = {"base": drift["base_perplexity"], "swapped": drift["perplexity"]}
        nats = {"base": drift["base_loss"], "swapped": drift["loss"]}
        note = overflow_note(perplexities, nats, report.plan.base.directory)
        if note is not None:
            out.print(note, highlight=False, soft_wrap=True)


def register(app: typer.Typer) -> None:
    app.command()(apply)
