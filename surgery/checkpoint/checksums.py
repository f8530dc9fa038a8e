"""Say of every file of a directory which bytes were written, and find later whether they are still those.

``complete.json`` is written last. It holds {"files": {name: {"bytes": N, "sha256": hex}}} and what else a writer keeps
with them. The version before wrote {name: N}: such files are compared by their size alone.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from stat import S_ISREG
from typing import Any

from surgery.checkpoint.staging import write_atomic
from surgery.errors import UsageError

COMPLETE = "complete.json"
THREADS = 8  # files hashed at once; hashing lets the interpreter go


@dataclass(frozen=True)
class Checksums:
    """What ``complete.json`` says.

    Attributes:
        files: name -> bytes and SHA-256; None in place of the latter where it was not kept.
        about: what else stands there.
    """

    files: dict[str, tuple[int, str | None]]
    about: dict[str, Any] = field(default_factory=dict)

    @property
    def hashed(self) -> bool:
        """Whether there are checksums, and not sizes alone."""
        return all(digest is not None for _, digest in self.files.values())


def sha256(file: Path) -> str:
    """The SHA-256 of a file in hexadecimal digits."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def entry(file: Path) -> dict[str, Any]:
    """A file's bytes and SHA-256, as they stand in ``complete.json``."""
    return {"bytes": file.stat().st_size, "sha256": sha256(file)}


def describe_files(directory: Path, names: Iterable[str]) -> dict[str, dict[str, Any]]:
    """:func:`entry` of several files by name, largest shards side by side."""
    names = list(names)
    with ThreadPoolExecutor(THREADS) as pool:
        return dict(zip(names, pool.map(lambda name: entry(directory / name), names), strict=True))


def write_checksums(directory: Path, about: Mapping[str, Any] | None = None) -> None:
    """Write ``complete.json`` for all files that ``directory`` holds now, on the disk in one step and after them."""
    files = describe_files(directory, content_names(directory))
    for name in files:
        with (directory / name).open("rb") as stream:
            os.fsync(stream.fileno())
    write_atomic(directory / COMPLETE, json.dumps({"files": files, **(about or {})}, indent=1) + "\n")


def read_checksums(directory: Path) -> Checksums | None:
    """What ``complete.json`` of a directory says; None where it is not there.

    Raises:
        ValueError: it is not what was written.
    """
    try:
        text = (directory / COMPLETE).read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    try:
        value = json.loads(text)
    except RecursionError:  # a list as deep as Python's stack: damage like any other
        raise ValueError("nested too deep") from None
    if not isinstance(value, dict):
        raise ValueError("it holds no list of files")
    if value and all(type(size) is int for size in value.values()):  # of the version before
        _require_inside(value)
        return Checksums({name: (size, None) for name, size in value.items()})
    files = value.pop("files", None)
    if not isinstance(files, dict):
        raise ValueError("it holds no list of files")
    _require_inside(files)
    found: dict[str, tuple[int, str | None]] = {}
    for name, row in files.items():
        if not isinstance(row, dict) or type(row.get("bytes")) is not int or not isinstance(row.get("sha256"), str):
            raise ValueError(f"it says no bytes and sha256 of {name}")
        found[name] = (row["bytes"], row["sha256"])
    return Checksums(found, value)


def _require_inside(names: Iterable[str]) -> None:
    """Names lead to files of the directory, and to no device whose bytes never end."""
    for name in names:
        if not name or "\0" in name or Path(name).is_absolute() or ".." in Path(name).parts:
            raise ValueError(f"it names {name[:80]!r}, which is no file of this directory")


def about(directory: Path) -> dict[str, Any]:
    """What :func:`write_checksums` was given to keep; nothing where there is no ``complete.json``.

    Raises:
        ValueError: it is not what was written.
    """
    found = read_checksums(directory)
    return {} if found is None else found.about


def identity(model: Path) -> str | None:
    """A digest of a checkpoint directory's weights and configuration, from its checksums; None where it has none."""
    kept = read_checksums(model)
    if kept is None:
        return None
    named = {name: row for name, row in kept.files.items() if name.endswith(".safetensors") or name == "config.json"}
    return hashlib.sha256(json.dumps(named, sort_keys=True).encode()).hexdigest()


def require_whole(directory: Path) -> None:
    """Refuse a directory whose files are not those that its ``complete.json`` lists; one without it passes.

    Raises:
        UsageError: naming the file.
    """
    if (directory / COMPLETE).is_file() and (found := damage(directory)):
        raise UsageError(
            f"{directory}: damaged: {first_of(found)}\n"
            f"  put the file back from a copy; if you changed it yourself, remove {directory / COMPLETE}"
        )


def damage(directory: Path, *, sizes_only: bool = False) -> list[str]:
    """Sentences about the files of a directory that are not what ``complete.json`` says; none: it is whole.

    Args:
        sizes_only: do not read the files themselves.
    """
    try:
        checksums = read_checksums(directory)
    except (OSError, ValueError) as error:
        return [f"{COMPLETE} cannot be read: {str(error).splitlines()[0]}"]
    if checksums is None:
        return [f"{COMPLETE} is missing"]
    found: dict[str, str] = {}
    for name, (size, _) in checksums.files.items():
        try:
            status = (directory / name).stat()
        except OSError:
            found[name] = f"{name} is missing"
        else:
            now = status.st_size
            if not S_ISREG(status.st_mode):
                found[name] = f"{name} is no regular file"
            elif now != size:
                found[name] = f"{name} holds {now:,} bytes and was written with {size:,}"
    if not sizes_only:
        for name in content_names(directory):
            if name not in checksums.files:
                found[name] = f"{name} was not there when it was written"
        names = [name for name, (_, digest) in checksums.files.items() if digest is not None and name not in found]
        with ThreadPoolExecutor(THREADS) as pool:
            digests = list(pool.map(lambda name: _readable(directory / name), names))
        for name, digest in zip(names, digests, strict=True):
            if digest is None:
                found[name] = f"{name} cannot be read"
            elif digest != checksums.files[name][1]:
                found[name] = f"{name} is not what was written (its SHA-256 differs)"
    return list(found.values())


def first_of(sentences: list[str]) -> str:
    """The first sentence, and how many more there are."""
    return sentences[0] + (f", and {len(sentences) - 1} more" if len(sentences) > 1 else "")


def _readable(file: Path) -> str | None:
    try:
        return sha256(file)
    except OSError:
        return None


def content_names(directory: Path) -> list[str]:
    """The files of a directory that are its content: no hidden ones, no compiled Python, not the list itself."""
    names = []
    for file in sorted(directory.rglob("*")):
        parts = file.relative_to(directory).parts
        if file.is_file() and not any(part.startswith(".") or part == "__pycache__" for part in parts):
            names.append("/".join(parts))
    return [name for name in names if name != COMPLETE]
