"""Recall of a needle in a haystack of text, RULER-style, for models too small to follow an instruction.

A prompt holds text, one or more needles (:func:`statement`) and, at its end, the question about one of them with the
start of its answer (:func:`question`). What is read is the log-probability of the right value against others of the
same token length, so that chance is 1/candidates and no generation has to be parsed. The wording and the draws here
also make the recall documents that the bundled bases were trained on (``surgery.pretraining.documents``).
"""

from __future__ import annotations

import bisect
import inspect
import itertools
import random
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from surgery.data.tokens import Spans, begin_text, begin_tokens, spans_of
from surgery.errors import JobError, UsageError
from surgery.evaluation.boundaries import boundaries
from surgery.evaluation.finite import first_nonfinite
from surgery.evaluation.intervals import wilson
from surgery.evaluation.words import ADJECTIVES, NOUNS

KINDS = ("numbers", "words", "uuids")
DIGITS = 7
DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
LENGTHS = (256, 512, 1024)
TOLERANCE = 0.1  # of the text: how far from its depth a needle may stand for the sake of a sentence's end
BATCH_BYTES = 2**28  # logits of one forward pass stay under this
BATCH_TOKENS = 2**15  # tokens of one forward pass
ATTEMPTS = 50  # to find a prompt of exactly so many tokens
SLACK = 10  # tokens at most that an attempt leaves to what comes behind the needles, for pieces that join badly
WHITE = ("\n", " ", "\n\n", " \n", "\n \n", "\n\n\n", "\n \n \n", "\t", "\n\t\n", "\t \n \t")


def draw_words(rng: random.Random) -> str:
    """An adjective and a noun, joined by a hyphen."""
    return f"{rng.choice(ADJECTIVES)}-{rng.choice(NOUNS)}"


def draw_value(rng: random.Random, kind: str) -> str:
    """A value of ``kind``: a number of 7 digits, two words, or a version-4 UUID."""
    if kind == "numbers":
        return str(rng.randrange(10 ** (DIGITS - 1), 10**DIGITS))
    if kind == "words":
        return draw_words(rng)
    if kind == "uuids":
        return str(uuid.UUID(int=rng.getrandbits(128), version=4))
    raise UsageError(f"needle kind {kind!r}: choose one of {', '.join(KINDS)}")


def statement(kind: str, key: str, value: str) -> str:
    """The needle: RULER's sentence."""
    return f"One of the special magic {kind} for {key} is: {value}."


def introduction(kind: str) -> str:
    """The line above the haystack."""
    return f"Special magic {kind} are hidden in this text. Remember them.\n"


def question(kind: str, key: str) -> str:
    """The question after the haystack and the start of its answer; the value follows after a space."""
    return f"\nWhat is the special magic {kind[:-1]} for {key}? The special magic {kind[:-1]} for {key} is:"


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


