"""The Bayesian rule's mean in Triton: a chunked delta rule that writes along the covariance pass's directions U.

With A_t the products of the decay a since the chunk's start and A/A_s those to its end, in each chunk

    inverse = (I + tril(p_t (A_t/A_s) h_s (k_t.u_s), -1))^-1        reads = tril((A_t/A_s) h_s (q_t.u_s))
    E = inverse (z v - p A K M)        o = A Q M + reads E          M <- A M + (A/A_s h_s U)^T E

The two matrices need no state, so every chunk has its own program; then one program takes a block of M's columns from
chunk to chunk and keeps M in registers; the reads follow in parallel again, from the means that enter the chunks.

Products are in tf32 where the inputs are bf16 (2e-3; bf16 operands would cost 1.6e-2), in three passes of it otherwise.
"""

# Triton's compiler joins tuples by addition alone
# ruff: noqa: RUF005

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .triton_common import (
    CHUNK,
    ERASE,
    OPTIONS,
    WRITE,
    Shape,
    Table,
    dot,
    exact,
    invert_unit_lower,
    load_matrix,
    load_tokens,
    nearest_tf32,
    ratios,
    store_matrix,
    store_tokens,
)


@triton.jit(do_not_specialize=["T", "H", "G", "padded", "begin"])
def _coupling_kernel(
    q, k, U, gains, scalars, logs, inverse, reads, T, H, G, padded, begin,
    K: tl.constexpr, BD: tl.constexpr, NB: tl.constexpr, C: tl.constexpr, EXACT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    chunk = begin + tl.program_id(0)
    bh = tl.program_id(1).to(tl.int64)
    size = tl.num_programs(1).to(tl.int64) * padded
    first = chunk * C
    at = bh * padded + first + tl.arange(0, C)
    keys = (bh // H * T * G + (bh % H) // (H // G)) * K
    with_keys = tl.zeros((C, C), tl.float32)
    with_queries = tl.zeros((C, C), tl.float32)
    for i in tl.static_range(NB):
        u = tl.trans(load_tokens(U + bh * padded * K, first, padded, K, i * BD, K, C, BD))
        u = nearest_tf32(u, PRECISION)
        kk = load_tokens(k + keys, first, T, G * K, i * BD, K, C, BD)
        with_keys = dot(kk, u, with_keys, EXACT, False, PRECISION)
        qq = load_tokens(q + keys, first, T, G * K, i * BD, K, C, BD)
        with_queries = dot(qq, u, with_queries, EXACT, False, PRECISION)
    weight = ratios(logs + bh * padded, first, C) * tl.load(gains + at)[None, :]
    place = (bh * (padded // C) + chunk) * (C * C)
    store_matrix(reads + place, nearest_tf32(weight * with_queries, PRECISION), 0, 0, C, C, C, C)
    erase = tl.load(scalars + ERASE * size + at)
    store_matrix(inverse + place, erase[:, None] * weight * with_keys, 0, 0, C, C, C, C)
    invert_unit_lower(inverse + place, C)


@triton.jit(do_not_specialize=["T", "H", "G", "chunks", "begin", "end"])
def _mean_kernel(
    q, k, v, U, gains, scalars, logs, inverse, reads, means, errors, o, T, H, G, chunks, begin, end,
    K: tl.constexpr, V: tl.constexpr, BD: tl.constexpr, NB: tl.constexpr, BV: tl.constexpr, C: tl.constexpr,
    KEEP: tl.constexpr, EXACT: tl.constexpr, PRECISION: tl.constexpr,
):
    column = tl.program_id(0) * BV
    bh = tl.program_id(1).to(tl.int64)
    padded = chunks * C
    size = tl.num_programs(1).to(tl.int64) * padded
    keys = (bh // H * T * G + (bh % H) // (H // G)) * K
    values = (bh // H * T * H + bh % H) * V
    means += (bh * (chunks + 1) + begin if KEEP else bh) * (K * V)
    mean = ()
    for i in tl.static_range(NB):
        mean = mean + (load_matrix(means, i * BD, column, K, V, BD, BV),)
    for chunk in range(begin, end):
        first = chunk * C
        at = bh * padded + first + tl.arange(0, C)
        log = tl.load(logs + at)
        last = tl.load(logs + bh * padded + first + C - 1)
        since = tl.load(scalars + ERASE * size + at) * tl.exp(log.to(tl.float32))
        to_end = tl.load(gains + at) * tl.exp((last - log).to(tl.float32))
        whole = tl.exp(last.to(tl.float32))
        known = tl.zeros((C, BV), tl.float32)
        read = tl.zeros((C, BV), tl.float32)
        for i in tl.static_range(NB):
            m = nearest_tf32(mean[i], PRECISION)
            kk = load_tokens(k + keys, first, T, G * K, i * BD, K, C, BD)
            known = dot(kk, m, known, EXACT, False, PRECISION)
            qq = load_tokens(q + keys, first, T, G * K, i * BD, K, C, BD)
            read = dot(qq, m, read, EXACT, False, PRECISION)
        read *= tl.exp(log.to(tl.float32))[:, None]
        error = tl.load(scalars + WRITE * size + at)[:, None] * load_tokens(
            v + values, first, T, H * V, column, V, C, BV
        )
        error -= since[:, None] * known
        solve = nearest_tf32(load_matrix(inverse + (bh * chunks + chunk) * (C * C), 0, 0, C, C, C, C), PRECISION)
        none = tl.zeros((C, BV), tl.float32)
        error = dot(solve, nearest_tf32(error, PRECISION), none, False, False, PRECISION)
        error = nearest_tf32(error, PRECISION)
        if KEEP:
            store_tokens(errors + bh * padded * V, error, first, padded, V, column, V, C, BV)
            means += K * V
        weight = load_matrix(reads + (bh * chunks + chunk) * (C * C), 0, 0, C, C, C, C)
        read = dot(weight, error, read, False, False, PRECISION)
        store_tokens(o + values, read, first, T, H * V, column, V, C, BV)
        updated = ()
        for i in tl.static_range(NB):
            u = to_end[:, None] * load_tokens(U + bh * padded * K, first, padded, K, i * BD, K, C, BD)
            u = tl.trans(nearest_tf32(u, PRECISION))
            m = dot(u, error, whole * mean[i], False, False, PRECISION)
            if KEEP:
                store_matrix(means, m, i * BD, column, K, V, BD, BV)
            updated = updated + (m,)
        mean = updated
    if not KEEP:
        for i in tl.static_range(NB):
            store_matrix(means, mean[i], i * BD, column, K, V, BD, BV)


class Mean(NamedTuple):
    """The mean's results but for the outputs."""

    inverse: Tensor  # [B, H, N, CHUNK, CHUNK], of every chunk
    reads: Tensor  # likewise
    means: Tensor  # the means that enter the chunks and the last one [B, H, N + 1, K, V]; only the last if not kept
    errors: Tensor  # the innovations [B, H, N CHUNK, V], if kept


def buffers(shape: Shape, start: Tensor, keep: bool) -> Mean:
    """For the pass from ``start`` [B, H, K, V]."""
    size = (shape.batch, shape.heads, shape.chunks, CHUNK, CHUNK)
    inverse, reads = (torch.empty(size, dtype=torch.float32, device=start.device) for _ in range(2))
    means = torch.empty(
        shape.batch, shape.heads, shape.chunks + 1 if keep else 1, shape.key_dim, shape.value_dim, dtype=torch.float32,
        device=start.device,
    )
    means[:, :, 0] = start
    return Mean(inverse, reads, means, shape.buffer(start, shape.value_dim) if keep else means)


def mean(
    shape: Shape, q: Tensor, k: Tensor, v: Tensor, table: Table, U: Tensor, gains: Tensor, work: Mean, o: Tensor,
    precision: str, keep: bool, begin: int, end: int,
) -> None:
    """The mean's pass over the chunks from ``begin`` to ``end``, into ``work`` and o [B, T, H, V]."""
    width, blocks = shape.key_blocks(128)
    keys = {"K": shape.key_dim, "BD": width, "NB": blocks, "C": CHUNK, "PRECISION": precision}
    keys["EXACT"] = exact(q) and exact(k)
    _coupling_kernel[(end - begin, shape.programs)](
        q, k, U, gains, table.scalars, table.logs, work.inverse, work.reads, shape.tokens, shape.heads, shape.groups,
        shape.padded, begin, num_warps=4, **keys, **OPTIONS,
    )
    columns = shape.value_block(64 if blocks == 1 else 32)
    _mean_kernel[(triton.cdiv(shape.value_dim, columns), shape.programs)](
        q, k, v, U, gains, table.scalars, table.logs, work.inverse, work.reads, work.means, work.errors, o,
        shape.tokens, shape.heads, shape.groups, shape.chunks, begin, end, V=shape.value_dim, BV=columns, KEEP=keep,
        num_warps=4, num_stages=1, **keys, **OPTIONS,
    )
