"""What the commands of trained experiments share: their options, the run and the table."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from surgery.experiments.trained import Experiment

ON_GPU = 12  # jobs at once there
QUICK_JOBS = 2

RulesOption = Annotated[str | None, typer.Option(metavar="LIST", help="The memories to compare. Default: all.")]
RatesOption = Annotated[
    str | None, typer.Option(metavar="LIST", help="Learning rates, of which each rule's best counts.")
]
SeedsOption = Annotated[str | None, typer.Option(metavar="LIST", help="One training each: 0-2, or 7,8. Default: 0-2.")]
StepsOption = Annotated[int | None, typer.Option(help="Training steps.")]
QuickOption = Annotated[
    bool, typer.Option("--quick", help="At most 3 minutes on two CPU cores, at sizes that the table names.")
]
OutputOption = Annotated[
    Path | None,
    typer.Option("--output", "-o", metavar="DIR", help="Keep each job's result here, and go on from them."),
]
JobsOption = Annotated[
    int | None, typer.Option(help="How many jobs run at once. Default: 1, with --quick 2, on a GPU 12.")
]
PlotOption = Annotated[Path | None, typer.Option(metavar="PATH", help="Draw the paper's figure.")]


def chosen(
    quick: bool, defaults: dict[str, Any], *, rules: str | None, rates: str | None, seeds: str | None, **others: Any
) -> dict[str, Any]:
    """Return the settings that were given, on top of those of ``--quick`` where that was asked for.

    Raises:
        UsageError: a list that is none.
    """
    from surgery.cli.lists import number_list, whole_list

    given = {
        "rules": None if rules is None else tuple(rules.split(",")),
        "rates": None if rates is None else number_list(rates, "--rates", "1e-3,3e-3"),
        "seeds": None if seeds is None else whole_list(seeds, "--seeds"),
        **others,
    }
    return {**(defaults if quick else {}), **{name: value for name, value in given.items() if value is not None}}


def run_experiment(
    experiment: Experiment,
    *,
    quick: bool,
    output: Path | None,
    jobs: int | None,
    plot: Path | None,
    device: str,
    json: str | None,
) -> None:
    """Run an experiment and show it.

    Raises:
        UsageError: no picture can be written there, no job at all, or a folder of other results.
    """
    import tempfile
    from contextlib import nullcontext

    from surgery.cli.common import err, pick_device, write_json
    from surgery.cli.progress import progress_bars
    from surgery.errors import UsageError
    from surgery.evaluation.plots import check_plot_path
    from surgery.experiments.trained import run

    if jobs is not None and jobs < 1:
        raise UsageError(f"--jobs {jobs}: use 1 or more")
    if plot is not None:
        check_plot_path(plot)
    where = pick_device(device)
    with (
        tempfile.TemporaryDirectory() if output is None else nullcontext(output) as folder,
        progress_bars() as update,
    ):

        def progress(done: int, total: int, line: str) -> None:
            update("jobs", done, total)
            err.print(f"{done}/{total} {line}", style="dim", highlight=False)

        workers = jobs or (ON_GPU if where == "cuda" else QUICK_JOBS if quick else 1)
        result = run(experiment, Path(folder), device=where, jobs=workers, progress=progress)
    if plot is not None:
        experiment.plot(result, plot)
        err.print(f"wrote {plot}", highlight=False, soft_wrap=True)
    if not write_json(result, json):
        _print(experiment, result)


def _print(experiment: Experiment, result: dict[str, Any]) -> None:
    from rich.table import Table

    from surgery.cli.common import out

    out.print(result["sizes"], highlight=False)
    out.print()
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("memory", "reading", "measured", "±", "paper"):
        table.add_column(heading, justify="left" if heading in ("memory", "reading") else "right")
    before = None
    for row in result["rows"]:
        figures = (row["mean"], row["deviation"], row["paper"])
        shown = ["-" if figure is None else f"{figure:.{row['digits']}f}" for figure in figures]
        name = experiment.labels[row["rule"]]
        table.add_row("" if name == before else name, row["reading"], *shown)
        before = name
    out.print(table)
    seeds = len(experiment.seeds)
    many = "one seed" if seeds == 1 else f"mean and standard deviation of {seeds} seeds"
    rates = ", ".join(f"{experiment.labels[rule]} {rate:g}" for rule, rate in result["rates"].items())
    notes = [f"{many[0].upper()}{many[1:]}; learning rates: {rates}.", *result["notes"]]
    out.print("\n".join(notes), style="dim", highlight=False)
