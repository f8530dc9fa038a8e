"""Palimpsa in Triton, for CUDA: forward and backward as custom operators, and a decode step that works in place.

The operators are opaque to ``torch.compile`` and to activation checkpointing. Saved for the backward pass are the
inputs and the states that enter the forward pass's segments. Results are equal from run to run: no atomics.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..chunks import MAX_HEADS, check, compute_dtype, on_its_device, without_autocast
from ..operators import operator
from . import chunked
from .triton_backward import backward
from .triton_common import CHUNK, MAX_KEY, MAX_VALUE, decays, precision
from .triton_decode import step
from .triton_forward import forward, segment_length


def _length(q: Tensor, k: Tensor, v: Tensor, b: Tensor) -> int:
    batch, tokens, heads, value_dim = v.shape
    return segment_length(batch, tokens, heads, k.shape[-1], value_dim, precision(q, k, v, b) != "tf32")


@operator("palimpsa")
@on_its_device
def _palimpsa(
    q: Tensor, k: Tensor, v: Tensor, b: Tensor, log_decay: Tensor, prior: Tensor, state: Tensor | None,
    reset: Tensor | None, return_variance: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """o, variance (empty unless asked for), the final state [B, 2, H, V, K], the states that enter the segments."""
    q, k, v, b, log_decay, prior = (x.contiguous() for x in (q, k, v, b, log_decay, prior))
    table = decays(log_decay, None if reset is None else reset.contiguous())
    o, variance, final, starts = forward(q, k, v, b, table, prior, state, _length(q, k, v, b), return_variance)
    return o, variance, final.transpose(1, 2).contiguous(), starts


@_palimpsa.register_fake
def _(q, k, v, b, log_decay, prior, state, reset, return_variance):
    batch, tokens, heads, value_dim = v.shape
    key_dim = k.shape[-1]
    length = _length(q, k, v, b)
    segments = (tokens + CHUNK * length - 1) // (CHUNK * length)
    final = v.new_empty((batch, 2, heads, value_dim, key_dim), dtype=torch.float32)
    starts = v.new_empty((batch, heads, segments, 2, value_dim, key_dim), dtype=torch.float32)
    variance = v.new_empty(v.shape if return_variance else (0,), dtype=torch.float32)
    return v.new_empty(v.shape), variance, final, starts


@operator("palimpsa_backward")
@on_its_device
def _palimpsa_backward(
    dy: Tensor, dvariance: Tensor | None, dfinal: Tensor | None, q: Tensor, k: Tensor, v: Tensor, b: Tensor,
    log_decay: Tensor, prior: Tensor, reset: Tensor | None, starts: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v, b, log_decay, prior and the initial state."""
    dy, q, k, v, b, log_decay, prior, starts = (x.contiguous() for x in (dy, q, k, v, b, log_decay, prior, starts))
    dvariance = None if dvariance is None else dvariance.contiguous()
    table = decays(log_decay, None if reset is None else reset.contiguous())
    *gradients, dlog, dprior, dstate = backward(
        dy, dvariance, dfinal, q, k, v, b, table, prior, starts, _length(q, k, v, b)
    )
    return *gradients, dlog.to(log_decay.dtype), dprior, dstate.transpose(1, 2).contiguous()


@_palimpsa_backward.register_fake
def _(dy, dvariance, dfinal, q, k, v, b, log_decay, prior, reset, starts):
    batch, _, heads, value_dim = v.shape
    dstate = v.new_empty((batch, 2, heads, value_dim, k.shape[-1]), dtype=torch.float32)
    return *(x.new_empty(x.shape) for x in (q, k, v, b, log_decay, prior)), dstate


def _save(ctx, inputs, output):
    q, k, v, b, log_decay, prior, state, reset, return_variance = inputs
    ctx.save_for_backward(q, k, v, b, log_decay, prior, reset, output[3])
    ctx.state_dtype = None if state is None else state.dtype
    ctx.return_variance = return_variance
    ctx.set_materialize_grads(False)


