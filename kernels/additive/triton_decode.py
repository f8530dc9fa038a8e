"""One token of the additive rule in Triton: the state is read and written once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..chunks import check, check_state, on_its_device

TILE = 8192  # elements of the state that a program holds


@triton.jit(do_not_specialize=["H", "G"])
def _step_kernel(
    q, k, v, log_decay, write, reset, before, after, o, H, G,
    K: tl.constexpr, V: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, HAS_WRITE: tl.constexpr,
    HAS_RESET: tl.constexpr,
):
    bh = tl.program_id(0).to(tl.int64)
    batch, h = bh // H, bh % H
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    keys = tl.arange(0, KEYS)
    inside = (rows < V)[:, None] & (keys < K)[None, :]
    at = bh * (V * K) + rows[:, None] * K + keys[None, :]
    M = tl.load(before + at, mask=inside, other=0.0)
    a = tl.exp(tl.load(log_decay + bh).to(tl.float32))
    if HAS_RESET:
        a = tl.where(tl.load(reset + batch) != 0, 0.0, a)
    at_k = (batch * G + h // (H // G)) * K + keys
    kk = tl.load(k + at_k, mask=keys < K, other=0.0).to(tl.float32)
    qq = tl.load(q + at_k, mask=keys < K, other=0.0).to(tl.float32)
    vv = tl.load(v + bh * V + rows, mask=rows < V, other=0.0).to(tl.float32)
    if HAS_WRITE:
        vv *= tl.load(write + bh).to(tl.float32)
    M = a * M + vv[:, None] * kk[None, :]
    tl.store(after + at, M, mask=inside)
    tl.store(o + bh * V + rows, tl.sum(M * qq[None, :], 1).to(o.dtype.element_ty), mask=rows < V)


@on_its_device
def step(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, write: Tensor | None, state: Tensor, reset: Tensor | None,
    in_place: bool,
) -> tuple[Tensor, Tensor]:
    """One token of :func:`.reference.additive`, same arguments and results; ``in_place``, the state [B, H, V, K], which
    is contiguous then, is overwritten and returned."""
    q, k, v, log_decay, before = (x.contiguous() for x in (q, k, v, log_decay, state))
    check(q, k, v, log_decay)
    batch, _, heads, value_dim = v.shape
    groups, key_dim = k.shape[2:]
    check_state(state, batch, heads, value_dim, key_dim)
    o, after = torch.empty_like(v), before if in_place else torch.empty_like(before)
    keys = triton.next_power_of_2(key_dim)
    rows = min(triton.next_power_of_2(value_dim), max(1, TILE // keys))
    _step_kernel[(batch * heads, triton.cdiv(value_dim, rows))](
        q, k, v, log_decay, log_decay if write is None else write.contiguous(),
        log_decay if reset is None else reset.contiguous().view(torch.uint8), before, after, o, heads, groups,
        K=key_dim, V=value_dim, ROWS=rows, KEYS=keys, HAS_WRITE=write is not None, HAS_RESET=reset is not None,
    )
    return o, after
