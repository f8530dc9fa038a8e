"""The additive rule by chunks of tokens: matrix products inside a chunk, one short scan over chunk boundaries."""

from __future__ import annotations

import torch
from torch import Tensor

from ..chunks import check, chunk_decays, chunk_length, compute_dtype, split
from ..products import product


def additive(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    *,
    state: Tensor | None = None,
    reset: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The same function as :func:`surgery.kernels.additive.reference.additive`, with the same arguments.

    Source: Dao and Gu, "Transformers are SSMs" (2024), the block decomposition of the state-space dual.
    """
    check(q, k, v, log_decay)
    dtype, out_dtype = compute_dtype(q, k, v), v.dtype
    batch, tokens, heads, value_dim = v.shape
    groups, key_dim = k.shape[2:]
    chunk = chunk_length(tokens)
    decays = chunk_decays(log_decay, reset, chunk, dtype)
    # keys keep their G heads: the products below take all value heads of a group (r) at once
    q, k = (split(x.to(dtype), chunk).transpose(2, 3) for x in (q, k))  # [B, N, G, C, K]
    v = split(v.to(dtype), chunk).transpose(2, 3)  # [B, N, H, C, V]

    per_group = (groups, heads // groups)
    to_end = (v * decays.to_end[..., None]).unflatten(2, per_group)
    written = product("bngrcv,bngck->bngrvk", to_end, k).flatten(2, 3)
    memory = v.new_zeros(batch, heads, value_dim, key_dim) if state is None else state.to(dtype)
    starts = []
    for n in range(written.shape[1]):
        starts.append(memory)
        memory = decays.whole[:, n, :, None, None] * memory + written[:, n]

    start = torch.stack(starts, 1).unflatten(2, per_group)
    before = product("bngck,bngrvk->bngrcv", q, start).flatten(2, 3)
    overlaps = product("bngsk,bngtk->bngst", k, q)
    scores = (decays.within.unflatten(2, per_group) * overlaps[:, :, :, None]).flatten(2, 3)
    o = product("bnhst,bnhsv->bnhtv", scores, v) + decays.from_start[..., None] * before
    return o.transpose(2, 3).flatten(1, 2)[:, :tokens].to(out_dtype), memory
