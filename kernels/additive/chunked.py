"""The additive rule by chunks of tokens: matrix products inside a chunk, one short scan over chunk boundaries.

The backward pass is written out. Kept for it are the inputs and the states at chunk boundaries; the [C, C] matrices of
a chunk are made again.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..chunks import FORGOTTEN, check, chunk_length, compute_dtype, operand_dtype, split, step_gradients
from . import inside
from .states import additive_states


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
    """The same function as :func:`surgery.kernels.additive.reference.additive`, with the same arguments.

    On CUDA, where q, k and v are all bfloat16 or all float16, the products' operands are too; sums, decays and the
    state after the last token are float32. Otherwise everything is float32 or float64.

    Source: Dao and Gu, "Transformers are SSMs" (2024), the block decomposition of the state-space dual.
    """
    return additive_in(operand_dtype(q, k, v), q, k, v, log_decay, write=write, state=state, reset=reset)


def additive_in(
    operands: torch.dtype,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    *,
    write: Tensor | None = None,
    state: Tensor | None = None,
    reset: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """:func:`additive` with the products' operands in the dtype ``operands``."""
    check(q, k, v, log_decay)
    dtype = compute_dtype(q, k, v)
    batch, tokens, heads, value_dim = v.shape
    chunk = chunk_length(tokens)
    if operands not in (torch.float32, torch.float64) and tokens > chunk and not inside.fused(k, v):
        chunk = 128  # torch writes a chunk's matrices and states out: fewer states, at half the memory traffic
    steps = log_decay.double().clamp(min=FORGOTTEN)
    if reset is not None:
        steps = steps.masked_fill(reset[..., None], FORGOTTEN)
    if state is None:
        state = torch.zeros(batch, heads, value_dim, k.shape[-1], dtype=dtype, device=v.device)
    write = torch.ones_like(log_decay, dtype=dtype) if write is None else write.to(dtype)
    inputs = (split(x, chunk) for x in (q.to(operands), k.to(operands), v.to(operands), write, steps))
    o, state = _Additive.apply(*inputs, state.to(dtype))
    return o.flatten(1, 2)[:, :tokens].to(v.dtype), state


class _Additive(torch.autograd.Function):
    """q, k [B, N, C, G, K] and v [B, N, C, H, V] in the operands' dtype, write strengths [B, N, C, H], log decays
    [B, N, C, H] in float64, the state [B, H, V, K] -> outputs like v, and the state after all chunks.

    autocast is off in both directions: it would lower the products, and torch.compile traces a backward pass under the
    autocast that surrounds the call.
    """

    @staticmethod
    def forward(
        ctx, q: Tensor, k: Tensor, v: Tensor, write: Tensor, steps: Tensor, state: Tensor
    ) -> tuple[Tensor, Tensor]:
        total, whole, _, to_end = _decays(steps, state.dtype)
        with torch.autocast(q.device.type, enabled=False):
            met, final = additive_states(k, v, to_end * write, whole, state, False)
            form = inside.output if inside.fused(k, v) else inside.output_in_torch
            o = form(q, k, v, write, met, total)
        ctx.save_for_backward(q, k, v, write, steps, met)
        return o, final

    @staticmethod
    def backward(ctx, do: Tensor, dfinal: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
        q, k, v, write, steps, met = ctx.saved_tensors
        total, whole, from_start, _ = _decays(steps, dfinal.dtype)
        do = do.to(v.dtype)
        with torch.autocast(q.device.type, enabled=False):
            # the adjoint of the state at each chunk's end
            left, dstate = additive_states(q, do, from_start, whole, dfinal, True)
            form = inside.gradients if inside.fused(k, v) else inside.gradients_in_torch
            dq, dk, dv, dwrite, *sums, through = form(q, k, v, write, do, met, left, total)
        return dq, dk, dv, dwrite, step_gradients(*sums, whole * through), dstate


def _decays(steps: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The log decays summed from a chunk's start, in float64; the decays over the chunk [B, N, H], from its start and
    to its end [B, N, C, H]."""
    total = steps.cumsum(2)
    from_start = total.to(dtype).exp()
    return total, from_start[:, :, -1], from_start, (total[:, :, -1:] - total).to(dtype).exp()
