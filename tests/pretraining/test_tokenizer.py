"""The tokenizer: every text round-trips, digits are single, transformers loads what is saved."""

from __future__ import annotations

import random

import pytest
from transformers import AutoTokenizer

from surgery.hosts import resolve
from surgery.pretraining.tokenizer import END_OF_TEXT, save_tokenizer, train_tokenizer


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    directory = tmp_path_factory.mktemp("tokenizer")
    texts = ["The quick brown fox, the lazy dog.\n\tif x == 1234:\n        return None\n"] * 20
    save_tokenizer(train_tokenizer(texts, 320), directory)
    return AutoTokenizer.from_pretrained(directory)


def test_any_text_round_trips(small, fresh_seed):
    rng = random.Random(fresh_seed)
    for _ in range(20):
        text = "".join(chr(rng.choice((rng.randrange(1, 0x250), rng.randrange(0x3000, 0xD000), 0x1F600)))
                       for _ in range(60))
        ids = small(text)["input_ids"]
        assert small.decode(ids, clean_up_tokenization_spaces=False) == text
    assert small.decode(small(" don't  stop \n\n")["input_ids"]) == " don't  stop \n\n"


def test_the_only_special_token_is_the_end_of_text(small):
    assert small.convert_tokens_to_ids(END_OF_TEXT) == small.bos_token_id == small.eos_token_id == 0
    assert small("")["input_ids"] == [] and len(small) <= 320


@pytest.mark.parametrize("base", ["tiny-mamba2", "tiny-gdn"])
def test_the_bundled_tokenizer(base, fresh_seed):
    tokenizer = AutoTokenizer.from_pretrained(resolve(f"bundled:{base}"))
    assert len(tokenizer) == 4096
    rng = random.Random(fresh_seed)
    numbers = [f" {rng.randrange(10**6, 10**7)}" for _ in range(50)]
    assert {len(tokenizer(number)["input_ids"]) for number in numbers} == {8}
    assert [tokenizer.decode(tokenizer(number)["input_ids"]) for number in numbers] == numbers
