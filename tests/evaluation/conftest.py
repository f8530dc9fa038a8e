"""A byte-level tokenizer and tiny random models, made in memory."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="session")
def make_tokenizer():
    """A byte-level BPE tokenizer of transformers with 256 bytes and the merges of ``text``, up to ``size`` entries."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    def make(size: int = 300, text: str = "the theory of the thing in the other inn " * 20):
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)  # as published tokenizers have it
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet, show_progress=False)
        tokenizer.train_from_iterator([text], trainer)
        return PreTrainedTokenizerFast(tokenizer_object=tokenizer)

    return make


@pytest.fixture(scope="session")
def tokenizer(make_tokenizer):
    return make_tokenizer()


@pytest.fixture
def make_model():
    """A tiny random Mamba2 of transformers in evaluation mode."""
    from transformers import Mamba2Config, Mamba2ForCausalLM

    def make(vocab_size: int = 300):
        config = Mamba2Config(
            vocab_size=vocab_size,
            hidden_size=32,
            num_heads=4,
            head_dim=16,
            state_size=8,
            n_groups=2,
            num_hidden_layers=2,
            expand=2,
            chunk_size=16,
        )
        return Mamba2ForCausalLM(config).eval()

    return make
