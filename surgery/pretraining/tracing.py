"""Documents to follow and to count: names that take over each other's values, and words that come most often."""

from __future__ import annotations

import random

from surgery.pretraining.drawing import ANSWER, RANDOM, Document, Words, distinct, draw_values
from surgery.pretraining.sources import sentence_starts

# a name takes a value, a name takes another's, the question for a name's value, for all names of a value
FORMS = (
    ("let {key} be {value}\n", "let {key} be {other}\n", "value of {key}: {value}\n", "all that are "),
    ("{key} := {value};\n", "{key} := {other};\n", "print({key}) {value}\n", "equal to "),
    ("Put {value} into {key}. ", "Copy {other} into {key}. ", "\nIn {key} there is {value}.", "\nAlso found in: "),
    ("{key} holds {value}.\n", "{key} holds what {other} holds.\n", "so {key} holds {value}\n", "same as "),
)


def tracing_document(rng: random.Random, words: Words, haystack: str, progress: float, room: int) -> Document:
    """Chains of names: the first of a chain takes a value, each next one that of the name before it."""
    document = Document()
    takes, copies, question, together = rng.choice(FORMS)
    chains = rng.randint(1, 2 if progress < 0.2 else 4)
    length = rng.randint(2, 3 if progress < 0.2 else 5)
    style = rng.choice(("code", "word", "name"))
    names = distinct(rng, words, style, chains * length)
    # each chain in order, the chains mixed
    order = [chain for chain in range(chains) for _ in range(length)]
    rng.shuffle(order)
    held: dict[str, str] = {}
    members: list[list[str]] = [[] for _ in range(chains)]
    values = draw_values(rng, words, ("short", "long", "word"), chains, names)
    between = rng.random() < 0.5
    for chain, name in zip(order, names, strict=False):
        if between:
            document.add(_sentence(rng, haystack, min(400, room // len(order))))
        if members[chain]:
            # what is copied was said before: a chain's newest name, which nothing but chance chooses among chains
            document.fill(copies, RANDOM, key=name, other=members[chain][-1])
        else:
            document.fill(takes, RANDOM, key=name, value=values[chain])
        members[chain].append(name)
        held[name] = values[chain]
    for name in rng.sample(list(held), k=len(held)):
        document.fill(question, ANSWER, key=name, value=held[name])
    if rng.random() < 0.5:
        chain = rng.choice([found for found in members if found])
        document.add(together)
        document.add(held[chain[0]], RANDOM)
        document.add(": ")
        for index, name in enumerate(chain):
            document.add(", " if index else "")
            document.add(name, ANSWER)
        document.add("\n")
    return document


HEARD = (
    ("Words that were said: ", " ", "\nHeard most often: "),
    ("", ", ", "\nby count: "),
    ("1\n", "\n", "\nmost of all "),
)


def frequent_document(rng: random.Random, words: Words, haystack: str, progress: float, room: int) -> Document:
    """Words in random order of which some come more often than others: which those are, most often first."""
    document = Document()
    opening, separator, question = rng.choice(HEARD)
    asked = rng.randint(1, 3)
    chosen = distinct(rng, words, "word", asked + rng.randint(2, 12))
    size = rng.randint(24, max(25, min(room // 3, 400 if progress > 0.2 else 80)))
    others = chosen[asked:]
    least = max(1, size // (3 * len(chosen)))  # times that each other word comes
    counts = [least + sum(rng.randint(1, 1 + least) for _ in range(asked - place)) for place in range(asked)]
    counts.sort(reverse=True)
    counts = [count + asked - place for place, count in enumerate(counts)]  # no two the same
    said = [word for word, times in zip(chosen, counts, strict=False) for _ in range(times)]
    said += [word for word in others for _ in range(rng.randint(1, least))]
    rng.shuffle(said)
    document.add(opening)
    for word in said:
        document.add(word, RANDOM)
        document.add(separator)
    document.add(question)
    for index, word in enumerate(chosen[:asked]):
        document.add(" " if index else "")
        document.add(word, ANSWER)
    document.add("\n")
    return document


def _sentence(rng: random.Random, haystack: str, most: int) -> str:
    """A sentence of the haystack, at most so many characters of it."""
    start = rng.randrange(max(1, len(haystack) - 2000))
    excerpt = haystack[start : start + 1000]
    starts = sentence_starts(excerpt)
    first = starts[min(1, len(starts) - 1)]
    end = starts[2] if len(starts) > 2 else len(excerpt)
    return excerpt[first : min(end, first + max(20, most))].strip() + "\n"
