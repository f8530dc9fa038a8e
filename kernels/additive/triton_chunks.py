"""The additive rule inside its chunks in Triton, half precision: outputs, and the gradients of everything.

One program takes one chunk and a block of the heads that share keys: what does not depend on the head, the overlaps of
queries and keys, is made once, and the [C, C] matrices of a head never leave the program. [t, s] matrices have the
token that reads in rows, the token written in columns.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

# the widest keys and values of which a program holds all at once
MAX_KEY, MAX_VALUE = 128, 128
# enough programs to fill a large GPU
PROGRAMS = 512


@triton.jit
def _tile(pointer, rows, stride, columns, width):
    return tl.load(pointer + rows[:, None] * stride + columns[None, :], mask=(columns < width)[None, :], other=0.0)


@triton.jit
def _state(pointer, rows, columns, K, V):
    inside = (rows < V)[:, None] & (columns < K)[None, :]
    return tl.load(pointer + rows[:, None] * K + columns[None, :], mask=inside, other=0.0)


@triton.jit(do_not_specialize=["H", "G"])
def _output_kernel(
    q, k, v, met, total, o, H, G, HEADS, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr,
    BV: tl.constexpr, PRECISION: tl.constexpr,
):
    n = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * HEADS
    group = first // (H // G)
    tokens = tl.arange(0, C)
    keys = tl.arange(0, BK)
    columns = tl.arange(0, BV)
    at = n * C + tokens
    qq = _tile(q, at * G + group, K, keys, K)
    kk = _tile(k, at * G + group, K, keys, K)
    overlaps = tl.dot(qq, tl.trans(kk), input_precision=PRECISION)
    lower = tokens[:, None] >= tokens[None, :]
    for h in range(first, first + HEADS):
        log = tl.load(total + at * H + h)
        between = (log[:, None] - log[None, :]).to(tl.float32)
        scores = tl.where(lower, tl.exp(tl.minimum(between, 0.0)), 0.0) * overlaps
        vv = _tile(v, at * H + h, V, columns, V)
        memory = _state(met + (n * H + h) * (V * K), columns, keys, K, V)
        out = tl.dot(qq, tl.trans(memory), input_precision=PRECISION) * tl.exp(log.to(tl.float32))[:, None]
        out = tl.dot(scores.to(vv.dtype), vv, out, input_precision=PRECISION)
        tl.store(
            o + (at * H + h)[:, None] * V + columns[None, :], out.to(o.dtype.element_ty), mask=(columns < V)[None, :]
        )


@triton.jit(do_not_specialize=["H", "G"])
def _gradients_kernel(
    q, k, v, do, met, left, total, dq, dk, dv, dsteps, H, G, HEADS, K: tl.constexpr, V: tl.constexpr,
    C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, PRECISION: tl.constexpr,
):
    n = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * HEADS
    group = first // (H // G)
    part = (first % (H // G)) // HEADS
    tokens = tl.arange(0, C)
    keys = tl.arange(0, BK)
    columns = tl.arange(0, BV)
    at = n * C + tokens
    qq = _tile(q, at * G + group, K, keys, K)
    kk = _tile(k, at * G + group, K, keys, K)
    low = qq.dtype
    overlaps = tl.dot(qq, tl.trans(kk), input_precision=PRECISION)
    row = tokens[:, None]
    column = tokens[None, :]
    doverlaps = tl.zeros((C, C), tl.float32)
    dqq = tl.zeros((C, BK), tl.float32)
    dkk = tl.zeros((C, BK), tl.float32)
    for h in range(first, first + HEADS):
        log = tl.load(total + at * H + h)
        last = tl.load(total + (n * C + (C - 1)) * H + h)
        since = tl.exp(log.to(tl.float32))
        to_end = tl.exp((last - log).to(tl.float32))
        between = (log[:, None] - log[None, :]).to(tl.float32)
        within = tl.where(row >= column, tl.exp(tl.minimum(between, 0.0)), 0.0)
        vv = _tile(v, at * H + h, V, columns, V)
        dd = _tile(do, at * H + h, V, columns, V)
        memory = _state(met + (n * H + h) * (V * K), columns, keys, K, V)
        adjoint = _state(left + (n * H + h) * (V * K), columns, keys, K, V)

        weighted = tl.dot(dd, tl.trans(vv), input_precision=PRECISION) * within
        doverlaps += weighted
        pairs = tl.where(row > column, weighted * overlaps, 0.0)
        scores = (within * overlaps).to(low)
        dvv = tl.dot(kk, tl.trans(adjoint), input_precision=PRECISION) * to_end[:, None]
        dvv = tl.dot(tl.trans(scores), dd, dvv, input_precision=PRECISION)
        tl.store(
            dv + (at * H + h)[:, None] * V + columns[None, :], dvv.to(dv.dtype.element_ty), mask=(columns < V)[None, :]
        )
        pulled = since[:, None] * tl.dot(dd, memory, input_precision=PRECISION)
        pushed = to_end[:, None] * tl.dot(vv, adjoint, input_precision=PRECISION)
        dqq += pulled
        dkk += pushed

        # a step's gradient is that of every product it stands in: pairs with s before it and t from it on, reads from
        # it on, writes before it, and the whole chunk
        reads = tl.sum(pairs, 1) + tl.sum(pulled * qq.to(tl.float32), 1)
        written = tl.sum(pairs, 0)
        carried = tl.sum(pushed * kk.to(tl.float32), 1)
        product = memory.to(tl.float32) * adjoint.to(tl.float32)
        through = tl.exp(last.to(tl.float32)) * tl.sum(tl.sum(product, 1), 0)
        step = tl.sum(tl.where(row >= column, reads[:, None] - written[:, None], carried[:, None]), 0) + through
        tl.store(dsteps + at * H + h, step)
    low_overlaps = doverlaps.to(low)
    dqq = tl.dot(low_overlaps, kk, dqq, input_precision=PRECISION)
    dkk = tl.dot(tl.trans(low_overlaps), qq, dkk, input_precision=PRECISION)
    size = tl.num_programs(0).to(tl.int64) * (C * G * K)
    place = part * size + (at * G + group)[:, None] * K + keys[None, :]
    tl.store(dq + place, dqq, mask=(keys < K)[None, :])
    tl.store(dk + place, dkk, mask=(keys < K)[None, :])


def _heads(chunks: int, heads: int, groups: int) -> int:
    """Heads a program: as many of a group as leave enough programs."""
    shared = heads // groups
    sizes = [size for size in range(1, shared + 1) if shared % size == 0 and chunks * heads // size >= PROGRAMS]
    return max(sizes, default=1)


def _constants(k: Tensor, v: Tensor) -> dict:
    key_dim, value_dim = k.shape[-1], v.shape[-1]
    return {
        "K": key_dim, "V": value_dim, "C": k.shape[2], "BK": max(16, triton.next_power_of_2(key_dim)),
        "BV": max(16, triton.next_power_of_2(value_dim)), "PRECISION": "ieee" if k.dtype == torch.float32 else None,
        "enable_fp_fusion": True,
    }


def output(q: Tensor, k: Tensor, v: Tensor, met: Tensor, total: Tensor) -> Tensor:
    """o [B, N, C, H, V] from q, k [B, N, C, G, K], v, the states met [B, N, H, V, K] and the sums of the log decays
    from a chunk's start, ``total`` [B, N, C, H] in float64. All contiguous."""
    batch, chunks, _, groups, _ = k.shape
    heads = v.shape[3]
    o = torch.empty_like(v)
    block = _heads(batch * chunks, heads, groups)
    _output_kernel[(batch * chunks, heads // block)](
        q, k, v, met, total, o, heads, groups, block, **_constants(k, v), num_warps=4, num_stages=2
    )
    return o


def gradients(
    q: Tensor, k: Tensor, v: Tensor, do: Tensor, met: Tensor, left: Tensor, total: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients of q, k, v and, in float32, of the log decays [B, N, C, H], from those of the outputs and of the
    states that the chunks leave [B, N, H, V, K]. All contiguous."""
    batch, chunks, _, groups, _ = k.shape
    heads = v.shape[3]
    block = _heads(batch * chunks, heads, groups)
    parts = heads // groups // block
    dq, dk = (torch.empty(parts, *k.shape, dtype=torch.float32, device=k.device) for _ in range(2))
    dv = torch.empty_like(v)
    dsteps = torch.empty(total.shape, dtype=torch.float32, device=k.device)
    _gradients_kernel[(batch * chunks, heads // block)](
        q, k, v, do, met, left, total, dq, dk, dv, dsteps, heads, groups, block, **_constants(k, v), num_warps=8,
        num_stages=1,
    )
    return dq.sum(0).to(q.dtype), dk.sum(0).to(k.dtype), dv, dsteps
