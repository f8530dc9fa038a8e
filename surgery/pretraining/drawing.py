"""What recall documents are written with: pieces of text of three kinds, and words, keys and values of their own.

No word here is one of the evaluation's (``surgery.evaluation.words``), so that what is measured was not trained on.
"""

from __future__ import annotations

import random
import re
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from surgery.evaluation.words import ADJECTIVES, NOUNS

# The kinds of tokens: text is predicted as any text is; a random token has no cause before it, so that its loss teaches
# nothing but the form; an answer is known to whoever remembers.
TEXT, RANDOM, ANSWER = 0, 1, 2
COMMONEST = 80  # words of a text that are too common to be a key
KEPT = 4000  # words


class Document:
    """A text in pieces, each of one kind."""

    def __init__(self) -> None:
        self.pieces: list[tuple[str, int]] = []

    def add(self, piece: str, kind: int = TEXT) -> None:
        if piece:
            self.pieces.append((piece, kind))

    def fill(self, template: str, kind: int, **fields: str) -> None:
        """Add ``template`` with its ``{fields}`` filled in: keys are random, values are of ``kind``."""
        for text, name in _parts(template):
            self.add(text)
            if name:
                self.add(fields[name], kind if name.startswith("value") else RANDOM)

    @property
    def text(self) -> str:
        return "".join(piece for piece, _ in self.pieces)


_PARTS: dict[str, list[tuple[str, str]]] = {}


def _parts(template: str) -> list[tuple[str, str]]:
    """Pairs of plain text and the name of the field behind it ('' at the end)."""
    if template not in _PARTS:
        found = re.split(r"\{(\w+)\}", template)
        _PARTS[template] = list(zip(found[::2], [*found[1::2], ""], strict=True))
    return _PARTS[template]


@dataclass(frozen=True)
class Words:
    """Words to draw from.

    Attributes:
        single: those that are one token after a space.
        many: all.
    """

    single: tuple[str, ...]
    many: tuple[str, ...]


def words_of(texts: Iterable[str], tokens_of: Callable[[str], int]) -> Words:
    """The words of ``texts`` by frequency, without the commonest and without the evaluation's.

    Args:
        tokens_of: how many tokens a string is.
    """
    counts = Counter(word for text in texts for word in re.findall(r"\b[a-z]{3,10}\b", text))
    measured = {*ADJECTIVES, *NOUNS}
    many = [word for word, _ in counts.most_common(COMMONEST + KEPT)[COMMONEST:] if word not in measured]
    return Words(tuple(word for word in many if tokens_of(f" {word}") == 1), tuple(many))


def _letters(rng: random.Random, count: int) -> str:
    return "".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=count))


def _digits(rng: random.Random, count: int) -> str:
    return str(rng.randrange(10 ** (count - 1), 10**count))


def draw_key(rng: random.Random, words: Words, style: str) -> str:
    """A key in one of KEY_STYLES."""
    if style == "word":
        return rng.choice(words.single)
    if style == "rare":
        return rng.choice(words.many)
    if style == "pair":
        return f"{rng.choice(words.many)}-{rng.choice(words.single)}"
    if style == "joined":
        return f"{rng.choice(words.single)}_{rng.choice(words.single)}"
    if style == "name":
        return rng.choice(words.many).capitalize()
    if style == "numbered":
        return f"{rng.choice(words.single)} {rng.randrange(2, 100)}"
    if style == "number":
        return _digits(rng, rng.choice((2, 3)))
    if style == "uuid":
        return draw_value(rng, words, "uuid")
    assert style == "code", style
    return _letters(rng, rng.choice((1, 2))) + str(rng.randrange(100))


def draw_value(rng: random.Random, words: Words, style: str) -> str:
    """A value in one of VALUE_STYLES."""
    if style == "digit":
        return _digits(rng, 1) if rng.random() < 0.9 else "0"
    if style == "word":
        return rng.choice(words.single)
    if style == "short":
        return _digits(rng, rng.choice((2, 3)))
    if style == "pair":
        return f"{rng.choice(words.single)}-{rng.choice(words.single)}"
    if style == "long":
        return _digits(rng, rng.choice((4, 5, 7)))
    if style == "uuid":
        return str(uuid.UUID(int=rng.getrandbits(128), version=4))
    assert style == "code", style
    return f"{_letters(rng, 1)}{_digits(rng, 2)}"


# with their weights at the end of training; at its start, keys and values are single tokens
KEY_STYLES = {"word": 4, "pair": 3, "rare": 2, "joined": 1, "name": 1, "numbered": 1, "code": 1, "number": 1}
VALUE_STYLES = {"short": 5, "word": 3, "digit": 2, "code": 1, "long": 1, "pair": 1}
SIMPLE_KEYS = {"word": 1}
SIMPLE_VALUES = {"word": 1, "digit": 1}


def draw_styles(rng: random.Random, progress: float) -> tuple[str, str]:
    """A style of keys and one of values: simple ones early in training, any later.

    Args:
        progress: the share of the training before this document, from 0 to 1.
    """
    simple = rng.random() < max(0.2, 1 - 3 * progress)
    styles = (SIMPLE_KEYS, SIMPLE_VALUES) if simple else (KEY_STYLES, VALUE_STYLES)
    key, value = (rng.choices(list(table), list(table.values()))[0] for table in styles)
    return key, value


def distinct(rng: random.Random, words: Words, style: str, count: int) -> list[str]:
    """``count`` different keys, or as many as a style of few keys gives easily."""
    keys: dict[str, None] = {}
    for _ in range(4 * count):
        if len(keys) == count:
            break
        keys[draw_key(rng, words, style)] = None
    return list(keys)


def draw_values(rng: random.Random, words: Words, styles: Sequence[str], count: int, taken: Iterable[str]) -> list[str]:
    """``count`` different values, each of one of ``styles``, none of which is ``taken`` as a key."""
    taken, values = set(taken), []
    while len(values) < count:
        value = draw_value(rng, words, rng.choice(styles))
        if value not in taken:
            values.append(value)
            taken.add(value)
    return values