class Haystack:
    """A text as tokens, with the places where a needle may stand.

    Args:
        text: any text; it must hold more tokens than the longest prompt.
        tokenizer: a transformers tokenizer.
    """

    def __init__(self, text: str, tokenizer: Any) -> None:
        self.text, self.tokenizer = text, tokenizer
        self.begin = begin_tokens(tokenizer)
        ids, spans = spans_of(tokenizer, text)
        self.tokens = ids.tolist()
        self.places = boundaries(text, spans)
        # the character at which the text may be cut so that so many tokens stand before the cut
        self.cuts = [0, *np.maximum.accumulate(spans[:, 1]).tolist()]
        # where what follows a needle brings its own space
        self._spaced = {index for index in self.places.spaces if text[(cut := self.cuts[index]) : cut + 1].isspace()}

    def encode(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]

    def prompt(
        self,
        rng: random.Random,
        length: int,
        depth: float,
        kind: str,
        candidates: int = 10,
        needles: int = 1,
        tolerance: float = TOLERANCE,
    ) -> Prompt:
        """A prompt of exactly ``length`` tokens, its value included, with the needle asked for at ``depth`` (0 to 1)
        of the text and ``needles - 1`` more, for other keys, anywhere in it. Its tokens are those that the tokenizer
        makes of the whole prompt.

        The needle stands at the end of a sentence or a line within ``tolerance`` of its depth, else at white space,
        else between two characters.

        Raises:
            UsageError: ``length`` has no room for text beside the needles, or the text is too short.
        """
        keys: list[str] = []
        while len(keys) < needles:
            key = draw_words(rng)
            if key not in keys:
                keys.append(key)
        value = draw_value(rng, kind)
        head, tail = introduction(kind), question(kind, keys[0])
        values = self.candidates(rng, kind, value, candidates, tail)
        others = [draw_value(rng, kind) for _ in keys[1:]]

        # Every needle is set off the way its place asks for; the longest form is reserved and the text fills up.
        sentences = [statement(kind, key, item) for key, item in zip(keys, [value, *others], strict=True)]
        forms = [
            {lead: lead + sentence + ("" if lead == " " else "\n") for lead in ("", " ", "\n")}
            for sentence in sentences
        ]
        reserved = sum(max(len(self.encode(text)) for text in form.values()) for form in forms)
        whole = length - len(values[0])
        room = whole - len(self.begin) - len(self.encode(head)) - len(self.encode(tail)) - reserved
        if room < 8:
            raise UsageError(
                f"needle recall at {length} tokens: the needles and the question alone take {length - room}; "
                f"ask for lengths of at least {length - room + 8}"
            )
        if len(self.tokens) < length:
            raise UsageError(
                f"needle recall at {length} tokens: the text holds only {len(self.tokens)}; give a longer text "
                "or smaller lengths"
            )
        starts = [0, *self.places.best[: bisect.bisect_right(self.places.best, len(self.tokens) - length)]]
        for attempt in range(ATTEMPTS):
            start = rng.choice(starts)
            depths = [depth] + [rng.random() for _ in others]
            short = max(1, room - attempt % (SLACK + 1))
            places = [self._nearest(start, short, goal, tolerance) for goal in depths]
            body, at, asked, set_off = "", start, 0, 0
            for place, index in sorted((place, index) for index, place in enumerate(places)):
                body += self.text[self.cuts[at] : self.cuts[place]]
                at = place
                if index == 0:
                    asked = len(head) + len(body)
                after_space = not body or body[-1].isspace()
                form = forms[index]["" if after_space else " " if place in self._spaced else "\n"]
                body += form
                set_off += len(self.encode(form))
            filled = self._filled(head + body, tail, at, whole)
            if filled is not None:
                before = int(np.searchsorted(np.maximum.accumulate(filled.spans[:, 1]), asked, side="right"))
                around = len(self.encode(head)), len(self.encode(tail)) + set_off
                reached = max(0, before - around[0]) / (len(filled.ids) - sum(around))
                tokens = [*self.begin, *filled.ids.tolist()]
                return Prompt(length, depth, min(1.0, reached), len(self.begin) + before, tokens, values)
        raise UsageError(f"needle recall: found no prompt of exactly {length} tokens in this text; try another")

    def prompts(
        self,
        lengths: Sequence[int],
        depths: Sequence[float],
        samples: int,
        seed: int,
        kind: str = "numbers",
        candidates: int = 10,
        needles: int = 1,
    ) -> list[Prompt]:
        """Every prompt of a measurement; see :func:`needle_recall`.

        Raises:
            UsageError: as :meth:`prompt`.
        """
        gaps = [b - a for a, b in itertools.pairwise(sorted(depths))]
        tolerance = min([TOLERANCE, *(gap / 4 for gap in gaps)])

        def one(length: int, depth: float, index: int) -> Prompt:
            rng = random.Random(f"{seed}/{length}/{depth}/{index}")
            return self.prompt(rng, length, depth, kind, candidates, needles, tolerance)

        return [one(length, depth, index) for length in lengths for depth in depths for index in range(samples)]

    def _filled(self, front: str, tail: str, at: int, goal: int) -> Spans | None:
        """Tokens of a prompt, exactly ``goal`` with those that begin a text, between whose ``front`` and ``tail`` the
        text from token ``at`` on fills up what is missing; None where none is found.

        Where the characters are of several tokens each, white space before ``tail`` makes up the difference.
        """
        for white in ("", *WHITE):
            end, tried = at, set()
            while end not in tried:
                tried.add(end)
                # the text's own tokens may join with what they touch, so the count is taken of the whole
                found = spans_of(self.tokenizer, front + self.text[self.cuts[at] : self.cuts[end]] + white + tail)
                missing = goal - len(self.begin) - len(found.ids)
                if missing == 0:
                    return found
                end = min(max(at, end + missing), len(self.tokens))
        return None

    def candidates(self, rng: random.Random, kind: str, value: str, count: int, tail: str) -> list[list[int]]:
        """Token lists of ``count`` values of one length, as they follow ``tail``; the first is ``value``'s."""
        asked = self.encode(tail)

        def following(value: str) -> list[int] | None:
            whole = self.encode(f"{tail} {value}")
            return whole[len(asked) :] if whole[: len(asked)] == asked else None

        first = following(value)
        if not first:
            raise UsageError("needle recall: the tokenizer joins the question and its answer, which cannot be scored")
        values = [first]
        for _ in range(1000 * count):
            if len(values) == count:
                return values
            other = following(draw_value(rng, kind))
            if other is not None and len(other) == len(first) and other not in values:
                values.append(other)
        raise UsageError(f"needle recall: found {len(values)} of {count} {kind} of {len(values[0])} tokens")

    def _nearest(self, start: int, room: int, depth: float, tolerance: float) -> int:
        """Return the best place in [start, start + room] within ``tolerance`` of ``depth``, else the nearest at all.

        Both ends count as sentence boundaries.
        """
        goal = start + round(depth * room)
        stop = self._near(self.places.characters, start, start + room, start + room)
        ends = (start, start + room if stop is None else stop)
        for level in self.places.levels:
            near = self._near(level, start, start + room, goal)
            place = min(ends if near is None else (*ends, near), key=lambda place: abs(place - goal))
            if abs(place - goal) <= tolerance * room:
                break
        return place

    @staticmethod
    def _near(places: Sequence[int], start: int, stop: int, goal: int) -> int | None:
        """Return the one of ``places``, ascending, in [start, stop] that is nearest to ``goal``, or None."""
        index = bisect.bisect_left(places, goal)
        inside = [place for place in places[max(0, index - 1) : index + 1] if start <= place <= stop]
        return min(inside, key=lambda place: abs(place - goal), default=None)


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
            (:meth:`Haystack.prompt`). Nothing is ever truncated.
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
    import torch

    from surgery.memory.modules import device_of

    device = device or device_of(model)
    prompts = Haystack(text, tokenizer).prompts(lengths, depths, samples, seed, kind, candidates, needles)
    results: dict[int, list[float]] = {}
    training = model.training
    model.eval()
    with torch.inference_mode():
        for batch in _batches(prompts, _rows_limit(model)):
            scores = _score(model, [prompts[index] for index in batch], device)
            if not bool(scores.isfinite().all()):
                bad = batch[int((~scores.isfinite()).any(1).nonzero()[0])]
                source = first_nonfinite(model, torch.tensor([prompts[bad].tokens], device=device))
                name = getattr(model, "name_or_path", "") or type(model).__name__
                raise JobError(
                    f"{name}: needle recall at {prompts[bad].length} tokens: probabilities that are not numbers; first "
                    f"not finite: {source}"
                )
            scores = scores.tolist()
            results.update(zip(batch, scores, strict=True))
            if progress is not None:
                progress(len(results), len(prompts))
    model.train(training)

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


