"""The additive rule by chunks of tokens: matrix products inside a chunk, one short scan over chunk boundaries.

The backward pass is written out. Kept for it are the inputs and the states at chunk boundaries; the [C, C] matrices of
a chunk are made again. torch.compile fuses what is elementwise; the products and the scan are the same without it.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from ..chunks import check, chunk_length, compute_dtype, operand_dtype, split
from .states import additive_states

# exp of it is 0 in float64 too, and sums of it over a chunk are exact to 1e-11
_FORGOTTEN = -800.0


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

    On CUDA, where q, k and v are all bfloat16 or all float16, the products' operands are too; sums, decays and the
    state after the last token are float32. Otherwise everything is float32 or float64.

    Source: Dao and Gu, "Transformers are SSMs" (2024), the block decomposition of the state-space dual.
    """
    return additive_in(operand_dtype(q, k, v), q, k, v, log_decay, state=state, reset=reset)


def additive_in(
    operands: torch.dtype,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    *,
    state: Tensor | None = None,
    reset: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """:func:`additive` with the products' operands in the dtype ``operands``."""
    check(q, k, v, log_decay)
    dtype = compute_dtype(q, k, v)
    batch, tokens, heads, value_dim = v.shape
    chunk = chunk_length(tokens)
    if operands not in (torch.float32, torch.float64) and tokens > chunk:
        chunk = 128  # fewer states to write: half the memory traffic of a wide head
    steps = log_decay.double().clamp(min=_FORGOTTEN)
    if reset is not None:
        steps = steps.masked_fill(reset[..., None], _FORGOTTEN)
    if state is None:
        state = torch.zeros(batch, heads, value_dim, k.shape[-1], dtype=dtype, device=v.device)
    inputs = (split(x, chunk) for x in (q.to(operands), k.to(operands), v.to(operands), steps))
    o, state = _Additive.apply(*inputs, state.to(dtype))
    return o.flatten(1, 2)[:, :tokens].to(v.dtype), state


class _Chunks:
    """A chunk's decays and products, in either direction.

    Decays are differences of running sums in float64: each at most 1, to the last digit of float32, and exactly 0
    across a reset. [s, t] matrices have s, the token written, in rows and t, the token that reads, in columns.
    """

    def __init__(self, q: Tensor, k: Tensor, steps: Tensor, dtype: torch.dtype) -> None:
        self.dtype, self.operands = dtype, q.dtype
        self.groups = (k.shape[3], steps.shape[3] // k.shape[3])
        total = steps.cumsum(2)  # [B, N, C, H]
        self.from_start = total.to(dtype).exp()[..., None]
        self.to_end = (total[:, :, -1:] - total).to(dtype).exp()[..., None]
        self.whole = self.from_start[:, :, -1, :, 0]  # [B, N, H]
        by_head = total.transpose(2, 3)
        between = (by_head[..., None, :] - by_head[..., :, None]).to(dtype)
        later = torch.ones(between.shape[-2:], dtype=torch.bool, device=between.device).triu()
        self.within = between.masked_fill(~later, -torch.inf).exp()  # [B, N, H, s, t]
        # of all heads of a group at once, and unrounded
        self.overlaps = torch.einsum("bnsgk,bntgk->bngst", k.to(dtype), q.to(dtype))[:, :, :, None]

    def by_group(self, x: Tensor, dim: int) -> Tensor:
        return x.unflatten(dim, self.groups)

    def scores(self) -> Tensor:
        """[B, N, H, s, t] in ``dtype``."""
        return (self.by_group(self.within, 2) * self.overlaps).flatten(2, 3)

    def write(self, x: Tensor, state: Tensor) -> Tensor:
        """[B, N, C, H, V] x [B, N, H, V, K] -> [B, N, C, G, K], summed over the heads of a group."""
        return torch.einsum("bncgrv,bngrvk->bncgk", self.by_group(x, 3), self.by_group(state, 2)).to(self.dtype)

    def read(self, x: Tensor, state: Tensor) -> Tensor:
        """[B, N, C, G, K] x [B, N, H, V, K] -> [B, N, C, H, V]."""
        return torch.einsum("bncgk,bngrvk->bncgrv", x, self.by_group(state, 2)).flatten(3, 4).to(self.dtype)


class _Additive(torch.autograd.Function):
    """q, k [B, N, C, G, K] and v [B, N, C, H, V] in the operands' dtype, log decays [B, N, C, H] in float64, the state
    [B, H, V, K] -> outputs like v, and the state after all chunks.

    autocast is off in both directions: it would lower the products, and torch.compile traces a backward pass under the
    autocast that surrounds the call.
    """

    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor, steps: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        with torch.autocast(q.device.type, enabled=False):
            chunks = _Chunks(q, k, steps, state.dtype)
            writes = (v * chunks.to_end).to(v.dtype)
            met, final = additive_states(k, writes, chunks.whole, state, False)
            inside = torch.einsum("bnhst,bnshv->bnthv", chunks.scores().to(v.dtype), v)
            o = inside + chunks.from_start * chunks.read(q, met)
        ctx.save_for_backward(q, k, v, steps, met)
        return o.to(v.dtype), final

    @staticmethod
    def backward(ctx, do: Tensor, dfinal: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        q, k, v, steps, met = ctx.saved_tensors
        with torch.autocast(q.device.type, enabled=False):
            chunks = _Chunks(q, k, steps, dfinal.dtype)
            do = do.to(v.dtype)
            reads = (do * chunks.from_start).to(v.dtype)
            writes = (v * chunks.to_end).to(v.dtype)
            # the adjoint of the state at each chunk's end
            left, dstate = additive_states(q, reads, chunks.whole, dfinal, True)

            scores = chunks.scores()
            dscores = torch.einsum("bnshv,bnthv->bnhst", v, do)
            doverlaps = chunks.by_group(dscores * chunks.within, 2).sum(3).to(q.dtype)
            dq = torch.einsum("bngst,bnsgk->bntgk", doverlaps, k) + chunks.write(reads, met)
            dk = torch.einsum("bngst,bntgk->bnsgk", doverlaps, q) + chunks.write(writes, left)
            kept = chunks.to_end * chunks.read(k, left)
            dv = torch.einsum("bnhst,bnthv->bnshv", scores.to(v.dtype), do) + kept

            # a step's gradient is that of every product it stands in. The sums over pairs cancel, so both are of the
            # same float32 numbers and are added in float64
            pairs = (dscores * scores).double().triu(1)
            read = pairs.sum(3).transpose(2, 3) + _inner(do, chunks.from_start * chunks.read(q, met))
            written = pairs.sum(4).transpose(2, 3)
            # shifted, not subtracted afterwards: under hard forgetting a step's gradient is far below its own token's
            carried = functional.pad(_inner(v, kept)[:, :, :-1], (0, 0, 1, 0)).cumsum(2)
            through = chunks.whole * (met.to(dfinal.dtype) * left).sum((-2, -1))
            dsteps = (read - written).flip(2).cumsum(2).flip(2) + carried + through[:, :, None].double()
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), dsteps, dstate


def _inner(x: Tensor, y: Tensor) -> Tensor:
    """Sums over the last dimension, in float64."""
    return (x * y).sum(-1).double()
