"""The additive rule, one token after another: the form the others are measured against, and the decode step."""

from __future__ import annotations

import torch
from torch import Tensor

from ..chunks import check, compute_dtype, expand_heads


def additive(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    *,
    write: Tensor | None = None,
    state: Tensor | None = None,
    reset: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Decayed sum of outer products, as in Mamba2's SSD and simple gated linear attention.

        M_t = exp(g_t) M_{t-1} + w_t v_t k_t^T        o_t = M_t q_t

    Source: Dao and Gu, "Transformers are SSMs" (2024), the scalar-identity recurrence, with k = B, q = C, v = x and
    w = dt.

    Args:
        q, k: [B, T, G, K]. v: [B, T, H, V].
        log_decay: [B, T, H], g <= 0.
        write: [B, T, H], the write strength w, or None for ones.
        state: [B, H, V, K] or None for zeros.
        reset: [B, T] bool or None; the state returns to zero before a token where it is True.

    Returns:
        o [B, T, H, V] in v's dtype, and the state after the last token in float32 (float64 for float64 inputs).
    """
    check(q, k, v, log_decay)
    dtype = compute_dtype(q, k, v)
    batch, tokens, heads, value_dim = v.shape
    decay = log_decay.to(dtype).exp()
    if reset is not None:
        decay = decay.masked_fill(reset[..., None], 0.0)
    writes = v.to(dtype) if write is None else v.to(dtype) * write.to(dtype)[..., None]
    q, k = (expand_heads(x.to(dtype), heads) for x in (q, k))
    memory = v.new_zeros(batch, heads, value_dim, k.shape[-1], dtype=dtype) if state is None else state.to(dtype)
    outputs = []
    for t in range(tokens):
        memory = decay[:, t, :, None, None] * memory + writes[:, t, :, :, None] * k[:, t, :, None, :]
        # products and sums, no matmul: autocast would lower its operands
        outputs.append((memory * q[:, t, :, None, :]).sum(-1))
    return torch.stack(outputs, dim=1).to(v.dtype), memory
