"""Code that comes with a checkpoint, such as a tokenizer's: run only where the recipe and the command line both say so.

Model code of a repository is never run: a family is opened by its adapter or not at all.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_command: ContextVar[bool] = ContextVar("trust_remote_code_command", default=False)
_recipe: ContextVar[bool] = ContextVar("trust_remote_code_recipe", default=False)


@contextmanager
def code_allowed() -> Iterator[None]:
    """Within the block, what ``--trust-remote-code`` says; the recipe's word starts anew."""
    tokens = _command.set(True), _recipe.set(False)
    try:
        yield
    finally:
        _command.reset(tokens[0])
        _recipe.reset(tokens[1])


def recipe_says(trusted: bool) -> None:
    """What the recipe at work says under ``trust_remote_code``."""
    _recipe.set(trusted)


def trusted() -> bool:
    """Whether such code may be run."""
    return _command.get() and _recipe.get()
