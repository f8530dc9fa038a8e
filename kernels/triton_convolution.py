"""The causal convolution with SiLU in Triton: a program takes a strip of tokens of a block of channels, token by token.

What W taps need of earlier tokens stays in registers, so that each way is one pass over its tensors. Tuples hold a
value for each distance d in tokens; taps beyond W are zero.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

TAPS = tl.constexpr(4)
TOKENS = 64  # a strip
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


@triton.jit(do_not_specialize=["T"])
def _forward_kernel(
    x, weight, bias, reset, y, T, across, stride, C: tl.constexpr, W: tl.constexpr, BT: tl.constexpr,
    BC: tl.constexpr, BIAS: tl.constexpr, RESET: tl.constexpr,
):
    channels = tl.program_id(0) * BC + tl.arange(0, BC)
    first = tl.program_id(1).to(tl.int64) * BT
    b = tl.program_id(2).to(tl.int64)
    inside = channels < C
    x += b * across
    y += b * T * C
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
            tl.store(y + t * C + channels, out.to(y.dtype.element_ty), mask=_among(t, 0, T, inside))
            before = (now, before[0], before[1])


@triton.jit
def _gradient(dy, now, past, offset, taps):
    """The gradient of what the activation takes."""
    u = offset + taps[0] * now + taps[1] * past[0] + taps[2] * past[1] + taps[3] * past[2]
    s = tl.sigmoid(u)
    return dy.to(tl.float32) * s * (1.0 + u * (1.0 - s))


@triton.jit
def _spread(g, age, taps, pending):
    """Token t's gradient to the tokens that it read: the one three before it is then complete."""
    done = pending[2] + tl.where(age >= 3, taps[3] * g, 0.0)
    last = pending[1] + tl.where(age >= 2, taps[2] * g, 0.0)
    return done, (taps[0] * g, pending[0] + tl.where(age >= 1, taps[1] * g, 0.0), last)


@triton.jit(do_not_specialize=["T"])
def _backward_kernel(
    dy, x, weight, bias, reset, dx, partial, T, across, stride, C: tl.constexpr, W: tl.constexpr, BT: tl.constexpr,
    BC: tl.constexpr, BIAS: tl.constexpr, RESET: tl.constexpr,
):
    channels = tl.program_id(0) * BC + tl.arange(0, BC)
    first = tl.program_id(1).to(tl.int64) * BT
    b = tl.program_id(2).to(tl.int64)
    inside = channels < C
    x += b * across
    dy += b * T * C
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
        gradients = _rows(dy, first + i, T, C, channels, inside)
        for j in tl.static_range(UNROLLED):
            t = first + i + j
            now = rows[j].to(tl.float32)
            age = _age(age, reset, t, T, RESET)
            past = _reached(before, age)
            g = _gradient(gradients[j], now, past, offset, taps)
            doffset += g
            dtaps = (dtaps[0] + g * now, dtaps[1] + g * past[0], dtaps[2] + g * past[1], dtaps[3] + g * past[2])
            done, pending = _spread(g, age, taps, pending)
            place = dx + (t - 3) * C + channels
            tl.store(place, done.to(dx.dtype.element_ty), mask=_among(t - 3, first, T, inside))
            before = (now, before[0], before[1])
    # the next strip's tokens, for what they read of this one
    rows = _rows(x, first + BT, T, stride, channels, inside)
    gradients = _rows(dy, first + BT, T, C, channels, inside)
    for j in tl.static_range(TAPS - 1):
        t = first + BT + j
        now = rows[j].to(tl.float32)
        age = _age(age, reset, t, T, RESET)
        g = _gradient(gradients[j], now, _reached(before, age), offset, taps)
        done, pending = _spread(g, age, taps, pending)
        tl.store(dx + (t - 3) * C + channels, done.to(dx.dtype.element_ty), mask=_among(t - 3, 0, T, inside))
        before = (now, before[0], before[1])
    for d in tl.static_range(W):
        tl.store(partial + (W - 1 - d) * C + channels, dtaps[d], mask=inside)
    tl.store(partial + W * C + channels, doffset, mask=inside)


def _call(x: Tensor, weight: Tensor, bias: Tensor | None, reset: Tensor | None) -> tuple[Tensor, tuple, tuple, dict]:
    """x with neighbouring channels, the tensors as the kernels take them, the grid, and the kernels' constants."""
    if x.stride(2) != 1:
        x = x.contiguous()
    batch, tokens, channels = x.shape
    weight = weight.contiguous()
    mask = weight if reset is None else reset.contiguous().view(torch.uint8)
    block = 256  # channels, eight for each lane of a warp
    options = {
        "C": channels, "W": weight.shape[1], "BT": TOKENS, "BC": block, "BIAS": bias is not None,
        "RESET": reset is not None, "num_warps": 1, "enable_fp_fusion": True,
    }
    grid = (triton.cdiv(channels, block), triton.cdiv(tokens, TOKENS), batch)
    return x, (weight, weight if bias is None else bias.contiguous(), mask), grid, options


def forward(x: Tensor, weight: Tensor, bias: Tensor | None, reset: Tensor | None) -> Tensor:
    """See :func:`surgery.kernels.convolution.causal_conv`."""
    x, tensors, grid, options = _call(x, weight, bias, reset)
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _forward_kernel[grid](x, *tensors, y, x.shape[1], x.stride(0), x.stride(1), **options)
    return y


def backward(
    dy: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, reset: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of x, weight and bias; each strip's part of the last two is written out and summed afterwards."""
    x, tensors, grid, options = _call(x, weight, bias, reset)
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    width = weight.shape[1]
    partial = torch.empty(grid[1] * grid[2], width + 1, x.shape[2], dtype=torch.float32, device=x.device)
    _backward_kernel[grid](
        dy.contiguous(), x, *tensors, dx, partial, x.shape[1], x.stride(0), x.stride(1), **options
    )
    sums = partial.sum(0)
    return dx, sums[:width].T.contiguous(), sums[width].clone()
