"""Documents of needles: sentences to remember, hidden in text, in a filler or among each other, then asked for.

One key or several, one value or several for a key, one question for one key or for several.
"""

from __future__ import annotations

import random

from surgery.pretraining.drawing import ANSWER, RANDOM, Document, Words, distinct, draw_values
from surgery.pretraining.sources import sentence_starts

# the needle, the question with the start of its answer, and the start of an answer that lists several values
WORDINGS = (
    ("Note that the {noun} of {key} is {value}.", "\nTell the {noun} of {key}: it is {value}",
     "\nTell every {noun} of {key}: "),
    ("Remember: {key} keeps the {noun} {value}.", "\nWhich {noun} does {key} keep? {key} keeps the {noun} {value}",
     "\nWhich {noun}s does {key} keep? "),
    ("({key} was given the {noun} {value}.)", "\nThe {noun} that {key} was given: {value}",
     "\nAll that {key} was given: "),
    ("To {key} belongs {value}.", "\nWhat belongs to {key}? {value}", "\nWhat belongs to {key}? All: "),
    ("<{key}> {value} </>", "\n<{key}> {value}", "\n<{key}> <all> "),
)  # fmt: skip
NOUNS = {"short": "number", "long": "number", "word": "word", "pair": "phrase", "uuid": "mark", "code": "sign"}
STYLES = {"short": 5, "long": 4, "word": 3, "code": 2, "pair": 2, "uuid": 1}
FILLERS = (
    "Nothing of note happened there. ",
    "The road went on, and the rain with it. ",
    "They talked of this and that. ",
    "So one hour followed another. ",
)
SHORTEST = 120  # characters of a haystack, the longest is given


def needle_document(rng: random.Random, words: Words, haystack: str, progress: float, room: int) -> Document:
    """Needles in a haystack and questions about them; arguments as of ``list_document``."""
    document = Document()
    style = rng.choices(list(STYLES), list(STYLES.values()))[0]
    if progress < 0.1 and style in ("uuid", "long"):
        style = "word"
    noun = NOUNS[style]
    # characters: half of what there was room for, grown to it in a third of the training
    longest = int(2.5 * room * min(1.0, 0.15 + 2.6 * progress))
    size = round(SHORTEST * (max(longest, 2 * SHORTEST) / SHORTEST) ** rng.random())
    key_style = "uuid" if style == "uuid" and rng.random() < 0.3 else rng.choice(("word", "pair", "rare", "name"))
    count = rng.choice((1, 2, 4) if size < 700 else (1, 2, 4, 8) if style == "uuid" else (1, 2, 4, 8, 12))
    several = rng.choice((2, 3, 4)) if rng.random() < 0.2 and style != "uuid" else 1
    drawn = distinct(rng, words, key_style, max(1, count // several))
    pairs = {key: draw_values(rng, words, (style,), several, drawn) for key in drawn}
    needle, question, collected = rng.choice(WORDINGS)
    needles = [(key, value) for key, values in pairs.items() for value in values]
    rng.shuffle(needles)
    held: dict[str, list[str]] = {key: [] for key in pairs}  # values in the order in which they are read
    for place in _places(rng, document, haystack, size, len(needles)):
        key, value = needles[place]
        held[key].append(value)
        document.fill(needle.replace("{noun}", noun), RANDOM, key=key, value=value)
    keys = list(pairs)
    rng.shuffle(keys)
    if several > 1:
        for key in keys:
            document.fill(collected.replace("{noun}", noun), RANDOM, key=key)
            _collect(document, held[key])
    elif len(keys) > 2 and rng.random() < 0.25:  # several asked for at once
        asked = keys[: rng.randint(2, min(4, len(keys)))]
        document.add(f"\nThe {noun}s of ")
        _collect(document, asked, RANDOM)
        document.add(" in this order: ")
        _collect(document, [held[key][0] for key in asked])
    else:
        for key in keys:
            document.fill(question.replace("{noun}", noun), ANSWER, key=key, value=held[key][0])
    document.add("\n")
    return document


def _places(rng: random.Random, document: Document, haystack: str, size: int, count: int):
    """Add a haystack of ``size`` characters piece by piece; yield the number of each needle where it belongs."""
    kind = rng.choices(("text", "filler", "none"), (6, 1, 1))[0]
    if kind == "none":
        for index in range(count):
            yield index
            document.add("\n")
        return
    if kind == "filler":
        excerpt = rng.choice(FILLERS) * (1 + size // 30)
        excerpt = excerpt[:size]
    else:
        start = rng.randrange(max(1, len(haystack) - size))
        excerpt = haystack[start : start + size]
        starts = sentence_starts(excerpt)
        excerpt = excerpt[starts[min(1, len(starts) - 1)] :] if size > 1000 else excerpt
    starts = [*sentence_starts(excerpt), len(excerpt)]
    at = 0
    for index, place in enumerate(sorted(rng.choice(starts) for _ in range(count))):
        document.add(excerpt[at:place])
        if place and not excerpt[:place].endswith(("\n", " ")):
            document.add(" ")
        yield index
        document.add(" ")
        at = place
    document.add(excerpt[at:])


def _collect(document: Document, values: list[str], kind: int = ANSWER) -> None:
    for index, value in enumerate(values):
        document.add(", " if index else "")
        document.add(value, kind)
