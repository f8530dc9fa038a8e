"""One token of Palimpsa in Triton: the states are read and written once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..chunks import check_state, on_its_device
from .triton_common import INTERPRETED, OPTIONS, reciprocal


@triton.jit(do_not_specialize=["H", "G"])
def _step_kernel(
    q, k, v, b, log_decay, reset, prior, before, after, o, H, G,
    K: tl.constexpr, V: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, HAS_RESET: tl.constexpr,
    ASSEMBLY: tl.constexpr,
):
    bh = tl.program_id(1).to(tl.int64)
    batch = bh // H
    h = bh % H
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    keys = tl.arange(0, KEYS)
    inside = (rows < V)[:, None] & (keys < K)[None, :]
    memory = (batch * 2 * H + h) * (V * K) + rows[:, None] * K + keys[None, :]
    precision = memory + H.to(tl.int64) * (V * K)
    M = tl.load(before + memory, mask=inside, other=0.0)
    E = tl.load(before + precision, mask=inside, other=0.0)
    a = tl.exp(tl.load(log_decay + bh).to(tl.float32))
    if HAS_RESET:
        a = tl.where(tl.load(reset + batch) != 0, 0.0, a)
    at_k = (batch * G + h // (H // G)) * K + keys
    kk = tl.load(k + at_k, mask=keys < K, other=0.0).to(tl.float32)[None, :]
    qq = tl.load(q + at_k, mask=keys < K, other=0.0).to(tl.float32)[None, :]
    vv = tl.load(v + bh * V + rows, mask=rows < V, other=0.0).to(tl.float32)[:, None]
    bb = tl.load(b + bh * V + rows, mask=rows < V, other=0.0).to(tl.float32)[:, None]
    M = M * a + vv * kk
    E = E * a + bb * (kk * kk)
    tl.store(after + memory, M, mask=inside)
    tl.store(after + precision, E, mask=inside)
    p = tl.load(prior + h).to(tl.float32)
    y = tl.sum(M * reciprocal(E + p, ASSEMBLY) * qq, 1)
    tl.store(o + bh * V + rows, y.to(o.dtype.element_ty), mask=rows < V)


@on_its_device
def step(
    q: Tensor, k: Tensor, v: Tensor, b: Tensor, log_decay: Tensor, prior: Tensor, before: Tensor, after: Tensor,
    reset: Tensor | None,
) -> Tensor:
    """o [B, 1, H, V]; the state [B, 2, H, V, K] in ``before`` goes to ``after``, which may be the same tensor."""
    batch, _, heads, value_dim = v.shape
    groups, key_dim = k.shape[2:]
    check_state(before, batch, 2, heads, value_dim, key_dim)
    flags = log_decay if reset is None else reset.contiguous().view(torch.uint8)
    o = torch.empty_like(v)
    keys = max(16, triton.next_power_of_2(key_dim))
    rows = min(triton.next_power_of_2(value_dim), max(1, 4096 // keys))
    _step_kernel[(triton.cdiv(value_dim, rows), batch * heads)](
        q, k, v, b, log_decay, flags, prior, before, after, o, heads, groups, K=key_dim, V=value_dim, ROWS=rows,
        KEYS=keys, HAS_RESET=reset is not None, ASSEMBLY=not INTERPRETED, **OPTIONS,
    )
    return o
