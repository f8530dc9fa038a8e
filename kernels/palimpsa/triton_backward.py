"""Palimpsa's backward pass in Triton.

With w_t = dy_t q_t^T / I_t, the adjoints run backwards, LM_t = w_t + a_{t+1} LM_{t+1} and
LE_t = -w_t M_t / I_t + a_{t+1} LE_{t+1}, and every gradient is a contraction of them with the states of the same token:

    dq_t = dy_t^T (M_t / I_t)    dv_t = LM_t k_t    db_t = LE_t k_t^2    dk_t = v_t^T LM_t + 2 k_t (b_t^T LE_t)
    dI0 = -sum of w_t M_t / I_t  dg_t = a_t (<LM_t, M_{t-1}> + <LE_t, E_{t-1}>)

So a backward walk needs the states in reverse order, and undoing a step divides by its decay: nothing is undone here.
States every 16 tokens come from matrix products, every 4 from a walk (in a scratch that every such block reuses), and
the 4 tokens between are in registers, a tile at a time.

Tokens are taken in slabs from the last to the first, which bounds the memory; a slab is cut into as many segments as
fill the device. A segment's adjoint at its end is found by one more walk (the adjoints' inflow is linear in it).
"""

# ruff: noqa: RUF005 - Triton's frontend knows no starred tuples
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .triton_adjoint import adjoint_kernel
from .triton_common import (
    CHUNK,
    INTERPRETED,
    OPTIONS,
    Decays,
    Tiling,
    backward_tiling,
    load_state,
    load_vector,
    precision,
    reciprocal,
    scan,
    sectors,
    state_by_head,
    states_between,
    store_state,
    touch,
)

# bytes of boundary states and of partial sums in one slab
SLAB_BYTES = 512 * 2**20

# tokens between the states from matrix products; a walk between two of them leaves every fourth in the scratch
BLOCK = 16
SLOTS = BLOCK // 4 - 1
# tokens between the first read of a row, which fetches it, and its use
AHEAD = 6


