"""``surgery revert``: swapped layers get their host's own mixer back."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from surgery.cli.common import JsonOption, RevisionOption


def revert(
    model: Annotated[
        str, typer.Argument(metavar="CHECKPOINT", help="A swapped checkpoint directory, a run, or a hub id.")
    ],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="DIR", help="The directory to write; must be new or empty.")
    ] = None,
    layers: Annotated[
        str | None, typer.Option("--layers", metavar="N,N,...", help="Only these; default: every swapped layer.")
    ] = None,
    revision: RevisionOption = None,
    json_target: JsonOption = None,
) -> None:
    """Give swapped layers their host's own mixer back.

    The tensors that a swap added are left out, the host's are written as they are, and without swapped layers the
    configuration is the base's again. After a swap alone that is the base, byte for byte; after training the host's
    tensors are the trained ones, and where the base is on this machine it is said which.

    [dim]Examples[/dim]
      surgery revert swapped --output restored
      surgery revert swapped --output fewer --layers 3,7
      surgery revert runs/mine --output trained-host --json -
    """
    from rich.text import Text

    from surgery.cli.common import check_revision, err, out, write_json
    from surgery.errors import UsageError
    from surgery.revert import revert as operate

    if output is None:
        raise UsageError("--output is missing; name the directory to write")
    check_revision("--revision", revision, model)
    done = operate(model, output, None if layers is None else _numbers(layers), revision=revision)
    if done.identical is not True:
        err.print(Text("note:", style="yellow") + f" {done.sentence()}", highlight=False, soft_wrap=True)
    if done.own_head:
        err.print(Text("note:", style="yellow") + f" {done.own_head}", highlight=False, soft_wrap=True)
    if write_json(done.as_dict(), json_target):
        return
    back = ", ".join(map(str, done.layers))
    out.print(f"layers {back} hold the host's own mixer again; {len(done.removed)} tensors left out", highlight=False)
    if done.remaining:
        out.print(f"still swapped: layers {', '.join(map(str, done.remaining))}", highlight=False)
    if done.identical:
        out.print(done.sentence(), highlight=False, soft_wrap=True)
    out.print(f"Written: {done.output}", highlight=False, soft_wrap=True)


def _numbers(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",") if part.strip()]
    except ValueError:
        from surgery.errors import UsageError

        raise UsageError(f"--layers {text}: write numbers, as in 3,7") from None


def register(app: typer.Typer) -> None:
    app.command()(revert)
