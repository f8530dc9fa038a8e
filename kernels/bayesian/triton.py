"""The Bayesian rule in Triton, for CUDA: forward and backward as custom operators, and a decode step in place.

The operators are opaque to ``torch.compile`` and to activation checkpointing. Results are equal from run to run: no
atomics. Products take their precision from the inputs' dtype and from nowhere else: torch's switches for TF32 change
nothing here. The covariance always has float32's digits; the mean's products are tf32 under bf16 or fp16 inputs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..chunks import MAX_HEADS, check, compute_dtype, on_its_device, without_autocast
from ..devices import ENOUGH_SHARED, shared_memory
from ..operators import operator
from . import reference
from .triton_common import CHUNK, MAX_KEY, MAX_VALUE, SMALL_KEY, Shape, mean_precision, tables
from .triton_covariance import covariance, prepare
from .triton_covariance_backward import covariance_backward
from .triton_decode import step
from .triton_mean import buffers, mean
from .triton_mean_backward import mean_backward
from .triton_streams import beside, segments


def max_key() -> int:
    """The widest keys that the kernels are picked for: what the least of this machine's GPUs takes."""
    devices = (torch.device("cuda", index) for index in range(torch.cuda.device_count()))
    return MAX_KEY if all(shared_memory(device) >= ENOUGH_SHARED for device in devices) else SMALL_KEY


@operator("bayesian")
@on_its_device
def _bayesian(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, cov_decay_sqrt: Tensor, process_noise: Tensor, precision: Tensor,
    observation_noise: Tensor, erase: Tensor, shrink: Tensor, write: Tensor, start_mean: Tensor,
    start_covariance: Tensor, keep: bool, unit_gain: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """o, the state [B, H, K, V + K], and, only where ``keep``, what the backward pass reads."""
    q, k, v = (x.contiguous() for x in (q, k, v))
    scalars = (decay, cov_decay_sqrt, process_noise, observation_noise, erase, shrink, write)
    shape = Shape.of(k, v)
    table = tables(shape, tuple(x.contiguous() for x in scalars))
    products = mean_precision(q, k, v)
    precision = precision.contiguous()
    work = prepare(shape, k, table, start_covariance, keep)
    through = buffers(shape, start_mean, keep)
    o = torch.empty_like(v)
    with beside(k.device) as ahead:
        for begin, end in segments(shape.chunks):
            with ahead():
                covariance(shape, k, table, precision, work, keep, begin, end)
            mean(shape, q, k, v, table, work.U, work.gains, through, o, products, keep, begin, end)
    # the covariance is symmetric up to its last digit; the state is to the bit
    state = torch.cat((through.means[:, :, -1], 0.5 * (work.last + work.last.mT)), dim=-1)
    kept = (work.U, work.gains, work.P, *through)
    return o, state, *(kept if keep else (x.new_empty(0) for x in kept))


@_bayesian.register_fake
def _(q, k, v, decay, cov_decay_sqrt, process_noise, precision, observation_noise, erase, shrink, write, start_mean,
      start_covariance, keep, unit_gain):  # fmt: skip
    batch, _, heads, value_dim = v.shape
    key_dim = k.shape[-1]
    chunks = (v.shape[1] + CHUNK - 1) // CHUNK
    sizes = (
        (chunks * CHUNK, key_dim), (chunks * CHUNK,), (chunks + 1, key_dim, key_dim), (chunks, CHUNK, CHUNK),
        (chunks, CHUNK, CHUNK), (chunks + 1, key_dim, value_dim), (chunks * CHUNK, value_dim),
    )
    state = decay.new_empty((batch, heads, key_dim, value_dim + key_dim))
    kept = (decay.new_empty((batch, heads, *size) if keep else (0,)) for size in sizes)
    return v.new_empty(v.shape), state, *kept


@operator("bayesian_backward")
@on_its_device
def _bayesian_backward(
    do: Tensor | None, dstate: Tensor | None, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, cov_decay_sqrt: Tensor,
    process_noise: Tensor, precision: Tensor, observation_noise: Tensor, erase: Tensor, shrink: Tensor, write: Tensor,
    U: Tensor, gains: Tensor, P: Tensor, inverse: Tensor, reads: Tensor, means: Tensor, errors: Tensor,
    unit_gain: bool,
) -> tuple[
    Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor
]:
    """Gradients of q, k, v, the eight gates in their order, and of the mean and covariance to start from."""
    q, k, v, precision = (x.contiguous() for x in (q, k, v, precision))
    do = torch.zeros_like(v) if do is None else do.contiguous()
    if dstate is None:
        dstate = means.new_zeros((*means.shape[:2], k.shape[-1], v.shape[-1] + k.shape[-1]))
    scalars = (decay, cov_decay_sqrt, process_noise, observation_noise, erase, shrink, write)
    shape = Shape.of(k, v)
    table = tables(shape, tuple(x.contiguous() for x in scalars))
    dmean, dcovariance = dstate.split((shape.value_dim, shape.key_dim), dim=-1)
    through = mean_backward(
        shape, q, k, v, do, dmean, table, U, gains, inverse, reads, means, errors, mean_precision(q, k, v)
    )
    back = covariance_backward(
        shape, k, table, precision, U, gains, P, through.dU, through.dk, through.gains, dcovariance, unit_gain
    )

    def by_key_head(x: Tensor, like: Tensor) -> Tensor:
        return x if x.shape == like.shape else x.unflatten(2, (shape.groups, -1)).sum(3).to(like.dtype)

    def by_token(x: Tensor) -> Tensor:
        return x[:, :, : shape.tokens].transpose(1, 2).clone(memory_format=torch.contiguous_format)

    return (
        by_key_head(through.dq, q), by_key_head(back.dk, k), through.dv, by_token(through.decay),
        by_token(back.cov_decay_sqrt), by_token(back.process_noise), back.precision.sum((0, 2)),
        by_token(back.observation_noise), by_token(through.erase), by_token(back.shrink), by_token(through.write),
        through.start, back.start.clone(),
    )


@_bayesian_backward.register_fake
def _(do, dstate, q, k, v, decay, cov_decay_sqrt, process_noise, precision, observation_noise, erase, shrink, write,
      U, gains, P, inverse, reads, means, errors, unit_gain):  # fmt: skip
    gates = (decay, cov_decay_sqrt, process_noise, precision, observation_noise, erase, shrink, write)
    key_dim, value_dim = k.shape[-1], v.shape[-1]
    mean = decay.new_empty((*U.shape[:2], key_dim, value_dim))
    covariance_ = decay.new_empty((*U.shape[:2], key_dim, key_dim))
    return *(x.new_empty(x.shape) for x in (q, k, v, *gates)), mean, covariance_


def _save(ctx, inputs, output):
    *tensors, _, _, _, unit_gain = inputs
    ctx.save_for_backward(*tensors, *output[2:])
    ctx.unit_gain = unit_gain
    ctx.set_materialize_grads(False)


def _differentiate(ctx, do, dstate, *_):
    return *_bayesian_backward(do, dstate, *ctx.saved_tensors, ctx.unit_gain), None, None


_bayesian.register_autograd(_differentiate, setup_context=_save)


@without_autocast
def bayesian(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    cov_decay_sqrt: Tensor,
    process_noise: Tensor,
    precision: Tensor,
    observation_noise: Tensor,
    erase: Tensor,
    shrink: Tensor,
    write: Tensor,
    *,
    state: Tensor | None = None,
    initial_covariance: Tensor,
    unit_gain: bool,
    in_place: bool = False,
) -> tuple[Tensor, Tensor]:
    """The rule of :func:`surgery.kernels.bayesian.reference.bayesian` on a CUDA device, same arguments and results.

    K is at most 256 and V at most 512. q, k and v may be bf16, fp16 or float32; states and gates are float32. float64
    inputs go to the reference.

    Args:
        unit_gain: promises shrink = precision for every token, and lets the backward pass do with less.
        in_place: one token's step may overwrite the state that it is given.
    """
    gates = (decay, cov_decay_sqrt, process_noise, precision, observation_noise, erase, shrink, write)
    dtype = compute_dtype(q, k, v)
    if dtype == torch.float64:
        return reference.bayesian(
            q, k, v, *gates, state=state, initial_covariance=initial_covariance, unit_gain=unit_gain
        )
    _check(q, k, v, decay)
    gates = tuple(gate.to(dtype) for gate in gates)
    if v.shape[1] == 1 and state is not None and not torch.is_grad_enabled():
        if in_place and not torch.compiler.is_compiling() and state.is_contiguous() and state.dtype == dtype:
            return _step(q, k, v, gates, state, state), state
        after = torch.empty_like(state, dtype=dtype, memory_format=torch.contiguous_format)
        return _step(q, k, v, gates, state.to(dtype), after), after
    start = reference.initial_state(v, k.shape[-1], state, initial_covariance, dtype)
    keep = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v, *gates, *start))
    o, after, *_ = _bayesian(q, k, v, *gates, *start, keep, unit_gain)
    return o, after


