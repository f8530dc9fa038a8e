"""Exact recall of lists: keys with values in the context, then the keys again, each value to be continued.

Read in one forward pass over each document, which holds the right answers: a value counts if every one of its tokens
is the most probable one. Two forms: ``trained`` has the layouts of the training documents, with words of the text that
is given; ``new`` has keys and layouts that no training document of a recall base has.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from surgery.errors import UsageError
from surgery.evaluation.intervals import mean_interval
from surgery.evaluation.words import draw_words
from surgery.pretraining.curriculum import encode_document, tokens_and_kinds
from surgery.pretraining.documents import LISTINGS
from surgery.pretraining.drawing import ANSWER, RANDOM, Document, Words, distinct, draw_value, words_of
from surgery.pretraining.lists import LAYOUTS

FORMS = ("trained", "new")
ASKED = 32  # keys of a document, at most
BATCH_TOKENS = 2**16  # of one forward pass
LONGEST = 2048  # tokens of a document; what is longer is left out


class Cell(NamedTuple):
    """What is measured together: lists of so many pairs, in documents of ``length`` tokens, text between list and
    questions, or as short as they are (None)."""

    pairs: int
    length: int | None = None


CELLS = (*(Cell(pairs) for pairs in (4, 8, 16, 32, 64, 128)), Cell(8, 512), Cell(8, 2048), Cell(32, 2048))


def list_document(rng: random.Random, words: Words, pairs: int, form: str, between: str = "") -> Document:
    """A list of ``pairs`` and questions for at most ASKED of its keys, ``between`` in the middle."""
    if form == "trained":
        opening, line, closing = rng.choice(LAYOUTS)
        keys = distinct(rng, words, rng.choice(("word", "pair")), pairs)
    else:
        opening, line, closing = (part.replace("{{", "{").replace("}}", "}") for part in rng.choice(LISTINGS))
        drawn: dict[str, None] = {}
        while len(drawn) < pairs:
            drawn[draw_words(rng)] = None
        keys = list(drawn)
    values = {key: draw_value(rng, words, "short") for key in keys}
    document = Document()
    document.add(opening)
    for key in keys:
        document.fill(line, RANDOM, key=key, value=values[key])
    document.add(closing + between)
    for key in rng.sample(keys, k=min(ASKED, len(keys))):
        document.fill(line, ANSWER, key=key, value=values[key])
    return document


def _documents(
    tokenizer: Any, cell: Cell, form: str, words: Words, text: str, count: int, seed: int
) -> list[np.ndarray]:
    """Stored tokens of ``count`` documents, or fewer where they do not fit LONGEST tokens."""
    rng = random.Random(f"lists/{form}/{cell}/{seed}")
    found = []
    for _ in range(4 * count):
        if len(found) == count:
            break
        seeded = rng.getrandbits(64)
        stored = encode_document(tokenizer, list_document(random.Random(seeded), words, cell.pairs, form))
        missing = (cell.length or 0) - 1 - len(stored)
        if missing > 8:
            start = rng.randrange(max(1, len(text) - 8 * missing))
            ids = tokenizer.encode(text[start : start + 8 * missing]).ids[: missing - 1]
            between = tokenizer.decode(ids).strip("\ufffd") + "\n"
            document = list_document(random.Random(seeded), words, cell.pairs, form, between)
            stored = encode_document(tokenizer, document)
        if len(stored) < LONGEST + 8:
            found.append(np.concatenate((np.zeros(1, dtype=np.uint16), stored)))  # END_OF_TEXT
    return found


@torch.no_grad()
def _exact(model: nn.Module, documents: Sequence[np.ndarray]) -> tuple[list[float], list[int]]:
    """For every question whether its value is exact (1 or 0), and its document."""
    device = next(model.parameters()).device
    values, groups = [], []
    longest = max(map(len, documents))
    size = max(1, BATCH_TOKENS // longest)
    for at in range(0, len(documents), size):
        part = documents[at : at + size]
        ids, kinds = (np.zeros((len(part), longest), dtype=np.int64) for _ in range(2))
        for row, stored in enumerate(part):
            ids[row, : len(stored)], kinds[row, : len(stored)] = tokens_and_kinds(stored)
        tokens = torch.from_numpy(ids).to(device)
        # padding follows what it could disturb
        hidden = model.backbone_module(tokens, use_cache=False).last_hidden_state
        rows, places = np.nonzero(kinds == ANSWER)
        asked = torch.from_numpy(rows).to(device), torch.from_numpy(places).to(device)
        best = torch.cat([model.lm_head(part).argmax(-1) for part in hidden[asked[0], asked[1] - 1].split(4096)])
        right = (best == tokens[asked]).cpu().numpy()
        # tokens of one value follow each other
        begins = np.ones(len(places), dtype=bool)
        begins[1:] = (rows[1:] != rows[:-1]) | (places[1:] != places[:-1] + 1)
        first = np.flatnonzero(begins)
        values += np.minimum.reduceat(right, first).astype(float).tolist()
        groups += (at + rows[first]).tolist()
    return values, groups


def list_recall(
    model: nn.Module,
    tokenizer: Any,
    text: str,
    *,
    cells: Sequence[Cell] = CELLS,
    forms: Sequence[str] = FORMS,
    documents: int = 200,
    seed: int = 0,
) -> list[dict[str, Any]]:
    """Exact recall by cell and form.

    Args:
        model: in evaluation mode. tokenizer: a ``tokenizers.Tokenizer``.
        text: for what stands between list and questions, and for words.
        documents: of each cell.

    Returns:
        for each cell and form ``pairs``, ``length``, ``form``, ``tokens`` (mean of a document), ``documents``,
        ``questions``, ``exact`` (the share of questions) and ``interval`` (95%, by documents).

    Raises:
        UsageError: a form that there is not.
    """
    for form in forms:
        if form not in FORMS:
            raise UsageError(f"form {form!r}: choose one of {', '.join(FORMS)}")
    words = words_of([text[:2_000_000]], lambda piece: len(tokenizer.encode(piece).ids))
    found = []
    for form in forms:
        for cell in cells:
            drawn = _documents(tokenizer, cell, form, words, text, documents, seed)
            if not drawn:
                continue
            values, groups = _exact(model, drawn)
            exact = mean_interval(torch.tensor(values), torch.tensor(groups))
            found.append(
                {
                    "form": form, **cell._asdict(), "tokens": sum(map(len, drawn)) / len(drawn),
                    "documents": len(drawn), "questions": len(values), "exact": exact.mean,
                    "interval": [exact.low, exact.high],
                }
            )  # fmt: skip
    return found


def table(found: Sequence[dict[str, Any]]) -> str:
    """The figures as lines of text, one a form."""
    lines = []
    for form in dict.fromkeys(item["form"] for item in found):
        cells = [
            f"{item['pairs']} in {round(item['tokens'])}: {item['exact']:.2f}" for item in found if item["form"] == form
        ]
        lines.append(f"{form}: pairs in tokens: {', '.join(cells)}")
    return "\n".join(lines)
