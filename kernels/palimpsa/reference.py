"""Palimpsa, one token after another: the form the others are measured against, and the decode step."""

from __future__ import annotations

import torch
from torch import Tensor

from ..chunks import check, compute_dtype, expand_heads


def palimpsa(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    b: Tensor,
    log_decay: Tensor,
    prior: Tensor,
    *,
    state: Tensor | None = None,
    reset: Tensor | None = None,
    return_variance: bool = False,
) -> tuple[Tensor, ...]:
    """A memory whose every element carries its own precision, in natural parameters.

        M_t = exp(g_t) M_{t-1} + v_t k_t^T        E_t = exp(g_t) E_{t-1} + b_t (k_t^2)^T        I_t = I0 + E_t
        o_t = (M_t / I_t) q_t                     variance_i = sum_j q_j^2 / I_ij

    Source: the Palimpsa paper's update of mean and importance, with M = I mu and E the precision beyond the prior.
    With b = 0 and I0 = 1 this is the additive rule.

    Args:
        q, k: [B, T, G, K]. v: [B, T, H, V], the write.
        b: [B, T, H, V] >= 0, the precision a write adds, per value channel.
        log_decay: [B, T, H], g <= 0.
        prior: [H] > 0, I0.
        state: [B, 2, H, V, K], M and E, or None for zeros.
        reset: [B, T] bool or None; the state returns to zero before a token where it is True.
        return_variance: also return the variance of the read.

    Returns:
        o [B, T, H, V] in v's dtype; with ``return_variance`` the variance [B, T, H, V] in the computing dtype; and the
        state after the last token in float32 (float64 for float64 inputs).
    """
    check(q, k, v, log_decay)
    assert b.shape == v.shape, f"b {tuple(b.shape)} and v {tuple(v.shape)} differ"
    dtype = compute_dtype(q, k, v)
    batch, tokens, heads, value_dim = v.shape
    decay = log_decay.to(dtype).exp()
    if reset is not None:
        decay = decay.masked_fill(reset[..., None], 0.0)
    writes = torch.stack((v.to(dtype), b.to(dtype)), dim=2)  # [B, T, 2, H, V]
    q, k = (expand_heads(x.to(dtype), heads) for x in (q, k))
    keys = torch.stack((k, k * k), dim=2)  # [B, T, 2, H, K]
    memory = v.new_zeros(batch, 2, heads, value_dim, k.shape[-1], dtype=dtype) if state is None else state.to(dtype)
    prior = prior.to(dtype)[:, None, None]
    outputs, variances = [], []
    for t in range(tokens):
        memory = decay[:, t, None, :, None, None] * memory + writes[:, t, ..., None] * keys[:, t, ..., None, :]
        # products and sums, no matmul: autocast would lower its operands
        read = q[:, t, :, None, :] / (prior + memory[:, 1])
        outputs.append((memory[:, 0] * read).sum(-1))
        if return_variance:
            variances.append((q[:, t, :, None, :] * read).sum(-1))
    o = torch.stack(outputs, dim=1).to(v.dtype)
    return (o, torch.stack(variances, dim=1), memory) if return_variance else (o, memory)
