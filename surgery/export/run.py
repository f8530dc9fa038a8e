"""From a run to an ordinary checkpoint directory, checked before it appears."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from surgery.checkpoint.jsonfile import read_json
from surgery.checkpoint.layout import run_around
from surgery.checkpoint.staging import claimed, staged_directory
from surgery.checkpoint.ties import own_head
from surgery.data.texts import load_text
from surgery.data.tokens import encode
from surgery.errors import UsageError
from surgery.evaluation.loading import Located, load_tokenizer, locate
from surgery.evaluation.report import RecallPlan, evaluate
from surgery.export.card import dose_warning, model_card
from surgery.export.manifest import FINGERPRINT_TOKENS, code_in, write_manifest
from surgery.export.source import DTYPES, Source, open_source
from surgery.export.standalone import digest_of
from surgery.export.verify import TOKENS, Check, check_export
from surgery.export.writing import planned_sizes, write_export
from surgery.operation import CARD_FILE, RECIPE_FILE

SHARD_SIZE = 5_000_000_000
EVALUATED_TOKENS = 65_536
NEEDLES = 10  # for each length and depth


@dataclass(frozen=True)
class Export:
    """What was written.

    Attributes:
        weights: names of the weight files, and their bytes together.
        check: the reload in a fresh process.
        report: the evaluation that the model card quotes, None where nothing was measured.
        warnings: what a user must know, one line each.
    """

    output: Path
    source: Source
    dtype: str
    weights: list[str]
    num_bytes: int
    check: Check
    report: dict[str, Any] | None
    warnings: list[str]

    def as_dict(self) -> dict[str, Any]:
        return {
            "schema": 1,
            "kind": "export",
            "output": str(self.output),
            "model": str(self.source.located.path),
            "run": None if self.source.located.run is None else str(self.source.located.run),
            "base": self.source.base,
            "rule": self.source.swap["rule"],
            "layers": sorted(self.source.swap["layers"]),
            "doses": {str(layer): dose for layer, dose in self.source.doses.items()},
            "dtype": self.dtype,
            "weights": self.weights,
            "bytes": self.num_bytes,
            "check": self.check.as_dict(),
            "report": self.report,
            "warnings": self.warnings,
        }


def export(
    run: str,
    output: Path,
    *,
    dtype: str | None = None,
    shard_size: int | None = None,
    measure: bool = False,
    control: str | None = None,
    device: str = "cpu",
    code: bool = True,
    stage: Callable[[str], Any] = lambda text: None,
    progress: Callable[[str, int, int], Any] | None = None,
) -> Export:
    """Export a run's latest model, or a swapped checkpoint directory.

    Args:
        output: the directory to write, absent or empty.
        dtype: ``float32``, ``bfloat16`` or ``float16``; by default the recipe's, without one the checkpoint's own.
        shard_size: bytes a weight file; by default the recipe's.
        measure: evaluate the exported model and its base now; otherwise the card quotes the run's own evaluation.
        control: a run or a report of ``surgery eval --json`` whose figures the card puts beside.
        device: where to evaluate. The reload is compared on the CPU.
        code: put the modelling code beside the weights, so that transformers loads them without this package.
        stage: called with what starts now. progress: called with (stage, done, total).

    Raises:
        UsageError: nothing to export there, an output that is not free, an unknown dtype, no such control.
        JobError: the reload fails or gives other logits, no space. Nothing is left behind.
    """
    if dtype is not None and dtype not in DTYPES:
        raise UsageError(f"--dtype {dtype}: choose {', '.join(DTYPES)}")
    with claimed(output) as final:
        return _export(run, final, dtype, shard_size, measure, control, device, code, stage, progress)


def _export(
    run: str,
    final: Path,
    dtype: str | None,
    shard_size: int | None,
    measure: bool,
    control: str | None,
    device: str,
    code: bool,
    stage: Callable[[str], Any],
    progress: Callable[[str, int, int], Any] | None,
) -> Export:
    stage("reading the checkpoint")
    source = open_source(run)
    beside = None if control is None else _control(control)
    wanted = source.recipe.export if source.recipe else None
    dtype = dtype or (wanted.dtype if wanted else source.dtype)
    shard_size = shard_size or (wanted.shard_size if wanted else SHARD_SIZE)
    warnings = _warnings(source)
    tokenizer = load_tokenizer(source.located.path, source.adapter.parse(source.checkpoint.config).vocab_size)
    text = load_text("bundled", limit=16 * TOKENS)
    ids = encode(tokenizer, text, TOKENS).ids[None]
    sizes = planned_sizes(source, getattr(torch, dtype))
    with staged_directory(final, sum(sizes.values()) + 2**20) as staging:
        stage("writing")
        written, total = 0, sum(sizes.values())

        def advance(count: int) -> None:
            nonlocal written
            written += count
            if progress is not None:
                progress("writing", written, total)

        files = {RECIPE_FILE: source.recipe_text} if source.recipe_text else {}
        weights = write_export(staging, source, dtype, shard_size, files, advance, code=code)
        stage("loading it in a fresh process")
        check = check_export(source.adapter, source.located.path, source.dtype, staging, dtype, text.name, ids, code)
        if measure:
            stage("measuring it and its base")
            report = _evaluate(source, staging, final.name, device, progress)
        else:
            report = latest_report(source.located)
        if report is None:
            warnings.append("nothing was measured of this model: export with --evaluate, or run surgery eval first")
        digest = digest_of(code_in(staging)) if code else None
        card = model_card(source, final.name, dtype, check, report, beside, digest)
        (staging / CARD_FILE).write_text(card, encoding="utf-8", errors="replace")
        stage("taking its fingerprint")
        write_manifest(staging, source.adapter, ids[:, :FINGERPRINT_TOKENS])
        num_bytes = sum((staging / name).stat().st_size for name in weights)
    return Export(final, source, dtype, weights, num_bytes, check, report, warnings)


def read_report(path: Path) -> dict[str, Any]:
    """An evaluation report as ``surgery eval --json`` writes it.

    Raises:
        UsageError: it is none.
    """
    report = read_json(path, f"write it again with: surgery eval MODEL --json {path.name}")
    if not isinstance(report, dict) or report.get("kind") != "evaluation" or report.get("schema") != 1:
        raise UsageError(f"{path}: is no evaluation report; write one with: surgery eval MODEL --json {path.name}")
    return report


def latest_report(located: Located) -> dict[str, Any] | None:
    """The newest report in RUN/evaluation that measures the run's latest model beside a baseline, else the newest of
    that model at all; None for what is no run.

    ``before.json`` is left out, because it is the base's, and so are reports that name another checkpoint of the run.
    """
    if located.run is None:
        return None
    found = [path for path in (located.run / "evaluation").glob("*.json") if path.name != "before.json"]
    reports = [read_report(path) for path in sorted(found, key=lambda path: path.stat().st_mtime, reverse=True)]
    mine = str(located.path.relative_to(located.run))
    reports = [report for report in reports if report.get("checkpoint", mine) == mine]
    return next((report for report in reports if report["baseline"]), reports[0] if reports else None)


def _control(name: str) -> dict[str, Any]:
    path = Path(name).expanduser()
    if path.is_file():
        return read_report(path)
    run = run_around(path) if path.is_dir() else None
    if run is not None and run != path:
        raise UsageError(f"--control {name}: is a part of the run {run}; give that run, or one of its reports")
    try:
        report = latest_report(locate(name))
    except UsageError as error:
        raise UsageError(f"--control {error}") from None
    if report is None:
        raise UsageError(
            f"--control {name}: holds no evaluation\n  measure it first: surgery eval {name} --json control.json"
        )
    return report


def _warnings(source: Source) -> list[str]:
    warnings = []
    dose = dose_warning(source)
    if dose is not None:
        warnings.append(dose)
    own = own_head(source.checkpoint, source.adapter.ties(source.checkpoint.config))
    if own is not None:
        warnings.append(own)
    if source.unfinished:
        warnings.append(f"phases not finished: {', '.join(source.unfinished)}; the latest finished model is exported")
    if source.recipe_text is None:
        warnings.append("no recipe came with the checkpoint, so none is written")
    return warnings


def _evaluate(
    source: Source, staging: Path, name: str, device: str, progress: Callable[[str, int, int], Any] | None
) -> dict[str, Any]:
    """Measure the exported directory beside its base, as the recipe's evaluation says."""
    recipe = source.recipe
    revision = source.swap.get("revision") or (recipe.revision if recipe else None)
    base = Located(source.base, locate(source.base, revision).path)
    spec = recipe.evaluation_text if recipe else "bundled"
    root = recipe.path.parent if recipe else None
    text = load_text(spec, "heldout", root, limit=16 * EVALUATED_TOKENS)
    plan = RecallPlan(recipe.evaluation.recall.lengths, samples=NEEDLES) if recipe else None
    return evaluate(
        Located(name, staging),
        base,
        text=text,
        limit=EVALUATED_TOKENS,
        recall=plan,
        device=device,
        progress=progress,
    )
