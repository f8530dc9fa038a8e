"""The delta rule inside its chunks in Triton, half precision: the system of a chunk, outputs, and all gradients.

Programs take one chunk of one head, most of them a block of columns of values or keys too. [t, s] matrices have the
token that reads in rows, the token that corrects in columns.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..chunks import token_stride
from . import triton_states


@triton.jit
def _tile(pointer, rows, stride, columns, width):
    return tl.load(pointer + rows[:, None] * stride + columns[None, :], mask=(columns < width)[None, :], other=0.0)


@triton.jit
def _state(pointer, keys, columns, K, V):
    inside = (keys < K)[:, None] & (columns < V)[None, :]
    return tl.load(pointer + keys[:, None] * V + columns[None, :], mask=inside, other=0.0)


@triton.jit
def _within(total, tokens):
    """[t, s], from just after s to t, 0 where s > t; the logarithms are float64 sums from the chunk's start."""
    log = tl.load(total + tokens)
    high = log.to(tl.float32)
    low = (log - high.to(tl.float64)).to(tl.float32)
    between = (high[:, None] - high[None, :]) + (low[:, None] - low[None, :])
    return tl.where(tokens[:, None] >= tokens[None, :], tl.exp(tl.minimum(between, 0.0)), 0.0)


@triton.jit
def _place(H, G):
    """This program's chunk, its head there and among all, and its key head."""
    here = tl.program_id(0).to(tl.int64)
    h = tl.program_id(0) % H
    return here // H, h, here, h // (H // G)


@triton.jit(do_not_specialize=["H", "G"])
def _solve_kernel(
    k, beta, total, solve, stride_k, H, G, K: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, LEVELS: tl.constexpr
):
    """P, from the inverses of the diagonal blocks of b tokens, merged two by two: each pair's lower left block is
    -inverse lower inverse, in float32's precision."""
    n, _, here, group = _place(H, G)
    tokens = tl.arange(0, C)
    kk = _tile(k + group * K, n * C + tokens, stride_k, tl.arange(0, BK), K)
    row, column = tokens[:, None], tokens[None, :]
    step = tl.load(beta + here * C + tokens)
    lower = tl.dot(kk, tl.trans(kk)) * _within(total + here * C, tokens) * step[:, None]
    inverse = tl.where(row == column, 1.0, 0.0) - tl.where((row >> 1 == column >> 1) & (row > column), lower, 0.0)
    for level in tl.static_range(1, LEVELS):
        corner = (row >> (level + 1) == column >> (level + 1)) & (row >> level > column >> level)
        half = tl.dot(inverse, tl.where(corner, lower, 0.0), input_precision="tf32x3")
        inverse -= tl.dot(half, inverse, input_precision="tf32x3")
    place = solve + here * (C * C) + row * C + column
    tl.store(place, inverse.to(solve.dtype.element_ty))


@triton.jit(do_not_specialize=["H", "G"])
def _output_kernel(
    q, k, met, corrections, total, from_start, o, stride_k, H, G, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr,
):
    n, h, here, group = _place(H, G)
    tokens = tl.arange(0, C)
    keys = tl.arange(0, BK)
    columns = tl.program_id(1) * BV + tl.arange(0, BV)
    at = n * C + tokens
    qq = _tile(q + group * K, at, stride_k, keys, K)
    kk = _tile(k + group * K, at, stride_k, keys, K)
    scores = tl.dot(qq, tl.trans(kk)) * _within(total + here * C, tokens)
    memory = _state(met + here * (K * V), keys, columns, K, V)
    corrected = _tile(corrections + here * (C * V), tokens, V, columns, V)
    out = tl.dot(qq, memory) * tl.load(from_start + here * C + tokens)[:, None]
    out = tl.dot(scores.to(corrected.dtype), corrected, out)
    place = o + (at * H + h)[:, None] * V + columns[None, :]
    tl.store(place, out.to(o.dtype.element_ty), mask=(columns < V)[None, :])


