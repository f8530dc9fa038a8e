"""The generated recall documents that the bundled bases were pretrained on, beside books and Python's standard library.

Everything is deterministic for a seed. The documents come in two shapes: needles hidden in text that is asked about
afterwards (in the wording of ``surgery.evaluation.words``), and listings of keys and values of which some keys come
again. Each asks several times over short and long distances, so that the signal is dense.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

from surgery.evaluation.words import KINDS, draw_value, draw_words, introduction, question, statement
from surgery.pretraining.sources import sentence_starts

KIND_WEIGHTS = (0.5, 0.35, 0.15)  # of KINDS
SHORTEST, LONGEST = 160, 8000  # characters of a needle document's text, drawn log-uniformly


def needle_document(rng: random.Random, text: str) -> str:
    """Needles in an excerpt of ``text``, then questions about them in random order."""
    kind = rng.choices(KINDS, KIND_WEIGHTS)[0]
    size = int(SHORTEST * (LONGEST / SHORTEST) ** rng.random())
    start = rng.randrange(max(1, len(text) - size))
    excerpt = text[start : start + size]
    starts = sentence_starts(excerpt)
    excerpt = excerpt[starts[min(1, len(starts) - 1)] :] if size > 1000 else excerpt
    starts = [*sentence_starts(excerpt), len(excerpt)]
    count = rng.choice((1, 1, 2, 3, 4, 6)) if size < 1500 else rng.choice((1, 2, 4, 6, 8, 12))
    pairs = {draw_words(rng): draw_value(rng, kind) for _ in range(count)}
    places = sorted((rng.choice(starts), key) for key in pairs)
    parts, at = [introduction(kind) if rng.random() < 0.8 else ""], 0
    for place, key in places:
        parts.append(excerpt[at:place])
        at = place
        before = parts[-1][-1:]
        needle = statement(kind, key, pairs[key])
        if before == " ":
            parts.append(needle + " ")
        else:
            parts.append(("" if before in ("", "\n") else "\n") + needle + "\n")
    parts.append(excerpt[at:])
    asked = list(pairs)
    rng.shuffle(asked)
    parts += [f"{question(kind, key)} {pairs[key]}" for key in asked]
    return "".join(parts)


LISTINGS = (  # opening, one pair, closing
    ("", "{key}: {value}\n", "\n"),
    ("[values]\n", "{key} = {value}\n", "\n"),
    ("values = {{\n", '    "{key}": "{value}",\n', "}}\n\n"),
    ("| key | value |\n|---|---|\n", "| {key} | {value} |\n", "\n"),
    ("", "The {key} is {value}.\n", "\n"),
)


def listing_document(rng: random.Random, _: str = "") -> str:
    """Keys and values, then some of the keys again with their values, in the same form."""
    opening, line, closing = rng.choice(LISTINGS)
    kind = rng.choices(KINDS, KIND_WEIGHTS)[0]
    short = rng.random() < 0.5 and kind == "numbers"
    count = int(2 * 20 ** rng.random())
    pairs = {}
    for _ in range(count):
        value = draw_value(rng, kind)
        pairs[draw_words(rng)] = value[: rng.randint(2, 4)] if short else value
    again = rng.sample(list(pairs), k=max(1, round(len(pairs) * rng.uniform(0.4, 1))))
    first = "".join(line.format(key=key, value=value) for key, value in pairs.items())
    second = "".join(line.format(key=key, value=pairs[key]) for key in again)
    return opening.format() + first + closing.format() + second


def recall_documents(seed: int, haystacks: Sequence[str]) -> Iterator[str]:
    """Endless recall documents: two thirds needles in one of ``haystacks``, one third listings."""
    rng = random.Random(f"recall/{seed}")
    weights = [len(text) for text in haystacks]
    while True:
        make = rng.choices((needle_document, listing_document), (2, 1))[0]
        yield make(rng, rng.choices(haystacks, weights)[0])
