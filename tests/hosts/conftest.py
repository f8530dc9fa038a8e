"""Tiny base checkpoints of both families, written once a session."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from transformers import Mamba2Config, Mamba2ForCausalLM

from surgery.models.gated_deltanet import GatedDeltaNetConfig, GatedDeltaNetForCausalLM

SIZES = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 3}
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
CONFIGS = {
    "mamba2": Mamba2Config(
        num_heads=4, head_dim=16, expand=2, state_size=8, n_groups=1, chunk_size=16, **SIZES, **TOKENS
    ),
    "gated_deltanet": GatedDeltaNetConfig(
        num_heads=2, num_v_heads=4, head_dim=12, expand_v=1.5, intermediate_size=48, **SIZES, **TOKENS
    ),
}
CLASSES = {"mamba2": Mamba2ForCausalLM, "gated_deltanet": GatedDeltaNetForCausalLM}


def scatter(model: nn.Module) -> None:
    """Weights at which the logits depend on the text and every decay differs."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("A_log", "dt_bias")):
                parameter.copy_(0.7 * torch.randn_like(parameter))
            elif parameter.ndim == 1:
                parameter.copy_(1 + 0.3 * torch.randn_like(parameter))
            elif "conv1d" not in name:
                parameter.copy_(torch.randn_like(parameter) / math.sqrt(parameter.shape[-1]))


@pytest.fixture(scope="session", params=["mamba2", "gated_deltanet"])
def family(request) -> str:
    return request.param


@pytest.fixture(scope="session")
def bases(tmp_path_factory):
    """Family -> directory of a base checkpoint, mamba2's written by transformers itself."""
    directories = {}
    for name, config in CONFIGS.items():
        model = CLASSES[name](config)
        scatter(model)
        directories[name] = tmp_path_factory.mktemp(name)
        model.save_pretrained(directories[name])
    return directories


@pytest.fixture
def base(bases, family):
    return bases[family]


@pytest.fixture
def text():
    return torch.randint(3, 64, (2, 37))
