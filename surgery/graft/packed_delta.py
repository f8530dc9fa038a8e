"""The Gated DeltaNet mixer with packed projections, as transformers' Qwen models have it, around any memory rule.

Both layouts have one convolution over q | k | v, ``conv1d [2 G K + H V, 1, W]``, a norm over each head's values before
the gate, ``norm [V]``, ``A_log, dt_bias [H]`` and ``out_proj [D, H V]``, and differ in their projections (r = H / G):

    interleaved (``qwen3_next``)  in_proj_qkvz [2 G K + 2 H V, D], for each key head the rows q [K] | k [K] | v [r V] |
                                  z [r V]; in_proj_ba [2 H, D], for each key head b [r] | a [r]
    flat (``qwen3_5``)            in_proj_qkv [2 G K + H V, D], rows q | k | v; in_proj_z [H V, D]; in_proj_b,
                                  in_proj_a [H, D]

The memory sees what it sees in :mod:`surgery.graft.gated_delta`.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from surgery.graft.base import project
from surgery.graft.gated_delta import DeltaGraft, GatedRMSNorm
from surgery.graft.short_conv import depthwise
from surgery.memory.base import MemoryInputs, MemoryRule


class _PackedDeltaGraft(DeltaGraft):
    """Convolution, norm and output of both layouts."""

    def __init__(
        self, memory: MemoryRule, *, layer_idx: int = 0, conv_kernel: int = 4, norm_eps: float = 1e-6
    ) -> None:
        super().__init__(memory, layer_idx=layer_idx, norm_eps=norm_eps, conv_width=conv_kernel)
        g = self.geometry
        self.conv1d = depthwise(2 * self.keys + self.values, conv_kernel, bias=False)
        self.norm = GatedRMSNorm(g.value_dim, norm_eps, "silu")
        self.out_proj = nn.Linear(self.values, g.hidden_size, bias=False)

    def _convolutions(self) -> tuple[tuple[nn.Module, int], ...]:
        return ((self.conv1d, 2 * self.keys + self.values),)

    def _emit(self, o: Tensor, inputs: MemoryInputs, rest: tuple[Tensor, ...]) -> Tensor:
        o = self.norm(o, rest[2].unflatten(-1, o.shape[-2:]))
        return self.out_proj(o.flatten(-2).to(inputs.hidden.dtype))


class InterleavedDeltaGraft(_PackedDeltaGraft):
    """A ``qwen3_next`` mixer whose memory is ``memory``.

    Raises:
        ValueError: the memory's geometry has another style.
    """

    def __init__(self, memory: MemoryRule, **options) -> None:
        super().__init__(memory, **options)
        g = self.geometry
        self.in_proj_qkvz = nn.Linear(g.hidden_size, 2 * (self.keys + self.values), bias=False)
        self.in_proj_ba = nn.Linear(g.hidden_size, 2 * g.num_heads, bias=False)

    def _project(self, hidden: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        g = self.geometry
        share = g.num_heads // g.num_key_heads  # value heads a key head
        packed = self.in_proj_qkvz(hidden).unflatten(-1, (g.num_key_heads, -1))
        q, k, v, z = packed.split([g.key_dim, g.key_dim, share * g.value_dim, share * g.value_dim], dim=-1)
        b, a = self.in_proj_ba(hidden).unflatten(-1, (g.num_key_heads, -1)).split([share, share], dim=-1)
        x = torch.cat([part.flatten(-2) for part in (q, k, v)], dim=-1)
        return x, (a.flatten(-2), b.flatten(-2), z.flatten(-2))


class FlatDeltaGraft(_PackedDeltaGraft):
    """A ``qwen3_5`` mixer whose memory is ``memory``.

    Raises:
        ValueError: the memory's geometry has another style.
    """

    def __init__(self, memory: MemoryRule, **options) -> None:
        super().__init__(memory, **options)
        g = self.geometry
        self.in_proj_qkv = nn.Linear(g.hidden_size, 2 * self.keys + self.values, bias=False)
        self.in_proj_z = nn.Linear(g.hidden_size, self.values, bias=False)
        self.in_proj_b = nn.Linear(g.hidden_size, g.num_heads, bias=False)
        self.in_proj_a = nn.Linear(g.hidden_size, g.num_heads, bias=False)

    def _project(self, hidden: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        x, (z, a, b) = project(hidden, (self.in_proj_qkv,), (self.in_proj_z, self.in_proj_a, self.in_proj_b))
        return x, (a, b, z)
