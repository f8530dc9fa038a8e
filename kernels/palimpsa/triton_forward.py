"""Palimpsa's forward pass in Triton: boundary states by matrix products, then a walk of every segment.

One program walks one segment of one head for a block of values, the block's rows of M and E in registers; it writes
its outputs and nothing else. Segments do not depend on each other once the states that enter them are known.
"""

# ruff: noqa: RUF005 - Triton's frontend knows no starred tuples
from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from .triton_common import (
    CHUNK,
    INTERPRETED,
    OPTIONS,
    Decays,
    forward_tiling,
    load_state,
    load_vector,
    precision,
    reciprocal,
    sectors,
    segment_starts,
    store_state,
    touch,
)

# tokens a program walks between two tests of its loop
UNROLL = 2
# tokens between the first read of a row, which fetches it, and its use
AHEAD = 3


def segment_length(batch: int, tokens: int, heads: int, key_dim: int, value_dim: int, exact: bool) -> int:
    """Chunks a segment: the shortest time in waves of programs, with what a boundary state costs added.

    At most 8, so that the backward pass can take tokens in slabs; at most 2 when ``exact``, since a decay's rounding
    error grows with the steps walked (3e-8 each), not with those that a boundary state jumps.
    """
    tiling = forward_tiling(key_dim, value_dim)
    # a large GPU holds about a thousand of these warps: 8 or so on each of 132 multiprocessors
    waves = batch * heads * tiling.blocks(value_dim) * tiling.warps / 1056
    chunks = triton.cdiv(tokens, CHUNK)
    lengths = range(1, min(2 if exact else 8, chunks) + 1)
    return min(reversed(lengths), key=lambda length: math.ceil(waves * triton.cdiv(chunks, length)) * (length + 0.5))


