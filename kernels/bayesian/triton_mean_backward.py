"""Gradients through the Bayesian rule's mean: the adjoint of M from chunk to chunk, then every chunk by itself.

With dM the adjoint of the mean after a chunk, and the matrices of the forward pass,

    dE = reads^T do + (A/A_s h_s U) dM        dF = inverse^T dE        dM <- A dM + (A Q)^T do - (p A K)^T dF

dF is the gradient of z v - p A K M. The second kernel finds from it, from the means and from the innovations the
gradients of q, k, v and of the scalars, and those of U and h, which the covariance's backward pass takes from there.
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
    load_matrix,
    load_tokens,
    nearest_tf32,
    ratios,
    steps_gradient,
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
def _mean_gradients_kernel(
    q, k, v, do, U, gains, scalars, logs, means, dmeans, errors, dfree, dq, dk, dv, dU, dscalars, T, H, G, padded,
    K: tl.constexpr, V: tl.constexpr, BD: tl.constexpr, NB: tl.constexpr, BV: tl.constexpr, C: tl.constexpr,
    EXACT: tl.constexpr, PRECISION: tl.constexpr,
):
    own = tl.program_id(0)
    chunk = tl.program_id(1)
    bh = tl.program_id(2).to(tl.int64)
    chunks = padded // C
    size = tl.num_programs(2).to(tl.int64) * padded
    first = chunk * C
    at = bh * padded + first + tl.arange(0, C)
    keys = (bh // H * T * G + (bh % H) // (H // G)) * K
    values = (bh // H * T * H + bh % H) * V
    means += (bh * (chunks + 1) + chunk) * (K * V)
    dmeans += (bh * (chunks + 1) + chunk + 1) * (K * V)
    z = tl.load(scalars + WRITE * size + at)

    do_mean = tl.zeros((C, BD), tl.float32)
    free_mean = tl.zeros((C, BD), tl.float32)
    error_dmean = tl.zeros((C, BD), tl.float32)
    do_error = tl.zeros((C, C), tl.float32)
    free_error = tl.zeros((C, C), tl.float32)
    inner = tl.zeros((BD, BV), tl.float32)
    dwrite = tl.zeros((C,), tl.float32)
    for column in range(0, V, BV):
        grad = nearest_tf32(load_tokens(do + values, first, T, H * V, column, V, C, BV), PRECISION)
        free = load_tokens(dfree + bh * padded * V, first, padded, V, column, V, C, BV)
        error = load_tokens(errors + bh * padded * V, first, padded, V, column, V, C, BV)
        mean = nearest_tf32(load_matrix(means, own * BD, column, K, V, BD, BV), PRECISION)
        do_mean = dot(grad, tl.trans(mean), do_mean, False, False, PRECISION)
        free_mean = dot(free, tl.trans(mean), free_mean, False, False, PRECISION)
        dmean = nearest_tf32(load_matrix(dmeans, own * BD, column, K, V, BD, BV), PRECISION)
        error_dmean = dot(error, tl.trans(dmean), error_dmean, False, False, PRECISION)
        do_error = dot(grad, tl.trans(error), do_error, False, False, PRECISION)
        free_error = dot(free, tl.trans(error), free_error, False, False, PRECISION)
        inner += mean * dmean
        if own == 0:
            dwrite += tl.sum(free * load_tokens(v + values, first, T, H * V, column, V, C, BV), 1)
            store_tokens(dv + values, z[:, None] * free, first, T, H * V, column, V, C, BV)

    with_keys = tl.zeros((C, C), tl.float32)
    with_queries = tl.zeros((C, C), tl.float32)
    for i in range(NB):
        u = nearest_tf32(load_tokens(U + bh * padded * K, first, padded, K, i * BD, K, C, BD), PRECISION)
        kk = load_tokens(k + keys, first, T, G * K, i * BD, K, C, BD)
        with_keys = dot(kk, tl.trans(u), with_keys, EXACT, False, PRECISION)
        qq = load_tokens(q + keys, first, T, G * K, i * BD, K, C, BD)
        with_queries = dot(qq, tl.trans(u), with_queries, EXACT, False, PRECISION)

    ratio = ratios(logs + bh * padded, first, C)
    log = tl.load(logs + at)
    last = tl.load(logs + bh * padded + first + C - 1)
    since = tl.exp(log.to(tl.float32))
    to_end = tl.exp((last - log).to(tl.float32))
    h = tl.load(gains + at)
    p = tl.load(scalars + ERASE * size + at)
    i = tl.arange(0, C)[:, None]
    j = tl.arange(0, C)[None, :]
    dreads = tl.where(i >= j, do_error, 0.0)
    dcoupling = tl.where(i > j, -free_error, 0.0)
    u = load_tokens(U + bh * padded * K, first, padded, K, own * BD, K, C, BD)
    kk = load_tokens(k + keys, first, T, G * K, own * BD, K, C, BD)
    qq = load_tokens(q + keys, first, T, G * K, own * BD, K, C, BD)
    end_direction = tl.sum(error_dmean * u, 1)
    erased = tl.sum(free_mean * kk, 1)

    # what belongs to all key blocks is added by the first
    mine = tl.where(own == 0, 1.0, 0.0)
    common = mine * (dreads * with_queries + p[:, None] * dcoupling * with_keys)
    dgain = tl.sum(common * ratio, 0) + to_end * end_direction
    derase = mine * tl.sum(dcoupling * ratio * with_keys * h[None, :], 1) - since * erased
    dsince = tl.sum(do_mean * qq, 1) - p * erased
    end = tl.arange(0, C) == C - 1
    dsince += tl.where(end, tl.sum(tl.sum(inner, 1), 0), 0.0)
    dratio = common * h[None, :] + tl.where(i == C - 1, (h * end_direction)[None, :], 0.0)
    out = dscalars + own * (4 * size) + at
    tl.store(out, steps_gradient(dratio, ratio, dsince, logs + bh * padded, first, C, PRECISION))
    tl.store(out + size, dgain)
    tl.store(out + 2 * size, derase)
    tl.store(out + 3 * size, dwrite)

    weight = ratio * h[None, :]
    dreads = nearest_tf32(dreads * weight, PRECISION)
    dcoupling = nearest_tf32(dcoupling * p[:, None] * weight, PRECISION)
    du = (to_end * h)[:, None] * error_dmean
    du = dot(tl.trans(dreads), qq, du, False, EXACT, PRECISION)
    du = dot(tl.trans(dcoupling), kk, du, False, EXACT, PRECISION)
    store_tokens(dU + bh * padded * K, du, first, padded, K, own * BD, K, C, BD)
    u = nearest_tf32(u, PRECISION)
    dkeys = dot(dcoupling, u, -(p * since)[:, None] * free_mean, False, False, PRECISION)
    store_tokens(dk + bh * padded * K, dkeys, first, padded, K, own * BD, K, C, BD)
    dqueries = dot(dreads, u, since[:, None] * do_mean, False, False, PRECISION)
    store_tokens(dq + (bh // H * T * H + bh % H) * K, dqueries, first, T, H * K, own * BD, K, C, BD)


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
    columns = shape.value_block(64 if blocks == 1 else 32)
    common = {"K": shape.key_dim, "V": shape.value_dim, "C": CHUNK, "EXACT": exact(k), "PRECISION": precision}
    _mean_adjoint_kernel[(triton.cdiv(shape.value_dim, columns), shape.programs)](
        q, k, do, U, gains, table.scalars, table.logs, inverse, reads, dmeans, dfree, shape.tokens, shape.heads,
        shape.groups, shape.chunks, BD=width, NB=blocks, BV=columns, num_warps=4, num_stages=1, **common, **OPTIONS,
    )
    width, blocks = shape.key_blocks(128)
    columns = shape.value_block(32)
    # rounded once only: a sum over the value heads of a key head comes before
    dtype = q.dtype if shape.heads == shape.groups else torch.float32
    dq = torch.empty(shape.batch, shape.tokens, shape.heads, shape.key_dim, dtype=dtype, device=q.device)
    dk, dU, dv = torch.empty_like(U), torch.empty_like(U), torch.empty_like(v)
    dscalars = torch.empty(
        blocks, 4, shape.batch, shape.heads, shape.padded, dtype=torch.float32, device=q.device
    )
    _mean_gradients_kernel[(blocks, shape.chunks, shape.programs)](
        q, k, v, do, U, gains, table.scalars, table.logs, means, dmeans, errors, dfree, dq, dk, dv, dU, dscalars,
        shape.tokens, shape.heads, shape.groups, shape.padded, BD=width, NB=blocks, BV=columns, num_warps=8,
        num_stages=2 if precision == "tf32" else 1, **common, **OPTIONS,
    )
    # a copy: a view would keep all of dmeans alive through the covariance's part
    return MeanGradients(dq, dk, dv, dU, *dscalars.sum(0), dmeans[:, :, 0].clone())
