"""A phase's checkpoints: complete or not there, found again on resume.

A checkpoint directory is written beside its place, lists its own files with their sizes, and gets its name last. What
a killed run leaves half-written is never taken for one.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path

COMPLETE = "complete.json"
KEPT = 2
_NAME = re.compile(r"checkpoint-(\d+)")


def staging(folder: Path) -> Path:
    """Where a checkpoint of ``folder`` is written before it gets its name."""
    return folder / ".partial"


def publish(partial: Path, final: Path) -> None:
    """Close the checkpoint in ``partial`` with the list of its files and give it its name, replacing a former one."""
    files = {str(file.relative_to(partial)): file.stat().st_size for file in partial.rglob("*") if file.is_file()}
    with (partial / COMPLETE).open("w", encoding="utf-8") as stream:
        json.dump(files, stream)
    for name in (*files, COMPLETE):
        with (partial / name).open("rb") as stream:
            os.fsync(stream.fileno())
    if final.exists():
        shutil.rmtree(final)
    os.rename(partial, final)


def step_of(checkpoint: Path) -> int:
    """The optimizer step after which ``checkpoint`` was written."""
    match = _NAME.fullmatch(checkpoint.name)
    assert match is not None, checkpoint
    return int(match[1])


def is_complete(checkpoint: Path) -> bool:
    """Whether every file that the checkpoint lists is there at its size."""
    try:
        files = json.loads((checkpoint / COMPLETE).read_text(encoding="utf-8"))
        return all((checkpoint / name).stat().st_size == size for name, size in files.items())
    except (OSError, ValueError, AttributeError):
        return False


def complete(folder: Path) -> list[Path]:
    """The complete checkpoints of ``folder``, by step."""
    if not folder.is_dir():
        return []
    named = [entry for entry in folder.iterdir() if entry.is_dir() and _NAME.fullmatch(entry.name)]
    return sorted((entry for entry in named if is_complete(entry)), key=step_of)


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
