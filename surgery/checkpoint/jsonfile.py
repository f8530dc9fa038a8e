"""Reads JSON files that others wrote, within limits: size, depth and the type of the whole.

A parsed file of a few megabytes can be too deep for whatever walks it, hold a number of a million digits, or be a list
where a mapping is meant. Each of these is a message that names the file.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from surgery.errors import UsageError

MEGABYTE = 1 << 20
MAX_BYTES = 16 * MEGABYTE
# files that list a vocabulary or all tensors of a model
LARGE = {
    "tokenizer.json": 256, "vocab.json": 64, "model.safetensors.index.json": 64, "pytorch_model.bin.index.json": 64,
}  # fmt: skip
MAX_DEPTH = 64  # the deepest configurations and tokenizers known have about ten levels
AGAIN = "download the checkpoint again"


def read_json(path: Path, remedy: str = AGAIN) -> Any:
    """Return a JSON file's value.

    Raises:
        UsageError: unreadable, too large or too deep, or not JSON; with the file, and the line where there is one.
    """
    limit = LARGE.get(path.name, 0) * MEGABYTE or MAX_BYTES
    try:
        with path.open("rb") as file:
            data = file.read(limit + 1)
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror}\n  check the file and its rights") from None
    if len(data) > limit:
        raise UsageError(f"{path}: is larger than {limit // MEGABYTE} MB, which no such file is\n  {remedy}")
    try:
        value = json.loads(data.decode("utf-8"))
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise UsageError(f"{path}:{line}: cannot be read: is not UTF-8 text\n  {remedy}") from None
    except json.JSONDecodeError as error:
        raise UsageError(f"{path}:{error.lineno}: not JSON: {error.msg}\n  {remedy}") from None
    except RecursionError:
        raise UsageError(_too_deep(path, remedy)) from None
    except ValueError:  # Python's limit of digits, which keeps their conversion from taking minutes
        raise UsageError(f"{path}: holds a number of more than 4300 digits\n  {remedy}") from None
    if _depth(value) > MAX_DEPTH:
        raise UsageError(_too_deep(path, remedy))
    return value


def read_object(path: Path, remedy: str = AGAIN) -> dict[str, Any]:
    """Return the mapping that a JSON file holds.

    Raises:
        UsageError: as :func:`read_json`, or the file holds something else.
    """
    value = read_json(path, remedy)
    if not isinstance(value, dict):
        raise UsageError(f"{path}: is not a JSON object\n  {remedy}")
    return value


def _too_deep(path: Path, remedy: str) -> str:
    return f"{path}: is nested deeper than {MAX_DEPTH} levels\n  {remedy}"


def _depth(value: Any) -> int:
    """Levels of lists and mappings, counted without recursion and no further than the limit."""
    depth, level = 0, [value]
    while level and depth <= MAX_DEPTH:
        inner = []
        for item in level:
            if isinstance(item, (dict, list)):
                inner.extend(item.values() if isinstance(item, dict) else item)
        depth += 1
        level = [item for item in inner if isinstance(item, (dict, list))]
    return depth
