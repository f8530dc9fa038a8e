"""Find places where another text can be put between two tokens, in any script: after a sentence or a line, at white
space, between characters.

Sentences end where Unicode's sentence breaking (UAX #29) has a terminator: ``.`` and ``。``, ``।``, ``۔``, ``።`` and so
on, with closing quotes and brackets behind it. A terminator of ASCII ends one only before white space, so that numbers
and file names stay whole.
"""

from __future__ import annotations

import unicodedata
from dataclasses import dataclass

import numpy as np
import regex

ENDS = regex.compile(r"([\p{SB=STerm}\p{SB=ATerm}]+)\p{SB=Close}*(\s*)")
JOINERS = ("\u200c", "\u200d")  # written between letters that belong together


@dataclass(frozen=True)
class Boundaries:
    """Lists the indices of tokens before which a cut is clean, each list within the next.

    Attributes:
        sentences: after a sentence's end or a line's. spaces: at white space. characters: not inside a character, and
            not before a mark that combines with the one before.
    """

    sentences: list[int]
    spaces: list[int]
    characters: list[int]

    @property
    def levels(self) -> tuple[list[int], ...]:
        """Return the lists, the best places first."""
        return self.sentences, self.spaces, self.characters

    @property
    def best(self) -> list[int]:
        """Return the best list that holds a place."""
        return next((level for level in self.levels if level), [])


def boundaries(text: str, spans: np.ndarray) -> Boundaries:
    """Return the places between a text's tokens.

    Args:
        spans: [N, 2], the characters that each token stands for. White space at a token's edge may be left out, and a
            token that is a part of a character stands for all of it.
    """
    if len(spans) < 2:
        return Boundaries([], [], [])
    before = np.maximum.accumulate(spans[:-1, 1])  # [N - 1]: where what precedes a cut ends
    after = spans[1:, 0]  # and what follows it starts; white space between the two is some token's own
    clean = (after >= before) & _separable(text)[np.clip(after, 0, len(text))]
    sentence, space = _sentence_ends(text), _spaces(text)

    def indices(marked: np.ndarray) -> list[int]:
        """Return the clean cuts with a marked place of the text in them."""
        counts = np.concatenate([[0], np.cumsum(marked)])
        inside = counts[np.clip(after, 0, len(text)) + 1] > counts[np.clip(before, 0, len(text))]
        return (np.flatnonzero(clean & inside) + 1).tolist()

    return Boundaries(indices(sentence), indices(sentence | space), (np.flatnonzero(clean) + 1).tolist())


def _sentence_ends(text: str) -> np.ndarray:
    """[len(text) + 1] bool: mark places after a sentence, in the white space that follows it, and after a line."""
    marked = np.zeros(len(text) + 1, dtype=bool)
    for match in ENDS.finditer(text):
        if not match.group(1).isascii() or match.group(2):
            marked[match.start(2) : match.end(2) + 1] = True
    marked[[match.end() for match in regex.finditer("\n", text)]] = True
    return marked


def _spaces(text: str) -> np.ndarray:
    """[len(text) + 1] bool: mark places beside white space."""
    marked = np.zeros(len(text) + 1, dtype=bool)
    for match in regex.finditer(r"\s+", text):
        marked[match.start() : match.end() + 1] = True
    return marked


def _separable(text: str) -> np.ndarray:
    """[len(text) + 1] bool: mark places that do not separate a character from its combining marks or its joiner."""
    free = np.ones(len(text) + 1, dtype=bool)
    kinds = {character: unicodedata.category(character)[0] == "M" or character in JOINERS for character in set(text)}
    if any(kinds.values()):
        free[:-1] = ~np.fromiter((kinds[character] for character in text), dtype=bool, count=len(text))
        joined = np.fromiter((character in JOINERS for character in text), dtype=bool, count=len(text))
        free[1:] &= ~joined
    return free
