"""Fingerprints of what a run reads: its data and the files of a local base, compared when the run goes on."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from surgery.adaptation.data import phase_sources, training_documents
from surgery.checkpoint.checksums import sha256
from surgery.checkpoint.manifest import InputRecord
from surgery.checkpoint.reading import CONFIG, INDEX, open_checkpoint
from surgery.checkpoint.writing import companions
from surgery.data.sources import Source
from surgery.hosts import commit
from surgery.recipe import Recipe


def of_phase(recipe: Recipe, index: int, known: Sequence[InputRecord] = ()) -> list[InputRecord]:
    """Fingerprints of the sources that phase ``index`` reads, in their order.

    Args:
        known: fingerprints of an earlier time, taken over where a file's size and time of change are the same.

    Raises:
        UsageError: a source that is not there.
    """
    phase = recipe.phases[index]
    named = phase.data is not None or recipe.data is None
    with recipe.at(("phases", index, "data") if named else ("data",)):
        return [fingerprint(source, known) for _, _, found in phase_sources(recipe, phase) for source in found]


def fingerprint(source: Source, known: Iterable[InputRecord] = ()) -> InputRecord:
    """The SHA-256 of what a source holds: a file's bytes, the bundled text; nothing of a data set on a hub."""
    if source.kind == "file":
        return of_file(Path(source.name), source.name, known)
    if source.kind == "bundled":
        digest = hashlib.sha256()
        for document in training_documents([source]):
            digest.update(document.encode() + b"\0")
        return InputRecord(name=source.name, sha256=digest.hexdigest())
    return InputRecord(name=source.name)


def of_base(base: Path, known: Sequence[InputRecord] = ()) -> list[InputRecord]:
    """Fingerprints of a local base: weights, configuration and tokenizer. A hub's commit says it all and has none.

    Raises:
        UsageError: it cannot be read.
    """
    if commit(base) is not None:
        return []
    names = {CONFIG, *open_checkpoint(base).shards, *(path.as_posix() for path in companions(base))}
    names |= {INDEX} if (base / INDEX).is_file() else set()
    return [of_file(base / name, name, known) for name in sorted(names)]


def of_file(file: Path, name: str, known: Iterable[InputRecord] = ()) -> InputRecord:
    """The fingerprint of one file under ``name``; read only where none in ``known`` has its size and time of change."""
    status = file.stat()
    for record in known:
        if (record.name, record.bytes, record.mtime_ns) == (name, status.st_size, status.st_mtime_ns):
            return record
    return InputRecord(name=name, bytes=status.st_size, mtime_ns=status.st_mtime_ns, sha256=sha256(file))


def changes(old: Sequence[InputRecord], new: Sequence[InputRecord], path: str) -> Iterator[str]:
    """What two lists of fingerprints differ in, in words; where the files were moved together, nothing.

    Args:
        path: the place in the recipe that names them.
    """
    if len(old) != len(new):
        names = sorted({record.name for record in old} ^ {record.name for record in new})
        which = f", {names[0]} among them" if names else ""
        yield f"{path}: {len(old)} files before, {len(new)} now{which}"
        return
    for before, now in zip(old, new, strict=True):
        if before.sha256 and now.sha256 and before.sha256 != now.sha256:
            yield f"{path}: {now.name} holds other content: {_shown(before)} before, {_shown(now)} now"


def _shown(record: InputRecord) -> str:
    size = f"{record.bytes:,} bytes, " if record.bytes else ""
    return f"{size}SHA-256 {record.sha256[:12]}"
