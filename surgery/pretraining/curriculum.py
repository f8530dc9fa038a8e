"""Which recall document is trained on when, and windows of exactly so many tokens made of them.

Recall emerges from short lists first: induction over a few single-token pairs comes within the first steps of a
training, and pairs, tokens of a key or value and distances grow from there (``drawing.draw_styles``,
``lists.most_pairs``).
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np

from surgery.pretraining.drawing import Document, Words
from surgery.pretraining.lists import list_document
from surgery.pretraining.needles import needle_document
from surgery.pretraining.tokenizer import END_OF_TEXT
from surgery.pretraining.tracing import frequent_document, tracing_document

KIND_SHIFT = 12  # a stored token is its id and, above these bits, its kind
MAKERS = (list_document, needle_document, tracing_document, frequent_document)
FIRST, LAST = (8, 2, 1, 0.5), (4, 4, 1, 0.5)  # the makers' weights at the start and from a third of the training on
LEAST_ROOM = 40  # tokens; less is filled with text
CHARACTERS = 16  # of a haystack that are more than one token, however it is cut
ATTEMPTS = 5  # to draw a document that fits


def draw_document(rng: random.Random, words: Words, haystack: str, progress: float, room: int) -> Document:
    """One recall document for about ``room`` tokens, after a share ``progress`` of the training."""
    late = min(1.0, 3 * progress)
    weights = [(1 - late) * first + late * last for first, last in zip(FIRST, LAST, strict=True)]
    return rng.choices(MAKERS, weights)[0](rng, words, haystack, progress, room)


def encode_document(tokenizer, document: Document) -> np.ndarray:
    """Stored tokens of a document: ids, with the kind of each token's last character above ``KIND_SHIFT``."""
    encoding = tokenizer.encode(document.text)
    kinds = np.repeat(
        np.array([kind for _, kind in document.pieces], dtype=np.uint16), [len(piece) for piece, _ in document.pieces]
    )
    ids = np.asarray(encoding.ids, dtype=np.uint16)
    ends = np.asarray(encoding.offsets, dtype=np.int64).reshape(-1, 2)[:, 1]
    return ids | (kinds[ends - 1] << KIND_SHIFT)


def recall_window(
    rng: random.Random, tokenizer, words: Words, haystacks: Sequence[str], progress: float, size: int
) -> np.ndarray:
    """[size] stored tokens: whole recall documents, each after END_OF_TEXT, and text in what is left."""
    begin = np.array([tokenizer.token_to_id(END_OF_TEXT)], dtype=np.uint16)
    parts: list[np.ndarray] = []
    room = size
    while room > LEAST_ROOM:
        wanted = room - 1
        for _ in range(ATTEMPTS):
            tokens = encode_document(tokenizer, draw_document(rng, words, rng.choice(haystacks), progress, wanted))
            if len(tokens) < room:
                break
            wanted = wanted // 2
        else:
            break
        parts += [begin, tokens]
        room -= len(tokens) + 1
    if room:
        haystack = rng.choice(haystacks)
        most = CHARACTERS * room
        start = rng.randrange(max(1, len(haystack) - most))
        text = tokenizer.encode(haystack[start : start + most]).ids
        parts += [begin, np.asarray(text[: room - 1], dtype=np.uint16)]
    window = np.concatenate(parts)
    assert len(window) == size, f"a haystack holds fewer than {size} tokens"
    return window


def tokens_and_kinds(stored):
    """Ids and kinds of stored tokens, an array or a tensor of integers of at least 16 bits."""
    return stored & ((1 << KIND_SHIFT) - 1), stored >> KIND_SHIFT