@triton.jit(do_not_specialize=["T", "H", "G", "S", "length", "padded"])
def _walk_kernel(
    q, k, v, b, decay, prior, starts, o, variance, final, T, H, G, S, length, padded,
    K: tl.constexpr, V: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, PARTS: tl.constexpr,
    SECTOR: tl.constexpr, SECTORS: tl.constexpr, UNROLL: tl.constexpr, AHEAD: tl.constexpr, CHUNK: tl.constexpr,
    MASK_T: tl.constexpr, MASK_V: tl.constexpr, MASK_K: tl.constexpr, EXACT: tl.constexpr, VARIANCE: tl.constexpr,
    ASSEMBLY: tl.constexpr,
):
    segment = tl.program_id(1)
    bh = tl.program_id(2).to(tl.int64)
    batch = bh // H
    h = bh % H
    hk = h // (H // G)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    keys = tl.arange(0, WIDTH)
    p = tl.load(prior + h).to(tl.float32)
    M, E = load_state(starts + (bh * S + segment) * (2 * V * K), rows, keys, K, V, WIDTH, PARTS, MASK_V, MASK_K)
    if not EXACT:
        # I = p + E is carried instead of E: one addition less for every element, and E to 1e-7 of p
        I = ()
        for n in tl.static_range(PARTS):
            I = I + (E[n] + p,)
        E = I
    # rows of tokens to come are read AHEAD of their use, so that the walk waits for the nearest cache alone
    used = tl.zeros((UNROLL, SECTORS), tl.float32)
    first_v = tl.program_id(0) * ROWS
    last_v = min(V, first_v + ROWS)
    steps = tl.arange(0, UNROLL)
    from_k = batch * T * G * K + hk * K
    from_v = batch * T * H * V + h * V
    begin = segment * (length * CHUNK)
    for t in range(begin, min(begin + length * CHUNK, T), UNROLL):
        ahead = t + AHEAD + steps
        near_k = touch(k + from_k, ahead, T, G * K, 0, K, SECTOR, SECTORS)
        near_q = touch(q + from_k, ahead, T, G * K, 0, K, SECTOR, SECTORS)
        near_v = touch(v + from_v, ahead, T, H * V, first_v, last_v, SECTOR, SECTORS)
        near_b = touch(b + from_v, ahead, T, H * V, first_v, last_v, SECTOR, SECTORS)
        for u in tl.static_range(UNROLL):
            token = batch * T + t + u
            at_v = (token * H + h) * V
            at_k = (token * G + hk) * K
            a = tl.load(decay + bh * padded + t + u)
            vv = load_vector(v + at_v, rows, V, t + u, T, MASK_V, MASK_T)[:, None]
            bb = load_vector(b + at_v, rows, V, t + u, T, MASK_V, MASK_T)[:, None]
            back = 0.0
            if not EXACT:
                back = (1.0 - a) * p
            read = tl.zeros((ROWS, WIDTH), tl.float32)
            spread = tl.zeros((ROWS, WIDTH), tl.float32)
            M_next = ()
            E_next = ()
            for n in tl.static_range(PARTS):
                kk = load_vector(k + at_k, n * WIDTH + keys, K, t + u, T, MASK_K, MASK_T)[None, :]
                qq = load_vector(q + at_k, n * WIDTH + keys, K, t + u, T, MASK_K, MASK_T)[None, :]
                m = M[n] * a + vv * kk
                if EXACT:
                    e = E[n] * a + bb * (kk * kk)
                    r = reciprocal(e + p, ASSEMBLY)
                else:
                    e = E[n] * a + (bb * (kk * kk) + back)
                    r = reciprocal(e, ASSEMBLY)
                read += (m * r) * qq
                if VARIANCE:
                    spread += r * (qq * qq)
                M_next = M_next + (m,)
                E_next = E_next + (e,)
            M = M_next
            E = E_next
            y = tl.sum(read, 1).to(o.dtype.element_ty)
            if MASK_V or MASK_T:
                tl.store(o + at_v + rows, y, mask=(rows < V) & (rows * 0 + t + u < T))
            else:
                tl.store(o + at_v + rows, y)
            if VARIANCE:
                tl.store(variance + at_v + rows, tl.sum(spread, 1), mask=(rows < V) & (rows * 0 + t + u < T))
        used += (near_k + near_q) + (near_v + near_b)
    if T < 0:
        # never: it keeps the early reads alive
        tl.store(final + steps[:, None] * SECTORS + tl.arange(0, SECTORS)[None, :], used)
    if segment == S - 1:
        if not EXACT:
            I = ()
            for n in tl.static_range(PARTS):
                I = I + (E[n] - p,)
            E = I
        store_state(final + bh * (2 * V * K), M, E, rows, keys, K, V, WIDTH, PARTS, MASK_V, MASK_K)


def forward(
    q: Tensor, k: Tensor, v: Tensor, b: Tensor, table: Decays, prior: Tensor, state: Tensor | None, length: int,
    return_variance: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """o [B, T, H, V], variance (empty unless asked for), the final state [B, H, 2, V, K], the segments' starts."""
    batch, tokens, heads, value_dim = v.shape
    groups, key_dim = k.shape[2:]
    starts = segment_starts(k, v, b, state, table, length)
    o = torch.empty_like(v)
    variance = torch.empty(v.shape if return_variance else (0,), dtype=torch.float32, device=v.device)
    final = torch.empty(batch, heads, 2, value_dim, key_dim, dtype=torch.float32, device=v.device)
    tiling = forward_tiling(key_dim, value_dim)
    segments = starts.shape[2]
    _walk_kernel[(tiling.blocks(value_dim), segments, batch * heads)](
        q, k, v, b, table.each, prior, starts, o, variance, final, tokens, heads, groups, segments, length,
        table.each.shape[-1], K=key_dim, V=value_dim, ROWS=tiling.rows, WIDTH=tiling.width, PARTS=tiling.parts,
        **sectors(max(key_dim, tiling.rows), q, k, v, b), UNROLL=UNROLL, AHEAD=AHEAD, CHUNK=CHUNK,
        MASK_T=tokens % UNROLL != 0, MASK_V=value_dim % tiling.rows != 0,
        MASK_K=key_dim != tiling.width * tiling.parts, EXACT=precision(q, k, v, b) != "tf32",
        VARIANCE=return_variance, ASSEMBLY=not INTERPRETED, num_warps=tiling.warps, **OPTIONS,
    )
    return o, variance, final, starts
