"""Packed windows: what they hold, their order, their errors."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from surgery.adaptation.losses import IGNORED
from surgery.data.packing import PackedDataset, PackedTokens, collate, read_tokens, tokenise, write_tokens
from surgery.errors import UsageError


def packed(*documents, name="text"):
    starts = np.cumsum([0, *(len(d) for d in documents[:-1])])
    return PackedTokens(np.concatenate([np.asarray(d, dtype=np.uint16) for d in documents]), starts, name)


def test_windows_hold_tokens_targets_and_resets():
    source = packed([1, 2, 3], [4, 5, 6, 7], [8, 9])
    first, second = source.window(0, 4), source.window(1, 4)
    assert first["input_ids"].tolist() == [1, 2, 3, 4]
    assert first["reset"].tolist() == [True, False, False, True]
    # the token that opens another document is nobody's target
    assert first["targets"].tolist() == [2, 3, IGNORED, 5]
    assert second["input_ids"].tolist() == [5, 6, 7, 8]
    assert second["reset"].tolist() == [False, False, False, True]
    assert second["targets"].tolist() == [6, 7, IGNORED, 9]
    assert source.windows(4) == 2 and source.windows(8) == 1 and source.windows(9) == 0


def test_every_window_once_a_pass_in_a_new_order():
    source = packed(range(1, 42))
    data = PackedDataset([source], [1.0], 4, 30, seed=3)
    firsts = [data[i]["input_ids"][0].item() for i in range(30)]
    for around in range(3):
        assert sorted(firsts[10 * around : 10 * around + 10]) == list(range(1, 41, 4))
    assert firsts[:10] != firsts[10:20]
    assert data.passes(10) == [0] and data.passes(11) == [1] and data.passes(30) == [2]


def test_order_depends_on_seed_and_index_alone():
    source = packed(range(200))
    one, same, other = (PackedDataset([source], [1.0], 4, 60, seed) for seed in (5, 5, 6))
    backwards = [same[i]["input_ids"][0].item() for i in reversed(range(60))][::-1]
    assert [one[i]["input_ids"][0].item() for i in range(60)] == backwards
    assert backwards != [other[i]["input_ids"][0].item() for i in range(60)]


def test_mixture_follows_the_weights():
    low, high = packed(range(100), name="low"), packed(range(1000, 1400), name="high")
    data = PackedDataset([low, high], [1.0, 3.0], 4, 2000, seed=0)
    from_high = sum(data[i]["input_ids"][0].item() >= 1000 for i in range(2000))
    assert 1400 < from_high < 1600
    assert data.passes(2000)[0] == (2000 - from_high - 1) // 24


def test_text_shorter_than_a_context_is_refused():
    with pytest.raises(UsageError, match=r"(?s)short\.txt: 4 tokens.*context of 4.*longer text"):
        PackedDataset([packed([1, 2, 3, 4], name="short.txt")], [1.0], 4, 10, seed=0)


def test_documents_end_with_the_end_token(tokenizer):
    made = list(tokenise(["ab", "", "c"], tokenizer))
    end = tokenizer.eos_token_id
    assert [ids[-1] for ids in made] == [end] * 3
    assert tokenizer.decode(made[0][:-1]) == "ab"


def test_tokenising_stops_at_the_limit(tokenizer):
    read = []

    def documents():
        for number in range(100_000):
            read.append(number)
            yield "abcd"

    made = list(tokenise(documents(), tokenizer, limit=333))
    assert sum(map(len, made)) == 333
    assert len(read) < 200


def test_tokens_on_disk_are_whole_or_absent(tmp_path):
    def broken():
        yield [1, 2, 3]
        raise RuntimeError("the power went")

    path = tmp_path / "data" / "abc"
    with pytest.raises(RuntimeError):
        write_tokens(path, broken(), 100)
    assert read_tokens(path, "abc") is None
    write_tokens(path, [[1, 2, 3], [], [4, 70000]], 80000)
    tokens = read_tokens(path, "abc")
    assert tokens.ids.tolist() == [1, 2, 3, 4, 70000] and tokens.starts.tolist() == [0, 3]


def test_a_token_beyond_the_vocabulary_is_refused(tmp_path):
    with pytest.raises(UsageError, match="token 300, the model's vocabulary holds 300"):
        write_tokens(tmp_path / "abc", [[1, 300]], 300)


def test_collate_adds_a_mask_only_for_padding():
    item = packed(range(20)).window(0, 4)
    assert "mask" not in collate([item, item])
    padded = {**item, "mask": torch.tensor([True, True, False, False])}
    assert collate([item, padded])["mask"].tolist() == [[True] * 4, [True, True, False, False]]
