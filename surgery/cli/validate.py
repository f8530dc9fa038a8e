"""``surgery validate``: everything that can be known about a recipe before any work."""

from __future__ import annotations

from typing import Annotated

import typer

from surgery.cli.common import AllowPickleOption, JsonOption, TrustOption

RecipeArgument = Annotated[str, typer.Argument(metavar="RECIPE", help="A shipped recipe's name, or a YAML file.")]
SetOption = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change one value: phases.0.tokens=1M")
]
OfflineOption = Annotated[bool, typer.Option("--offline", help="Never ask a hub; use what is on this machine.")]


def validate(
    recipe: RecipeArgument,
    settings: SetOption = None,
    allow_pickle: AllowPickleOption = False,
    trust_remote_code: TrustOption = False,
    json_target: JsonOption = None,
) -> None:
    """Check a recipe: its keys always, its model and its text where they are on this machine.

    Nothing is downloaded. What could not be checked is listed as such, and is no failure.

    [dim]Examples[/dim]
      surgery validate demo-bayesian
      surgery validate mine.yaml --set phases.0.tokens=1M
      surgery validate mine.yaml --json -
    """
    from rich.table import Table
    from rich.text import Text

    from surgery.checkpoint.remote_code import recipe_says
    from surgery.cli.common import out, write_json
    from surgery.cli.progress import progress_bars
    from surgery.recipe import load_recipe
    from surgery.validation import validate_recipe

    loaded = load_recipe(recipe, settings or ())
    recipe_says(loaded.trust_remote_code)
    with progress_bars() as bars:
        checked = validate_recipe(loaded, bars)
    if write_json(checked, json_target):
        return
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(style="bold")
    table.add_column()
    table.add_column(overflow="fold")
    for check in checked["checks"]:
        mark = Text("ok", style="green") if check["checked"] else Text("not checked", style="yellow")
        table.add_row(check["what"], mark, check["detail"])
    out.print(table)
    if checked["phases"]:
        phases = Table(box=None, pad_edge=False, header_style="bold")
        for title in ("phase", "kind", "tokens", "steps", "context", "learning rate", "dose"):
            phases.add_column(title, justify="left" if title in ("phase", "kind") else "right")
        for phase in checked["phases"]:
            phases.add_row(*map(str, phase.values()))
        out.print(phases)


def register(app: typer.Typer) -> None:
    app.command()(validate)
