"""One token of the Bayesian rule in Triton: P, then M, each read and written once. P is symmetric: where a program can
hold it, it reads the three quarters that hold all; P of wider keys is read twice, strip by strip."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..chunks import check_state, on_its_device
from .triton_common import OPTIONS

WHOLE = 128  # the widest keys whose P a program holds
TILE = 8192  # elements of M, or of a strip of P, that a program holds


@triton.jit(do_not_specialize=["H", "G"])
def _covariance_step_kernel(
    k, cov_decay_sqrt, noise, precision, observation, shrink, before, after, directions, H, G,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr,
):
    """P = [P00 P01; P01^T P11] in halves of BK / 2; in ``directions`` u = c P k + n k, and the gain."""
    bh = tl.program_id(0).to(tl.int64)
    h = bh % H
    one = tl.arange(0, BK // 2)
    two = BK // 2 + one
    in_one, in_two = one < K, two < K
    base = bh * (K * (V + K)) + V
    at00 = base + one[:, None] * (V + K) + one[None, :]
    at01 = base + one[:, None] * (V + K) + two[None, :]
    at10 = base + two[:, None] * (V + K) + one[None, :]
    at11 = base + two[:, None] * (V + K) + two[None, :]
    P00 = tl.load(before + at00, mask=in_one[:, None] & in_one[None, :], other=0.0)
    P01 = tl.load(before + at01, mask=in_one[:, None] & in_two[None, :], other=0.0)
    P11 = tl.load(before + at11, mask=in_two[:, None] & in_two[None, :], other=0.0)
    keys = k + (bh // H * G + h // (H // G)) * K
    k0 = tl.load(keys + one, mask=in_one, other=0.0).to(tl.float32)
    k1 = tl.load(keys + two, mask=in_two, other=0.0).to(tl.float32)
    c = tl.load(cov_decay_sqrt + bh).to(tl.float32)
    c = c * c
    n = tl.load(noise + bh).to(tl.float32)
    u0 = c * (tl.sum(P00 * k0[:, None], 0) + tl.sum(P01 * k1[None, :], 1)) + n * k0
    u1 = c * (tl.sum(P01 * k0[:, None], 0) + tl.sum(P11 * k1[:, None], 0)) + n * k1
    x = tl.load(precision + h).to(tl.float32)
    gain = 1.0 / (tl.load(observation + bh).to(tl.float32) + x * (tl.sum(u0 * k0, 0) + tl.sum(u1 * k1, 0)))
    own = directions + bh * (K + 1)
    tl.store(own + one, u0, mask=in_one)
    tl.store(own + two, u1, mask=in_two)
    tl.store(own + K, gain)

    spent = tl.load(shrink + bh).to(tl.float32) * gain
    # u u^T is symmetric to the last bit, and so is P
    fresh = tl.where(one[:, None] == one[None, :], n, 0.0)
    P00 = c * P00 + fresh - spent * (u0[:, None] * u0[None, :])
    P01 = c * P01 - spent * (u0[:, None] * u1[None, :])
    P11 = c * P11 + fresh - spent * (u1[:, None] * u1[None, :])
    tl.store(after + at00, P00, mask=in_one[:, None] & in_one[None, :])
    tl.store(after + at01, P01, mask=in_one[:, None] & in_two[None, :])
    tl.store(after + at10, tl.trans(P01), mask=in_two[:, None] & in_one[None, :])
    tl.store(after + at11, P11, mask=in_two[:, None] & in_two[None, :])


@triton.jit(do_not_specialize=["H", "G"])
def _wide_covariance_step_kernel(
    k, cov_decay_sqrt, noise, precision, observation, shrink, before, after, directions, H, G,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BR: tl.constexpr,
):
    """The same in strips of BR rows, which are read again when u is known."""
    bh = tl.program_id(0).to(tl.int64)
    h = bh % H
    d = tl.arange(0, BK)
    r = tl.arange(0, BR)
    keys = k + (bh // H * G + h // (H // G)) * K
    strip = bh * (K * (V + K)) + V + r[:, None] * (V + K) + d[None, :]
    u = tl.zeros((BK,), tl.float32)
    for i in tl.static_range(0, K, BR):
        inside = (i + r < K)[:, None] & (d < K)[None, :]
        P = tl.load(before + strip + i * (V + K), mask=inside, other=0.0)
        u += tl.sum(P * tl.load(keys + i + r, mask=i + r < K, other=0.0).to(tl.float32)[:, None], 0)
    kk = tl.load(keys + d, mask=d < K, other=0.0).to(tl.float32)
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
    tl.debug_barrier()  # u is read by rows from where it was written
    for i in tl.static_range(0, K, BR):
        inside = (i + r < K)[:, None] & (d < K)[None, :]
        P = tl.load(before + strip + i * (V + K), mask=inside, other=0.0)
        rows = tl.load(own + i + r, mask=i + r < K, other=0.0)
        fresh = tl.where((i + r)[:, None] == d[None, :], n, 0.0)
        tl.store(after + strip + i * (V + K), c * P + fresh - spent * (rows[:, None] * u[None, :]), mask=inside)


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
    check_state(before, batch, heads, key_dim, value_dim + key_dim)
    decay, cov_decay_sqrt, noise, precision, observation, erase, shrink, write = gates
    o = torch.empty_like(v)
    # u and the gain of each head
    directions = torch.empty(batch, heads, key_dim + 1, dtype=torch.float32, device=v.device)
    keys = max(16, triton.next_power_of_2(key_dim))
    shared = {"K": key_dim, "V": value_dim, "BK": keys, "num_warps": 4, **OPTIONS}
    of_covariance = k, cov_decay_sqrt, noise, precision, observation, shrink, before, after, directions, heads, groups
    if keys <= WHOLE:
        _covariance_step_kernel[(batch * heads,)](*of_covariance, **shared)
    else:
        _wide_covariance_step_kernel[(batch * heads,)](*of_covariance, BR=TILE // keys, **shared)
    columns = min(max(16, triton.next_power_of_2(value_dim)), TILE // keys)
    _mean_step_kernel[(batch * heads, triton.cdiv(value_dim, columns))](
        q, k, v, decay, erase, write, directions, before, after, o, heads, groups, BV=columns, **shared
    )
    return o
