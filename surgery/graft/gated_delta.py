"""The Gated DeltaNet mixer around any memory rule (Yang, Kautz and Hatamizadeh 2024, "Gated Delta Networks").

Parameter names and shapes are those of flash-linear-attention's ``gated_deltanet``:

    q_proj, k_proj [G K, D]; v_proj, g_proj [H V, D]; a_proj, b_proj [H, D]; o_proj [D, H V]
    q_conv1d, k_conv1d [G K, 1, W]; v_conv1d [H V, 1, W]; A_log, dt_bias [H]; o_norm [V]

The memory sees L2-normalised keys and queries (queries also scaled by K^-1/2), values v, log decay
-exp(A_log) softplus(a + dt_bias) and write strength eta = sigmoid(b), doubled where negative eigenvalues are allowed.
Other layouts of the same mixer are in :mod:`surgery.graft.packed_delta`, its relative with a decay for each key channel
in :mod:`surgery.graft.kda`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from surgery.graft.base import Graft, RMSNorm, project, wide
from surgery.graft.compiling import settled
from surgery.graft.short_conv import depthwise
from surgery.kernels import convolution, gated_norm
from surgery.memory.base import MemoryInputs, MemoryRule

GATES = {"swish": F.silu, "silu": F.silu, "sigmoid": torch.sigmoid}
NORM_EPS = 1e-6  # what fla and transformers add to the squares of a head of queries or keys


def l2_normalised(x: Tensor, eps: float = NORM_EPS) -> Tensor:
    """x / sqrt(|x|^2 + eps) over the last dimension, in float32, returned in x's dtype."""
    y = wide(x)
    return (y * torch.rsqrt(y.pow(2).sum(-1, keepdim=True) + eps)).to(x.dtype)


