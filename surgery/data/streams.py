"""Files as bytes and as lines, whatever compresses them."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from surgery.data.forms import COMPRESSIONS, HEAD
from surgery.errors import UsageError

Told = Callable[[int], object]  # called with the bytes of the file, as it lies on the disk, that were read so far

MARK = "\ufeff"
_READ_ERRORS = (EOFError, lzma.LZMAError, zlib.error)
_TELL_EVERY = 512  # lines


@contextmanager
def open_bytes(path: Path) -> Iterator[tuple[BinaryIO, BinaryIO]]:
    """Open a file for reading: what is in it, decompressed, and the file itself, whose position tells the progress.

    Raises:
        UsageError: it cannot be opened.
    """
    try:
        raw = path.open("rb")
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror or error}") from None
    with raw:
        suffix = path.suffix.lower()
        if suffix not in COMPRESSIONS:
            yield raw, raw
        elif suffix == ".zst":
            import pyarrow  # Python reads Zstandard by itself from 3.14 on

            stream = pyarrow.CompressedInputStream(pyarrow.PythonFile(raw, mode="r"), "zstd")
            yield io.BufferedReader(stream, 1 << 16), raw
        else:
            opener = {".gz": gzip.open, ".xz": lzma.open, ".bz2": bz2.open}[suffix]
            with opener(raw, "rb") as stream:
                yield stream, raw


def head_of(path: Path) -> bytes:
    """The first bytes of what is in a file.

    Raises:
        UsageError: it cannot be read.
    """
    with open_bytes(path) as (stream, _), reading(path):
        return stream.read(HEAD)


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn what reading a damaged file raises into one error that names it."""
    try:
        yield
    except UnicodeDecodeError as error:
        place = _undecodable(path)
        raise UsageError(
            f"{path}: not UTF-8 text ({error.reason}{place}); convert it first, as with iconv -t UTF-8"
        ) from None
    except OSError as error:  # of a directory the name is that of what lies in it
        raise UsageError(f"{error.filename or path}: cannot be read: {error.strerror or error}") from None
    except _READ_ERRORS as error:
        raise UsageError(f"{path}: cannot be read: {error}") from None


def read_lines(path: Path, told: Told | None = None, longest: int = -1) -> Iterator[str]:
    """A file's lines with their ends as they are, without byte order marks, which stand within where files were joined;
    a line longer than ``longest`` characters comes in parts.

    Raises:
        UsageError: it cannot be read, or is not UTF-8.
    """
    with open_bytes(path) as (stream, raw), reading(path):
        text = io.TextIOWrapper(stream, encoding="utf-8", newline="")
        count, begins = 0, True
        while line := text.readline(longest):
            kept = line.lstrip(MARK) if begins else line
            if kept:
                yield kept
            begins = line.endswith(("\n", "\r"))
            count += 1
            if told is not None and (count % _TELL_EVERY == 0 or len(line) > HEAD):
                told(raw.tell())
        text.detach()


def read_whole(path: Path) -> str:
    """All of a file's text, without a byte order mark.

    Raises:
        UsageError: it cannot be read, or is not UTF-8.
    """
    with open_bytes(path) as (stream, _), reading(path):
        return stream.read().decode("utf-8").lstrip(MARK)


def _undecodable(path: Path) -> str:
    """The line at which decoding fails, in words; a second reading, made only for the error."""
    with open_bytes(path) as (stream, _):
        for number, line in enumerate(stream, 1):
            try:
                line.decode("utf-8")
            except UnicodeDecodeError:
                return f" in line {number}"
    return ""