def _check(q: Tensor, k: Tensor, v: Tensor, decay: Tensor) -> None:
    check(q, k, v, decay)
    key_dim, value_dim = k.shape[-1], v.shape[-1]
    assert key_dim <= MAX_KEY, f"keys of {key_dim} entries: at most {MAX_KEY} fit these kernels"
    assert value_dim <= MAX_VALUE, f"values of {value_dim} entries: at most {MAX_VALUE} fit these kernels"
    heads = v.shape[0] * v.shape[2]
    assert heads <= MAX_HEADS, f"{heads} heads in a batch: at most {MAX_HEADS} fit one launch"


def _step(q: Tensor, k: Tensor, v: Tensor, gates: tuple[Tensor, ...], before: Tensor, after: Tensor) -> Tensor:
    q, k, v, before = (x.contiguous() for x in (q, k, v, before))
    return step(q, k, v, tuple(gate.contiguous() for gate in gates), before, after)


@torch.no_grad()
def bayesian_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    cov_decay_sqrt: Tensor,
    process_noise: Tensor,
    precision: Tensor,
    observation_noise: Tensor,
    erase: Tensor,
    shrink: Tensor,
    write: Tensor,
    state: Tensor,
) -> Tensor:
    """One token: o [B, 1, H, V], with ``state`` (contiguous float32 [B, H, K, V + K]) updated in place. No gradient."""
    _check(q, k, v, decay)
    assert v.shape[1] == 1, f"{v.shape[1]} tokens: a step takes one"
    assert state.dtype == torch.float32 and state.is_contiguous(), "the state must be contiguous float32"
    gates = (decay, cov_decay_sqrt, process_noise, precision, observation_noise, erase, shrink, write)
    return _step(q, k, v, gates, state, state)
