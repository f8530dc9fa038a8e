"""``surgery reproduce collision``: the Bayesian Layer's key collision, measured beside expected and printed."""

from __future__ import annotations

from typing import Annotated

import typer

from surgery.cli.common import JsonOption, err, out, write_json


def collision(
    overlap: Annotated[float, typer.Option(help="Overlap of the unit keys A and B, in (-1, 1).")] = 0.92,
    boost: Annotated[int, typer.Option(help="Writes of B after the first ones.")] = 40,
    flood: Annotated[int, typer.Option(help="Writes of A after those.")] = 60,
    dim: Annotated[int, typer.Option(help="Key width D, at least --pairs.")] = 16,
    r2: Annotated[float, typer.Option(help="Observation noise r^2.")] = 0.05,
    l2: Annotated[float, typer.Option(help="Process noise l^2.")] = 0.05,
    p0: Annotated[float, typer.Option(help="Variance before the first write.")] = 3.0,
    pairs: Annotated[int, typer.Option(help="Keys and one-hot values m, A and B among them.")] = 6,
    rounds: Annotated[int, typer.Option(help="Times that every key is written first.")] = 2,
    plot: Annotated[
        str | None, typer.Option(metavar="PATH", help="Draw probability, variances and gain over the writes.")
    ] = None,
    json: JsonOption = None,
) -> None:
    """Boost B, flood A, read with B: a propagated covariance protects B where a reset one loses it.

    Beside the two: a covariance of which only the diagonal is kept, and the propagated covariance's gain with writes
    along the raw key.

    [dim]Examples[/dim]
      surgery reproduce collision
      surgery reproduce collision --overlap 0.8 --flood 256 --plot collision.png
      surgery reproduce collision --r2 0.1 --l2 0.01 --json -
    """
    from surgery.experiments import collision as job

    if plot is not None:
        from surgery.evaluation.plots import check_plot_path

        check_plot_path(plot)
    result = job.collision(job.Settings(overlap, boost, flood, dim, r2, l2, p0, pairs, rounds))
    if plot is not None:
        job.plot(result, plot)
        err.print(f"wrote {plot}", highlight=False, soft_wrap=True)
    if write_json(result.as_dict(), json):
        return
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("p(B against A)", "covariance", "measured", "expected", "paper"):
        table.add_column(title, justify="right" if title in ("measured", "expected", "paper") else "left")
    rows = {"boost": (f"{boost} writes of B", "propagated")}
    rows |= {f"{rule}_flood": (f"then {flood} of A", job.LABELS[rule]) for rule in job.RULES}
    if flood:
        rows |= {"gain": ("gain of the last A", "propagated"), "growth": ("variance of B, a write of A", "propagated")}
    printed = result.printed or {}
    for name, about in rows.items():
        paper = f"{printed[name]:.{3 if name == 'gain' else 5}f}" if name in printed else "-"
        table.add_row(*about, f"{result.measured[name]:.5f}", f"{result.expected[name]:.5f}", paper)
    out.print(table)
    notes = [
        "Read with key B. Expected: by the scalar Riccati map from the memory before those writes, for the reset rule "
        "a geometric series; many writes of B give sigmoid(1). Of gain and variance the limits of many writes."
    ]
    if printed:
        shown = f"{printed['bayesian_flood']:.5f} and {printed['reset_flood']:.5f}"
        notes.append(
            f"Paper: {printed['boost']:.5f} is the limit of many writes of B; {shown} are the limits of many writes of "
            f"A that start from the state after {boost} writes of B. It prints no figures of the last two rules."
        )
    else:
        notes.append("The paper prints no figures for these settings.")
    out.print("\n".join(notes), style="dim", highlight=False)
