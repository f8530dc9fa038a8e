"""Bring a file to another place: copied byte for byte, or sharing its bytes on the disk."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Literal

try:
    import fcntl
except ImportError:  # not on Windows
    fcntl = None

BLOCK = 1 << 18  # 256 KiB stay in a core's cache: measured fastest, before 1 and 16 MiB, sendfile and copy_file_range
REPORT = 1 << 24  # bytes between two reports of progress
_FICLONE = 0x40049409  # linux/fs.h: the target shares the source's blocks until either is written

Progress = Callable[[int], None]
How = Literal["copy", "reflink", "hard link"]


def copy_file(source: Path, target: Path, progress: Progress | None = None) -> How:
    """Copy the content of one file to a new one, reporting bytes as they go.

    Where the file system can share blocks until one side is written (btrfs, XFS), that is done instead.
    """
    report = progress or (lambda _: None)
    target.parent.mkdir(parents=True, exist_ok=True)
    with source.open("rb", buffering=0) as reader, target.open("wb", buffering=0) as writer:
        if _clone(reader.fileno(), writer.fileno()):
            report(os.fstat(reader.fileno()).st_size)
            return "reflink"
        block = memoryview(bytearray(BLOCK))
        done = unreported = 0
        _read_ahead(reader.fileno(), done)
        while count := reader.readinto(block):
            written = 0
            while written < count:  # a raw write may take less than it was given
                written += writer.write(block[written:count])
            unreported += count
            if unreported >= REPORT:
                report(unreported)
                done, unreported = done + unreported, 0
                _read_ahead(reader.fileno(), done)
        if unreported:
            report(unreported)
    return "copy"


def link_file(source: Path, target: Path, progress: Progress | None = None) -> How:
    """Give one file a second place that shares its bytes: a reflink where there is such a thing, otherwise a hard link,
    and a copy where neither can be had, as between file systems.

    A hard link is one file under two names. Whoever writes into one writes into both; whoever writes beside and
    renames, as everything here does, leaves the other as it was.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(OSError), source.open("rb") as reader, target.open("xb") as writer:
        if _clone(reader.fileno(), writer.fileno()):
            if progress is not None:
                progress(os.fstat(reader.fileno()).st_size)
            return "reflink"
    target.unlink(missing_ok=True)
    try:
        os.link(source.resolve(), target)  # resolved: a hub's cache holds symbolic links
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise
        return copy_file(source, target, progress)
    if progress is not None:
        progress(target.stat().st_size)
    return "hard link"


def same_file_system(source: Path, target: Path) -> bool:
    """Whether two existing paths lie on one file system, so that a link between them is likely to succeed."""
    return source.stat().st_dev == target.stat().st_dev


def _read_ahead(handle: int, done: int) -> None:
    """Let the system read what comes next while what came before is written: half the time from a cold disk."""
    if hasattr(os, "posix_fadvise"):
        with contextlib.suppress(OSError):
            os.posix_fadvise(handle, done + (REPORT if done else 0), 2 * REPORT, os.POSIX_FADV_WILLNEED)


def _clone(source: int, target: int) -> bool:
    """Share all blocks of an open file with an empty one; False where the file system has no such thing."""
    if fcntl is None:
        return False
    try:
        fcntl.ioctl(target, _FICLONE, source)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise
        return False
    return True
