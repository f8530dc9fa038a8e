"""Palimpsa by chunks of tokens: matrix products carry the state between chunks, a walk fills in each chunk's tokens.

The read divides element by element, so no product of matrices gives it: the states of every token must be seen. Here
they are seen a few chunks at a time, in buffers that stay in the processor's cache, and never kept: the backward pass
keeps the inputs and one state a segment, and walks again.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..chunks import check, compute_dtype, without_autocast
from .walk import Segment, segment_tokens


class _Palimpsa(torch.autograd.Function):
    """Forward and closed-form backward; every argument after ``state`` is not differentiable."""

    @staticmethod
    def forward(ctx, q, k, v, b, log_decay, prior, state, reset, with_variance):
        dtype = compute_dtype(q, k, v)
        batch, tokens, heads, value_dim = v.shape
        key_dim = k.shape[-1]
        inputs = (q, k, v, b, log_decay, prior, reset)
        memory = v.new_zeros(2, batch, heads, value_dim, key_dim, dtype=dtype)
        if state is not None:
            memory.copy_(state.transpose(0, 1))
        o = torch.empty_like(v)
        variance = torch.empty(v.shape, dtype=dtype, device=v.device) if with_variance else None
        length = segment_tokens(batch, heads, value_dim, key_dim, v.device)
        carried = []
        for first in range(0, tokens, length):
            part = slice(first, first + length)
            carried.append(memory)
            segment = Segment.of(inputs, part, dtype)
            starts, memory = segment.boundaries(memory)
            read, spread = segment.read(starts, with_variance)
            o[:, part] = segment.restore(read)
            if with_variance:
                variance[:, part] = segment.restore(spread)
        ctx.save_for_backward(*inputs, *carried)
        ctx.length, ctx.state_dtype = length, None if state is None else state.dtype
        ctx.set_materialize_grads(False)
        return o, variance, memory.transpose(0, 1)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_o, grad_variance, grad_memory):
        q, k, v, b, log_decay, prior, reset, *carried = ctx.saved_tensors
        with torch.autocast(device_type=v.device.type, enabled=False):
            dtype = compute_dtype(q, k, v)
            heads = v.shape[2]
            grads = [torch.empty_like(x) for x in (q, k, v, b, log_decay)]
            grad_prior = torch.zeros(heads, dtype=dtype, device=v.device)
            adjoint = torch.zeros_like(carried[0])
            if grad_memory is not None:
                adjoint.copy_(grad_memory.transpose(0, 1))
            # the second half of an adjoint is kept negated, which saves a pass over the states
            adjoint[1].neg_()
            for index in reversed(range(len(carried))):
                part = slice(index * ctx.length, (index + 1) * ctx.length)
                segment = Segment.of((q, k, v, b, log_decay, prior, reset), part, dtype)
                grad_read = None if grad_o is None else segment.layout(grad_o[:, part].to(dtype))
                grad_spread = None if grad_variance is None else segment.layout(grad_variance[:, part])
                *found, from_prior, adjoint = segment.backward(carried[index], grad_read, grad_spread, adjoint)
                for grad, value in zip(grads, found, strict=True):
                    value = segment.restore(value)
                    if value.shape[2] != grad.shape[2]:  # value heads that share a key head
                        value = value.unflatten(2, (grad.shape[2], -1)).sum(3)
                    grad[:, part] = value
                grad_prior += from_prior
            adjoint[1].neg_()
            grad_state = None if ctx.state_dtype is None else adjoint.transpose(0, 1).to(ctx.state_dtype)
            return *grads, grad_prior.to(prior.dtype), grad_state, None, None


@torch.compiler.disable
@without_autocast
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
    """The same function as :func:`surgery.kernels.palimpsa.reference.palimpsa`, with the same arguments.

    Gradients are closed-form for every differentiable argument, through the outputs, the variance and the outgoing
    state; once differentiable. torch.compile runs it as it is.
    """
    check(q, k, v, log_decay)
    assert b.shape == v.shape, f"b {tuple(b.shape)} and v {tuple(v.shape)} differ"
    o, variance, memory = _Palimpsa.apply(q, k, v, b, log_decay, prior, state, reset, return_variance)
    return (o, variance, memory) if return_variance else (o, memory)
