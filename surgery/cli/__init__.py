"""The command line: ``surgery COMMAND``. Each command is one file; this one only gathers them."""

from __future__ import annotations

import importlib
import sys
from inspect import cleandoc  # surgery.cli.inspect takes the module's own name

import typer

# each is surgery/cli/NAME.py with a register(app); in the order that a user meets them
COMMANDS: tuple[str, ...] = (
    "demo",
    "inspect",
    "eval",
    "recipes",
    "validate",
    "apply",
    "revert",
    "distill",
    "export",
    "verify",
    "reproduce",
    "check",
    "hosts",
)

app = typer.Typer(
    name="surgery",
    help="Swap the memory of Mamba2, Gated DeltaNet and Kimi Delta Attention layers in pretrained language models.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)


def _register() -> None:
    if app.registered_commands:
        return
    for name in COMMANDS:
        module = importlib.import_module(f"surgery.cli.{name}")
        module.register(app)
    _reflow(app)


def _reflow(group: typer.Typer) -> None:
    """Join each paragraph of the help texts into one line, which the terminal then breaks at its own width; the
    examples keep theirs."""
    for command in group.registered_commands:
        paragraphs = cleandoc(command.help or command.callback.__doc__ or "").split("\n\n")
        command.help = "\n\n".join(
            part if part.startswith("[dim]Example") else part.replace("\n", " ") for part in paragraphs
        )
    for child in group.registered_groups:
        _reflow(child.typer_instance)


def main() -> None:
    """Entry point: prints a user's errors in a few lines, with a traceback only under ``--debug``."""
    from surgery.cli.terminal import make_tolerant
    from surgery.errors import UserError

    make_tolerant()
    debug = "--debug" in sys.argv
    if debug:
        sys.argv.remove("--debug")
    _register()
    try:
        app()
    except UserError as error:
        if debug:
            raise
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)
    except Exception as error:
        if debug:
            raise
        if _is_out_of_memory(error):
            print(
                "error: there is not enough memory for this\n  use a smaller model, context or batch, "
                "or a machine with more",
                file=sys.stderr,
            )
            sys.exit(1)
        from surgery.checkpoint.staging import is_full

        if is_full(error):
            place = getattr(error, "filename", None) or "the disk that is written to"
            print(f"error: {place}: no space left\n  free some, or name a directory elsewhere", file=sys.stderr)
        elif isinstance(error, OSError) and error.filename is not None:  # says all there is to know
            print(f"error: {error.filename}: {error.strerror}\n  check this place and its rights", file=sys.stderr)
        else:
            print(f"error: {type(error).__name__}: {error}\nrun again with --debug for the traceback", file=sys.stderr)
        sys.exit(1)


def _is_out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out, Python's, the CPU's or a GPU's: torch says the second in the text of a RuntimeError."""
    words = ("can't allocate memory", "CUDA out of memory", "Cannot allocate memory", "not enough memory")
    return isinstance(error, MemoryError) or any(word in str(error) for word in words)
