"""Associative recall as text: a list of keys and values, then every key again in another order.

    heavy-otter: 493            each line in the layout of its document
    blue-lantern: 820
                                text, where a length beyond the list's own is asked for
    blue-lantern: 820           every value here is a sample: written token by token in one forward pass
    heavy-otter: 493

This is where the size of a memory limits a model, while a needle asks it to notice one sentence.
"""

from __future__ import annotations

import random
from typing import ClassVar

import numpy as np

from surgery.data.tokens import Spans, spans_of
from surgery.errors import UsageError
from surgery.evaluation.haystack import TooLong
from surgery.evaluation.tasks.base import Asked, Document, Task, Texts
from surgery.evaluation.tasks.needles import draw_keys

CANDIDATES = 16  # values of the list, at most, among which the right one has to be the most probable
LAYOUTS = (  # what stands before a value and a space, and after it
    ("{key}:", "\n"),
    ("{key} =", "\n"),
    ("| {key} |", " |\n"),
    ("The number of {key} is", ".\n"),
)
MOST_PAIRS = 512  # with a third updated, about 700 different numbers of three digits are needed


class ListRecall(Task):
    """N keys, each with a number of three digits, all asked again in another order."""

    name, about = "list_recall", "a list's numbers, all asked again in another order"
    listing = True
    updated: ClassVar[float] = 0.0  # share of the keys that are given a second value

    def document(
        self, texts: Texts, rng: random.Random, length: int | None, *, depth: float = 0.5, pairs: int | None = None
    ) -> Document:
        before, after = rng.choice(LAYOUTS)
        keys = draw_keys(rng, pairs)
        again = rng.sample(keys, k=round(self.updated * pairs) or 1) if self.updated else []
        pool = texts.numbers(before.format(key="it"))
        if len(pool) < len(keys) + len(again):
            raise UsageError(
                f"{self.name}: the tokenizer makes one length of only {len(pool)} numbers of three digits, "
                f"too few for {pairs} pairs"
            )
        numbers = rng.sample(pool, k=len(keys) + len(again))
        entries = [*zip(keys, numbers, strict=False), *zip(again, numbers[len(keys) :], strict=True)]
        values, last = dict(entries), {key: index for index, (key, _) in enumerate(entries)}
        order = rng.sample(keys, k=pairs)
        while order == keys and pairs > 1:
            rng.shuffle(order)

        lines = [f"{before.format(key=key)} {value}{after}" for key, value in entries]
        front = "".join(lines[:pairs]) + ("\n" if again else "") + "".join(lines[pairs:])
        tail, starts = "\n", []
        for key in order:
            tail += before.format(key=key)
            starts.append(len(tail))
            tail += f" {values[key]}{after}"
        tail = tail[: len(tail) - len(after)]

        found = self._tokens(texts, rng, front, tail, length, pairs)
        tokens = (*texts.text.begin, *found.ids.tolist())
        origin = int(found.spans[:, 1].max()) - len(tail)
        spans = [
            _answer(found, origin + start, origin + start + 1 + len(values[key]), self.name)
            for key, start in zip(order, starts, strict=True)
        ]
        shift = len(texts.text.begin)
        asked = tuple(
            Asked(start + shift, stop + shift, last[key] / max(1, len(entries) - 1), key in again)
            for key, (start, stop) in zip(order, spans, strict=True)
        )
        first = asked[0]
        candidates = self._candidates(texts, rng, before.format(key=order[0]), order[0], entries)
        if tuple(candidates[0]) != tokens[first.start : first.stop]:
            raise UsageError(f"{self.name}: the tokenizer joins a key and its value, which cannot be scored")
        return Document(
            length,
            pairs,
            list(tokens[: first.start]),
            first.stop - first.start + 1,
            (values[order[0]],),
            candidates,
            depth=first.depth,
            whole=tokens,
            asked=asked,
        )

    def _tokens(self, texts: Texts, rng: random.Random, front: str, tail: str, length: int | None, pairs: int) -> Spans:
        """The whole document, with text between list and questions where it has to be longer than they are."""
        alone = spans_of(texts.tokenizer, front + tail)
        if length is None:
            return alone
        size = len(texts.text.begin) + len(alone.ids)
        if size > length:
            raise TooLong(f"{self.name} at {length} tokens: {pairs} pairs and their questions take {size}")
        start = texts.text.start(rng, length - size, self.name)
        found = texts.text.filled(front + "\n", "\n" + tail, start, length)
        if found is None:  # no room for two more line ends, or for a character
            found = texts.text.filled(front, tail, start, length)
        if found is None:
            raise UsageError(f"{self.name}: found no document of exactly {length} tokens in this text; try another")
        return found

    @staticmethod
    def _candidates(
        texts: Texts, rng: random.Random, tail: str, key: str, entries: list[tuple[str, str]]
    ) -> list[list[int]]:
        """Tokens of the key's value, then of other values of the list; a value that it had before comes first."""
        own = [value for name, value in entries if name == key]
        others = [value for name, value in entries if name != key]
        chosen = [*reversed(own), *rng.sample(others, k=min(len(others), CANDIDATES - len(own)))]
        return [texts.text.following(tail, value) or [] for value in chosen]


class ListUpdate(ListRecall):
    """The same, with a third of the keys given again with another number before the questions."""

    name, about = "list_update", "the same, a third of the keys given a second number, which is the answer"
    updated = 1 / 3


def _answer(found: Spans, start: int, stop: int, name: str) -> tuple[int, int]:
    """The tokens of the characters [start, stop), a space and a value.

    Raises:
        UsageError: a token holds a part of them and something else.
    """
    ends = np.maximum.accumulate(found.spans[:, 1])
    first = int(np.searchsorted(ends, start, side="right"))
    last = int(np.searchsorted(ends, stop, side="left")) + 1
    if found.spans[first, 0] < start or ends[last - 1] != stop:
        raise UsageError(f"{name}: the tokenizer joins a key and its value, which cannot be scored")
    return first, last