@triton.jit(do_not_specialize=["H", "G"])
def _reads_kernel(
    q, k, do, total, from_start, dcorrections, dmet, stride_k, H, G, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr,
):
    """The outputs' part in the gradients of the corrections and of the states met."""
    n, h, here, group = _place(H, G)
    tokens = tl.arange(0, C)
    keys = tl.arange(0, BK)
    columns = tl.program_id(1) * BV + tl.arange(0, BV)
    at = n * C + tokens
    qq = _tile(q + group * K, at, stride_k, keys, K)
    kk = _tile(k + group * K, at, stride_k, keys, K)
    dd = _tile(do, at * H + h, V, columns, V)
    scores = tl.dot(qq, tl.trans(kk)) * _within(total + here * C, tokens)
    out = tl.dot(tl.trans(scores.to(dd.dtype)), dd)
    place = dcorrections + (here * C + tokens)[:, None] * V + columns[None, :]
    tl.store(place, out.to(dcorrections.dtype.element_ty), mask=(columns < V)[None, :])
    reads = dd.to(tl.float32) * tl.load(from_start + here * C + tokens)[:, None]
    out = tl.dot(tl.trans(qq), reads.to(dd.dtype))
    place = dmet + here * (K * V) + keys[:, None] * V + columns[None, :]
    tl.store(place, out.to(dmet.dtype.element_ty), mask=(keys < K)[:, None] & (columns < V)[None, :])


@triton.jit(do_not_specialize=["H", "G"])
def _pairs_kernel(
    q, k, v, beta, do, met, left, corrections, adjoints, total, from_start, to_end, dv, dbeta, dscores, dlower, read,
    written, carried, recalled, through, stride_k, stride_v, H, G, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr,
):
    """The gradients of v, of beta, and of the products of keys and queries (``dscores``) and of keys (``dlower``), and
    all sums by token. ``adjoints`` are P^T times those of the corrections."""
    n, h, here, group = _place(H, G)
    tokens = tl.arange(0, C)
    keys = tl.arange(0, BK)
    at = n * C + tokens
    qq = _tile(q + group * K, at, stride_k, keys, K)
    kk = _tile(k + group * K, at, stride_k, keys, K)
    step = tl.load(beta + here * C + tokens)
    since = tl.load(from_start + here * C + tokens)
    until = tl.load(to_end + here * C + tokens)
    of_scores = tl.zeros((C, C), tl.float32)
    of_lower = tl.zeros((C, C), tl.float32)
    of_step = tl.zeros((C,), tl.float32)
    of_start = tl.zeros((C,), tl.float32)
    of_end = tl.zeros((C,), tl.float32)
    of_state = 0.0
    for first in range(0, V, BV):
        columns = first + tl.arange(0, BV)
        dd = _tile(do, at * H + h, V, columns, V)
        vv = _tile(v + h * V, at, stride_v, columns, V).to(tl.float32)
        cc = _tile(corrections + here * (C * V), tokens, V, columns, V)
        uu = _tile(adjoints + here * (C * V), tokens, V, columns, V)
        memory = _state(met + here * (K * V), keys, columns, K, V)
        adjoint = _state(left + here * (K * V), keys, columns, K, V)
        of_state += tl.sum(tl.sum(memory.to(tl.float32) * adjoint.to(tl.float32), 1), 0)
        of_scores = tl.dot(dd, tl.trans(cc), of_scores)
        of_lower = tl.dot(uu, tl.trans(cc), of_lower)
        u = uu.to(tl.float32)
        known = tl.dot(kk, memory) * since[:, None]
        of_step += tl.sum(u * (vv - known), 1)
        of_start -= tl.sum(u * known, 1) * step
        of_start += tl.sum(tl.dot(qq, memory) * dd.to(tl.float32), 1) * since
        of_end += tl.sum(tl.dot(kk, adjoint) * cc.to(tl.float32), 1) * until
        place = dv + (at * H + h)[:, None] * V + columns[None, :]
        tl.store(place, (u * step[:, None]).to(dv.dtype.element_ty), mask=(columns < V)[None, :])
    within = _within(total + here * C, tokens)
    strict = tokens[:, None] > tokens[None, :]
    square = here * (C * C) + tokens[:, None] * C + tokens[None, :]
    weighted = of_scores * within
    tl.store(dscores + square, weighted.to(dscores.dtype.element_ty))
    pairs = tl.where(strict, weighted * tl.dot(qq, tl.trans(kk)), 0.0)
    weighted = tl.where(strict, -of_lower * within, 0.0)
    alike = weighted * tl.dot(kk, tl.trans(kk))
    of_step += tl.sum(alike, 1)
    pairs += alike * step[:, None]
    tl.store(dlower + square, (weighted * step[:, None]).to(dlower.dtype.element_ty))
    tl.store(dbeta + here * C + tokens, of_step)
    tl.store(read + here * C + tokens, tl.sum(pairs, 1))
    tl.store(written + here * C + tokens, tl.sum(pairs, 0))
    tl.store(carried + here * C + tokens, of_end)
    tl.store(recalled + here * C + tokens, of_start)
    tl.store(through + here, of_state)


