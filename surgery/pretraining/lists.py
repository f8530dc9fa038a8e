"""Documents of lists: keys with values in one of several layouts, some written again, then asked for.

The text form of associative recall: how many pairs a memory holds is what limits a model here.
"""

from __future__ import annotations

import random

from surgery.pretraining.drawing import ANSWER, RANDOM, Document, Words, distinct, draw_styles, draw_value

# opening, one pair, closing
LAYOUTS = (
    ("", "{key} {value}\n", "\n"),
    ("", "{key}={value}; ", "\n"),
    ("", "{key} -> {value}\n", "--\n"),
    ("Ledger\n", "- {key}: {value}\n", "\n"),
    ("", "({key}, {value}) ", "\n\n"),
    ("{", '"{key}": {value}, ', "}\n"),
    ("name | entry\n", "{key} | {value}\n", "\n"),
    ("", "The {key} has {value}. ", "\n"),
    ("", "set {key} to {value}\n", "done\n"),
    ("", "{key}\t{value}\n", "\n"),
    ("", "{key} [{value}], ", "\n"),
    ("It was written down: ", "{key} keeps {value}, ", "and that was all.\n"),
)
# how a key is asked for; None repeats the line of the list
QUESTIONS = (
    None, None, None, "{key}? {value}\n", "get {key} => {value}\n", "Who asks for {key} hears {value}. ",
    "ask: {key}\ntold: {value}\n", "{key} .. {value}, ",
)  # fmt: skip
REWRITES = ("Changed since:\n", "now\n", "", "* * *\n", "Later it was otherwise. ")
PAIR_TOKENS = (8, 13)  # of a short pair with its question, and of most: no more are drawn than there is room for


def most_pairs(progress: float) -> int:
    """How many pairs a list has at most: 8 at first, 256 from 40% of the training on."""
    return round(8 * 32 ** min(1.0, progress / 0.4))


def list_document(rng: random.Random, words: Words, haystack: str, progress: float, room: int) -> Document:
    """A list and questions about it.

    Args:
        haystack: what is put between list and questions now and then.
        progress: see :func:`surgery.pretraining.drawing.draw_styles`. room: tokens that there are, about.
    """
    document = Document()
    opening, line, closing = rng.choice(LAYOUTS)
    question = rng.choice(QUESTIONS) or line
    key_style, value_style = draw_styles(rng, progress)
    most = max(2, min(most_pairs(progress), room // rng.choice(PAIR_TOKENS)))
    count = round(2 * (most / 2) ** rng.random())
    values = {key: draw_value(rng, words, value_style) for key in distinct(rng, words, key_style, count)}
    document.add(opening)

    def write(key: str) -> None:
        document.fill(line, RANDOM, key=key, value=values[key])

    def ask(key: str) -> None:
        document.fill(question, ANSWER, key=key, value=values[key])

    if rng.random() < 0.25:
        _asked_between(rng, list(values), write, ask)
        return document
    for key in values:
        write(key)
    if rng.random() < 0.25:
        document.add(rng.choice(REWRITES))
        for key in rng.sample(list(values), k=max(1, len(values) // rng.choice((2, 3, 4)))):
            values[key] = draw_value(rng, words, value_style)
            write(key)
    document.add(closing)
    if rng.random() < 0.15 * min(1.0, 2 * progress):
        start = rng.randrange(max(1, len(haystack) - 800))
        document.add(haystack[start : start + rng.randrange(20, 800)].strip() + "\n")
    rounds = rng.randint(1, 3) if len(values) <= 8 else rng.randint(1, 2) if len(values) <= 32 else 1
    for _ in range(rounds):
        for key in rng.sample(list(values), k=len(values)):
            ask(key)
    return document


def _asked_between(rng: random.Random, keys: list[str], write, ask) -> None:
    """Write the keys in turn, and after some of them ask for one written before, recent ones more often; then
    for half of them."""
    for index, key in enumerate(keys):
        write(key)
        while rng.random() < 0.5:
            back = min(index, int(rng.expovariate(1 / max(1.0, len(keys) / 4))))
            ask(keys[index - back])
    for key in rng.sample(keys, k=max(1, len(keys) // 2)):
        ask(key)
