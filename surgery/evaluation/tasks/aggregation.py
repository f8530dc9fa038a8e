"""RULER-style tasks whose answer is spread over the text (arXiv:2404.06654, appendix B): variables, common words."""

from __future__ import annotations

import random
import string
from functools import partial

from surgery.evaluation.haystack import TooLong
from surgery.evaluation.tasks.base import CANDIDATES, Document, Task, Texts
from surgery.evaluation.words import draw_words, listed

SLACK = 4  # tokens beside the words' own that an answer may take


class VariableTracing(Task):
    """Two chains ``VAR A = 12345.``, ``VAR B = VAR A.``, ... in repeated sentences; which variables have the first's
    number? The other chain's variables are the hard candidates."""

    name, about = "variable_tracing", "the five variables of one chain of assignments, beside another chain"
    variables = 5

    def document(
        self, texts: Texts, rng: random.Random, length: int | None, *, depth: float = 0.5, pairs: int | None = None
    ) -> Document:
        haystack = texts.filler
        first, second = rng.sample(range(10_000, 100_000), 2)
        draw = partial(draw_letters, rng, string.ascii_uppercase, 5)
        tail = f"\nWhich variables have the value {first}? The variables that have the value {first} are:"
        names = haystack.alike(tail, [draw()], draw, 2 * self.variables, self.name)
        drawn = list(names)
        chains = [(first, drawn[: self.variables]), (second, drawn[self.variables :])]
        sentences, depths = [], []
        for number, chain in chains:
            sources = [str(number), *(f"VAR {name}" for name in chain)]
            sentences += [f"VAR {name} = {source}." for name, source in zip(chain, sources, strict=False)]
            depths += sorted(rng.random() for _ in chain)
        room = answer_room(haystack, tail, chains[0][1])
        head = "Variables are assigned in this text. Keep track of them.\n"
        placed = haystack.placed(rng, length, room, head, sentences, depths, tail, name=self.name)
        candidates = list(names.values())
        return Document(length, None, placed.tokens, room, tuple(chains[0][1]), candidates, right=self.variables)


class CommonWords(Task):
    """A numbered list in which ten words come ten times as often as the others."""

    name, about = "common_words", "the ten words that are listed ten times as often as the others"
    common = 10
    repeats = ((30, 3), (10, 1))  # of a common word and of another: RULER's, then what fits a short prompt

    def document(
        self, texts: Texts, rng: random.Random, length: int | None, *, depth: float = 0.5, pairs: int | None = None
    ) -> Document:
        haystack, draw = texts.text, partial(draw_words, rng)
        tail = f"\nWhich {self.common} words are the most common in the list? The {self.common} most common words are:"
        words = haystack.alike(tail, [draw()], draw, 2 * self.common, self.name)
        drawn = list(words)
        room = answer_room(haystack, tail, drawn[: self.common])
        seed = rng.random()

        def numbered(often: int, seldom: int, count: int) -> str:
            """The list with ``count`` other words, and the question."""
            own = random.Random(seed)
            others = dict.fromkeys(drawn[self.common :])
            while len(others) < count:
                if (word := draw_words(own)) not in words:
                    others[word] = None
            entries = drawn[: self.common] * often + list(others) * seldom
            own.shuffle(entries)
            return "\n" + " ".join(f"{n}. {word}" for n, word in enumerate(entries, 1)) + tail

        head = "Some words of this numbered list come often. Remember them.\n"
        for often, seldom in self.repeats:
            try:
                _, prompt = haystack.fitted(
                    rng, length, room, head, partial(numbered, often, seldom), self.common, self.name
                )
            except TooLong:
                if (often, seldom) == self.repeats[-1]:
                    raise
                continue
            break
        candidates = list(words.values())
        return Document(length, None, prompt, room, tuple(drawn[: self.common]), candidates, right=self.common)


class FrequentWords(Task):
    """Made-up words whose numbers fall with the square of their rank; the three most frequent ones are asked for."""

    name, about = "frequent_words", "the three most frequent of made-up words"
    frequent, least = 3, 60

    def document(
        self, texts: Texts, rng: random.Random, length: int | None, *, depth: float = 0.5, pairs: int | None = None
    ) -> Document:
        haystack, draw = texts.text, partial(draw_letters, rng, string.ascii_lowercase, 6)
        tail = "\nWhich three words come most often in this text? The three words that come most often are:"
        words = haystack.alike(tail, [draw()], draw, CANDIDATES, self.name)
        drawn = list(words)
        room = answer_room(haystack, tail, drawn[: self.frequent])
        seed = rng.random()

        def coded(count: int) -> str:
            """``count`` words, and the question."""
            own = random.Random(seed)
            entries: list[str] = []
            names, rank = iter(drawn), 1
            while len(entries) < count:
                word = next(names, None) or draw_letters(own, string.ascii_lowercase, 6)
                entries += [word] * max(1, round(0.6 * count / rank**2))  # 0.6 is about 1 over the sum of 1 / rank^2
                rank += 1
            del entries[count:]
            own.shuffle(entries)
            return "\n" + " ".join(entries) + tail

        head = "Some made-up words of this text come often. Remember them.\n"
        _, prompt = haystack.fitted(rng, length, room, head, coded, self.least, self.name)
        return Document(
            length, None, prompt, room, tuple(drawn[: self.frequent]), list(words.values()), right=self.frequent
        )


def draw_letters(rng: random.Random, alphabet: str, count: int) -> str:
    """A made-up word."""
    return "".join(rng.choices(alphabet, k=count))


def answer_room(haystack, tail: str, words: list[str]) -> int:
    """Tokens that an answer with all ``words`` takes, and a few more."""
    return len(haystack.encode(f"{tail} {listed(words)}")) - len(haystack.encode(tail)) + SLACK
