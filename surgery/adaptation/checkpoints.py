"""A phase's checkpoints: complete or not there, found again on resume, and never resumed from changed bytes.

A checkpoint directory is written beside its place, lists its own files with their sizes and checksums, and gets its
name last. What a killed run leaves half-written is never taken for one.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from surgery.checkpoint import checksums
from surgery.checkpoint.checksums import COMPLETE as COMPLETE

KEPT = 2
_NAME = re.compile(r"checkpoint-(\d+)")


def staging(folder: Path) -> Path:
    """Where a checkpoint of ``folder`` is written before it gets its name."""
    return folder / ".partial"


def publish(partial: Path, final: Path, about: Mapping[str, Any] | None = None) -> None:
    """Close the checkpoint in ``partial`` with the list of its files and give it its name, replacing a former one.

    Args:
        about: what else the list keeps; see :func:`surgery.checkpoint.checksums.about`.
    """
    checksums.write_checksums(partial, about)
    if final.exists():
        shutil.rmtree(final)
    os.rename(partial, final)


def step_of(checkpoint: Path) -> int:
    """The optimizer step after which ``checkpoint`` was written."""
    match = _NAME.fullmatch(checkpoint.name)
    assert match is not None, checkpoint
    return int(match[1])


def is_complete(checkpoint: Path) -> bool:
    """Whether every file that the checkpoint lists is there at its size; :func:`last_whole` reads them too."""
    return not checksums.damage(checkpoint, sizes_only=True)


def complete(folder: Path) -> list[Path]:
    """The complete checkpoints of ``folder``, by step."""
    return [entry for entry in _named(folder) if is_complete(entry)]


def last_whole(folder: Path, say: Callable[[str], None]) -> Path | None:
    """The last checkpoint of ``folder`` that holds the bytes that were written; damaged ones after it are removed.

    Args:
        say: told which files of which checkpoint are damaged, and of a checkpoint that carries no checksums.
    """
    for checkpoint in reversed(_named(folder)):
        found = checksums.damage(checkpoint)
        if not found:
            kept = checksums.read_checksums(checkpoint)
            if kept is not None and not kept.hashed:
                say(f"{checkpoint}: an earlier version wrote it without checksums, so its files are taken as they are")
            return checkpoint
        say(f"{checkpoint}: {checksums.first_of(found)}; this checkpoint is damaged and is removed")
        shutil.rmtree(checkpoint)
    return None


def prune(folder: Path, keep: int = KEPT) -> None:
    """Remove all but the last ``keep`` complete checkpoints."""
    for old in complete(folder)[:-keep]:
        shutil.rmtree(old)


def discard_unfinished(folder: Path) -> None:
    """Remove what is not a complete checkpoint, left by a run that was killed."""
    if not folder.is_dir():
        return
    good = set(complete(folder))
    for entry in folder.iterdir():
        if entry.is_dir() and entry not in good and (entry == staging(folder) or _NAME.fullmatch(entry.name)):
            shutil.rmtree(entry)


def _named(folder: Path) -> list[Path]:
    if not folder.is_dir():
        return []
    return sorted((entry for entry in folder.iterdir() if entry.is_dir() and _NAME.fullmatch(entry.name)), key=step_of)
