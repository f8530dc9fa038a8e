"""The rows that recall bases are trained on: text and recall documents, from easy to hard, in one array on the disk.

A row is read window by window, its memory carried on. It holds segments of several windows of one text, and windows of
whole recall documents, no document of which is cut by a window's end. Every document, and every segment of a text,
begins with END_OF_TEXT, where memories start anew.
"""

from __future__ import annotations

import itertools
import json
import os
import random
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from multiprocessing import get_context
from pathlib import Path

import numpy as np
from numpy.lib.format import open_memmap

from surgery.errors import UsageError
from surgery.pretraining.curriculum import KIND_SHIFT, recall_window
from surgery.pretraining.drawing import Words, words_of
from surgery.pretraining.sources import book_files, pieces, read_text, split_books, standard_library
from surgery.pretraining.tokenizer import encode, load_tokenizer

WINDOWS = 8  # of a segment of text
PARTS = 3  # of a file of books: there are more processes than files
CODE = 0.03  # of the text: the standard library
HAYSTACK, HAYSTACKS = 40_000, 24  # tokens of a text that recall documents take excerpts from; how many a row has
WORD_TEXTS = 40  # haystacks that the words are taken from


@dataclass(frozen=True)
class Plan:
    """What fixes the rows.

    ``recall`` is the share of recall windows at the start and from the middle of the training on: recall has to emerge
    before a memory's size can be what limits it, and text is learned best at the end, where learning rates fall.
    """

    tokens: int = 500_000_000
    context: int = 2048
    batch: int = 32
    recall: tuple[float, float] = (0.45, 0.2)
    code: float = 0.03
    seed: int = 0

    @property
    def steps(self) -> int:
        return self.tokens // (self.batch * self.context)

    def chance(self, progress: float) -> float:
        """How probably a recall window comes next. A segment of text is several windows, so this is above the share."""
        first, last = self.recall
        share = first + (last - first) * min(1.0, 2 * progress)
        return WINDOWS * share / (1 + (WINDOWS - 1) * share)


def _encode_texts(tokenizer_path: Path, path: Path | None, part: int = 0) -> list[np.ndarray]:
    """Tokens of each book of one of a file's PARTS, or of each source of one of the standard library's."""
    tokenizer = load_tokenizer(tokenizer_path)
    if path is None:
        return encode(tokenizer, standard_library()[part::PARTS])
    return [np.concatenate(encode(tokenizer, pieces(book))) for book in split_books(read_text(path))[part::PARTS]]


def _joined(texts: list[np.ndarray]) -> np.ndarray:
    begin = np.zeros(1, dtype=np.uint16)  # END_OF_TEXT
    return np.concatenate([part for text in texts for part in (begin, text)])


class Segments:
    """The segments of a text that one row reads: no two rows the same in one pass over the text."""

    def __init__(self, tokens: np.ndarray, size: int, plan: Plan, row: int) -> None:
        self.tokens, self.size, self.plan, self.row = tokens, size, plan, row

    def __iter__(self) -> Iterator[np.ndarray]:
        count = (len(self.tokens) - self.size) // self.size
        for passed in itertools.count():
            rng = np.random.default_rng((self.plan.seed, passed))
            offset = int(rng.integers(self.size))  # segments are cut elsewhere in each pass
            for index in rng.permutation(count)[self.row :: self.plan.batch]:
                segment = np.array(self.tokens[offset + index * self.size :][: self.size])
                segment[0] = 0  # END_OF_TEXT
                yield segment


def _write_row(tokenizer_path: Path, folder: Path, output: Path, words: Words, plan: Plan, row: int) -> int:
    """Fill one row of ``output`` and return its recall windows."""
    tokenizer = load_tokenizer(tokenizer_path)
    rng = random.Random(f"rows/{plan.seed}/{row}")
    names = ("books", "code") if plan.code else ("books",)
    sources = {name: np.load(folder / f"{name}.npy", mmap_mode="r") for name in names}
    haystacks = [_haystack(tokenizer, sources["books"], rng) for _ in range(HAYSTACKS)]
    segments = {
        name: iter(Segments(tokens, WINDOWS * plan.context, plan, row))
        for name, tokens in sources.items()
        if len(tokens) >= 2 * WINDOWS * plan.context * plan.batch or name == "books"
    }
    rows = np.lib.format.open_memmap(output, mode="r+")
    windows = recalled = 0
    buffer = np.empty(plan.steps * plan.context + 1, dtype=np.uint16)
    buffer[-1] = 0
    while windows < plan.steps:
        at = windows * plan.context
        progress = windows / plan.steps
        if rng.random() < plan.chance(progress):
            window = recall_window(rng, tokenizer, words, haystacks, progress, plan.context)
            buffer[at : at + plan.context] = window
            windows, recalled = windows + 1, recalled + 1
        else:
            name = "code" if "code" in segments and rng.random() < plan.code else "books"
            count = min(WINDOWS, plan.steps - windows)
            buffer[at : at + count * plan.context] = next(segments[name])[: count * plan.context]
            windows += count
    rows[row] = buffer
    return recalled


