"""What a model does on a text, beside a baseline: perplexity, bits per byte, loss by position, needle recall."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import surgery
from surgery.data.texts import Text
from surgery.data.tokens import Tokens, encode, require_context
from surgery.evaluation.loading import Located, check_loadable, load
from surgery.evaluation.perplexity import (
    Losses,
    by_position,
    difference,
    perplexity,
    position_edges,
    stream_losses,
    window_losses,
)
from surgery.evaluation.recall import DEPTHS, needle_recall

SCHEMA = 1

Progress = Callable[[str, int, int], Any]  # stage, done, total


@dataclass(frozen=True)
class RecallPlan:
    """Which needles are asked for; without a haystack the measured text is one."""

    lengths: Sequence[int]
    depths: Sequence[float] = DEPTHS
    samples: int = 20
    seed: int = 0
    haystack: Text | None = None


@dataclass(frozen=True)
class Measurement:
    """One model's figures on one text.

    Attributes:
        stream: losses with the state carried on through the text.
        windows: losses of separate windows of ``context`` tokens, from which those by position come.
        recall: :func:`surgery.evaluation.recall.needle_recall`'s result, or None.
        revision: the commit of a model that came from a hub, or None.
    """

    name: str
    tokens: Tokens
    stream: Losses
    windows: Losses
    context: int
    recall: dict[str, Any] | None
    revision: str | None = None

    def as_dict(self) -> dict[str, Any]:
        positions = by_position(self.windows, position_edges(self.context))
        return {
            "name": self.name,
            "revision": self.revision,
            **self.stream.as_dict(),
            "positions": positions,
            "recall": self.recall,
        }


def default_context(tokens: int) -> int:
    """Window for losses by position: a power of two that gives 8 windows or more, at most 2048."""
    return max(2, min(2048, 1 << max(1, (tokens // 8).bit_length() - 1)))


def measure(
    model: nn.Module,
    tokenizer: Any,
    text: Text,
    *,
    name: str,
    revision: str | None = None,
    limit: int | None = None,
    context: int | None = None,
    recall: RecallPlan | None = None,
    progress: Progress | None = None,
) -> Measurement:
    """Measure one model.

    Args:
        model: a causal language model with a cache; its device is used.
        name, revision: what it is called in the report, and its commit on a hub.
        limit: at most this many tokens of the text.
        context: tokens a window for the losses by position; by default :func:`default_context`.
        recall: None leaves it out.

    Raises:
        UsageError: a text shorter than one context, or too short for a recall length.
        JobError: a loss that is not finite.
    """
    tokens = encode(tokenizer, text, limit)
    context = context or default_context(len(tokens))
    require_context(tokens, context)

    def tick(stage: str, total: int) -> Callable[[int], None]:
        done = 0

        def advance(count: int) -> None:
            nonlocal done
            done = min(total, done + count)
            if progress is not None:
                progress(stage, done, total)

        return advance

    # the needles first: their lengths may be asked for in vain
    found = None
    if recall is not None and recall.lengths:
        haystack = recall.haystack or text
        stage = f"{name}: recall"
        found = needle_recall(
            model,
            tokenizer,
            haystack.text,
            lengths=recall.lengths,
            depths=recall.depths,
            samples=recall.samples,
            seed=recall.seed,
            progress=None if progress is None else lambda done, total: progress(stage, done, total),
        )
        found["haystack"] = haystack.name
    stream = stream_losses(model, tokens, progress=tick(f"{name}: stream", len(tokens) - 1), name=name)
    whole = len(tokens) // context * context
    advance = tick(f"{name}: windows of {context}", whole)
    windows = window_losses(model, tokens, context, progress=advance, name=name)
    return Measurement(name, tokens, stream, windows, context, found, revision)


def build_report(measured: Measurement, baseline: Measurement | None = None) -> dict[str, Any]:
    """The figures as plain data; differences to the baseline are paired token by token where both models read the same
    tokens, otherwise only bits per byte can be compared."""
    report: dict[str, Any] = {
        "schema": SCHEMA,
        "kind": "evaluation",
        "text": {
            "name": measured.tokens.name,
            "tokens": len(measured.tokens),
            "bytes": measured.tokens.num_bytes(),
            "begin_token": measured.tokens.begin or None,
        },
        "context": measured.context,
        "model": measured.as_dict(),
        "baseline": None,
        "difference": None,
    }
    if baseline is None:
        return report
    report["baseline"] = baseline.as_dict()
    bits = measured.stream.bits_per_byte - baseline.stream.bits_per_byte
    paired = torch.equal(measured.tokens.ids, baseline.tokens.ids) and measured.context == baseline.context
    report["difference"] = {"paired": paired, "bits_per_byte": bits}
    if paired:
        nll = difference(measured.stream, baseline.stream)
        edges = position_edges(measured.context)
        report["difference"] |= {
            "nll": nll.as_dict(),
            "perplexity_ratio": nll.map(perplexity).as_dict(),
            "positions": by_position(measured.windows, edges, baseline.windows),
        }
    return report


def evaluate(
    model: Located,
    baseline: Located | None = None,
    *,
    text: Text,
    limit: int | None = None,
    context: int | None = None,
    recall: RecallPlan | None = None,
    device: str = "cpu",
    progress: Progress | None = None,
    say: Callable[[str], Any] | None = None,
) -> dict[str, Any]:
    """Measure a model, and a baseline, one after the other; arguments and errors as :func:`measure`, and those of
    loading. Returns :func:`build_report`'s data with what it was measured with."""
    found: list[Measurement] = []
    dtype = None
    models = [one for one in (model, baseline) if one is not None]
    for one in models:  # all, before the first is measured
        check_loadable(one)
    for one in models:
        network, tokenizer = load(one, device, say=say)
        dtype = dtype or str(network.dtype).removeprefix("torch.")
        options = {"limit": limit, "context": context, "recall": recall, "progress": progress}
        found.append(measure(network, tokenizer, text, name=one.name, revision=one.revision, **options))
        context = found[0].context
        del network
        gc.collect()
        if device != "cpu":
            torch.cuda.empty_cache()
    report = build_report(*found)
    versions = {"surgery": surgery.__version__, "torch": torch.__version__}
    return report | {"measured_with": {"device": device, "dtype": dtype, **versions}}
