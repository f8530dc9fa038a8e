"""RULER-style retrieval: values hidden in text or among other values (arXiv:2404.06654, appendix B)."""

from __future__ import annotations

import random
from functools import partial
from typing import ClassVar

from surgery.evaluation.tasks.base import CANDIDATES, Document, Task, Texts
from surgery.evaluation.words import draw_value, draw_words, introduction, listed, plural_question, question, statement

SLACK = 4  # tokens beside the values' own that an answer of several may take


class Needles(Task):
    """Needles ``One of the special magic KIND for KEY is: VALUE.`` in a haystack, then a question about some of them.

    Attributes:
        kind: of the values. filler: the haystack is a few repeated sentences instead of text.
        keys, values, queries: keys in the text, values of each, keys asked for.
    """

    kind: ClassVar[str] = "numbers"
    filler: ClassVar[bool] = False
    keys: ClassVar[int] = 1
    values: ClassVar[int] = 1
    queries: ClassVar[int] = 1

    def document(
        self, texts: Texts, rng: random.Random, length: int | None, *, depth: float = 0.5, pairs: int | None = None
    ) -> Document:
        haystack = texts.filler if self.filler else texts.text
        keys = draw_keys(rng, self.keys)
        asked = keys[: self.queries]
        expected = self.queries * self.values
        tail = question(self.kind, asked[0]) if expected == 1 else plural_question(self.kind, asked)
        draw = partial(draw_value, rng, self.kind)
        values = haystack.alike(tail, [draw()], draw, max(CANDIDATES, self.keys * self.values), self.name)
        drawn = list(values)
        sentences = [
            statement(self.kind, key, drawn[index * self.values + part])
            for index, key in enumerate(keys)
            for part in range(self.values)
        ]
        answers = tuple(drawn[:expected])
        room = len(values[drawn[0]]) + 1  # one more shows a value that goes on where it should end
        depths: list[float | None] = [depth, *[None] * (len(sentences) - 1)]
        if expected > 1:
            # what is asked for stands in the order in which it is asked for
            depths = sorted(rng.random() for _ in sentences)
            room = len(haystack.encode(f"{tail} {listed(answers)}")) - len(haystack.encode(tail)) + SLACK
        placed = haystack.placed(rng, length, room, introduction(self.kind), sentences, depths, tail, name=self.name)
        return Document(
            length,
            None,
            placed.tokens,
            room,
            answers,
            list(values.values())[:CANDIDATES],
            right=self.values,  # any of the first key's may come first
            depth=placed.reached[0] if expected == 1 else None,
        )


class Single1(Needles):
    name, about = "single_1", "one number in repeated sentences"
    filler = depths = True


class Single2(Needles):
    name, about = "single_2", "one number in text"
    depths = True


class Single3(Needles):
    name, about = "single_3", "one UUID in text"
    kind, depths = "uuids", True


class MultiKey1(Needles):
    name, about = "multikey_1", "one of four keys in text"
    keys, depths = 4, True


class MultiValue(Needles):
    name, about = "multivalue", "the four numbers of one key in text"
    values = 4


class MultiQuery(Needles):
    name, about = "multiquery", "the numbers of all four keys in text"
    keys = queries = 4


class MultiKey2(Task):
    """One needle among nothing but needles: as many as the length holds, a line each."""

    name, about = "multikey_2", "one number among needles alone"
    depths = True
    kind: ClassVar[str] = "numbers"

    def document(
        self, texts: Texts, rng: random.Random, length: int | None, *, depth: float = 0.5, pairs: int | None = None
    ) -> Document:
        haystack, draw = texts.text, partial(draw_value, rng, self.kind)
        key = self.draw_key(rng)
        tail = question(self.kind, key)
        values = haystack.alike(tail, [draw()], draw, CANDIDATES, self.name)
        value, *hard = values
        seed = rng.random()

        def lines(count: int) -> str:
            """``count`` needles, the one asked for at its depth, and the question."""
            own = random.Random(seed)
            taken, drawn = {key}, set(values)
            others = []
            while len(others) < count - 1:
                other = self.draw_key(own)
                item = hard[len(others)] if len(others) < len(hard) else draw_value(own, self.kind)
                if other not in taken and (item not in drawn or len(others) < len(hard)):
                    taken.add(other)
                    others.append(statement(self.kind, other, item))
            own.shuffle(others)  # the hard candidates stand anywhere
            at = round(depth * len(others))
            return "\n" + "\n".join([*others[:at], statement(self.kind, key, value), *others[at:]]) + tail

        room = len(values[value]) + 1
        count, prompt = haystack.fitted(rng, length, room, introduction(self.kind), lines, CANDIDATES, self.name)
        reached = round(depth * (count - 1)) / (count - 1)
        return Document(length, None, prompt, room, (value,), list(values.values()), depth=reached)

    @staticmethod
    def draw_key(rng: random.Random) -> str:
        return draw_words(rng)


class MultiKey3(MultiKey2):
    """The same with UUIDs for keys and values."""

    name, about = "multikey_3", "one UUID among needles alone, UUIDs for keys"
    kind = "uuids"

    @staticmethod
    def draw_key(rng: random.Random) -> str:
        return draw_value(rng, "uuids")


def draw_keys(rng: random.Random, count: int) -> list[str]:
    """Draw so many different keys."""
    keys: dict[str, None] = {}
    while len(keys) < count:
        keys[draw_words(rng)] = None
    return list(keys)
