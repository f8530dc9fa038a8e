"""From documents to one stream of tokens: tokenise in parallel, cut, mix by share, shuffle.

Every document, and every piece of a long one, begins with END_OF_TEXT. A training row reads one contiguous part of
the stream, so that its memory can be carried from window to window.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import numpy as np

from surgery.pretraining.documents import recall_documents
from surgery.pretraining.sources import book_files, pieces, read_text, split_books, standard_library
from surgery.pretraining.tokenizer import encode, load_tokenizer

SAMPLE_EVERY = 6  # the tokenizer reads one book piece in six
SEGMENT = 16384  # tokens of a book that stay together
HAYSTACKS = 24  # pieces of books that recall documents of one worker draw from
SHARES = {"books": 0.82, "code": 0.05, "recall": 0.13}


def tokenizer_sample(corpus: Path, seed: int) -> Iterator[str]:
    """What the tokenizer is trained on: a sixth of the books, a quarter of the standard library, recall documents."""
    count = itertools.count()
    haystacks = []
    for path in book_files(corpus):
        for piece in pieces(read_text(path), 50_000):
            if next(count) % SAMPLE_EVERY == 0:
                haystacks.append(piece)
                yield piece
    yield from standard_library()[::4]
    size = 0
    for text in recall_documents(seed, haystacks):
        yield text
        size += len(text)
        if size > 2_000_000:
            return


def _encode_books(tokenizer_path: Path, path: Path) -> list[np.ndarray]:
    tokenizer = load_tokenizer(tokenizer_path)
    books = split_books(read_text(path))
    return [np.concatenate(encode(tokenizer, pieces(book))) for book in books]


def _encode_recall(tokenizer_path: Path, path: Path, seed: int, tokens: int) -> list[np.ndarray]:
    """``tokens`` tokens of recall documents, with haystacks from one file of books and the standard library."""
    tokenizer = load_tokenizer(tokenizer_path)
    books = pieces("".join(split_books(read_text(path))))
    haystacks = books[seed % 7 :: max(1, len(books) // HAYSTACKS)] + standard_library()[seed % 9 :: 9]
    stream = recall_documents(seed, haystacks)
    documents: list[np.ndarray] = []
    size = 0
    while size < tokens:
        for document in encode(tokenizer, itertools.islice(stream, 64)):
            documents.append(document)
            size += len(document)
    return documents


def tokenise(corpus: Path, tokenizer_path: Path, recall_tokens: int, seed: int, workers: int | None = None) -> dict:
    """All documents as uint16 arrays: {"books": [...], "code": [...], "recall": [...]}.

    Args:
        recall_tokens: how many tokens of recall documents to generate.
    """
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
    files = book_files(corpus)
    workers = workers or os.cpu_count() or 1
    jobs = max(len(files), min(workers, 1 + recall_tokens // 500_000))
    share = recall_tokens // jobs
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        books = [pool.submit(_encode_books, tokenizer_path, path) for path in files]
        code = pool.submit(_encode_code, tokenizer_path)
        recall = [
            pool.submit(_encode_recall, tokenizer_path, files[job % len(files)], 1000 * seed + job, share)
            for job in range(jobs)
        ]
        return {
            "books": [book for future in books for book in future.result()],
            "code": code.result(),
            "recall": [document for future in recall for document in future.result()],
        }


def _encode_code(tokenizer_path: Path) -> list[np.ndarray]:
    return encode(load_tokenizer(tokenizer_path), standard_library())


def mix(documents: dict[str, list[np.ndarray]], tokens: int, seed: int, segment: int = SEGMENT) -> np.ndarray:
    """A shuffled stream of ``tokens`` tokens in which each source has its share; sources repeat as often as needed."""
    rng = np.random.default_rng(seed)
    begin = np.zeros(1, dtype=np.uint16)  # END_OF_TEXT
    chosen: list[np.ndarray] = []
    for name, share in SHARES.items():
        segments = [part[at : at + segment] for part in documents[name] for at in range(0, len(part), segment)]
        wanted, size = share * tokens, 0
        while size < wanted:
            for index in rng.permutation(len(segments)):
                chosen.append(segments[index])
                size += len(segments[index]) + 1
                if size >= wanted:
                    break
    order = rng.permutation(len(chosen))
    stream = np.concatenate([array for index in order for array in (begin, chosen[index])])
    return stream[:tokens]
