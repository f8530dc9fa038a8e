"""The additive rule inside its chunks, given the states at their boundaries: the outputs, and all gradients.

Two operators in Triton, for CUDA, half precision, and keys and values of up to 128 entries; and the same in torch,
which torch.compile looks into. There [s, t] matrices have s, the token written, in rows and t, the token that reads,
in columns.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .. import chunks as chunked
from ..operators import operator

BY_DEFAULT = True  # whether the kernels run unasked
MAX_KEY, MAX_VALUE = 128, 128  # a program of the kernels holds all of a key and of a value


def fused(k: Tensor, v: Tensor) -> bool:
    """Whether the operators are to take such keys and values, and not the functions in torch."""
    half = k.dtype in (torch.bfloat16, torch.float16)
    return half and k.shape[-1] <= MAX_KEY and v.shape[-1] <= MAX_VALUE and chunked.fused(k, BY_DEFAULT)


@operator("additive_output", device_types="cuda")
@chunked.on_its_device
def output(q: Tensor, k: Tensor, v: Tensor, write: Tensor, met: Tensor, total: Tensor) -> Tensor:
    """As :func:`output_in_torch`."""
    from . import triton_chunks

    return triton_chunks.output(q, k, v, write, met, total)


@operator("additive_gradients", device_types="cuda")
@chunked.on_its_device
def gradients(
    q: Tensor, k: Tensor, v: Tensor, write: Tensor, do: Tensor, met: Tensor, left: Tensor, total: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """As :func:`gradients_in_torch`, with all sums in float32."""
    from . import triton_chunks

    return triton_chunks.gradients(q, k, v, write, do, met, left, total)


@output.register_fake
def _(q, k, v, write, met, total):
    return v.new_empty(v.shape)


@gradients.register_fake
def _(q, k, v, write, do, met, left, total):
    sums = (write.new_empty(write.shape) for _ in range(5))
    return *(x.new_empty(x.shape) for x in (q, k, v)), *sums, write.new_empty(left.shape[:3])


def output_in_torch(q: Tensor, k: Tensor, v: Tensor, write: Tensor, met: Tensor, total: Tensor) -> Tensor:
    """o [B, N, C, H, V] in v's dtype.

    Args:
        q, k: [B, N, C, G, K]. v: [B, N, C, H, V]. met: [B, N, H, V, K], the states that the chunks meet. All of one
            dtype.
        write: [B, N, C, H], the write strengths, float32, or float64 like k.
        total: [B, N, C, H] float64, the log decays summed from the chunk's start. Their differences are decays of at
            most 1 to the last digit of float32, and exactly 0 across a reset.
    """
    chunks = _Chunks(q, k, write, total)
    inside = torch.einsum("bnhst,bnshv->bnthv", chunks.scores().to(v.dtype), v)
    o = inside + chunks.from_start * chunks.read(q, met)
    # torch 2.11 compiles an autograd.Function without its gradient where what it returns went through an idle .to
    return o if o.dtype == v.dtype else o.to(v.dtype)


def gradients_in_torch(
    q: Tensor, k: Tensor, v: Tensor, write: Tensor, do: Tensor, met: Tensor, left: Tensor, total: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The gradients of q, k, v and the write strengths, and what the gradients of the log decays are made of:

        read, written [B, N, C, H] float64    the sums over pairs in a chunk, by the token that reads, by that written
        carried [B, N, C, H] float64          of what a token wrote for the chunk's end
        recalled [B, N, C, H] float64         of what a token reads from the state met
        through [B, N, H]                     the inner products of the states met and ``left``

    Args:
        do: [B, N, C, H, V]. left: [B, N, H, V, K], the gradients of the states at the chunks' ends. The others as in
            :func:`output_in_torch`.
    """
    chunks = _Chunks(q, k, write, total)
    strength = write[..., None]
    reads = (do * chunks.from_start).to(v.dtype)
    writes = (v * (strength * chunks.to_end)).to(v.dtype)
    scores = chunks.scores()
    dscores = torch.einsum("bnshv,bnthv->bnhst", v, do)
    doverlaps = chunks.by_group(dscores * chunks.weights, 2).sum(3).to(q.dtype)
    dq = torch.einsum("bngst,bnsgk->bntgk", doverlaps, k) + chunks.write(reads, met)
    dk = torch.einsum("bngst,bntgk->bnsgk", doverlaps, q) + chunks.write(writes, left)
    kept = chunks.to_end * chunks.read(k, left)
    # of the writes, strength and value together
    unscaled = (chunks.by_group(chunks.within, 2) * chunks.overlaps).flatten(2, 3).to(v.dtype)
    dwrites = torch.einsum("bnhst,bnthv->bnshv", unscaled, do) + kept

    # the sums over pairs cancel, so both are of the same numbers and are added in float64
    pairs = (dscores * scores).double().triu(1)
    read, written = (pairs.sum(dim).transpose(2, 3) for dim in (3, 4))
    carried = _inner(v, strength * kept)
    recalled = _inner(do, chunks.from_start * chunks.read(q, met))
    through = (met.to(chunks.dtype) * left).sum((-2, -1))
    dwrite = _inner(v, dwrites).to(write.dtype)
    dv = (strength * dwrites).to(v.dtype)
    return dq.to(q.dtype), dk.to(k.dtype), dv, dwrite, read, written, carried, recalled, through


class _Chunks:
    """A chunk's decays and products."""

    def __init__(self, q: Tensor, k: Tensor, write: Tensor, total: Tensor) -> None:
        self.dtype = dtype = torch.float64 if k.dtype == torch.float64 else torch.float32
        self.groups = (k.shape[3], total.shape[3] // k.shape[3])
        self.from_start = total.to(dtype).exp()[..., None]
        self.to_end = (total[:, :, -1:] - total).to(dtype).exp()[..., None]
        by_head = total.transpose(2, 3)
        between = (by_head[..., None, :] - by_head[..., :, None]).to(dtype)
        later = torch.ones(between.shape[-2:], dtype=torch.bool, device=between.device).triu()
        self.within = between.masked_fill(~later, -torch.inf).exp()  # [B, N, H, s, t]
        self.weights = self.within * write.transpose(2, 3)[..., None]
        # of all heads of a group at once, and unrounded
        self.overlaps = torch.einsum("bnsgk,bntgk->bngst", k.to(dtype), q.to(dtype))[:, :, :, None]

    def by_group(self, x: Tensor, dim: int) -> Tensor:
        return x.unflatten(dim, self.groups)

    def scores(self) -> Tensor:
        """[B, N, H, s, t]."""
        return (self.by_group(self.weights, 2) * self.overlaps).flatten(2, 3)

    def write(self, x: Tensor, state: Tensor) -> Tensor:
        """[B, N, C, H, V] x [B, N, H, V, K] -> [B, N, C, G, K], summed over the heads of a group."""
        return torch.einsum("bncgrv,bngrvk->bncgk", self.by_group(x, 3), self.by_group(state, 2)).to(self.dtype)

    def read(self, x: Tensor, state: Tensor) -> Tensor:
        """[B, N, C, G, K] x [B, N, H, V, K] -> [B, N, C, H, V]."""
        return torch.einsum("bncgk,bngrvk->bncgrv", x, self.by_group(state, 2)).flatten(3, 4).to(self.dtype)


def _inner(x: Tensor, y: Tensor) -> Tensor:
    """Sums over the last dimension, in float64."""
    return (x * y).sum(-1).double()
