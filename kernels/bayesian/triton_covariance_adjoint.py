"""The adjoint D of the Bayesian rule's covariance: its walk back over the chunks, and what the chunks need beforehand.

Everything but D itself is known before the walk, so that a step back is D <- Phi^T D Phi + Sigma, with Phi = D_0 and
Sigma = sym(S^T F) from kernels that run over all chunks at once; for r != x one more term of rank C depends on D. The
equations stand in ``triton_covariance_backward``.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .triton_backward_common import (
    inverse_unit_lower,
    load_block,
    load_logs,
    load_rows,
    lower_ratios,
    positions,
    ratios_to_end,
    store_block,
    store_rows,
)
from .triton_common import SHRINK, dot


@triton.jit(do_not_specialize=["T", "H", "G", "padded"])
def _factor_inverse_kernel(
    k, U, gains, scalars, logs, inverse, T, H, G, padded,
    K: tl.constexpr, BD: tl.constexpr, NB: tl.constexpr, C: tl.constexpr, EXACT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """J [C, C]."""
    EVEN: tl.constexpr = BD * NB == K
    chunk = tl.program_id(0)
    bh = tl.program_id(1).to(tl.int64)
    size = tl.num_programs(1).to(tl.int64) * padded
    first = chunk * C
    at = bh * padded + first + tl.arange(0, C)
    keys = k + ((bh // H * T + first) * G + (bh % H) // (H // G)) * K
    tokens = (bh * padded + first) * K
    with_keys = tl.zeros((C, C), tl.float32)
    for n in range(NB):
        u = tl.trans(load_rows(U + tokens, None, K, n * BD, K, C, BD, EVEN))
        kk = load_rows(keys, T - first, G * K, n * BD, K, C, BD, EVEN)
        with_keys = dot(kk, u, with_keys, EXACT, False, PRECISION)
    high, low = load_logs(logs + bh * padded + first, size, C)
    i, j = positions(C)
    factor = lower_ratios(high, low, C) * (tl.load(scalars + SHRINK * size + at) * tl.load(gains + at))[None, :]
    J = inverse_unit_lower(tl.where(i > j, factor * with_keys, 0.0), C)
    store_block(inverse + (bh * (padded // C) + chunk) * (C * C), J, 0, 0, C, C, C, C, True)


@triton.jit(do_not_specialize=["T", "H", "G", "padded"])
def _closed_loop_kernel(
    k, U, dU, gains, dgains, scalars, logs, precision, inverse, F, pulls, T, H, G, padded,
    K: tl.constexpr, BD: tl.constexpr, NB: tl.constexpr, C: tl.constexpr, EXACT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """F and S as [K, C], the latter in ``pulls``."""
    EVEN: tl.constexpr = BD * NB == K
    chunk = tl.program_id(0)
    bh = tl.program_id(1).to(tl.int64)
    size = tl.num_programs(1).to(tl.int64) * padded
    first = chunk * C
    at = bh * padded + first + tl.arange(0, C)
    keys = k + ((bh // H * T + first) * G + (bh % H) // (H // G)) * K
    tokens = (bh * padded + first) * K
    place = bh * (padded // C) + chunk
    h = tl.load(gains + at)
    own = tl.load(precision + bh % H).to(tl.float32) * h * h * tl.load(dgains + at)
    pulled = tl.zeros((C, C), tl.float32)
    for n in range(NB):
        kk = load_rows(keys, T - first, G * K, n * BD, K, C, BD, EVEN)
        du = load_rows(dU + tokens, None, K, n * BD, K, C, BD, EVEN) - own[:, None] * kk
        u = tl.trans(load_rows(U + tokens, None, K, n * BD, K, C, BD, EVEN))
        pulled = dot(du, u, pulled, False, False, PRECISION)
    high, low = load_logs(logs + bh * padded + first, size, C)
    since = tl.exp(high)
    i, j = positions(C)
    factor = lower_ratios(high, low, C) * (tl.load(scalars + SHRINK * size + at) * h)[None, :]
    pulled = tl.where(i > j, -factor * pulled, 0.0)
    # transposed, so that the right operands lie in memory as products want them
    J = load_block(inverse + place * (C * C), 0, 0, C, C, C, C, True) * since[None, :]
    F += place * (K * C)
    pulls += place * (K * C)
    for n in range(NB):
        kk = tl.trans(load_rows(keys, T - first, G * K, n * BD, K, C, BD, EVEN))
        f = dot(kk, tl.trans(J), tl.zeros((BD, C), tl.float32), EXACT, False, PRECISION)
        store_block(F, f, n * BD, 0, K, C, BD, C, EVEN)
        du = tl.trans(load_rows(dU + tokens, None, K, n * BD, K, C, BD, EVEN))
        s = dot(f, tl.trans(pulled), since[None, :] * (du - own[None, :] * kk), False, False, PRECISION)
        store_block(pulls, s, n * BD, 0, K, C, BD, C, EVEN)


@triton.jit(do_not_specialize=["T", "H", "G", "padded"])
def _shrink_kernel(
    k, U, dU, gains, dgains, scalars, logs, precision, inverse, psi, solve, base, T, H, G, padded,
    K: tl.constexpr, BD: tl.constexpr, NB: tl.constexpr, C: tl.constexpr, EXACT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """For r != x: chi = ``base`` + diag(psi D psi^T) with ``psi`` [C, K], and ``solve`` [C, C], the inverse of the
    system that gives lambda from it."""
    EVEN: tl.constexpr = BD * NB == K
    chunk = tl.program_id(0)
    bh = tl.program_id(1).to(tl.int64)
    size = tl.num_programs(1).to(tl.int64) * padded
    first = chunk * C
    at = bh * padded + first + tl.arange(0, C)
    keys = k + ((bh // H * T + first) * G + (bh % H) // (H // G)) * K
    tokens = (bh * padded + first) * K
    place = (bh * (padded // C) + chunk) * (C * C)
    x = tl.load(precision + bh % H).to(tl.float32)
    h = tl.load(gains + at)
    r = tl.load(scalars + SHRINK * size + at)
    own = x * h * h * tl.load(dgains + at)
    high, low = load_logs(logs + bh * padded + first, size, C)
    to_end = ratios_to_end(logs + bh * padded + first, size, high, low, C)
    i, j = positions(C)
    with_keys = tl.zeros((C, C), tl.float32)
    with_gradients = tl.zeros((C, C), tl.float32)
    for n in range(NB):
        u = tl.trans(load_rows(U + tokens, None, K, n * BD, K, C, BD, EVEN))
        kk = load_rows(keys, T - first, G * K, n * BD, K, C, BD, EVEN)
        with_keys = dot(kk, u, with_keys, EXACT, False, PRECISION)
        du = load_rows(dU + tokens, None, K, n * BD, K, C, BD, EVEN) - own[:, None] * kk
        with_gradients = dot(du, u, with_gradients, False, False, PRECISION)
    ratio = lower_ratios(high, low, C)
    strict = tl.where(i > j, ratio * with_keys, 0.0)
    pulled = tl.where(i > j, ratio * with_gradients, 0.0)
    none = tl.zeros((C, C), tl.float32)
    J = load_block(inverse + place, 0, 0, C, C, C, C, True)
    theta = dot(J, strict, none, False, False, PRECISION)
    kappa = dot(-pulled * (r * h)[None, :], theta, pulled, False, False, PRECISION)
    tl.store(base + at, tl.sum(kappa * theta, 0))
    chain = inverse_unit_lower(-theta * theta * (r * (x - r) * h * h)[None, :], C)
    store_block(solve + place, chain, 0, 0, C, C, C, C, True)
    weighted = -tl.trans(theta) * (r * h * to_end)[None, :]
    for n in range(NB):
        u = load_rows(U + tokens, None, K, n * BD, K, C, BD, EVEN)
        ended = dot(weighted, u, to_end[:, None] * u, False, False, PRECISION)
        store_rows(psi + tokens, ended, None, K, n * BD, K, C, BD, EVEN)


@triton.jit(do_not_specialize=["padded"])
def _congruence_kernel(
    U, F, pulls, gains, scalars, logs, phi, dP, padded,
    K: tl.constexpr, BD: tl.constexpr, NB: tl.constexpr, C: tl.constexpr, PRECISION: tl.constexpr,
):
    """Columns of ``phi`` [K, K], Phi^T, and rows of Sigma, which goes where the chunk's D will be."""
    EVEN: tl.constexpr = BD * NB == K
    row = tl.program_id(0) * BD
    chunk = tl.program_id(1)
    bh = tl.program_id(2).to(tl.int64)
    chunks = padded // C
    size = tl.num_programs(2).to(tl.int64) * padded
    first = chunk * C
    at = bh * padded + first + tl.arange(0, C)
    tokens = (bh * padded + first) * K
    log, low = load_logs(logs + bh * padded + first, size, C)
    end_high, end_low = load_logs(logs + bh * padded + first + C - 1, size, 1)
    weight = tl.load(scalars + SHRINK * size + at) * tl.load(gains + at)
    weight *= tl.exp((end_high - log) + (end_low - low))
    whole = tl.exp(tl.load(logs + bh * padded + first + C - 1))
    i, j = positions(BD)
    place = bh * chunks + chunk
    F += place * (K * C)
    pulls += place * (K * C)
    phi += place * (K * K)
    dP += (bh * (chunks + 1) + chunk) * (K * K)
    w = tl.trans(-weight[:, None] * load_rows(U + tokens, None, K, row, K, C, BD, EVEN))
    for m in range(NB):
        column = m * BD
        f = tl.trans(load_block(F, column, 0, K, C, BD, C, EVEN))
        turned = tl.where(i + row == j + column, whole, 0.0)
        turned = dot(w, f, turned, False, False, PRECISION)
        store_block(phi, tl.trans(turned), column, row, K, K, BD, BD, EVEN)
    f = load_block(F, row, 0, K, C, BD, C, EVEN)
    for m in range(NB):
        column = m * BD
        s = tl.trans(load_block(pulls, column, 0, K, C, BD, C, EVEN))
        sigma = dot(f, s, tl.zeros((BD, BD), tl.float32), False, False, PRECISION)
        if NB == 1:
            sigma += tl.trans(sigma)
        else:
            s = load_block(pulls, row, 0, K, C, BD, C, EVEN)
            other = tl.trans(load_block(F, column, 0, K, C, BD, C, EVEN))
            sigma = dot(s, other, sigma, False, False, PRECISION)
        store_block(dP, 0.5 * sigma, row, column, K, K, BD, BD, EVEN)


