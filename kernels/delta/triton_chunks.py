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
from .blocks import KEY_BLOCK


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
def _place(H, G, BLOCKS: tl.constexpr):
    """This program's chunk, its head there and among all, its key head, and its block of columns; those of one chunk
    follow each other, so that the second-level cache gives the second what the first has read."""
    here = (tl.program_id(0) // BLOCKS).to(tl.int64)
    h = (tl.program_id(0) // BLOCKS) % H
    return here // H, h, here, h // (H // G), tl.program_id(0) % BLOCKS


@triton.jit
def _pairs(q, k, at, stride, K: tl.constexpr, C: tl.constexpr, BK: tl.constexpr):
    """The products [C, C] of queries and of keys with keys."""
    asked = tl.zeros((C, C), tl.float32)
    alike = tl.zeros((C, C), tl.float32)
    for first in range(0, K, BK):
        keys = first + tl.arange(0, BK)
        kk = _tile(k, at, stride, keys, K)
        turned = tl.trans(kk)
        asked = tl.dot(_tile(q, at, stride, keys, K), turned, asked)
        alike = tl.dot(kk, turned, alike)
    return asked, alike


@triton.jit(do_not_specialize=["H", "G"])
def _pairs_kernel(
    q, k, beta, total, solve, scores, stride_k, H, G, K: tl.constexpr, C: tl.constexpr, BK: tl.constexpr,
    LEVELS: tl.constexpr,
):
    """What pairs of tokens are to each other: the queries' weights, and P, from the inverses of the diagonal blocks of
    b tokens, merged two by two: each pair's lower left block is -inverse lower inverse, in float32's precision."""
    n, _, here, group, _ = _place(H, G, 1)
    tokens = tl.arange(0, C)
    asked, alike = _pairs(q + group * K, k + group * K, n * C + tokens, stride_k, K, C, BK)
    within = _within(total + here * C, tokens)
    row, column = tokens[:, None], tokens[None, :]
    place = here * (C * C) + row * C + column
    tl.store(scores + place, (asked * within).to(scores.dtype.element_ty))
    lower = alike * within * tl.load(beta + here * C + tokens)[:, None]
    inverse = tl.where(row == column, 1.0, 0.0) - tl.where((row >> 1 == column >> 1) & (row > column), lower, 0.0)
    for level in tl.static_range(1, LEVELS):
        corner = (row >> (level + 1) == column >> (level + 1)) & (row >> level > column >> level)
        half = tl.dot(inverse, tl.where(corner, lower, 0.0), input_precision="tf32x3")
        inverse -= tl.dot(half, inverse, input_precision="tf32x3")
    tl.store(solve + place, inverse.to(solve.dtype.element_ty))


@triton.jit(do_not_specialize=["H", "G"])
def _output_kernel(
    q, met, corrections, scores, from_start, o, stride_k, H, G, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr,
):
    n, h, here, group, block = _place(H, G, (V + BV - 1) // BV)
    tokens = tl.arange(0, C)
    columns = block * BV + tl.arange(0, BV)
    at = n * C + tokens
    out = tl.zeros((C, BV), tl.float32)
    for first in range(0, K, BK):
        keys = first + tl.arange(0, BK)
        qq = _tile(q + group * K, at, stride_k, keys, K)
        out = tl.dot(qq, _state(met + here * (K * V), keys, columns, K, V), out)
    out *= tl.load(from_start + here * C + tokens)[:, None]
    corrected = _tile(corrections + here * (C * V), tokens, V, columns, V)
    out = tl.dot(_tile(scores + here * (C * C), tokens, C, tokens, C), corrected, out)
    place = o + (at * H + h)[:, None] * V + columns[None, :]
    tl.store(place, out.to(o.dtype.element_ty), mask=(columns < V)[None, :])


@triton.jit(do_not_specialize=["H", "G"])
def _reads_kernel(
    q, do, scores, from_start, dcorrections, dmet, stride_k, H, G, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr,
):
    """The outputs' part in the gradients of the corrections and of the states met."""
    n, h, here, group, block = _place(H, G, (V + BV - 1) // BV)
    tokens = tl.arange(0, C)
    columns = block * BV + tl.arange(0, BV)
    at = n * C + tokens
    dd = _tile(do, at * H + h, V, columns, V)
    corrected = tl.dot(tl.trans(_tile(scores + here * (C * C), tokens, C, tokens, C)), dd)
    rows = (here * C + tokens)[:, None] * V + columns[None, :]
    tl.store(dcorrections + rows, corrected.to(dcorrections.dtype.element_ty), mask=(columns < V)[None, :])
    reads = (dd.to(tl.float32) * tl.load(from_start + here * C + tokens)[:, None]).to(dd.dtype)
    for first in range(0, K, BK):
        keys = first + tl.arange(0, BK)
        read = tl.dot(tl.trans(_tile(q + group * K, at, stride_k, keys, K)), reads)
        tile = here * (K * V) + keys[:, None] * V + columns[None, :]
        tl.store(dmet + tile, read.to(dmet.dtype.element_ty), mask=(keys < K)[:, None] & (columns < V)[None, :])


@triton.jit(do_not_specialize=["H", "G"])
def _pairs_gradient_kernel(
    q, k, v, beta, do, corrections, adjoints, total, dv, dbeta, dscores, dlower, read, written, stride_k, stride_v, H,
    G, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
):
    """The gradients of v, of the products of keys and queries (``dscores``) and of keys (``dlower``), and their sums by
    token, ``dbeta`` without what the state says of the values. ``adjoints`` are P^T times those of the corrections."""
    n, h, here, group, _ = _place(H, G, 1)
    tokens = tl.arange(0, C)
    at = n * C + tokens
    step = tl.load(beta + here * C + tokens)
    of_scores = tl.zeros((C, C), tl.float32)
    of_lower = tl.zeros((C, C), tl.float32)
    of_step = tl.zeros((C, BV), tl.float32)
    for first in range(0, V, BV):
        columns = first + tl.arange(0, BV)
        dd = _tile(do, at * H + h, V, columns, V)
        vv = _tile(v + h * V, at, stride_v, columns, V)
        cc = _tile(corrections + here * (C * V), tokens, V, columns, V)
        uu = _tile(adjoints + here * (C * V), tokens, V, columns, V)
        of_scores = tl.dot(dd, tl.trans(cc), of_scores)
        of_lower = tl.dot(uu, tl.trans(cc), of_lower)
        u = uu.to(tl.float32)
        of_step += u * vv.to(tl.float32)
        place = dv + (at * H + h)[:, None] * V + columns[None, :]
        tl.store(place, (u * step[:, None]).to(dv.dtype.element_ty), mask=(columns < V)[None, :])
    asked, alike = _pairs(q + group * K, k + group * K, at, stride_k, K, C, BK)
    within = _within(total + here * C, tokens)
    strict = tokens[:, None] > tokens[None, :]
    square = here * (C * C) + tokens[:, None] * C + tokens[None, :]
    weighted = of_scores * within
    tl.store(dscores + square, weighted.to(dscores.dtype.element_ty))
    pairs = tl.where(strict, weighted * asked, 0.0)
    weighted = tl.where(strict, -of_lower * within, 0.0)
    alike *= weighted
    pairs += alike * step[:, None]
    tl.store(dlower + square, (weighted * step[:, None]).to(dlower.dtype.element_ty))
    tl.store(dbeta + here * C + tokens, tl.sum(of_step, 1) + tl.sum(alike, 1))
    tl.store(read + here * C + tokens, tl.sum(pairs, 1))
    tl.store(written + here * C + tokens, tl.sum(pairs, 0))


@triton.jit(do_not_specialize=["H", "G"])
def _keys_gradient_kernel(
    q, k, beta, do, met, left, corrections, adjoints, from_start, to_end, dscores, dlower, dq, dk, sums, through,
    stride_k, H, G, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
):
    """The gradients of q and k, for each value head, and these keys' part in what a token exchanges with the states:
    in the gradient of beta, and in the sums ``carried`` and ``recalled``. A token's sum over values of q M times do is
    that over keys of q times do M^T, which the gradients need anyway."""
    n, h, here, group, block = _place(H, G, (K + BK - 1) // BK)
    tokens = tl.arange(0, C)
    keys = block * BK + tl.arange(0, BK)
    at = n * C + tokens
    asked = tl.zeros((C, BK), tl.float32)
    kept = tl.zeros((C, BK), tl.float32)
    known = tl.zeros((C, BK), tl.float32)
    # its diagonal is wanted. Not by elementwise products: see ``_stages``
    both = tl.zeros((BK, BK), tl.float32)
    for first in range(0, V, BV):
        columns = first + tl.arange(0, BV)
        memory = _state(met + here * (K * V), keys, columns, K, V)
        adjoint = _state(left + here * (K * V), keys, columns, K, V)
        asked = tl.dot(_tile(do, at * H + h, V, columns, V), tl.trans(memory), asked)
        kept = tl.dot(_tile(corrections + here * (C * V), tokens, V, columns, V), tl.trans(adjoint), kept)
        known = tl.dot(_tile(adjoints + here * (C * V), tokens, V, columns, V), tl.trans(memory), known)
        both = tl.dot(adjoint, tl.trans(memory), both)
    step = tl.load(beta + here * C + tokens)
    since = tl.load(from_start + here * C + tokens)
    asked *= since[:, None]
    kept *= tl.load(to_end + here * C + tokens)[:, None]
    known *= since[:, None]
    qq = _tile(q + group * K, at, stride_k, keys, K)
    kk = _tile(k + group * K, at, stride_k, keys, K)
    queries, own = qq.to(tl.float32), kk.to(tl.float32)
    of_step = -tl.sum(known * own, 1)
    own_keys = tl.arange(0, BK)
    diagonal = tl.where(own_keys[:, None] == own_keys[None, :], 1.0, 0.0)
    programs = (tl.num_programs(0) // ((K + BK - 1) // BK)).to(tl.int64)
    place = sums + (block * 3 * programs + here) * C + tokens
    tl.store(place, of_step)
    tl.store(place + programs * C, tl.sum(kept * own, 1))
    tl.store(place + 2 * programs * C, tl.sum(asked * queries, 1) + of_step * step)
    tl.store(through + block * programs + here, tl.sum(tl.sum(both * diagonal, 1), 0))

    own_scores = _tile(dscores + here * (C * C), tokens, C, tokens, C)
    lower = _tile(dlower + here * (C * C), tokens, C, tokens, C)
    of_q = tl.dot(own_scores, kk, asked)
    of_k = tl.dot(tl.trans(own_scores), qq, kept - known * step[:, None])
    of_k = tl.dot(lower, kk, of_k)
    of_k = tl.dot(tl.trans(lower), kk, of_k)
    place = (at * H + h)[:, None] * K + keys[None, :]
    tl.store(dq + place, of_q.to(dq.dtype.element_ty), mask=(keys < K)[None, :])
    tl.store(dk + place, of_k.to(dk.dtype.element_ty), mask=(keys < K)[None, :])


def _block(size: int, most: int = 64) -> int:
    return min(most, max(16, triton.next_power_of_2(size)))


def _stages(key_block: int, length: int) -> int:
    """Tiles of the keys' gradient that may be on their way together. Two, where all of its products are the tensor
    cores' own, of 64 rows: of a tile that registers and asynchronous products both take, Triton 3.6 keeps one buffer
    too few, and loads the next tile while the tensor cores still read (errors of 1e-2 on an H200)."""
    return 2 if min(key_block, length) >= 64 else 1


def _inputs(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor, int, int]:
    """q and k with one stride from token to token, v with its own, and both strides."""
    (q, stride_k), (k, other), (v, stride_v) = token_stride(q), token_stride(k), token_stride(v)
    if stride_k != other:
        q, k, stride_k = q.contiguous(), k.contiguous(), k.shape[3] * k.shape[4]
    return q, k, v, stride_k, stride_v


def forward(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, total: Tensor, from_start: Tensor, to_end: Tensor, whole: Tensor,
    start: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """See :mod:`surgery.kernels.delta.inside`."""
    q, k, v, stride_k, _ = _inputs(q, k, v)
    beta, total, from_start = beta.contiguous(), total.contiguous(), from_start.contiguous()
    batch, chunks, length, groups, key_dim = k.shape
    heads, value_dim = v.shape[3:]
    programs = batch * chunks * heads
    solve, scores = (
        torch.empty(batch, chunks, heads, length, length, dtype=k.dtype, device=k.device) for _ in range(2)
    )
    sizes = {"K": key_dim, "C": length, "BK": _block(key_dim), "num_warps": 4, "enable_fp_fusion": True}
    _pairs_kernel[(programs,)](
        q, k, beta, total, solve, scores, stride_k, heads, groups, LEVELS=length.bit_length() - 1, num_stages=2, **sizes
    )
    met, corrections, final = triton_states.scan(solve, beta, v, k, from_start, to_end, whole, start)
    o = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    width = _block(value_dim, 128)
    _output_kernel[(programs * triton.cdiv(value_dim, width),)](
        q, met, corrections, scores, from_start, o, stride_k, heads, groups, V=value_dim, BV=width, num_stages=3,
        **sizes,
    )
    return o, final, solve, scores, met, corrections


def backward(
    do: Tensor, dfinal: Tensor, q: Tensor, k: Tensor, v: Tensor, beta: Tensor, total: Tensor, from_start: Tensor,
    to_end: Tensor, whole: Tensor, solve: Tensor, scores: Tensor, met: Tensor, corrections: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """See :mod:`surgery.kernels.delta.inside`."""
    q, k, v, stride_k, stride_v = _inputs(q, k, v)
    tensors = (do, beta, total, from_start, to_end, solve, scores, met, corrections)
    do, beta, total, from_start, to_end, solve, scores, met, corrections = (x.contiguous() for x in tensors)
    batch, chunks, length, groups, key_dim = k.shape
    heads, value_dim = v.shape[3:]
    programs = batch * chunks * heads
    block, width, wide = _block(key_dim, KEY_BLOCK), _block(value_dim), _block(value_dim, 128)
    sizes = {"V": value_dim, "C": length, "K": key_dim, "BK": block, "num_warps": 4, "enable_fp_fusion": True}
    dcorrections = torch.empty(corrections.shape, dtype=k.dtype, device=k.device)
    dmet = torch.empty(met.shape, dtype=k.dtype, device=k.device)
    _reads_kernel[(programs * triton.cdiv(value_dim, wide),)](
        q, do, scores, from_start, dcorrections, dmet, stride_k, heads, groups, BV=wide, num_stages=1, **sizes
    )
    left, _, adjoints, dstart = triton_states.adjoint(
        solve, beta, dcorrections, k, from_start, to_end, whole, dmet, dfinal, totals=False
    )
    dv = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    dbeta, read, written = (torch.empty(beta.shape, dtype=torch.float32, device=k.device) for _ in range(3))
    dscores, dlower = (torch.empty(solve.shape, dtype=k.dtype, device=k.device) for _ in range(2))
    _pairs_gradient_kernel[(programs,)](
        q, k, v, beta, do, corrections, adjoints, total, dv, dbeta, dscores, dlower, read, written, stride_k, stride_v,
        heads, groups, BV=width, num_stages=1, **sizes,
    )
    # summed over the heads that share keys
    like = {"dtype": k.dtype if heads == groups else torch.float32, "device": k.device}
    dq, dk = (torch.empty(batch, chunks, length, heads, key_dim, **like) for _ in range(2))
    parts = triton.cdiv(key_dim, block)
    sums = torch.empty(parts, 3, batch, chunks, heads, length, dtype=torch.float32, device=k.device)
    through = torch.empty(parts, batch, chunks, heads, dtype=torch.float32, device=k.device)
    _keys_gradient_kernel[(programs * parts,)](
        q, k, beta, do, met, left, corrections, adjoints, from_start, to_end, dscores, dlower, dq, dk, sums, through,
        stride_k, heads, groups, BV=width, num_stages=_stages(block, length), **sizes,
    )
    if heads != groups:
        dq, dk = (x.unflatten(3, (groups, -1)).sum(4).to(k.dtype) for x in (dq, dk))
    return dq, dk, dv, dbeta, read, written, sums, through, dstart
