"""Forms of data files: told by a file's name, checked against its first bytes; other forms are refused by name."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Literal

from surgery.errors import UsageError

Form = Literal["text", "lines", "json", "csv", "tsv", "parquet", "arrow"]

COMPRESSIONS = (".gz", ".xz", ".zst", ".bz2")
TEXT_SUFFIXES = {".txt", ".md", ".rst", ".py", ".text"}
RECORD_SUFFIXES: dict[str, Form] = {
    ".jsonl": "lines",
    ".ndjson": "lines",
    ".jsonlines": "lines",
    ".json": "json",
    ".csv": "csv",
    ".tsv": "tsv",
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".feather": "arrow",
}
READ = "text, JSON lines, JSON, CSV, TSV, parquet and arrow files are read, plain or as .gz, .xz, .zst, .bz2"

_AS_TEXT = "save its text as UTF-8 .txt"
_AS_TABLE = "save its table as .csv or .parquet"
_UNPACK = "unpack it and name the folder"
_AS_RECORDS = "write its records as .jsonl or .parquet"
REFUSED = {
    **dict.fromkeys((".docx", ".doc", ".odt", ".rtf", ".pages", ".pdf", ".epub", ".mobi", ".ps"), _AS_TEXT),
    **dict.fromkeys((".html", ".htm", ".xhtml", ".xml", ".ipynb", ".pptx"), _AS_TEXT),
    **dict.fromkeys((".xlsx", ".xls", ".ods", ".sas7bdat", ".dta"), _AS_TABLE),
    **dict.fromkeys((".zip", ".tar", ".tgz", ".txz", ".tbz", ".tbz2", ".7z", ".rar"), _UNPACK),
    **dict.fromkeys((".lz4", ".lzma", ".lzo", ".br", ".z", ".sz", ".snappy"), "compress it as .zst or .gz instead"),
    **dict.fromkeys((".npy", ".npz", ".bin", ".idx", ".pt", ".pth", ".pkl", ".pickle", ".safetensors"), _AS_RECORDS),
    **dict.fromkeys((".h5", ".hdf5", ".orc", ".avro", ".lance", ".tfrecord", ".tfrecords", ".mds"), _AS_RECORDS),
    **dict.fromkeys((".db", ".sqlite", ".sqlite3", ".duckdb", ".mdb", ".lmdb", ".warc", ".msgpack"), _AS_RECORDS),
}

# first bytes -> the form's name, and the remedy
_MAGIC = (
    (b"\xff\xfe\x00\x00", "UTF-32 text", "convert it: iconv -f UTF-32 -t UTF-8"),
    (b"\x00\x00\xfe\xff", "UTF-32 text", "convert it: iconv -f UTF-32 -t UTF-8"),
    (b"\xff\xfe", "UTF-16 text", "convert it: iconv -f UTF-16 -t UTF-8"),
    (b"\xfe\xff", "UTF-16 text", "convert it: iconv -f UTF-16 -t UTF-8"),
    (b"PAR1", "parquet", "name it .parquet"),
    (b"ARROW1", "arrow", "name it .arrow"),
    (b"\x1f\x8b", "gzip", "name it with .gz at the end"),
    (b"\xfd7zXZ\x00", "xz", "name it with .xz at the end"),
    (b"\x28\xb5\x2f\xfd", "Zstandard", "name it with .zst at the end"),
    (b"BZh9", "bzip2", "name it with .bz2 at the end"),
    (b"PK\x03\x04", "a ZIP archive (or an office document)", _UNPACK),
    (b"%PDF", "PDF", _AS_TEXT),
    (b"\x93NUMPY", "a NumPy array", _AS_RECORDS),
    (b"SQLite format 3", "an SQLite database", _AS_RECORDS),
    (b"{\\rtf", "RTF", _AS_TEXT),
    (b"<!DOCTYPE html", "HTML", _AS_TEXT),
    (b"<html", "HTML", _AS_TEXT),
    (b"<?xml", "XML", _AS_TEXT),
)
HEAD = 1 << 16  # bytes that are looked at


def inner_suffix(path: Path) -> str:
    """The suffix that says what is inside, past a compression's, in lower case."""
    suffix = path.suffix.lower()
    return Path(path.stem).suffix.lower() if suffix in COMPRESSIONS else suffix


def is_data(path: Path) -> bool:
    """Whether a file's name alone says that it is data: how a directory's files are chosen."""
    return inner_suffix(path) in TEXT_SUFFIXES or inner_suffix(path) in RECORD_SUFFIXES


def is_records(path: Path) -> bool:
    """Whether a file's name says that it holds records with fields."""
    return inner_suffix(path) in RECORD_SUFFIXES


def refuse_by_name(path: Path) -> None:
    """Refuse a form that is known and not read.

    Raises:
        UsageError: naming the form and the remedy.
    """
    for suffix in (path.suffix.lower(), inner_suffix(path)):
        if suffix in REFUSED:
            raise UsageError(f"{path}: {suffix} files are not read; {REFUSED[suffix]}\n  {READ}")


def form_of(path: Path, head: bytes) -> Form:
    """The form of a file by its name and the first bytes of what is in it, decompressed.

    A name that says nothing leaves the choice to the content; a name that says "text" of what is plainly JSON is an
    error, because one of the two is a mistake.

    Raises:
        UsageError: a form that is not read; content that is not what the name says.
    """
    refuse_by_name(path)
    suffix = inner_suffix(path)
    form = RECORD_SUFFIXES.get(suffix)
    if form in ("parquet", "arrow"):
        return form
    for magic, name, remedy in _MAGIC:
        if head.startswith(magic) or (magic[:1] == b"<" and head.lstrip().lower().startswith(magic.lower())):
            raise UsageError(f"{path}: holds {name}, which is not what its name says; {remedy}")
    if b"\x00" in head:
        even, odd = head[0::2].count(0), head[1::2].count(0)
        if max(even, odd) > 4 * max(1, min(even, odd)) and max(even, odd) > len(head) // 8:
            raise UsageError(f"{path}: holds UTF-16 text; convert it: iconv -f UTF-16 -t UTF-8")
        raise UsageError(f"{path}: holds binary content, not text\n  {READ}")
    if form is not None:
        return form
    looks = _looks_like_json(head)
    if looks is None:
        return "text"
    if suffix in TEXT_SUFFIXES:
        wanted = {"lines": ".jsonl", "json": ".json"}[looks]
        raise UsageError(f"{path}: is named as text and holds JSON records; name it {wanted}")
    return looks


def _looks_like_json(head: bytes) -> Form | None:
    text = head.decode("utf-8-sig", errors="replace").lstrip()
    if re.match(r'\[\s*\{\s*"', text):
        return "json"
    lines = [line for line in text.splitlines()[:3] if line.strip()]
    whole = lines[:-1] if len(head) >= HEAD and len(lines) < 3 else lines  # the last may be cut
    if not whole or not all(line.startswith("{") for line in whole):
        return None
    try:
        return "lines" if all(isinstance(json.loads(line), dict) for line in whole) else None
    except (ValueError, RecursionError):
        return None
