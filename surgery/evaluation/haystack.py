"""A text as tokens, into which needles are put, so that a prompt comes out exactly as many tokens long as asked."""

from __future__ import annotations

import bisect
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from surgery.data.tokens import Spans, begin_tokens, spans_of
from surgery.errors import UsageError
from surgery.evaluation.boundaries import boundaries

TOLERANCE = 0.1  # of the text: how far from its depth a needle may stand for the sake of a sentence's end
LEAST_TEXT = 8  # tokens of text beside the needles
ATTEMPTS = 50  # to find a prompt of exactly so many tokens
SLACK = 10  # tokens at most that an attempt leaves to what comes behind the needles, for pieces that join badly
WHITE = ("\n", " ", "\n\n", " \n", "\n \n", "\n\n\n", "\n \n \n", "\t", "\n\t\n", "\t \n \t")


class TooLong(UsageError):
    """What is asked for does not fit into the length that is asked for."""


@dataclass(frozen=True)
class Placed:
    """A prompt with its needles.

    Attributes:
        tokens: with those that begin a text.
        positions: the token at which each needle begins. reached: the share of the text's tokens that stand before it.
    """

    tokens: list[int]
    positions: list[int]
    reached: list[float]


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
        """Return the tokens of ``text`` alone, without those that begin a text."""
        return self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]

    def following(self, tail: str, value: str) -> list[int] | None:
        """Return the tokens of ``value`` as they follow ``tail`` and a space, None where a token holds parts of both
        sides."""
        asked, whole = self.encode(tail), self.encode(f"{tail} {value}")
        return whole[len(asked) :] if whole[: len(asked)] == asked else None

    def alike(
        self, tail: str, values: Sequence[str], draw: Callable[[], str], count: int, name: str = "needle recall"
    ) -> dict[str, list[int]]:
        """Return ``count`` different values of one token length, each with its tokens as they follow ``tail``: the
        given ``values``' first as far as they have the length of the first of them, then those that ``draw`` gives.

        Raises:
            UsageError: the tokenizer joins question and answer, or too few values of that length were drawn.
        """
        first = self.following(tail, values[0])
        if not first:
            raise UsageError(f"{name}: the tokenizer joins the question and its answer, which cannot be scored")
        found = {values[0]: first}
        given = iter(values[1:])
        for _ in range(1000 * count):
            if len(found) == count:
                return found
            value = next(given, None) or draw()
            tokens = self.following(tail, value)
            if tokens is not None and len(tokens) == len(first):
                found[value] = tokens
        raise UsageError(f"{name}: found {len(found)} of {count} values of {len(first)} tokens")

    def placed(
        self,
        rng: random.Random,
        length: int,
        answer: int,
        head: str,
        needles: Sequence[str],
        depths: Sequence[float | None],
        tail: str,
        tolerance: float = TOLERANCE,
        name: str = "needle recall",
    ) -> Placed:
        """Return a prompt of exactly ``length - answer`` tokens: ``head``, text with the needles in it, ``tail``. Its
        tokens are those that the tokenizer makes of the whole prompt.

        A needle stands at the end of a sentence or a line within ``tolerance`` of its depth, else at white space, else
        between two characters. Needles of one place stand in the order given.

        Args:
            answer: tokens that stay free for the answer.
            needles: sentences. depths: of each, 0 to 1 of the text; None draws it.
            name: of the task in errors.

        Raises:
            TooLong: ``length`` has no room for text beside the needles.
            UsageError: the text is too short.
        """
        # Every needle is set off the way its place asks for; the longest form is reserved and the text fills up.
        forms = [
            {lead: lead + sentence + ("" if lead == " " else "\n") for lead in ("", " ", "\n")} for sentence in needles
        ]
        reserved = sum(max(len(self.encode(text)) for text in form.values()) for form in forms)
        whole = length - answer
        around = len(self.encode(head)), len(self.encode(tail))
        room = whole - len(self.begin) - sum(around) - reserved
        if room < LEAST_TEXT:
            raise TooLong(
                f"{name} at {length} tokens: the needles and the question alone take {length - room}; "
                f"ask for lengths of at least {length - room + LEAST_TEXT}"
            )
        for attempt in range(ATTEMPTS):
            start = self.start(rng, length, name)
            goals = [rng.random() if depth is None else depth for depth in depths]
            short = max(1, room - attempt % (SLACK + 1))
            places = [self._nearest(start, short, goal, tolerance) for goal in goals]
            body, at, set_off, starts = "", start, 0, [0] * len(needles)
            for place, index in sorted((place, index) for index, place in enumerate(places)):
                body += self.text[self.cuts[at] : self.cuts[place]]
                at = place
                starts[index] = len(head) + len(body)
                after_space = not body or body[-1].isspace()
                form = forms[index]["" if after_space else " " if place in self._spaced else "\n"]
                body += form
                set_off += len(self.encode(form))
            filled = self.filled(head + body, tail, at, whole)
            if filled is not None:
                ends = np.maximum.accumulate(filled.spans[:, 1])
                before = [int(np.searchsorted(ends, start, side="right")) for start in starts]
                text = len(filled.ids) - around[0] - (around[1] + set_off)
                return Placed(
                    [*self.begin, *filled.ids.tolist()],
                    [len(self.begin) + count for count in before],
                    [min(1.0, max(0, count - around[0]) / text) for count in before],
                )
        raise UsageError(f"{name}: found no prompt of exactly {length} tokens in this text; try another")

    def start(self, rng: random.Random, length: int, name: str = "needle recall") -> int:
        """Draw a token of the text, a sentence's first where there are some, from which ``length`` tokens follow.

        Raises:
            UsageError: the text is too short.
        """
        if len(self.tokens) < length:
            raise UsageError(
                f"{name} at {length} tokens: the text holds only {len(self.tokens)}; give a longer text "
                "or smaller lengths"
            )
        last = bisect.bisect_right(self.places.best, len(self.tokens) - length)
        return rng.choice([0, *self.places.best[:last]])

    def filled(self, front: str, tail: str, at: int, goal: int) -> Spans | None:
        """Return the tokens of a prompt, exactly ``goal`` with those that begin a text, between whose ``front`` and
        ``tail`` the text from token ``at`` on fills up what is missing; None where none is found.

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

    def fitted(
        self, rng: random.Random, length: int, answer: int, head: str, tail: Callable[[int], str], least: int, name: str
    ) -> tuple[int, list[int]]:
        """Return the largest count of parts that fits, and a prompt of exactly ``length - answer`` tokens: ``head``,
        text that fills up what is less than a part, and ``tail`` of that count.

        Args:
            tail: makes the prompt's end of a number of parts; longer with more of them, the same for the same number.
            least: parts at least. name: of the task in errors.

        Raises:
            TooLong: the least does not fit.
            UsageError: the text is too short.
        """
        goal = length - answer

        def size(count: int) -> int:
            return len(self.begin) + len(self.encode(head + tail(count)))

        smallest = size(least)
        if smallest > goal:
            raise TooLong(f"{name} at {length} tokens: {smallest + answer} are needed at least")
        part = max(1.0, (size(2 * least + 8) - smallest) / (least + 8))
        count = least + int((goal - smallest) / part)
        for _ in range(ATTEMPTS):
            spare = goal - size(count)
            if 0 <= spare < 2 * part:
                break
            count = max(least, count + math.floor(spare / part))
        while size(count) > goal and count > least:
            count -= 1
        for fewer in range(min(ATTEMPTS, count - least + 1)):
            found = self.filled(head, tail(count - fewer), self.start(rng, min(length, len(self.tokens)), name), goal)
            if found is not None:
                return count - fewer, [*self.begin, *found.ids.tolist()]
        raise UsageError(f"{name}: found no prompt of exactly {length} tokens in this text; try another")

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
