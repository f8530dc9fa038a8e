"""What is printed, and what becomes of it on a terminal or a pipe that cannot take it.

A user's names and paths are never read as markup, a character that the encoding lacks is replaced, and a reader that
goes away (``| head -1``) ends the printing, not the work.
"""

from __future__ import annotations

import contextlib
import os
import sys
from typing import Any, TextIO

from rich.console import Console


def console(stderr: bool = False) -> Console:
    """A console that takes text for text: no markup in brackets, no emoji between colons. Styles come with
    :class:`rich.text.Text`."""
    return Console(stderr=stderr, markup=False, emoji=False)


class Tolerant:
    """A text stream that drops what is written once its reader has gone away."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def __iter__(self) -> Any:
        return iter(self._stream)

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except BrokenPipeError:
            self._discard()
            return len(text)

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except BrokenPipeError:
            self._discard()

    def _discard(self) -> None:
        """Lead what follows, and what is still in the buffer, to nowhere: not an error at exit either."""
        with contextlib.suppress(OSError, ValueError):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._stream.fileno())
            os.close(nowhere)


def make_tolerant() -> None:
    """Let stdout and stderr replace the characters that they lack, and survive the loss of their reader."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None or isinstance(stream, Tolerant):
            continue
        with contextlib.suppress(AttributeError, OSError, ValueError):  # of a caller's own: no such method, or closed
            # not surrogateescape or strict either: a file's name may hold bytes that are no text
            stream.reconfigure(errors="replace")
        setattr(sys, name, Tolerant(stream))
