"""Gradients through the Bayesian rule's mean: the adjoint of M from chunk to chunk, then every chunk by itself.

With dM the adjoint of the mean after a chunk, and the matrices of the forward pass,

    dE = reads^T do + (A/A_s h_s U) dM        dF = inverse^T dE        dM <- A dM + (A Q)^T do - (p A K)^T dF

dF is the gradient of z v - p A K M. From it, from the means and from the innovations two kernels find the gradients of
q, k, v and of the scalars, and those of U and h, which the covariance's backward pass takes from there: first what
comes of pairs of tokens, then what comes of the means, for a block of keys each.
"""

# Triton's compiler joins tuples by addition alone
# ruff: noqa: RUF005

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .triton_backward_common import (
    in_float32,
    load_block,
    load_logs,
    load_rows,
    lower_ratios,
    positions,
    ratios_to_end,
    steps_gradient,
    store_block,
    store_rows,
)
from .triton_common import (
    CHUNK,
    ERASE,
    OPTIONS,
    WRITE,
    Shape,
    Table,
    dot,
    exact,
    load_matrix,
    load_tokens,
    nearest_tf32,
    store_matrix,
    store_tokens,
)


@triton.jit(do_not_specialize=["T", "H", "G", "chunks"])
def _mean_adjoint_kernel(
    q, k, do, U, gains, scalars, logs, inverse, reads, dmeans, dfree, T, H, G, chunks,
    K: tl.constexpr, V: tl.constexpr, BD: tl.constexpr, NB: tl.constexpr, BV: tl.constexpr, C: tl.constexpr,
    EXACT: tl.constexpr, PRECISION: tl.constexpr,
):
    column = tl.program_id(0) * BV
    bh = tl.program_id(1).to(tl.int64)
    padded = chunks * C
    size = tl.num_programs(1).to(tl.int64) * padded
    keys = (bh // H * T * G + (bh % H) // (H // G)) * K
    values = (bh // H * T * H + bh % H) * V
    dmeans += (bh * (chunks + 1) + chunks) * (K * V)
    dmean = ()
    for i in tl.static_range(NB):
        dmean = dmean + (load_matrix(dmeans, i * BD, column, K, V, BD, BV),)
    for step in range(chunks):
        chunk = chunks - 1 - step
        first = chunk * C
        at = bh * padded + first + tl.arange(0, C)
        log = tl.load(logs + at)
        last = tl.load(logs + bh * padded + first + C - 1)
        since = tl.exp(log.to(tl.float32))
        to_end = tl.load(gains + at) * tl.exp((last - log).to(tl.float32))
        whole = tl.exp(last.to(tl.float32))
        grad = load_tokens(do + values, first, T, H * V, column, V, C, BV)
        place = (bh * chunks + chunk) * (C * C)
        weight = tl.trans(load_matrix(reads + place, 0, 0, C, C, C, C))
        none = tl.zeros((C, BV), tl.float32)
        derror = dot(weight, nearest_tf32(grad, PRECISION), none, False, False, PRECISION)
        for i in tl.static_range(NB):
            u = to_end[:, None] * load_tokens(U + bh * padded * K, first, padded, K, i * BD, K, C, BD)
            m = nearest_tf32(dmean[i], PRECISION)
            derror = dot(nearest_tf32(u, PRECISION), m, derror, False, False, PRECISION)
        solve = tl.trans(nearest_tf32(load_matrix(inverse + place, 0, 0, C, C, C, C), PRECISION))
        free = dot(solve, nearest_tf32(derror, PRECISION), none, False, False, PRECISION)
        free = nearest_tf32(free, PRECISION)
        store_tokens(dfree + bh * padded * V, free, first, padded, V, column, V, C, BV)
        grad = nearest_tf32(since[:, None] * grad, PRECISION)
        free = nearest_tf32(-(tl.load(scalars + ERASE * size + at) * since)[:, None] * free, PRECISION)
        dmeans -= K * V
        updated = ()
        for i in tl.static_range(NB):
            qq = tl.trans(load_tokens(q + keys, first, T, G * K, i * BD, K, C, BD))
            m = dot(qq, grad, whole * dmean[i], EXACT, False, PRECISION)
            kk = tl.trans(load_tokens(k + keys, first, T, G * K, i * BD, K, C, BD))
            m = dot(kk, free, m, EXACT, False, PRECISION)
            store_matrix(dmeans, m, i * BD, column, K, V, BD, BV)
            updated = updated + (m,)
        dmean = updated


@triton.jit(do_not_specialize=["T", "H", "G", "padded"])
def _pairs_gradient_kernel(
    q, k, v, do, U, gains, scalars, logs, errors, dfree, dreads, dcoupling, dratios, dv, dscalars, T, H, G, padded,
    K: tl.constexpr, V: tl.constexpr, BD: tl.constexpr, NB: tl.constexpr, BV: tl.constexpr, C: tl.constexpr,
    EXACT: tl.constexpr, PRECISION: tl.constexpr,
):
    """What pairs of tokens give: dv, parts of the scalars' gradients, what the rows of q, k and u are weighted with in
    each other's gradients (``dreads`` and ``dcoupling`` [C, C]), and the gradients of the ratios (``dratios``)."""
    EVEN: tl.constexpr = BD * NB == K
    WHOLE: tl.constexpr = V % BV == 0
    chunk = tl.program_id(0)
    bh = tl.program_id(1).to(tl.int64)
    size = tl.num_programs(1).to(tl.int64) * padded
    first = chunk * C
    at = bh * padded + first + tl.arange(0, C)
    keys = ((bh // H * T + first) * G + (bh % H) // (H // G)) * K
    values = ((bh // H * T + first) * H + bh % H) * V
    tokens = bh * padded + first
    place = (bh * (padded // C) + chunk) * (C * C)
    z = tl.load(scalars + WRITE * size + at)
    do_error = tl.zeros((C, C), tl.float32)
    free_error = tl.zeros((C, C), tl.float32)
    dwrite = tl.zeros((C,), tl.float32)
    for column in range(0, V, BV):
        error = tl.trans(load_rows(errors + tokens * V, None, V, column, V, C, BV, WHOLE))
        grad = nearest_tf32(load_rows(do + values, T - first, H * V, column, V, C, BV, WHOLE), PRECISION)
        do_error = dot(grad, error, do_error, False, False, PRECISION)
        free = load_rows(dfree + tokens * V, None, V, column, V, C, BV, WHOLE)
        free_error = dot(free, error, free_error, False, False, PRECISION)
        dwrite += tl.sum(free * load_rows(v + values, T - first, H * V, column, V, C, BV, WHOLE), 1)
        store_rows(dv + values, z[:, None] * free, T - first, H * V, column, V, C, BV, WHOLE)
    tl.store(dscalars + 3 * size + at, dwrite)

    h = tl.load(gains + at)
    p = tl.load(scalars + ERASE * size + at)
    i, j = positions(C)
    high, low = load_logs(logs + tokens, size, C)
    weight = lower_ratios(high, low, C) * h[None, :]
    reading = tl.where(i >= j, do_error, 0.0)
    coupled = tl.where(i > j, -free_error, 0.0)
    store_block(dreads + place, nearest_tf32(reading * weight, PRECISION), 0, 0, C, C, C, C, True)
    store_block(dcoupling + place, nearest_tf32(coupled * p[:, None] * weight, PRECISION), 0, 0, C, C, C, C, True)
    with_keys = tl.zeros((C, C), tl.float32)
    with_queries = tl.zeros((C, C), tl.float32)
    for n in range(NB):
        u = nearest_tf32(load_rows(U + tokens * K, None, K, n * BD, K, C, BD, EVEN), PRECISION)
        kk = load_rows(k + keys, T - first, G * K, n * BD, K, C, BD, EVEN)
        with_keys = dot(kk, tl.trans(u), with_keys, EXACT, False, PRECISION)
        qq = load_rows(q + keys, T - first, G * K, n * BD, K, C, BD, EVEN)
        with_queries = dot(qq, tl.trans(u), with_queries, EXACT, False, PRECISION)
    coupled *= with_keys
    tl.store(dscalars + 2 * size + at, tl.sum(coupled * weight, 1))
    common = reading * with_queries + p[:, None] * coupled
    tl.store(dscalars + size + at, tl.sum(common * lower_ratios(high, low, C), 0))
    store_block(dratios + place, common * h[None, :], 0, 0, C, C, C, C, True)


@triton.jit(do_not_specialize=["T", "H", "G", "padded"])
def _mean_gradients_kernel(
    q, k, do, U, gains, scalars, logs, means, dmeans, errors, dfree, dreads, dcoupling, dq, dk, dU, parts, T, H, G,
    padded,
    K: tl.constexpr, V: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, EXACT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """What the means at the chunk's ends give: BD columns of the gradients of q, k and u, with what pairs of tokens
    give added, and what these columns add to three sums of each token (``parts`` [3, ...])."""
    EVEN: tl.constexpr = K % BD == 0
    WHOLE: tl.constexpr = V % BV == 0
    own = tl.program_id(0)
    chunk = tl.program_id(1)
    bh = tl.program_id(2).to(tl.int64)
    chunks = padded // C
    size = tl.num_programs(2).to(tl.int64) * padded
    first = chunk * C
    at = bh * padded + first + tl.arange(0, C)
    keys = ((bh // H * T + first) * G + (bh % H) // (H // G)) * K
    values = ((bh // H * T + first) * H + bh % H) * V
    tokens = bh * padded + first
    place = (bh * chunks + chunk) * (C * C)
    row = own * BD
    means += (bh * (chunks + 1) + chunk) * (K * V)
    dmeans += (bh * (chunks + 1) + chunk + 1) * (K * V)
    do_mean = tl.zeros((C, BD), tl.float32)
    free_mean = tl.zeros((C, BD), tl.float32)
    error_dmean = tl.zeros((C, BD), tl.float32)
    inner = tl.zeros((BD,), tl.float32)
    for column in range(0, V, BV):
        mean = nearest_tf32(load_block(means, row, column, K, V, BD, BV, EVEN and WHOLE), PRECISION)
        dmean = nearest_tf32(load_block(dmeans, row, column, K, V, BD, BV, EVEN and WHOLE), PRECISION)
        inner += tl.sum(mean * dmean, 1)
        grad = nearest_tf32(load_rows(do + values, T - first, H * V, column, V, C, BV, WHOLE), PRECISION)
        do_mean = dot(grad, tl.trans(mean), do_mean, False, False, PRECISION)
        free = load_rows(dfree + tokens * V, None, V, column, V, C, BV, WHOLE)
        free_mean = dot(free, tl.trans(mean), free_mean, False, False, PRECISION)
        error = load_rows(errors + tokens * V, None, V, column, V, C, BV, WHOLE)
        error_dmean = dot(error, tl.trans(dmean), error_dmean, False, False, PRECISION)

    logs += tokens
    high, low = load_logs(logs, size, C)
    end_high, end_low = load_logs(logs + C - 1, size, 1)
    since = tl.exp(high)
    to_end = tl.exp((end_high - high) + (end_low - low))
    h = tl.load(gains + at)
    p = tl.load(scalars + ERASE * size + at)
    u = load_rows(U + tokens * K, None, K, row, K, C, BD, EVEN)
    kk = load_rows(k + keys, T - first, G * K, row, K, C, BD, EVEN)
    qq = load_rows(q + keys, T - first, G * K, row, K, C, BD, EVEN)
    read = load_block(dreads + place, 0, 0, C, C, C, C, True)
    coupled = load_block(dcoupling + place, 0, 0, C, C, C, C, True)
    du = (to_end * h)[:, None] * error_dmean
    du = dot(tl.trans(read), qq, du, False, EXACT, PRECISION)
    du = dot(tl.trans(coupled), kk, du, False, EXACT, PRECISION)
    store_rows(dU + tokens * K, du, None, K, row, K, C, BD, EVEN)
    u = nearest_tf32(u, PRECISION)
    dkeys = dot(coupled, u, -(p * since)[:, None] * free_mean, False, False, PRECISION)
    store_rows(dk + tokens * K, dkeys, None, K, row, K, C, BD, EVEN)
    dqueries = dot(read, u, since[:, None] * do_mean, False, False, PRECISION)
    dq += ((bh // H * T + first) * H + bh % H) * K
    store_rows(dq, dqueries, T - first, H * K, row, K, C, BD, EVEN)

    out = parts + own * (3 * size) + at
    tl.store(out, tl.sum(error_dmean * u, 1))
    tl.store(out + size, tl.sum(free_mean * kk, 1))
    end = tl.arange(0, C).to(tl.float32) == C - 1.0
    tl.store(out + 2 * size, tl.sum(do_mean * qq, 1) + tl.where(end, tl.sum(inner, 0), 0.0))


@triton.jit(do_not_specialize=["padded"])
def _mean_scalars_kernel(
    gains, scalars, logs, dratios, parts, dscalars, padded, NB: tl.constexpr, C: tl.constexpr, PRECISION: tl.constexpr
):
    """The scalars' gradients from what both kernels before left of them."""
    chunk = tl.program_id(0)
    bh = tl.program_id(1).to(tl.int64)
    size = tl.num_programs(1).to(tl.int64) * padded
    at = bh * padded + chunk * C + tl.arange(0, C)
    logs += bh * padded + chunk * C
    high, low = load_logs(logs, size, C)
    to_end = ratios_to_end(logs, size, high, low, C)
    direction = tl.zeros((C,), tl.float32)
    erased = tl.zeros((C,), tl.float32)
    dsince = tl.zeros((C,), tl.float32)
    for n in range(NB):
        direction += tl.load(parts + (3 * n) * size + at)
        erased += tl.load(parts + (3 * n + 1) * size + at)
        dsince += tl.load(parts + (3 * n + 2) * size + at)
    tl.store(dscalars + size + at, tl.load(dscalars + size + at) + to_end * direction)
    tl.store(dscalars + 2 * size + at, tl.load(dscalars + 2 * size + at) - tl.exp(high) * erased)
    dsince -= tl.load(scalars + ERASE * size + at) * erased
    i, _ = positions(C)
    dratio = load_block(dratios + (bh * (padded // C) + chunk) * (C * C), 0, 0, C, C, C, C, True)
    dratio += tl.where(i == C - 1.0, (tl.load(gains + at) * direction)[None, :], 0.0)
    tl.store(dscalars + at, steps_gradient(dratio, dsince, logs, size, C, PRECISION))


class Layout(NamedTuple):
    """How the kernels are laid out."""

    columns: int  # of the mean's adjoint, in one program
    keys: int  # a block of them
    values: int
    warps: int
    stages: int  # of loads under way, where products take one pass


LAYOUT = Layout(columns=32, keys=64, values=32, warps=4, stages=3)


class MeanGradients(NamedTuple):
    """Gradients by value head, the scalars' [B, H, N CHUNK]; those of U, k and the gains go on to the covariance."""

    dq: Tensor  # [B, T, H, K]
    dk: Tensor  # [B, H, N CHUNK, K], of what the mean does with the keys
    dv: Tensor  # [B, T, H, V]
    dU: Tensor  # [B, H, N CHUNK, K]
    decay: Tensor
    gains: Tensor
    erase: Tensor
    write: Tensor
    start: Tensor  # [B, H, K, V], of the mean before the first token


def mean_backward(
    shape: Shape, q: Tensor, k: Tensor, v: Tensor, do: Tensor, dfinal: Tensor, table: Table, U: Tensor, gains: Tensor,
    inverse: Tensor, reads: Tensor, means: Tensor, errors: Tensor, precision: str,
) -> MeanGradients:
    dmeans = torch.empty_like(means)
    dmeans[:, :, -1] = dfinal
    dfree = torch.empty_like(errors)
    width, blocks = shape.key_blocks(128)
    columns = shape.value_block(LAYOUT.columns if blocks == 1 else 32)
    common = {"K": shape.key_dim, "V": shape.value_dim, "C": CHUNK, "PRECISION": precision}
    common["EXACT"] = exact(q) and exact(k)
    _mean_adjoint_kernel[(triton.cdiv(shape.value_dim, columns), shape.programs)](
        q, k, do, U, gains, table.scalars, table.logs, inverse, reads, dmeans, dfree, shape.tokens, shape.heads,
        shape.groups, shape.chunks, BD=width, NB=blocks, BV=columns, num_warps=4, num_stages=1, **common, **OPTIONS,
    )
    # rounded once only: a sum over the value heads of a key head comes before
    dtype = q.dtype if shape.heads == shape.groups else torch.float32
    dq = torch.empty(shape.batch, shape.tokens, shape.heads, shape.key_dim, dtype=dtype, device=q.device)
    dk, dU, dv = torch.empty_like(U), torch.empty_like(U), torch.empty_like(v)
    logs = in_float32(table.logs[0])
    dreads, dcoupling, dratios = (torch.empty_like(inverse) for _ in range(3))
    dscalars = torch.empty(4, *gains.shape, dtype=torch.float32, device=q.device)
    sizes = (shape.tokens, shape.heads, shape.groups, shape.padded)
    width, blocks = shape.key_blocks(LAYOUT.keys)
    common["BV"] = shape.value_block(LAYOUT.values)
    common["num_stages"] = LAYOUT.stages if precision == "tf32" else 1
    _pairs_gradient_kernel[(shape.chunks, shape.programs)](
        q, k, v, do, U, gains, table.scalars, logs, errors, dfree, dreads, dcoupling, dratios, dv, dscalars,
        *sizes, BD=width, NB=blocks, num_warps=4, **common, **OPTIONS,
    )
    parts = torch.empty(blocks, 3, *gains.shape, dtype=torch.float32, device=q.device)
    _mean_gradients_kernel[(blocks, shape.chunks, shape.programs)](
        q, k, do, U, gains, table.scalars, logs, means, dmeans, errors, dfree, dreads, dcoupling, dq, dk, dU,
        parts, *sizes, BD=width, num_warps=LAYOUT.warps, **common, **OPTIONS,
    )
    _mean_scalars_kernel[(shape.chunks, shape.programs)](
        gains, table.scalars, logs, dratios, parts, dscalars, shape.padded, NB=blocks, C=CHUNK,
        PRECISION=precision, num_warps=8, num_stages=1, **OPTIONS,
    )
    # a copy: a view would keep all of dmeans alive through the covariance's part
    return MeanGradients(dq, dk, dv, dU, *dscalars, dmeans[:, :, 0].clone())
