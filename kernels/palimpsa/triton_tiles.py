"""What the backward walk in Triton reads and writes: tokens' rows, and states by tiles (see :mod:`.triton_sums`)."""

# ruff: noqa: RUF005 - Triton's frontend knows no starred tuples
from __future__ import annotations

import triton
import triton.language as tl

from .triton_common import load_vector


@triton.jit
def _integers(
    pointer, stride, first, t, T, SIZE: tl.constexpr, COUNT: tl.constexpr, ENTRIES: tl.constexpr, MASK: tl.constexpr,
    MASK_T: tl.constexpr,
):
    """Of each of 2 tokens, whose rows have SIZE entries: COUNT integers, each of ENTRIES 16-bit floats.

    One integer is what one thread holds: Triton would read it entry by entry. Two tokens at once, since Triton's
    compiler takes longer for every read; of four, a read could be as wide as the program, and it would go through
    shared memory.
    """
    steps = tl.arange(0, 2)[None, :]
    index = tl.arange(0, COUNT)[:, None]
    place = (pointer + first + steps * stride).to(tl.pointer_type(tl.int64 if ENTRIES == 4 else tl.int32)) + index
    if MASK and MASK_T:
        x = tl.load(place, mask=(first + index * ENTRIES < SIZE) & (t + steps < T), other=0)
    elif MASK:
        x = tl.load(place, mask=first + (index + steps * 0) * ENTRIES < SIZE, other=0)
    elif MASK_T:
        x = tl.load(place, mask=index * 0 + t + steps < T, other=0)
    else:
        x = tl.load(place)
    return tl.split(x)


