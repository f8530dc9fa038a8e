"""The Bayesian rule's covariance pass in Triton: the only part that is sequential in the keys, and blind to the values.

One program takes one head from chunk to chunk. A chunk starts with S = K P K^T, decayed and with the chunk's own noise
added; its elimination gives the gains h and the inverse J of the unit lower factor L, and with R the ratios of sqrt c,

    U = (R * J) (C K P + N K)        P <- C P + N I - (sqrt(w) U)^T (sqrt(w) U),    w_s = C/C_s r_s h_s

The elimination goes by halves of a chunk, 32 tokens. Every warp holds all of a half, a row of S and of J in one
register of each lane, so its tokens need no barrier, and a token's chain is one exchange between lanes, one reciprocal
and a few products. What the first half's columns take from the second is three small products.

P lives in device memory between the chunks (the backward pass wants it there), and in the second-level cache in truth.
Every product that involves P, S or U keeps float32's digits: six passes of bf16, or three where the keys are bf16.

P's blocks below the diagonal are those above it, turned. Within a block on the diagonal the last product is the same
sum for [i, j] and [j, i], up to the order of its smallest terms, so P stays symmetric to its last digit there too.
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
    GATHERED,
    OBSERVATION,
    OPTIONS,
    SHRINK,
    Shape,
    Table,
    covariance_precision,
    dot,
    exact,
    load_matrix,
    load_tokens,
    store_matrix,
)


@triton.jit
def _entry(row, i: tl.constexpr):
    """Entry i of a row, for every lane: one exchange."""
    return tl.gather(row, tl.full(row.shape, i, tl.int32), 0)


@triton.jit(noinline=True)
def eliminate(square, observation, shrink, precision, gains, inverse, STRIDE: tl.constexpr, B: tl.constexpr):
    """The gains h [B] of the symmetric S [B, B] at ``square`` and the inverse J [B, B] of its unit lower factor, whose
    column s is r_s h_s times that of what columns before s left of S, with h_s = 1 / (y_s + x left[s, s]).

    In place: the columns up to s hold J, those after s what is left of S. A row is a vector that every warp holds; with
    B = 32, one entry a lane. Two tokens go at once: the second's gain comes from the determinant of both, beside the
    first's, so that a pair waits for one reciprocal.

    A function of its own in the machine code, not for its calls' sake: some of the compiler's passes look at every
    operation that a product or an access depends on, for each of them, and took minutes.
    """
    lane = tl.arange(0, B)
    rows = ()
    for s in tl.static_range(B):
        rows = rows + (tl.load(square + s * STRIDE + lane),)
    y = tl.load(observation + lane)
    r = tl.load(shrink + lane)
    found = tl.zeros((B,), tl.float32)
    for s in tl.static_range(0, B, 2):
        between = _entry(rows[s], s + 1)
        one = _entry(y, s) + precision * _entry(rows[s], s)
        two = _entry(y, s + 1) + precision * _entry(rows[s + 1], s + 1)
        weight = _entry(r, s)
        first = 1.0 / one
        second = one / (one * two - precision * weight * between * between)
        found = tl.where(lane == s, first, tl.where(lane == s + 1, second, found))
        weight *= first
        across = weight * between
        row = tl.where(lane == s, 1.0, rows[s])
        row_next = tl.where(lane == s, 0.0, rows[s + 1]) - across * row
        row = tl.where(lane == s + 1, 0.0, row)
        row_next = tl.where(lane == s + 1, 1.0, row_next)
        scaled = weight * row
        scaled_next = _entry(r, s + 1) * second * row_next
        done = (lane == s) | (lane == s + 1)
        updated = ()
        for i in tl.static_range(B):
            if i > s + 1:
                entry = _entry(rows[s], i)
                entry_next = _entry(rows[s + 1], i) - across * entry
                updated = updated + (tl.where(done, 0.0, rows[i]) - entry * scaled - entry_next * scaled_next,)
            elif i == s + 1:
                updated = updated + (tl.where(lane > s + 1, 0.0, row_next),)
            elif i == s:
                updated = updated + (tl.where(lane > s, 0.0, row),)
            else:
                updated = updated + (rows[i],)
        rows = updated
    tl.store(gains + lane, found)
    for s in tl.static_range(B):
        tl.store(inverse + s * STRIDE + lane, rows[s])


@triton.jit(do_not_specialize=["T", "H", "G", "padded"])
def _chunk_kernel(
    k, scalars, logs, ratio, noise, decays, T, H, G, padded,
    K: tl.constexpr, BD: tl.constexpr, NB: tl.constexpr, C: tl.constexpr, EXACT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """What a chunk knows before it meets P: R, its own noise's part of S, R N (K K^T), and the products of sqrt c since
    its start and to its end, ``decays`` [2, B, H, N C]."""
    chunk = tl.program_id(0)
    bh = tl.program_id(1).to(tl.int64)
    size = tl.num_programs(1).to(tl.int64) * padded
    first = chunk * C
    keys = k + (bh // H * T * G + (bh % H) // (H // G)) * K
    logs += size + bh * padded
    own = tl.zeros((C, C), tl.float32)
    for i in tl.static_range(NB):
        other = load_tokens(keys, first, T, G * K, i * BD, K, C, BD)
        own = dot(other, tl.trans(other), own, EXACT, EXACT, PRECISION)
    # compared as float32: from integers, LLVM in Triton 3.6 makes pairs of 32-bit lanes of which one, never used, runs
    # over into the other, and every address that used the position was wrong from the 17th thread on
    position = tl.arange(0, C).to(tl.float32)
    lower = position[:, None] >= position[None, :]
    log = tl.load(logs + first + tl.arange(0, C))
    either = tl.exp(-tl.abs((log[:, None] - log[None, :]).to(tl.float32)))
    gathered = tl.load(scalars + GATHERED * size + bh * padded + first + tl.arange(0, C))
    earlier = tl.where(lower, gathered[None, :] + tl.zeros((C, C), tl.float32), gathered[:, None])
    place = (bh * (padded // C) + chunk) * (C * C)
    store_matrix(ratio + place, tl.where(lower, either, 0.0), 0, 0, C, C, C, C)
    store_matrix(noise + place, either * earlier * own, 0, 0, C, C, C, C)
    at = decays + bh * padded + first + tl.arange(0, C)
    tl.store(at, tl.exp(log.to(tl.float32)))
    tl.store(at + size, tl.exp((tl.load(logs + first + C - 1) - log).to(tl.float32)))


@triton.jit(do_not_specialize=["T", "H", "G", "chunks", "begin", "end"])
def _covariance_kernel(
    k, scalars, precision, ratio, noise, decays, P, U, gains, scratch, T, H, G, chunks, begin, end,
    K: tl.constexpr, BD: tl.constexpr, NB: tl.constexpr, C: tl.constexpr, B: tl.constexpr, KEEP: tl.constexpr,
    DIAGONAL: tl.constexpr, EXACT: tl.constexpr, PRECISION: tl.constexpr,
):
    tl.static_assert(C == 2 * B)
    bh = tl.program_id(0).to(tl.int64)
    padded = chunks * C
    size = tl.num_programs(0).to(tl.int64) * padded
    x = tl.load(precision + bh % H).to(tl.float32)
    keys = k + (bh // H * T * G + (bh % H) // (H // G)) * K
    decays += bh * padded
    observation = scalars + OBSERVATION * size + bh * padded
    shrink = scalars + SHRINK * size + bh * padded
    gathered_noise = scalars + GATHERED * size + bh * padded
    U += bh * padded * K
    gains += bh * padded
    P += bh * (tl.where(KEEP, chunks + 1, 2) * tl.full((), K * K, tl.int64))
    ratio += (bh * chunks + begin) * (C * C)
    noise += (bh * chunks + begin) * (C * C)
    # [C, C] each: J, whose upper half stays zero, and S
    inverse = scratch + bh * (2 * C * C)
    square = inverse + C * C
    store_matrix(inverse, tl.zeros((C, C), tl.float32), 0, 0, C, C, C, C)
    for chunk in range(begin, end):
        # zero, but not to the compiler, which would work out hundreds of addresses before the loop, only to keep them
        # in memory
        zero = (chunk >> 30) * 128
        t = tl.arange(0, C) + zero
        b = tl.arange(0, B) + zero
        before = chunk if KEEP else chunk % 2
        after = chunk + 1 if KEEP else 1 - before
        source = P + before * tl.full((), K * K, tl.int64)
        target = P + after * tl.full((), K * K, tl.int64)
        first = chunk * C
        since = tl.load(decays + first + t)

        # Q^T = P K^T, and S = K Q^T
        shared = tl.zeros((C, C), tl.float32)
        blocks = ()
        for i in tl.static_range(NB):
            blocks = blocks + (load_tokens(keys, first, T, G * K, i * BD + zero, K, C, BD),)
        predicted = ()
        for i in tl.static_range(NB):
            q = tl.zeros((BD, C), tl.float32)
            for j in tl.static_range(NB):
                p = load_matrix(source, i * BD + zero, j * BD + zero, K, K, BD, BD)
                q = dot(p, tl.trans(blocks[j]), q, False, EXACT, PRECISION)
            shared = dot(blocks[i], q, shared, EXACT, False, PRECISION)
            predicted = predicted + (q,)
        left = since[:, None] * since[None, :] * shared + load_matrix(noise, zero, zero, C, C, C, C)

        # by halves: what the first takes from the second, and J's lower corner, are products
        store_matrix(square, left, zero, zero, C, C, C, C)
        tl.debug_barrier()
        eliminate(square, observation + first, shrink + first, x, gains + first, inverse, C, B)
        tl.debug_barrier()
        none = tl.zeros((B, B), tl.float32)
        upper = load_matrix(inverse, zero, zero, C, C, B, B)
        columns = dot(load_matrix(square, B + zero, zero, C, C, B, B), tl.trans(upper), none, False, False, PRECISION)
        weighted = columns * (tl.load(shrink + first + b) * tl.load(gains + first + b))[None, :]
        left = load_matrix(square, B + zero, B + zero, C, C, B, B)
        left = dot(-weighted, tl.trans(columns), left, False, False, PRECISION)
        store_matrix(square, left, B + zero, B + zero, C, C, B, B)
        between = dot(weighted, upper, none, False, False, PRECISION)
        tl.debug_barrier()
        corner = B * (C + 1)
        eliminate(
            square + corner, observation + first + B, shrink + first + B, x, gains + first + B, inverse + corner, C, B
        )
        tl.debug_barrier()
        lower = load_matrix(inverse, B + zero, B + zero, C, C, B, B)
        store_matrix(inverse, dot(-lower, between, none, False, False, PRECISION), B + zero, zero, C, C, B, B)
        tl.debug_barrier()
        mixing = load_matrix(ratio, zero, zero, C, C, C, C) * load_matrix(inverse, zero, zero, C, C, C, C)
        ratio += C * C
        noise += C * C
        to_end = tl.load(decays + size + first + t)
        whole = tl.load(decays + first + C - 1)
        weight = tl.sqrt(to_end * to_end * tl.load(shrink + first + t) * tl.load(gains + first + t))
        gathered = tl.load(gathered_noise + first + t)
        directions = ()
        for i in tl.static_range(NB):
            own = load_tokens(keys, first, T, G * K, i * BD + zero, K, C, BD)
            known = (since * since)[None, :] * predicted[i] + gathered[None, :] * tl.trans(own)
            u = dot(known, tl.trans(mixing), tl.zeros((BD, C), tl.float32), False, False, PRECISION)
            store_matrix(U + (tl.zeros((), tl.int64) + first) * K, tl.trans(u), zero, i * BD + zero, C, K, C, BD)
            directions = directions + (u * weight[None, :],)
        for i in tl.static_range(NB):
            for j in tl.static_range(i, NB):
                p = whole * whole * load_matrix(source, i * BD + zero, j * BD + zero, K, K, BD, BD)
                p = dot(-directions[i], tl.trans(directions[j]), p, False, False, PRECISION)
                store_matrix(target, p, i * BD + zero, j * BD + zero, K, K, BD, BD)
                if i != j:
                    store_matrix(target, tl.trans(p), j * BD + zero, i * BD + zero, K, K, BD, BD)
        tl.debug_barrier()

        # the noise that enters. Rounding must not leave a negative direction: a floor that is small beside this noise,
        # since where none enters, directions written many times are truly that small
        at_end = tl.load(gathered_noise + first + C - 1)
        d = tl.arange(0, DIAGONAL) + zero
        diagonal = tl.load(target + d * (K + 1), mask=d < K, other=0.0) + at_end
        peak = tl.maximum(tl.max(tl.where(d < K, diagonal, 0.0), 0), 0.0)
        tl.store(target + d * (K + 1), diagonal + 2.4e-7 * tl.minimum(peak, at_end), mask=d < K)
        # the next chunk reads what other threads wrote
        tl.debug_barrier()


class Layout(NamedTuple):
    """How the covariance pass is laid out."""

    block: int  # of keys, a tile's side
    warps: int
    precision: str  # of the products


LAYOUT = Layout(block=128, warps=8, precision=covariance_precision())


class Covariance(NamedTuple):
    """The covariance pass's results, and what it works with."""

    U: Tensor  # the write directions [B, H, N CHUNK, K]
    gains: Tensor  # h [B, H, N CHUNK]
    P: Tensor  # the covariances that enter the chunks and the last one [B, H, N + 1, K, K], if kept; else two in turn
    last: Tensor  # the covariance after the last token [B, H, K, K]
    chunks: tuple[Tensor, ...]  # what the chunks know before they meet P
    scratch: Tensor


