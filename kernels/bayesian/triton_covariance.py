"""The Bayesian rule's covariance pass in Triton: the only part that is sequential in the keys, and blind to the values.

One program takes one head from chunk to chunk. A chunk starts with S = K P K^T, decayed and with the chunk's own noise
added; its elimination gives the gains h and the inverse J of the unit lower factor, and with R the ratios of sqrt c,

    U = (R * J) (C K P + N K)        P <- C P + N I - (sqrt(w) U)^T (sqrt(w) U),    w_s = C/C_s r_s h_s

The pass takes short chunks of its own: the elimination's tile then fits one warp, which needs no barrier. P lives in
device memory between the chunks (the backward pass wants it there), and in the second-level cache in truth. Every
product that involves P or U keeps float32's digits: three passes of tf32, or two where the keys are bf16.

The last product is the same sum for [i, j] and [j, i], up to the order of terms 2^-11 times smaller than the result, so
P stays symmetric to its last digit without being made so.
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
    NOISE,
    OBSERVATION,
    OPTIONS,
    SHRINK,
    Shape,
    Table,
    dot,
    exact,
    load_matrix,
    load_tokens,
    store_matrix,
)


@triton.jit
def eliminate(left, precision, observation, shrink, C: tl.constexpr):
    """The gains h [C] of the symmetric S [C, C], and below the diagonal J = L^-1, where column s of the unit lower L is
    r_s h_s times that of what columns before s left of S, and h_s = 1 / (y_s + x left[s, s]).

    In place: the columns up to s hold J, those after s what is left of S. ``observation`` and ``shrink`` are pointers.
    """
    i = tl.arange(0, C)[:, None]
    j = tl.arange(0, C)[None, :]
    gains = tl.zeros((C,), tl.float32)
    for s in tl.static_range(C):
        row = tl.sum(tl.where(i == s, left, 0.0), 0)
        column = tl.sum(tl.where(j == s, left, 0.0), 1)
        pivot = tl.sum(tl.where(tl.arange(0, C) == s, row, 0.0), 0)
        gain = 1.0 / (tl.load(observation + s) + precision * pivot)
        gains = tl.where(tl.arange(0, C) == s, gain, gains)
        below = tl.arange(0, C) > s
        factor = tl.where(below, tl.load(shrink + s) * gain * column, 0.0)
        row = tl.where(tl.arange(0, C) == s, 1.0, row)
        left = tl.where((j == s) & (i > s), 0.0, left) - factor[:, None] * row[None, :]
    return left, gains


@triton.jit(do_not_specialize=["T", "H", "G", "chunks", "scratch"])
def _covariance_kernel(
    k, scalars, logs, precision, P, U, gains, T, H, G, chunks, scratch,
    K: tl.constexpr, BD: tl.constexpr, NB: tl.constexpr, C: tl.constexpr, SUB: tl.constexpr, KEEP: tl.constexpr,
    EXACT: tl.constexpr, PRECISION: tl.constexpr,
):
    bh = tl.program_id(0).to(tl.int64)
    padded = chunks * (C * SUB)
    size = tl.num_programs(0).to(tl.int64) * padded
    x = tl.load(precision + bh % H).to(tl.float32)
    keys = k + (bh // H * T * G + (bh % H) // (H // G)) * K
    logs += size + bh * padded
    scalars += bh * padded
    U += bh * padded * K
    P += bh * (scratch + 2) * (K * K)
    d = tl.arange(0, BD)
    s = tl.arange(0, C)
    # compared as float32: from integers, LLVM in Triton 3.6 makes pairs of 32-bit lanes of which one, never used, runs
    # over into the other, and every address that used the position was wrong from the 17th thread on
    position = s.to(tl.float32)
    lower = position[:, None] >= position[None, :]
    for step in range(chunks * SUB):
        # boundaries of whole chunks have a slot each if they are kept; what lies between goes to and fro
        before = step % 2
        after = 1 - before
        if KEEP:
            before = tl.where(step % SUB == 0, step // SUB, scratch + before)
            after = tl.where((step + 1) % SUB == 0, (step + 1) // SUB, scratch + after)
        source = P + before * tl.full((), K * K, tl.int64)
        target = P + after * tl.full((), K * K, tl.int64)
        first = step * C
        at = scalars + first + s
        base = tl.load(logs + first - 1, mask=step % SUB > 0, other=0.0)
        log = tl.load(logs + first + s)
        last = tl.load(logs + first + C - 1)
        since = tl.exp((log - base).to(tl.float32))
        to_end = tl.exp((last - log).to(tl.float32))
        whole = tl.exp((last - base).to(tl.float32))
        either = tl.exp(-tl.abs((log[:, None] - log[None, :]).to(tl.float32)))
        ratio = tl.where(lower, either, 0.0)
        n = tl.load(at + NOISE * size)
        gathered = tl.sum(ratio * ratio * n[None, :], 1)
        at_end = tl.sum(to_end * to_end * n, 0)

        # Q^T = P K^T, and S = K Q^T
        own = tl.zeros((C, C), tl.float32)
        shared = tl.zeros((C, C), tl.float32)
        predicted = ()
        for i in tl.static_range(NB):
            q = tl.zeros((BD, C), tl.float32)
            for j in tl.static_range(NB):
                other = load_tokens(keys, first, T, G * K, j * BD, K, C, BD)
                p = load_matrix(source, i * BD, j * BD, K, K, BD, BD)
                q = dot(p, tl.trans(other), q, False, EXACT, PRECISION)
            own_keys = load_tokens(keys, first, T, G * K, i * BD, K, C, BD)
            shared = dot(own_keys, q, shared, EXACT, False, PRECISION)
            own = dot(own_keys, tl.trans(own_keys), own, EXACT, EXACT, PRECISION)
            predicted = predicted + (q,)
        earlier = tl.where(lower, gathered[None, :] + tl.zeros((C, C), tl.float32), gathered[:, None])
        left = since[:, None] * since[None, :] * shared + either * earlier * own
        left, gain = eliminate(
            left, x, scalars + OBSERVATION * size + first, scalars + SHRINK * size + first, C
        )
        tl.store(gains + bh * padded + first + s, gain)
        mixing = ratio * tl.where(s[:, None] == s[None, :], 1.0, left)
        weight = tl.sqrt(to_end * to_end * tl.load(at + SHRINK * size) * gain)

        directions = ()
        peak = 0.0
        for i in tl.static_range(NB):
            own_keys = load_tokens(keys, first, T, G * K, i * BD, K, C, BD)
            known = (since * since)[None, :] * predicted[i] + gathered[None, :] * tl.trans(own_keys)
            u = dot(known, tl.trans(mixing), tl.zeros((BD, C), tl.float32), False, False, PRECISION)
            inside = i * BD + d < K
            here = U + (tl.zeros((), tl.int64) + first) * K
            tl.store(here + s[None, :] * K + (i * BD + d)[:, None], u, mask=inside[:, None])
            u = u * weight[None, :]
            diagonal = tl.load(source + (i * BD + d) * (K + 1), mask=inside, other=0.0)
            diagonal = whole * whole * diagonal + at_end - tl.sum(u * u, 1)
            peak = tl.maximum(peak, tl.max(tl.where(inside, diagonal, 0.0), 0))
            directions = directions + (u,)
        # rounding must not leave a negative direction; a floor that is small beside the noise that enters anyway, since
        # where none enters, directions written many times are truly that small
        enters = at_end + 2.4e-7 * tl.minimum(peak, at_end)
        for i in tl.static_range(NB):
            for j in tl.static_range(NB):
                p = whole * whole * load_matrix(source, i * BD, j * BD, K, K, BD, BD)
                if i == j:
                    p += tl.where(d[:, None] == d[None, :], enters, 0.0)
                p = dot(-directions[i], tl.trans(directions[j]), p, False, False, PRECISION)
                store_matrix(target, p, i * BD, j * BD, K, K, BD, BD)
        # the next step reads what other threads wrote
        tl.debug_barrier()


class Layout(NamedTuple):
    """How the covariance pass is laid out."""

    tokens: int  # a chunk of its own; divides CHUNK
    block: int  # of keys, a tile's side
    warps: int
    precision: str  # of the products: tf32x3 or ieee


LAYOUT = Layout(tokens=16, block=64, warps=4, precision="tf32x3")


def covariance(
    shape: Shape, k: Tensor, table: Table, precision: Tensor, start: Tensor, keep: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The covariance pass from ``start`` [B, H, K, K].

    Returns:
        the write directions U [B, H, N CHUNK, K], the gains h [B, H, N CHUNK], the covariances that enter the chunks
        [B, H, N + 3, K, K] (the first N + 1 slots; only if ``keep``), and the one after the last token [B, H, K, K].
    """
    sub = CHUNK // LAYOUT.tokens
    scratch = shape.chunks + 1 if keep else 0
    P = torch.empty(
        shape.batch, shape.heads, scratch + 2, shape.key_dim, shape.key_dim, dtype=torch.float32, device=k.device
    )
    P[:, :, 0] = start
    U, gains = shape.buffer(k, shape.key_dim), shape.buffer(k)
    width, blocks = shape.key_blocks(LAYOUT.block)
    _covariance_kernel[(shape.programs,)](
        k, table.scalars, table.logs, precision, P, U, gains, shape.tokens, shape.heads, shape.groups, shape.chunks,
        scratch, K=shape.key_dim, BD=width, NB=blocks, C=LAYOUT.tokens, SUB=sub, KEEP=keep, EXACT=exact(k),
        PRECISION=LAYOUT.precision, num_warps=LAYOUT.warps, num_stages=1, **OPTIONS,
    )
    last = shape.chunks if keep else shape.chunks * sub % 2
    return U, gains, P, P[:, :, last]
