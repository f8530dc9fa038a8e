"""What a task of the evaluation is: documents of an exact length, what is asked in them, and what counts as right."""

from __future__ import annotations

import random
import re
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

from surgery.evaluation.haystack import Haystack

CANDIDATES = 10  # values among which the right one has to be the most probable
FILLER = (
    "The morning was calm and the streets were quiet. A cart went by and nobody looked up. "
    "The clock struck, and the day went on as before. "
)


@dataclass(frozen=True)
class Asked:
    """One answer inside a whole document.

    Attributes:
        start, stop: its tokens.
        depth: where what it answers stands, 0 for the first line that could be asked for, 1 for the last.
        updated: the key was given a second value, which is the answer.
    """

    start: int
    stop: int
    depth: float
    updated: bool = False


@dataclass(frozen=True)
class Document:
    """One sample of a task.

    Attributes:
        length: tokens asked for, None for a list without text around it. pairs: of a list, else None.
        prompt: tokens up to the answer. room: tokens that the answer may take.
        answers: the expected values, in any order.
        candidates: token lists that may follow the prompt; the first ``right`` of them are right.
        depth: where in the text what is asked for stands, 0 to 1; None where it stands in several places.
        whole: a list with all its answers; empty for other tasks. asked: those answers.
    """

    length: int | None
    pairs: int | None
    prompt: list[int]
    room: int
    answers: tuple[str, ...]
    candidates: list[list[int]]
    right: int = 1
    depth: float | None = None
    whole: tuple[int, ...] = ()
    asked: tuple[Asked, ...] = ()

    @property
    def tokens(self) -> int:
        """How long it is, the answers included."""
        return len(self.whole) or len(self.prompt) + self.room


class Texts:
    """What documents are made of: a text, a repeated filler, and numbers of one token length.

    Args:
        text: the haystack.
        longest: tokens of the longest document.
    """

    def __init__(self, text: str, tokenizer: Any, longest: int) -> None:
        self.tokenizer, self.longest = tokenizer, longest
        self.text = Haystack(text, tokenizer)
        self._numbers: dict[str, list[str]] = {}

    @cached_property
    def filler(self) -> Haystack:
        """A few sentences over and over."""
        size = len(self.text.encode(FILLER * 8)) // 8
        return Haystack(FILLER * (self.longest // max(1, size) + 3), self.tokenizer)

    def numbers(self, tail: str) -> list[str]:
        """Return those numbers of three digits that take, after ``tail`` and a space, as many tokens as most do."""
        if tail not in self._numbers:
            sizes = {str(n): len(self.text.following(tail, str(n)) or ()) for n in range(100, 1000)}
            common = Counter(sizes.values()).most_common(1)[0][0]
            self._numbers[tail] = [number for number, size in sizes.items() if size == common]
        return self._numbers[tail]


class Task(ABC):
    """A task. A new one is a class and a line in :data:`surgery.evaluation.tasks.TASKS`.

    Attributes:
        name: for the command line and in reports. about: in words.
        listing: documents are lists of a number of pairs, with every pair asked for.
        depths: there is one place in the text where the answer stands, and it can be chosen.
    """

    name: ClassVar[str]
    about: ClassVar[str]
    listing: ClassVar[bool] = False
    depths: ClassVar[bool] = False

    @abstractmethod
    def document(
        self, texts: Texts, rng: random.Random, length: int | None, *, depth: float = 0.5, pairs: int | None = None
    ) -> Document:
        """Make one document.

        Args:
            length: tokens, prompt and answer together; nothing is ever cut off. None, for lists: no text around.
            depth: of what is asked for, where ``depths``. pairs: how many, where ``listing``.

        Raises:
            TooLong: it does not fit the length.
            UsageError: the text is too short, or the tokenizer joins questions and answers.
        """


def share_found(written: str, answers: Sequence[str]) -> float:
    """Return which share of the expected values stands in what a model wrote, each as a word of its own, whatever the
    case and order."""
    found = sum(bool(re.search(rf"(?<![\w-]){re.escape(a)}(?![\w-])", written, re.IGNORECASE)) for a in answers)
    return found / len(answers)
