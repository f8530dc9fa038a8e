"""Sums of the backward walk's tiles, over keys and over rows of values, with little exchange between threads.

A tile is [R, WARPS, OWN, 4 LANES]: rows r OWN + own by keys warp 4 LANES + key. A thread holds OWN rows by 4
neighbouring keys, R LANES = 32 threads make a warp, and the warps share out the keys, so that sums over rows stay in a
warp. The sums are right in any layout; in this one they are cheap. Triton gives it to a tile's reads: threads first
along the axis whose entries are neighbours in memory, then along the others from the first to the last.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def over_keys(x):
    """[R, WARPS, OWN, 4 LANES] -> [R, WARPS, OWN, LANES]: the sum of the 4 neighbours that one thread holds."""
    return tl.sum(tl.reshape(x, (x.shape[0], x.shape[1], x.shape[2], x.shape[3] // 4, 4)), 4)


@triton.jit
def over_rows(x):
    """[R, WARPS, OWN, 4 LANES] -> [R, WARPS, 4 LANES]: the sum of the rows that one thread holds."""
    return tl.sum(x, 2)


@triton.jit
def over_both(x):
    """[R, WARPS, OWN, 4 LANES] -> [R, WARPS, LANES]: the sum of all that one thread holds."""
    LANES: tl.constexpr = x.shape[3] // 4
    y = tl.permute(tl.reshape(x, (x.shape[0], x.shape[1], x.shape[2], LANES, 4)), (0, 1, 3, 2, 4))
    return tl.sum(tl.reshape(y, (x.shape[0], x.shape[1], LANES, x.shape[2] * 4)), 3)


@triton.jit
def _halves(x, y, A: tl.constexpr):
    """Sums over the middle axis of two tensors [A, 2, B]: of x where that axis' index is 0, of y where it is 1.

    Threads that share a sum would exchange all they hold, and all get all sums; so they exchange half, and each gets
    half. The bits are exchanged by exclusive or, exactly.
    """
    x = tl.reshape(x, (A, 2, x.numel // (2 * A)))
    y = tl.reshape(y, (A, 2, y.numel // (2 * A)))
    upper = (tl.arange(0, 2) == 1)[None, :, None]
    given = tl.where(upper, x, y).to(tl.int32, bitcast=True)
    taken = tl.xor_sum(given, 1, keep_dims=True) ^ given
    return tl.where(upper, y, x) + taken.to(tl.float32, bitcast=True)


@triton.jit
def sum_keys(x, y, R: tl.constexpr, WARPS: tl.constexpr, OWN: tl.constexpr, LANES: tl.constexpr):
    """Two times 4 tensors [R, WARPS, OWN, LANES] -> their sums over lanes and warps, [R OWN, 8].

    The last axis is 2 u for x and 2 u + 1 for y at the u-th of the 4 tokens.
    """
    ROWS: tl.constexpr = R * WARPS * OWN
    x02 = _halves(x[0], x[2], ROWS)
    x13 = _halves(x[1], x[3], ROWS)
    y02 = _halves(y[0], y[2], ROWS)
    y13 = _halves(y[1], y[3], ROWS)
    if LANES == 2:
        both = tl.join(tl.join(x02, x13), tl.join(y02, y13))
    elif LANES == 4:
        both = tl.join(_halves(x02, x13, ROWS * 2), _halves(y02, y13, ROWS * 2))
    else:
        both = tl.sum(_halves(_halves(x02, x13, ROWS * 2), _halves(y02, y13, ROWS * 2), ROWS * 4), 2)
    both = tl.reshape(both, (R, WARPS, OWN * 8))
    if WARPS > 1:
        # a tensor is split between registers, so this brings two warps' sums into one thread, by one exchange
        both = tl.reshape(tl.permute(both, (0, 2, 1)), (R * OWN * 8, WARPS // 2, 2))
        even, odd = tl.split(both)
        both = tl.sum(even + odd, 1)
    return tl.reshape(both, (R * OWN, 8))


@triton.jit
def over_warps(x, R: tl.constexpr, WARPS: tl.constexpr, LANES: tl.constexpr):
    """4 tensors [R, WARPS, LANES], of 4 tokens -> their sums within each warp, [2, 2, WARPS]."""
    both = _halves(_halves(x[0], x[2], 1), _halves(x[1], x[3], 1), 2)
    both = tl.permute(tl.reshape(both, (4, R // 4, WARPS, LANES)), (0, 2, 1, 3))
    return tl.reshape(tl.sum(tl.reshape(both, (4, WARPS, R // 4 * LANES)), 2), (2, 2, WARPS))


@triton.jit
def sum_rows(x, y, R: tl.constexpr, WARPS: tl.constexpr, LANES: tl.constexpr):
    """Two times 4 tensors [R, WARPS, 4 LANES] -> their sums over R rows, each left with one thread.

    With 4 rows [4, WARPS, 2, 4 LANES]: at (r, warp, i) of x if r < 2, else of y, of token 2 (r % 2) + i.
    With 8 rows [8, WARPS, 1, 4 LANES]: of x if r < 4, else of y, of token r % 4.
    With 16 rows [LANES, 16, WARPS, 2]: as with 8 for r // 2;
    the first two keys of four if r is even, else the last.
    """
    even = _halves(_halves(x[0], y[0], 1), _halves(x[2], y[2], 1), 2)
    odd = _halves(_halves(x[1], y[1], 1), _halves(x[3], y[3], 1), 2)
    if R == 4:
        both = tl.permute(tl.reshape(tl.join(even, odd), (4, WARPS, 4 * LANES, 2)), (0, 1, 3, 2))
    else:
        both = _halves(even, odd, 4)
        if R == 8:
            both = tl.reshape(both, (8, WARPS, 1, 4 * LANES))
        else:
            first, last = tl.split(tl.permute(tl.reshape(both, (16 * WARPS * LANES, 2, 2)), (0, 2, 1)))
            both = tl.permute(tl.reshape(_halves(first, last, 8), (16, WARPS, LANES, 2)), (2, 0, 1, 3))
    return both
