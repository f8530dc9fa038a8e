"""``surgery reproduce`` repeats the papers' experiments and this project's own; each is a file beside this one."""

from __future__ import annotations

import typer

from surgery.cli.reproduce_addressed import crowding, learned_collision
from surgery.cli.reproduce_collision import collision
from surgery.cli.reproduce_geometry import geometry
from surgery.cli.reproduce_importance import importance
from surgery.cli.reproduce_mqar import mqar
from surgery.cli.reproduce_operation import operation

EXPERIMENTS = (
    collision,
    geometry,
    learned_collision,
    crowding,
    mqar,
    importance,
    operation,
)


def register(app: typer.Typer) -> None:
    group = typer.Typer(no_args_is_help=True, rich_markup_mode="rich")

    @group.callback()
    def reproduce() -> None:
        """Repeat the papers' experiments: measured beside printed.

        [dim]Example[/dim]
        surgery reproduce collision --plot collision.png
        """

    for experiment in EXPERIMENTS:
        group.command()(experiment)
    app.add_typer(group, name="reproduce")
