"""The backward walk of Palimpsa in Triton: adjoints of the states, and every gradient but the sums over programs.

See :mod:`.triton_backward` for the equations and for what is kept where.
"""

# ruff: noqa: RUF005 - Triton's frontend knows no starred tuples
from __future__ import annotations

import triton
import triton.language as tl

from .triton_common import load_state, load_vector, reciprocal, store_state, touch
from .triton_sums import over_keys, over_lanes, over_rows, sum_rows


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
def _load_rows(
    pointer, stride, first, t, T, V: tl.constexpr, ROWS: tl.constexpr, STRIDE: tl.constexpr, MASK_V: tl.constexpr,
    MASK_T: tl.constexpr,
):
    """A block's values of 4 tokens in float32, each [ROWS, 1] in the order of a tile's rows.

    The rows that one thread holds lie STRIDE apart in a tile and next to each other in memory.
    """
    OWN: tl.constexpr = ROWS // STRIDE
    TYPE: tl.constexpr = pointer.dtype.element_ty
    rows = ()
    if TYPE.primitive_bitwidth == 16 and (OWN == 2 or OWN == 4) and V % OWN == 0:
        for pair in tl.static_range(0, 4, 2):
            x = _integers(pointer + pair * stride, stride, first, t + pair, T, V, STRIDE, OWN, MASK_V, MASK_T)
            for u in tl.static_range(2):
                rows = rows + (tl.reshape(tl.trans(_entries(x[u], OWN, TYPE)), (ROWS, 1)),)
    else:
        index = first + tl.arange(0, STRIDE)[:, None] * OWN + tl.arange(0, OWN)[None, :]
        for u in tl.static_range(4):
            x = load_vector(pointer + u * stride, index, V, t + u, T, MASK_V, MASK_T)
            rows = rows + (tl.reshape(tl.trans(x), (ROWS, 1)),)
    return rows


