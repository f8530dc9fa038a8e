"""One rule for the names that a user gives: a place on this machine, or something of a hub; and, where a place is not
there, what is near it."""

from __future__ import annotations

import difflib
import os
import re
from pathlib import Path

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9_][\w.-]*", re.ASCII)
LISTED = 10_000  # entries of a directory that are looked at for a near name

# of files that somebody meant; what else follows a dot may be a hub id's: owner/model-2.7b
FILE_SUFFIX = re.compile(
    r"\.(txt|text|md|rst|py|html|xml|pdf|log|jsonl?|ndjson|[ct]sv|parquet|arrow|feather|orc|ya?ml|toml|gz|xz|zstd?|bz2"
    r"|zip|tar|tgz|7z|safetensors|bin|pth?|ckpt|gguf|np[yz]|pkl|h5|msgpack|model)",
    re.IGNORECASE,
)


def on_machine(name: str, root: Path | None = None) -> Path | None:
    """The place that ``name`` stands for, from the current directory or from ``root``; None where there is none."""
    for path in _candidates(name, root):
        if os.path.lexists(path):
            return path
    return None


def is_hub_id(name: str, root: Path | None = None) -> bool:
    """Whether ``name`` is taken for ``owner/name`` of a hub. Nothing that looks like a path is.

    A path is what is there, starts with ``.``, ``/`` or ``~``, has no or several separators, ends in a file's suffix,
    or lies in a directory that is there.

    Args:
        root: the directory against which relative paths are taken when they do not stand in the current one.
    """
    if not HUB_ID.fullmatch(name) or ".." in name or "--" in name or name.endswith((".", "-")):
        return False  # the hub's own rules for names
    if FILE_SUFFIX.fullmatch(Path(name).suffix):
        return False
    return not any(os.path.lexists(path) or path.parent.is_dir() for path in _candidates(name, root))


def near(name: str, root: Path | None = None) -> str:
    """`` (near it: ...)`` for a place that is not there, or nothing: names alike in the directory that is."""
    for path in _candidates(name, root):
        found = difflib.get_close_matches(path.name, _listing(path.parent), n=2, cutoff=0.6)
        if found:
            return f" (near it: {', '.join(str(path.parent / one) for one in found)})"
        missing = next((up for up in reversed(path.parents) if not up.exists()), None)
        if missing is not None:
            found = difflib.get_close_matches(missing.name, _listing(missing.parent), n=2, cutoff=0.6)
            alike = f"; near it: {', '.join(str(missing.parent / one) for one in found)}" if found else ""
            return f" (there is no directory {missing}{alike})"
    return ""


def _candidates(name: str, root: Path | None) -> list[Path]:
    try:
        path = Path(name).expanduser()
    except RuntimeError:  # ~somebody whom this machine does not know
        path = Path(name)
    if "\0" in name:
        return []
    beside = root is not None and not path.is_absolute() and root.resolve() != Path.cwd()
    return [path, root / path] if beside else [path]


def _listing(directory: Path) -> list[str]:
    try:
        with os.scandir(directory) as entries:
            return [entry.name for _, entry in zip(range(LISTED), entries, strict=False)]
    except OSError:
        return []
