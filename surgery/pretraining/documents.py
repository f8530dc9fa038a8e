"""The documents that the small bases are pretrained on: books, Python's standard library, generated recall documents.

Everything is deterministic for a seed. Recall documents come in two shapes: needles hidden in text that is asked about
afterwards (in the wording of ``surgery.evaluation.words``), and listings of keys and values of which some keys come
again. Each asks several times over short and long distances, so that the signal is dense.
"""

from __future__ import annotations

import lzma
import random
import re
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path

from surgery.errors import UsageError
from surgery.evaluation.words import KINDS, draw_value, draw_words, introduction, question, statement

BOOK_SEPARATOR = "\n\x1e\n"
# directories of the standard library that are left out: pydoc_data is the demo's text, the others are tests
LEFT_OUT = {"pydoc_data", "test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
KIND_WEIGHTS = (0.5, 0.35, 0.15)  # of KINDS
SHORTEST, LONGEST = 160, 8000  # characters of a needle document's text, drawn log-uniformly


def read_text(path: Path) -> str:
    """A text file's content; ``.xz`` is unpacked."""
    if path.suffix == ".xz":
        with lzma.open(path, "rt", encoding="utf-8") as stream:
            return stream.read()
    return path.read_text(encoding="utf-8")


def split_books(text: str) -> list[str]:
    """The books of one file, which a line holding only U+001E separates."""
    return [book for part in text.split(BOOK_SEPARATOR) if (book := part.strip("\x1e\n"))]


def book_files(corpus: Path) -> list[Path]:
    """The corpus's training files, ``books-<number>.txt[.xz]``, sorted by name; never its held-out books.

    Raises:
        UsageError: there are none.
    """
    files = sorted(path for path in corpus.glob("books-*") if re.fullmatch(r"books-\d+\.txt(\.xz)?", path.name))
    if not files:
        raise UsageError(f"{corpus}: no books-<number>.txt.xz here; pass the directory that holds them")
    return files


def standard_library(root: Path | None = None) -> list[str]:
    """The source files of the running Python's standard library, without tests and ``pydoc_data``, sorted by path."""
    root = root or Path(sysconfig.get_paths()["stdlib"])
    texts = []
    for path in sorted(root.rglob("*.py")):
        if LEFT_OUT.isdisjoint(path.relative_to(root).parts[:-1]):
            text = path.read_text(encoding="utf-8", errors="ignore")
            if len(text) >= 200:
                texts.append(text)
    return texts


def sentence_starts(text: str) -> list[int]:
    """Where a sentence or a line begins."""
    return [0, *(match.end() for match in re.finditer(r"[.!?][\"')]*\s+(?=\S)|\n(?=\S)", text))]


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
