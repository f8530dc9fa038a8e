"""The causal convolution with SiLU in Triton: a program takes a tile of tokens and channels, each way."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

TOKENS, CHANNELS = 32, 64


@triton.jit
def _before(x, reset, t, channels, inside, T, stride, RESET: tl.constexpr, D: tl.constexpr):
    """x[t - D] where that lies in the document of t, else zero; t [tokens]."""
    live = (t >= D) & (t < T)
    if RESET:
        for d in tl.static_range(D):
            live &= tl.load(reset + t - d, mask=live, other=0) == 0
    at = (t - D).to(tl.int64)
    return tl.load(x + at[:, None] * stride + channels[None, :], mask=live[:, None] & inside[None, :], other=0.0).to(
        tl.float32
    )


@triton.jit
def _sums(
    x, weight, bias, reset, t, channels, inside, T, stride, W: tl.constexpr, BIAS: tl.constexpr, RESET: tl.constexpr
):
    """What the activation takes, at tokens t [tokens]."""
    out = tl.zeros((t.shape[0], channels.shape[0]), tl.float32)
    if BIAS:
        out += tl.load(bias + channels, mask=inside, other=0.0)[None, :]
    for d in tl.static_range(W):
        w = tl.load(weight + channels * W + (W - 1 - d), mask=inside, other=0.0)
        out += w[None, :] * _before(x, reset, t, channels, inside, T, stride, RESET, d)
    return out


@triton.jit(do_not_specialize=["T"])
def _forward_kernel(
    x, weight, bias, reset, y, T, across, stride, C: tl.constexpr, W: tl.constexpr, BT: tl.constexpr,
    BC: tl.constexpr, BIAS: tl.constexpr, RESET: tl.constexpr,
):
    channels = tl.program_id(0) * BC + tl.arange(0, BC)
    t = tl.program_id(1) * BT + tl.arange(0, BT)
    b = tl.program_id(2).to(tl.int64)
    inside = channels < C
    out = _sums(x + b * across, weight, bias, reset + b * T, t, channels, inside, T, stride, W, BIAS, RESET)
    out = out * tl.sigmoid(out)
    at = (b * T + t)[:, None] * C + channels[None, :]
    tl.store(y + at, out.to(y.dtype.element_ty), mask=(t < T)[:, None] & inside[None, :])


@triton.jit(do_not_specialize=["T"])
def _backward_kernel(
    dy, x, weight, bias, reset, dx, partial, T, across, stride, C: tl.constexpr, W: tl.constexpr, BT: tl.constexpr,
    BC: tl.constexpr, BIAS: tl.constexpr, RESET: tl.constexpr,
):
    channels = tl.program_id(0) * BC + tl.arange(0, BC)
    t = tl.program_id(1) * BT + tl.arange(0, BT)
    b = tl.program_id(2).to(tl.int64)
    inside = channels < C
    x += b * across
    reset += b * T
    dy += b * T * C
    out = tl.zeros((BT, BC), tl.float32)
    partial += (b * tl.num_programs(1) + tl.program_id(1)) * ((W + 1) * C)
    # token t stands in the sums of the W tokens from t on
    for e in tl.static_range(W):
        later = t + e
        reached = later < T
        if RESET:
            for d in tl.static_range(e):
                reached &= tl.load(reset + later - d, mask=reached, other=0) == 0
        u = _sums(x, weight, bias, reset, later, channels, inside, T, stride, W, BIAS, RESET)
        s = tl.sigmoid(u)
        at = later.to(tl.int64)[:, None] * C + channels[None, :]
        g = tl.load(dy + at, mask=(later < T)[:, None] & inside[None, :], other=0.0).to(tl.float32)
        g *= s * (1.0 + u * (1.0 - s))
        if e == 0:
            tl.store(partial + W * C + channels, tl.sum(g, 0), mask=inside)
            for d in tl.static_range(W):
                shifted = _before(x, reset, t, channels, inside, T, stride, RESET, d)
                tl.store(partial + (W - 1 - d) * C + channels, tl.sum(g * shifted, 0), mask=inside)
        w = tl.load(weight + channels * W + (W - 1 - e), mask=inside, other=0.0)
        out += tl.where(reached[:, None], w[None, :] * g, 0.0)
    at = (b * T + t)[:, None] * C + channels[None, :]
    tl.store(dx + at, out.to(dx.dtype.element_ty), mask=(t < T)[:, None] & inside[None, :])


def _call(x: Tensor, weight: Tensor, bias: Tensor | None, reset: Tensor | None) -> tuple[Tensor, tuple, tuple, dict]:
    """x with neighbouring channels, the tensors as the kernels take them, the grid, and the kernels' constants."""
    if x.stride(2) != 1:
        x = x.contiguous()
    batch, tokens, channels = x.shape
    weight = weight.contiguous()
    mask = weight if reset is None else reset.contiguous().view(torch.uint8)
    options = {
        "C": channels, "W": weight.shape[1], "BT": TOKENS, "BC": CHANNELS, "BIAS": bias is not None,
        "RESET": reset is not None, "num_warps": 4, "enable_fp_fusion": True,
    }
    grid = (triton.cdiv(channels, CHANNELS), triton.cdiv(tokens, TOKENS), batch)
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
    """The gradients of x, weight and bias; each tile's part of the last two is written out and summed afterwards."""
    x, tensors, grid, options = _call(x, weight, bias, reset)
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    width = weight.shape[1]
    partial = torch.empty(grid[1] * grid[2], width + 1, x.shape[2], dtype=torch.float32, device=x.device)
    _backward_kernel[grid](
        dy.contiguous(), x, *tensors, dx, partial, x.shape[1], x.stride(0), x.stride(1), **options
    )
    sums = partial.sum(0)
    return dx, sums[:width].T.contiguous(), sums[width].clone()
