"""``surgery hosts``: the model families that can be operated on."""

from __future__ import annotations

import sys

import typer

from surgery.cli.common import JsonOption


def hosts(
    json: JsonOption = None,
    markdown: bool = typer.Option(False, "--markdown", help="As a Markdown table."),
) -> None:
    """List the model families that surgery opens, and what each memory rule is on them at dose 0.

    "exact" computes what the untouched model computes; "approximate" does not, and apply measures by how much.

    [dim]Examples[/dim]
      surgery hosts
      surgery hosts --json -
    """
    from rich.table import Table

    from surgery.cli.common import out, write_json
    from surgery.hosts.support import RULES, support
    from surgery.hosts.support import markdown as as_markdown

    rows = support()
    if write_json([row.as_dict() for row in rows], json):
        return
    if markdown:
        sys.stdout.write(as_markdown())
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("host", "model_type", "swapped", *RULES):
        table.add_column(title, overflow="fold")
    for row in rows:
        table.add_row(row.title, row.model_type or "none", row.mixer, *(row.rules[rule] for rule in RULES))
    out.print(table)


def register(app: typer.Typer) -> None:
    app.command()(hosts)