@triton.jit(do_not_specialize=["H", "G"])
def _keys_kernel(
    q, k, beta, do, met, left, corrections, adjoints, from_start, to_end, dscores, dlower, dq, dk, stride_k, H, G,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
):
    """The gradients of q and k, for each value head."""
    n, h, here, group = _place(H, G)
    tokens = tl.arange(0, C)
    keys = tl.program_id(1) * BK + tl.arange(0, BK)
    at = n * C + tokens
    step = tl.load(beta + here * C + tokens)
    since = tl.load(from_start + here * C + tokens)[:, None]
    until = tl.load(to_end + here * C + tokens)[:, None]
    of_q = tl.zeros((C, BK), tl.float32)
    of_k = tl.zeros((C, BK), tl.float32)
    for first in range(0, V, BV):
        columns = first + tl.arange(0, BV)
        dd = _tile(do, at * H + h, V, columns, V)
        cc = _tile(corrections + here * (C * V), tokens, V, columns, V)
        uu = _tile(adjoints + here * (C * V), tokens, V, columns, V)
        memory = _state(met + here * (K * V), keys, columns, K, V)
        adjoint = _state(left + here * (K * V), keys, columns, K, V)
        of_q = tl.dot((dd.to(tl.float32) * since).to(dd.dtype), tl.trans(memory), of_q)
        of_k = tl.dot((cc.to(tl.float32) * until).to(cc.dtype), tl.trans(adjoint), of_k)
        of_k = tl.dot((uu.to(tl.float32) * (-since * step[:, None])).to(uu.dtype), tl.trans(memory), of_k)
    qq = _tile(q + group * K, at, stride_k, keys, K)
    kk = _tile(k + group * K, at, stride_k, keys, K)
    square = here * (C * C) + tokens[:, None] * C + tokens[None, :]
    transposed = here * (C * C) + tokens[None, :] * C + tokens[:, None]
    of_q = tl.dot(tl.load(dscores + square), kk, of_q)
    of_k = tl.dot(tl.load(dscores + transposed), qq, of_k)
    both = tl.load(dlower + square).to(tl.float32) + tl.load(dlower + transposed).to(tl.float32)
    of_k = tl.dot(both.to(kk.dtype), kk, of_k)
    place = (at * H + h)[:, None] * K + keys[None, :]
    tl.store(dq + place, of_q.to(dq.dtype.element_ty), mask=(keys < K)[None, :])
    tl.store(dk + place, of_k.to(dk.dtype.element_ty), mask=(keys < K)[None, :])


def _block(size: int, most: int = 256) -> int:
    return min(most, max(16, triton.next_power_of_2(size)))


def _inputs(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor, int, int]:
    """q and k with one stride from token to token, v with its own, and both strides."""
    (q, stride_k), (k, other), (v, stride_v) = token_stride(q), token_stride(k), token_stride(v)
    if stride_k != other:
        q, k, stride_k = q.contiguous(), k.contiguous(), k.shape[3] * k.shape[4]
    return q, k, v, stride_k, stride_v


