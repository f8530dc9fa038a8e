"""The Bayesian rule's gradients that go through the covariance, every chunk by itself: six kernels in a row, each with
few matrices alive at a time, so that none spills and several programs share a multiprocessor.

With U = (R J) B, B = C K P + N K, and D the adjoint of P after the chunk: first dB = (R J)^T dU; then what the
covariance that enters says of the keys and of dB; then the elimination's adjoint, between matrices of the chunk's
tokens alone; last the keys' gradient. The equations stand in ``triton_covariance_backward``.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .triton_backward_common import (
    load_block,
    load_logs,
    load_rows,
    lower_ratios,
    positions,
    ratios_to_end,
    store_block,
    store_rows,
)
from .triton_common import GATHERED, NOISE, SHRINK, dot


@triton.jit(do_not_specialize=["T", "H", "G", "padded"])
def _known_gradient_kernel(
    k, U, dU, dP, gains, scalars, logs, inverse, leaving, known_key, T, H, G, padded,
    K: tl.constexpr, BD: tl.constexpr, NB: tl.constexpr, C: tl.constexpr, PRECISION: tl.constexpr,
):
    """dU [C, K] becomes dB; ``leaving`` [C] is u^T D u, ``known_key`` [C] dB.k."""
    EVEN: tl.constexpr = BD * NB == K
    chunk = tl.program_id(0)
    bh = tl.program_id(1).to(tl.int64)
    chunks = padded // C
    size = tl.num_programs(1).to(tl.int64) * padded
    first = chunk * C
    at = bh * padded + first + tl.arange(0, C)
    keys = k + ((bh // H * T + first) * G + (bh % H) // (H // G)) * K
    tokens = (bh * padded + first) * K
    dP += (bh * (chunks + 1) + chunk + 1) * (K * K)
    logs += bh * padded + first
    high, low = load_logs(logs, size, C)
    to_end = ratios_to_end(logs, size, high, low, C)
    weight = -2 * to_end * to_end * tl.load(scalars + SHRINK * size + at) * tl.load(gains + at)
    left = tl.zeros((C,), tl.float32)
    with_key = tl.zeros((C,), tl.float32)
    for n in range(NB):
        t = tl.zeros((C, BD), tl.float32)
        for m in range(NB):
            u = load_rows(U + tokens, None, K, m * BD, K, C, BD, EVEN)
            # read by columns, since D is symmetric and products want it so
            d = tl.trans(load_block(dP, n * BD, m * BD, K, K, BD, BD, EVEN))
            t = dot(u, d, t, False, False, PRECISION)
        left += tl.sum(t * load_rows(U + tokens, None, K, n * BD, K, C, BD, EVEN), 1)
        du = load_rows(dU + tokens, None, K, n * BD, K, C, BD, EVEN) + weight[:, None] * t
        J = load_block(inverse + (bh * chunks + chunk) * (C * C), 0, 0, C, C, C, C, True)
        mixing = tl.trans(lower_ratios(high, low, C) * J)
        db = dot(mixing, du, tl.zeros((C, BD), tl.float32), False, False, PRECISION)
        with_key += tl.sum(db * load_rows(keys, T - first, G * K, n * BD, K, C, BD, EVEN), 1)
        tl.debug_barrier()
        store_rows(dU + tokens, db, None, K, n * BD, K, C, BD, EVEN)
    tl.store(leaving + at, left)
    tl.store(known_key + at, with_key)


@triton.jit(do_not_specialize=["T", "H", "G", "padded", "slots"])
def _entering_kernel(
    k, db, P, dP, read_keys, keys_keys, known_read, pairs, traces, T, H, G, padded, slots,
    K: tl.constexpr, BD: tl.constexpr, NB: tl.constexpr, C: tl.constexpr, EXACT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """``read_keys`` [C, C] is K P K^T, ``keys_keys`` K K^T, ``known_read`` [C] dB P k, ``pairs`` <D, P>, ``traces``
    tr D."""
    EVEN: tl.constexpr = BD * NB == K
    chunk = tl.program_id(0)
    bh = tl.program_id(1).to(tl.int64)
    chunks = padded // C
    first = chunk * C
    keys = k + ((bh // H * T + first) * G + (bh % H) // (H // G)) * K
    tokens = (bh * padded + first) * K
    P += (bh * slots + chunk) * (K * K)
    dP += (bh * (chunks + 1) + chunk + 1) * (K * K)
    reads = tl.zeros((C, C), tl.float32)
    alone = tl.zeros((C, C), tl.float32)
    known = tl.zeros((C,), tl.float32)
    paired = tl.zeros((BD,), tl.float32)
    trace = tl.zeros((BD,), tl.float32)
    for n in range(NB):
        q = tl.zeros((C, BD), tl.float32)
        for m in range(NB):
            p = load_block(P, n * BD, m * BD, K, K, BD, BD, EVEN)
            paired += tl.sum(p * load_block(dP, n * BD, m * BD, K, K, BD, BD, EVEN), 0)
            kk = load_rows(keys, T - first, G * K, m * BD, K, C, BD, EVEN)
            q = dot(kk, tl.trans(p), q, EXACT, False, PRECISION)
        spot = n * BD + tl.arange(0, BD)
        trace += tl.load(dP + spot * (K + 1), mask=spot < K, other=0.0)
        known += tl.sum(q * load_rows(db + tokens, None, K, n * BD, K, C, BD, EVEN), 1)
        kk = load_rows(keys, T - first, G * K, n * BD, K, C, BD, EVEN)
        reads = dot(q, tl.trans(kk), reads, False, EXACT, PRECISION)
        alone = dot(kk, tl.trans(kk), alone, EXACT, EXACT, PRECISION)
    place = bh * chunks + chunk
    store_block(keys_keys + place * (C * C), alone, 0, 0, C, C, C, C, True)
    store_block(read_keys + place * (C * C), reads, 0, 0, C, C, C, C, True)
    tl.store(known_read + bh * padded + first + tl.arange(0, C), known)
    tl.store(pairs + place, tl.sum(paired, 0))
    tl.store(traces + place, tl.sum(trace, 0))


@triton.jit(do_not_specialize=["T", "H", "G", "padded"])
def _elimination_gradient_kernel(
    k, U, db, gains, dgains, scalars, logs, precision, inverse, leaving, base, lam, dfactors, dscalars, dprecision,
    T, H, G, padded,
    K: tl.constexpr, BD: tl.constexpr, NB: tl.constexpr, C: tl.constexpr, UNIT: tl.constexpr, EXACT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """``inverse`` [C, C] becomes the gradient of S, symmetric and, if UNIT, yet without its factor x; ``dfactors``
    [C, C] is what the triangular solve gives the ratios. Some of the scalars' gradients."""
    EVEN: tl.constexpr = BD * NB == K
    chunk = tl.program_id(0)
    bh = tl.program_id(1).to(tl.int64)
    place = bh * (padded // C) + chunk
    size = tl.num_programs(1).to(tl.int64) * padded
    first = chunk * C
    at = bh * padded + first + tl.arange(0, C)
    keys = k + ((bh // H * T + first) * G + (bh % H) // (H // G)) * K
    tokens = (bh * padded + first) * K
    inverse += place * (C * C)
    logs += bh * padded + first
    h = tl.load(gains + at)
    r = tl.load(scalars + SHRINK * size + at)
    high, low = load_logs(logs, size, C)
    to_end = ratios_to_end(logs, size, high, low, C)
    i, j = positions(C)
    nothing = tl.zeros((C, C), tl.float32)

    # through the triangular solve
    of_known, with_keys = nothing, nothing
    for n in range(NB):
        u = tl.trans(load_rows(U + tokens, None, K, n * BD, K, C, BD, EVEN))
        of_known = dot(load_rows(db + tokens, None, K, n * BD, K, C, BD, EVEN), u, of_known, False, False, PRECISION)
        kk = load_rows(keys, T - first, G * K, n * BD, K, C, BD, EVEN)
        with_keys = dot(kk, u, with_keys, EXACT, False, PRECISION)
    ratio = lower_ratios(high, low, C)
    strict = tl.where(i > j, ratio * with_keys, 0.0)
    dfactor = tl.where(i > j, -of_known, 0.0)
    factor = strict * (r * h)[None, :] + tl.where(i == j, 1.0, 0.0)
    store_block(dfactors + place * (C * C), factor * dfactor, 0, 0, C, C, C, C, True)
    inner = dot(tl.trans(factor), ratio * dfactor, nothing, False, False, PRECISION)

    # through the elimination
    left = tl.load(leaving + at)
    gradient = tl.load(dgains + at)
    outside = gradient - to_end * to_end * r * left
    J = load_block(inverse, 0, 0, C, C, C, C, True)
    if UNIT:
        inner = tl.where(i > j, inner * h[None, :], 0.0) - tl.where(i == j, (outside * h * h)[None, :], 0.0)
        tl.store(dscalars + 3 * size + at, -to_end * to_end * h * left)
    else:
        x = tl.load(precision + bh % H).to(tl.float32)
        theta = dot(J, strict, nothing, False, False, PRECISION)
        chi = tl.load(base + at) + tl.sum(theta * theta * tl.load(lam + at)[:, None], 0)
        total = gradient - r * chi
        inner = tl.where(i > j, inner * (r * h)[None, :], 0.0)
        inner -= tl.where(i == j, (h * h * (r * outside + (x - r) * total))[None, :], 0.0)
        dobservation = -h * h * total
        tl.store(dscalars + 2 * size + at, dobservation)
        dx = tl.sum(dobservation * tl.sum(tl.where(i == j, with_keys, 0.0), 1), 0)
        tl.store(dprecision + place, dx)
        tl.store(dscalars + 3 * size + at, -h * chi)
    # (J^T (inner J))^T in two steps, with the right operands as they lie
    J = tl.trans(J)
    inner = dot(J, tl.trans(inner), nothing, False, False, PRECISION)
    inner = dot(J, tl.trans(inner), nothing, False, False, PRECISION)
    inner = 0.5 * (inner + tl.trans(inner))
    # every thread has read J
    tl.debug_barrier()
    store_block(inverse, inner, 0, 0, C, C, C, C, True)


@triton.jit(do_not_specialize=["H", "padded"])
def _scalars_gradient_kernel(
    gains, scalars, logs, precision, inner, read_keys, keys_keys, dfactors, leaving, known_key, known_read, pairs,
    traces, dscalars, dprecision, H, padded, C: tl.constexpr, UNIT: tl.constexpr,
):
    """``inner`` [C, C], from the kernel before, becomes what K P is multiplied with in the keys' gradient,
    ``read_keys`` what K is, both symmetric; ``dfactors`` and ``known_read`` become the gradients of the products of
    steps, between tokens and since the chunk's start. The other scalars' gradients but the steps'."""
    chunk = tl.program_id(0)
    bh = tl.program_id(1).to(tl.int64)
    place = bh * (padded // C) + chunk
    size = tl.num_programs(1).to(tl.int64) * padded
    first = chunk * C
    at = bh * padded + first + tl.arange(0, C)
    inner += place * (C * C)
    read_keys += place * (C * C)
    logs += bh * padded + first
    high, low = load_logs(logs, size, C)
    since = tl.exp(high)
    i, j = positions(C)
    # S[t, s] = since_t since_s k_t P k_s + ratio[t, s] N_s k_t.k_s, and U = (ratio J) (since^2 K P + N K). Sums over t
    # as sums over the rows, in matrices that are symmetric or made transposed: rows lie in few threads
    either = tl.exp(-tl.abs((high[:, None] - high[None, :]) + (low[:, None] - low[None, :])))
    gathered = tl.load(scalars + GATHERED * size + at)
    dS = load_block(inner, 0, 0, C, C, C, C, True)
    of_reads = tl.sum(dS * since[None, :] * load_block(read_keys, 0, 0, C, C, C, C, True), 1)
    # of pairs in either order, once
    of_pairs = tl.where(i == j, dS, 2 * dS) * load_block(keys_keys + place * (C * C), 0, 0, C, C, C, C, True)
    of_noise = tl.sum(tl.where(j >= i, either * of_pairs, 0.0), 1)
    scale = 1.0
    if UNIT:
        tl.store(dscalars + 2 * size + at, tl.sum(tl.where(i == j, dS, 0.0), 1))
        tl.store(dprecision + place, tl.sum(since * of_reads, 0) + tl.sum(gathered * of_noise, 0))
        scale = tl.load(precision + bh % H).to(tl.float32)
    # every thread has read what is overwritten
    tl.debug_barrier()
    store_block(inner, 2 * scale * since[:, None] * dS * since[None, :], 0, 0, C, C, C, C, True)
    earlier = tl.where(i >= j, gathered[None, :], gathered[:, None])
    store_block(read_keys, 2 * scale * dS * either * earlier, 0, 0, C, C, C, C, True)

    end = tl.arange(0, C).to(tl.float32) == C - 1.0
    dgathered = scale * of_noise + tl.load(known_key + at) + tl.where(end, tl.load(traces + place), 0.0)
    tl.store(dscalars + size + at, tl.sum(tl.where(j >= i, either * either * dgathered[None, :], 0.0), 1))
    dsince = 2 * scale * of_reads + 2 * since * tl.load(known_read + at)
    dsince += tl.where(end, 2 * since * tl.load(pairs + place), 0.0)
    tl.store(known_read + at, dsince)
    dratio = load_block(dfactors + place * (C * C), 0, 0, C, C, C, C, True)
    dratio += of_pairs * (scale * gathered)[None, :]
    dratio += 2 * either * dgathered[:, None] * tl.load(scalars + NOISE * size + at)[None, :]
    weight = ratios_to_end(logs, size, high, low, C) * tl.load(scalars + SHRINK * size + at) * tl.load(gains + at)
    dratio += tl.where(i == C - 1.0, (-2 * weight * tl.load(leaving + at))[None, :], 0.0)
    store_block(dfactors + place * (C * C), dratio, 0, 0, C, C, C, C, True)


@triton.jit(do_not_specialize=["T", "H", "G", "padded", "slots"])
def _keys_gradient_kernel(
    k, db, dk, through_reads, through_keys, scalars, logs, P, dkeys, T, H, G, padded, slots,
    K: tl.constexpr, BD: tl.constexpr, NB: tl.constexpr, BN: tl.constexpr, C: tl.constexpr, EXACT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """[C, BN] of dk + N dB + ``through_keys`` K + (C dB + ``through_reads`` K) P."""
    EVEN: tl.constexpr = BD * NB == K
    WHOLE: tl.constexpr = K % BN == 0
    column = tl.program_id(0) * BN
    chunk = tl.program_id(1)
    bh = tl.program_id(2).to(tl.int64)
    size = tl.num_programs(2).to(tl.int64) * padded
    first = chunk * C
    at = bh * padded + first + tl.arange(0, C)
    keys = k + ((bh // H * T + first) * G + (bh % H) // (H // G)) * K
    tokens = (bh * padded + first) * K
    place = (bh * (padded // C) + chunk) * (C * C)
    P += (bh * slots + chunk) * (K * K)
    # transposed, so that the right operands lie in memory as products want them
    gathered = tl.load(scalars + GATHERED * size + at)
    gradient = load_rows(dk + tokens, None, K, column, K, C, BN, WHOLE)
    gradient += gathered[:, None] * load_rows(db + tokens, None, K, column, K, C, BN, WHOLE)
    own = tl.trans(load_rows(keys, T - first, G * K, column, K, C, BN, WHOLE))
    symmetric = load_block(through_keys + place, 0, 0, C, C, C, C, True)
    gradient = dot(own, tl.trans(symmetric), tl.trans(gradient), EXACT, False, PRECISION)
    since = tl.exp(tl.load(logs + at))
    symmetric = load_block(through_reads + place, 0, 0, C, C, C, C, True)
    for m in range(NB):
        read = tl.trans((since * since)[:, None] * load_rows(db + tokens, None, K, m * BD, K, C, BD, EVEN))
        kk = tl.trans(load_rows(keys, T - first, G * K, m * BD, K, C, BD, EVEN))
        read = dot(kk, tl.trans(symmetric), read, EXACT, False, PRECISION)
        p = load_block(P, column, m * BD, K, K, BN, BD, EVEN and WHOLE)
        gradient = dot(p, read, gradient, False, False, PRECISION)
    dkeys += ((bh // H * T + first) * H + bh % H) * K
    store_rows(dkeys, tl.trans(gradient), T - first, H * K, column, K, C, BN, WHOLE)
