"""The gated delta rule by chunks as two operators in Triton, forward and backward, which torch.compile does not look
into: for CUDA, half precision, keys of up to 256 entries and one decay a head.

A chunk that meets the state S corrects it by E = P (beta (v - A k S)), where P = (I + L)^-1 and L [t, s] =
beta_t (A_t / A_s) k_t.k_s below the diagonal (:mod:`.chunked`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..chunks import MAX_HEADS, on_its_device, step_gradients
from ..chunks import fused as wanted
from ..operators import operator
from .blocks import KEY_BLOCK

# whether the kernels run unasked
BY_DEFAULT = True
MAX_KEY = 256  # programs of the scans hold all of a key


def fused(k: Tensor, v: Tensor) -> bool:
    """Whether the operators are to take such keys [B, T, G, K] and values [B, T, H, V]."""
    half = k.dtype in (torch.bfloat16, torch.float16)
    return half and k.shape[-1] <= MAX_KEY and v.shape[0] * v.shape[2] <= MAX_HEADS and wanted(k, BY_DEFAULT)


class Delta(torch.autograd.Function):
    """q, k [B, N, C, G, K], v [B, N, C, H, V] of one half precision, beta [B, N, C, H], log decays [B, N, C, H] in
    float64, the state [B, H, K, V] in float32 -> outputs like v, and the state after all chunks."""

    @staticmethod
    def forward(
        ctx, q: Tensor, k: Tensor, v: Tensor, beta: Tensor, steps: Tensor, state: Tensor
    ) -> tuple[Tensor, Tensor]:
        # gates by head [B, N, H, C]
        total = steps.transpose(2, 3).cumsum(3)
        last = total[..., -1:]
        from_start, to_end = total.float().exp(), (last - total).float().exp()
        gates = (beta.transpose(2, 3).contiguous(), total, from_start, to_end, last[..., 0].float().exp())
        o, final, *kept = _forward(q, k, v, *gates, state)
        ctx.save_for_backward(q, k, v, *gates, *kept)
        return o, final

    @staticmethod
    def backward(ctx, do: Tensor, dfinal: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
        q, k, v, *kept = ctx.saved_tensors
        dq, dk, dv, *sums, dstate = _backward(do.to(v.dtype), dfinal, q, k, v, *kept)
        dbeta, dsteps = gate_gradients(*sums, kept[4])
        return dq, dk, dv, dbeta, dsteps, dstate


def gate_gradients(
    dbeta: Tensor, read: Tensor, written: Tensor, states: Tensor, through: Tensor, whole: Tensor
) -> tuple[Tensor, Tensor]:
    """The gradients of beta and of the log decays [B, N, C, H] from what the kernels sum: over pairs of tokens
    ``dbeta``, ``read`` and ``written`` [B, N, H, C], over blocks of keys ``states`` [P, 3, B, N, H, C] and ``through``
    [P, B, N, H]; ``whole`` [B, N, H]."""
    of_step, carried, recalled = states.sum(0).unbind()
    sums = (x.transpose(2, 3) for x in (read, written, carried, recalled))
    return (dbeta + of_step).transpose(2, 3), step_gradients(*sums, whole * through.sum(0))


@operator("delta", device_types="cuda")
@on_its_device
def _forward(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, total: Tensor, from_start: Tensor, to_end: Tensor, whole: Tensor,
    start: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Outputs and the last state; and for the backward pass P and the queries' weights [B, N, H, C, C], the states met
    [B, N, H, K, V] and the corrections E [B, N, H, C, V].

    Args:
        q, k, v, start: as in :class:`Delta`. beta [B, N, H, C]. total: the log decays summed from the chunk's start,
            float64, and in float32 the decays from_start, to_end [B, N, H, C] and whole [B, N, H] that they make.
    """
    from . import triton_chunks

    return triton_chunks.forward(q, k, v, beta, total, from_start, to_end, whole, start)


@operator("delta_backward", device_types="cuda")
@on_its_device
def _backward(
    do: Tensor, dfinal: Tensor, q: Tensor, k: Tensor, v: Tensor, beta: Tensor, total: Tensor, from_start: Tensor,
    to_end: Tensor, whole: Tensor, solve: Tensor, scores: Tensor, met: Tensor, corrections: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The gradients of q, k and v; what :func:`gate_gradients` takes; and the gradient of the state."""
    from . import triton_chunks

    gates = (beta, total, from_start, to_end, whole)
    return triton_chunks.backward(do, dfinal, q, k, v, *gates, solve, scores, met, corrections)


@_forward.register_fake
def _(q, k, v, beta, total, from_start, to_end, whole, start):
    batch, chunks, length, heads, value_dim = v.shape
    square = k.new_empty(batch, chunks, heads, length, length)
    met = k.new_empty(batch, chunks, heads, *start.shape[2:])
    corrections = k.new_empty(batch, chunks, heads, length, value_dim)
    return v.new_empty(v.shape), start.new_empty(start.shape), square, torch.empty_like(square), met, corrections


@_backward.register_fake
def _(do, dfinal, q, k, v, beta, total, from_start, to_end, whole, solve, scores, met, corrections):
    sums = (beta.new_empty(beta.shape) for _ in range(3))
    parts = -(-k.shape[-1] // KEY_BLOCK)
    through = beta.new_empty(parts, *whole.shape)
    states = beta.new_empty(parts, 3, *beta.shape)
    return *(x.new_empty(x.shape) for x in (q, k, v)), *sums, states, through, dfinal.new_empty(dfinal.shape)
