"""The delta rule's scan over chunks in Triton, and its adjoint: one program takes columns of the state along."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..chunks import token_stride


@triton.jit(do_not_specialize=["N", "H", "G"])
def _scan_kernel(
    solve, beta, v, k, from_start, to_end, whole, start, states, corrections, final, stride_k, stride_v, N, H, G,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, PRECISION: tl.constexpr,
):
    columns = tl.program_id(0) * BV + tl.arange(0, BV)
    bh = tl.program_id(1).to(tl.int64)
    batch = bh // H
    h = bh % H
    group = h // (H // G)
    tokens = tl.arange(0, C)
    keys = tl.arange(0, BK)
    tile = keys[:, None] * V + columns[None, :]
    inside = (keys < K)[:, None] & (columns < V)[None, :]
    low = k.dtype.element_ty
    state = tl.load(start + bh * (K * V) + tile, mask=inside, other=0.0)
    for i in range(N):
        n = batch * N + i
        head = n * H + h
        tl.store(states + head * (K * V) + tile, state.to(low), mask=inside)
        at = n * C + tokens
        kk = tl.load(k + group * K + at[:, None] * stride_k + keys[None, :], mask=(keys < K)[None, :], other=0.0)
        vv = tl.load(v + h * V + at[:, None] * stride_v + columns[None, :], mask=(columns < V)[None, :], other=0.0)
        t = tl.load(solve + head * (C * C) + tokens[:, None] * C + tokens[None, :])
        since = tl.load(from_start + head * C + tokens)[:, None]
        left = tl.load(to_end + head * C + tokens)[:, None]
        step = tl.load(beta + head * C + tokens)[:, None]
        error = step * (vv.to(tl.float32) - since * tl.dot(kk, state.to(low), input_precision=PRECISION))
        correction = tl.dot(t, error.to(low), input_precision=PRECISION)
        out = corrections + (head * C + tokens)[:, None] * V + columns[None, :]
        tl.store(out, correction.to(low), mask=(columns < V)[None, :])
        state *= tl.load(whole + head)
        state = tl.dot(tl.trans(kk), (left * correction).to(low), state, input_precision=PRECISION)
    tl.store(final + bh * (K * V) + tile, state, mask=inside)


@triton.jit(do_not_specialize=["N", "H", "G"])
def _adjoint_kernel(
    solve, beta, dcorrections, k, from_start, to_end, whole, dmet, dfinal, states, totals, adjoints, dstart, stride_k,
    N, H, G,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, PRECISION: tl.constexpr,
    TOTALS: tl.constexpr,
):
    columns = tl.program_id(0) * BV + tl.arange(0, BV)
    bh = tl.program_id(1).to(tl.int64)
    batch = bh // H
    h = bh % H
    group = h // (H // G)
    tokens = tl.arange(0, C)
    keys = tl.arange(0, BK)
    tile = keys[:, None] * V + columns[None, :]
    inside = (keys < K)[:, None] & (columns < V)[None, :]
    low = k.dtype.element_ty
    state = tl.load(dfinal + bh * (K * V) + tile, mask=inside, other=0.0)
    for i in range(N):
        n = batch * N + (N - 1 - i)
        head = n * H + h
        # early: what is read of no product is not fetched ahead by the compiler
        met = tl.load(dmet + head * (K * V) + tile, mask=inside, other=0.0)
        rows = (head * C + tokens)[:, None] * V + columns[None, :]
        total = tl.load(dcorrections + rows, mask=(columns < V)[None, :], other=0.0).to(tl.float32)
        tl.store(states + head * (K * V) + tile, state.to(low), mask=inside)
        at = n * C + tokens
        kk = tl.load(k + group * K + at[:, None] * stride_k + keys[None, :], mask=(keys < K)[None, :], other=0.0)
        t = tl.load(solve + head * (C * C) + tokens[:, None] * C + tokens[None, :])
        since = tl.load(from_start + head * C + tokens)[:, None]
        left = tl.load(to_end + head * C + tokens)[:, None]
        total += left * tl.dot(kk, state.to(low), input_precision=PRECISION)
        if TOTALS:
            tl.store(totals + rows, total.to(low), mask=(columns < V)[None, :])
        error = tl.dot(tl.trans(t), total.to(low), input_precision=PRECISION)
        tl.store(adjoints + rows, error.to(low), mask=(columns < V)[None, :])
        state *= tl.load(whole + head)
        state += met.to(tl.float32)
        step = tl.load(beta + head * C + tokens)[:, None]
        state = tl.dot(tl.trans(kk), (-since * step * error).to(low), state, input_precision=PRECISION)
    tl.store(dstart + bh * (K * V) + tile, state, mask=inside)


def _options(k: Tensor, heads: int, value_dim: int) -> tuple[tuple[int, int], dict]:
    """The grid and the kernels' constants: columns of the state narrow enough to give a large GPU enough programs."""
    batch, _, length, _, key_dim = k.shape
    half = k.dtype != torch.float32
    width = max(16, triton.next_power_of_2(key_dim))
    columns = min(32 if half else 16, max(16, triton.next_power_of_2(value_dim)))
    return (triton.cdiv(value_dim, columns), batch * heads), {
        "K": key_dim, "V": value_dim, "C": length, "BK": width, "BV": columns,
        "PRECISION": None if half else "tf32x3", "num_warps": 4, "num_stages": 2 if half else 1,
        "enable_fp_fusion": True,
    }


