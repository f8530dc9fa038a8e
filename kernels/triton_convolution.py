"""The causal convolution with SiLU in Triton: a program takes a strip of tokens of a block of channels, token by token.

What W taps need of earlier tokens stays in registers, so that each way is one pass over its tensors. Tuples hold a
value for each distance d in tokens; taps beyond W are zero.

Where the channels are queries, keys and values (HEAD > 0, the width of a key), a block of channels is whole heads of
one of them, and heads of queries and keys are normalised before they are written, each to a tensor of its own.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

TAPS = tl.constexpr(4)
UNROLLED = tl.constexpr(4)  # tokens whose loads are under way together


@triton.jit
def _among(t, low, high, inside):
    """``inside`` [channels], where low <= t < high."""
    at = t + tl.zeros(inside.shape, tl.int64)  # Triton's interpreter spoils a block's mask with a number's
    return inside & (at >= low) & (at < high)


@triton.jit
def _row(x, t, T, stride, channels, inside):
    """Token t's channels, zero outside the text."""
    return tl.load(x + t * stride + channels, mask=_among(t, 0, T, inside), other=0.0)


@triton.jit
def _rows(x, t, T, stride, channels, inside):
    return (
        _row(x, t, T, stride, channels, inside), _row(x, t + 1, T, stride, channels, inside),
        _row(x, t + 2, T, stride, channels, inside), _row(x, t + 3, T, stride, channels, inside),
    )


@triton.jit
def _tap(weight, channels, inside, W: tl.constexpr, D: tl.constexpr):
    if D < W:
        tap = tl.load(weight + channels * W + (W - 1 - D), mask=inside, other=0.0)
    else:
        tap = tl.zeros(channels.shape, tl.float32)
    return tap


@triton.jit
def _age(age, reset, t, T, RESET: tl.constexpr):
    """How many tokens t's document has before it, given the same of the token before."""
    if RESET:
        return tl.where(tl.load(reset + t, mask=(t >= 0) & (t < T), other=0) != 0, 0, age + 1)
    return age + 1


@triton.jit
def _start(x, weight, bias, reset, first, T, stride, channels, inside, W: tl.constexpr, BIAS: tl.constexpr,
           RESET: tl.constexpr):
    """The bias, the taps, the tokens before ``first`` and the age of the last of them, as far as taps reach."""
    taps = (
        _tap(weight, channels, inside, W, 0), _tap(weight, channels, inside, W, 1),
        _tap(weight, channels, inside, W, 2), _tap(weight, channels, inside, W, 3),
    )
    offset = tl.load(bias + channels, mask=inside, other=0.0) if BIAS else tl.zeros(channels.shape, tl.float32)
    before = (
        _row(x, first - 1, T, stride, channels, inside).to(tl.float32),
        _row(x, first - 2, T, stride, channels, inside).to(tl.float32),
        _row(x, first - 3, T, stride, channels, inside).to(tl.float32),
    )
    age = _age(_age(0, reset, first - 2, T, RESET), reset, first - 1, T, RESET)
    return offset, taps, before, age


@triton.jit
def _reached(before, age):
    """The tokens before, zero where they belong to another document."""
    return (tl.where(age >= 1, before[0], 0.0), tl.where(age >= 2, before[1], 0.0), tl.where(age >= 3, before[2], 0.0))


