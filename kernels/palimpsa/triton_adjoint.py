"""The backward walk of Palimpsa in Triton: adjoints of the states, and every gradient but the sums over programs.

See :mod:`.triton_backward` for the equations and for what is kept where.
"""

# ruff: noqa: RUF005 - Triton's frontend knows no starred tuples
from __future__ import annotations

import triton
import triton.language as tl

from .triton_common import reciprocal, touch
from .triton_sums import over_both, over_keys, over_rows, over_warps, sum_keys, sum_rows
from .triton_tiles import excess, load_keys, load_rows, load_tile, load_tiles, store_tiles, write


@triton.jit(do_not_specialize=["T", "H", "G", "S", "first", "count", "length", "padded"])
def adjoint_kernel(
    q, k, v, b, dy, dvariance, decay, lost, prior, states, scratch, adjoints, entering,
    dqk, dv, db, dg, dprior, T, H, G, S, first, count, length, padded,
    K: tl.constexpr, V: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, PARTS: tl.constexpr,
    WARPS: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr, SECTOR: tl.constexpr, SECTORS: tl.constexpr,
    MASK_T: tl.constexpr, MASK_V: tl.constexpr, MASK_K: tl.constexpr, EXACT: tl.constexpr, VARIANCE: tl.constexpr,
    ASSEMBLY: tl.constexpr,
):
    # under half precision E stands for I = p + E, here and in the states: an addition less for every element
    # a tile is [R, WARPS, OWN, C]: see triton_sums
    C: tl.constexpr = WIDTH // WARPS
    LANES: tl.constexpr = C // 4
    R: tl.constexpr = 32 // LANES
    OWN: tl.constexpr = ROWS // R
    SIZE: tl.constexpr = 2 * V * K
    block_v = tl.program_id(0)
    blocks_v = tl.num_programs(0)
    segment = tl.program_id(1)
    bh = tl.program_id(2).to(tl.int64)
    batch = bh // H
    h = bh % H
    hk = h // (H // G)
    first_v = block_v * ROWS
    rows = tl.arange(0, R)[:, None, None, None] * OWN + tl.arange(0, OWN)[None, None, :, None] + first_v
    keys = tl.arange(0, WARPS)[None, :, None, None] * C + tl.arange(0, C)[None, None, None, :]
    # the gradients of q and of k for 4 tokens, where sum_rows leaves them
    if R == 4:
        slot = tl.arange(0, R)[:, None, None, None]
        slot = slot // 2 * 4 + slot % 2 * 2 + tl.arange(0, 2)[None, None, :, None]
        slot_keys = keys
    elif R == 8:
        slot = tl.arange(0, R)[:, None, None, None]
        slot_keys = keys
    else:
        slot = tl.arange(0, R)[None, :, None, None]
        slot_keys = tl.arange(0, LANES)[:, None, None, None] * 4 + tl.arange(0, WARPS)[None, None, :, None] * C
        slot_keys = slot_keys + slot % 2 * 2 + tl.arange(0, 2)[None, None, None, :]
        slot = slot // 2
    # the gradients of v and of b where sum_keys leaves them, those of the decays as over_warps does
    rows_v = first_v + tl.arange(0, ROWS)[:, None]
    slots_v = tl.arange(0, 8)[None, :]
    steps = tl.reshape(tl.arange(0, 4), (2, 2, 1))
    warps = tl.arange(0, WARPS)[None, None, :]
    from_k = batch * T * G * K + hk * K
    from_v = batch * T * H * V + h * V
    last_v = min(V, first_v + ROWS)
    used = tl.zeros((CHUNK, SECTORS), tl.float32)
    used_block = tl.zeros((BLOCK, SECTORS), tl.float32)
    p = tl.load(prior + h).to(tl.float32)
    edge = adjoints + (bh * S + segment) * SIZE
    LM, LE = load_tiles(edge, rows, keys, K, V, WIDTH, PARTS, MASK_V, MASK_K, True)
    a_after = 1.0
    dI = tl.zeros((R, WARPS, LANES), tl.float32)
    # a thread's sum of LE at the token after
    sum_after = tl.zeros((R, WARPS, LANES), tl.float32)
    if not EXACT:
        for n in tl.static_range(PARTS):
            sum_after += over_both(LE[n])
    own = scratch.to(tl.int64) + (bh * S + segment) * ((BLOCK // 4 - 1) * SIZE)
    begin = segment * length
    for i_chunk in range(min(length, count - begin)):
        chunk = begin + min(length, count - begin) - 1 - i_chunk
        t_chunk = (first + chunk) * CHUNK
        at_chunk = (bh * count + chunk) * (CHUNK // BLOCK * SIZE)
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
        for i_block in range(blocks):
            block = blocks - 1 - i_block
            steps_block = t_chunk + block * BLOCK + tl.arange(0, BLOCK)
            used_block += touch(q + from_k, steps_block, T, G * K, 0, K, SECTOR, SECTORS)
            used_block += touch(dy + from_v, steps_block, T, H * V, first_v, last_v, SECTOR, SECTORS)
            at_block = at_chunk + block * SIZE
            M, E = load_tiles(states + at_block, rows, keys, K, V, WIDTH, PARTS, MASK_V, MASK_K, EXACT)
            for i in range(BLOCK // 4 - 1):
                t = t_chunk + block * BLOCK + i * 4
                at_v = ((batch * T + t) * H + h) * V
                at_k = ((batch * T + t) * G + hk) * K
                M, E = write(M, E, k, v, b, decay + bh * padded + t, p, t, at_k, at_v, T, H, G, first_v,
                              K, V, OWN, R, WIDTH, WARPS, PARTS, MASK_T, MASK_V, MASK_K, EXACT)
                place = states + own + i * SIZE
                store_tiles(place, M, E, rows, keys, K, V, WIDTH, PARTS, MASK_V, MASK_K)
            tl.debug_barrier()
            m0 = M[0]
            e0 = E[0]
            for i in range(BLOCK // 4 - 1, -1, -1):
                at_step = tl.where(i == 0, at_block, own + (i - 1) * SIZE)
                at_next = tl.where(i <= 1, at_block, own + (i - 2) * SIZE)
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
                sums = ()
                for n in tl.static_range(PARTS):
                    columns = n * WIDTH + keys
                    ks = load_keys(k + at_k, G * K, n * WIDTH, t, T, K, WIDTH, WARPS, MASK_T, MASK_K)
                    vs = load_rows(v + at_v, H * V, first_v, t, T, V, OWN, R, MASK_V, MASK_T)
                    bs = load_rows(b + at_v, H * V, first_v, t, T, V, OWN, R, MASK_V, MASK_T)
                    qs = load_keys(q + at_k, G * K, n * WIDTH, t, T, K, WIDTH, WARPS, MASK_T, MASK_K)
                    ds = load_rows(dy + at_v, H * V, first_v, t, T, V, OWN, R, MASK_V, MASK_T)
                    if VARIANCE:
                        ss = load_rows(dvariance + at_v, H * V, first_v, t, T, V, OWN, R, MASK_V, MASK_T)
                    # the states after 2, 3 and 4 tokens; after 1 only when it is needed, to spare registers
                    m2 = m0 * (a[0] * a[1]) + (vs[0] * a[1]) * ks[0] + vs[1] * ks[1]
                    m3 = m2 * a[2] + vs[2] * ks[2]
                    e2 = e0 * (a[0] * a[1])
                    if not EXACT:
                        e2 += (1.0 - a[0] * a[1]) * p
                    e2 += (bs[0] * a[1]) * (ks[0] * ks[0])
                    e2 += bs[1] * (ks[1] * ks[1])
                    e3 = excess(e2, a[2], bs[2], ks[2], p, EXACT)
                    lm = LM[n]
                    le = LE[n]
                    dqs = ()
                    dks = ()
                    dvs = ()
                    dbs = ()
                    dgs = ()
                    les = ()
                    for u in tl.static_range(3, -1, -1):
                        if u == 3:
                            m = m3 * a[3] + vs[3] * ks[3]
                            e = excess(e3, a[3], bs[3], ks[3], p, EXACT)
                            m_before = m3
                            e_before = e3
                        if u == 2:
                            # again, rather than held since the products above: registers are short
                            m0, e0 = load_tile(states + at_step, rows, columns, K, V, MASK_V, MASK_K, EXACT)
                            m = m3
                            e = e3
                            m_before = m2
                            e_before = e2
                        if u == 1:
                            m = m2
                            e = e2
                            m_before = m0 * a[0] + vs[0] * ks[0]
                            e_before = excess(e0, a[0], bs[0], ks[0], p, EXACT)
                        if u == 0:
                            m = m_before
                            e = e_before
                            m_before = m0
                            e_before = e0
                        r = reciprocal(e + p if EXACT else e, ASSEMBLY)
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
                        sum_u = over_both(wm if EXACT else le)
                        dqs = (over_rows(read),) + dqs
                        from_b = (2.0 * tl.reshape(ks[u], (1, WARPS, C))) * over_rows(bs[u] * le)
                        dks = (over_rows(vs[u] * lm) + from_b,) + dks
                        to_v = over_keys(lm * ks[u])
                        to_b = over_keys(le * (ks[u] * ks[u]))
                        to_g = over_both(lm * m_before)
                        to_g += over_both(le * e_before)
                        if n > 0:
                            to_v += dv_sum[u]
                            to_b += db_sum[u]
                            to_g += dg_sum[u]
                            sum_u += sums[u]
                        dvs = (to_v,) + dvs
                        dbs = (to_b,) + dbs
                        dgs = (to_g,) + dgs
                        les = (sum_u,) + les
                    dv_sum = dvs
                    db_sum = dbs
                    dg_sum = dgs
                    sums = les
                    LM_next = LM_next + (lm,)
                    LE_next = LE_next + (le,)
                    # the next tile's states, before the sums across warps, which would hold the loads back
                    if n + 1 < PARTS:
                        m0, e0 = load_tile(states + at_step, rows, columns + WIDTH, K, V, MASK_V, MASK_K, EXACT)
                    else:
                        m0, e0 = load_tile(states + at_next, rows, keys, K, V, MASK_V, MASK_K, EXACT)
                    token = (batch * (count * CHUNK) + t - first * CHUNK + slot % 4) * H + h
                    place = ((token * blocks_v + block_v) * 2 + slot // 4) * K + n * WIDTH + slot_keys
                    both = sum_rows(dqs, dks, R, WARPS, LANES)
                    if MASK_K:
                        tl.store(dqk + place, both, mask=n * WIDTH + slot_keys < K)
                    else:
                        tl.store(dqk + place, both)
                LM = LM_next
                LE = LE_next
                dgs = ()
                for u in tl.static_range(3, -1, -1):
                    if EXACT:
                        dI -= sums[u]
                        dgs = (dg_sum[u] * a[u],) + dgs
                    else:
                        # <LE, E> = <LE, I> - p sum LE, and what LE gained at this token is what the prior gets
                        dgs = ((dg_sum[u] - sums[u] * p) * a[u],) + dgs
                        dI += sums[u] - sum_after * a_next[u]
                        sum_after = sums[u]
                sums_v = sum_keys(dv_sum, db_sum, R, WARPS, OWN, LANES)
                place = at_v + slots_v // 2 * H * V + rows_v
                inside = rows_v >= 0
                if MASK_V or MASK_T:
                    inside = (rows_v < V) & (t + slots_v // 2 < T)
                if dv.dtype == db.dtype:
                    place = tl.where(slots_v % 2 == 0, dv + place, db + place)
                    tl.store(place, sums_v.to(dv.dtype.element_ty), mask=inside)
                else:
                    tl.store(dv + place, sums_v.to(dv.dtype.element_ty), mask=inside & (slots_v % 2 == 0))
                    tl.store(db + place, sums_v.to(db.dtype.element_ty), mask=inside & (slots_v % 2 == 1))
                # the decay's gradient is left as a sum a warp
                place_g = (((batch * T + t + steps) * H + h) * blocks_v + block_v) * WARPS + warps
                dg_all = over_warps(dgs, R, WARPS, LANES)
                if MASK_T:
                    tl.store(dg + place_g, dg_all, mask=(warps >= 0) & (t + steps < T))
                else:
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
        sum_after += sum_after * back
        tl.debug_barrier()
    tl.store(dprior + (bh * S + segment) * blocks_v + block_v, tl.sum(tl.reshape(dI, (WARPS * 32,)), 0))
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
        store_tiles(entering + bh * SIZE, LM_next, LE_next, rows, keys, K, V, WIDTH, PARTS, MASK_V, MASK_K)
