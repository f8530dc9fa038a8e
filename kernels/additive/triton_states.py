"""The additive rule's boundary states in Triton: one program takes a tile of the state from chunk to chunk."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..chunks import token_stride


@triton.jit(do_not_specialize=["N", "H", "G"])
def _states_kernel(
    k, x, scale, whole, start, states, final, stride_k, stride_x, N, H, G, K: tl.constexpr, V: tl.constexpr,
    C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, REVERSE: tl.constexpr, PRECISION: tl.constexpr,
):
    keys = tl.program_id(0) * BK + tl.arange(0, BK)
    rows = tl.program_id(1) * BV + tl.arange(0, BV)
    bh = tl.program_id(2).to(tl.int64)
    batch = bh // H
    h = bh % H
    tokens = tl.arange(0, C)
    tile = rows[:, None] * K + keys[None, :]
    inside = (rows < V)[:, None] & (keys < K)[None, :]
    state = tl.load(start + bh * (V * K) + tile, mask=inside, other=0.0)
    for step in range(N):
        n = batch * N + step
        if REVERSE:
            n = batch * N + (N - 1 - step)
        out = states + (n * H + h) * (V * K)
        tl.store(out + tile, state.to(states.dtype.element_ty), mask=inside)
        at = n * C + tokens
        xx = tl.load(x + h * V + at[:, None] * stride_x + rows[None, :], mask=(rows < V)[None, :], other=0.0)
        xx = (xx.to(tl.float32) * tl.load(scale + at * H + h)[:, None]).to(k.dtype.element_ty)
        group = h // (H // G)
        kk = tl.load(k + group * K + at[:, None] * stride_k + keys[None, :], mask=(keys < K)[None, :], other=0.0)
        decay = tl.load(whole + n * H + h)
        state = tl.dot(tl.trans(xx), kk, state * decay, input_precision=PRECISION)
    tl.store(final + bh * (V * K) + tile, state, mask=inside)


def states(
    k: Tensor, x: Tensor, scale: Tensor, whole: Tensor, start: Tensor, reverse: bool
) -> tuple[Tensor, Tensor]:
    """See :func:`surgery.kernels.additive.states.additive_states`; C a power of two from 16."""
    (k, stride_k), (x, stride_x) = token_stride(k), token_stride(x)
    scale, whole, start = scale.contiguous(), whole.contiguous(), start.contiguous()
    batch, chunks, length, groups, key_dim = k.shape
    heads, value_dim = x.shape[3:]
    met = torch.empty(batch, chunks, heads, value_dim, key_dim, dtype=k.dtype, device=k.device)
    final = torch.empty_like(start)
    half = k.dtype != torch.float32
    widest = 64 if half else 32
    width, rows = (min(widest, max(16, triton.next_power_of_2(size))) for size in (key_dim, value_dim))
    _states_kernel[(triton.cdiv(key_dim, width), triton.cdiv(value_dim, rows), batch * heads)](
        k, x, scale, whole, start, met, final, stride_k, stride_x, chunks, heads, groups, K=key_dim, V=value_dim,
        C=length, BK=width, BV=rows, REVERSE=reverse, PRECISION=None if half else "tf32x3", num_warps=4,
        num_stages=3 if half else 1, enable_fp_fusion=True,
    )
    return met, final
