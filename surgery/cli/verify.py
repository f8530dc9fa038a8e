"""``surgery verify``: whether an exported directory is what was exported."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from surgery.cli.common import JsonOption


def verify(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="A directory that surgery export wrote.")],
    json_target: JsonOption = None,
) -> None:
    """Check an exported model: files, code, tensors and logits.

    Every file against the SHA-256 in surgery_manifest.json; the modelling code against the manifest and, if it is of
    the installed version, against the package; shapes and values of all tensors; and the logits of a few tokens,
    computed in float32 on the CPU with the package's own classes, against those of the export. No code of the directory
    is run. The manifest is no signature: it finds damage and mistakes, not someone who rewrites both. Exit code 1 if a
    check fails, 2 if there is no manifest.

    [dim]Examples[/dim]
      surgery verify my-model
      surgery verify my-model --json -
    """
    from rich.table import Table
    from rich.text import Text

    from surgery.cli.common import err, out, write_json
    from surgery.errors import JobError
    from surgery.export.checking import verify as operate

    done = operate(directory)
    if not write_json(done.as_dict(), json_target):
        table = Table(box=None, pad_edge=False, show_header=False)
        table.add_column(style="bold")
        table.add_column()
        table.add_column(overflow="fold")
        for finding in done.findings:
            for fault in finding.faults or [None]:
                verdict = Text("good", style="green") if fault is None else Text("wrong", style="red")
                table.add_row(finding.check, verdict, Text(fault or finding.good))
        out.print(table)
    for note in done.notes:
        err.print(Text("note:", style="yellow") + f" {note}", highlight=False, soft_wrap=True)
    failed = [finding for finding in done.findings if finding.faults]
    if failed:
        more = sum(len(finding.faults) for finding in failed) - 1
        raise JobError(
            f"{directory}: {failed[0].check}: {failed[0].faults[0]}" + (f", and {more} more" if more else "") + "\n"
            "  get the model again from where it was published, or export it again"
        )


def register(app: typer.Typer) -> None:
    app.command()(verify)
