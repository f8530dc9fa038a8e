"""The Kimi Delta Attention mixer around any memory rule (Kimi Team 2025, "Kimi Linear").

A relative of the Gated DeltaNet mixer with as many key as value heads and a decay for each key channel. Parameter names
and shapes are those of the published checkpoints' ``self_attn``, with R = V, the rank of the two low-rank gates:

    q_proj, k_proj [H K, D]; v_proj [H V, D]; q_conv1d, k_conv1d [H K, 1, W]; v_conv1d [H V, 1, W]
    f_a_proj [R, D], f_b_proj [H K, R], dt_bias [H K], A_log [1, 1, H, 1]   the decay's
    b_proj [H, D]; g_a_proj [R, D], g_b_proj [H V, R]; o_norm [V]; o_proj [D, H V]

The memory sees L2-normalised keys and queries (queries also scaled by K^-1/2), values v, log decay
-exp(A_log) softplus(f_b_proj f_a_proj h + dt_bias) for each key channel and write strength sigmoid(b). The output gate
is a sigmoid.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from surgery.graft.base import wide
from surgery.graft.gated_delta import DeltaGraft, GatedRMSNorm
from surgery.graft.short_conv import depthwise
from surgery.memory.base import MemoryInputs, MemoryRule


class KimiDeltaGraft(DeltaGraft):
    """A Kimi Delta Attention mixer whose memory is ``memory``.

    Raises:
        ValueError: the memory's geometry has another style, one decay a head, or shares key heads.
    """

    def __init__(
        self, memory: MemoryRule, *, layer_idx: int = 0, conv_size: int = 4, norm_eps: float = 1e-5
    ) -> None:
        super().__init__(memory, layer_idx=layer_idx, norm_eps=norm_eps, conv_width=conv_size)
        g = self.geometry
        if not g.channel_decay or g.num_key_heads != g.num_heads:
            raise ValueError("a Kimi Delta Attention mixer needs channel_decay and a key head for each value head")
        rank = g.value_dim
        for name, size in (("q", self.keys), ("k", self.keys), ("v", self.values)):
            self.add_module(f"{name}_proj", nn.Linear(g.hidden_size, size, bias=False))
            self.add_module(f"{name}_conv1d", depthwise(size, conv_size, bias=False))
        self.f_a_proj = nn.Linear(g.hidden_size, rank, bias=False)
        self.f_b_proj = nn.Linear(rank, self.keys, bias=False)
        self.A_log = nn.Parameter(torch.zeros(1, 1, g.num_heads, 1, dtype=torch.float32))
        self.dt_bias = nn.Parameter(torch.zeros(self.keys, dtype=torch.float32))
        self.b_proj = nn.Linear(g.hidden_size, g.num_heads, bias=False)
        self.g_a_proj = nn.Linear(g.hidden_size, rank, bias=False)
        self.g_b_proj = nn.Linear(rank, self.values, bias=False)
        self.o_norm = GatedRMSNorm(g.value_dim, norm_eps, "sigmoid")
        self.o_proj = nn.Linear(self.values, g.hidden_size, bias=False)

    def _project(self, hidden: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        x = torch.cat([self.q_proj(hidden), self.k_proj(hidden), self.v_proj(hidden)], dim=-1)
        decay, gate = self.f_b_proj(self.f_a_proj(hidden)), self.g_b_proj(self.g_a_proj(hidden))
        return x, (decay, self.b_proj(hidden), gate)

    def _convolutions(self) -> tuple[tuple[nn.Module, int], ...]:
        return (self.q_conv1d, self.keys), (self.k_conv1d, self.keys), (self.v_conv1d, self.values)

    def _log_decay(self, a: Tensor) -> Tensor:
        step = F.softplus(wide(a) + wide(self.dt_bias))
        return -wide(self.A_log).exp() * step.unflatten(-1, (self.geometry.num_heads, self.geometry.key_dim))

    def _emit(self, o: Tensor, inputs: MemoryInputs, rest: tuple[Tensor, ...]) -> Tensor:
        o = self.o_norm(o, rest[2].unflatten(-1, o.shape[-2:]))
        return self.o_proj(o.flatten(-2).to(inputs.hidden.dtype))
