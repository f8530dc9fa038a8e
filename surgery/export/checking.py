"""Check an exported directory against its manifest: files, tensors, logits and code."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

import surgery
from surgery.checkpoint.checksums import content_names, sha256
from surgery.checkpoint.reading import check_tensors, explained, open_checkpoint
from surgery.checkpoint.values import check_values
from surgery.errors import UsageError, UserError
from surgery.export.manifest import FILE, ExportManifest, code_in, fingerprint, read_manifest
from surgery.export.standalone import code_of, digest_of

# of logits, relative: float32 sums in another order, on another processor or by another library, differ by less
TOLERANCE = 1e-3
# files beside those that were written which would change what is loaded or run
LOADED = (".py", ".json", ".safetensors", ".bin", ".pt", ".pth", ".jinja", ".model")


@dataclass(frozen=True)
class Finding:
    """One check: what was found good, or every fault, a sentence each."""

    check: str
    faults: list[str]
    good: str


@dataclass(frozen=True)
class Verification:
    """All checks of a directory, and remarks that are no faults."""

    directory: Path
    written_by: str
    findings: list[Finding]
    notes: list[str]

    @property
    def passed(self) -> bool:
        return not any(finding.faults for finding in self.findings)

    def as_dict(self) -> dict[str, Any]:
        return {
            "schema": 1,
            "kind": "verification",
            "directory": str(self.directory),
            "written_by": self.written_by,
            "passed": self.passed,
            "checks": [asdict(finding) for finding in self.findings],
            "notes": self.notes,
        }


def verify(directory: Path) -> Verification:
    """Check a directory that ``surgery export`` wrote. None of its code is run: the logits are this package's.

    Raises:
        UsageError: no such directory, or no readable manifest in it.
    """
    directory = Path(directory).expanduser()
    if not directory.is_dir():
        raise UsageError(f"{directory}: no such directory; name one that surgery export wrote")
    manifest = read_manifest(directory)
    notes: list[str] = []
    findings = [_files(directory, manifest, notes), _code(directory, manifest, notes)]
    tensors = _tensors(directory)
    if tensors.faults:
        logits = Finding("logits", ["not computed, because the tensors are wrong"], "")
    else:
        logits = _logits(directory, manifest)
    findings += [tensors, logits]
    return Verification(directory, manifest.surgery, findings, notes)


def _files(directory: Path, manifest: ExportManifest, notes: list[str]) -> Finding:
    faults = []
    there = set(content_names(directory))
    for name, record in manifest.files.items():
        if name not in there:  # nor is anything outside the directory
            faults.append(f"{name} is missing")
            continue
        try:
            size = (directory / name).stat().st_size
            same = size == record.bytes and sha256(directory / name) == record.sha256
        except OSError as error:
            faults.append(f"{name} cannot be read: {error.strerror}")
            continue
        if size != record.bytes:
            faults.append(f"{name} holds {size:,} bytes and was written with {record.bytes:,}")
        elif not same:
            faults.append(f"{name} is not what was written (its SHA-256 differs)")
    for name in sorted(there - manifest.files.keys() - {FILE}):
        if name.endswith(LOADED):
            faults.append(f"{name} was not written by the export, and may change what is loaded")
        else:
            notes.append(f"{name} was added after the export")
    return Finding("files", faults, f"{len(manifest.files)} files have the bytes and SHA-256 that were written")


def _code(directory: Path, manifest: ExportManifest, notes: list[str]) -> Finding:
    code = code_in(directory)
    if manifest.code is None:
        faults = [f"{next(iter(code))} lies there, and the export wrote no code"] if code else []
        return Finding("code", faults, "none was exported")
    digest = digest_of(code)
    if digest != manifest.code.sha256:
        return Finding("code", [f"its SHA-256 is {digest[:16]}..., not {manifest.code.sha256[:16]}..."], "")
    try:
        own = digest_of(code_of(open_checkpoint(directory).config["model_type"]))
    except (UserError, KeyError):
        own = None  # the other checks say what is wrong with the configuration
    if own == digest:
        return Finding("code", [], f"{len(code)} modules of surgery {surgery.__version__}, as installed here")
    notes.append(f"the code is of surgery {manifest.surgery}, not what {surgery.__version__}, installed here, writes")
    return Finding("code", [], f"{len(code)} modules with the SHA-256 that was written")


def _tensors(directory: Path) -> Finding:
    from surgery.hosts import recognise

    try:
        _, adapter = recognise(directory)
        checkpoint = open_checkpoint(directory)
        with explained(directory):
            expected = adapter.expected_tensors(checkpoint.config)
        check_tensors(checkpoint, expected, adapter.name)
        check_values(checkpoint, adapter.is_unused)
    except UserError as error:
        return Finding("tensors", [str(error).splitlines()[0]], "")
    return Finding("tensors", [], f"{len(checkpoint.tensors)} tensors have their shapes and are finite")


def _logits(directory: Path, manifest: ExportManifest) -> Finding:
    from surgery.hosts import load_model

    kept = manifest.fingerprint
    try:
        model = load_model(directory, dtype=torch.float32)
        size = model.get_output_embeddings().weight.shape[0]
        if not kept.fits(size):
            return Finding("logits", [f"{FILE} holds a fingerprint that is not of a vocabulary of {size}"], "")
        now = fingerprint(model, torch.tensor([kept.tokens]))
    except UserError as error:
        return Finding("logits", [f"not computed: {str(error).splitlines()[0]}"], "")
    off = kept.difference(now)
    if not off <= TOLERANCE:  # nan as well
        fault = f"they differ from the fingerprint by {off:.2g} (relative; allowed {TOLERANCE:g})"
        return Finding("logits", [fault], "")
    equal = "equal the fingerprint bit for bit" if off == 0 else f"are the fingerprint's but for {off:.1g} (relative)"
    return Finding("logits", [], f"{len(kept.tokens)} tokens in float32 {equal}")
