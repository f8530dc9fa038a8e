"""The documents of pretraining: recall documents are answerable, sources leave out what they must, shares hold."""

from __future__ import annotations

import itertools
import lzma
import random
import re

import numpy as np
import pytest

from surgery.errors import UsageError
from surgery.evaluation.words import KINDS
from surgery.pretraining import data
from surgery.pretraining.documents import listing_document, needle_document, recall_documents
from surgery.pretraining.sources import book_files, pieces, read_text, split_books, standard_library

TEXT = " ".join(f"Sentence number {index} says nothing of note." for index in range(600))
NEEDLE = re.compile(r"One of the special magic (\w+)s for ([a-z-]+) is: (\S+)\.")
ANSWER = re.compile(
    r"\nWhat is the special magic (\w+) for ([a-z-]+)\? The special magic (\w+) for ([a-z-]+) is: (\S+)"
)


def test_every_question_of_a_needle_document_is_answered_by_a_needle_before_it(fresh_seed):
    rng = random.Random(fresh_seed)
    kinds = set()
    for _ in range(100):
        document = needle_document(rng, TEXT)
        needles = {key: (match.start(), kind, value) for match in NEEDLE.finditer(document)
                   for kind, key, value in [match.groups()]}
        answers = list(ANSWER.finditer(document))
        assert answers and len(answers) == len(needles)
        for answer in answers:
            kind, key, again, key_again, value = answer.groups()
            start, stated_kind, stated = needles[key]
            assert (kind, key) == (again, key_again)
            assert (kind, value) == (stated_kind, stated)
            assert start < answer.start()
            kinds.add(f"{kind}s")
    assert kinds == set(KINDS)


def test_needles_leave_the_text_around_them_whole(fresh_seed):
    rng = random.Random(fresh_seed)
    for _ in range(50):
        body = ANSWER.sub("", needle_document(rng, TEXT)).rstrip("\n")
        body = re.sub(r"^Special magic \w+ are hidden.*\n", "", body)
        words = NEEDLE.sub(" ", body).split()
        assert " ".join(words) in TEXT


def test_a_listing_asks_only_for_what_it_holds(fresh_seed):
    rng = random.Random(fresh_seed)
    for _ in range(50):
        document = listing_document(rng)
        first, _, second = document.rpartition("\n\n")
        asked = [line for line in second.splitlines() if line.strip()]
        assert asked
        assert all(line in first.splitlines() for line in asked)


def test_recall_documents_depend_on_the_seed_alone():
    def beginning(seed):
        return list(itertools.islice(recall_documents(seed, [TEXT]), 12))

    assert beginning(3) == beginning(3)
    assert beginning(3) != beginning(4)


def test_sources_leave_out_held_out_books_tests_and_the_demo_text(tmp_path):
    with lzma.open(tmp_path / "books-00.txt.xz", "wt", encoding="utf-8") as stream:
        stream.write("one\n\x1e\ntwo\nlines\n\x1e\n")
    (tmp_path / "books-heldout.txt").write_text("secret", encoding="utf-8")
    files = book_files(tmp_path)
    assert [file.name for file in files] == ["books-00.txt.xz"]
    assert split_books(read_text(files[0])) == ["one", "two\nlines"]

    root = tmp_path / "lib"
    for name in ("a.py", "test/b.py", "json/c.py", "json/tests/d.py", "pydoc_data/topics.py"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"# {name}\n" * 40, encoding="utf-8")
    assert [text.split()[1] for text in standard_library(root)] == ["a.py", "json/c.py"]

    with pytest.raises(UsageError, match="no books"):
        book_files(root)


def test_pieces_make_up_the_text():
    cut = pieces(TEXT.replace(". ", ".\n"), 500)
    assert "".join(cut) == TEXT.replace(". ", ".\n")
    assert max(map(len, cut)) < 600


def test_the_stream_has_its_shares_and_marks_every_document():
    documents = {
        name: [np.full(size, value, dtype=np.uint16) for size in (700, 90, 300)]
        for value, name in enumerate(data.SHARES, 1)
    }
    stream = data.mix(documents, 50_000, seed=5, segment=256)
    assert len(stream) == 50_000 and stream[0] == 0
    for value, share in enumerate(data.SHARES.values(), 1):
        assert abs((stream == value).mean() - share) < 0.02
    changes = np.flatnonzero(stream[1:] != stream[:-1]) + 1
    assert all(stream[at] == 0 or stream[at - 1] == 0 for at in changes), "two documents meet without a mark"
    assert np.diff(np.flatnonzero(stream == 0)).max() == 257, "a segment is longer than it may be"
    assert (data.mix(documents, 50_000, seed=5, segment=256) == stream).all()