@triton.jit(do_not_specialize=["H", "chunks"])
def _covariance_adjoint_kernel(
    phi, F, psi, scratch, gains, scalars, precision, solve, base, lam, dP, H, chunks,
    K: tl.constexpr, BD: tl.constexpr, NB: tl.constexpr, BK: tl.constexpr, C: tl.constexpr, UNIT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """dP [N + 1, K, K] from its last slot back; the others hold Sigma beforehand. ``scratch`` is [B H, K, K]."""
    EVEN: tl.constexpr = BD * NB == K
    bh = tl.program_id(0).to(tl.int64)
    padded = chunks * C
    size = tl.num_programs(0).to(tl.int64) * padded
    dP += (bh * (chunks + 1) + chunks) * (K * K)
    phi += (bh * chunks + chunks) * (K * K)
    scratch += bh * (K * K)
    for step in range(chunks):
        chunk = chunks - 1 - step
        phi -= K * K
        tokens = (bh * padded + chunk * C) * K
        if not UNIT:
            at = bh * padded + chunk * C + tl.arange(0, C)
            h = tl.load(gains + at)
            r = tl.load(scalars + SHRINK * size + at)
            x = tl.load(precision + bh % H).to(tl.float32)
            chi = tl.load(base + at)
            for n in range(NB):
                e = tl.zeros((C, BD), tl.float32)
                for part in range(0, K, BK):
                    ended = load_rows(psi + tokens, None, K, part, K, C, BK, EVEN)
                    d = tl.trans(load_block(dP, n * BD, part, K, K, BD, BK, EVEN))
                    e = dot(ended, d, e, False, False, PRECISION)
                chi += tl.sum(e * load_rows(psi + tokens, None, K, n * BD, K, C, BD, EVEN), 1)
            inverse = load_block(solve + (bh * chunks + chunk) * (C * C), 0, 0, C, C, C, C, True)
            more = tl.sum(inverse * (r * (x - r) * h * h * chi)[:, None], 0)
            tl.store(base + at, chi)
            tl.store(lam + at, more)
        # Phi^T D, then that with Phi; both D and Phi read as rows that products take for columns, D being symmetric
        for n in range(NB):
            for m in range(NB):
                half = tl.zeros((BD, BD), tl.float32)
                for part in range(0, K, BK):
                    a = load_block(phi, n * BD, part, K, K, BD, BK, EVEN)
                    d = tl.trans(load_block(dP, m * BD, part, K, K, BD, BK, EVEN))
                    half = dot(a, d, half, False, False, PRECISION)
                store_block(scratch, half, n * BD, m * BD, K, K, BD, BD, EVEN)
        # what follows reads what other threads wrote
        tl.debug_barrier()
        dP -= K * K
        for n in range(NB):
            for m in range(NB):
                state = load_block(dP, n * BD, m * BD, K, K, BD, BD, EVEN)
                for part in range(0, K, BK):
                    a = load_block(scratch, n * BD, part, K, K, BD, BK, EVEN)
                    b = tl.trans(load_block(phi, m * BD, part, K, K, BD, BK, EVEN))
                    state = dot(a, b, state, False, False, PRECISION)
                if not UNIT:
                    chunk_F = F + (bh * chunks + chunk) * (K * C)
                    f = more[None, :] * load_block(chunk_F, n * BD, 0, K, C, BD, C, EVEN)
                    other = tl.trans(load_block(chunk_F, m * BD, 0, K, C, BD, C, EVEN))
                    state = dot(f, other, state, False, False, PRECISION)
                store_block(dP, state, n * BD, m * BD, K, K, BD, BD, EVEN)
        tl.debug_barrier()
