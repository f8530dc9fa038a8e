"""Small things that the adaptation tests share."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="session")
def tokenizer():
    """Byte-level, one token a byte, and an end-of-text token."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: number for number, letter in enumerate(["<|end|>", *alphabet])}
    inner = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens(["<|end|>"])
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<|end|>")
