"""The additive rule's states at chunk boundaries: what a chunk writes, by one product, and the scan over chunks.

One operator that torch.compile does not look into: by a Triton kernel on CUDA (the state stays in registers from chunk
to chunk), in torch elsewhere, for float64, and under ``SURGERY_KERNELS=chunked``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..chunks import MAX_HEADS, fused, on_its_device
from ..operators import operator


@operator("additive_states")
@on_its_device
def additive_states(
    k: Tensor, x: Tensor, scale: Tensor, whole: Tensor, start: Tensor, reverse: bool
) -> tuple[Tensor, Tensor]:
    """S <- whole_n S + sum over the chunk of (scale x) k^T, chunk after chunk, from the last where ``reverse``.

    Args:
        k: [B, N, C, G, K]. x: [B, N, C, H, V], in k's dtype. scale: [B, N, C, H].
        whole: [B, N, H], a chunk's decay. start: [B, H, V, K]. These three float32, or float64 like k.

    Returns:
        The state that each chunk meets [B, N, H, V, K] in k's dtype, and the state after all of them in start's.
    """
    if fused(k, by_default=True) and k.shape[0] * x.shape[3] <= MAX_HEADS:
        from .triton_states import states

        return states(k, x, scale, whole, start, reverse)
    chunks, groups = k.shape[1], k.shape[3]
    x = (x * scale[..., None]).to(x.dtype).to(start.dtype).unflatten(3, (groups, -1))
    written = torch.einsum("bncgk,bncgrv->bngrvk", k.to(start.dtype), x).flatten(2, 3)
    state, met = start, [start] * chunks
    for n in reversed(range(chunks)) if reverse else range(chunks):
        met[n] = state
        state = torch.addcmul(written[:, n], whole[:, n, :, None, None], state)
    return torch.stack(met, 1).to(k.dtype), state.clone(memory_format=torch.contiguous_format)


@additive_states.register_fake
def _(k, x, scale, whole, start, reverse):
    batch, chunks, _, _, key_dim = k.shape
    return k.new_empty(batch, chunks, x.shape[3], x.shape[4], key_dim), start.new_empty(start.shape)