def _rows_limit(model: Any) -> Callable[[int], int]:
    """How many rows of a given length one forward pass may take."""
    bytes_a_token = 4 * model.config.vocab_size
    if "logits_to_keep" in inspect.signature(model.forward).parameters:
        return lambda length: max(1, BATCH_TOKENS // length)
    return lambda length: max(1, min(BATCH_TOKENS // length, BATCH_BYTES // (bytes_a_token * length)))


def _batches(prompts: list[Prompt], limit: Callable[[int], int]) -> list[list[int]]:
    """Indices of prompts that can run together: of one length, with values of one length."""
    groups: dict[tuple[int, int], list[int]] = {}
    for index, prompt in enumerate(prompts):
        groups.setdefault((prompt.length, len(prompt.values[0])), []).append(index)
    return [
        group[at : at + limit(length)]
        for (length, _), group in groups.items()
        for at in range(0, len(group), limit(length))
    ]


def _score(model: Any, prompts: list[Prompt], device: Any):
    """Log-probabilities [prompt, candidate] of each candidate value after its prompt: the prompts are read once, then
    the cache is repeated for every candidate, whose tokens follow one at a time."""
    import torch

    values = torch.tensor([prompt.values for prompt in prompts], device=device)  # [row, candidate, token]
    rows, count, size = values.shape
    keep = {"logits_to_keep": 1} if "logits_to_keep" in inspect.signature(model.forward).parameters else {}
    output = model(torch.tensor([prompt.tokens for prompt in prompts], device=device), use_cache=True, **keep)
    total = output.logits[:, -1].float().log_softmax(-1).gather(1, values[:, :, 0])
    if size == 1:
        return total
    name, cache = _cache(model, output)
    cache.reorder_cache(torch.arange(rows, device=device).repeat_interleave(count))
    for index in range(size - 1):
        step = values[:, :, index].reshape(rows * count, 1)
        output = model(step, use_cache=True, **{name: cache})
        cache = _cache(model, output)[1]
        following = values[:, :, index + 1].reshape(rows * count, 1)
        total = total + output.logits[:, -1].float().log_softmax(-1).gather(1, following).view(rows, count)
    return total


def _cache(model: Any, output: Any) -> tuple[str, Any]:
    """The cache in a model's output and the argument that takes it: transformers has renamed both over time."""
    accepted = inspect.signature(model.forward).parameters
    for name in ("cache", "past_key_values", "cache_params"):
        cache = getattr(output, name, None)
        if cache is not None:
            argument = next(n for n in (name, "cache", "cache_params", "past_key_values") if n in accepted)
            return argument, cache
    raise TypeError(f"{type(model).__name__} returns no cache")
