"""The Mamba-2 mixer around any memory rule (Dao and Gu 2024, "Transformers are SSMs", section 7).

Parameter names and shapes are those of transformers' ``mamba2``, with Di = H V, the inner width:

    in_proj  [2 Di + 2 G K + H, D]   rows z | x | B | C | dt
    conv1d   [Di + 2 G K, 1, W]      over x | B | C
    A_log, D, dt_bias [H]; norm [Di]; out_proj [D, Di]

The memory sees keys B, queries C, values x, log decay -exp(A_log) dt and write strength dt.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from surgery.graft.base import Graft, wide
from surgery.memory.base import MemoryInputs, MemoryRule


class GatedGroupRMSNorm(nn.Module):
    """Gate first (SiLU), then root mean square norm in ``groups`` equal parts of the last dimension.

    The groups are those of B and C, as the models were trained; transformers normalised over all of them together
    before it followed (5.17 still does), which is the same for one group only.
    """

    def __init__(self, size: int, groups: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.groups = groups
        self.eps = eps

    def forward(self, y: Tensor, gate: Tensor) -> Tensor:
        """[..., Di], [..., Di] -> [..., Di] in float32."""
        y = wide(y) * F.silu(wide(gate))
        parts = y.unflatten(-1, (self.groups, -1))
        parts = parts * torch.rsqrt(parts.pow(2).mean(-1, keepdim=True) + self.eps)
        return parts.flatten(-2) * wide(self.weight)


class Mamba2Graft(Graft):
    """A Mamba-2 mixer whose memory is ``memory``.

    Args:
        memory: the rule; its geometry gives every width, and its style must be ``additive``.
        time_step_limit: dt is clamped to it, in the full forward and in one-token steps alike.

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
    ) -> None:
        super().__init__(memory, layer_idx=layer_idx, norm_eps=norm_eps)
        g = self.geometry
        if g.style != "additive":
            raise ValueError(f"a Mamba-2 mixer needs an additive memory geometry, not {g.style!r}")
        self.inner = g.num_heads * g.value_dim
        self.keys = g.num_key_heads * g.key_dim
        self.time_step_limit = (float(time_step_limit[0]), float(time_step_limit[1]))
        channels = self.inner + 2 * self.keys
        self.in_proj = nn.Linear(g.hidden_size, self.inner + channels + g.num_heads, bias=use_bias)
        self.conv1d = nn.Conv1d(
            channels, channels, conv_kernel, groups=channels, padding=conv_kernel - 1, bias=use_conv_bias
        )
        self.D = nn.Parameter(torch.ones(g.num_heads))
        self.norm = GatedGroupRMSNorm(self.inner, g.num_key_heads, norm_eps)
        self.out_proj = nn.Linear(self.inner, g.hidden_size, bias=use_bias)

    def _project(self, hidden: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        z, x, dt = self.in_proj(hidden).split(
            [self.inner, self.inner + 2 * self.keys, self.geometry.num_heads], dim=-1
        )
        return x, (z, dt)

    def _convolution(self) -> tuple[Tensor, Tensor | None]:
        return self.conv1d.weight, self.conv1d.bias

    def _compose(self, hidden: Tensor, x: Tensor, rest: tuple[Tensor, ...]) -> MemoryInputs:
        g = self.geometry
        x, b, c = x.split([self.inner, self.keys, self.keys], dim=-1)
        low, high = self.time_step_limit
        dt = F.softplus(wide(rest[1]) + wide(self.dt_bias)).clamp(low, high)
        return MemoryInputs(
            hidden=hidden,
            q=c.unflatten(-1, (g.num_key_heads, g.key_dim)),
            k=b.unflatten(-1, (g.num_key_heads, g.key_dim)),
            v=x.unflatten(-1, (g.num_heads, g.value_dim)),
            log_decay=-wide(self.A_log).exp() * dt,
            write=dt,
        )

    def _emit(self, o: Tensor, inputs: MemoryInputs, rest: tuple[Tensor, ...]) -> Tensor:
        y = wide(o) + wide(self.D)[:, None] * wide(inputs.v)
        return self.out_proj(self.norm(y.flatten(-2), rest[0]).to(inputs.hidden.dtype))
