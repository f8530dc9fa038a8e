"""Tiny mixers: the upstream Mamba-2 mixer beside its graft, and how far two tensors are apart."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn
from transformers import Mamba2Config
from transformers.models.mamba2.modeling_mamba2 import Mamba2Mixer

from surgery.graft import GatedDeltaGraft
from surgery.memory import MemoryGeometry, create
from surgery.models.mamba2 import geometry, mixer


def _relative(measured: torch.Tensor, expected: torch.Tensor) -> float:
    """Frobenius norm of the difference over that of what is expected; where that is 0, the difference itself."""
    expected = expected.detach().double()
    error, size = (measured.detach().double() - expected).norm().item(), expected.norm().item()
    return error / size if size else error


@pytest.fixture
def relative():
    return _relative


@pytest.fixture
def close():
    """Assert that tensors agree to 1e-5 in relative Frobenius norm, the gradients of two modules likewise."""

    def check(measured, expected, tolerance: float = 1e-5) -> None:
        if isinstance(measured, nn.Module):
            theirs = dict(expected.named_parameters())
            for name, parameter in measured.named_parameters():
                assert parameter.grad is not None, f"{name} has no gradient"
                error = _relative(parameter.grad, theirs[name].grad)
                assert error < tolerance, f"gradient of {name} differs by {error:.2e}"
        else:
            assert measured.shape == expected.shape
            error = _relative(measured, expected)
            assert error < tolerance, f"differs by {error:.2e}"

    return check


class _UpstreamNorm(nn.Module):
    """The gated norm over groups, for releases of transformers whose own ignores the groups."""

    def __init__(self, weight: nn.Parameter, groups: int, eps: float) -> None:
        super().__init__()
        self.weight, self.groups, self.variance_epsilon = weight, groups, eps

    def forward(self, x, gate):
        x = x.float() * torch.sigmoid(gate.float()) * gate.float()
        parts = x.chunk(self.groups, dim=-1)
        parts = [part / (part.square().mean(-1, keepdim=True) + self.variance_epsilon).sqrt() for part in parts]
        return self.weight * torch.cat(parts, dim=-1)


def scatter(module: nn.Module) -> None:
    """Random values at which every host parameter matters; a memory's own stay."""
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if name.startswith("memory."):
                continue
            if name.endswith(("norm.weight", "D")):
                parameter.copy_(1 + 0.3 * torch.randn_like(parameter))
            elif name.endswith(("A_log", "dt_bias")):
                parameter.copy_(0.7 * torch.randn_like(parameter))
            elif "conv1d" in name:
                parameter.copy_(torch.randn_like(parameter))
            else:
                parameter.copy_(torch.randn_like(parameter) / math.sqrt(parameter.shape[-1]))


@pytest.fixture
def mamba2_pair():
    """Factory: (upstream mixer, graft with the host's rule and the same parameters, configuration)."""

    def make(groups: int = 2, rule: str = "host", **options):
        config = Mamba2Config(
            num_heads=4, head_dim=16, hidden_size=32, expand=2, state_size=8, n_groups=groups, num_hidden_layers=1,
            vocab_size=32, chunk_size=16, layer_norm_epsilon=1e-3, **options,
        )  # fmt: skip
        upstream = Mamba2Mixer(config, layer_idx=0)
        scatter(upstream)
        if not hasattr(upstream.norm, "group_size"):
            upstream.norm = _UpstreamNorm(upstream.norm.weight, groups, config.layer_norm_epsilon)
        memory = create(rule, geometry(config))
        graft = mixer(config, memory, 0)
        graft.load_state_dict(upstream.state_dict(), strict=False)
        return copy.deepcopy(upstream), graft, config

    return make


@pytest.fixture
def delta_graft():
    """Factory: a gated-delta graft with random parameters."""

    def make(key_heads: int = 4, heads: int = 4, negative: bool = False, rule: str = "host", **options):
        shape = MemoryGeometry(
            style="delta", hidden_size=32, num_heads=heads, num_key_heads=key_heads, key_dim=24, value_dim=16,
            negative_eigenvalues=negative,
        )  # fmt: skip
        graft = GatedDeltaGraft(create(rule, shape), **options)
        scatter(graft)
        return graft

    return make