@triton.jit
def _load_keys(
    pointer, stride, first, t, T, K: tl.constexpr, WIDTH: tl.constexpr, MASK_T: tl.constexpr, MASK_K: tl.constexpr
):
    """A part's keys or queries of 4 tokens in float32, each [1, WIDTH]."""
    TYPE: tl.constexpr = pointer.dtype.element_ty
    keys = ()
    if TYPE.primitive_bitwidth == 16 and K % 4 == 0:
        for pair in tl.static_range(0, 4, 2):
            x = _integers(pointer + pair * stride, stride, first, t + pair, T, K, WIDTH // 4, 4, MASK_K, MASK_T)
            for u in tl.static_range(2):
                keys = keys + (tl.reshape(_entries(x[u], 4, TYPE), (1, WIDTH)),)
    else:
        index = first + tl.arange(0, WIDTH)
        for u in tl.static_range(4):
            keys = keys + (load_vector(pointer + u * stride, index, K, t + u, T, MASK_K, MASK_T)[None, :],)
    return keys


@triton.jit
def _write(
    M, E, k, v, b, decay, t, at_k, at_v, T, H, G, first,
    K: tl.constexpr, V: tl.constexpr, ROWS: tl.constexpr, STRIDE: tl.constexpr, WIDTH: tl.constexpr,
    PARTS: tl.constexpr, MASK_T: tl.constexpr, MASK_V: tl.constexpr, MASK_K: tl.constexpr,
):
    """The state 4 tokens later. ``decay``, ``at_k`` and ``at_v`` stand at token t."""
    # writes decay to the end at once: one multiplication and four fused ones an element, instead of eight in all
    v4 = _load_rows(v + at_v, H * V, first, t, T, V, ROWS, STRIDE, MASK_V, MASK_T)
    b4 = _load_rows(b + at_v, H * V, first, t, T, V, ROWS, STRIDE, MASK_V, MASK_T)
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
        ks = _load_keys(k + at_k, G * K, n * WIDTH, t, T, K, WIDTH, MASK_T, MASK_K)
        m = M[n] * gain
        e = E[n] * gain
        for u in tl.static_range(4):
            m += vs[u] * ks[u]
            e += bs[u] * (ks[u] * ks[u])
        M_next = M_next + (m,)
        E_next = E_next + (e,)
    return M_next, E_next


@triton.jit
def _load_tile(pointer, rows, columns, K: tl.constexpr, V: tl.constexpr, MASK_V: tl.constexpr, MASK_K: tl.constexpr):
    """One tile of M and of E in a state [2, V, K]."""
    offsets = rows[:, None] * K + columns[None, :]
    if MASK_V or MASK_K:
        inside = (rows < V)[:, None] & (columns < K)[None, :]
        M = tl.load(pointer + offsets, mask=inside, other=0.0, cache_modifier=".cg")
        E = tl.load(pointer + V * K + offsets, mask=inside, other=0.0, cache_modifier=".cg")
    else:
        M = tl.load(pointer + offsets, cache_modifier=".cg")
        E = tl.load(pointer + V * K + offsets, cache_modifier=".cg")
    return M, E


@triton.jit(do_not_specialize=["T", "H", "G", "S", "first", "count", "length", "padded"])
def adjoint_kernel(
    q, k, v, b, dy, dvariance, decay, lost, prior, states, scratch, adjoints, entering,
    dqk, dv, db, dg, dprior, T, H, G, S, first, count, length, padded,
    K: tl.constexpr, V: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, PARTS: tl.constexpr,
    STRIDE: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr, SECTOR: tl.constexpr, SECTORS: tl.constexpr,
    MASK_T: tl.constexpr, MASK_V: tl.constexpr, MASK_K: tl.constexpr, VARIANCE: tl.constexpr, ASSEMBLY: tl.constexpr,
):
    LANES: tl.constexpr = WIDTH // 4
    SIZE: tl.constexpr = 2 * V * K
    block_v = tl.program_id(0)
    blocks_v = tl.num_programs(0)
    segment = tl.program_id(1)
    bh = tl.program_id(2).to(tl.int64)
    batch = bh // H
    h = bh % H
    hk = h // (H // G)
    # a thread's rows, STRIDE apart in a tile, are next to each other in memory
    rows = block_v * ROWS + (tl.arange(0, ROWS) % STRIDE) * (ROWS // STRIDE) + tl.arange(0, ROWS) // STRIDE
    keys = tl.arange(0, WIDTH)
    threads_rows = tl.arange(0, STRIDE)
    # 4 tokens as [2, 2], after another axis; the gradients of q and of k for 4 tokens as [8, 1]
    steps = tl.reshape(tl.arange(0, 4), (1, 2, 2))
    slots = tl.arange(0, 8)[:, None]
    from_k = batch * T * G * K + hk * K
    from_v = batch * T * H * V + h * V
    first_v = block_v * ROWS
    last_v = min(V, first_v + ROWS)
    used = tl.zeros((CHUNK, SECTORS), tl.float32)
    used_block = tl.zeros((BLOCK, SECTORS), tl.float32)
    p = tl.load(prior + h).to(tl.float32)
    edge = adjoints + (bh * S + segment) * SIZE
    LM, LE = load_state(edge, rows, keys, K, V, WIDTH, PARTS, MASK_V, MASK_K)
    a_after = 1.0
    dI = tl.zeros((STRIDE, LANES), tl.float32)
    own = scratch.to(tl.int64) + (bh * S + segment) * ((CHUNK // BLOCK + BLOCK // 4 - 2) * SIZE)
    begin = segment * length
    for i_chunk in range(min(length, count - begin)):
        chunk = begin + min(length, count - begin) - 1 - i_chunk
        t_chunk = (first + chunk) * CHUNK
        at_chunk = (bh * count + chunk) * SIZE
        blocks = tl.cdiv(min(T - t_chunk, CHUNK), BLOCK)
        # what the walks over this chunk read comes into the nearest cache, which holds no more, and what the steps read
        # besides, block by block; the next chunk's rows come out of the farthest memory
        near = t_chunk + tl.arange(0, CHUNK)
        used += touch(k + from_k, near, T, G * K, 0, K, SECTOR, SECTORS)
        used += touch(v + from_v, near, T, H * V, first_v, last_v, SECTOR, SECTORS)
        used += touch(b + from_v, near, T, H * V, first_v, last_v, SECTOR, SECTORS)
        near -= CHUNK
        used += touch(k + from_k, near, T, G * K, 0, K, SECTOR, SECTORS, True)
        used += touch(q + from_k, near, T, G * K, 0, K, SECTOR, SECTORS, True)
        used += touch(v + from_v, near, T, H * V, first_v, last_v, SECTOR, SECTORS, True)
        used += touch(b + from_v, near, T, H * V, first_v, last_v, SECTOR, SECTORS, True)
        used += touch(dy + from_v, near, T, H * V, first_v, last_v, SECTOR, SECTORS, True)
        M, E = load_state(states + at_chunk, rows, keys, K, V, WIDTH, PARTS, MASK_V, MASK_K)
        for i in range((blocks - 1) * (BLOCK // 4)):
            t = t_chunk + i * 4
            at_v = ((batch * T + t) * H + h) * V
            at_k = ((batch * T + t) * G + hk) * K
            M, E = _write(M, E, k, v, b, decay + bh * padded + t, t, at_k, at_v, T, H, G, first_v,
                          K, V, ROWS, STRIDE, WIDTH, PARTS, MASK_T, MASK_V, MASK_K)
            if (i + 1) % (BLOCK // 4) == 0:
                place = states + own + (i // (BLOCK // 4)) * SIZE
                store_state(place, M, E, rows, keys, K, V, WIDTH, PARTS, MASK_V, MASK_K)
        tl.debug_barrier()
        for i_block in range(blocks):
            block = blocks - 1 - i_block
            steps_block = t_chunk + block * BLOCK + tl.arange(0, BLOCK)
            used_block += touch(q + from_k, steps_block, T, G * K, 0, K, SECTOR, SECTORS)
            used_block += touch(dy + from_v, steps_block, T, H * V, first_v, last_v, SECTOR, SECTORS)
            at_block = tl.where(block == 0, at_chunk, own + (block - 1) * SIZE)
            M, E = load_state(states + at_block, rows, keys, K, V, WIDTH, PARTS, MASK_V, MASK_K)
            for i in range(BLOCK // 4 - 1):
                t = t_chunk + block * BLOCK + i * 4
                at_v = ((batch * T + t) * H + h) * V
                at_k = ((batch * T + t) * G + hk) * K
                M, E = _write(M, E, k, v, b, decay + bh * padded + t, t, at_k, at_v, T, H, G, first_v,
                              K, V, ROWS, STRIDE, WIDTH, PARTS, MASK_T, MASK_V, MASK_K)
                place = states + own + (CHUNK // BLOCK - 1 + i) * SIZE
                store_state(place, M, E, rows, keys, K, V, WIDTH, PARTS, MASK_V, MASK_K)
            tl.debug_barrier()
            last = states + own + (CHUNK // BLOCK + BLOCK // 4 - 3) * SIZE
            m0, e0 = _load_tile(last, rows, keys, K, V, MASK_V, MASK_K)
            for i in range(BLOCK // 4 - 1, -1, -1):
                at_step = tl.where(i == 0, at_block, own + (CHUNK // BLOCK - 2 + i) * SIZE)
                at_next = tl.where(i <= 1, at_block, own + (CHUNK // BLOCK - 3 + i) * SIZE)
                t = t_chunk + block * BLOCK + i * 4
                at_v = ((batch * T + t) * H + h) * V
                at_k = ((batch * T + t) * G + hk) * K
                decays = decay + bh * padded + t
                a = (tl.load(decays), tl.load(decays + 1), tl.load(decays + 2), tl.load(decays + 3))
                a_next = (a[1], a[2], a[3], a_after)
                a_after = a[0]
                LM_next = ()
                LE_next = ()
                dv_sum = ()
                db_sum = ()
                dg_sum = ()
                for n in tl.static_range(PARTS):
                    columns = n * WIDTH + keys
                    ks = _load_keys(k + at_k, G * K, n * WIDTH, t, T, K, WIDTH, MASK_T, MASK_K)
                    vs = _load_rows(v + at_v, H * V, first_v, t, T, V, ROWS, STRIDE, MASK_V, MASK_T)
                    bs = _load_rows(b + at_v, H * V, first_v, t, T, V, ROWS, STRIDE, MASK_V, MASK_T)
                    qs = _load_keys(q + at_k, G * K, n * WIDTH, t, T, K, WIDTH, MASK_T, MASK_K)
                    ds = _load_rows(dy + at_v, H * V, first_v, t, T, V, ROWS, STRIDE, MASK_V, MASK_T)
                    if VARIANCE:
                        ss = _load_rows(dvariance + at_v, H * V, first_v, t, T, V, ROWS, STRIDE, MASK_V, MASK_T)
                    # the states after 2, 3 and 4 tokens; after 1 only when it is needed, to spare registers
                    m2 = m0 * (a[0] * a[1]) + (vs[0] * a[1]) * ks[0] + vs[1] * ks[1]
                    e2 = e0 * (a[0] * a[1]) + (bs[0] * a[1]) * (ks[0] * ks[0]) + bs[1] * (ks[1] * ks[1])
                    m3 = m2 * a[2] + vs[2] * ks[2]
                    e3 = e2 * a[2] + bs[2] * (ks[2] * ks[2])
                    lm = LM[n]
                    le = LE[n]
                    dqs = ()
                    dks = ()
                    dvs = ()
                    dbs = ()
                    dgs = ()
                    for u in tl.static_range(3, -1, -1):
                        if u == 3:
                            m = m3 * a[3] + vs[3] * ks[3]
                            importance = e3 * a[3] + (bs[3] * (ks[3] * ks[3]) + p)
                            m_before = m3
                            e_before = e3
                        if u == 2:
                            # again, rather than held since the products above: registers are short
                            m0, e0 = _load_tile(states + at_step, rows, columns, K, V, MASK_V, MASK_K)
                            m = m3
                            importance = e3 + p
                            m_before = m2
                            e_before = e2
                        if u == 1:
                            m = m2
                            importance = e2 + p
                            m_before = m0 * a[0] + vs[0] * ks[0]
                            e_before = e0 * a[0] + bs[0] * (ks[0] * ks[0])
                        if u == 0:
                            m = m_before
                            importance = e_before + p
                            m_before = m0
                            e_before = e0
                        r = reciprocal(importance, ASSEMBLY)
                        mu = m * r
                        w = (ds[u] * qs[u]) * r
                        wm = w * mu
                        read = ds[u] * mu
                        if VARIANCE:
                            sr = (ss[u] * qs[u]) * r
                            wm += sr * (qs[u] * r)
                            read += 2.0 * sr
                        lm = lm * a_next[u] + w
                        le = le * a_next[u] - wm
                        dI -= over_rows(over_keys(wm, ROWS, LANES), ROWS, STRIDE, LANES)
                        dqs = (over_rows(read, ROWS, STRIDE, WIDTH),) + dqs
                        from_b = over_rows(bs[u] * le, ROWS, STRIDE, WIDTH)
                        dks = (over_rows(vs[u] * lm, ROWS, STRIDE, WIDTH) + (2.0 * ks[u]) * from_b,) + dks
                        to_v = over_keys(lm * ks[u], ROWS, LANES)
                        to_b = over_keys(le * (ks[u] * ks[u]), ROWS, LANES)
                        kept = over_keys(lm * m_before, ROWS, LANES) + over_keys(le * e_before, ROWS, LANES)
                        to_g = over_rows(kept, ROWS, STRIDE, LANES) * a[u]
                        if n > 0:
                            to_v += dv_sum[u]
                            to_b += db_sum[u]
                            to_g += dg_sum[u]
                        dvs = (to_v,) + dvs
                        dbs = (to_b,) + dbs
                        dgs = (to_g,) + dgs
                    dv_sum = dvs
                    db_sum = dbs
                    dg_sum = dgs
                    LM_next = LM_next + (lm,)
                    LE_next = LE_next + (le,)
                    # the next tile's states, before the sums across threads, which would hold the loads back
                    if n + 1 < PARTS:
                        m0, e0 = _load_tile(states + at_step, rows, columns + WIDTH, K, V, MASK_V, MASK_K)
                    else:
                        m0, e0 = _load_tile(states + at_next, rows, keys, K, V, MASK_V, MASK_K)
                    token = (batch * (count * CHUNK) + t - first * CHUNK + slots % 4) * H + h
                    place = ((token * blocks_v + block_v) * 2 + slots // 4) * K + columns[None, :]
                    if MASK_K:
                        tl.store(dqk + place, sum_rows(dqs, dks, STRIDE, LANES), mask=(columns < K)[None, :])
                    else:
                        tl.store(dqk + place, sum_rows(dqs, dks, STRIDE, LANES))
                LM = LM_next
                LE = LE_next
                place = at_v + steps * H * V + rows[:, None, None]
                dv_all = over_lanes(dv_sum, ROWS, LANES).to(dv.dtype.element_ty)
                db_all = over_lanes(db_sum, ROWS, LANES).to(db.dtype.element_ty)
                # the decay's gradient is left as a sum a thread row
                place_g = ((batch * T + t + steps) * H + h) * blocks_v + block_v
                place_g = place_g * STRIDE + threads_rows[:, None, None]
                dg_all = over_lanes(dg_sum, STRIDE, LANES)
                if MASK_V or MASK_T:
                    inside = (rows < V)[:, None, None] & (t + steps < T)
                    tl.store(dv + place, dv_all, mask=inside)
                    tl.store(db + place, db_all, mask=inside)
                    tl.store(dg + place_g, dg_all, mask=(threads_rows >= 0)[:, None, None] & (t + steps < T))
                else:
                    tl.store(dv + place, dv_all)
                    tl.store(db + place, db_all)
                    tl.store(dg + place_g, dg_all)
            tl.debug_barrier()
        # what the decays lost when they were rounded; nothing for what arose in this chunk, whose share is 64 roundings
        back = tl.load(lost + bh * (padded // CHUNK) + first + chunk)
        LM_next = ()
        LE_next = ()
        for n in tl.static_range(PARTS):
            LM_next = LM_next + (LM[n] + LM[n] * back,)
            LE_next = LE_next + (LE[n] + LE[n] * back,)
        LM = LM_next
        LE = LE_next
        tl.debug_barrier()
    tl.store(dprior + (bh * S + segment) * blocks_v + block_v, tl.sum(tl.sum(dI, 1), 0))
    if T < 0:
        # never: it keeps the early reads alive
        tl.store(dg + tl.arange(0, CHUNK)[:, None] * SECTORS + tl.arange(0, SECTORS)[None, :], used)
        tl.store(dg + tl.arange(0, BLOCK)[:, None] * SECTORS + tl.arange(0, SECTORS)[None, :], used_block)
    if segment == 0:
        LM_next = ()
        LE_next = ()
        for n in tl.static_range(PARTS):
            LM_next = LM_next + (LM[n] * a_after,)
            LE_next = LE_next + (LE[n] * a_after,)
        store_state(entering + bh * SIZE, LM_next, LE_next, rows, keys, K, V, WIDTH, PARTS, MASK_V, MASK_K)