@triton.jit(do_not_specialize=["T", "H", "G", "S", "first", "count", "length", "padded"])
def _inflow_kernel(
    q, k, v, b, dy, dvariance, decay, total, prior, states, adjoints, gains, T, H, G, S, first, count, length, padded,
    K: tl.constexpr, V: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, PARTS: tl.constexpr, CHUNK: tl.constexpr,
    BLOCK: tl.constexpr, AHEAD: tl.constexpr, SECTOR: tl.constexpr, SECTORS: tl.constexpr, MASK_T: tl.constexpr,
    MASK_V: tl.constexpr, MASK_K: tl.constexpr, EXACT: tl.constexpr, VARIANCE: tl.constexpr, ASSEMBLY: tl.constexpr,
):
    # what a segment's own outputs add to the adjoint of the state that enters it: the sum of the decayed w_t
    segment = 1 + tl.program_id(1)
    bh = tl.program_id(2).to(tl.int64)
    batch = bh // H
    h = bh % H
    hk = h // (H // G)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    keys = tl.arange(0, WIDTH)
    p = tl.load(prior + h).to(tl.float32)
    LM = ()
    LE = ()
    for _ in tl.static_range(PARTS):
        LM = LM + (tl.zeros((ROWS, WIDTH), tl.float32),)
        LE = LE + (tl.zeros((ROWS, WIDTH), tl.float32),)
    whole = tl.zeros((), tl.float64)
    from_k = batch * T * G * K + hk * K
    from_v = batch * T * H * V + h * V
    first_v = tl.program_id(0) * ROWS
    last_v = min(V, first_v + ROWS)
    used = tl.zeros((1, SECTORS), tl.float32)
    begin = first + segment * length
    for chunk in range(begin, min(begin + length, first + count)):
        # both afresh for every chunk: the decays' rounding errors would add up
        entering = states + (bh * count + chunk - first) * (CHUNK // BLOCK * 2 * V * K)
        # I, instead of E, is divided by in the padding too
        EMPTY: tl.constexpr = 0.0 if EXACT else 1.0
        M, E = load_state(entering, rows, keys, K, V, WIDTH, PARTS, MASK_V, MASK_K, EMPTY)
        gain = tl.exp(whole).to(tl.float32)
        for t in range(chunk * CHUNK, min(chunk * CHUNK + CHUNK, T)):
            at_v = ((batch * T + t) * H + h) * V
            at_k = ((batch * T + t) * G + hk) * K
            ahead = t + AHEAD + tl.arange(0, 1)
            near_k = touch(k + from_k, ahead, T, G * K, 0, K, SECTOR, SECTORS)
            near_q = touch(q + from_k, ahead, T, G * K, 0, K, SECTOR, SECTORS)
            near_v = touch(v + from_v, ahead, T, H * V, first_v, last_v, SECTOR, SECTORS)
            near_b = touch(b + from_v, ahead, T, H * V, first_v, last_v, SECTOR, SECTORS)
            near_d = touch(dy + from_v, ahead, T, H * V, first_v, last_v, SECTOR, SECTORS)
            a = tl.load(decay + bh * padded + t)
            gain = gain * a
            vv = load_vector(v + at_v, rows, V, t, T, MASK_V, False)[:, None]
            bb = load_vector(b + at_v, rows, V, t, T, MASK_V, False)[:, None]
            dd = load_vector(dy + at_v, rows, V, t, T, MASK_V, False)[:, None] * gain
            if VARIANCE:
                ss = load_vector(dvariance + at_v, rows, V, t, T, MASK_V, False)[:, None] * gain
            M_next = ()
            E_next = ()
            LM_next = ()
            LE_next = ()
            for n in tl.static_range(PARTS):
                kk = load_vector(k + at_k, n * WIDTH + keys, K, t, T, MASK_K, False)[None, :]
                qq = load_vector(q + at_k, n * WIDTH + keys, K, t, T, MASK_K, False)[None, :]
                m = M[n] * a + vv * kk
                if EXACT:
                    e = E[n] * a + bb * (kk * kk)
                    r = reciprocal(e + p, ASSEMBLY)
                else:
                    e = E[n] * a + (bb * (kk * kk) + (1.0 - a) * p)
                    r = reciprocal(e, ASSEMBLY)
                w = (dd * qq) * r
                if VARIANCE:
                    LE_next = LE_next + (LE[n] - (w * m + (ss * qq) * (qq * r)) * r,)
                else:
                    LE_next = LE_next + (LE[n] - w * (m * r),)
                LM_next = LM_next + (LM[n] + w,)
                M_next = M_next + (m,)
                E_next = E_next + (e,)
            M = M_next
            E = E_next
            LM = LM_next
            LE = LE_next
            used += (near_k + near_q) + (near_v + near_b) + near_d
        whole += tl.load(total + bh * padded + chunk * CHUNK + CHUNK - 1)
    if T < 0:
        # never: it keeps the early reads alive
        tl.store(gains + tl.arange(0, SECTORS)[None, :], used)
    store_state(adjoints + (bh * S + segment) * (2 * V * K), LM, LE, rows, keys, K, V, WIDTH, PARTS, MASK_V, MASK_K)
    if tl.program_id(0) == 0:
        tl.store(gains + bh * S + segment, tl.exp(whole))


@triton.jit(do_not_specialize=["T", "G", "first", "padded"])
def _gather_kernel(
    partial, dq, dk, T, G, first, padded,
    K: tl.constexpr, KEYS: tl.constexpr, TERMS: tl.constexpr, TOKENS: tl.constexpr,
):
    # the sum of a key head's partial gradients: over its value heads and their blocks of values
    batch = tl.program_id(2).to(tl.int64)
    group = tl.program_id(1)
    step = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    keys = tl.arange(0, KEYS)
    inside = ((step < padded) & (first + step < T))[:, None] & (keys < K)[None, :]
    terms = partial + ((batch * padded + step) * G + group)[:, None] * (TERMS * 2 * K) + keys[None, :]
    sum_q = tl.zeros((TOKENS, KEYS), tl.float32)
    sum_k = tl.zeros((TOKENS, KEYS), tl.float32)
    for i in range(TERMS):
        sum_q += tl.load(terms + i * (2 * K), mask=inside, other=0.0)
        sum_k += tl.load(terms + i * (2 * K) + K, mask=inside, other=0.0)
    place = ((batch * T + first + step) * G + group)[:, None] * K + keys[None, :]
    tl.store(dq + place, sum_q.to(dq.dtype.element_ty), mask=inside)
    tl.store(dk + place, sum_k.to(dk.dtype.element_ty), mask=inside)


def slab_chunks(
    batch: int, tokens: int, heads: int, key_dim: int, value_dim: int, tiling: Tiling, length: int
) -> int:
    """Chunks a slab: as many segments of the forward pass (``length`` chunks) as SLAB_BYTES hold, in equal slabs."""
    chunks = triton.cdiv(tokens, CHUNK)
    blocks = tiling.blocks(value_dim)
    per_chunk = 8 * batch * heads * key_dim * (CHUNK // BLOCK * value_dim + CHUNK * blocks)
    slab = max(1, SLAB_BYTES // per_chunk // length) * length
    slab = triton.cdiv(triton.cdiv(chunks, triton.cdiv(chunks, slab)), length) * length
    return min(slab, chunks)


def segment_chunks(programs: int, tiling: Tiling, slab: int, processors: int) -> int:
    """Chunks a segment, for ``programs`` a segment: the shortest time in waves of programs.

    A program takes as long as its segment and a start; the walk for the inflow, 0.3 of that.
    """
    # a multiprocessor has 2^16 registers, given out to warps of 32 threads in eights
    places = processors * max(1, 2048 // (triton.cdiv(tiling.registers, 8) * 8) // tiling.warps)

    def cost(segments: int) -> float:
        segment = triton.cdiv(slab, segments)
        count = triton.cdiv(slab, segment)
        waves = triton.cdiv(programs * count, places) + 0.3 * triton.cdiv(programs * (count - 1), places)
        return (segment + 0.5) * waves

    return triton.cdiv(slab, min(range(1, min(slab, 16) + 1), key=cost))


def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


def backward(
    dy: Tensor, dvariance: Tensor | None, dfinal: Tensor | None, q: Tensor, k: Tensor, v: Tensor, b: Tensor,
    table: Decays, prior: Tensor, starts: Tensor, length: int,
) -> tuple[Tensor, ...]:
    """Gradients of q, k, v, b, log_decay, prior and of the initial state (as [B, H, 2, V, K]).

    ``dfinal`` is the gradient of the final state as [B, 2, H, V, K]; ``starts`` and ``length`` are the forward pass's.
    """
    batch, tokens, heads, value_dim = v.shape
    groups, key_dim = k.shape[2:]
    device = v.device
    # several entries are read as one integer
    dy, q, k, v, b = (x if x.data_ptr() % 16 == 0 else x.clone() for x in (dy, q, k, v, b))
    tiling = backward_tiling(key_dim, value_dim, key_dim % 4 == 0 and q.element_size() == k.element_size() == 2)
    blocks = tiling.blocks(value_dim)
    chunks = triton.cdiv(tokens, CHUNK)
    padded = chunks * CHUNK
    slab = slab_chunks(batch, tokens, heads, key_dim, value_dim, tiling, length)
    segment = segment_chunks(batch * heads * blocks, tiling, slab, _processors(device))
    segments = triton.cdiv(slab, segment)
    size = 2 * value_dim * key_dim
    exact = precision(q, k, v, b) != "tf32"

    dq, dk, dv, db = (torch.empty_like(x) for x in (q, k, v, b))
    dg = torch.empty(batch, tokens, heads, blocks * tiling.warps, dtype=torch.float32, device=device)
    dprior = torch.zeros(triton.cdiv(chunks, slab), batch, heads, segments * blocks, dtype=torch.float32, device=device)
    edge = state_by_head(dfinal)
    if edge is None:
        edge = torch.zeros(batch, heads, 2, value_dim, key_dim, dtype=torch.float32, device=device)
    elif dfinal is not None and edge.data_ptr() == dfinal.data_ptr():
        edge = edge.clone()
    # what the products give, then the scratch of the walks
    scratch = batch * heads * slab * (CHUNK // BLOCK) * size
    states = torch.empty(scratch + batch * heads * segments * SLOTS * size, dtype=torch.float32, device=device)
    partial = torch.empty(batch * slab * CHUNK * heads * blocks * 2 * key_dim, dtype=torch.float32, device=device)
    shape = {"K": key_dim, "V": value_dim, "ROWS": tiling.rows, "WIDTH": tiling.width, "PARTS": tiling.parts}
    options = {
        "MASK_V": value_dim % tiling.rows != 0, "MASK_K": key_dim != tiling.width * tiling.parts, "CHUNK": CHUNK,
        "BLOCK": BLOCK, "EXACT": exact,
        "VARIANCE": dvariance is not None, "ASSEMBLY": not INTERPRETED, "num_warps": tiling.warps, **OPTIONS,
        **sectors(max(key_dim, tiling.rows), q, k, v, b, dy),
    }
    spread = dy if dvariance is None else dvariance
    for i, first in reversed(list(enumerate(range(0, chunks, slab)))):
        count = min(slab, chunks - first)
        here = triton.cdiv(count, segment)
        states_between(k, v, b, table, starts, states, length, first // length, count, BLOCK, None if exact else prior)
        adjoints = edge
        if here > 1:
            adjoints = torch.empty(batch, heads, here, 2, value_dim, key_dim, dtype=torch.float32, device=device)
            gains = torch.empty(batch, heads, here, dtype=torch.float64, device=device)
            _inflow_kernel[(blocks, here - 1, batch * heads)](
                q, k, v, b, dy, spread, table.each, table.total, prior, states, adjoints, gains, tokens, heads, groups,
                here, first, count, segment, padded, **shape, AHEAD=AHEAD, MASK_T=False, **options,
            )
            scan(edge, adjoints, gains, reverse=True)
        adjoint_kernel[(blocks, here, batch * heads)](
            q, k, v, b, dy, spread, table.each, table.lost, prior, states, scratch, adjoints, edge, partial, dv, db, dg,
            dprior[i], tokens, heads, groups, here, first, count, segment, padded, **shape, WARPS=tiling.warps,
            MASK_T=tokens % BLOCK != 0, maxnreg=tiling.registers, **options,
        )
        keys = triton.next_power_of_2(key_dim)
        rows = max(1, 1024 // keys)
        _gather_kernel[(triton.cdiv(count * CHUNK, rows), groups, batch)](
            partial, dq, dk, tokens, groups, first * CHUNK, count * CHUNK,
            K=key_dim, KEYS=keys, TERMS=heads // groups * blocks, TOKENS=rows,
        )
    return dq, dk, dv, db, dg.sum(-1), dprior.sum((0, 1, 3)).to(prior.dtype), edge
