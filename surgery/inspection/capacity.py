"""Does memory limit a model? Its recall of lists, untouched, by number of pairs and length.

A memory that is operated on can hold more, or longer, for a model that recalls what fits into its old one. A model that
does not recall four pairs has not learned to recall at all, and one that never fails has nothing to gain.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from surgery.data.texts import Text
from surgery.errors import UsageError
from surgery.evaluation.haystack import TooLong
from surgery.evaluation.loading import Located, load
from surgery.evaluation.tasks import TASKS
from surgery.evaluation.tasks.base import Texts
from surgery.evaluation.tasks.measuring import SCORES, TaskPlan, build_cell, score_cells

PAIRS = (4, 8, 16, 32, 64, 128, 256)
LENGTHS = (512, 1024, 2048, 4096)  # with text between list and questions, beside the list alone
DOCUMENTS = 24  # for each number of pairs and length, where --tokens allows so many
LEAST = 6  # fewer say nothing
RIGHT, HALF = 0.9, 0.6  # shares of values: recalled, and no longer recalled
FLOOR = 0.3  # below it nothing harder is asked

Progress = Callable[[int, int], Any]  # cells done, cells in all


@dataclass(frozen=True)
class Verdict:
    """What the figures say.

    Attributes:
        kind: "cannot recall", "recalls in part", "limited by memory" or "not limited".
        words: the same in sentences.
        below: share -> "alone": the list of fewest pairs that is recalled to less; "within": the shortest document in
            which the fewest pairs asked for are. Either may be missing, and a share with neither is left out.
    """

    kind: str
    words: str
    below: dict[str, dict[str, dict[str, Any]]]


@dataclass(frozen=True)
class Capacity:
    """Attributes: tokens: read at most for each cell. result: as :func:`measure_tasks` gives it."""

    model: str
    revision: str | None
    tokens: int
    result: dict[str, Any]
    verdict: Verdict

    def as_dict(self) -> dict[str, Any]:
        """Return plain data."""
        return {
            "schema": 1,
            "kind": "capacity",
            "model": self.model,
            "revision": self.revision,
            "tokens": self.tokens,
            "verdict": {"kind": self.verdict.kind, "words": self.verdict.words, "below": self.verdict.below},
            **self.result,
        }


def measure_capacity(
    located: Located,
    text: Text,
    tokens: int,
    device: str = "cpu",
    *,
    offload: bool | None = False,
    say: Callable[[str], Any] | None = None,
    progress: Progress | None = None,
) -> Capacity:
    """Measure which lists a model recalls.

    Args:
        text: stands between lists and questions.
        tokens: read at most for each number of pairs and length, which bounds the documents.
        offload, say: see :func:`surgery.evaluation.loading.load`.

    Raises:
        UsageError: no such model, a text that is too short, or too few ``tokens``.
        JobError: probabilities that are not numbers.
    """
    network, tokenizer = load(located, device, offload=offload, window=max(LENGTHS), say=say)
    result = capacity(network, tokenizer, text, tokens, progress)
    return Capacity(located.name, located.revision, tokens, result, judge(result["cells"]))


def capacity(model: Any, tokenizer: Any, text: Text, tokens: int, progress: Progress | None = None) -> dict[str, Any]:
    """The same of a model that is loaded: each list alone, then in longer documents, until nothing is recalled."""
    task = TASKS["list_recall"]
    texts = Texts(text.text, tokenizer, max(LENGTHS))
    cells: list[dict[str, Any]] = []
    left_out: list[dict[str, Any]] = []
    reason: str | None = None
    done, total = 0, len(PAIRS) * (1 + len(LENGTHS))

    def leave(length: int | None, pairs: int, why: str) -> None:
        left_out.append({"task": task.name, "length": length, "pairs": pairs, "reason": why})

    for pairs in PAIRS:
        ended = reason
        for length in (None, *LENGTHS):
            done += 1
            if progress is not None:
                progress(done, total)
            if ended is not None:
                leave(length, pairs, ended)
                continue
            size = length or build_cell(texts, TaskPlan([task], [], samples=1), task, None, pairs).documents[0].tokens
            samples = min(DOCUMENTS, tokens // size)
            if samples < LEAST:
                leave(length, pairs, f"{LEAST} documents of {size} tokens are more than {tokens}")
                continue
            plan = TaskPlan([task], [length], [pairs], samples=samples, scores=("forced",))
            try:
                cell = build_cell(texts, plan, task, length, pairs)
            except TooLong as error:
                leave(length, pairs, str(error))
                continue
            score_cells(model, tokenizer, [cell], plan, None)
            cells.append(cell.as_dict())
            share = cells[-1]["scores"]["forced"]["mean"]
            if share < FLOOR:
                ended = f"{_where(cells[-1])} are recalled to {share:.2f} already"
                reason = ended if length is None else reason
    if not cells:
        raise UsageError(f"--tokens: {left_out[0]['reason']}; give more")
    return {
        "haystack": text.name,
        "samples": DOCUMENTS,
        "seed": 0,
        "tasks": {task.name: task.about},
        "scores": {"forced": SCORES["forced"]},
        "cells": cells,
        "left_out": left_out,
    }


def judge(cells: list[dict[str, Any]]) -> Verdict:
    """Return what the cells of :func:`capacity` say, in words."""
    first = next(cell for cell in cells if cell["length"] is None)
    below = {f"{share:g}": found for share in (RIGHT, HALF) if (found := _below(cells, share))}
    if _share(first) < HALF:
        return Verdict(
            "cannot recall",
            f"It cannot recall even {_figure(first)}. Memory is not what limits it: operating on memory cannot help "
            "before it has learned to recall.",
            below,
        )
    if not below:
        most, longest = max(cell["pairs"] for cell in cells), max(cell["tokens"] for cell in cells)
        return Verdict(
            "not limited",
            f"Memory does not limit it in what was asked: at least {RIGHT:g} right up to {most} pairs and {longest:,} "
            "tokens. A task has to ask for more before operating on memory can help.",
            below,
        )
    falls = "; ".join(
        f"below {share} from " + " and from ".join(_figure(cell) for cell in found.values())
        for share, found in below.items()
    )
    if f"{HALF:g}" not in below:
        falls += f"; nowhere below {HALF:g} in what was asked"
    if _share(first) < RIGHT:
        words = (
            f"It recalls even {_figure(first)} only in part, which is no question of memory alone. It falls {falls}."
        )
        return Verdict("recalls in part", words, below)
    words = f"Memory limits it. It falls {falls}. Operating on memory may help from there on."
    return Verdict("limited by memory", words, below)


def _below(cells: list[dict[str, Any]], share: float) -> dict[str, dict[str, Any]]:
    """Where recall is less than ``share``, as :class:`Verdict` has it."""
    fewest = min(cell["pairs"] for cell in cells)
    under = [cell for cell in cells if _share(cell) < share]
    alone = min((cell for cell in under if cell["length"] is None), key=lambda cell: cell["pairs"], default=None)
    within = min(
        (cell for cell in under if cell["length"] is not None and cell["pairs"] == fewest),
        key=lambda cell: cell["length"],
        default=None,
    )
    kept = ("pairs", "length", "tokens")
    found = {"alone": alone, "within": within}
    return {
        name: {key: cell[key] for key in kept} | {"scores": {"forced": _interval(cell)}}
        for name, cell in found.items()
        if cell is not None
    }


def _share(cell: dict[str, Any]) -> float:
    return cell["scores"]["forced"]["mean"]


def _interval(cell: dict[str, Any]) -> dict[str, Any]:
    return {key: cell["scores"]["forced"][key] for key in ("mean", "low", "high")}


def _where(cell: dict[str, Any]) -> str:
    return f"{cell['pairs']} pairs" + (f" within {cell['length']:,} tokens" if cell["length"] else "")


def _figure(cell: dict[str, Any]) -> str:
    found = _interval(cell)
    bounds = "" if found["low"] is None else f", 95%: {found['low']:.2f} to {found['high']:.2f}"
    return f"{_where(cell)} ({found['mean']:.2f} right{bounds})"
