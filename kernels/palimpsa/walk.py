"""A run of tokens through Palimpsa's memory and back, by chunks that are walked side by side.

The symbols of the closed-form backward pass, for one head (* is elementwise, R = 1 / (I0 + E)):

    w_t  = (dy_t q_t^T) * R_t                         z_t  = w_t * M_t * R_t + (dvar_t (q_t^2)^T) * R_t^2
    LM_t = w_t + a_{t+1} LM_{t+1}                     LE_t = -z_t + a_{t+1} LE_{t+1}
    dq_t = (M_t * R_t)^T dy_t + 2 q_t * R_t^T dvar_t  dI0  = -sum z
    dv_t = LM_t k_t                                   db_t = LE_t k_t^2
    dk_t = LM_t^T v_t + 2 k_t * LE_t^T b_t            dg_t = a_t (<LM_t, M_{t-1}> + <LE_t, E_{t-1}>)

Adjoints are linear in what arrives from later chunks. So one walk finds each chunk's own part, and the part that comes
from later chunks is added afterwards by matrix products with the adjoint at the chunk's end. All inner products of dg
are formed directly: its other form, a reverse cumulative sum of small differences, loses most digits in float32.

Here LE stands for its negative throughout. Shapes: X = B N H chunks, C tokens each, in front of everything so that one
token of all chunks is one contiguous slice; 2 is (M, E), or what belongs to each.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ..chunks import expand_heads, split

_CHUNK = 16


def segment_tokens(batch: int, heads: int, value_dim: int, key_dim: int, device: torch.device) -> int:
    """Tokens to treat at once, a multiple of the chunk: boundary states of 2^23 elements on a CPU, 2^27 on a GPU."""
    limit = 2**27 if device.type == "cuda" else 2**23
    return _CHUNK * max(1, limit // (2 * batch * heads * value_dim * key_dim))


def _matrices(x: Tensor) -> Tensor:
    """[C, 2, X, W] -> contiguous [2, X, C, W]; the batched product of strided matrices falls back to one at a time."""
    return x.movedim(0, 2).contiguous()


@dataclass
class Segment:
    """Consecutive tokens of a batch, laid out by chunks. See the module's docstring."""

    batch: int
    tokens: int
    heads: int
    q: Tensor  # [C, X, K]
    keys: Tensor  # [C, 2, X, K], k and k^2
    writes: Tensor  # [C, 2, X, V], v and b
    decay: Tensor  # [C, X]
    prior: Tensor  # [X]

    @classmethod
    def of(cls, inputs: tuple[Tensor | None, ...], part: slice, dtype: torch.dtype) -> Segment:
        """The tokens ``part`` of (q, k, v, b, log_decay, prior, reset), as the rule's arguments."""
        *by_token, prior, reset = inputs
        q, k, v, b, log_decay = (x[:, part].to(dtype) for x in by_token)
        decay = log_decay.exp()
        if reset is not None:
            decay = decay.masked_fill(reset[:, part, None], 0.0)
        batch, tokens, heads, _ = v.shape
        # padding: a decay of 1 and no write
        decay = torch.cat((decay, decay.new_ones(batch, -tokens % _CHUNK, heads)), 1)
        segment = cls(batch, tokens, heads, q, k, v, decay, prior)
        keys = segment.layout(expand_heads(k, heads))
        segment.q = segment.layout(expand_heads(q, heads))
        segment.keys = torch.stack((keys, keys * keys), 1)
        segment.writes = torch.stack((segment.layout(v), segment.layout(b)), 1)
        segment.decay = segment.layout(decay[..., None])[..., 0]
        segment.prior = prior.to(dtype).expand(segment.q.shape[1] // heads, heads).flatten()
        return segment

    def layout(self, x: Tensor) -> Tensor:
        """[B, T, H, W] -> [C, X, W]."""
        # a gradient may be an expanded scalar, which batched products take one matrix at a time
        return split(x, _CHUNK).permute(2, 0, 1, 3, 4).flatten(1, 3).contiguous()

    def restore(self, x: Tensor) -> Tensor:
        """[C, X, ...] -> [B, T, H, ...]."""
        by_chunk = x.unflatten(1, (self.batch, -1, self.heads)).movedim(0, 2)  # [B, N, C, H, ...]
        return by_chunk.flatten(1, 2)[:, : self.tokens]

    def slices(self) -> Iterator[slice]:
        """Chunks to walk together: buffers of 2^19 elements stay in a CPU's cache; a GPU wants more work at once."""
        size = _CHUNK * self.keys.shape[-1] * self.writes.shape[-1]
        step = max(1, (2**25 if self.q.is_cuda else 2**19) // size)
        for first in range(0, self.q.shape[1], step):
            yield slice(first, min(first + step, self.q.shape[1]))

    def to_end(self) -> Tensor:
        """[C, X]: the product of the decays after each token, to the chunk's end."""
        products = torch.ones_like(self.decay)
        for t in reversed(range(_CHUNK - 1)):
            torch.mul(products[t + 1], self.decay[t + 1], out=products[t])
        return products

    def by_chunk(self, x: Tensor) -> tuple[Tensor, ...]:
        """[2, X, V, K] -> N views [2, B, H, V, K]."""
        return x.unflatten(1, (self.batch, -1, self.heads)).unbind(2)

    def boundaries(self, memory: Tensor) -> tuple[Tensor, Tensor]:
        """From the state [2, B, H, V, K] before the segment: those [2, X, V, K] before each chunk, and the last one."""
        to_end = self.to_end()
        written = _matrices(self.writes * to_end[:, None, :, None]).mT @ _matrices(self.keys)
        whole = (to_end[0] * self.decay[0]).view(self.batch, -1, self.heads, 1, 1).unbind(1)
        starts = torch.empty_like(written)
        for start, own, decay in zip(self.by_chunk(starts), self.by_chunk(written), whole, strict=True):
            start.copy_(memory)
            memory = torch.addcmul(own, decay, memory)
        return starts, memory

    def walk(self, starts: Tensor, rows: slice, out: Tensor) -> None:
        """The states [C, 2, S, V, K] after each token of the chunks ``rows``, into ``out``."""
        torch.mul(self.writes[:, :, rows, :, None], self.keys[:, :, rows, None, :], out=out)
        decay = self.decay[:, None, rows, None, None]
        before = starts[:, rows]
        for t in range(_CHUNK):
            before = out[t].addcmul_(before, decay[t])

    def buffer(self, *shape: int) -> Tensor:
        """An uninitialised [*shape, S, V, K] for the largest slice of chunks."""
        rows = next(self.slices())
        return self.q.new_empty(*shape, rows.stop, self.writes.shape[-1], self.keys.shape[-1])

    def read(self, starts: Tensor, with_variance: bool) -> tuple[Tensor, Tensor | None]:
        """The reads and their variances [C, X, V], from the states before each chunk."""
        read = torch.empty_like(self.writes[:, 0])
        spread = torch.empty_like(read) if with_variance else None
        states, precision = self.buffer(_CHUNK, 2), self.buffer(_CHUNK)
        for rows in self.slices():
            count = rows.stop - rows.start
            state, ratio = states[:, :, :count], precision[:, :count]
            self.walk(starts, rows, state)
            torch.add(state[:, 1], self.prior[rows, None, None], out=ratio)
            q = self.q[:, rows, None, :]
            if with_variance:
                torch.div(q, ratio, out=ratio)
                torch.sum(state[:, 0].mul_(ratio), -1, out=read[:, rows])
                torch.sum(ratio.mul_(q), -1, out=spread[:, rows])
            else:
                torch.div(state[:, 0], ratio, out=ratio)
                torch.sum(ratio.mul_(q), -1, out=read[:, rows])
        return read, spread

    def backward(
        self, memory: Tensor, grad_read: Tensor | None, grad_spread: Tensor | None, adjoint: Tensor
    ) -> tuple[Tensor, ...]:
        """Gradients of the segment's inputs.

        Args:
            memory: [2, B, H, V, K], the state before the segment.
            grad_read, grad_spread: [C, X, V] or None, of the reads and of their variances.
            adjoint: [2, B, H, V, K], of the state after the segment, its second half negated.

        Returns:
            Gradients of q, k [C, X, K], v, b [C, X, V], log_decay [C, X], prior [H], and the adjoint of ``memory``.
        """
        starts, _ = self.boundaries(memory)
        grad_q = torch.zeros_like(self.q)
        grad_keys, grad_writes = torch.empty_like(self.keys), torch.empty_like(self.writes)
        grad_decay = torch.empty_like(self.decay)
        grad_prior = torch.empty_like(self.prior)
        own = torch.empty_like(starts)  # each chunk's own part of the adjoint of the state before it
        buffers = self.buffer(_CHUNK, 2), self.buffer(_CHUNK, 2), self.buffer(_CHUNK, 2)
        for rows in self.slices():
            state, lead, spare = (x[:, :, : rows.stop - rows.start] for x in buffers)
            self.walk(starts, rows, state)
            self._sources(rows, state, grad_read, grad_spread, spare, lead, grad_q)
            torch.sum(lead[:, 1], (0, 2, 3), out=grad_prior[rows])
            decay = self.decay[:, None, rows, None, None]
            for t in reversed(range(_CHUNK - 1)):
                lead[t].addcmul_(lead[t + 1], decay[t + 1])
            torch.mul(lead[0], decay[0], out=own[:, rows])

            keys, writes = self.keys[:, :, rows, None, :], self.writes[:, :, rows, None, :]
            torch.sum(torch.mul(lead, keys, out=spare), -1, out=grad_writes[:, :, rows])
            grad_keys[:, :, rows] = (writes.flatten(0, 2) @ lead.flatten(0, 2)).view_as(keys)[..., 0, :]
            lead[0].mul_(starts[:, rows])
            lead[1:].mul_(state[:-1])
            inner = lead.sum((-1, -2))
            torch.sub(inner[:, 0], inner[:, 1], out=grad_decay[:, rows])

        adjoint = self._from_later(starts, own, adjoint, grad_keys, grad_writes, grad_decay)
        grad_k = torch.addcmul(grad_keys[:, 0], self.keys[:, 0], grad_keys[:, 1], value=-2)
        grad_prior = -grad_prior.view(-1, self.heads).sum(0)
        grad_g = grad_decay * self.decay
        return grad_q, grad_k, grad_writes[:, 0], -grad_writes[:, 1], grad_g, grad_prior, adjoint

    def _sources(
        self,
        rows: slice,
        state: Tensor,
        grad_read: Tensor | None,
        grad_spread: Tensor | None,
        spare: Tensor,
        out: Tensor,
        grad_q: Tensor,
    ) -> None:
        """w and z of the chunks ``rows`` into ``out`` [C, 2, S, V, K], and their part of ``grad_q``."""
        q = self.q[:, rows, None, :]
        inverse, ratio = spare.view(2, -1, *spare.shape[2:])
        torch.add(state[:, 1], self.prior[rows, None, None], out=inverse).reciprocal_()
        if grad_read is None:
            out.zero_()
        else:
            grad = grad_read[:, rows]
            torch.mul(state[:, 0], inverse, out=ratio)
            grad_q[:, rows] = (grad[:, :, None].flatten(0, 1) @ ratio.flatten(0, 1)).view_as(q)[..., 0, :]
            torch.mul(inverse, grad[..., None], out=out[:, 0])
            out[:, 0].mul_(q)
            torch.mul(out[:, 0], ratio, out=out[:, 1])
        if grad_spread is not None:
            grad = grad_spread[:, rows]
            read = (grad[:, :, None].flatten(0, 1) @ inverse.flatten(0, 1)).view_as(q)
            grad_q[:, rows] += 2 * (q * read)[..., 0, :]
            out[:, 1] += inverse.square_() * grad[..., None] * (q * q)

    def _from_later(
        self, starts: Tensor, own: Tensor, adjoint: Tensor, grad_keys: Tensor, grad_writes: Tensor, grad_decay: Tensor
    ) -> Tensor:
        """Add to three gradients what reaches each chunk from later ones; returns the adjoint before the segment."""
        to_end = self.to_end()
        whole = (to_end[0] * self.decay[0]).view(self.batch, -1, self.heads, 1, 1).unbind(1)
        ends = torch.empty_like(own)
        for end, part, decay in reversed(list(zip(self.by_chunk(ends), self.by_chunk(own), whole, strict=True))):
            end.copy_(adjoint)
            adjoint = torch.addcmul(part, decay, adjoint)

        weight = to_end[:, None, :, None]
        through_keys = (_matrices(self.keys) @ ends.mT).movedim(2, 0)
        grad_keys += weight * (_matrices(self.writes) @ ends).movedim(2, 0)
        grad_writes += weight * through_keys
        # <adjoint, state> before each token, as the state itself runs
        gained = (through_keys * self.writes).sum(-1)
        gained = gained[:, 0] - gained[:, 1]
        inner = (ends * starts).sum((-1, -2))
        inner = inner[0] - inner[1]
        for t in range(_CHUNK):
            grad_decay[t] += to_end[t] * inner
            inner = torch.addcmul(gained[t], self.decay[t], inner)
        return adjoint
