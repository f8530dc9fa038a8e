"""``surgery reproduce operation``: the operation measured where memory is what limits."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from surgery.cli.common import DeviceOption, JsonOption

# what --quick puts in place of the defaults: a study of minutes on two CPU cores
QUICK: dict[str, Any] = {
    "pairs": 8, "vocabulary": 64, "steps": 400, "adapt": 100, "batch": 32, "tested": 512, "host_rate": 3e-3,
    "control_rates": (1e-3, 3e-3), "seeds": (0, 1), "every_host": True,
}  # fmt: skip
QUICK_RATE = 3e-3  # of its one arm
MOST_QUICK_PAIRS = 16
ON_GPU = 12  # jobs at once there


def operation(
    host: Annotated[str, typer.Option(metavar="gdn|mamba2", help="The small host.")] = "gdn",
    task: Annotated[str, typer.Option(metavar="base|update|block", help="The variant of the task.")] = "update",
    pairs: Annotated[int | None, typer.Option(help="Keys of a sequence; default by host and task.")] = None,
    arm: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME:KEY=VALUE,...",
            help="An operation: keys of a recipe's memory section, over (of the dose), rate, memory_rate. Repeatable.",
        ),
    ] = None,
    seeds: Annotated[
        str | None, typer.Option(metavar="LIST", help="One host each: 0-4, or 100,101. Default: 0-4.")
    ] = None,
    steps: Annotated[int | None, typer.Option(help="Training steps of the host.")] = None,
    adapt: Annotated[int | None, typer.Option(help="Steps of an adaptation; each also runs twice as long.")] = None,
    batch: Annotated[int | None, typer.Option(help="Sequences a step.")] = None,
    host_rate: Annotated[float | None, typer.Option(help="The host's learning rate.")] = None,
    control_rates: Annotated[
        str | None, typer.Option(metavar="LIST", help="The control's learning rates, of which the best counts.")
    ] = None,
    vocabulary: Annotated[int | None, typer.Option(help="Tokens: keys below, values above the middle.")] = None,
    length: Annotated[int | None, typer.Option(help="Tokens of a sequence; default: as few as hold it.")] = None,
    updated: Annotated[float | None, typer.Option(help="Share of the keys that update writes again.")] = None,
    tested: Annotated[int | None, typer.Option(help="Sequences of a test.")] = None,
    every_host: Annotated[
        bool, typer.Option("--every-host", help="Adapt hosts that do not count too, and show all of them.")
    ] = False,
    quick: Annotated[bool, typer.Option("--quick", help="Minutes on two CPU cores: 8 pairs, 2 seeds, 1 arm.")] = False,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="DIR", help="Keep each job's result here, and go on from them."),
    ] = None,
    summary: Annotated[
        bool, typer.Option("--summary", help="Run nothing: show what --output holds, also while others still run.")
    ] = False,
    jobs: Annotated[
        int | None, typer.Option(help="How many jobs run at once. Default: 1, with --quick 2, on a GPU 12.")
    ] = None,
    plot: Annotated[Path | None, typer.Option(metavar="PATH", help="Draw the differences to the control.")] = None,
    device: DeviceOption = "auto",
    json: JsonOption = None,
) -> None:
    """Train a small host to recall, operate on it, adapt it, and compare it with its control.

    The control keeps the host's own rule and gets the same sequences, steps and trained parameters, at the best of
    its learning rates. Choose pairs, steps and rates on other seeds than those reported.

    [dim]Examples[/dim]
      surgery reproduce operation --quick
      surgery reproduce operation --output update --plot update.png
      surgery reproduce operation --seeds 100-102 --arm c:rule=bayesian,over=0.3
      surgery reproduce operation --output update --summary
    """
    import tempfile
    from contextlib import nullcontext
    from dataclasses import replace

    from surgery.cli.common import err, pick_device, write_json
    from surgery.cli.lists import number_list, whole_list
    from surgery.cli.progress import progress_bars
    from surgery.errors import UsageError
    from surgery.evaluation.plots import check_plot_path
    from surgery.experiments import operation as job
    from surgery.experiments import operation_results as results
    from surgery.experiments.study import ARMS, Arm, Study

    given = {
        "host": host, "task": task, "pairs": pairs, "steps": steps, "adapt": adapt, "batch": batch, "tested": tested,
        "host_rate": host_rate, "vocabulary": vocabulary, "length": length, "updated": updated,
        "seeds": None if seeds is None else whole_list(seeds, "--seeds"),
        "control_rates": (
            None if control_rates is None else number_list(control_rates, "--control-rates", "3e-4,1e-3,3e-3")
        ),
        "arms": tuple(Arm.parse(text) for text in arm) if arm else None,
        "every_host": every_host or None,
    }  # fmt: skip
    settings = {key: value for key, value in given.items() if value is not None}
    if quick:
        if pairs is not None and pairs > MOST_QUICK_PAIRS:
            raise UsageError(f"--pairs {pairs}: --quick takes {MOST_QUICK_PAIRS} at most; leave one of the two out")
        settings = {**QUICK, "arms": (replace(ARMS[1], rate=QUICK_RATE),), **settings}
    study = Study(**settings)
    if jobs is not None and jobs < 1:
        raise UsageError(f"--jobs {jobs}: use 1 or more")
    if summary and output is None:
        raise UsageError("--summary: name the results with --output")
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

        workers = jobs or (ON_GPU if where == "cuda" else 2 if quick else 1)
        result = job.run(study, Path(folder), device=where, jobs=workers, summary=summary, progress=progress)
    if plot is not None:
        results.plot(result, plot)
        err.print(f"wrote {plot}", highlight=False)
    if not write_json(result, json):
        print_result(result)


def print_result(result: dict[str, Any]) -> None:
    """Print the hosts, and each arm beside its control."""
    from rich.table import Table

    from surgery.cli.common import out

    study = result["study"]
    title = f"{study['host']}, {study['task']}, {study['pairs']} pairs in {result['tokens']} tokens"
    table = Table(title=f"hosts: {title}", title_justify="left", box=None, pad_edge=False, header_style="bold")
    for heading in ("seed", "validation", "at 3/4", "test", "1.5 x pairs", "counts"):
        table.add_column(heading, justify="right")
    for seed, host in result["hosts"].items():
        figures = [f"{host[key]:.4f}" for key in ("validation", "three_quarters", "test", "harder")]
        table.add_row(seed, *figures, "yes" if host["counts"] else "no")
    out.print(table)
    out.print()
    groups = ["counted", *(["every"] if study["every_host"] else [])]
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("arm", "read", "hosts", "control", "rate", "operated", "gain", "95% of it"):
        left = heading in ("arm", "read", "hosts")
        table.add_column(heading, justify="left" if left else "right", no_wrap=heading != "arm", overflow="fold")
    for row in result["rows"]:
        for reading, groups_of in row["readings"].items():
            for group in groups:
                paired = groups_of[group]
                if paired is not None:
                    table.add_row(row["arm"]["name"], reading, *_cells(paired, group))
    if table.row_count:
        out.print(table)
    notes = [
        f"{len(result['counted'])} of {len(result['hosts'])} hosts count: at least 0.7, and less than 0.01 gained in "
        "the last quarter of their training.",
        "Answers that are right, in percent. The control is the host with its own rule at its best learning rate; the "
        "interval is Student's t of the paired difference over the hosts that count, or all.",
    ]
    shown = [
        (row["arm"]["name"], paired)
        for row in result["rows"] for reading in row["readings"].values() for paired in reading.values() if paired
    ]  # fmt: skip
    if failed := {name for name, paired in shown if paired["not_finite"]}:
        notes.append(f"Not finite, and counted as 0: {', '.join(sorted(failed))}.")
    tried = study["control_rates"]
    best = {rate for _, paired in shown for rate in paired["control_rates"]}
    if len(tried) > 1 and (ends := best & {min(tried), max(tried)}):
        ends = " and ".join(f"{rate:g}" for rate in sorted(ends))
        notes.append(f"The control's best rate lies at an end of those tried ({ends}): try further --control-rates.")
    out.print("\n".join(notes), style="dim", highlight=False)


def _cells(paired: dict[str, Any], group: str) -> tuple[str, ...]:
    average, low, high = (paired["difference"][key] for key in ("mean", "low", "high"))
    interval = "-" if low is None else f"{100 * low:+.2f} {100 * high:+.2f}"
    hosts = f"{len(paired['seeds'])}" if group == "counted" else f"{len(paired['seeds'])} all"
    rates = [f"{rate:g}" for rate in sorted(set(paired["control_rates"]))]
    rate = rates[0] if len(rates) == 1 else f"to {rates[-1]}"
    control, operated = (f"{100 * paired[key]:.1f}" for key in ("control", "operated"))
    return hosts, control, rate, operated, f"{100 * average:+.2f}", interval