class GatedRMSNorm(nn.Module):
    """Root mean square norm over the last dimension (one head), then the gate."""

    def __init__(self, size: int, eps: float, activation: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps
        self.activation = activation

    def forward(self, y: Tensor, gate: Tensor) -> Tensor:
        """[B, T, H, V], [B, T, H, V] -> [B, T, H, V] in y's dtype, computed in float32."""
        heads, width = y.shape[-2:]
        if gated_norm.fused(y, width):
            flat = (y.flatten(-2), gate.flatten(-2), self.weight.repeat(heads), heads, self.eps)
            activation = "sigmoid" if self.activation == "sigmoid" else "silu"
            return gated_norm.gated_norm(*flat, activation=activation).unflatten(-1, (heads, width))
        x = wide(y)
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * wide(self.weight)
        return (x * GATES[self.activation](wide(gate))).to(y.dtype)


class DeltaGraft(Graft):
    """What the layouts share: q | k | v out of the convolution, and the memory's inputs made of them.

    The projections that bypass the convolution start with a and b, what decay and write strength come from.

    Raises:
        ValueError: the memory's geometry has another style.
    """

    def __init__(self, memory: MemoryRule, *, layer_idx: int, norm_eps: float, conv_width: int) -> None:
        super().__init__(memory, layer_idx=layer_idx, norm_eps=norm_eps, conv_width=conv_width)
        g = self.geometry
        if g.style != "delta":
            raise ValueError(f"a Gated DeltaNet mixer needs a delta memory geometry, not {g.style!r}")
        self.keys = g.num_key_heads * g.key_dim
        self.values = g.num_heads * g.value_dim
        self.write_scale = 2.0 if g.negative_eigenvalues else 1.0

    def _log_decay(self, a: Tensor) -> Tensor:
        """Log decay in float32 from its projection."""
        return -wide(self.A_log).exp() * F.softplus(wide(settled(a)) + wide(self.dt_bias))

    def _convolve(
        self, x: Tensor, past: Tensor | None, weight: Tensor, bias: Tensor | None, reset: Tensor | None
    ) -> Tensor | tuple[Tensor, ...]:
        g = self.geometry
        if past is not None or not convolution.fused_heads(x, weight.shape[-1], g.key_dim):
            return super()._convolve(x, past, weight, bias, reset)
        heads = {"groups": g.num_key_heads, "key_dim": g.key_dim, "scale": g.key_dim**-0.5, "eps": NORM_EPS}
        return convolution.normalised_conv(x, weight[:, 0], bias, reset, **heads)

    def _compose(self, hidden: Tensor, x: Tensor | tuple[Tensor, ...], rest: tuple[Tensor, ...]) -> MemoryInputs:
        g = self.geometry
        q, k, v = x if isinstance(x, tuple) else x.split([self.keys, self.keys, self.values], dim=-1)
        q, k = (part.unflatten(-1, (g.num_key_heads, g.key_dim)) for part in (q, k))
        if not isinstance(x, tuple):
            q, k = l2_normalised(q) * g.key_dim**-0.5, l2_normalised(k)
        return MemoryInputs(
            hidden=hidden,
            q=q,
            k=k,
            v=v.unflatten(-1, (g.num_heads, g.value_dim)),
            log_decay=self._log_decay(rest[0]),
            write=wide(settled(rest[1])).sigmoid() * self.write_scale,
        )


class GatedDeltaGraft(DeltaGraft):
    """A Gated DeltaNet mixer whose memory is ``memory``.

    Args:
        memory: the rule; its geometry gives every width, and its style must be ``delta``.
        gate_activation: ``swish`` (or ``silu``) or ``sigmoid``, on the output gate.

    Raises:
        ValueError: the memory's geometry has another style, or the gate's activation is unknown.
    """

    def __init__(
        self,
        memory: MemoryRule,
        *,
        layer_idx: int = 0,
        conv_size: int = 4,
        norm_eps: float = 1e-6,
        use_short_conv: bool = True,
        conv_bias: bool = False,
        use_gate: bool = True,
        gate_activation: str = "swish",
    ) -> None:
        width = conv_size if use_short_conv else 0
        super().__init__(memory, layer_idx=layer_idx, norm_eps=norm_eps, conv_width=width)
        g = self.geometry
        if gate_activation not in GATES:
            raise ValueError(f"output_gate_activation {gate_activation!r}: choose {', '.join(GATES)}")
        self.use_short_conv = use_short_conv
        self.use_gate = use_gate
        self.q_proj = nn.Linear(g.hidden_size, self.keys, bias=False)
        self.k_proj = nn.Linear(g.hidden_size, self.keys, bias=False)
        self.v_proj = nn.Linear(g.hidden_size, self.values, bias=False)
        self.a_proj = nn.Linear(g.hidden_size, g.num_heads, bias=False)
        self.b_proj = nn.Linear(g.hidden_size, g.num_heads, bias=False)
        if use_short_conv:
            for name, size in (("q_conv1d", self.keys), ("k_conv1d", self.keys), ("v_conv1d", self.values)):
                self.add_module(name, depthwise(size, conv_size, conv_bias))
        if use_gate:
            self.g_proj = nn.Linear(g.hidden_size, self.values, bias=False)
            self.o_norm = GatedRMSNorm(g.value_dim, norm_eps, gate_activation)
        else:
            self.o_norm = RMSNorm(g.value_dim, norm_eps)
        self.o_proj = nn.Linear(self.values, g.hidden_size, bias=False)

    def _project(self, hidden: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        gate = (self.g_proj,) if self.use_gate else ()
        x, rest = project(hidden, (self.q_proj, self.k_proj, self.v_proj), (*gate, self.a_proj, self.b_proj))
        return x, (*rest[-2:], *rest[:-2])

    def _convolutions(self) -> tuple[tuple[nn.Module, int], ...]:
        if not self.use_short_conv:
            return ()
        return (self.q_conv1d, self.keys), (self.k_conv1d, self.keys), (self.v_conv1d, self.values)

    def _emit(self, o: Tensor, inputs: MemoryInputs, rest: tuple[Tensor, ...]) -> Tensor:
        gate = (rest[2].unflatten(-1, o.shape[-2:]),) if self.use_gate else ()
        o = self.o_norm(o, *gate)
        return self.o_proj(o.flatten(-2).to(inputs.hidden.dtype))
