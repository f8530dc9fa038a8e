"""The Mamba-2 mixer around any memory rule (Dao and Gu 2024, "Transformers are SSMs", section 7).

Parameter names and shapes are those of transformers' ``mamba2``, with Di = H V, the inner width:

    in_proj  [2 Di + 2 G K + H, D]   rows z | x | B | C | dt
    conv1d   [Di + 2 G K, 1, W]      over x | B | C
    A_log, D, dt_bias [H]; norm [Di]; out_proj [D, Di]

Some layouts give every channel its own skip weight (D [Di]), leave the norm out or put the gate behind it, or let part
of the inner width bypass the memory as a gated MLP of width M: in_proj then has rows z0 | x0 (M each) in front, and
out_proj M columns in front, which read silu(z0) x0.

The memory sees keys B, queries C, values x, log decay -exp(A_log) dt and write strength dt.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from surgery.graft.base import Graft, wide
from surgery.graft.compiling import settled
from surgery.graft.short_conv import depthwise
from surgery.kernels import gated_norm
from surgery.memory.base import MemoryInputs, MemoryRule


class GatedGroupRMSNorm(nn.Module):
    """Gate (SiLU) and root mean square norm in ``groups`` equal parts of the last dimension.

    The groups are those of B and C, as the models were trained; transformers normalised over all of them together
    before it followed (5.17 still does), which is the same for one group only.

    Args:
        gate_first: the gate is applied before the norm, as Mamba-2 does; otherwise after it.
    """

    def __init__(self, size: int, groups: int, eps: float, gate_first: bool = True) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.groups = groups
        self.eps = eps
        self.gate_first = gate_first

    def forward(self, y: Tensor, gate: Tensor, values: Tensor, skip: Tensor) -> Tensor:
        """The gated norm of y + skip values: [B, T, Di] three times, skip [Di] -> [B, T, Di], computed in float32."""
        if gated_norm.fused(y, y.shape[-1] // self.groups):
            options = {"gate_first": self.gate_first, "values": values, "skip": skip}
            return gated_norm.gated_norm(y, gate, self.weight, self.groups, self.eps, **options)
        y, gate = wide(y) + wide(skip) * wide(values), F.silu(wide(gate))
        parts = (y * gate if self.gate_first else y).unflatten(-1, (self.groups, -1))
        parts = parts * torch.rsqrt(parts.pow(2).mean(-1, keepdim=True) + self.eps)
        normed = parts.flatten(-2) * wide(self.weight)
        return normed if self.gate_first else normed * gate


class Mamba2Graft(Graft):
    """A Mamba-2 mixer whose memory is ``memory``.

    Args:
        memory: the rule; its geometry gives every width, and its style must be ``additive``.
        time_step_limit: dt is clamped to it, in the full forward and in one-token steps alike.
        norm: whether there is a norm; without one, the gate alone. norm_before_gate: the gate comes after the norm.
        skip_per_channel: D is [Di], one weight a channel, instead of [H].
        mlp_size: M, the part of the inner width that bypasses the memory.

    Raises:
        ValueError: the memory's geometry has another style.
    """

    def __init__(
        self,
        memory: MemoryRule,
        *,
        layer_idx: int = 0,
        conv_kernel: int = 4,
        norm_eps: float = 1e-5,
        time_step_limit: tuple[float, float] = (0.0, math.inf),
        use_bias: bool = False,
        use_conv_bias: bool = True,
        norm: bool = True,
        norm_before_gate: bool = False,
        skip_per_channel: bool = False,
        mlp_size: int = 0,
    ) -> None:
        super().__init__(memory, layer_idx=layer_idx, norm_eps=norm_eps, conv_width=conv_kernel)
        g = self.geometry
        if g.style != "additive":
            raise ValueError(f"a Mamba-2 mixer needs an additive memory geometry, not {g.style!r}")
        self.inner = g.num_heads * g.value_dim
        self.keys = g.num_key_heads * g.key_dim
        self.time_step_limit = (float(time_step_limit[0]), float(time_step_limit[1]))
        channels = self.inner + 2 * self.keys
        self.mlp_size = mlp_size
        self.in_proj = nn.Linear(g.hidden_size, 2 * mlp_size + self.inner + channels + g.num_heads, bias=use_bias)
        self.conv1d = depthwise(channels, conv_kernel, use_conv_bias)
        self.D = nn.Parameter(torch.ones(self.inner if skip_per_channel else g.num_heads))
        self.norm = GatedGroupRMSNorm(self.inner, g.num_key_heads, norm_eps, not norm_before_gate) if norm else None
        self.out_proj = nn.Linear(mlp_size + self.inner, g.hidden_size, bias=use_bias)

    def _rows(self, hidden: Tensor) -> Tensor:
        """[B, T, D] -> [B, T, rows of in_proj]"""
        return self.in_proj(hidden)

    def _project(self, hidden: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        mlp, z, x, dt = self._rows(hidden).split(
            [2 * self.mlp_size, self.inner, self.inner + 2 * self.keys, self.geometry.num_heads], dim=-1
        )
        return x, (z, dt, mlp)

    def _convolutions(self) -> tuple[tuple[nn.Module, int], ...]:
        return ((self.conv1d, self.inner + 2 * self.keys),)

    def _compose(self, hidden: Tensor, x: Tensor, rest: tuple[Tensor, ...]) -> MemoryInputs:
        g = self.geometry
        x, b, c = x.split([self.inner, self.keys, self.keys], dim=-1)
        low, high = self.time_step_limit
        dt = F.softplus(wide(settled(rest[1])) + wide(self.dt_bias)).clamp(low, high)
        return MemoryInputs(
            hidden=hidden,
            q=c.unflatten(-1, (g.num_key_heads, g.key_dim)),
            k=b.unflatten(-1, (g.num_key_heads, g.key_dim)),
            v=x.unflatten(-1, (g.num_heads, g.value_dim)),
            log_decay=-wide(self.A_log).exp() * dt,
            write=dt,
        )

    def _emit(self, o: Tensor, inputs: MemoryInputs, rest: tuple[Tensor, ...]) -> Tensor:
        z, _, mlp = rest
        o, values = o.flatten(-2), inputs.v.flatten(-2)
        skip = self.D.repeat_interleave(self.inner // self.D.shape[0])
        if self.norm is None:
            y = (wide(o) + wide(skip) * wide(values)) * F.silu(wide(z))
        else:
            y = self.norm(o, z, values, skip)
        y = y.to(inputs.hidden.dtype)
        if self.mlp_size:
            gate, up = mlp.chunk(2, dim=-1)
            y = torch.cat([F.silu(gate) * up, y], dim=-1)
        return self.out_proj(y)
