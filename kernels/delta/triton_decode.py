"""One token of the delta rule in Triton: the state is read and written once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..chunks import check, check_state, on_its_device

TILE = 8192  # elements of the state that a program holds


@triton.jit(do_not_specialize=["H", "G"])
def _step_kernel(
    q, k, v, log_decay, beta, reset, before, after, o, H, G,
    K: tl.constexpr, V: tl.constexpr, KEYS: tl.constexpr, COLUMNS: tl.constexpr, BY_CHANNEL: tl.constexpr,
    HAS_RESET: tl.constexpr,
):
    bh = tl.program_id(0).to(tl.int64)
    batch, h = bh // H, bh % H
    keys = tl.arange(0, KEYS)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (keys < K)[:, None] & (columns < V)[None, :]
    at = bh * (K * V) + keys[:, None] * V + columns[None, :]
    M = tl.load(before + at, mask=inside, other=0.0)
    if BY_CHANNEL:
        a = tl.exp(tl.load(log_decay + bh * K + keys, mask=keys < K, other=0.0).to(tl.float32))[:, None]
    else:
        a = tl.exp(tl.load(log_decay + bh).to(tl.float32))
    if HAS_RESET:
        a = tl.where(tl.load(reset + batch) != 0, 0.0, a)
    at_k = (batch * G + h // (H // G)) * K + keys
    kk = tl.load(k + at_k, mask=keys < K, other=0.0).to(tl.float32)[:, None]
    qq = tl.load(q + at_k, mask=keys < K, other=0.0).to(tl.float32)[:, None]
    vv = tl.load(v + bh * V + columns, mask=columns < V, other=0.0).to(tl.float32)
    M = a * M
    error = tl.load(beta + bh).to(tl.float32) * (vv - tl.sum(M * kk, 0))
    M += kk * error[None, :]
    tl.store(after + at, M, mask=inside)
    tl.store(o + bh * V + columns, tl.sum(M * qq, 0).to(o.dtype.element_ty), mask=columns < V)


@on_its_device
def step(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, state: Tensor, reset: Tensor | None,
    in_place: bool,
) -> tuple[Tensor, Tensor]:
    """One token of :func:`.reference.delta`, same arguments and results; ``in_place``, the state [B, H, K, V], which is
    contiguous then, is overwritten and returned."""
    q, k, v, log_decay, beta, before = (x.contiguous() for x in (q, k, v, log_decay, beta, state))
    check(q, k, v, log_decay, channels=True)
    batch, _, heads, value_dim = v.shape
    groups, key_dim = k.shape[2:]
    check_state(state, batch, heads, key_dim, value_dim)
    o, after = torch.empty_like(v), before if in_place else torch.empty_like(before)
    keys = triton.next_power_of_2(key_dim)
    columns = min(triton.next_power_of_2(value_dim), max(1, TILE // keys))
    _step_kernel[(batch * heads, triton.cdiv(value_dim, columns))](
        q, k, v, log_decay, beta, log_decay if reset is None else reset.contiguous().view(torch.uint8), before, after,
        o, heads, groups, K=key_dim, V=value_dim, KEYS=keys, COLUMNS=columns, BY_CHANNEL=log_decay.dim() == 4,
        HAS_RESET=reset is not None,
    )
    return o, after