def scan(
    solve: Tensor, beta: Tensor, v: Tensor, k: Tensor, from_start: Tensor, to_end: Tensor, whole: Tensor, start: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """See :func:`surgery.kernels.delta.states.delta_states`; C a power of two from 16, K at most its ``MAX_KEY``."""
    (k, stride_k), (v, stride_v) = token_stride(k), token_stride(v)
    solve, beta, *gates, start = _contiguous(solve, beta, from_start, to_end, whole, start)
    batch, chunks, length, groups, key_dim = k.shape
    heads, value_dim = v.shape[3:]
    states = torch.empty(batch, chunks, heads, key_dim, value_dim, dtype=k.dtype, device=k.device)
    corrections = torch.empty(batch, chunks, heads, length, value_dim, dtype=k.dtype, device=k.device)
    final = torch.empty(start.shape, dtype=start.dtype, device=start.device)
    grid, options = _options(k, heads, value_dim)
    _scan_kernel[grid](
        solve, beta, v, k, *gates, start, states, corrections, final, stride_k, stride_v, chunks, heads, groups,
        **options,
    )
    return states, corrections, final


def adjoint(
    solve: Tensor, beta: Tensor, dcorrections: Tensor, k: Tensor, from_start: Tensor, to_end: Tensor, whole: Tensor,
    dmet: Tensor, dfinal: Tensor, *, totals: bool = True,
) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
    """The adjoints of the states at the chunks' ends, of the corrections (``totals``), the latter times solve^T, and
    of the start."""
    k, stride_k = token_stride(k)
    solve, beta, dcorrections, *gates, dmet, dfinal = _contiguous(
        solve, beta, dcorrections, from_start, to_end, whole, dmet, dfinal
    )
    _, chunks, heads, _, value_dim = dcorrections.shape
    states = torch.empty(dmet.shape, dtype=k.dtype, device=k.device)
    adjoints = torch.empty(dcorrections.shape, dtype=k.dtype, device=k.device)
    of_corrections = torch.empty_like(adjoints) if totals else None
    dstart = torch.empty(dfinal.shape, dtype=dfinal.dtype, device=dfinal.device)
    grid, options = _options(k, heads, value_dim)
    _adjoint_kernel[grid](
        solve, beta, dcorrections, k, *gates, dmet, dfinal, states, of_corrections, adjoints, dstart, stride_k, chunks,
        heads, k.shape[3], TOTALS=totals, **options,
    )
    return states, of_corrections, adjoints, dstart


def _contiguous(*tensors: Tensor) -> tuple[Tensor, ...]:
    return tuple(tensor.contiguous() for tensor in tensors)
