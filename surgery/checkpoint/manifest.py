"""``run.json``: what a run directory holds and how far it got."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from surgery.checkpoint.jsonfile import read_json
from surgery.checkpoint.layout import RUN_FILE as FILE
from surgery.checkpoint.staging import write_atomic
from surgery.errors import UsageError
from surgery.results import json_text

SCHEMA = 2
READ = (1, 2)  # schema 1 knew neither ``inputs`` and ``data`` nor ``in_force``


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid")


class InputRecord(_Record):
    """A file that a run reads: its name, bytes, time of change and SHA-256.

    The time says when the file need not be read again; only the SHA-256 says what it holds. An empty SHA-256 stands for
    what has none, as a data set that is read from a hub.
    """

    name: str
    bytes: int = 0
    mtime_ns: int = 0
    sha256: str = ""


class PhaseRecord(_Record):
    """One phase: where it stands, what was measured at its end, and the data it reads."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]*$")  # of a folder in the run, and of none elsewhere
    kind: str
    status: Literal["pending", "running", "finished"] = "pending"
    steps: int = 0
    tokens: int = 0
    figures: dict[str, Any] = Field(default_factory=dict)
    data: list[InputRecord] | None = None  # None: of a version that did not look


class RunManifest(_Record):
    """A run: its base, the resolved layers, the drift of the swap, its phases, and what it was computed with.

    ``inputs`` are the base's files where the base is a local directory. ``in_force`` has an entry for each time that
    work began with another machine, device, version or environment than before.
    """

    schema_version: Literal[1, 2] = Field(default=SCHEMA, alias="schema")
    surgery: str  # the version of this package that wrote it
    recipe: str
    overrides: list[str] = Field(default_factory=list)
    base: str
    revision: str | None = None
    layers: list[int]
    rule: str
    exact: bool
    drift: dict[str, Any] | None = None
    phases: list[PhaseRecord] = Field(default_factory=list)
    inputs: list[InputRecord] | None = None
    in_force: list[dict[str, Any]] = Field(default_factory=list)

    model_config = ConfigDict(extra="forbid", populate_by_name=True)


def read_manifest(run: Path) -> RunManifest:
    """The manifest of a run directory.

    Raises:
        UsageError: there is none, it is damaged, or another version wrote it.
    """
    path = Path(run) / FILE
    if not path.is_file():
        raise UsageError(f"{run}: holds no {FILE}, so it is no run\n  make one with: surgery distill RECIPE")
    value = read_json(path, "start the run again in a new directory")
    schema = value.get("schema") if isinstance(value, dict) else None
    if schema not in READ:
        raise UsageError(
            f"{path}: has schema {schema!r}, and this version of surgery reads {' and '.join(map(str, READ))}\n"
            "  use the version that wrote it, or start the run again in a new directory"
        )
    try:
        return RunManifest.model_validate(value)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise UsageError(
            f"{path}: {place}: {first['msg']}\n  the file was changed by hand or damaged: start the run again"
        ) from None


def write_manifest(run: Path, manifest: RunManifest) -> None:
    """Write ``run.json`` in one step."""
    value = manifest.model_dump(mode="json", by_alias=True) | {"schema": SCHEMA}
    write_atomic(Path(run) / FILE, json_text(value) + "\n")
