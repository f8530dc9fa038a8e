"""What Palimpsa's Triton kernels share: tilings, tables of decays, loads, boundary states and the scan over them.

Shapes: B batch, T tokens, H value heads, G key heads (H % G == 0), K key width, V value width, N chunks of CHUNK
tokens, S segments (each a whole number of chunks). A state is [2, V, K]: the memory M and the excess precision E.
"""

# ruff: noqa: RUF005 - Triton's frontend knows no starred tuples
from __future__ import annotations

import os
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..devices import ENOUGH_SHARED, shared_memory

# tokens between the boundary states that the backward pass walks from
CHUNK = 64

# the interpreter has no inline assembly
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

# products with a sum become one instruction: newer releases of Triton ask for that explicitly
OPTIONS = {"enable_fp_fusion": True}

MAX_KEY, MAX_VALUE = 256, 512


class Tiling(NamedTuple):
    """A program's block of the state: ``rows`` values by ``parts`` tiles of ``width`` keys, on ``warps`` warps.

    ``registers``: at most so many a thread, which decides how many programs a multiprocessor holds.
    """

    rows: int
    width: int
    parts: int
    warps: int
    registers: int = 255

    def blocks(self, value_dim: int) -> int:
        return triton.cdiv(value_dim, self.rows)


def _rows(value_dim: int, largest: int) -> int:
    """The rows of a block: as little padding as possible, then as many rows as possible."""
    sizes = [size for size in (64, 32, 16) if size <= largest]
    return min(sizes, key=lambda size: (triton.cdiv(value_dim, size) * size, -size))


def _padded(key_dim: int) -> int:
    return min(triton.cdiv(key_dim, width) * width for width in (64, 32, 16) if triton.cdiv(key_dim, width) <= 4)


