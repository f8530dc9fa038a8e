"""Run tasks on a model: documents by length and number of pairs, their scores, and intervals by document."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from surgery.data.texts import Text
from surgery.errors import UsageError
from surgery.evaluation.haystack import TooLong
from surgery.evaluation.intervals import paired_interval, share_interval
from surgery.evaluation.perplexity import evaluating
from surgery.evaluation.scoring import State, batches, candidate_scores, check_finite, greedy, teacher_forced
from surgery.evaluation.tasks.base import Document, Task, Texts, share_found

DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
# how a document is scored -> in words
SCORES = {
    "written": "share of the expected values in the answer written greedily",
    "chosen": "a right value is the most probable of the candidates",
    "forced": "all tokens of a value are the most probable ones, over every key of a list in one forward pass",
}

Progress = Callable[[int, int], Any]  # documents done, documents in all


@dataclass(frozen=True)
class TaskPlan:
    """What is asked for.

    Attributes:
        lengths: tokens of prompt and answer together; None, for lists, is the list's own length.
        pairs: of lists. samples: documents for each task, length and number of pairs.
        haystack: the text around; None for the measured text.
        scores: which of :data:`SCORES`.
    """

    tasks: Sequence[Task]
    lengths: Sequence[int | None]
    pairs: Sequence[int] = (4, 16, 64)
    samples: int = 50
    seed: int = 0
    haystack: Text | None = None
    scores: Sequence[str] = tuple(SCORES)

    def cells(self) -> list[tuple[Task, int | None, int | None]]:
        """Task, length and number of pairs of every cell."""
        return [
            (task, length, pairs)
            for task in self.tasks
            for length in self.lengths
            for pairs in (self.pairs if task.listing else [None])
            if length is not None or task.listing or not any(self.lengths)
        ]


@dataclass
class Cell:
    """The documents of one task, length and number of pairs, and what a model made of each.

    Attributes:
        scores: score -> the share that is right, of each document.
        nats: log-probability of the right values, of each document: of the candidate, or a list's mean.
        keys: for lists, of each document, whether each answer in the order asked is right.
    """

    task: Task
    length: int | None
    pairs: int | None
    documents: list[Document]
    scores: dict[str, list[float]] = field(default_factory=dict)
    nats: dict[str, list[float]] = field(default_factory=dict)
    keys: list[list[bool]] = field(default_factory=list)

    @property
    def name(self) -> str:
        pairs = f" of {self.pairs} pairs" if self.pairs else ""
        return f"{self.task.name}{pairs}" + (f" at {self.length} tokens" if self.length else "")

    def as_dict(self) -> dict[str, Any]:
        first = self.documents[0]
        found: dict[str, Any] = {
            "task": self.task.name,
            "length": self.length,
            "pairs": self.pairs,
            "tokens": max(document.tokens for document in self.documents),
            "documents": len(self.documents),
            "digest": _digest(self.documents),
            "scores": {},
        }
        for name, values in self.scores.items():
            samples = self.pairs if name == "forced" else 1
            found["scores"][name] = {
                **share_interval(torch.tensor(values), samples).as_dict(),
                "samples": samples,
                "values": values,
                **({"log_probability": sum(nats) / len(nats)} if (nats := self.nats.get(name)) else {}),
            }
        if "chosen" in self.scores:
            found["scores"]["chosen"] |= {
                "candidates": len(first.candidates),
                "chance": first.right / len(first.candidates),
            }
        found["depths"] = self._by_depth()
        if self.keys and any(one.updated for one in first.asked):
            found["updated"] = {
                name: self._keys(lambda one, wanted=wanted: one.updated == wanted).as_dict()
                for name, wanted in (("given again", True), ("given once", False))
            }
        return found

    def _keys(self, wanted: Callable[[Any], bool]) -> Any:
        """The share of right answers among those asked that are ``wanted``; None where there are none."""
        values = [
            [hit for one, hit in zip(document.asked, hits, strict=True) if wanted(one)]
            for document, hits in zip(self.documents, self.keys, strict=True)
        ]
        values = [hits for hits in values if hits]
        if not values:
            return None
        shares = torch.tensor([sum(hits) / len(hits) for hits in values], dtype=torch.float64)
        return share_interval(shares, max(map(len, values)))

    def _by_depth(self) -> list[dict[str, Any]]:
        """Shares by where what is asked for stands: a list's by all its keys, the others' by the written answer."""
        if self.keys:
            found = {depth: self._keys(lambda one, depth=depth: _nearest(one.depth) == depth) for depth in DEPTHS}
        else:
            name = next((name for name in ("written", "chosen") if name in self.scores), None)
            found = {}
            for depth in DEPTHS if name and self.task.depths else ():
                inside = [i for i, one in enumerate(self.documents) if _nearest(one.depth) == depth]
                values = torch.tensor([self.scores[name][i] for i in inside])
                found[depth] = share_interval(values) if inside else None
        return [{"depth": depth, **interval.as_dict()} for depth, interval in found.items() if interval is not None]


def build_cell(texts: Texts, plan: TaskPlan, task: Task, length: int | None, pairs: int | None) -> Cell:
    """Make the documents of one cell; they depend on the seed, the cell and their number only.

    Raises:
        TooLong: one does not fit the length, or has to be given one. UsageError: the text is too short.
    """
    if length is None and not task.listing:
        raise TooLong(f"{task.name} has no length of its own: it needs one in tokens")
    made: list[Document] = []
    for index in range(plan.samples):
        rng = random.Random(f"{plan.seed}/{task.name}/{length}/{pairs}/{index}")
        made.append(task.document(texts, rng, length, depth=DEPTHS[index % len(DEPTHS)], pairs=pairs))
    return Cell(task, length, pairs, made)


def build_cells(texts: Texts, plan: TaskPlan) -> tuple[list[Cell], list[dict[str, Any]]]:
    """Make all documents.

    Returns:
        The cells, and those that do not fit their length, each with the reason.

    Raises:
        UsageError: nothing fits at all, or the text is too short.
    """
    cells: list[Cell] = []
    left_out: list[dict[str, Any]] = []
    for task, length, pairs in plan.cells():
        try:
            cells.append(build_cell(texts, plan, task, length, pairs))
        except TooLong as error:
            left_out.append({"task": task.name, "length": length, "pairs": pairs, "reason": str(error)})
    if not cells:
        lists = any(task.listing for task in plan.tasks)
        raise UsageError(f"{left_out[-1]['reason']}\n  ask for greater lengths{' or fewer pairs' if lists else ''}")
    return cells, left_out


def score_cells(
    model: nn.Module, tokenizer: Any, cells: Iterable[Cell], plan: TaskPlan, progress: Progress | None
) -> None:
    """Fill in what ``model`` makes of the documents.

    Raises:
        JobError: probabilities that are not numbers.
    """
    cells = list(cells)
    total = sum(len(cell.documents) for cell in cells)
    done = 0
    with evaluating(model):
        for cell in cells:
            if "forced" in plan.scores and cell.task.listing:
                _score_forced(model, cell)
            if {"written", "chosen"} & set(plan.scores):
                _score_prompts(model, tokenizer, cell, plan.scores)
            done += len(cell.documents)
            if progress is not None:
                progress(done, total)


def _score_prompts(model: nn.Module, tokenizer: Any, cell: Cell, scores: Sequence[str]) -> None:
    count = len(cell.documents)
    written, chosen, nats = [0.0] * count, [0.0] * count, [0.0] * count
    for batch in batches([len(document.prompt) for document in cell.documents], model):
        documents = [cell.documents[index] for index in batch]
        state = State.of(model, [document.prompt for document in documents])
        for document, logits in zip(documents, state.logits, strict=True):
            check_finite(logits, model, document.prompt, cell.name)
        if "chosen" in scores:
            found = candidate_scores(state, [document.candidates for document in documents])
            for index, document, values in zip(batch, documents, found, strict=True):
                check_finite(values, model, document.prompt, cell.name)
                best = values[: document.right].max()
                chosen[index] = float(bool(best > values[document.right :].max()))
                nats[index] = float(best)
        if "written" in scores:
            answers = greedy(state, max(document.room for document in documents)).tolist()
            for index, document, ids in zip(batch, documents, answers, strict=True):
                ids = ids[: document.room]
                if tokenizer.eos_token_id in ids:  # what a model writes after its end is no answer
                    ids = ids[: ids.index(tokenizer.eos_token_id)]
                text = tokenizer.decode(ids, skip_special_tokens=True)
                written[index] = share_found(text, document.answers)
    if "written" in scores:
        cell.scores["written"] = written
    if "chosen" in scores:
        cell.scores["chosen"], cell.nats["chosen"] = chosen, nats


def _score_forced(model: nn.Module, cell: Cell) -> None:
    count = len(cell.documents)
    keys: list[list[bool]] = [[] for _ in range(count)]
    nats = [0.0] * count
    for batch in batches([len(document.whole) for document in cell.documents], model, padded=True):
        documents = [cell.documents[index] for index in batch]
        spans = [[(one.start, one.stop) for one in document.asked] for document in documents]
        right, logs = teacher_forced(model, [document.whole for document in documents], spans)
        for index, document, hits, found in zip(batch, documents, right, logs, strict=True):
            check_finite(torch.tensor(found), model, document.whole, cell.name)
            keys[index], nats[index] = hits, sum(found) / len(found)
    cell.keys, cell.nats["forced"] = keys, nats
    cell.scores["forced"] = [sum(hits) / len(hits) for hits in keys]


def measure_tasks(
    model: nn.Module, tokenizer: Any, plan: TaskPlan, text: Text, progress: Progress | None = None
) -> dict[str, Any]:
    """Measure one model.

    Args:
        text: the haystack, unless the plan names one.
        progress: called with documents done and documents in all.

    Returns:
        Plain data: what was asked for, the cells with their scores, 95% intervals and the documents' own values, and
        the cells that were left out.

    Raises:
        UsageError: as :func:`build_cells`. JobError: as :func:`score_cells`.
    """
    haystack = plan.haystack or text
    texts = Texts(haystack.text, tokenizer, max([length or 0 for length in plan.lengths]))
    cells, left_out = build_cells(texts, plan)
    score_cells(model, tokenizer, cells, plan, progress)
    return {
        "haystack": haystack.name,
        "samples": plan.samples,
        "seed": plan.seed,
        "tasks": {task.name: task.about for task in plan.tasks},
        "scores": {name: SCORES[name] for name in plan.scores},
        "cells": [cell.as_dict() for cell in cells],
        "left_out": left_out,
    }


def compare_tasks(measured: dict[str, Any], other: dict[str, Any]) -> list[dict[str, Any]]:
    """Differences of two results of :func:`measure_tasks`, paired document by document, with intervals; a cell whose
    documents are not the same token for token is left out."""
    theirs = {_key(cell): cell for cell in other["cells"]}
    found = []
    for cell in measured["cells"]:
        twin = theirs.get(_key(cell))
        if twin is None or twin["digest"] != cell["digest"]:
            continue
        scores = {
            name: paired_interval(_values(cell, name), _values(twin, name)).as_dict()
            for name in cell["scores"]
            if name in twin["scores"]
        }
        found.append({key: cell[key] for key in ("task", "length", "pairs")} | {"scores": scores})
    return found


def _key(cell: dict[str, Any]) -> tuple[Any, ...]:
    return cell["task"], cell["length"], cell["pairs"]


def _values(cell: dict[str, Any], score: str) -> Tensor:
    return torch.tensor(cell["scores"][score]["values"], dtype=torch.float64)


def _nearest(depth: float) -> float:
    return min(DEPTHS, key=lambda one: abs(one - depth))


def _digest(documents: Sequence[Document]) -> str:
    """The same for the same documents, token for token, questions included."""
    made = hashlib.sha256()
    for document in documents:
        made.update(repr((document.prompt, document.whole, document.candidates, document.answers)).encode())
    return made.hexdigest()[:16]
