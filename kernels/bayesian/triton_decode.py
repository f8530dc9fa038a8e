"""One token of the Bayesian rule in Triton: P, then M, each read and written once (P read twice where it outgrows
registers)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..chunks import on_its_device
from .triton_common import OPTIONS

TILE = 16384  # elements of P that a program holds at once: all of P where it fits
COLUMNS = 4096  # elements of M that a program holds


@triton.jit(do_not_specialize=["H", "G"])
def _covariance_step_kernel(
    k, cov_decay_sqrt, noise, precision, observation, shrink, before, after, directions, H, G,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BR: tl.constexpr,
):
    bh = tl.program_id(0).to(tl.int64)
    h = bh % H
    ROWS: tl.constexpr = (K + BR - 1) // BR
    d = tl.arange(0, BK)
    r = tl.arange(0, BR)
    keys = (bh // H * G + h // (H // G)) * K
    covariance = bh * (K * (V + K)) + V + r[:, None] * (V + K) + d[None, :]
    u = tl.zeros((BK,), tl.float32)
    for i in tl.static_range(ROWS):
        row = i * BR + r
        inside = (row < K)[:, None] & (d < K)[None, :]
        block = tl.load(before + covariance + i * BR * (V + K), mask=inside, other=0.0)
        key = tl.load(k + keys + row, mask=row < K, other=0.0).to(tl.float32)
        u += tl.sum(block * key[:, None], 0)
    kk = tl.load(k + keys + d, mask=d < K, other=0.0).to(tl.float32)
    c = tl.load(cov_decay_sqrt + bh).to(tl.float32)
    c = c * c
    n = tl.load(noise + bh).to(tl.float32)
    u = c * u + n * kk
    x = tl.load(precision + h).to(tl.float32)
    gain = 1.0 / (tl.load(observation + bh).to(tl.float32) + x * tl.sum(u * kk, 0))
    own = directions + bh * (K + 1)
    tl.store(own + d, u, mask=d < K)
    tl.store(own + K, gain)
    spent = tl.load(shrink + bh).to(tl.float32) * gain
    if ROWS > 1:
        tl.debug_barrier()
    for i in tl.static_range(ROWS):
        row = i * BR + r
        inside = (row < K)[:, None] & (d < K)[None, :]
        across = u
        if ROWS > 1:
            block = tl.load(before + covariance + i * BR * (V + K), mask=inside, other=0.0)
            across = tl.load(own + row, mask=row < K, other=0.0)
        # u u^T is symmetric to the last bit, and so is P
        updated = c * block + tl.where(row[:, None] == d[None, :], n, 0.0) - spent * (across[:, None] * u[None, :])
        tl.store(after + covariance + i * BR * (V + K), updated, mask=inside)


@triton.jit(do_not_specialize=["H", "G"])
def _mean_step_kernel(
    q, k, v, decay, erase, write, directions, before, after, o, H, G,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
):
    bh = tl.program_id(0).to(tl.int64)
    h = bh % H
    d = tl.arange(0, BK)
    j = tl.program_id(1) * BV + tl.arange(0, BV)
    inside = (d < K)[:, None] & (j < V)[None, :]
    mean = bh * (K * (V + K)) + d[:, None] * (V + K) + j[None, :]
    m = tl.load(before + mean, mask=inside, other=0.0)
    keys = (bh // H * G + h // (H // G)) * K + d
    kk = tl.load(k + keys, mask=d < K, other=0.0).to(tl.float32)
    qq = tl.load(q + keys, mask=d < K, other=0.0).to(tl.float32)
    u = tl.load(directions + bh * (K + 1) + d, mask=d < K, other=0.0)
    gain = tl.load(directions + bh * (K + 1) + K)
    a = tl.load(decay + bh).to(tl.float32)
    p = tl.load(erase + bh).to(tl.float32) * a
    z = tl.load(write + bh).to(tl.float32)
    vv = tl.load(v + bh * V + j, mask=j < V, other=0.0).to(tl.float32)
    error = gain * (z * vv - p * tl.sum(m * kk[:, None], 0))
    m = a * m + u[:, None] * error[None, :]
    tl.store(after + mean, m, mask=inside)
    tl.store(o + bh * V + j, tl.sum(m * qq[:, None], 0).to(o.dtype.element_ty), mask=j < V)


@on_its_device
def step(q: Tensor, k: Tensor, v: Tensor, gates: tuple[Tensor, ...], before: Tensor, after: Tensor) -> Tensor:
    """o [B, 1, H, V]; the state [B, H, K, V + K] in ``before`` goes to ``after``, which may be the same tensor.

    ``gates``: decay, cov_decay_sqrt, process_noise, precision, observation_noise, erase, shrink, write. Contiguous.
    """
    batch, _, heads, value_dim = v.shape
    groups, key_dim = k.shape[2:]
    decay, cov_decay_sqrt, noise, precision, observation, erase, shrink, write = gates
    o = torch.empty_like(v)
    # u and the gain of each head
    directions = torch.empty(batch, heads, key_dim + 1, dtype=torch.float32, device=v.device)
    keys = max(16, triton.next_power_of_2(key_dim))
    rows = min(keys, TILE // keys)
    _covariance_step_kernel[(batch * heads,)](
        k, cov_decay_sqrt, noise, precision, observation, shrink, before, after, directions, heads, groups, K=key_dim,
        V=value_dim, BK=keys, BR=rows, num_warps=8 if keys * rows > 4096 else 4, **OPTIONS,
    )
    columns = min(max(16, triton.next_power_of_2(value_dim)), COLUMNS // keys)
    _mean_step_kernel[(batch * heads, triton.cdiv(value_dim, columns))](
        q, k, v, decay, erase, write, directions, before, after, o, heads, groups, K=key_dim, V=value_dim, BK=keys,
        BV=columns, num_warps=4, **OPTIONS,
    )
    return o
