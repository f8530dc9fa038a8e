"""The gated norm in Triton: a program takes one group of channels of some tokens after others, each way."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _read(pointer, rows, stride, columns, inside):
    return tl.load(pointer + rows[:, None] * stride + columns[None, :], mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _forward_kernel(
    x, gate, weight, values, skip, out, eps, stride_x, stride_gate, stride_values, rows, steps, S: tl.constexpr,
    BR: tl.constexpr, BS: tl.constexpr, SIGMOID: tl.constexpr, GATE_FIRST: tl.constexpr, SKIP: tl.constexpr,
):
    within = tl.arange(0, BS)
    columns = tl.program_id(1) * S + within
    w = tl.load(weight + columns, mask=within < S, other=0.0)[None, :]
    if SKIP:
        d = tl.load(skip + columns, mask=within < S, other=0.0)[None, :]
    for step in range(steps):
        at = (tl.program_id(0).to(tl.int64) * steps + step) * BR + tl.arange(0, BR)
        inside = (at < rows)[:, None] & (within < S)[None, :]
        y = _read(x, at, stride_x, columns, inside)
        if SKIP:
            y += d * _read(values, at, stride_values, columns, inside)
        z = _read(gate, at, stride_gate, columns, inside)
        a = tl.sigmoid(z)
        if not SIGMOID:
            a *= z
        if GATE_FIRST:
            y *= a
        y *= tl.rsqrt(tl.sum(y * y, 1) / S + eps)[:, None] * w
        if not GATE_FIRST:
            y *= a
        place = out + at[:, None] * (tl.num_programs(1) * S) + columns[None, :]
        tl.store(place, y.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _backward_kernel(
    dout, x, gate, weight, values, skip, dx, dgate, partial, eps, stride_x, stride_gate, stride_values, rows, steps,
    S: tl.constexpr, BR: tl.constexpr, BS: tl.constexpr, SIGMOID: tl.constexpr, GATE_FIRST: tl.constexpr,
    SKIP: tl.constexpr,
):
    within = tl.arange(0, BS)
    columns = tl.program_id(1) * S + within
    size = tl.num_programs(1) * S
    dw = tl.zeros((BR, BS), tl.float32)
    if SKIP:
        dd = tl.zeros((BR, BS), tl.float32)
    for step in range(steps):
        at = (tl.program_id(0).to(tl.int64) * steps + step) * BR + tl.arange(0, BR)
        inside = (at < rows)[:, None] & (within < S)[None, :]
        y = _read(x, at, stride_x, columns, inside)
        if SKIP:
            v = _read(values, at, stride_values, columns, inside)
            y += tl.load(skip + columns, mask=within < S, other=0.0)[None, :] * v
        z = _read(gate, at, stride_gate, columns, inside)
        g = _read(dout, at, size, columns, inside)
        w = tl.load(weight + columns, mask=within < S, other=0.0)[None, :]
        s = tl.sigmoid(z)
        if SIGMOID:
            a = s
            da = s * (1.0 - s)
        else:
            a = z * s
            da = s * (1.0 + z * (1.0 - s))
        # u is what is divided by its rms, dn the gradient of the quotient
        if GATE_FIRST:
            u = y * a
            dn = g * w
        else:
            u = y
            dn = g * a * w
        scale = tl.rsqrt(tl.sum(u * u, 1) / S + eps)
        along = tl.sum(dn * u, 1) / S * scale * scale
        du = scale[:, None] * (dn - u * along[:, None])
        n = u * scale[:, None]
        if GATE_FIRST:
            dw += g * n
            dz = du * y * da
            dy = du * a
        else:
            dw += g * a * n
            dz = g * n * w * da
            dy = du
        if SKIP:
            dd += dy * v
        place = at[:, None] * size + columns[None, :]
        tl.store(dx + place, dy.to(dx.dtype.element_ty), mask=inside)
        tl.store(dgate + place, dz.to(dgate.dtype.element_ty), mask=inside)
    place = partial + tl.program_id(0).to(tl.int64) * (2 * size) + columns
    tl.store(place, tl.sum(dw, 0), mask=within < S)
    if SKIP:
        tl.store(place + size, tl.sum(dd, 0), mask=within < S)
    else:
        tl.store(place + size, tl.zeros((BS,), tl.float32), mask=within < S)


def _rows(x: Tensor) -> tuple[Tensor, int]:
    """[B, T, C] with neighbouring channels and one stride from token to token, as it is where it can be."""
    tokens = x.shape[1]
    if x.stride() != (tokens * x.stride(1), x.stride(1), 1):
        x = x.contiguous()
    return x, x.stride(1)


def _call(
    x: Tensor, gate: Tensor, values: Tensor | None, groups: int, sigmoid: bool, gate_first: bool, programs: int
) -> tuple[tuple, tuple, tuple[int, int], dict]:
    """x, gate and values as the kernels take them, the numbers that follow the tensors, the grid, of at most so many
    ``programs`` a group, and the constants."""
    (x, *strides), (gate, stride_gate) = _rows(x), _rows(gate)
    skipped = values is not None
    values, stride_values = _rows(values) if skipped else (x, 0)
    batch, tokens, channels = x.shape
    width = channels // groups
    block = triton.next_power_of_2(width)
    tile = max(1, 1024 // block)  # tokens
    tiles = triton.cdiv(batch * tokens, tile)
    steps = triton.cdiv(tiles, programs)
    constants = {
        "S": width, "BR": tile, "BS": block, "SIGMOID": sigmoid, "GATE_FIRST": gate_first, "SKIP": skipped,
        "num_warps": min(16, max(4, tile * block // 1024)), "enable_fp_fusion": True,
    }
    numbers = (*strides, stride_gate, stride_values, batch * tokens, steps)
    return (x, gate, values), numbers, (triton.cdiv(tiles, steps), groups), constants


def forward(
    x: Tensor, gate: Tensor, weight: Tensor, values: Tensor | None, skip: Tensor | None, groups: int, eps: float,
    sigmoid: bool, gate_first: bool,
) -> Tensor:
    """See :func:`surgery.kernels.gated_norm.gated_norm`."""
    (x, gate, values), numbers, grid, constants = _call(x, gate, values, groups, sigmoid, gate_first, 2048)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    weight = weight.contiguous()
    skip = weight if skip is None else skip.contiguous()
    _forward_kernel[grid](x, gate, weight, values, skip, out, eps, *numbers, **constants)
    return out


def backward(
    dout: Tensor, x: Tensor, gate: Tensor, weight: Tensor, values: Tensor | None, skip: Tensor | None, groups: int,
    eps: float, sigmoid: bool, gate_first: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of x, gate, and of weight and skip [2, C]; each program's part of these is summed afterwards."""
    (x, gate, values), numbers, grid, constants = _call(x, gate, values, groups, sigmoid, gate_first, 512)
    dx, dgate = (torch.empty(x.shape, dtype=y.dtype, device=x.device) for y in (x, gate))
    weight = weight.contiguous()
    skip = weight if skip is None else skip.contiguous()
    partial = torch.empty(grid[0], 2, x.shape[2], dtype=torch.float32, device=x.device)
    _backward_kernel[grid](
        dout.contiguous(), x, gate, weight, values, skip, dx, dgate, partial, eps, *numbers, **constants
    )
    return dx, dgate, partial.sum(0)
