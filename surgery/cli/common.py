"""What the commands share: consoles, the device, where results go."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text

from surgery.cli.terminal import console
from surgery.errors import UsageError
from surgery.results import json_text

out = console()  # results
err = console(stderr=True)  # progress and remarks


def bold(text: object) -> Text:
    """``text`` as it is, in bold."""
    return Text(str(text), style="bold")


def _check_json(value: str | None) -> str | None:
    """Found before any work: a place where no file can be written."""
    if value not in (None, "-"):
        from surgery.checkpoint.staging import check_file

        check_file(Path(value), "--json")
    return value


JsonOption = Annotated[
    str | None,
    typer.Option(
        "--json",
        metavar="PATH|-",
        callback=_check_json,
        help="Write the result as JSON to a file, or alone to stdout with '-'.",
    ),
]


def _until_the_end(context: typer.Context, value: str) -> str:
    """Give :func:`pick_device` a place for what holds until the command ends."""
    _commands.append(context.with_resource(ExitStack()))
    _commands[-1].callback(_commands.pop)
    return value


_commands: list[ExitStack] = []
DeviceOption = Annotated[
    str,
    typer.Option("--device", metavar="auto|cpu|cuda", callback=_until_the_end, help="Where to compute."),
]


RevisionOption = Annotated[
    str | None, typer.Option("--revision", metavar="REV", help="Branch, tag or commit of a hub id; default: main.")
]


def check_revision(option: str, revision: str | None, model: str) -> None:
    """Refuse a revision of what comes from no hub, where it would be ignored.

    Raises:
        UsageError: naming the option.
    """
    from surgery.hosts import on_hub

    if revision is not None and not on_hub(model):
        raise UsageError(f"{option} {revision}: {model} is no hub id, and only those have revisions; leave it out")


@contextmanager
def named(option: str) -> Iterator[None]:
    """Put the option in front of an error about what it names."""
    try:
        yield
    except UsageError as error:
        raise UsageError(f"{option} {error}") from None


def _allow_pickle(context: typer.Context, value: bool) -> bool:
    """Holds until the command ends."""
    if value:
        from surgery.checkpoint.pickles import pickles_allowed

        context.with_resource(pickles_allowed())
    return value


AllowPickleOption = Annotated[
    bool,
    typer.Option(
        "--allow-pickle",
        callback=_allow_pickle,
        help="Read a base whose weights are pickled (pytorch_model.bin); they are converted to safetensors once.",
    ),
]


def _trust_remote_code(context: typer.Context, value: bool) -> bool:
    """Holds until the command ends."""
    if value:
        from surgery.checkpoint.remote_code import code_allowed

        context.with_resource(code_allowed())
    return value


TrustOption = Annotated[
    bool,
    typer.Option(
        "--trust-remote-code",
        callback=_trust_remote_code,
        help="Run a tokenizer's code that comes with the model, if the recipe says trust_remote_code: true as well.",
    ),
]


def pick_device(name: str) -> str:
    """The torch device for ``auto``, ``cpu`` or ``cuda``.

    Until the command ends, the shell's environment does not change what is computed there; see
    :mod:`surgery.environment`.

    Raises:
        UsageError: unknown name, cuda where there is none, or a variable that would change what is computed.
    """
    import os

    import torch

    from surgery.environment import shielded

    if name not in ("auto", "cpu", "cuda"):
        raise UsageError(f"--device {name}: choose auto, cpu or cuda")
    if name == "cuda" and not torch.cuda.is_available():
        raise UsageError("--device cuda: no CUDA device is visible; use --device cpu")
    device = "cuda" if name != "cpu" and torch.cuda.is_available() else "cpu"
    if _commands:
        say = partial(err.print, style="dim", highlight=False, markup=False, soft_wrap=True)
        _commands[-1].enter_context(shielded(device, say if os.environ.get("RANK", "0") == "0" else lambda text: None))
    return device


def write_json(result: Any, target: str | None) -> bool:
    """Write ``result`` to ``target``; returns whether stdout was taken (so that tables stay away from it)."""
    if target is None:
        return False
    text = json_text(result)
    if target == "-":
        print(text)
        return True
    from surgery.checkpoint.staging import write_result

    write_result(Path(target), text + "\n")
    return False