def prepare(shape: Shape, k: Tensor, table: Table, start: Tensor, keep: bool) -> Covariance:
    """Everything that needs no pass along the chunks, from ``start`` [B, H, K, K] on."""
    slots = shape.chunks + 1 if keep else 2
    P = torch.empty(
        shape.batch, shape.heads, slots, shape.key_dim, shape.key_dim, dtype=torch.float32, device=k.device
    )
    P[:, :, 0] = start
    scratch = torch.empty(shape.programs, 2 * CHUNK * CHUNK, dtype=torch.float32, device=k.device)
    ratio, noise = torch.empty(2, shape.programs, shape.padded, CHUNK, dtype=torch.float32, device=k.device)
    decays = torch.empty(2, shape.programs, shape.padded, dtype=torch.float32, device=k.device)
    width, blocks = shape.key_blocks(128)
    _chunk_kernel[(shape.chunks, shape.programs)](
        k, table.scalars, table.logs, ratio, noise, decays, shape.tokens, shape.heads, shape.groups, shape.padded,
        K=shape.key_dim, BD=width, NB=blocks, C=CHUNK, EXACT=exact(k, LAYOUT.precision), PRECISION=LAYOUT.precision,
        num_warps=4, num_stages=1, **OPTIONS,
    )
    last = P[:, :, shape.chunks if keep else shape.chunks % 2]
    return Covariance(shape.buffer(k, shape.key_dim), shape.buffer(k), P, last, (ratio, noise, decays), scratch)


def covariance(
    shape: Shape, k: Tensor, table: Table, precision: Tensor, work: Covariance, keep: bool, begin: int, end: int
) -> None:
    """The covariance pass over the chunks from ``begin`` to ``end``, into ``work``."""
    width, blocks = shape.key_blocks(LAYOUT.block)
    _covariance_kernel[(shape.programs,)](
        k, table.scalars, precision, *work.chunks, work.P, work.U, work.gains, work.scratch, shape.tokens, shape.heads,
        shape.groups, shape.chunks, begin, end, K=shape.key_dim, BD=width, NB=blocks, C=CHUNK, B=CHUNK // 2, KEEP=keep,
        DIAGONAL=triton.next_power_of_2(shape.key_dim), EXACT=exact(k, LAYOUT.precision), PRECISION=LAYOUT.precision,
        num_warps=LAYOUT.warps, num_stages=1, **OPTIONS,
    )