def forward(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, total: Tensor, from_start: Tensor, to_end: Tensor, whole: Tensor,
    start: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """See :mod:`surgery.kernels.delta.inside`."""
    q, k, v, stride_k, _ = _inputs(q, k, v)
    beta, total, from_start = beta.contiguous(), total.contiguous(), from_start.contiguous()
    batch, chunks, length, groups, key_dim = k.shape
    heads, value_dim = v.shape[3:]
    programs = batch * chunks * heads
    solve = torch.empty(batch, chunks, heads, length, length, dtype=k.dtype, device=k.device)
    sizes = {"K": key_dim, "C": length, "BK": _block(key_dim), "enable_fp_fusion": True}
    _solve_kernel[(programs,)](
        k, beta, total, solve, stride_k, heads, groups, LEVELS=length.bit_length() - 1, num_warps=4, **sizes
    )
    met, corrections, final = triton_states.scan(solve, beta, v, k, from_start, to_end, whole, start)
    o = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    width = _block(value_dim, 64)
    _output_kernel[(programs, triton.cdiv(value_dim, width))](
        q, k, met, corrections, total, from_start, o, stride_k, heads, groups, V=value_dim, BV=width, num_warps=4,
        num_stages=1, **sizes,
    )
    return o, final, solve, met, corrections


def backward(
    do: Tensor, dfinal: Tensor, q: Tensor, k: Tensor, v: Tensor, beta: Tensor, total: Tensor, from_start: Tensor,
    to_end: Tensor, whole: Tensor, solve: Tensor, met: Tensor, corrections: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """See :mod:`surgery.kernels.delta.inside`."""
    q, k, v, stride_k, stride_v = _inputs(q, k, v)
    tensors = (do, beta, total, from_start, to_end, solve, met, corrections)
    do, beta, total, from_start, to_end, solve, met, corrections = (x.contiguous() for x in tensors)
    batch, chunks, length, groups, key_dim = k.shape
    heads, value_dim = v.shape[3:]
    programs = batch * chunks * heads
    sizes = {"V": value_dim, "C": length, "K": key_dim, "enable_fp_fusion": True}
    block, narrow = _block(key_dim), _block(value_dim, 64)
    dcorrections = torch.empty(corrections.shape, dtype=k.dtype, device=k.device)
    dmet = torch.empty(met.shape, dtype=k.dtype, device=k.device)
    _reads_kernel[(programs, triton.cdiv(value_dim, narrow))](
        q, k, do, total, from_start, dcorrections, dmet, stride_k, heads, groups, BK=block, BV=narrow, num_warps=8,
        num_stages=1, **sizes,
    )
    left, _, adjoints, dstart = triton_states.adjoint(
        solve, beta, dcorrections, k, from_start, to_end, whole, dmet, dfinal, totals=False
    )
    dv = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    dbeta, read, written, carried, recalled = (
        torch.empty(beta.shape, dtype=torch.float32, device=k.device) for _ in range(5)
    )
    through = torch.empty(batch, chunks, heads, dtype=torch.float32, device=k.device)
    dscores, dlower = (torch.empty(solve.shape, dtype=k.dtype, device=k.device) for _ in range(2))
    _pairs_kernel[(programs,)](
        q, k, v, beta, do, met, left, corrections, adjoints, total, from_start, to_end, dv, dbeta, dscores, dlower,
        read, written, carried, recalled, through, stride_k, stride_v, heads, groups, BK=block,
        BV=_block(value_dim, 32), num_warps=8, num_stages=1, **sizes,
    )
    # summed over the heads that share keys
    like = {"dtype": k.dtype if heads == groups else torch.float32, "device": k.device}
    dq, dk = (torch.empty(batch, chunks, length, heads, key_dim, **like) for _ in range(2))
    block = _block(key_dim, 64)
    _keys_kernel[(programs, triton.cdiv(key_dim, block))](
        q, k, beta, do, met, left, corrections, adjoints, from_start, to_end, dscores, dlower, dq, dk, stride_k, heads,
        groups, BK=block, BV=narrow, num_warps=4, num_stages=2, **sizes,
    )
    if heads != groups:
        dq, dk = (x.unflatten(3, (groups, -1)).sum(4).to(k.dtype) for x in (dq, dk))
    return dq, dk, dv, dbeta, read, written, carried, recalled, through, dstart
