"""Looks at what was accepted: does it make sense, as a plain reading of the same files has it?"""

from __future__ import annotations

import csv
import io
import json
import re
from pathlib import Path
from typing import Any

MARK = "\ufeff"  # of the order of bytes


class Nonsense(Exception):
    """What was accepted makes no sense."""


def require_ids(tokenizer: Any) -> None:
    """Raise where a tokenizer gives no ids, or some that the model of 260 has not."""
    ids = tokenizer.encode("some text")
    if not ids or not all(type(number) is int and 0 <= number < 260 for number in ids):
        raise Nonsense(f"the tokenizer gives {ids[:8]}")


def require_documents(file: Path) -> None:
    """Raise where a file's documents are others than Python's own readers find in it, marks and surrogates aside."""
    from surgery.data.texts import documents

    lines = list(io.StringIO(file.read_bytes().decode("utf-8"), newline=""))
    if file.suffix == ".txt":
        ends = "".join("\x1e" if line.strip("\r\n") == "\x1e" else line for line in lines)
        expected = ends.split("\x1e") if "\x1e" not in "".join(ends.split("\x1e")) else None
    elif file.suffix == ".csv":
        expected = [row["text"] for row in csv.DictReader(lines)]
    else:
        rows = [json.loads(line.lstrip(MARK)) for line in lines if line.strip()] if file.suffix == ".jsonl" else None
        if rows is None:
            value = json.loads("".join(lines))
            rows = value if isinstance(value, list) else None
        expected = None if rows is None else [row if isinstance(row, str) else row["text"] for row in rows]
    if expected is None:
        return
    wanted = [plain for text in expected if (plain := _plain(text)).strip()]
    found = [_plain(text) for text in documents(str(file))]
    if found != wanted:
        raise Nonsense(f"{len(found)} documents are read where {len(wanted)} others stand")


def _plain(text: str) -> str:
    return re.sub("[\ud800-\udfff]", "\ufffd", text.replace(MARK, ""))


def header(data: bytes) -> dict | None:
    """A safetensors file's tensors by name, None where there is no reading it."""
    try:
        size = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + size])
        return {name: entry for name, entry in header.items() if name != "__metadata__"}
    except (ValueError, AttributeError, RecursionError):
        return None


def same_tensors(before: bytes, after: bytes) -> bool:
    """Whether the header names the tensors at the places, in the shapes and types, that it named before; a tensor that
    lies elsewhere among the bytes, in its own shape and type, cannot be told from a right one."""
    first, second = header(before), header(after)
    if second is None or first.keys() != second.keys() or len(before) < len(after) - 4096:
        return False
    try:
        return all(
            [first[name]["dtype"], first[name]["shape"]] == [second[name]["dtype"], second[name]["shape"]]
            for name in first
        )
    except (KeyError, TypeError):
        return False