@triton.jit
def _over_heads(x, HEAD: tl.constexpr, BC: tl.constexpr):
    """Each head's sum, at all of its channels."""
    if HEAD == BC:
        total = tl.sum(x, 0) + tl.zeros((BC,), tl.float32)
    else:
        total = tl.sum(tl.reshape(x, (BC // HEAD, HEAD)), 1)
        total = tl.reshape(tl.broadcast_to(total[:, None], (BC // HEAD, HEAD)), (BC,))
    return total


@triton.jit
def _forward_strip(
    x, weight, bias, reset, y, T, across, stride, factor, eps, begin, width, C: tl.constexpr, W: tl.constexpr,
    BT: tl.constexpr, BC: tl.constexpr, BIAS: tl.constexpr, RESET: tl.constexpr, HEAD: tl.constexpr,
):
    """Into y, whose ``width`` channels are those of x from ``begin`` on; heads of HEAD channels are normalised and
    multiplied by ``factor`` unless HEAD is 0."""
    channels = tl.program_id(0) * BC + tl.arange(0, BC)
    first = tl.program_id(1).to(tl.int64) * BT
    b = tl.program_id(2).to(tl.int64)
    inside = channels < C
    x += b * across
    y += b * T * width - begin
    reset += b * T
    offset, taps, before, age = _start(
        x, weight, bias, reset, first, T, stride, channels, inside, W, BIAS, RESET
    )
    for i in range(0, BT, UNROLLED):
        rows = _rows(x, first + i, T, stride, channels, inside)
        for j in tl.static_range(UNROLLED):
            t = first + i + j
            now = rows[j].to(tl.float32)
            age = _age(age, reset, t, T, RESET)
            past = _reached(before, age)
            out = offset + taps[0] * now + taps[1] * past[0] + taps[2] * past[1] + taps[3] * past[2]
            out *= tl.sigmoid(out)
            if HEAD > 0:
                out *= factor * tl.rsqrt(_over_heads(out * out, HEAD, BC) + eps)
            tl.store(y + t * width + channels, out.to(y.dtype.element_ty), mask=_among(t, 0, T, inside))
            before = (now, before[0], before[1])


@triton.jit(do_not_specialize=["T"])
def _forward_kernel(
    x, weight, bias, reset, q, k, v, T, across, stride, scale, eps, C: tl.constexpr, W: tl.constexpr, BT: tl.constexpr,
    BC: tl.constexpr, BIAS: tl.constexpr, RESET: tl.constexpr, KEYS: tl.constexpr, HEAD: tl.constexpr,
):
    channel = tl.program_id(0) * BC
    if HEAD == 0:
        _forward_strip(x, weight, bias, reset, v, T, across, stride, 1.0, eps, 0, C, C, W, BT, BC, BIAS, RESET, 0)
    elif channel < 2 * KEYS:
        queries = channel < KEYS
        y = k
        if queries:
            y = q
        _forward_strip(
            x, weight, bias, reset, y, T, across, stride, tl.where(queries, scale, 1.0), eps,
            tl.where(queries, 0, KEYS), KEYS, C, W, BT, BC, BIAS, RESET, HEAD,
        )
    else:
        _forward_strip(
            x, weight, bias, reset, v, T, across, stride, 1.0, eps, 2 * KEYS, C - 2 * KEYS, C, W, BT, BC, BIAS, RESET,
            0,
        )


@triton.jit
def _gradient(dy, now, past, offset, taps, factor, eps, HEAD: tl.constexpr, BC: tl.constexpr):
    """The gradient of what the activation takes."""
    u = offset + taps[0] * now + taps[1] * past[0] + taps[2] * past[1] + taps[3] * past[2]
    s = tl.sigmoid(u)
    g = dy.to(tl.float32)
    if HEAD > 0:
        y = u * s
        scale = tl.rsqrt(_over_heads(y * y, HEAD, BC) + eps)
        along = scale * scale * _over_heads(g * y, HEAD, BC)
        g = factor * scale * (g - y * along)
    return g * s * (1.0 + u * (1.0 - s))


@triton.jit
def _spread(g, age, taps, pending):
    """Token t's gradient to the tokens that it read: the one three before it is then complete."""
    done = pending[2] + tl.where(age >= 3, taps[3] * g, 0.0)
    last = pending[1] + tl.where(age >= 2, taps[2] * g, 0.0)
    return done, (taps[0] * g, pending[0] + tl.where(age >= 1, taps[1] * g, 0.0), last)


@triton.jit
def _backward_strip(
    dy, x, weight, bias, reset, dx, partial, T, across, stride, factor, eps, begin, width, C: tl.constexpr,
    W: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr, BIAS: tl.constexpr, RESET: tl.constexpr, HEAD: tl.constexpr,
):
    channels = tl.program_id(0) * BC + tl.arange(0, BC)
    first = tl.program_id(1).to(tl.int64) * BT
    b = tl.program_id(2).to(tl.int64)
    inside = channels < C
    x += b * across
    dy += b * T * width - begin
    dx += b * T * C
    reset += b * T
    partial += (b * tl.num_programs(1) + tl.program_id(1)) * ((W + 1) * C)
    offset, taps, before, age = _start(
        x, weight, bias, reset, first, T, stride, channels, inside, W, BIAS, RESET
    )
    zero = tl.zeros((BC,), tl.float32)
    pending = (zero, zero, zero)  # gradients of the three tokens before, so far
    dtaps = (zero, zero, zero, zero)
    doffset = zero
    for i in range(0, BT, UNROLLED):
        rows = _rows(x, first + i, T, stride, channels, inside)
        gradients = _rows(dy, first + i, T, width, channels, inside)
        for j in tl.static_range(UNROLLED):
            t = first + i + j
            now = rows[j].to(tl.float32)
            age = _age(age, reset, t, T, RESET)
            past = _reached(before, age)
            g = _gradient(gradients[j], now, past, offset, taps, factor, eps, HEAD, BC)
            doffset += g
            dtaps = (dtaps[0] + g * now, dtaps[1] + g * past[0], dtaps[2] + g * past[1], dtaps[3] + g * past[2])
            done, pending = _spread(g, age, taps, pending)
            place = dx + (t - 3) * C + channels
            tl.store(place, done.to(dx.dtype.element_ty), mask=_among(t - 3, first, T, inside))
            before = (now, before[0], before[1])
    # the next strip's tokens, for what they read of this one
    rows = _rows(x, first + BT, T, stride, channels, inside)
    gradients = _rows(dy, first + BT, T, width, channels, inside)
    for j in tl.static_range(TAPS - 1):
        t = first + BT + j
        now = rows[j].to(tl.float32)
        age = _age(age, reset, t, T, RESET)
        past = _reached(before, age)
        g = _gradient(gradients[j], now, past, offset, taps, factor, eps, HEAD, BC)
        done, pending = _spread(g, age, taps, pending)
        tl.store(dx + (t - 3) * C + channels, done.to(dx.dtype.element_ty), mask=_among(t - 3, 0, T, inside))
        before = (now, before[0], before[1])
    for d in tl.static_range(W):
        tl.store(partial + (W - 1 - d) * C + channels, dtaps[d], mask=inside)
    tl.store(partial + W * C + channels, doffset, mask=inside)


@triton.jit(do_not_specialize=["T"])
def _backward_kernel(
    dq, dk, dv, x, weight, bias, reset, dx, partial, T, across, stride, scale, eps, C: tl.constexpr, W: tl.constexpr,
    BT: tl.constexpr, BC: tl.constexpr, BIAS: tl.constexpr, RESET: tl.constexpr, KEYS: tl.constexpr,
    HEAD: tl.constexpr,
):
    channel = tl.program_id(0) * BC
    if HEAD == 0:
        _backward_strip(
            dv, x, weight, bias, reset, dx, partial, T, across, stride, 1.0, eps, 0, C, C, W, BT, BC, BIAS, RESET, 0
        )
    elif channel < 2 * KEYS:
        queries = channel < KEYS
        dy = dk
        if queries:
            dy = dq
        _backward_strip(
            dy, x, weight, bias, reset, dx, partial, T, across, stride, tl.where(queries, scale, 1.0), eps,
            tl.where(queries, 0, KEYS), KEYS, C, W, BT, BC, BIAS, RESET, HEAD,
        )
    else:
        _backward_strip(
            dv, x, weight, bias, reset, dx, partial, T, across, stride, 1.0, eps, 2 * KEYS, C - 2 * KEYS, C, W, BT, BC,
            BIAS, RESET, 0,
        )


class Heads(NamedTuple):
    """Of queries, keys and values side by side: how many heads of keys, their width, what queries are multiplied by,
    and what is added to a head's squares."""

    groups: int
    key_dim: int
    scale: float
    eps: float


def _call(
    x: Tensor, weight: Tensor, bias: Tensor | None, reset: Tensor | None, heads: Heads | None, strip: int
) -> tuple[Tensor, tuple, tuple, tuple, dict]:
    """x with neighbouring channels, the tensors as the kernels take them, the grid of strips of so many tokens, and the
    kernels' numbers and constants."""
    if x.stride(2) != 1:
        x = x.contiguous()
    batch, tokens, channels = x.shape
    weight = weight.contiguous()
    mask = weight if reset is None else reset.contiguous().view(torch.uint8)
    block = 256  # channels; heads are best summed in one warp, whose lanes then have eight each
    keys, width, scale, eps = 0, 0, 1.0, 0.0
    if heads is not None:
        keys, width, scale, eps = heads.groups * heads.key_dim, heads.key_dim, heads.scale, heads.eps
        while block > width and keys % block:
            block //= 2
    options = {
        "C": channels, "W": weight.shape[1], "BT": strip, "BC": block, "BIAS": bias is not None,
        "RESET": reset is not None, "KEYS": keys, "HEAD": width, "num_warps": 2 if heads is None else 1,
        "enable_fp_fusion": True,
    }
    grid = (triton.cdiv(channels, block), triton.cdiv(tokens, strip), batch)
    numbers = (tokens, x.stride(0), x.stride(1), scale, eps)
    return x, (weight, weight if bias is None else bias.contiguous(), mask), grid, numbers, options


def forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, reset: Tensor | None, heads: Heads | None = None
) -> tuple[Tensor, ...]:
    """See :func:`surgery.kernels.convolution.causal_conv`, or ``normalised_conv``."""
    x, tensors, grid, numbers, options = _call(x, weight, bias, reset, heads, 64)
    channels, keys = x.shape[2], options["KEYS"]
    widths = (channels,) if heads is None else (keys, keys, channels - 2 * keys)
    outs = tuple(torch.empty(*x.shape[:2], width, dtype=x.dtype, device=x.device) for width in widths)
    _forward_kernel[grid](x, *tensors, outs[0], outs[len(outs) // 2], outs[-1], *numbers, **options)
    return outs


def backward(
    gradients: tuple[Tensor, ...], x: Tensor, weight: Tensor, bias: Tensor | None, reset: Tensor | None,
    heads: Heads | None = None,
) -> tuple[Tensor, Tensor]:
    """The gradient of x, and those of weight and bias [W + 1, C]; each strip's part of these is written out and summed
    afterwards."""
    x, tensors, grid, numbers, options = _call(x, weight, bias, reset, heads, 64 if heads is None else 128)
    gradients = [gradient.contiguous() for gradient in gradients]
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    width = weight.shape[1]
    partial = torch.empty(grid[1] * grid[2], width + 1, x.shape[2], dtype=torch.float32, device=x.device)
    _backward_kernel[grid](
        gradients[0], gradients[len(gradients) // 2], gradients[-1], x, *tensors, dx, partial, *numbers, **options
    )
    return dx, partial.sum(0)
