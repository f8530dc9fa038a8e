"""Sums of the backward walk's tiles, over keys and over rows of values, with little exchange between threads.

A tile [ROWS, WIDTH] lies so that each thread holds 4 neighbouring keys, LANES = WIDTH / 4 threads share a row, and a
thread's rows are STRIDE apart. The sums are right in any layout; in this one they are cheap.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def over_keys(x, ROWS: tl.constexpr, LANES: tl.constexpr):
    """[ROWS, WIDTH] -> [ROWS, LANES]: the sum of the 4 neighbours that one thread holds."""
    return tl.sum(tl.reshape(x, (ROWS, LANES, 4)), 2)


@triton.jit
def over_rows(x, ROWS: tl.constexpr, STRIDE: tl.constexpr, WIDTH: tl.constexpr):
    """[ROWS, WIDTH] -> [STRIDE, WIDTH]: the sum of the rows that one thread holds."""
    return tl.sum(tl.reshape(x, (ROWS // STRIDE, STRIDE, WIDTH)), 0)


@triton.jit
def _half(x, y):
    """Sums over the middle axis of two tensors [A, 2, B]: of x where that axis' index is 0, of y where it is 1.

    Threads that share a sum would exchange all they hold, and all get all sums; so they exchange half, and each gets
    half. The bits are exchanged by exclusive or, exactly.
    """
    upper = (tl.arange(0, 2) == 1)[None, :, None]
    given = tl.where(upper, x, y).to(tl.int32, bitcast=True)
    taken = tl.xor_sum(given, 1, keep_dims=True) ^ given
    return tl.where(upper, y, x) + taken.to(tl.float32, bitcast=True)


@triton.jit
def over_lanes(x, ROWS: tl.constexpr, LANES: tl.constexpr):
    """4 tensors [ROWS, LANES] of 4 tokens -> their sums over the second axis, [ROWS, 2, 2]."""
    SHAPE: tl.constexpr = (ROWS, 2, LANES // 2)
    even = _half(tl.reshape(x[0], SHAPE), tl.reshape(x[2], SHAPE))
    odd = _half(tl.reshape(x[1], SHAPE), tl.reshape(x[3], SHAPE))
    SHAPE2: tl.constexpr = (ROWS * 2, 2, LANES // 4)
    both = _half(tl.reshape(even, SHAPE2), tl.reshape(odd, SHAPE2))
    return tl.reshape(tl.sum(both, 2), (ROWS, 2, 2))


@triton.jit
def sum_rows(x, y, STRIDE: tl.constexpr, LANES: tl.constexpr):
    """Two times 4 tensors [STRIDE, 4 LANES] -> their sums over rows, [8, 4 LANES], by one exchange among the warps.

    The rows of one warp are summed first, as halves. Then neighbouring threads' entries are made neighbours: in the
    memory that the warps exchange through, entries that one thread holds would otherwise lie between them, and all
    threads would hit one bank.
    """
    OWN: tl.constexpr = 32 // LANES
    WIDTH: tl.constexpr = 4 * LANES
    WARPS: tl.constexpr = STRIDE // OWN
    if OWN == 1:
        z0 = tl.permute(tl.join(x[0], y[0]), (0, 2, 1))
        z1 = tl.permute(tl.join(x[1], y[1]), (0, 2, 1))
        z2 = tl.permute(tl.join(x[2], y[2]), (0, 2, 1))
        z3 = tl.permute(tl.join(x[3], y[3]), (0, 2, 1))
    else:
        SHAPE: tl.constexpr = (WARPS, 2, (OWN // 2) * WIDTH)
        z0 = _half(tl.reshape(x[0], SHAPE), tl.reshape(y[0], SHAPE))
        z1 = _half(tl.reshape(x[1], SHAPE), tl.reshape(y[1], SHAPE))
        z2 = _half(tl.reshape(x[2], SHAPE), tl.reshape(y[2], SHAPE))
        z3 = _half(tl.reshape(x[3], SHAPE), tl.reshape(y[3], SHAPE))
    if OWN <= 2:
        both = tl.reshape(tl.join(tl.join(z0, z2), tl.join(z1, z3)), (WARPS, 2, LANES, 4, 4))
        both = tl.permute(both, (0, 1, 4, 3, 2))
    else:
        SHAPE2: tl.constexpr = (WARPS * 2, 2, (OWN // 4) * WIDTH)
        even = _half(tl.reshape(z0, SHAPE2), tl.reshape(z2, SHAPE2))
        odd = _half(tl.reshape(z1, SHAPE2), tl.reshape(z3, SHAPE2))
        if OWN == 4:
            both = tl.permute(tl.reshape(tl.join(even, odd), (WARPS, 4, LANES, 4, 2)), (0, 1, 4, 3, 2))
        else:
            SHAPE4: tl.constexpr = (WARPS * 4, 2, WIDTH)
            both = _half(tl.reshape(even, SHAPE4), tl.reshape(odd, SHAPE4))
            both = tl.permute(tl.reshape(both, (WARPS, 8, LANES, 4)), (0, 1, 3, 2))
    total = tl.reshape(tl.sum(tl.reshape(both, (WARPS, 32 * LANES)), 0), (8, 4, LANES))
    return tl.reshape(tl.permute(total, (0, 2, 1)), (8, WIDTH))
