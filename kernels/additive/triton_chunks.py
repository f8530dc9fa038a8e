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
    q, k, v, do, met, left, total, dkeys, dv, dsteps, H, G, HEADS, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, WRITES: tl.constexpr, PRECISION: tl.constexpr,
):
    """The gradients of k and v, and of the decays through what is written; or of q, and through what is read. Both at
    once would need more registers than there are."""
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
    overlaps = tl.dot(qq, tl.trans(kk), input_precision=PRECISION)
    row = tokens[:, None]
    column = tokens[None, :]
    doverlaps = tl.zeros((C, C), tl.float32)
    gradient = tl.zeros((C, BK), tl.float32)
    for h in range(first, first + HEADS):
        log = tl.load(total + at * H + h)
        last = tl.load(total + (n * C + (C - 1)) * H + h)
        between = (log[:, None] - log[None, :]).to(tl.float32)
        within = tl.where(row >= column, tl.exp(tl.minimum(between, 0.0)), 0.0)
        vv = _tile(v, at * H + h, V, columns, V)
        dd = _tile(do, at * H + h, V, columns, V)
        adjoint = _state(left + (n * H + h) * (V * K), columns, keys, K, V)
        weighted = tl.dot(dd, tl.trans(vv), input_precision=PRECISION) * within
        doverlaps += weighted
        # a step's gradient is that of every product it stands in: pairs with s before it and t from it on, reads from
        # it on, writes before it, and the whole chunk
        pairs = tl.where(row > column, weighted * overlaps, 0.0)
        if WRITES:
            written = tl.sum(pairs, 0)
            to_end = tl.exp((last - log).to(tl.float32))[:, None]
            kept = tl.dot(kk, tl.trans(adjoint), input_precision=PRECISION) * to_end
            carried = tl.sum(kept * vv.to(tl.float32), 1)
            scores = (within * overlaps).to(dd.dtype)
            dvv = tl.dot(tl.trans(scores), dd, kept, input_precision=PRECISION)
            place = dv + (at * H + h)[:, None] * V + columns[None, :]
            tl.store(place, dvv.to(dv.dtype.element_ty), mask=(columns < V)[None, :])
            gradient += to_end * tl.dot(vv, adjoint, input_precision=PRECISION)
            step = tl.sum(tl.where(row >= column, -written[:, None], carried[:, None]), 0)
        else:
            memory = _state(met + (n * H + h) * (V * K), columns, keys, K, V)
            through = tl.sum(tl.sum(memory.to(tl.float32) * adjoint.to(tl.float32), 1), 0)
            pulled = tl.exp(log.to(tl.float32))[:, None] * tl.dot(dd, memory, input_precision=PRECISION)
            gradient += pulled
            reads = tl.sum(pairs, 1) + tl.sum(pulled * qq.to(tl.float32), 1)
            step = tl.sum(tl.where(row >= column, reads[:, None], 0.0), 0) + tl.exp(last.to(tl.float32)) * through
        tl.store(dsteps + at * H + h, step)
    low = doverlaps.to(qq.dtype)
    if WRITES:
        gradient = tl.dot(tl.trans(low), qq, gradient, input_precision=PRECISION)
    else:
        gradient = tl.dot(low, kk, gradient, input_precision=PRECISION)
    size = tl.num_programs(0).to(tl.int64) * (C * G * K)
    place = dkeys + part * size + (at * G + group)[:, None] * K + keys[None, :]
    tl.store(place, gradient, mask=(keys < K)[None, :])


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
    """The gradients of q, k, v and of the log decays [B, N, C, H], from those of the outputs and of the states that the
    chunks leave [B, N, H, V, K]. All contiguous."""
    batch, chunks, _, groups, _ = k.shape
    heads = v.shape[3]
    block = _heads(batch * chunks, heads, groups)
    parts = heads // groups // block
    dq, dk = (torch.empty(parts, *k.shape, dtype=torch.float32, device=k.device) for _ in range(2))
    dv = torch.empty_like(v)
    read, written = (torch.empty(total.shape, dtype=torch.float32, device=k.device) for _ in range(2))
    for writes, dkeys, dsteps in ((True, dk, written), (False, dq, read)):
        _gradients_kernel[(batch * chunks, heads // block)](
            q, k, v, do, met, left, total, dkeys, dv, dsteps, heads, groups, block, **_constants(k, v), WRITES=writes,
            num_warps=8, num_stages=1,
        )
    return dq.sum(0).to(q.dtype), dk.sum(0).to(k.dtype), dv, read.double() + written
