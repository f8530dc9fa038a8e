"""The gated delta rule by chunks of tokens: the corrections of a chunk solve one unit lower-triangular system."""

from __future__ import annotations

import torch
from torch import Tensor

from ..channels import overlaps, spans
from ..chunks import FORGOTTEN, check, chunk_decays, chunk_length, compute_dtype, expand_heads, operand_dtype, split
from ..products import product
from ..triangular import unit_lower_inverse
from . import inside
from .states import delta_states


def delta(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    *,
    state: Tensor | None = None,
    reset: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The same function as :func:`surgery.kernels.delta.reference.delta`, with the same arguments.

    In a chunk that starts from M_0, with A_t the product of the decays up to t, the corrections beta_t e_t are the
    rows of

        E = T (V - A K M_0),        T = (I + tril(beta_t (A_t / A_s) k_t.k_s, -1))^-1 diag(beta)

    so that M_end = A_end M_0 + K^T diag(A_end / A) E. Only M_0 depends on earlier chunks.

    Decays for each key channel, log_decay [B, T, H, K], take the same form with A_t / A_s a vector that stands inside
    the products over channels.

    On CUDA, where q, k and v are all bfloat16 or all float16, the operands of the larger products are too (one decay a
    head); sums, decays, the triangular system and the state after the last token are float32.

    Source: Yang, Kautz and Hatamizadeh, "Gated Delta Networks" (2025), the chunkwise form (the WY representation).
    """
    check(q, k, v, log_decay, channels=True)
    assert beta.shape == v.shape[:3], f"beta {tuple(beta.shape)} is not [B, T, H]"
    if log_decay.dim() == 4:
        return _by_channel(q, k, v, log_decay, beta, state, reset)
    return delta_in(operand_dtype(q, k, v), q, k, v, log_decay, beta, state=state, reset=reset)


def delta_in(
    operands: torch.dtype,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    *,
    state: Tensor | None = None,
    reset: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """:func:`delta` for one decay a head, with the operands of its large products in the dtype ``operands``."""
    dtype, out_dtype = compute_dtype(q, k, v), v.dtype
    batch, tokens, heads, value_dim = v.shape
    groups, key_dim = k.shape[2:]
    chunk = chunk_length(tokens)
    memory = torch.zeros(batch, heads, key_dim, value_dim, dtype=dtype, device=v.device) if state is None else state
    if q.dtype == k.dtype == v.dtype == operands and inside.fused(k, v):
        steps = log_decay.double().clamp(min=FORGOTTEN)
        if reset is not None:
            steps = steps.masked_fill(reset[..., None], FORGOTTEN)
        o, memory = inside.Delta.apply(*(split(x, chunk) for x in (q, k, v, beta.to(dtype), steps)), memory.to(dtype))
        return o.flatten(1, 2)[:, :tokens], memory
    decays = chunk_decays(log_decay, reset, chunk, dtype)
    # keys keep their G heads: the products below take all value heads of a group (r) at once. Each use rounds for
    # itself, which loses nothing forward and lets the gradients of all uses add up in float32
    q, k = (split(x.to(dtype), chunk) for x in (q, k))  # [B, N, C, G, K]
    v = split(v.to(operands), chunk)  # [B, N, C, H, V]
    queries, keys = q.transpose(2, 3), k.transpose(2, 3)  # [B, N, G, C, K]
    step = split(beta.to(dtype), chunk).transpose(2, 3)  # [B, N, H, C]

    per_group = (groups, heads // groups)
    within = decays.within.unflatten(2, per_group)
    # the system is solved for in float32, whatever the other products' operands are
    alike = product("bngsk,bngtk->bngst", keys, keys)
    coupling = (within * alike[:, :, :, None]).flatten(2, 3).mT.tril(-1)
    solve = unit_lower_inverse(step[..., None] * coupling)
    met, corrections, memory = delta_states(
        solve.to(operands), step, v, k.to(operands), decays.from_start, decays.to_end, decays.whole, memory.to(dtype)
    )
    before = product("bngck,bngrkv->bngrcv", queries.to(operands), met.unflatten(2, per_group)).flatten(2, 3)
    asked = product("bngsk,bngtk->bngst", keys, queries)
    scores = (within * asked[:, :, :, None]).flatten(2, 3).to(operands)
    o = product("bnhst,bnhsv->bnhtv", scores, corrections) + decays.from_start[..., None] * before
    return o.transpose(2, 3).flatten(1, 2)[:, :tokens].to(out_dtype), memory


def _by_channel(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, state: Tensor | None, reset: Tensor | None
) -> tuple[Tensor, Tensor]:
    dtype, out_dtype = compute_dtype(q, k, v), v.dtype
    batch, tokens, heads, value_dim = v.shape
    chunk = chunk_length(tokens)
    log_decay = log_decay.to(dtype)
    if reset is not None:
        log_decay = log_decay.masked_fill(reset[..., None, None], -torch.inf)
    # [B, N, H, C, ...]; the zeros that fill the last chunk are no decay, no key and no step
    q, k = (split(expand_heads(x.to(dtype), heads), chunk).transpose(2, 3) for x in (q, k))
    v, step = (split(x.to(dtype), chunk).transpose(2, 3) for x in (v, beta))
    decays = spans(split(log_decay, chunk).transpose(2, 3).exp())

    coupling = overlaps(k, k, decays).tril(-1)
    solve = unit_lower_inverse(step[..., None] * coupling) * step[..., None, :]  # T
    values = product("bnhts,bnhsv->bnhtv", solve, v)
    keys = product("bnhts,bnhsk->bnhtk", solve, decays.from_start * k)  # E = values - keys M_0

    at_end = decays.to_end * k
    written = product("bnhck,bnhcv->bnhkv", at_end, values)
    erased = product("bnhcl,bnhck->bnhlk", at_end, keys)
    memory = v.new_zeros(batch, heads, k.shape[-1], value_dim) if state is None else state.to(dtype)
    starts = []
    for n in range(written.shape[1]):
        starts.append(memory)
        correction = written[:, n] - product("bhlk,bhkv->bhlv", erased[:, n], memory)
        memory = decays.whole[:, n, ..., None] * memory + correction

    start = torch.stack(starts, 1)  # [B, N, H, K, V]
    corrections = values - product("bnhtk,bnhkv->bnhtv", keys, start)
    o = product("bnhts,bnhsv->bnhtv", overlaps(q, k, decays), corrections)
    o = o + product("bnhck,bnhkv->bnhcv", decays.from_start * q, start)
    return o.transpose(2, 3).flatten(1, 2)[:, :tokens].to(out_dtype), memory
