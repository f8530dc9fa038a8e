"""The texts that bases are pretrained on, books and Python's standard library, and how they are cut."""

from __future__ import annotations

import lzma
import re
import sysconfig
from pathlib import Path

from surgery.errors import UsageError

BOOK_SEPARATOR = "\n\x1e\n"
# directories of the standard library that are left out: pydoc_data is the demo's text, the others are tests
LEFT_OUT = {"pydoc_data", "test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
PIECE = 200_000  # characters of a text that are tokenised at once


def read_text(path: Path) -> str:
    """A text file's content; ``.xz`` is unpacked."""
    if path.suffix == ".xz":
        with lzma.open(path, "rt", encoding="utf-8") as stream:
            return stream.read()
    return path.read_text(encoding="utf-8")


def split_books(text: str) -> list[str]:
    """The books of one file, which a line holding only U+001E separates."""
    return [book for part in text.split(BOOK_SEPARATOR) if (book := part.strip("\x1e\n"))]


def book_files(corpus: Path) -> list[Path]:
    """The corpus's training files, ``books-<number>.txt[.xz]``, sorted by name; never its held-out books.

    Raises:
        UsageError: there are none.
    """
    files = sorted(path for path in corpus.glob("books-*") if re.fullmatch(r"books-\d+\.txt(\.xz)?", path.name))
    if not files:
        raise UsageError(f"{corpus}: no books-<number>.txt.xz here; pass the directory that holds them")
    return files


def standard_library(root: Path | None = None) -> list[str]:
    """The source files of the running Python's standard library, without tests and ``pydoc_data``, sorted by path."""
    root = root or Path(sysconfig.get_paths()["stdlib"])
    texts = []
    for path in sorted(root.rglob("*.py")):
        if LEFT_OUT.isdisjoint(path.relative_to(root).parts[:-1]):
            text = path.read_text(encoding="utf-8", errors="ignore")
            if len(text) >= 200:
                texts.append(text)
    return texts


def sentence_starts(text: str) -> list[int]:
    """Where a sentence or a line begins."""
    return [0, *(match.end() for match in re.finditer(r"[.!?][\"')]*\s+(?=\S)|\n(?=\S)", text))]


def pieces(text: str, size: int = PIECE) -> list[str]:
    """``text`` cut at line ends into pieces of about ``size`` characters."""
    cut, at = [], 0
    while at < len(text):
        end = text.find("\n", at + size)
        end = len(text) if end < 0 else end + 1
        cut.append(text[at:end])
        at = end
    return cut
