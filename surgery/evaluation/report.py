"""What a model does on a text, beside a baseline and a control: perplexity, bits per byte, loss by position, needle
recall, tasks."""

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
from surgery.evaluation.tasks.measuring import TaskPlan, compare_tasks, measure_tasks

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
        tasks: :func:`surgery.evaluation.tasks.measuring.measure_tasks`'s result, or None.
    """

    name: str
    tokens: Tokens
    stream: Losses
    windows: Losses
    context: int
    recall: dict[str, Any] | None
    revision: str | None = None
    tasks: dict[str, Any] | None = None

    def as_dict(self) -> dict[str, Any]:
        positions = by_position(self.windows, position_edges(self.context))
        return {
            "name": self.name,
            "revision": self.revision,
            **self.stream.as_dict(),
            "positions": positions,
            "recall": self.recall,
            "tasks": self.tasks,
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
    tasks: TaskPlan | None = None,
    progress: Progress | None = None,
) -> Measurement:
    """Measure one model.

    Args:
        model: a causal language model with a cache; its device is used.
        name, revision: what it is called in the report, and its commit on a hub.
        limit: at most this many tokens of the text.
        context: tokens a window for the losses by position; by default :func:`default_context`.
        recall, tasks: None leaves it out.

    Raises:
        UsageError: a text shorter than one context, or too short for a recall length, or a task that fits no length.
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

    # needles and tasks first: their lengths may be asked for in vain
    found = asked = None
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
    if tasks is not None:
        stage_of_tasks = f"{name}: tasks"
        advance = None if progress is None else lambda done, total: progress(stage_of_tasks, done, total)
        asked = measure_tasks(model, tokenizer, tasks, text, advance)
    stream = stream_losses(model, tokens, progress=tick(f"{name}: stream", len(tokens) - 1), name=name)
    whole = len(tokens) // context * context
    advance = tick(f"{name}: windows of {context}", whole)
    windows = window_losses(model, tokens, context, progress=advance, name=name)
    return Measurement(name, tokens, stream, windows, context, found, revision, asked)


def build_report(
    measured: Measurement, baseline: Measurement | None = None, control: Measurement | None = None
) -> dict[str, Any]:
    """The figures as plain data; differences to the baseline and to the control are paired token by token where both
    models read the same tokens, otherwise only bits per byte can be compared. Tasks are paired document by document."""
    return {
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
        "baseline": None if baseline is None else baseline.as_dict(),
        "difference": None if baseline is None else _difference(measured, baseline),
        "control": None if control is None else control.as_dict(),
        "control_difference": None if control is None else _difference(measured, control),
    }


def _difference(measured: Measurement, other: Measurement) -> dict[str, Any]:
    """The model's figures minus another's."""
    bits = measured.stream.bits_per_byte - other.stream.bits_per_byte
    paired = torch.equal(measured.tokens.ids, other.tokens.ids) and measured.context == other.context
    found: dict[str, Any] = {"paired": paired, "bits_per_byte": bits}
    if paired:
        nll = difference(measured.stream, other.stream)
        edges = position_edges(measured.context)
        found |= {
            "nll": nll.as_dict(),
            "perplexity_ratio": nll.map(perplexity).as_dict(),
            "positions": by_position(measured.windows, edges, other.windows),
        }
    if measured.tasks and other.tasks:
        found["tasks"] = compare_tasks(measured.tasks, other.tasks)
    return found


def evaluate(
    model: Located,
    baseline: Located | None = None,
    control: Located | None = None,
    *,
    text: Text,
    limit: int | None = None,
    context: int | None = None,
    recall: RecallPlan | None = None,
    tasks: TaskPlan | None = None,
    device: str = "cpu",
    progress: Progress | None = None,
    say: Callable[[str], Any] | None = None,
) -> dict[str, Any]:
    """Measure a model, a baseline and a control, one after the other; arguments and errors as :func:`measure`, and
    those of loading. Returns :func:`build_report`'s data with what it was measured with."""
    found: dict[str, Measurement] = {}
    dtype = None
    models = {
        role: one
        for role, one in (("measured", model), ("baseline", baseline), ("control", control))
        if one is not None
    }
    for one in models.values():  # all, before the first is measured
        check_loadable(one)
    for role, one in models.items():
        network, tokenizer = load(one, device, say=say)
        dtype = dtype or str(network.dtype).removeprefix("torch.")
        options = {"limit": limit, "context": context, "recall": recall, "tasks": tasks, "progress": progress}
        found[role] = measure(network, tokenizer, text, name=one.name, revision=one.revision, **options)
        context = found["measured"].context
        del network
        gc.collect()
        if device != "cpu":
            torch.cuda.empty_cache()
    report = build_report(**found)
    versions = {"surgery": surgery.__version__, "torch": torch.__version__}
    return report | {"measured_with": {"device": device, "dtype": dtype, **versions}}
