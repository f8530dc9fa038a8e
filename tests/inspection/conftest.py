"""Tiny random checkpoints on disk, base and swapped, with a byte-level tokenizer."""

from __future__ import annotations

import pytest
import torch

FAMILIES = {
    "mamba2": {
        "num_heads": 4,
        "head_dim": 16,
        "hidden_size": 32,
        "expand": 2,
        "state_size": 8,
        "n_groups": 2,
        "chunk_size": 16,
        "num_hidden_layers": 4,
    },
    "gated_deltanet": {
        "num_heads": 2,
        "num_v_heads": 4,
        "head_dim": 8,
        "expand_v": 1.0,
        "hidden_size": 32,
        "num_hidden_layers": 3,
        "intermediate_size": 48,
    },
}


@pytest.fixture
def make_checkpoint(tmp_path):
    """Write a random model of ``family``, its decays spread over layers and heads; ``swap`` is config.surgery.

    ``change(adapter, model)`` may alter the model before it is written.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    from surgery.hosts import adapter_for

    def make(family="mamba2", swap=None, change=None, name="model", **config):
        config = {"model_type": family, "vocab_size": 260, **FAMILIES[family], **config}
        adapter = adapter_for(config)
        if swap is not None:
            config = adapter.surgery_config(config, {"schema": 1, "options": {}, "base": family, **swap})
        model = adapter.build(config)
        with torch.no_grad():
            for mixer in adapter.mixers(model).values():
                mixer.dt_bias.copy_(-3 + 1.5 * torch.randn_like(mixer.dt_bias))
                mixer.A_log.copy_(torch.randn_like(mixer.A_log))
        if change is not None:
            with torch.no_grad():
                change(adapter, model)
        directory = tmp_path / name
        model.save_pretrained(directory)
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        inner = Tokenizer(models.BPE(vocab={letter: number for number, letter in enumerate(alphabet)}, merges=[]))
        inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        inner.decoder = decoders.ByteLevel()
        PreTrainedTokenizerFast(tokenizer_object=inner).save_pretrained(directory)
        return directory

    return make
