"""One token of the Bayesian rule in Triton: M and P are read and written once (P twice where it outgrows registers)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..chunks import on_its_device
from .triton_common import OPTIONS

# elements of P, and of M, that a program holds at once: all of P where it fits, so that it is read once
TILE = 16384


@triton.jit(do_not_specialize=["H", "G"])
def _step_kernel(
    q, k, v, decay, cov_decay_sqrt, noise, precision, observation, erase, shrink, write, before, after, directions, o,
    H, G, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BR: tl.constexpr, BV: tl.constexpr,
):
    bh = tl.program_id(0).to(tl.int64)
    h = bh % H
    ROWS: tl.constexpr = (K + BR - 1) // BR
    d = tl.arange(0, BK)
    r = tl.arange(0, BR)
    at = (bh // H * G + h // (H // G)) * K + d
    kk = tl.load(k + at, mask=d < K, other=0.0).to(tl.float32)
    qq = tl.load(q + at, mask=d < K, other=0.0).to(tl.float32)
    c = tl.load(cov_decay_sqrt + bh).to(tl.float32)
    c = c * c
    n = tl.load(noise + bh).to(tl.float32)
    base = bh * (K * (V + K))
    covariance = base + V + r[:, None] * (V + K) + d[None, :]
    # on its way while P is summed: the barriers in sums hold back what is loaded after them
    j = tl.arange(0, BV)
    inside = (d < K)[:, None] & (j < V)[None, :]
    ahead = tl.load(before + base + d[:, None] * (V + K) + j[None, :], mask=inside, other=0.0)
    u = tl.zeros((BK,), tl.float32)
    for i in tl.static_range(ROWS):
        row = i * BR + r
        inside = (row < K)[:, None] & (d < K)[None, :]
        block = tl.load(before + covariance + i * BR * (V + K), mask=inside, other=0.0)
        key = tl.load(k + (bh // H * G + h // (H // G)) * K + row, mask=row < K, other=0.0).to(tl.float32)
        u += tl.sum(block * key[:, None], 0)
    u = c * u + n * kk
    x = tl.load(precision + h).to(tl.float32)
    gain = 1.0 / (tl.load(observation + bh).to(tl.float32) + x * tl.sum(u * kk, 0))

    a = tl.load(decay + bh).to(tl.float32)
    p = tl.load(erase + bh).to(tl.float32) * a
    z = tl.load(write + bh).to(tl.float32)
    for column in tl.static_range(0, V, BV):
        j = column + tl.arange(0, BV)
        inside = (d < K)[:, None] & (j < V)[None, :]
        mean = base + d[:, None] * (V + K) + j[None, :]
        m = ahead
        if column > 0:
            m = tl.load(before + mean, mask=inside, other=0.0)
        vv = tl.load(v + bh * V + j, mask=j < V, other=0.0).to(tl.float32)
        error = gain * (z * vv - p * tl.sum(m * kk[:, None], 0))
        m = a * m + u[:, None] * error[None, :]
        tl.store(after + mean, m, mask=inside)
        read = tl.sum(m * qq[:, None], 0)
        tl.store(o + bh * V + j, read.to(o.dtype.element_ty), mask=j < V)

    spent = tl.load(shrink + bh).to(tl.float32) * gain
    if ROWS > 1:
        tl.store(directions + bh * K + d, u, mask=d < K)
        tl.debug_barrier()
    for i in tl.static_range(ROWS):
        row = i * BR + r
        inside = (row < K)[:, None] & (d < K)[None, :]
        own = u
        if ROWS > 1:
            block = tl.load(before + covariance + i * BR * (V + K), mask=inside, other=0.0)
            own = tl.load(directions + bh * K + row, mask=row < K, other=0.0)
        # u u^T is symmetric to the last bit, and so is P
        updated = c * block + tl.where(row[:, None] == d[None, :], n, 0.0) - spent * (own[:, None] * u[None, :])
        tl.store(after + covariance + i * BR * (V + K), updated, mask=inside)


@on_its_device
def step(q: Tensor, k: Tensor, v: Tensor, gates: tuple[Tensor, ...], before: Tensor, after: Tensor) -> Tensor:
    """o [B, 1, H, V]; the state [B, H, K, V + K] in ``before`` goes to ``after``, which may be the same tensor.

    ``gates``: decay, cov_decay_sqrt, process_noise, precision, observation_noise, erase, shrink, write. Contiguous.
    """
    batch, _, heads, value_dim = v.shape
    groups, key_dim = k.shape[2:]
    o = torch.empty_like(v)
    keys = max(16, triton.next_power_of_2(key_dim))
    rows = min(keys, TILE // keys)
    columns = min(max(16, triton.next_power_of_2(value_dim)), TILE // keys)
    directions = before if rows >= key_dim else torch.empty(
        batch, heads, key_dim, dtype=torch.float32, device=v.device
    )
    _step_kernel[(batch * heads,)](
        q, k, v, *gates, before, after, directions, o, heads, groups, K=key_dim, V=value_dim, BK=keys, BR=rows,
        BV=columns, num_warps=8 if keys * columns > 4096 else 4, **OPTIONS,
    )
    return o
