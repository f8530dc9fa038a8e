"""The additive rule inside its chunks in Triton, half precision: outputs, and the gradients of everything.

One program takes one chunk and a block of the heads that share keys: what does not depend on the head, the overlaps of
queries and keys, is made once, and the [C, C] matrices of a head never leave the program.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..chunks import token_stride

# enough programs to fill a large GPU
PROGRAMS = 512


@triton.jit
def _tile(pointer, rows, stride, columns, width):
    return tl.load(pointer + rows[:, None] * stride + columns[None, :], mask=(columns < width)[None, :], other=0.0)


@triton.jit
def _state(pointer, rows, columns, K, V):
    inside = (rows < V)[:, None] & (columns < K)[None, :]
    return tl.load(pointer + rows[:, None] * K + columns[None, :], mask=inside, other=0.0)


@triton.jit
def _logs(total):
    """A float64 logarithm as two float32 numbers: differences of both are as exact as its own, and cheaper."""
    high = total.to(tl.float32)
    return high, (total - high.to(tl.float64)).to(tl.float32)


@triton.jit
def _decay(later, earlier):
    return tl.exp(tl.minimum((later[0] - earlier[0]) + (later[1] - earlier[1]), 0.0))


@triton.jit(do_not_specialize=["H", "G"])
def _output_kernel(
    q, k, v, write, met, total, o, stride_k, stride_v, H, G, HEADS, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, PRECISION: tl.constexpr,
):
    n = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * HEADS
    group = first // (H // G)
    tokens = tl.arange(0, C)
    keys = tl.arange(0, BK)
    columns = tl.arange(0, BV)
    at = n * C + tokens
    qq = _tile(q + group * K, at, stride_k, keys, K)
    kk = _tile(k + group * K, at, stride_k, keys, K)
    overlaps = tl.dot(qq, tl.trans(kk), input_precision=PRECISION)  # [t, s], reading token by token written
    overlaps = tl.where(tokens[:, None] >= tokens[None, :], overlaps, 0.0)
    for h in range(first, first + HEADS):
        high, low = _logs(tl.load(total + at * H + h))
        strength = tl.load(write + at * H + h).to(tl.float32)
        vv = _tile(v + h * V, at, stride_v, columns, V)
        memory = _state(met + (n * H + h) * (V * K), columns, keys, K, V)
        within = _decay((high[:, None], low[:, None]), (high[None, :], low[None, :]))
        scores = within * strength[None, :] * overlaps
        out = tl.dot(qq, tl.trans(memory), input_precision=PRECISION) * tl.exp(high)[:, None]
        out = tl.dot(scores.to(vv.dtype), vv, out, input_precision=PRECISION)
        tl.store(
            o + (at * H + h)[:, None] * V + columns[None, :], out.to(o.dtype.element_ty), mask=(columns < V)[None, :]
        )


@triton.jit(do_not_specialize=["H", "G"])
def _values_kernel(
    q, k, v, write, do, left, total, doverlaps, dv, dwrite, read, written, carried, stride_k, stride_v, H, G, HEADS,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, PRECISION: tl.constexpr,
):
    """The gradients of v, of the write strengths and of the overlaps of keys and queries, and the sums over pairs;
    [s, t] matrices have the token written in rows, the token that reads in columns."""
    n = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * HEADS
    group = first // (H // G)
    tokens = tl.arange(0, C)
    keys = tl.arange(0, BK)
    columns = tl.arange(0, BV)
    at = n * C + tokens
    qq = _tile(q + group * K, at, stride_k, keys, K)
    kk = _tile(k + group * K, at, stride_k, keys, K)
    overlaps = tl.dot(kk, tl.trans(qq), input_precision=PRECISION)
    gradient = tl.zeros((C, C), tl.float32)
    for h in range(first, first + HEADS):
        summed = tl.load(total + at * H + h)
        last = tl.load(total + (n * C + (C - 1)) * H + h)
        high, low = _logs(summed)
        strength = tl.load(write + at * H + h).to(tl.float32)
        vv = _tile(v + h * V, at, stride_v, columns, V)
        dd = _tile(do, at * H + h, V, columns, V)
        adjoint = _state(left + (n * H + h) * (V * K), columns, keys, K, V)
        within = _decay((high[None, :], low[None, :]), (high[:, None], low[:, None]))
        within = tl.where(tokens[:, None] <= tokens[None, :], within, 0.0)
        weighted = tl.dot(vv, tl.trans(dd), input_precision=PRECISION) * (within * strength[:, None])
        gradient += weighted
        pairs = tl.where(tokens[:, None] < tokens[None, :], weighted * overlaps, 0.0)
        tl.store(written + at * H + h, tl.sum(pairs, 1))
        tl.store(read + at * H + h, tl.sum(pairs, 0))
        kept = tl.dot(kk, tl.trans(adjoint), input_precision=PRECISION)
        kept *= tl.exp((last - summed).to(tl.float32))[:, None]
        tl.store(carried + at * H + h, tl.sum(kept * vv.to(tl.float32), 1) * strength)
        dwrites = tl.dot((within * overlaps).to(dd.dtype), dd, kept, input_precision=PRECISION)
        tl.store(dwrite + at * H + h, tl.sum(dwrites * vv.to(tl.float32), 1))
        place = dv + (at * H + h)[:, None] * V + columns[None, :]
        tl.store(place, (dwrites * strength[:, None]).to(dv.dtype.element_ty), mask=(columns < V)[None, :])
    place = doverlaps + (n * tl.num_programs(1) + tl.program_id(1)) * (C * C)
    tl.store(place + tokens[:, None] * C + tokens[None, :], gradient)


@triton.jit(do_not_specialize=["H", "G"])
def _keys_kernel(
    own, other, x, write, states, left, total, doverlaps, gradient, recalled, through, stride_k, stride_x, H, G,
    HEADS, READS: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr,
    BV: tl.constexpr, PRECISION: tl.constexpr,
):
    """The gradient of k from the values written and the adjoints of the states; or of q from those of the outputs and
    the states met, and with it the states' part in the gradients of the decays. ``own`` is k or q, ``other`` q or
    k."""
    n = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * HEADS
    group = first // (H // G)
    tokens = tl.arange(0, C)
    keys = tl.arange(0, BK)
    columns = tl.arange(0, BV)
    at = n * C + tokens
    if READS:
        qq = _tile(own + group * K, at, stride_k, keys, K)
    acc = tl.zeros((C, BK), tl.float32)
    for h in range(first, first + HEADS):
        summed = tl.load(total + at * H + h)
        xx = _tile(x + h * V, at, stride_x, columns, V)
        state = _state(states + (n * H + h) * (V * K), columns, keys, K, V)
        if READS:
            scale = tl.exp(summed.to(tl.float32))
            adjoint = _state(left + (n * H + h) * (V * K), columns, keys, K, V)
            tl.store(through + n * H + h, tl.sum(tl.sum(state.to(tl.float32) * adjoint.to(tl.float32), 1), 0))
            known = tl.dot(qq, tl.trans(state), input_precision=PRECISION) * scale[:, None]
            tl.store(recalled + at * H + h, tl.sum(known * xx.to(tl.float32), 1))
        else:
            last = tl.load(total + (n * C + (C - 1)) * H + h)
            scale = tl.exp((last - summed).to(tl.float32)) * tl.load(write + at * H + h).to(tl.float32)
        acc = tl.dot((xx.to(tl.float32) * scale[:, None]).to(xx.dtype), state, acc, input_precision=PRECISION)
    oo = _tile(other + group * K, at, stride_k, keys, K)
    place = doverlaps + (n * tl.num_programs(1) + tl.program_id(1)) * (C * C)
    if READS:
        pairs = tl.load(place + tokens[None, :] * C + tokens[:, None])
    else:
        pairs = tl.load(place + tokens[:, None] * C + tokens[None, :])
    acc = tl.dot(pairs.to(oo.dtype), oo, acc, input_precision=PRECISION)
    part = (first % (H // G)) // HEADS
    size = tl.num_programs(0).to(tl.int64) * (C * G * K)
    place = gradient + part * size + (at * G + group)[:, None] * K + keys[None, :]
    tl.store(place, acc, mask=(keys < K)[None, :])


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


def _keys(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor, int]:
    """q and k with one stride from token to token, and that stride."""
    (q, stride), (k, other) = token_stride(q), token_stride(k)
    if stride != other:
        q, k, stride = q.contiguous(), k.contiguous(), k.shape[3] * k.shape[4]
    return q, k, stride


def output(q: Tensor, k: Tensor, v: Tensor, write: Tensor, met: Tensor, total: Tensor) -> Tensor:
    """o [B, N, C, H, V] from q, k [B, N, C, G, K], v, write [B, N, C, H], the states met [B, N, H, V, K] and the sums
    of the log decays from a chunk's start, ``total`` [B, N, C, H] in float64."""
    batch, chunks, _, groups, _ = k.shape
    heads = v.shape[3]
    q, k, stride_k = _keys(q, k)
    v, stride_v = token_stride(v)
    o = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    block = _heads(batch * chunks, heads, groups)
    _output_kernel[(batch * chunks, heads // block)](
        q, k, v, write.contiguous(), met.contiguous(), total.contiguous(), o, stride_k, stride_v, heads, groups, block,
        **_constants(k, v), num_warps=4, num_stages=2,
    )
    return o


def gradients(
    q: Tensor, k: Tensor, v: Tensor, write: Tensor, do: Tensor, met: Tensor, left: Tensor, total: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """See :func:`surgery.kernels.additive.inside.gradients_in_torch`."""
    batch, chunks, length, groups, _ = k.shape
    heads = v.shape[3]
    q, k, stride_k = _keys(q, k)
    v, stride_v = token_stride(v)
    write, do, met, left, total = (x.contiguous() for x in (write, do, met, left, total))
    block = _heads(batch * chunks, heads, groups)
    parts = heads // groups // block
    grid = (batch * chunks, heads // block)
    dq, dk = (torch.empty(parts, *k.shape, dtype=torch.float32, device=k.device) for _ in range(2))
    dv = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    doverlaps = torch.empty(*grid, length, length, dtype=torch.float32, device=k.device)
    dwrite, read, written, carried, recalled = (
        torch.empty(total.shape, dtype=torch.float32, device=k.device) for _ in range(5)
    )
    through = torch.empty(left.shape[:3], dtype=torch.float32, device=k.device)
    sizes, constants = (heads, groups, block), _constants(k, v)
    _values_kernel[grid](
        q, k, v, write, do, left, total, doverlaps, dv, dwrite, read, written, carried, stride_k, stride_v, *sizes,
        **constants, num_warps=4, num_stages=2,
    )
    for reads, tensors, stride in (
        (False, (k, q, v, write, left, left, total, doverlaps, dk), stride_v),
        (True, (q, k, do, write, met, left, total, doverlaps, dq), heads * v.shape[4]),
    ):
        _keys_kernel[grid](
            *tensors, recalled, through, stride_k, stride, *sizes, READS=reads, **constants, num_warps=4, num_stages=2
        )
    return dq.sum(0).to(q.dtype), dk.sum(0).to(k.dtype), dv, dwrite, read, written, carried, recalled, through
