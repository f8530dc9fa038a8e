"""The gated delta rule, one token after another: the form the others are measured against, and the decode step."""

from __future__ import annotations

import torch
from torch import Tensor

from ..chunks import check, compute_dtype, expand_heads


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
    """Decay, then correct the memory by the error of its prediction, then read.

        e_t = v_t - exp(g_t) M_{t-1}^T k_t        M_t = exp(g_t) M_{t-1} + beta_t k_t e_t^T        o_t = M_t^T q_t

    Source: Yang, Kautz and Hatamizadeh, "Gated Delta Networks" (2025), the gated delta rule; by channel, Kimi Team,
    "Kimi Linear" (2025), Kimi Delta Attention.

    Args:
        q, k: [B, T, G, K]. v: [B, T, H, V].
        log_decay: [B, T, H], g <= 0; or [B, T, H, K], one for each key channel, exp(g_t) then being a diagonal
            matrix on the key side (Kimi Delta Attention).
        beta: [B, T, H], the step.
        state: [B, H, K, V] or None for zeros.
        reset: [B, T] bool or None; the state returns to zero before a token where it is True.

    Returns:
        o [B, T, H, V] in v's dtype, and the state after the last token in float32 (float64 for float64 inputs).
    """
    check(q, k, v, log_decay, channels=True)
    dtype = compute_dtype(q, k, v)
    batch, tokens, heads, value_dim = v.shape
    decay = log_decay.to(dtype).exp()
    if reset is not None:
        decay = decay.masked_fill(reset[..., None] if decay.dim() == 3 else reset[..., None, None], 0.0)
    values, step = v.to(dtype), beta.to(dtype)
    q, k = (expand_heads(x.to(dtype), heads)[..., None] for x in (q, k))
    memory = v.new_zeros(batch, heads, k.shape[-2], value_dim, dtype=dtype) if state is None else state.to(dtype)
    rows = decay[..., None, None] if decay.dim() == 3 else decay[..., None]  # [B, T, H, 1 or K, 1]
    outputs = []
    for t in range(tokens):
        memory = rows[:, t] * memory
        # products and sums, no matmul: autocast would lower its operands
        error = values[:, t] - (memory * k[:, t]).sum(-2)
        memory = memory + k[:, t] * (step[:, t, :, None] * error)[:, :, None, :]
        outputs.append((memory * q[:, t]).sum(-2))
    return torch.stack(outputs, dim=1).to(v.dtype), memory