def _differentiate(ctx, dy, dvariance, dfinal, _):
    q, k, v, b, log_decay, prior, reset, starts = ctx.saved_tensors
    if dy is None:
        dy = torch.zeros_like(v)
    if not ctx.return_variance:
        dvariance = None
    *gradients, dstate = _palimpsa_backward(
        dy, dvariance, dfinal, q, k, v, b, log_decay, prior, reset, starts
    )
    return *gradients, None if ctx.state_dtype is None else dstate.to(ctx.state_dtype), None, None


_palimpsa.register_autograd(_differentiate, setup_context=_save)


@operator("palimpsa_step")
def _palimpsa_step(
    q: Tensor, k: Tensor, v: Tensor, b: Tensor, log_decay: Tensor, prior: Tensor, state: Tensor, reset: Tensor | None
) -> tuple[Tensor, Tensor]:
    """o and the next state of one token. No gradient."""
    q, k, v, b, log_decay, prior, state = (x.contiguous() for x in (q, k, v, b, log_decay, prior, state))
    after = torch.empty_like(state, dtype=torch.float32)
    return step(q, k, v, b, log_decay, prior, state, after, reset), after


@_palimpsa_step.register_fake
def _(q, k, v, b, log_decay, prior, state, reset):
    return v.new_empty(v.shape), state.new_empty(state.shape, dtype=torch.float32)


def _check(q: Tensor, k: Tensor, v: Tensor, b: Tensor, log_decay: Tensor) -> None:
    check(q, k, v, log_decay)
    assert b.shape == v.shape, f"b {tuple(b.shape)} and v {tuple(v.shape)} differ"
    key_dim, value_dim = k.shape[-1], v.shape[-1]
    assert key_dim <= MAX_KEY, f"keys of {key_dim} entries: at most {MAX_KEY} fit these kernels"
    assert value_dim <= MAX_VALUE, f"values of {value_dim} entries: at most {MAX_VALUE} fit these kernels"
    heads = v.shape[0] * v.shape[2]
    assert heads <= MAX_HEADS, f"{heads} heads in a batch: at most {MAX_HEADS} fit one launch"


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
    in_place: bool = False,
) -> tuple[Tensor, ...]:
    """Palimpsa on a CUDA device; arguments and results as in :func:`.reference.palimpsa`.

    K is at most 256 and V at most 512. Inputs may be bf16, fp16 or float32 in any mix; states and sums are float32.
    float64 inputs go to the chunked form. ``in_place``: one token's step may overwrite the state that it is given.
    """
    if compute_dtype(q, k, v) == torch.float64:
        return chunked.palimpsa(
            q, k, v, b, log_decay, prior, state=state, reset=reset, return_variance=return_variance
        )
    _check(q, k, v, b, log_decay)
    if v.shape[1] == 1 and state is not None and not return_variance and not torch.is_grad_enabled():
        if in_place and not torch.compiler.is_compiling() and state.is_contiguous() and state.dtype == torch.float32:
            return palimpsa_step(q, k, v, b, log_decay, prior, state, reset=reset), state
        return _palimpsa_step(q, k, v, b, log_decay, prior, state, reset)
    o, variance, final, _ = _palimpsa(q, k, v, b, log_decay, prior, state, reset, return_variance)
    return (o, variance, final) if return_variance else (o, final)


@torch.no_grad()
def palimpsa_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    b: Tensor,
    log_decay: Tensor,
    prior: Tensor,
    state: Tensor,
    *,
    reset: Tensor | None = None,
) -> Tensor:
    """One token: o [B, 1, H, V], with ``state`` (contiguous float32 [B, 2, H, V, K]) updated in place. No gradient."""
    _check(q, k, v, b, log_decay)
    assert v.shape[1] == 1, f"{v.shape[1]} tokens: a step takes one"
    assert state.dtype == torch.float32 and state.is_contiguous(), "the state must be contiguous float32"
    q, k, v, b, log_decay, prior = (x.contiguous() for x in (q, k, v, b, log_decay, prior))
    return step(q, k, v, b, log_decay, prior, state, state, reset)
