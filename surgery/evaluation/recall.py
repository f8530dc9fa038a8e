"""Recall of a needle in a haystack of text, RULER-style, for models too small to follow an instruction.

A prompt holds text, one or more needles (:func:`surgery.evaluation.words.statement`) and, at its end, the question
about one of them with the start of its answer (:func:`surgery.evaluation.words.question`). What is read is the
log-probability of the right value against others of the same token length, so that chance is 1/candidates and no
generation has to be parsed.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from surgery.data.tokens import begin_text
from surgery.evaluation.haystack import TOLERANCE, Haystack
from surgery.evaluation.intervals import wilson
from surgery.evaluation.perplexity import evaluating
from surgery.evaluation.scoring import State, batches, candidate_scores, check_finite
from surgery.evaluation.words import draw_value, draw_words, introduction, question, statement

DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
LENGTHS = (256, 512, 1024)


@dataclass(frozen=True)
class Prompt:
    """One measurement. ``tokens`` and any one of ``values`` together are exactly ``length`` tokens long; ``values[0]``
    is right, and all are equally long.

    Attributes:
        depth: what was asked for. reached: the share of the text's tokens that stand before the needle.
        position: the token at which the needle begins.
    """

    length: int
    depth: float
    reached: float
    position: int
    tokens: list[int]
    values: list[list[int]]


def needle_prompt(
    haystack: Haystack,
    rng: random.Random,
    length: int,
    depth: float,
    kind: str,
    candidates: int = 10,
    needles: int = 1,
    tolerance: float = TOLERANCE,
) -> Prompt:
    """Return a prompt of exactly ``length`` tokens, its value included, with the needle asked for at ``depth`` (0 to 1)
    of the text and ``needles - 1`` more, for other keys, anywhere in it; see :meth:`Haystack.placed`.

    Raises:
        UsageError: ``length`` has no room for text beside the needles, or the text is too short.
    """
    keys: list[str] = []
    while len(keys) < needles:
        key = draw_words(rng)
        if key not in keys:
            keys.append(key)
    value = draw_value(rng, kind)
    tail = question(kind, keys[0])
    values = list(haystack.alike(tail, [value], lambda: draw_value(rng, kind), candidates).values())
    others = [draw_value(rng, kind) for _ in keys[1:]]
    sentences = [statement(kind, key, item) for key, item in zip(keys, [value, *others], strict=True)]
    depths = [depth, *[None] * len(others)]
    placed = haystack.placed(
        rng, length, len(values[0]), introduction(kind), sentences, depths, tail, tolerance=tolerance
    )
    return Prompt(length, depth, placed.reached[0], placed.positions[0], placed.tokens, values)


def needle_prompts(
    haystack: Haystack,
    lengths: Sequence[int],
    depths: Sequence[float],
    samples: int,
    seed: int,
    kind: str = "numbers",
    candidates: int = 10,
    needles: int = 1,
) -> list[Prompt]:
    """Return every prompt of a measurement; see :func:`needle_recall`.

    Raises:
        UsageError: as :func:`needle_prompt`.
    """
    gaps = [b - a for a, b in itertools.pairwise(sorted(depths))]
    tolerance = min([TOLERANCE, *(gap / 4 for gap in gaps)])

    def one(length: int, depth: float, index: int) -> Prompt:
        rng = random.Random(f"{seed}/{length}/{depth}/{index}")
        return needle_prompt(haystack, rng, length, depth, kind, candidates, needles, tolerance)

    return [one(length, depth, index) for length in lengths for depth in depths for index in range(samples)]


def needle_recall(
    model: Any,
    tokenizer: Any,
    text: str,
    lengths: Sequence[int] = LENGTHS,
    depths: Sequence[float] = DEPTHS,
    samples: int = 20,
    seed: int = 0,
    device: str | None = None,
    *,
    kind: str = "numbers",
    candidates: int = 10,
    needles: int = 1,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, Any]:
    """How often the right value of a needle is the most probable of ``candidates``, by prompt length and depth.

    Args:
        model: a causal language model of transformers' interface, with a cache.
        tokenizer: its tokenizer.
        text: the haystack, in any script; needles go to sentence ends where there are some nearby
            (:meth:`Haystack.placed`). Nothing is ever truncated.
        lengths: tokens of prompt and value together. depths: 0 is the text's start, 1 its end.
        samples: prompts for each length and depth. The prompts depend on ``seed``, length, depth and index only.
        device: where the model is; its own by default.
        kind: "numbers" (7 digits), "words" or "uuids". needles: how many the text holds, with different keys.
        progress: called with (prompts done, prompts in all).

    Returns:
        ``lengths`` and ``cells`` (length x depth): right, total, fraction, Wilson's 95% interval, the right
        value's mean log-probability in nats and its mean lead over the best other value; and what was asked for. A
        prompt counts for the depth that is nearest to the one its needle reached, and a cell's ``reached`` is their
        mean; a cell without a prompt is left out.

    Raises:
        UsageError: a length too short for its needles or longer than the text, or an unknown kind.
    """
    prompts = needle_prompts(Haystack(text, tokenizer), lengths, depths, samples, seed, kind, candidates, needles)
    results: dict[int, list[float]] = {}
    with evaluating(model):
        for batch in batches([len(prompt.tokens) for prompt in prompts], model):
            state = State.of(model, [prompts[index].tokens for index in batch], device)
            for index, scores in zip(batch, candidate_scores(state, [prompts[i].values for i in batch]), strict=True):
                what = f"needle recall at {prompts[index].length} tokens"
                check_finite(scores, model, prompts[index].tokens, what)
                results[index] = scores.tolist()
            if progress is not None:
                progress(len(results), len(prompts))

    def summary(chosen: list[int]) -> dict[str, Any]:
        leads = [results[index][0] - max(results[index][1:]) for index in chosen]
        right = sum(lead > 0 for lead in leads)
        return {
            "right": right,
            "total": len(chosen),
            "fraction": right / len(chosen),
            "interval": list(wilson(right, len(chosen))),
            "log_probability": sum(results[index][0] for index in chosen) / len(chosen),
            "lead": sum(leads) / len(leads),
        }

    def cell(length: int, depth: float, chosen: list[int]) -> dict[str, Any]:
        reached = sum(prompts[index].reached for index in chosen) / len(chosen)
        return {"length": length, "depth": depth, "reached": reached, **summary(chosen)}

    nearest = [min(depths, key=lambda depth: abs(depth - prompt.reached)) for prompt in prompts]
    by_length = {length: [i for i, prompt in enumerate(prompts) if prompt.length == length] for length in lengths}
    return {
        "task": "needle in text, the right value's log-probability among candidates",
        "kind": kind,
        "candidates": candidates,
        "chance": 1 / candidates,
        "needles": needles,
        "samples": samples,
        "seed": seed,
        "begin_token": begin_text(tokenizer) or None,
        "lengths": [{"length": length, **summary(chosen)} for length, chosen in by_length.items()],
        "cells": [
            cell(length, depth, inside)
            for length, chosen in by_length.items()
            for depth in depths
            if (inside := [index for index in chosen if nearest[index] == depth])
        ],
    }