def _haystack(tokenizer, tokens: np.ndarray, rng: random.Random) -> str:
    start = rng.randrange(max(1, len(tokens) - HAYSTACK))
    ids = tokens[start : start + HAYSTACK]
    return tokenizer.decode(ids[ids != 0].tolist()).strip("\ufffd")


def write_rows(
    corpus: Path, tokenizer_path: Path, output: Path, plan: Plan, workers: int | None = None, say=lambda line: None
) -> None:
    """Write the rows, uint16 [batch, steps * context + 1] of stored tokens (``curriculum.KIND_SHIFT``), to ``output``.

    Depends on the corpus, the tokenizer, Python's standard library and the plan alone, not on the workers.

    Raises:
        UsageError: fewer tokens than one step's; a corpus without books, or with too few; a larger vocabulary than the
            stored tokens have bits for.
    """
    if plan.steps < 1:
        raise UsageError(f"--tokens {plan.tokens}: one step has {plan.batch * plan.context}; ask for more")
    tokenizer = load_tokenizer(tokenizer_path)
    if tokenizer.get_vocab_size() > 1 << KIND_SHIFT:
        raise UsageError(f"{tokenizer_path}: {tokenizer.get_vocab_size()} entries; use a tokenizer of at most 4096")
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
    files = book_files(corpus)
    folder = output.with_suffix(".texts")
    folder.mkdir(parents=True, exist_ok=True)
    with ProcessPoolExecutor(workers or os.cpu_count() or 1, mp_context=get_context("spawn")) as pool:
        jobs = {
            name: [pool.submit(_encode_texts, tokenizer_path, path, part) for path in paths for part in range(PARTS)]
            for name, paths in (("books", files), ("code", [None]))[: 2 if plan.code else 1]
        }
        joined = {name: _joined([text for job in found for text in job.result()]) for name, found in jobs.items()}
        least = 2 * WINDOWS * plan.context * plan.batch
        if len(joined["books"]) < least:
            raise UsageError(f"{corpus}: {len(joined['books'])} tokens of books; {least} are needed for such rows")
        for name, tokens in joined.items():
            np.save(folder / f"{name}.npy", tokens)
        say(f"tokens of text: {', '.join(f'{len(tokens):,} of {name}' for name, tokens in joined.items())}")
        rng = random.Random(f"words/{plan.seed}")
        texts = [_haystack(tokenizer, joined["books"], rng) for _ in range(WORD_TEXTS)]
        words = words_of(texts, lambda text: len(tokenizer.encode(text).ids))
        say(f"{len(words.many)} words, {len(words.single)} of one token")
        partial = output.with_suffix(".partial")
        open_memmap(partial, mode="w+", dtype=np.uint16, shape=(plan.batch, plan.steps * plan.context + 1)).flush()
        rows = [
            pool.submit(_write_row, tokenizer_path, folder, partial, words, plan, row) for row in range(plan.batch)
        ]
        recalled = sum(job.result() for job in rows)
    partial.replace(output)
    output.with_suffix(".json").write_text(json.dumps(asdict(plan)) + "\n", encoding="utf-8")
    for name in joined:
        (folder / f"{name}.npy").unlink()
    folder.rmdir()
    say(f"{output}: {plan.batch} rows of {plan.steps} windows, {recalled / plan.batch / plan.steps:.1%} of them recall")


def read_rows(path: Path) -> tuple[np.ndarray, Plan]:
    """The rows in a file, mapped into memory, and their plan.

    Raises:
        UsageError: the plan beside them is missing, or another's.
    """
    rows, beside = np.load(path, mmap_mode="r"), path.with_suffix(".json")
    try:
        plan = Plan(**json.loads(beside.read_text(encoding="utf-8")))
        plan = replace(plan, recall=tuple(plan.recall))
        fits = rows.shape == (plan.batch, plan.steps * plan.context + 1)
    except (OSError, ValueError, TypeError) as error:
        raise UsageError(f"{beside}: no plan of rows ({error}); write them again") from None
    if not fits:
        raise UsageError(f"{beside}: not the plan of {path.name}, which is {rows.shape}; write both again")
    return rows, plan
