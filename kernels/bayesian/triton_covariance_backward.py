"""Gradients through the Bayesian rule's covariance, without its elimination: one symmetric recurrence from chunk to
chunk, and everything else by chunks in parallel.

Let D be the adjoint of P, m_t the gradient of u_t from the mean and g_t that of h_t. With m' = m - x h^2 g k, one token
back is

    D <- c ((I - r h k u^T) D (I - r h u k^T) + r (x - r) h^2 (u^T D u) k k^T + sym(m' k^T))

where the term in the middle is zero if r = x. A chunk's tokens together, R the ratios of sqrt c, sqrt C those since the
chunk's start, L = I + tril(R (K U^T), -1) diag(r h) and J = L^-1:

    D <- D_0^T D D_0 + sym(S^T F) + F^T diag(lambda) F        D_0 = sqrt C I - W^T F
    F = J (sqrt C K)        W = (sqrt C / sqrt C_s r h) U        S = sqrt C m' - tril(R (m' U^T), -1) diag(r h) F

with lambda_t = r (x - r) h^2 chi_t and chi_t = u_t^T D_t u_t, which a triangular system in the chunk's tokens gives. F
and S need no D and come first, in parallel. Then D walks back over the chunks. Last, in parallel again, comes every
gradient, from the D after its chunk, by the chain rule through the factorised form. There the elimination's own adjoint
is, with dL and dh the gradients from outside of it,

    dS = J^T Y J symmetrised        Y = tril(L^T dL, -1) diag(r h) - diag(h^2 (r dh + (x - r) (g - r chi)))
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .triton_common import (
    CHUNK,
    GATHERED,
    NOISE,
    OPTIONS,
    SHRINK,
    Shape,
    Table,
    dot,
    exact,
    invert_unit_lower,
    load_matrix,
    load_tokens,
    ratios,
    steps_gradient,
    store_matrix,
    store_tokens,
)


@triton.jit(do_not_specialize=["T", "H", "G", "padded"])
def _closed_loop_kernel(
    k, U, dU, gains, dgains, scalars, logs, precision, inverse, F, pulls, psi, solve, base, T, H, G, padded,
    K: tl.constexpr, BD: tl.constexpr, NB: tl.constexpr, C: tl.constexpr, UNIT: tl.constexpr, EXACT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    chunk = tl.program_id(0)
    bh = tl.program_id(1).to(tl.int64)
    size = tl.num_programs(1).to(tl.int64) * padded
    first = chunk * C
    at = bh * padded + first + tl.arange(0, C)
    keys = k + (bh // H * T * G + (bh % H) // (H // G)) * K
    tokens = bh * padded * K
    logs += size + bh * padded
    x = tl.load(precision + bh % H).to(tl.float32)
    h = tl.load(gains + at)
    r = tl.load(scalars + SHRINK * size + at)
    own = x * h * h * tl.load(dgains + at)
    log = tl.load(logs + first + tl.arange(0, C))
    since = tl.exp(log.to(tl.float32))
    i = tl.arange(0, C)[:, None]
    j = tl.arange(0, C)[None, :]
    with_keys = tl.zeros((C, C), tl.float32)
    with_gradients = tl.zeros((C, C), tl.float32)
    for n in range(NB):
        u = tl.trans(load_tokens(U + tokens, first, padded, K, n * BD, K, C, BD))
        kk = load_tokens(keys, first, T, G * K, n * BD, K, C, BD)
        with_keys = dot(kk, u, with_keys, EXACT, False, PRECISION)
        du = load_tokens(dU + tokens, first, padded, K, n * BD, K, C, BD)
        with_gradients = dot(du, u, with_gradients, False, False, PRECISION)
    ratio = ratios(logs, first, C)
    strict = tl.where(i > j, ratio * with_keys, 0.0)
    pulled = tl.where(i > j, ratio * (with_gradients - own[:, None] * with_keys), 0.0)
    place = (bh * (padded // C) + chunk) * (C * C)
    store_matrix(inverse + place, strict * (r * h)[None, :], 0, 0, C, C, C, C)
    invert_unit_lower(inverse + place, C)
    J = load_matrix(inverse + place, 0, 0, C, C, C, C)
    scaled = pulled * (r * h)[None, :]
    for n in range(NB):
        kk = load_tokens(keys, first, T, G * K, n * BD, K, C, BD)
        none = tl.zeros((C, BD), tl.float32)
        f = dot(J * since[None, :], kk, none, False, EXACT, PRECISION)
        store_tokens(F + tokens, f, first, padded, K, n * BD, K, C, BD)
        du = load_tokens(dU + tokens, first, padded, K, n * BD, K, C, BD)
        g = dot(-scaled, f, since[:, None] * (du - own[:, None] * kk), False, False, PRECISION)
        store_tokens(pulls + tokens, g, first, padded, K, n * BD, K, C, BD)
    if not UNIT:
        last = tl.load(logs + first + C - 1)
        to_end = tl.exp((last - log).to(tl.float32))
        none = tl.zeros((C, C), tl.float32)
        theta = dot(J, strict, none, False, False, PRECISION)
        kappa = dot(-scaled, theta, pulled, False, False, PRECISION)
        tl.store(base + at, tl.sum(kappa * theta, 0))
        rho = r * (x - r) * h * h
        store_matrix(solve + place, -theta * theta * rho[None, :], 0, 0, C, C, C, C)
        invert_unit_lower(solve + place, C)
        weighted = -tl.trans(theta) * (r * h * to_end)[None, :]
        for n in range(NB):
            u = load_tokens(U + tokens, first, padded, K, n * BD, K, C, BD)
            ended = dot(weighted, u, to_end[:, None] * u, False, False, PRECISION)
            store_tokens(psi + tokens, ended, first, padded, K, n * BD, K, C, BD)


@triton.jit(do_not_specialize=["H", "chunks"])
def _covariance_adjoint_kernel(
    U, F, pulls, psi, gains, scalars, logs, precision, solve, base, lam, dP, H, chunks,
    K: tl.constexpr, BD: tl.constexpr, NB: tl.constexpr, C: tl.constexpr, UNIT: tl.constexpr, PRECISION: tl.constexpr,
):
    bh = tl.program_id(0).to(tl.int64)
    padded = chunks * C
    size = tl.num_programs(0).to(tl.int64) * padded
    tokens = bh * padded * K
    logs += size + bh * padded
    dP += (bh * (chunks + 1) + chunks) * (K * K)
    x = tl.load(precision + bh % H).to(tl.float32)
    for step in range(chunks):
        chunk = chunks - 1 - step
        first = chunk * C
        at = bh * padded + first + tl.arange(0, C)
        last = tl.load(logs + first + C - 1)
        whole = tl.exp(last.to(tl.float32))
        h = tl.load(gains + at)
        r = tl.load(scalars + SHRINK * size + at)
        weight = r * h * tl.exp((last - tl.load(logs + first + tl.arange(0, C))).to(tl.float32))
        target = dP - K * K
        none = tl.zeros((C, BD), tl.float32)
        twice = tl.zeros((C, C), tl.float32)
        chi = tl.zeros((C,), tl.float32)
        for j in range(NB):
            t = none
            e = none
            for i in range(NB):
                d = tl.trans(load_matrix(dP, j * BD, i * BD, K, K, BD, BD))
                w = weight[:, None] * load_tokens(U + tokens, first, padded, K, i * BD, K, C, BD)
                t = dot(w, d, t, False, False, PRECISION)
                if not UNIT:
                    w = load_tokens(psi + tokens, first, padded, K, i * BD, K, C, BD)
                    e = dot(w, d, e, False, False, PRECISION)
            w = weight[:, None] * load_tokens(U + tokens, first, padded, K, j * BD, K, C, BD)
            twice = dot(t, tl.trans(w), twice, False, False, PRECISION)
            z = load_tokens(pulls + tokens, first, padded, K, j * BD, K, C, BD) - 2 * whole * t
            store_tokens(pulls + tokens, z, first, padded, K, j * BD, K, C, BD)
            if not UNIT:
                chi += tl.sum(e * load_tokens(psi + tokens, first, padded, K, j * BD, K, C, BD), 1)
        more = tl.zeros((C,), tl.float32)
        if not UNIT:
            chi += tl.load(base + at)
            tl.store(base + at, chi)
            inverse = load_matrix(solve + (bh * chunks + chunk) * (C * C), 0, 0, C, C, C, C)
            more = tl.sum(inverse * (r * (x - r) * h * h * chi)[:, None], 0)
            tl.store(lam + at, more)
        tl.debug_barrier()
        for j in range(NB):
            f = load_tokens(F + tokens, first, padded, K, j * BD, K, C, BD)
            z = load_tokens(pulls + tokens, first, padded, K, j * BD, K, C, BD)
            if not UNIT:
                z += more[:, None] * f
            z = dot(twice, f, z, False, False, PRECISION)
            store_tokens(pulls + tokens, z, first, padded, K, j * BD, K, C, BD)
        tl.debug_barrier()
        for i in range(NB):
            for j in range(i, NB):
                z = tl.trans(load_tokens(pulls + tokens, first, padded, K, i * BD, K, C, BD))
                f = load_tokens(F + tokens, first, padded, K, j * BD, K, C, BD)
                d = dot(z, f, tl.zeros((BD, BD), tl.float32), False, False, PRECISION)
                other = d
                if i != j:
                    z = tl.trans(load_tokens(pulls + tokens, first, padded, K, j * BD, K, C, BD))
                    f = load_tokens(F + tokens, first, padded, K, i * BD, K, C, BD)
                    other = dot(z, f, tl.zeros((BD, BD), tl.float32), False, False, PRECISION)
                d = 0.5 * (d + tl.trans(other))
                d += whole * whole * load_matrix(dP, i * BD, j * BD, K, K, BD, BD)
                store_matrix(target, d, i * BD, j * BD, K, K, BD, BD)
                if i != j:
                    store_matrix(target, tl.trans(d), j * BD, i * BD, K, K, BD, BD)
        dP = target
        # the next step reads what other threads wrote
        tl.debug_barrier()


@triton.jit(do_not_specialize=["T", "H", "G", "padded", "slots"])
def _covariance_gradients_kernel(
    k, U, dU, dk, gains, dgains, scalars, logs, precision, inverse, P, dP, base, lam, reads, dkeys, dscalars,
    dprecision, T, H, G, padded, slots,
    K: tl.constexpr, BD: tl.constexpr, NB: tl.constexpr, C: tl.constexpr, UNIT: tl.constexpr, EXACT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    chunk = tl.program_id(0)
    bh = tl.program_id(1).to(tl.int64)
    chunks = padded // C
    size = tl.num_programs(1).to(tl.int64) * padded
    first = chunk * C
    at = bh * padded + first + tl.arange(0, C)
    keys = k + (bh // H * T * G + (bh % H) // (H // G)) * K
    tokens = bh * padded * K
    logs += size + bh * padded
    P += (bh * slots + chunk) * (K * K)
    dP += (bh * (chunks + 1) + chunk + 1) * (K * K)
    x = tl.load(precision + bh % H).to(tl.float32)
    h = tl.load(gains + at)
    r = tl.load(scalars + SHRINK * size + at)
    log = tl.load(logs + first + tl.arange(0, C))
    last = tl.load(logs + first + C - 1)
    since = tl.exp(log.to(tl.float32))
    to_end = tl.exp((last - log).to(tl.float32))
    ratio = ratios(logs, first, C)
    J = load_matrix(inverse + (bh * chunks + chunk) * (C * C), 0, 0, C, C, C, C)
    i = tl.arange(0, C)[:, None]
    j = tl.arange(0, C)[None, :]
    end = tl.arange(0, C) == C - 1
    none = tl.zeros((C, BD), tl.float32)
    nothing = tl.zeros((C, C), tl.float32)

    mixing = tl.trans(ratio * J)
    leaving = tl.zeros((C,), tl.float32)
    known_read = tl.zeros((C,), tl.float32)
    known_key = tl.zeros((C,), tl.float32)
    pairs = tl.zeros((BD, BD), tl.float32)
    trace = tl.zeros((BD,), tl.float32)
    of_known, with_keys, read_keys, keys_keys = nothing, nothing, nothing, nothing
    for n in range(NB):
        t = none
        q = none
        for m in range(NB):
            d = load_matrix(dP, n * BD, m * BD, K, K, BD, BD)
            p = load_matrix(P, n * BD, m * BD, K, K, BD, BD)
            pairs += d * p
            u = load_tokens(U + tokens, first, padded, K, m * BD, K, C, BD)
            t = dot(u, tl.trans(d), t, False, False, PRECISION)
            kk = load_tokens(keys, first, T, G * K, m * BD, K, C, BD)
            q = dot(kk, tl.trans(p), q, EXACT, False, PRECISION)
        spot = n * BD + tl.arange(0, BD)
        trace += tl.load(dP + spot * (K + 1), mask=spot < K, other=0.0)
        u = load_tokens(U + tokens, first, padded, K, n * BD, K, C, BD)
        kk = load_tokens(keys, first, T, G * K, n * BD, K, C, BD)
        leaving += tl.sum(t * u, 1)
        du = load_tokens(dU + tokens, first, padded, K, n * BD, K, C, BD)
        du -= (2 * to_end * to_end * r * h)[:, None] * t
        db = dot(mixing, du, none, False, False, PRECISION)
        of_known = dot(db, tl.trans(u), of_known, False, False, PRECISION)
        with_keys = dot(kk, tl.trans(u), with_keys, EXACT, False, PRECISION)
        read_keys = dot(q, tl.trans(kk), read_keys, False, EXACT, PRECISION)
        keys_keys = dot(kk, tl.trans(kk), keys_keys, EXACT, EXACT, PRECISION)
        known_read += tl.sum(db * q, 1)
        known_key += tl.sum(db * kk, 1)
        tl.debug_barrier()
        # dU is spent: the gradient of what the triangular solve starts from takes its place
        store_tokens(dU + tokens, db, first, padded, K, n * BD, K, C, BD)
        store_tokens(reads + tokens, q, first, padded, K, n * BD, K, C, BD)
    tl.debug_barrier()

    # through the triangular solve, then through the elimination
    gradient = tl.load(dgains + at)
    outside = gradient - to_end * to_end * r * leaving
    dfactor = tl.where(i > j, -of_known, 0.0)
    strict = tl.where(i > j, ratio * with_keys, 0.0)
    factor = strict * (r * h)[None, :] + tl.where(i == j, 1.0, 0.0)
    dratio = factor * dfactor
    inner = dot(tl.trans(factor), ratio * dfactor, nothing, False, False, PRECISION)
    gathered = tl.load(scalars + GATHERED * size + at)
    earlier = tl.where(i >= j, gathered[None, :] + nothing, gathered[:, None])
    if UNIT:
        inner = tl.where(i > j, inner * h[None, :], 0.0) - tl.where(i == j, (outside * h * h)[None, :], 0.0)
        inner = dot(tl.trans(J), dot(inner, J, nothing, False, False, PRECISION), nothing, False, False, PRECISION)
        inner = 0.5 * (inner + tl.trans(inner))
        dobservation = tl.sum(tl.where(i == j, inner, 0.0), 1)
        dS = x * inner
        either = tl.exp(-tl.abs((log[:, None] - log[None, :]).to(tl.float32)))
        S = since[:, None] * since[None, :] * read_keys + either * earlier * keys_keys
        dx = tl.sum(tl.sum(inner * S, 1), 0)
        dshrink = -to_end * to_end * h * leaving
    else:
        theta = dot(J, strict, nothing, False, False, PRECISION)
        chi = tl.load(base + at) + tl.sum(theta * theta * tl.load(lam + at)[:, None], 0)
        total = gradient - r * chi
        inner = tl.where(i > j, inner * (r * h)[None, :], 0.0)
        inner -= tl.where(i == j, (h * h * (r * outside + (x - r) * total))[None, :], 0.0)
        dS = dot(tl.trans(J), dot(inner, J, nothing, False, False, PRECISION), nothing, False, False, PRECISION)
        dS = 0.5 * (dS + tl.trans(dS))
        dobservation = -h * h * total
        dx = tl.sum(dobservation * tl.sum(tl.where(i == j, with_keys, 0.0), 1), 0)
        dshrink = -h * chi
    tl.store(dprecision + bh * chunks + chunk, dx)

    # S[t, s] = since_t since_s k_t P k_s + ratio[t, s] N_s k_t.k_s, and U = (ratio J) (since^2 K P + N K)
    lower = tl.where(i > j, 2 * dS, tl.where(i == j, dS, 0.0))
    dratio += lower * gathered[None, :] * keys_keys
    dgathered = tl.sum(lower * ratio * keys_keys, 0) + known_key
    dgathered += tl.where(end, tl.sum(trace, 0), 0.0)
    dsince = 2 * tl.sum(dS * since[None, :] * read_keys, 1) + 2 * since * known_read
    dsince += tl.where(end, 2 * since * tl.sum(tl.sum(pairs, 1), 0), 0.0)
    dratio += tl.where(i == C - 1, (-2 * to_end * r * h * leaving)[None, :], 0.0)
    dratio += 2 * ratio * dgathered[:, None] * tl.load(scalars + NOISE * size + at)[None, :]
    tl.store(dscalars + at, steps_gradient(dratio, ratio, dsince, logs, first, C, PRECISION))
    tl.store(dscalars + size + at, tl.sum(ratio * ratio * dgathered[:, None], 0))
    tl.store(dscalars + 2 * size + at, dobservation)
    tl.store(dscalars + 3 * size + at, dshrink)

    lower = lower * ratio * gathered[None, :]
    lower += tl.trans(lower)
    dS = 2 * since[:, None] * dS * since[None, :]
    for n in range(NB):
        db = load_tokens(dU + tokens, first, padded, K, n * BD, K, C, BD)
        gradient_k = load_tokens(dk + tokens, first, padded, K, n * BD, K, C, BD) + gathered[:, None] * db
        kk = load_tokens(keys, first, T, G * K, n * BD, K, C, BD)
        gradient_k = dot(lower, kk, gradient_k, False, EXACT, PRECISION)
        q = load_tokens(reads + tokens, first, padded, K, n * BD, K, C, BD)
        gradient_k = dot(dS, q, gradient_k, False, False, PRECISION)
        for m in range(NB):
            db = (since * since)[:, None] * load_tokens(dU + tokens, first, padded, K, m * BD, K, C, BD)
            p = tl.trans(load_matrix(P, n * BD, m * BD, K, K, BD, BD))
            gradient_k = dot(db, p, gradient_k, False, False, PRECISION)
        store_tokens(
            dkeys + (bh // H * T * H + bh % H) * K, gradient_k, first, T, H * K, n * BD, K, C, BD
        )


class CovarianceGradients(NamedTuple):
    """Gradients by value head, the scalars' [B, H, N CHUNK]."""

    dk: Tensor  # [B, T, H, K], the mean's part with it
    cov_decay_sqrt: Tensor
    process_noise: Tensor
    observation_noise: Tensor
    shrink: Tensor
    precision: Tensor  # [B, H, N]
    start: Tensor  # [B, H, K, K], of the covariance before the first token


