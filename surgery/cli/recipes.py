"""``surgery recipes``: the recipes that ship, and one of them as it stands."""

from __future__ import annotations

import sys

import typer


def recipes(context: typer.Context) -> None:
    """List the recipes that ship with surgery.

    [dim]Examples[/dim]
      surgery recipes
      surgery recipes show demo-bayesian
      surgery recipes show demo-bayesian > mine.yaml
    """
    if context.invoked_subcommand is not None:
        return
    from rich.table import Table

    from surgery.cli.common import out
    from surgery.recipe import load_recipe, shipped
    from surgery.sizes import format_count

    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("recipe", "model", "layers", "memory", "phases"):
        table.add_column(title, overflow="fold", no_wrap=title in ("recipe", "layers"))
    for name in shipped():
        recipe = load_recipe(name)
        budgets = [(phase.kind, format_count(phase.tokens or phase.total_tokens)) for phase in recipe.phases]
        phases = ", ".join(f"{kind} {tokens}" for kind, tokens in budgets)
        table.add_row(name, recipe.model, recipe.layers_text, recipe.memory.rule, phases or "none")
    out.print(table)


def show(name: str = typer.Argument(..., help="A shipped recipe's name, or a path.")) -> None:
    """Print a recipe's file, verbatim.

    [dim]Example[/dim]
      surgery recipes show demo-palimpsa > mine.yaml
    """
    from surgery.recipe import load_recipe

    text = load_recipe(name).text
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(encoding="utf-8")  # a recipe's own, whatever the terminal's
    sys.stdout.write(text)


def register(app: typer.Typer) -> None:
    group = typer.Typer(invoke_without_command=True, rich_markup_mode="rich")
    group.callback()(recipes)
    group.command()(show)
    app.add_typer(group, name="recipes")
