"""``surgery reproduce`` repeats the paper's controlled experiment and prints measured beside expected."""

from __future__ import annotations

from typing import Annotated

import typer

from surgery.cli.common import JsonOption, err, out, write_json
from surgery.cli.reproduce_operation import operation


def collision(
    overlap: Annotated[float, typer.Option(help="Overlap of the unit keys A and B, in (-1, 1).")] = 0.92,
    boost: Annotated[int, typer.Option(help="Writes of B after the seed writes.")] = 40,
    flood: Annotated[int, typer.Option(help="Writes of A after those.")] = 60,
    dim: Annotated[int, typer.Option(help="Key width, at least 6.")] = 16,
    noise: Annotated[float, typer.Option(help="Observation noise r^2 and process noise l^2.")] = 0.05,
    plot: Annotated[str | None, typer.Option(metavar="PATH", help="Draw both rules over the writes.")] = None,
    json: JsonOption = None,
) -> None:
    """Boost B, flood A, read with B: a propagated covariance protects B where a reset one loses it.

    [dim]Examples[/dim]
      surgery reproduce collision
      surgery reproduce collision --overlap 0.8 --flood 256 --plot collision.png
      surgery reproduce collision --json -
    """
    from surgery import reproduce

    result = reproduce.collision(reproduce.Settings(overlap, boost, flood, dim, noise))
    if plot is not None:
        reproduce.plot(result, plot)
        err.print(f"wrote {plot}", highlight=False, soft_wrap=True)
    if write_json(result.as_dict(), json):
        return
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("p(B against A)", "rule", "measured", "expected", "paper", "expected from"):
        table.add_column(title, justify="right" if title in ("measured", "expected", "paper") else "left")
    rows = {
        "boost": (f"{boost} writes of B", "Bayesian", "scalar Riccati map"),
        "bayesian_flood": (f"then {flood} of A", "Bayesian", "scalar Riccati map"),
        "reset_flood": (f"then {flood} of A", "reset", "geometric series"),
    }
    printed = result.printed or {}
    for name, (writes, rule, source) in rows.items():
        paper = f"{printed[name]:.5f}" if printed else "-"
        table.add_row(writes, rule, f"{result.measured[name]:.5f}", f"{result.expected[name]:.5f}", paper, source)
    out.print(table)
    notes = ["Read with key B. Expected: from scalars and the memory before those writes; many of B give sigmoid(1)."]
    if printed:
        shown = f"{printed['bayesian_flood']:.5f} and {printed['reset_flood']:.5f}"
        notes.append(
            f"Paper: {printed['boost']:.5f} is the limit of many writes of B; {shown} are the limits of many writes of "
            f"A that start from the state after {boost} writes of B."
        )
    else:
        notes.append("The paper prints no figures for these settings.")
    out.print("\n".join(notes), style="dim", highlight=False)


def register(app: typer.Typer) -> None:
    group = typer.Typer(no_args_is_help=True, rich_markup_mode="rich")

    @group.callback()
    def reproduce() -> None:
        """Repeat the paper's controlled experiment: measured beside expected.

        [dim]Example[/dim]
        surgery reproduce collision --plot collision.png
        """

    group.command()(collision)
    group.command()(operation)
    app.add_typer(group, name="reproduce")
