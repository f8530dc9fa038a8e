"""What the backward kernels of the Bayesian rule share: ratios without float64 matrices, an inverse that stays in
registers, gradients of the steps, and blocks of buffers without masks where the blocks fit.

Positions are compared as float32 throughout: from integers, LLVM in Triton 3.6 made wrong addresses (see NOTES.md).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .triton_common import dot


@triton.jit
def positions(C: tl.constexpr):
    """The positions in a chunk as a column and as a row, in float32."""
    at = tl.arange(0, C).to(tl.float32)
    return at[:, None], at[None, :]


def in_float32(logs: Tensor) -> Tensor:
    """float64 logarithms [...] as sums of two float32 [2, ...]: differences between them keep float32's digits, and
    take half the registers that float64 would."""
    high = logs.float()
    return torch.stack((high, (logs - high).float()))


@triton.jit
def load_logs(logs, size, C: tl.constexpr):
    """Both parts of C logarithms, their second parts ``size`` after the first."""
    logs += tl.arange(0, C)
    return tl.load(logs), tl.load(logs + size)


@triton.jit
def ratios_to_end(logs, size, high, low, C: tl.constexpr):
    """[C] products of the steps after each of C tokens, whose logarithms stand at ``logs`` and are ``high`` and
    ``low``."""
    end_high, end_low = load_logs(logs + C - 1, size, 1)
    return tl.exp((end_high - high) + (end_low - low))


@triton.jit
def lower_ratios(high, low, C: tl.constexpr):
    """[C, C] products of a step over s < j <= t at [t, s]; zeros above the diagonal."""
    i, j = positions(C)
    difference = (high[:, None] - high[None, :]) + (low[:, None] - low[None, :])
    return tl.where(i >= j, tl.exp(tl.minimum(difference, 0.0)), 0.0)


@triton.jit
def load_rows(pointer, left, stride, start, width, C: tl.constexpr, BLOCK: tl.constexpr, EVEN: tl.constexpr):
    """[C, BLOCK] from the row at ``pointer`` and column ``start`` on, in float32; zeros from row ``left`` on (None:
    there are C), and, unless EVEN promises that blocks cover the columns exactly, from column ``width`` on."""
    t = tl.arange(0, C)
    d = start + tl.arange(0, BLOCK)
    inside = None
    if left is not None:
        inside = (t < left)[:, None]
        if not EVEN:
            inside = inside & (d < width)[None, :]
    elif not EVEN:
        inside = (d < width)[None, :]
    other = None if inside is None else 0.0
    return tl.load(pointer + t[:, None] * stride + d[None, :], mask=inside, other=other).to(tl.float32)


@triton.jit
def store_rows(pointer, x, left, stride, start, width, C: tl.constexpr, BLOCK: tl.constexpr, EVEN: tl.constexpr):
    t = tl.arange(0, C)
    d = start + tl.arange(0, BLOCK)
    inside = None
    if left is not None:
        inside = (t < left)[:, None]
        if not EVEN:
            inside = inside & (d < width)[None, :]
    elif not EVEN:
        inside = (d < width)[None, :]
    tl.store(pointer + t[:, None] * stride + d[None, :], x.to(pointer.dtype.element_ty), mask=inside)


@triton.jit
def load_block(
    pointer, row, column, rows: tl.constexpr, columns: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr,
    EVEN: tl.constexpr,
):
    """The block [BR, BC] at (row, column) of a contiguous float32 [rows, columns]; zeros outside, where there is an
    outside (unless EVEN)."""
    i = row + tl.arange(0, BR)
    j = column + tl.arange(0, BC)
    place = pointer + i[:, None] * columns + j[None, :]
    if EVEN:
        return tl.load(place)
    return tl.load(place, mask=(i < rows)[:, None] & (j < columns)[None, :], other=0.0)


@triton.jit
def store_block(
    pointer, x, row, column, rows: tl.constexpr, columns: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr,
    EVEN: tl.constexpr,
):
    i = row + tl.arange(0, BR)
    j = column + tl.arange(0, BC)
    place = pointer + i[:, None] * columns + j[None, :]
    if EVEN:
        tl.store(place, x)
    else:
        tl.store(place, x, mask=(i < rows)[:, None] & (j < columns)[None, :])


@triton.jit
def inverse_unit_lower(x, C: tl.constexpr):
    """(I + L)^-1 for the strictly lower triangular L = x [C, C], C a power of two.

    The inverses of the diagonal blocks of twice the size: with J those of the blocks and M what joins each two of them,
    J - J M J exactly. Every level is two products of whole matrices.
    """
    i, j = positions(C)
    inverse = tl.where(i == j, 1.0, 0.0) - tl.where((j == i - 1.0) & (j == 2 * tl.floor(0.5 * j)), x, 0.0)
    scale = 0.5
    while scale * C > 1:
        block_i = tl.floor(i * scale)
        block_j = tl.floor(j * scale)
        joins = (block_j == block_i - 1.0) & (block_j == 2 * tl.floor(0.5 * block_j))
        none = tl.zeros((C, C), tl.float32)
        corner = dot(inverse, tl.where(joins, x, 0.0), none, False, False, "tf32x3")
        inverse = dot(-corner, inverse, inverse, False, False, "tf32x3")
        scale = 0.5 * scale
    return inverse


@triton.jit
def steps_gradient(dratio, dsince, logs, size, C: tl.constexpr, PRECISION: tl.constexpr):
    """The gradients [C] of the steps with the C logarithms at ``logs``, from those of their products [C, C] (below the
    diagonal; what stands on and above it is not read) and of their products since the chunk's start [C].

    Step j stands in ratio[t, s] for s < j <= t, where ratio[t, j] ratio[j - 1, s] is the product without it: no
    division, so a step of zero has its gradient too.
    """
    i, j = positions(C)
    high, low = load_logs(logs, size, C)
    t = tl.arange(0, C)
    before_high = tl.load(logs + t - 1, mask=t > 0, other=0.0)
    before_low = tl.load(logs + size + t - 1, mask=t > 0, other=0.0)
    # the ratios transposed, made rather than turned around
    upper = (high[None, :] - high[:, None]) + (low[None, :] - low[:, None])
    upper = tl.where(j >= i, tl.exp(tl.minimum(upper, 0.0)), 0.0)
    none = tl.zeros((C, C), tl.float32)
    later = dot(upper, tl.where(i > j, dratio, 0.0), none, False, False, PRECISION)
    shifted = (before_high[:, None] - high[None, :]) + (before_low[:, None] - low[None, :])
    shifted = tl.exp(tl.minimum(shifted, 0.0))
    through = tl.sum(tl.where(i > j, later * shifted, 0.0), 1)
    return through + tl.sum(upper * dsince[None, :], 1) * tl.exp(before_high)


@triton.jit(do_not_specialize=["padded"])
def steps_gradient_kernel(dratios, dsince, logs, out, padded, C: tl.constexpr, PRECISION: tl.constexpr):
    """:func:`steps_gradient` of every chunk, dratios [B, H, N, C, C], logs [2, B, H, N C], all else [B, H, N C]; a
    kernel by itself, since its matrices would spill beside others."""
    chunk = tl.program_id(0)
    bh = tl.program_id(1).to(tl.int64)
    size = tl.num_programs(1).to(tl.int64) * padded
    at = bh * padded + chunk * C
    t = tl.arange(0, C)
    dratio = load_block(dratios + (bh * (padded // C) + chunk) * (C * C), 0, 0, C, C, C, C, True)
    tl.store(out + at + t, steps_gradient(dratio, tl.load(dsince + at + t), logs + at, size, C, PRECISION))
