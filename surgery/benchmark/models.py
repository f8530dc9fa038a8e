"""The shapes that are measured, and models of them with random weights."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from surgery.adaptation.teaching import Body, body_of
from surgery.hosts import adapter_for
from surgery.memory import create

DEVICE = "cuda"

CONFIGS: dict[str, dict[str, Any]] = {
    # state-spaces/mamba2-2.7b
    "mamba2-2.7b": {
        "model_type": "mamba2",
        "architectures": ["Mamba2ForCausalLM"],
        "hidden_size": 2560,
        "num_hidden_layers": 64,
        "num_heads": 80,
        "head_dim": 64,
        "state_size": 128,
        "n_groups": 1,
        "expand": 2,
        "vocab_size": 50288,
        "tie_word_embeddings": True,
    },
    # the base of the recipe gdn-340m-bayesian
    "gdn-340m": {
        "model_type": "gated_deltanet",
        "architectures": ["GatedDeltaNetForCausalLM"],
        "hidden_size": 1024,
        "num_hidden_layers": 24,
        "num_heads": 4,
        "head_dim": 256,
        "expand_v": 1.0,
        "vocab_size": 32000,
    },
}
CONFIGS["gdn-340m-v512"] = {**CONFIGS["gdn-340m"], "expand_v": 2.0}

# eight of 64 layers and four of 24, evenly spread
LAYERS = {"mamba2-2.7b": [7, 15, 23, 31, 39, 47, 55, 63], "gdn-340m": [5, 11, 17, 23]}


def build(shape: str, rule: str, *, dtype: torch.dtype | None = None) -> tuple[nn.Module, Mapping[str, Any]]:
    """A model on the GPU at dose 1, and its configuration. Rule ``host`` is the untouched model."""
    config = CONFIGS[shape]
    adapter = adapter_for(config)
    if rule != "host":
        swap = {"schema": 1, "rule": rule, "layers": LAYERS[shape], "options": {}, "base": shape}
        config = adapter.surgery_config(config, swap)
    with torch.device(DEVICE):
        model = adapter.build(config, device=DEVICE, dtype=dtype)
    for mixer in adapter.mixers(model).values():
        mixer.memory.dose.fill_(1.0)
    return model, config


def body(shape: str, rule: str, *, recompute: bool = False) -> Body:
    """The same for training, in float32."""
    model, config = build(shape, rule)
    model.config.use_cache = False
    if recompute:
        getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
    return body_of(model.train(), config, LAYERS[shape])


def seat_teachers(body: Body) -> None:
    """Put the untouched mixers beside the swapped ones, as distillation does."""
    teachers = {}
    for layer, name in body.mixers.items():
        student = body.model.get_submodule(name)
        memory, student.memory = student.memory, None
        teachers[layer] = copy.deepcopy(student)
        student.memory = memory
        teachers[layer].memory = create("host", student.geometry).to(DEVICE)
    body.seat(teachers=teachers)