def covariance_backward(
    shape: Shape, k: Tensor, table: Table, precision: Tensor, U: Tensor, gains: Tensor, P: Tensor, dU: Tensor,
    dk: Tensor, dgains: Tensor, dfinal: Tensor, unit_gain: bool,
) -> CovarianceGradients:
    width, blocks = shape.key_blocks(64)
    keys = {"K": shape.key_dim, "BD": width, "NB": blocks, "C": CHUNK, "UNIT": unit_gain, "PRECISION": "tf32x3"}
    square = (shape.batch, shape.heads, shape.chunks, CHUNK, CHUNK)
    inverse = torch.empty(square, dtype=torch.float32, device=k.device)
    F, pulls = torch.empty_like(U), torch.empty_like(U)
    # what shrinking other than by the gain needs; never touched otherwise
    psi, solve, base, lam = (F, inverse, gains, gains) if unit_gain else (
        torch.empty_like(U), torch.empty_like(inverse), torch.empty_like(gains), torch.empty_like(gains)
    )
    _closed_loop_kernel[(shape.chunks, shape.programs)](
        k, U, dU, gains, dgains, table.scalars, table.logs, precision, inverse, F, pulls, psi, solve, base,
        shape.tokens, shape.heads, shape.groups, shape.padded, EXACT=exact(k), num_warps=8, num_stages=1, **keys,
        **OPTIONS,
    )
    dP = torch.empty(
        shape.batch, shape.heads, shape.chunks + 1, shape.key_dim, shape.key_dim, dtype=torch.float32, device=k.device
    )
    dP[:, :, -1] = 0.5 * (dfinal + dfinal.mT)
    _covariance_adjoint_kernel[(shape.programs,)](
        U, F, pulls, psi, gains, table.scalars, table.logs, precision, solve, base, lam, dP, shape.heads, shape.chunks,
        num_warps=8, num_stages=1, **keys, **OPTIONS,
    )
    del pulls, psi, solve
    dtype = k.dtype if shape.heads == shape.groups else torch.float32
    dkeys = torch.empty(shape.batch, shape.tokens, shape.heads, shape.key_dim, dtype=dtype, device=k.device)
    dscalars = torch.empty(4, shape.batch, shape.heads, shape.padded, dtype=torch.float32, device=k.device)
    dprecision = torch.empty(shape.batch, shape.heads, shape.chunks, dtype=torch.float32, device=k.device)
    _covariance_gradients_kernel[(shape.chunks, shape.programs)](
        k, U, dU, dk, gains, dgains, table.scalars, table.logs, precision, inverse, P, dP, base, lam, F, dkeys,
        dscalars, dprecision, shape.tokens, shape.heads, shape.groups, shape.padded, P.shape[2], EXACT=exact(k),
        num_warps=8, num_stages=1, **keys, **OPTIONS,
    )
    return CovarianceGradients(dkeys, *dscalars, dprecision, dP[:, :, 0])
