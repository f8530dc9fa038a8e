"""Every record of every local file, read once before any training: what is wrong with the last is known at the first.

A file is fingerprinted by its content. What was found good is kept under that fingerprint (in SURGERY_CACHE, or beside
the hub's cache), so that ``validate``, ``distill`` and a resumed run read a file once between them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from surgery.checkpoint.checksums import sha256
from surgery.data import instruction
from surgery.data.bundled import bundled_documents
from surgery.data.conversations import conversation
from surgery.data.sources import Source
from surgery.data.streams import reading
from surgery.errors import JobError, UsageError

Content = Literal["text", "instruct"]
Progress = Callable[[str, int, int], Any]  # stage, bytes done, bytes in all

STAGE = "reading the data"
EARLY_RECORDS = 32  # of a hub's stream that are read before the first step; the others are checked as they are read
VERSION = 2  # of the checks: another finds again what an earlier one passed


@dataclass(frozen=True)
class Checked:
    """One source, read through.

    Attributes:
        name: a file, ``bundled``, or a data set's name.
        fingerprint: ``sha256:...`` of a file's bytes or of the bundled text, ``commit:...`` of a hub's data set.
        records: documents or conversations; of a hub's data set those read so far.
        shortest: tokens of the shortest conversation; None for text, or where there is none.
    """

    name: str
    fingerprint: str
    records: int
    shortest: int | None = None


def check(
    found: Iterable[Source], content: Content, tokenizer: Any = None, *, progress: Progress | None = None
) -> list[Checked]:
    """Read every record of local sources to its end, and the first ``EARLY_RECORDS`` of a hub's.

    Args:
        content: text, of which each record must hold some under its column; or instruction records, each of which must
            make a prompt and an answer with the tokenizer. Without a tokenizer their form alone is checked.

    Raises:
        UsageError: the first record that does not, with its file and number; a damaged file.
        JobError: a data set of a hub that cannot be read.
    """
    found = list(found)
    sizes = [_size(source) for source in found]
    total, before = sum(sizes), 0
    results = []
    for source, size in zip(found, sizes, strict=True):
        told = None
        if progress is not None and total:
            told = lambda done, before=before, size=size: progress(STAGE, before + min(done, size), total)  # noqa: E731
        results.append(_source(source, content, tokenizer, told))
        before += size
        if told is not None:
            told(size)
    if progress is not None and total:
        progress(STAGE, total, total)
    return results


def fingerprint(source: Source) -> str:
    """What a source holds, in a few characters; see :class:`Checked`.

    Raises:
        UsageError: a file that cannot be read. JobError: a hub that does not answer.
    """
    if source.kind == "hub":
        from surgery.data.hub import hub_commit

        return f"commit:{hub_commit(source.name, source.options.get('revision'))}"
    if source.kind == "bundled":
        digest = hashlib.sha256()
        for document in bundled_documents("train"):
            digest.update(document.encode() + b"\0")
        return f"sha256:{digest.hexdigest()}"
    path = Path(source.name)
    with reading(path):
        status = path.stat()
        return f"sha256:{_sha256(str(path), status.st_size, status.st_mtime_ns)}"


def identity(tokenizer: Any) -> str:
    """A tokenizer in a text that changes with what it does."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    whole = backend.to_str() if backend is not None else repr(sorted(tokenizer.get_vocab().items()))
    return json.dumps([whole, str(getattr(tokenizer, "chat_template", None)), tokenizer.eos_token])


@lru_cache(maxsize=4096)
def _sha256(path: str, size: int, changed: int) -> str:
    return sha256(Path(path))


def _size(source: Source) -> int:
    if source.kind != "file":
        return 0
    with reading(Path(source.name)):
        return Path(source.name).stat().st_size


def _source(source: Source, content: Content, tokenizer: Any, told: Callable[[int], Any] | None) -> Checked:
    known = fingerprint(source)
    record = _record(source, known, content, tokenizer)
    if record is not None and (kept := _kept(record)) is not None:
        return Checked(source.name, known, **kept)
    if content == "text":
        lengths: Iterator[int | None] = (None for piece in source.pieces("train", told) if piece.ends)
    else:
        column = source.options.get("column")
        lengths = (
            _length(row, f"{source.name}, record {number}", tokenizer, column)
            for number, row in enumerate(source.rows("train", told), 1)
        )
    count, shortest = 0, None
    for length in islice(lengths, EARLY_RECORDS) if source.kind == "hub" else lengths:
        count += 1
        if length is not None:
            shortest = length if shortest is None else min(shortest, length)
    if not count:
        what = "text" if content == "text" else "records"
        raise UsageError(f"{source.name}: holds no {what}")
    result = Checked(source.name, known, count, shortest)
    if record is not None:
        _keep(record, result)
    return result


def _length(row: Mapping[str, Any], place: str, tokenizer: Any, column: str | None) -> int | None:
    if tokenizer is None:  # the form can be told without it
        conversation(row, place, column)
        return None
    return len(instruction.encode(row, place, tokenizer, column).ids)


def _record(source: Source, known: str, content: Content, tokenizer: Any) -> Path | None:
    """Where it is kept that a file was found good; None for what is not a file."""
    if source.kind != "file" or (content == "instruct" and tokenizer is None):
        return None
    from surgery.checkpoint.pickles import cache_folder

    reader = identity(tokenizer) if content == "instruct" else ""
    # the form comes from the name, so that a file of the same bytes under another is another
    parts = [VERSION, known, "".join(Path(source.name).suffixes).lower(), content, source.options, reader]
    key = hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]
    return cache_folder().with_name("checked") / f"{key}.json"


def _kept(record: Path) -> dict[str, Any] | None:
    try:
        found = json.loads(record.read_text(encoding="utf-8"))
        return {"records": int(found["records"]), "shortest": found["shortest"]}
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def _keep(record: Path, result: Checked) -> None:
    from surgery.checkpoint.staging import write_atomic

    try:
        record.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(record, json.dumps(asdict(result)) + "\n")
    except (OSError, JobError):
        pass  # a home that takes no files: the next command reads the data again
