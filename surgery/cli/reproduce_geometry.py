"""``surgery reproduce geometry``: where a write goes as keys come to overlap, measured beside printed."""

from __future__ import annotations

from typing import Annotated

import typer

from surgery.cli.common import JsonOption, err, out, write_json


def geometry(
    overlaps: Annotated[
        str | None, typer.Option(metavar="LIST", help="Overlaps of A and B: 0,0.5,0.92. Default: 0 to 0.98.")
    ] = None,
    boost: Annotated[int, typer.Option(help="Writes of B before those of A.")] = 40,
    flood: Annotated[int, typer.Option(help="Writes of A; the first one's direction, the last one's gain.")] = 60,
    dim: Annotated[int, typer.Option(help="Key width D, at least --pairs.")] = 16,
    r2: Annotated[float, typer.Option(help="Observation noise r^2.")] = 0.05,
    l2: Annotated[float, typer.Option(help="Process noise l^2.")] = 0.05,
    p0: Annotated[float, typer.Option(help="Variance before the first write.")] = 3.0,
    pairs: Annotated[int, typer.Option(help="Keys and one-hot values m, A and B among them.")] = 6,
    rounds: Annotated[int, typer.Option(help="Times that every key is written first.")] = 2,
    plot: Annotated[str | None, typer.Option(metavar="PATH", help="Draw keys and writes in their plane.")] = None,
    json: JsonOption = None,
) -> None:
    """Show the direction of a write of A as its overlap with a well-known B grows.

    The more certain the memory is along B, the more of the write goes across it. The writes' gain and the variance that
    each adds along B stand beside their limits.

    [dim]Examples[/dim]
      surgery reproduce geometry --plot geometry.png
      surgery reproduce geometry --overlaps 0.6,0.92 --boost 5
    """
    from surgery.cli.lists import number_list
    from surgery.evaluation.plots import check_plot_path
    from surgery.experiments import geometry as job
    from surgery.experiments.collision import Settings

    chosen = job.OVERLAPS if overlaps is None else number_list(overlaps, "--overlaps", "0,0.5,0.92")
    if plot is not None:
        check_plot_path(plot)
    settings = Settings(boost=boost, flood=flood, dim=dim, r2=r2, l2=l2, p0=p0, pairs=pairs, rounds=rounds)
    result = job.geometry(settings, chosen)
    if plot is not None:
        job.plot(result, plot)
        err.print(f"wrote {plot}", highlight=False, soft_wrap=True)
    if write_json(result.as_dict(), json):
        return
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    titles = ("overlap", "u along B", "Eq. 15", "moves B", "raw key", "gain", "limit", "growth", "limit")
    for title in titles:
        table.add_column(title, justify="right")
    for write in result.writes:
        shown = (write.along_b, write.predicted_b, write.moves_b, write.overlap, write.gain, write.expected_gain)
        growth = (f"{x:.5f}" for x in (write.growth, write.expected_growth))
        table.add_row(f"{write.overlap:g}", *(f"{x:.4f}" for x in shown), *growth)
    out.print(table)
    notes = [
        "u: direction of the first write of A, of length 1. moves B: what it moves B's read by, of A's, beside a write "
        "along the raw key. gain, growth: of the last write of A, what it adds to the variance along B."
    ]
    if (printed := result.printed) is not None:
        notes.append(
            f"Paper: gain {printed['gain']:.3f}; growth {printed['growth']:.5f} at overlap "
            f"{printed['growth_overlap']:g}."
        )
    else:
        notes.append("The paper prints no figures for these settings.")
    out.print("\n".join(notes), style="dim", highlight=False)
