"""``surgery_manifest.json``: what an export wrote, so that it can be checked wherever the directory has gone since.

{"schema": 1, "kind": "export", "surgery": version, "files": {name: {"bytes", "sha256"}}, "code": {"sha256", "files"} or
null, "fingerprint": see :class:`Fingerprint`}. It is no signature: who can change the files can change it as well.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, ValidationError
from torch import Tensor, nn

import surgery
from surgery.checkpoint.checksums import content_names, describe_files
from surgery.checkpoint.jsonfile import read_json
from surgery.checkpoint.staging import write_atomic
from surgery.errors import UsageError
from surgery.export.standalone import PREFIX, digest_of
from surgery.results import json_text

FILE = "surgery_manifest.json"
FINGERPRINT_TOKENS = 16
ENTRIES = 32  # of the vocabulary, at most


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid")


class FileRecord(_Record):
    """A file's bytes and SHA-256."""

    bytes: int
    sha256: str


class CodeRecord(_Record):
    """The modelling code: the names of its files, and one SHA-256 of all; see
    :func:`surgery.export.standalone.digest_of`."""

    sha256: str
    files: list[str]


class Fingerprint(_Record):
    """Logits of a few tokens, computed in float32 on a CPU from the weights as they are stored.

    Attributes:
        tokens: [T] token ids. entries: [E] indices in the vocabulary, evenly spread.
        logits: [T, E] at these entries. normaliser: [T], the logsumexp over the whole vocabulary, nats.
    """

    tokens: list[int]
    entries: list[int]
    logits: list[list[float]]
    normaliser: list[float]

    def fits(self, vocabulary: int) -> bool:
        """Whether its figures are in number what they should be, and its indices below ``vocabulary``."""
        places = [*self.tokens, *self.entries]
        rows = len(self.logits) == len(self.normaliser) == len(self.tokens) > 0
        return (
            rows
            and self.entries == _entries(vocabulary)
            and all(0 <= place < vocabulary for place in places)
            and all(len(row) == len(self.entries) for row in self.logits)
        )

    def difference(self, other: Fingerprint) -> float:
        """The largest difference between the two, over this one's largest magnitude (or 1, where that is less)."""
        mine, theirs = (
            torch.cat([torch.tensor(one.logits).flatten(), torch.tensor(one.normaliser)]) for one in (self, other)
        )
        return float((mine - theirs).abs().max() / mine.abs().max().clamp(min=1))


class ExportManifest(_Record):
    """What ``surgery_manifest.json`` says."""

    model_config = ConfigDict(extra="forbid", populate_by_name=True)

    schema_version: Literal[1] = 1
    kind: Literal["export"] = "export"
    surgery: str  # the version of this package that wrote it
    files: dict[str, FileRecord]
    code: CodeRecord | None
    fingerprint: Fingerprint


def fingerprint(model: nn.Module, ids: Tensor) -> Fingerprint:
    """Of a model in float32 on the CPU.

    Args:
        ids: [1, T] int64.
    """
    with torch.no_grad():
        logits = model.eval()(ids).logits[0].float()
    entries = _entries(logits.shape[-1])
    return Fingerprint(
        tokens=ids[0].tolist(),
        entries=entries,
        logits=[[_short(value) for value in row] for row in logits[:, entries].tolist()],
        normaliser=[_short(value) for value in logits.logsumexp(-1).tolist()],
    )


def code_in(directory: Path) -> dict[str, str]:
    """The modelling code that lies in a directory: name -> text."""
    found = sorted(directory.glob(f"{PREFIX}*.py"))
    return {path.name: path.read_text(encoding="utf-8", errors="replace") for path in found}


def write_manifest(directory: Path, adapter: Any, ids: Tensor) -> None:
    """Write the manifest of an exported directory, whose other files are all there.

    Args:
        ids: [1, T] of the fingerprint.
    """
    mark = fingerprint(adapter.load(directory, dtype=torch.float32), ids)
    code = code_in(directory)
    manifest = ExportManifest(
        surgery=surgery.__version__,
        files=describe_files(directory, content_names(directory)),
        code=CodeRecord(sha256=digest_of(code), files=list(code)) if code else None,
        fingerprint=mark,
    )
    write_atomic(directory / FILE, json_text(manifest.model_dump(mode="json")) + "\n")


def read_manifest(directory: Path) -> ExportManifest:
    """The manifest of an exported directory.

    Raises:
        UsageError: there is none, or it is damaged.
    """
    path = directory / FILE
    if not path.is_file():
        raise UsageError(
            f"{directory}: holds no {FILE}, so there is nothing to verify it against\n"
            "  name a directory that surgery export wrote"
        )
    value = read_json(path, "get the file again from where the model was published, or export again")
    try:
        return ExportManifest.model_validate(value)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"][:4]))
        raise UsageError(
            f"{path}: {place or 'the file'}: {first['msg']}\n"
            "  it was changed by hand or damaged, or another version of surgery wrote it: get it again"
        ) from None


def _entries(vocabulary: int) -> list[int]:
    count = min(ENTRIES, vocabulary)
    return [place * vocabulary // count for place in range(count)]


def _short(value: float) -> float:
    return float(f"{value:.9g}")  # enough digits for a float32
