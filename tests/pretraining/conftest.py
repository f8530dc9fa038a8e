"""Small bases and a small corpus."""

from __future__ import annotations

import lzma
import random

import pytest

from surgery.pretraining import bases
from surgery.pretraining.drawing import words_of
from surgery.pretraining.tokenizer import load_tokenizer, save_tokenizer, train_tokenizer

SMALL = {
    "recall-mamba2": {"hidden_size": 16, "num_hidden_layers": 2, "num_heads": 4, "head_dim": 8, "state_size": 8},
    "recall-gdn": {"hidden_size": 16, "num_hidden_layers": 2, "num_heads": 2, "num_v_heads": 2, "head_dim": 8,
                   "intermediate_size": 24},
}  # fmt: skip
SYLLABLES = [first + second for first in "bdfgklmnprstvz" for second in "aeiou"]


def sentences(count: int, seed: int = 0) -> str:
    """Text of made-up words, some of which are much more common than others."""
    rng = random.Random(seed)
    known = ["".join(rng.choices(SYLLABLES, k=rng.randint(2, 3))) for _ in range(600)]
    weights = [1 / (rank + 3) for rank in range(len(known))]
    made = (" ".join(rng.choices(known, weights, k=rng.randint(4, 12))) + ". " for _ in range(count))
    return "".join(sentence.capitalize() for sentence in made)


@pytest.fixture(scope="session")
def haystack():
    return sentences(1500)


@pytest.fixture(scope="session")
def tokenizer_path(tmp_path_factory, haystack):
    path = tmp_path_factory.mktemp("tokenizer")
    texts = [haystack, "0 1 2 3 4 5 6 7 8 9 a-b_c: [x], (y) -> z; <k>\n"]
    save_tokenizer(train_tokenizer(texts, 900), path)
    return path


@pytest.fixture(scope="session")
def tokenizer(tokenizer_path):
    return load_tokenizer(tokenizer_path)


@pytest.fixture(scope="session")
def words(haystack, tokenizer):
    return words_of([haystack], lambda text: len(tokenizer.encode(text).ids))


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    path = tmp_path_factory.mktemp("corpus")
    with lzma.open(path / "books-00.txt.xz", "wt", encoding="utf-8") as stream:
        stream.write("\n\x1e\n".join(sentences(1500, seed) for seed in (1, 2, 3, 4)))
    return path


@pytest.fixture
def small_bases(monkeypatch):
    """The recall bases at a size for tests, with the tokenizer's vocabulary."""
    for name, config in SMALL.items():
        monkeypatch.setitem(bases.RECALL, name, {**bases.RECALL[name], **config, "vocab_size": 1024})
        monkeypatch.setitem(bases.HORIZONS, name, (4, 40))