@triton.jit
def _entry(x, i: tl.constexpr, TYPE: tl.constexpr):
    """The ``i``-th 16-bit float of each integer, in float32."""
    if TYPE.is_bf16():
        word = (x >> (32 * (i // 2))).to(tl.int32)
        word = word << 16 if i % 2 == 0 else word & -65536
        y = word.to(tl.float32, bitcast=True)
    else:
        y = (x >> (16 * i)).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    return y


@triton.jit
def _entries(x, ENTRIES: tl.constexpr, TYPE: tl.constexpr):
    """[COUNT] integers -> [COUNT, ENTRIES] in float32."""
    if ENTRIES == 2:
        y = tl.join(_entry(x, 0, TYPE), _entry(x, 1, TYPE))
    else:
        even = tl.join(_entry(x, 0, TYPE), _entry(x, 2, TYPE))
        odd = tl.join(_entry(x, 1, TYPE), _entry(x, 3, TYPE))
        y = tl.reshape(tl.join(even, odd), (x.shape[0], 4))
    return y


@triton.jit
def load_rows(
    pointer, stride, first, t, T, V: tl.constexpr, OWN: tl.constexpr, R: tl.constexpr, MASK_V: tl.constexpr,
    MASK_T: tl.constexpr,
):
    """A block's values of 4 tokens in float32, each [R, 1, OWN, 1]; a thread's rows are neighbours in memory."""
    TYPE: tl.constexpr = pointer.dtype.element_ty
    rows = ()
    if TYPE.primitive_bitwidth == 16 and (OWN == 2 or OWN == 4) and V % OWN == 0:
        for pair in tl.static_range(0, 4, 2):
            x = _integers(pointer + pair * stride, stride, first, t + pair, T, V, R, OWN, MASK_V, MASK_T)
            for u in tl.static_range(2):
                rows = rows + (tl.reshape(_entries(x[u], OWN, TYPE), (R, 1, OWN, 1)),)
    else:
        index = first + tl.arange(0, R)[:, None] * OWN + tl.arange(0, OWN)[None, :]
        for u in tl.static_range(4):
            x = load_vector(pointer + u * stride, index, V, t + u, T, MASK_V, MASK_T)
            rows = rows + (tl.reshape(x, (R, 1, OWN, 1)),)
    return rows


@triton.jit
def load_keys(
    pointer, stride, first, t, T, K: tl.constexpr, WIDTH: tl.constexpr, WARPS: tl.constexpr, MASK_T: tl.constexpr,
    MASK_K: tl.constexpr,
):
    """A part's keys or queries of 4 tokens in float32, each [1, WARPS, 1, WIDTH / WARPS]."""
    TYPE: tl.constexpr = pointer.dtype.element_ty
    keys = ()
    if TYPE.primitive_bitwidth == 16 and K % 4 == 0:
        for pair in tl.static_range(0, 4, 2):
            x = _integers(pointer + pair * stride, stride, first, t + pair, T, K, WIDTH // 4, 4, MASK_K, MASK_T)
            for u in tl.static_range(2):
                keys = keys + (tl.reshape(_entries(x[u], 4, TYPE), (1, WARPS, 1, WIDTH // WARPS)),)
    else:
        index = first + tl.arange(0, WIDTH)
        for u in tl.static_range(4):
            x = load_vector(pointer + u * stride, index, K, t + u, T, MASK_K, MASK_T)
            keys = keys + (tl.reshape(x, (1, WARPS, 1, WIDTH // WARPS)),)
    return keys


@triton.jit
def excess(e, a, b, k, p, EXACT: tl.constexpr):
    """E after one more token, or I = p + E unless EXACT."""
    return e * a + b * (k * k) if EXACT else e * a + (1.0 - a) * p + b * (k * k)


@triton.jit
def write(
    M, E, k, v, b, decay, p, t, at_k, at_v, T, H, G, first,
    K: tl.constexpr, V: tl.constexpr, OWN: tl.constexpr, R: tl.constexpr, WIDTH: tl.constexpr, WARPS: tl.constexpr,
    PARTS: tl.constexpr, MASK_T: tl.constexpr, MASK_V: tl.constexpr, MASK_K: tl.constexpr, EXACT: tl.constexpr,
):
    """The state 4 tokens later. ``decay``, ``at_k`` and ``at_v`` stand at token t."""
    # writes decay to the end at once: one multiplication and four fused ones an element, instead of eight in all
    v4 = load_rows(v + at_v, H * V, first, t, T, V, OWN, R, MASK_V, MASK_T)
    b4 = load_rows(b + at_v, H * V, first, t, T, V, OWN, R, MASK_V, MASK_T)
    gain = 1.0
    vs = ()
    bs = ()
    for u in tl.static_range(3, -1, -1):
        vs = (v4[u] * gain,) + vs
        bs = (b4[u] * gain,) + bs
        gain = gain * tl.load(decay + u)
    M_next = ()
    E_next = ()
    for n in tl.static_range(PARTS):
        ks = load_keys(k + at_k, G * K, n * WIDTH, t, T, K, WIDTH, WARPS, MASK_T, MASK_K)
        m = M[n] * gain
        e = E[n] * gain
        if not EXACT:
            e += (1.0 - gain) * p
        for u in tl.static_range(4):
            m += vs[u] * ks[u]
            e += bs[u] * (ks[u] * ks[u])
        M_next = M_next + (m,)
        E_next = E_next + (e,)
    return M_next, E_next


@triton.jit
def load_tile(
    pointer, rows, keys, K: tl.constexpr, V: tl.constexpr, MASK_V: tl.constexpr, MASK_K: tl.constexpr,
    EXACT: tl.constexpr,
):
    """One tile of M and of E (or I) in a state [2, V, K], past the nearest cache, which is left to the tokens."""
    offsets = rows * K + keys
    if MASK_V or MASK_K:
        inside = (rows < V) & (keys < K)
        M = tl.load(pointer + offsets, mask=inside, other=0.0, cache_modifier=".cg")
        # I is divided by, in the padding too
        E = tl.load(pointer + V * K + offsets, mask=inside, other=0.0 if EXACT else 1.0, cache_modifier=".cg")
    else:
        M = tl.load(pointer + offsets, cache_modifier=".cg")
        E = tl.load(pointer + V * K + offsets, cache_modifier=".cg")
    return M, E


@triton.jit
def load_tiles(
    pointer, rows, keys, K: tl.constexpr, V: tl.constexpr, WIDTH: tl.constexpr, PARTS: tl.constexpr,
    MASK_V: tl.constexpr, MASK_K: tl.constexpr, EXACT: tl.constexpr,
):
    M = ()
    E = ()
    for n in tl.static_range(PARTS):
        m, e = load_tile(pointer, rows, n * WIDTH + keys, K, V, MASK_V, MASK_K, EXACT)
        M = M + (m,)
        E = E + (e,)
    return M, E


@triton.jit
def store_tiles(
    pointer, M, E, rows, keys, K: tl.constexpr, V: tl.constexpr, WIDTH: tl.constexpr, PARTS: tl.constexpr,
    MASK_V: tl.constexpr, MASK_K: tl.constexpr,
):
    for n in tl.static_range(PARTS):
        offsets = rows * K + n * WIDTH + keys
        if MASK_V or MASK_K:
            inside = (rows < V) & (n * WIDTH + keys < K)
            tl.store(pointer + offsets, M[n], mask=inside)
            tl.store(pointer + V * K + offsets, E[n], mask=inside)
        else:
            tl.store(pointer + offsets, M[n])
            tl.store(pointer + V * K + offsets, E[n])