def forward_tiling(key_dim: int, value_dim: int) -> Tiling:
    """Up to 64 elements of M and of E a thread, as about 4 rows by 16 keys.

    More rows a thread read fewer keys and queries for each element, more keys a thread sum over fewer lanes: both cost
    instructions that do no arithmetic. A part of the keys is narrower than the program has threads: only then does
    Triton read it straight to where it is used.
    """
    padded = _padded(key_dim)
    width = next(width for width in (64, 32, 16) if padded % width == 0 and (padded // width >= 3 or width == 16))
    rows = _rows(value_dim, 32 if padded > 48 else 16)
    warps = triton.next_power_of_2(max(triton.cdiv(rows * padded, 32 * 64), width // 32 + 1))
    return Tiling(rows, width, padded // width, warps)


def backward_tiling(key_dim: int, value_dim: int, packed: bool) -> Tiling:
    """Up to 24 elements a thread of each of M, E and their adjoints, up to 16 in one tile, on 4 warps at most.

    With 16 in all registers suffice; 24 and, of more than 192 keys, 32 spill. Fewer rows a program mean more partial
    sums of the gradients of q and k. ``packed``: keys and queries are read 4 at a time. Else a part must be narrower
    than the program has threads, as in the forward pass.
    """
    padded = _padded(key_dim)
    rows = _rows(value_dim, 32 if padded <= 48 else 16)
    warps = min(4, triton.next_power_of_2(triton.cdiv(rows * padded, 32 * 24)))
    width = next(
        width
        for width in (128, 64, 32, 16)
        if padded % width == 0 and (width == 16 or (rows * width <= 16 * 32 * warps and (packed or width < 32 * warps)))
    )
    return Tiling(rows, width, padded // width, warps)


def products_tiling(key_dim: int, value_dim: int) -> tuple[int, int]:
    """Values and keys of a tile of the matrix products between chunks."""
    widths = [width for width in (64, 32, 16) if triton.cdiv(key_dim, width) <= 8]
    return _rows(value_dim, 64), min(widths, key=lambda width: (triton.cdiv(key_dim, width) * width, -width))


def sectors(widest: int, *tensors: Tensor) -> dict[str, int]:
    """Entries of a sector of memory (32 bytes), and sectors of the longest row of ``widest`` entries."""
    entries = 32 // max(tensor.element_size() for tensor in tensors)
    return {"SECTOR": entries, "SECTORS": triton.next_power_of_2(triton.cdiv(widest, entries))}


def precision(*tensors: Tensor) -> str:
    """Of the matrix products: one pass of tf32 (1.7e-4) under half precision inputs, else three (1e-6)."""
    return "tf32x3" if any(tensor.dtype == torch.float32 for tensor in tensors) else "tf32"


@triton.jit
def reciprocal(x, ASSEMBLY: tl.constexpr):
    """1 / x to the last bit or so in one instruction; x is at least the prior, so never subnormal."""
    if ASSEMBLY:
        return tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    return 1.0 / x


@triton.jit
def load_vector(pointer, index, size, t, T, MASK_INDEX: tl.constexpr, MASK_T: tl.constexpr):
    """pointer[index] in float32; zeros past ``size`` and for tokens from T on, which the state does not notice."""
    if MASK_INDEX and MASK_T:
        x = tl.load(pointer + index, mask=(index < size) & (index * 0 + t < T), other=0.0)
    elif MASK_INDEX:
        x = tl.load(pointer + index, mask=index < size, other=0.0)
    elif MASK_T:
        x = tl.load(pointer + index, mask=index * 0 + t < T, other=0.0)
    else:
        x = tl.load(pointer + index)
    return x.to(tl.float32)


@triton.jit
def touch(
    pointer, tokens, T, stride, first, last, SECTOR: tl.constexpr, SECTORS: tl.constexpr, FAR: tl.constexpr = False
):
    """One entry of every sector of entries ``first`` to ``last`` in the rows of ``tokens``: [tokens, SECTORS].

    A load that nothing waits for brings the rows near; with ``FAR`` not into the multiprocessor's own cache. Its result
    must be used, or the compiler drops it: later.
    """
    index = first + tl.arange(0, SECTORS) * SECTOR
    inside = ((tokens >= 0) & (tokens < T))[:, None] & (index < last)[None, :]
    place = pointer + tokens.to(tl.int64)[:, None] * stride + index[None, :]
    x = tl.load(place, mask=inside, other=0.0, cache_modifier=".cg") if FAR else tl.load(place, mask=inside, other=0.0)
    return x.to(tl.float32)


@triton.jit
def load_state(
    pointer,
    rows,
    keys,
    K: tl.constexpr,
    V: tl.constexpr,
    WIDTH: tl.constexpr,
    PARTS: tl.constexpr,
    MASK_V: tl.constexpr,
    MASK_K: tl.constexpr,
    EMPTY: tl.constexpr = 0.0,
):
    """The tiles of M and of E in a state [2, V, K], which is read once: the nearest cache is left to the tokens.

    EMPTY stands for E in the padding.
    """
    M = ()
    E = ()
    for n in tl.static_range(PARTS):
        columns = n * WIDTH + keys
        offsets = rows[:, None] * K + columns[None, :]
        if MASK_V or MASK_K:
            inside = (rows < V)[:, None] & (columns < K)[None, :]
            M = M + (tl.load(pointer + offsets, mask=inside, other=0.0, cache_modifier=".cg"),)
            E = E + (tl.load(pointer + V * K + offsets, mask=inside, other=EMPTY, cache_modifier=".cg"),)
        else:
            M = M + (tl.load(pointer + offsets, cache_modifier=".cg"),)
            E = E + (tl.load(pointer + V * K + offsets, cache_modifier=".cg"),)
    return M, E


@triton.jit
def store_state(
    pointer,
    M,
    E,
    rows,
    keys,
    K: tl.constexpr,
    V: tl.constexpr,
    WIDTH: tl.constexpr,
    PARTS: tl.constexpr,
    MASK_V: tl.constexpr,
    MASK_K: tl.constexpr,
):
    for n in tl.static_range(PARTS):
        columns = n * WIDTH + keys
        offsets = rows[:, None] * K + columns[None, :]
        if MASK_V or MASK_K:
            inside = (rows < V)[:, None] & (columns < K)[None, :]
            tl.store(pointer + offsets, M[n], mask=inside)
            tl.store(pointer + V * K + offsets, E[n], mask=inside)
        else:
            tl.store(pointer + offsets, M[n])
            tl.store(pointer + V * K + offsets, E[n])


@triton.jit(do_not_specialize=["T", "H", "padded"])
def _decays_kernel(log_decay, reset, decay, total, lost, T, H, padded, CHUNK: tl.constexpr, HAS_RESET: tl.constexpr):
    chunk = tl.program_id(0)
    bh = tl.program_id(1).to(tl.int64)
    batch = bh // H
    t = chunk * CHUNK + tl.arange(0, CHUNK)
    live = t < T
    g = tl.load(log_decay + (batch * T + t) * H + bh % H, mask=live, other=0.0).to(tl.float64)
    a = tl.exp(g)
    # exp(-800) is 0 in float64 too, and sums over a chunk stay exact to 1e-11
    g = tl.maximum(g, -800.0)
    if HAS_RESET:
        fresh = tl.load(reset + batch * T + t, mask=live, other=0) != 0
        a = tl.where(fresh, 0.0, a)
        g = tl.where(fresh, -800.0, g)
    rounded = a.to(tl.float32)
    whole = rounded.to(tl.float64)
    error = tl.where(rounded > 1e-30, (a - whole) / tl.maximum(whole, 1e-30), 0.0)
    tl.store(decay + bh * padded + t, rounded)
    tl.store(lost + bh * tl.num_programs(0) + chunk, tl.sum(error, 0).to(tl.float32))
    tl.store(total + bh * padded + t, tl.cumsum(g, 0))


class Decays(NamedTuple):
    """What the kernels know of the decays.

    each: [B, H, N CHUNK], a token's decay; 0 at a reset, 1 past the end. float32.
    total: the same shape, the chunks' running log decays. float64.
    lost: [B, H, N], by what share rounding made a chunk's product of ``each`` too small. float32. A decay just below 1
        is rounded alike at every token, which adds up: 4e-4 over 32768 tokens at exp(-1e-6).
    """

    each: Tensor
    total: Tensor
    lost: Tensor


def decays(log_decay: Tensor, reset: Tensor | None) -> Decays:
    batch, tokens, heads = log_decay.shape
    chunks = triton.cdiv(tokens, CHUNK)
    each = torch.empty(batch, heads, chunks * CHUNK, dtype=torch.float32, device=log_decay.device)
    total = torch.empty_like(each, dtype=torch.float64)
    lost = torch.empty(batch, heads, chunks, dtype=torch.float32, device=log_decay.device)
    flags = log_decay if reset is None else reset.view(torch.uint8)
    _decays_kernel[(chunks, batch * heads)](
        log_decay, flags, each, total, lost, tokens, heads, chunks * CHUNK, CHUNK=CHUNK, HAS_RESET=reset is not None
    )
    return Decays(each, total, lost)


@triton.jit(do_not_specialize=["T", "H", "G", "S", "first", "count", "length", "chunks"])
def _products_kernel(
    k, v, b, total, prior, starts, states, gains, T, H, G, S, first, count, length, chunks,
    K: tl.constexpr, V: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, CHUNK: tl.constexpr,
    SPACING: tl.constexpr, PRECISION: tl.constexpr, EXACT: tl.constexpr, KEEP: tl.constexpr,
):
    # the state SPACING tokens later is their decay times the state before, plus a product of decayed writes and keys
    tiles_k = tl.cdiv(K, WIDTH)
    segment = first + tl.program_id(1)
    bh = tl.program_id(2).to(tl.int64)
    batch = bh // H
    h = bh % H
    hk = h // (H // G)
    rows = (tl.program_id(0) // tiles_k) * ROWS + tl.arange(0, ROWS)
    keys = (tl.program_id(0) % tiles_k) * WIDTH + tl.arange(0, WIDTH)
    offsets = rows[:, None] * K + keys[None, :]
    inside = (rows < V)[:, None] & (keys < K)[None, :]
    start = starts + (bh * S + segment) * (2 * V * K) + offsets
    if KEEP:
        M = tl.load(start, mask=inside, other=0.0)
        E = tl.load(start + V * K, mask=inside, other=0.0)
    else:
        M = tl.zeros((ROWS, WIDTH), tl.float32)
        E = tl.zeros((ROWS, WIDTH), tl.float32)
    whole = tl.zeros((), tl.float64)
    p = 0.0 if EXACT else tl.load(prior + h).to(tl.float32)
    steps = tl.arange(0, SPACING)
    spaces = CHUNK // SPACING
    for i in range(segment * length * spaces, min((segment + 1) * length, tl.cdiv(T, CHUNK)) * spaces):
        if KEEP:
            out = states + (bh * (count * spaces) + i - first * length * spaces) * (2 * V * K) + offsets
            tl.store(out, M, mask=inside)
            tl.store(out + V * K, E + p, mask=inside)
        t = i * SPACING
        logs = total + bh * (chunks * CHUNK) + t
        end = tl.load(logs + SPACING - 1)
        added = end - tl.load(logs - 1, mask=i % spaces > 0, other=0.0)
        whole += added
        weight = tl.exp((end - tl.load(logs + steps)).to(tl.float32))[:, None]
        token = batch * T + t + steps
        mask_k = (t + steps < T)[:, None] & (keys < K)[None, :]
        mask_v = (t + steps < T)[:, None] & (rows < V)[None, :]
        kk = tl.load(k + (token * G + hk)[:, None] * K + keys[None, :], mask=mask_k, other=0.0).to(tl.float32)
        at = (token * H + h)[:, None] * V + rows[None, :]
        vv = tl.load(v + at, mask=mask_v, other=0.0).to(tl.float32) * weight
        bb = tl.load(b + at, mask=mask_v, other=0.0).to(tl.float32) * weight
        gain = tl.exp(added).to(tl.float32)
        M = M * gain + tl.dot(tl.trans(vv), kk, input_precision=PRECISION)
        E = E * gain + tl.dot(tl.trans(bb), kk * kk, input_precision=PRECISION)
    if not KEEP:
        tl.store(start, M, mask=inside)
        tl.store(start + V * K, E, mask=inside)
        if tl.program_id(0) == 0:
            tl.store(gains + bh * S + segment, tl.exp(whole))


@triton.jit(do_not_specialize=["S", "size"])
def _scan_kernel(edge, states, gains, S, size, BLOCK: tl.constexpr, REVERSE: tl.constexpr, HAS_EDGE: tl.constexpr):
    # in place: what a segment adds becomes what enters it
    bh = tl.program_id(1).to(tl.int64)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    carry = tl.zeros((BLOCK,), tl.float32)
    if HAS_EDGE:
        carry = tl.load(edge + bh * size + at, mask=inside, other=0.0)
    # four at a time: loads do not pass stores, and each takes long
    for i in range(0, S - 1, 4):
        added = ()
        gain = ()
        for j in tl.static_range(4):
            s = min(i + j, S - 1)
            if REVERSE:
                s = S - 1 - s
            added = added + (tl.load(states + (bh * S + s) * size + at, mask=inside, other=0.0),)
            gain = gain + (tl.load(gains + bh * S + s),)
        for j in tl.static_range(4):
            if i + j < S - 1:
                s = i + j
                if REVERSE:
                    s = S - 1 - s
                tl.store(states + (bh * S + s) * size + at, carry, mask=inside)
                # in two parts: many segments would add up the error of one float32
                high = gain[j].to(tl.float32)
                carry = added[j] + (high * carry + (gain[j] - high).to(tl.float32) * carry)
    last = S - 1
    if REVERSE:
        last = 0
    tl.store(states + (bh * S + last) * size + at, carry, mask=inside)


def scan(edge: Tensor | None, states: Tensor, gains: Tensor, *, reverse: bool) -> None:
    """What each segment adds, [B, H, S, 2, V, K], becomes in place what enters it; ``edge`` enters the first (last).

    ``gains``: [B, H, S] in float64. The last segment of the scan is not read: nothing follows it.
    """
    batch, heads, segments = states.shape[:3]
    size = states[0, 0, 0].numel()
    block = 1024
    _scan_kernel[(triton.cdiv(size, block), batch * heads)](
        states if edge is None else edge, states, gains, segments, size,
        BLOCK=block, REVERSE=reverse, HAS_EDGE=edge is not None,
    )


def segment_starts(k: Tensor, v: Tensor, b: Tensor, state: Tensor | None, table: Decays, length: int) -> Tensor:
    """The states that enter the segments of ``length`` chunks: [B, H, S, 2, V, K]."""
    batch, tokens, heads, value_dim = v.shape
    groups, key_dim = k.shape[2:]
    chunks = triton.cdiv(tokens, CHUNK)
    segments = triton.cdiv(chunks, length)
    starts = torch.empty(batch, heads, segments, 2, value_dim, key_dim, dtype=torch.float32, device=v.device)
    gains = torch.empty(batch, heads, segments, dtype=torch.float64, device=v.device)
    rows, width = products_tiling(key_dim, value_dim)
    if segments > 1:
        tiles = triton.cdiv(value_dim, rows) * triton.cdiv(key_dim, width)
        _products_kernel[(tiles, segments - 1, batch * heads)](
            k, v, b, table.total, table.total, starts, starts, gains, tokens, heads, groups, segments, 0, 0, length,
            chunks, K=key_dim, V=value_dim, ROWS=rows, WIDTH=width, CHUNK=CHUNK, SPACING=CHUNK,
            PRECISION=precision(k, v, b), EXACT=True, KEEP=False, **_products_options(k.device),
        )
    scan(state_by_head(state), starts, gains, reverse=False)
    return starts


def _products_options(device: torch.device) -> dict[str, object]:
    # of float32 tiles three stages take up to 161 KB on Hopper and 129 elsewhere, two 81
    return {**OPTIONS, "num_stages": 3 if shared_memory(device) >= ENOUGH_SHARED else 2}


def states_between(
    k: Tensor, v: Tensor, b: Tensor, table: Decays, starts: Tensor, states: Tensor, length: int, first: int, count: int,
    spacing: int, prior: Tensor | None,
) -> None:
    """The states every ``spacing`` tokens of ``count`` chunks from segment ``first`` on, each before its token.

    Into ``states``: [B, H, count CHUNK / spacing, 2, V, K]; with a ``prior``, M and I = prior + E instead of M and E.
    """
    batch, tokens, heads, value_dim = v.shape
    groups, key_dim = k.shape[2:]
    rows, width = products_tiling(key_dim, value_dim)
    tiles = triton.cdiv(value_dim, rows) * triton.cdiv(key_dim, width)
    _products_kernel[(tiles, triton.cdiv(count, length), batch * heads)](
        k, v, b, table.total, table.total if prior is None else prior, starts, states, states, tokens, heads, groups,
        starts.shape[2], first, count, length, triton.cdiv(tokens, CHUNK), K=key_dim, V=value_dim, ROWS=rows,
        WIDTH=width, CHUNK=CHUNK, SPACING=spacing, PRECISION=precision(k, v, b), EXACT=prior is None, KEEP=True,
        **_products_options(k.device),
    )


def state_by_head(state: Tensor | None) -> Tensor | None:
    """[B, 2, H, V, K] -> [B, H, 2, V, K], contiguous and float32."""
    return None if state is None else state.to(torch.float32).transpose(1, 2).contiguous()
