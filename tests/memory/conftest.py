"""Geometries and inputs of both host styles."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from surgery.memory import MemoryGeometry, MemoryInputs, MemoryRule


@pytest.fixture
def geometry() -> Callable[..., MemoryGeometry]:
    def make(style: str, **changes) -> MemoryGeometry:
        sizes = {"hidden_size": 32, "num_heads": 4, "num_key_heads": 2, "key_dim": 8, "value_dim": 6}
        return MemoryGeometry(style, **{**sizes, **changes})

    return make


@pytest.fixture
def inputs() -> Callable[..., MemoryInputs]:
    """Inputs as a mixer makes them: unit keys and a step in (0, 1) on a delta host (up to 2 with negative eigenvalues),
    keys of any size and a dt on an additive one."""

    def make(
        geometry: MemoryGeometry, tokens: int = 40, dtype=torch.float64, *, padded=False, packed=False
    ) -> MemoryInputs:
        batch, heads, groups = 2, geometry.num_heads, geometry.num_key_heads
        gates = torch.promote_types(dtype, torch.float32)
        q = torch.randn(batch, tokens, groups, geometry.key_dim, dtype=dtype)
        k = torch.randn_like(q)
        write = torch.rand(batch, tokens, heads, dtype=gates).clamp(min=0.05)
        if geometry.style == "delta":
            q, k = (torch.nn.functional.normalize(x, dim=-1) for x in (q, k))
            write = write * (2 if geometry.negative_eigenvalues else 1)
        mask = reset = None
        if padded:
            mask = torch.ones(batch, tokens, dtype=torch.bool)
            mask[0, :5] = False
        if packed:
            reset = torch.zeros(batch, tokens, dtype=torch.bool)
            reset[1, tokens // 2] = reset[0, tokens // 2 + 3] = True
        return MemoryInputs(
            hidden=torch.randn(batch, tokens, geometry.hidden_size, dtype=dtype),
            q=q, k=k, v=torch.randn(batch, tokens, heads, geometry.value_dim, dtype=dtype),
            log_decay=-0.2 * torch.rand(batch, tokens, heads, dtype=gates) ** 2,
            write=write, mask=mask, reset=reset,
        )

    return make


@pytest.fixture
def moved() -> Callable[..., MemoryRule]:
    """A rule at a dose, its parameters moved away from where they start."""

    def move(memory: MemoryRule, dose: float) -> MemoryRule:
        with torch.no_grad():
            for parameter in memory.parameters():
                parameter.add_(0.3 * torch.randn_like(parameter))
            memory.dose.fill_(dose)
        return memory

    return move
