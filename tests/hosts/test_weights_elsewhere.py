"""Weights are used where they live: offloaded, quantised, adapted or sharded, a model gives what it gives without its
fused paths."""

from __future__ import annotations

import math
import os

import accelerate
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from hosts_battery import apart
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.utils import parametrize
from transformers import DynamicCache

from surgery import hosts
from surgery.graft import Graft, base, compiling, short_conv
from surgery.graft.short_conv import CausalConv1d, causal_conv
from surgery.memory.modules import plain
from surgery.models import step_graph

LENGTH = 23
CPU = torch.device("cpu")
# every parameter of the memories: two rules for each style, one of them with a projection of its own
RULES = {"host": ("host", {}), "palimpsa": ("palimpsa", {}), "bayesian": ("bayesian", {"noise_from": "token"})}


@pytest.fixture(params=RULES)
def build(request, case, case_base):
    """Factory: the case's model with two swapped layers at dose 1, its weights the same each time."""
    rule, options = RULES[request.param]
    config = hosts.read_config(case_base)
    adapter = hosts.adapter_for(config)
    layers = list(case.swapped)
    swap = {"schema": 1, "rule": rule, "layers": layers, "options": options, "base": "tiny"}
    tensors = hosts.load_model(case_base, dtype=torch.float32).state_dict()
    seed = int(torch.randint(2**31, ()))

    def make():
        torch.manual_seed(seed)
        model = adapter.build(adapter.surgery_config(config, swap)).float().eval()
        model.load_state_dict(tensors, strict=False)
        model.tie_weights()
        for layer in layers:
            memory = adapter.mixers(model)[layer].memory
            memory.reset_parameters("paper")
            with torch.no_grad():
                for parameter in memory.parameters():
                    parameter.add_(0.3 * torch.randn_like(parameter))
        return model

    return make


@pytest.fixture
def text():
    return torch.randint(3, 64, (2, LENGTH))


@torch.no_grad()
def read(model, text):
    """Logits of a text, of it packed, of it padded, and of its last tokens after a cache of the first."""
    reset = torch.zeros_like(text, dtype=torch.bool)
    reset[0, [0, 5, 6]], reset[1, 11] = True, True
    mask = torch.ones_like(text)
    mask[0, :4] = 0
    cache, parts = DynamicCache(config=model.config), []
    for piece in text.split([9, 1, LENGTH - 10], dim=1):
        parts.append(model(piece, use_cache=True, **{cache_name(model): cache}).logits)
    return [
        model(text).logits, model(text, reset=reset).logits, model(text, attention_mask=mask).logits[:, 4:],
        torch.cat(parts, dim=1),
    ]  # fmt: skip


def cache_name(model):
    return "cache" if isinstance(model, step_graph_models()) else "past_key_values"


def step_graph_models():
    from surgery.models.common import GraftedCausalLM

    return GraftedCausalLM


def same(found, expected):
    assert all(x.isfinite().all() for x in expected)
    assert [torch.equal(x, y) for x, y in zip(found, expected, strict=True)] == [True] * len(expected)


def near(found, expected, tolerance=1e-5):
    for x, y in zip(found, expected, strict=True):
        assert apart(x, y) < tolerance
