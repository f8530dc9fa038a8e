"""The backward walk of Palimpsa in Triton: adjoints of the states, and every gradient but the sums over programs.

See :mod:`.triton_backward` for the equations and for what is kept where.
"""

# ruff: noqa: RUF005 - Triton's frontend knows no starred tuples
from __future__ import annotations

import triton
import triton.language as tl

from .triton_common import load_state, load_vector, reciprocal, store_state, touch


@triton.jit
def _write(
    M, E, k, v, b, decay, t, at_k, at_v, T, H, G, rows, keys,
    K: tl.constexpr, V: tl.constexpr, WIDTH: tl.constexpr, PARTS: tl.constexpr, COUNT: tl.constexpr,
    MASK_T: tl.constexpr, MASK_V: tl.constexpr, MASK_K: tl.constexpr,
):
    """The state COUNT tokens later. ``decay``, ``at_k`` and ``at_v`` stand at token t."""
    for u in tl.static_range(COUNT):
        a = tl.load(decay + u)
        vv = load_vector(v + at_v + u * H * V, rows, V, t + u, T, MASK_V, MASK_T)[:, None]
        bb = load_vector(b + at_v + u * H * V, rows, V, t + u, T, MASK_V, MASK_T)[:, None]
        M_next = ()
        E_next = ()
        for n in tl.static_range(PARTS):
            kk = load_vector(k + at_k + u * G * K, n * WIDTH + keys, K, t + u, T, MASK_K, MASK_T)[None, :]
            M_next = M_next + (M[n] * a + vv * kk,)
            E_next = E_next + (E[n] * a + bb * (kk * kk),)
        M = M_next
        E = E_next
    return M, E


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


@triton.jit
def _over_keys(x, ROWS: tl.constexpr, LANES: tl.constexpr):
    """[ROWS, WIDTH] -> [ROWS, LANES]: the sum of the 4 neighbours that one thread holds."""
    return tl.sum(tl.reshape(x, (ROWS, LANES, 4)), 2)


@triton.jit
def _over_rows(x, ROWS: tl.constexpr, STRIDE: tl.constexpr, WIDTH: tl.constexpr):
    """[ROWS, WIDTH] -> [STRIDE, WIDTH]: the sum of the rows that one thread holds."""
    return tl.sum(tl.reshape(x, (ROWS // STRIDE, STRIDE, WIDTH)), 0)


@triton.jit
def _stack(x):
    """4 tensors of one shape -> [..., 2, 2], so that one sum across threads serves 4 tokens."""
    return tl.join(tl.join(x[0], x[2]), tl.join(x[1], x[3]))


@triton.jit
def _sum_rows(x, y, STRIDE: tl.constexpr, LANES: tl.constexpr):
    """Two times 4 tensors [STRIDE, 4 LANES] -> their sums over rows, [8, 4 LANES], by one exchange among the warps.

    Neighbouring threads' entries are made neighbours first: in the memory that the warps exchange through, entries
    that one thread holds would otherwise lie between them, and all threads would hit one bank. A warp's own rows are
    summed apart: a sum over both at once has one thread of several store each value, in a branch.
    """
    OWN: tl.constexpr = 32 // LANES
    both = tl.join(tl.join(tl.join(x[0], y[0]), tl.join(x[2], y[2])), tl.join(tl.join(x[1], y[1]), tl.join(x[3], y[3])))
    both = tl.permute(tl.reshape(both, (STRIDE, LANES, 4, 8)), (0, 3, 2, 1))
    both = tl.sum(tl.reshape(both, (STRIDE // OWN, OWN, 32 * LANES)), 1)
    total = tl.reshape(tl.sum(both, 0), (8, 4, LANES))
    return tl.reshape(tl.permute(total, (0, 2, 1)), (8, 4 * LANES))


@triton.jit(do_not_specialize=["T", "H", "G", "S", "first", "count", "length", "padded"])
def adjoint_kernel(
    q, k, v, b, dy, dvariance, decay, prior, states, scratch, adjoints, entering,
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
    rows = block_v * ROWS + tl.arange(0, ROWS)
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
        # this chunk's rows into the nearest cache, the next chunk's out of the farthest
        for i in tl.static_range(2):
            near = t_chunk - i * CHUNK + tl.arange(0, CHUNK)
            used += touch(k + from_k, near, T, G * K, 0, K, SECTOR, SECTORS)
            used += touch(q + from_k, near, T, G * K, 0, K, SECTOR, SECTORS)
            used += touch(v + from_v, near, T, H * V, first_v, last_v, SECTOR, SECTORS)
            used += touch(b + from_v, near, T, H * V, first_v, last_v, SECTOR, SECTORS)
            used += touch(dy + from_v, near, T, H * V, first_v, last_v, SECTOR, SECTORS)
        M, E = load_state(states + at_chunk, rows, keys, K, V, WIDTH, PARTS, MASK_V, MASK_K)
        for i in range((blocks - 1) * (BLOCK // 4)):
            t = t_chunk + i * 4
            at_v = ((batch * T + t) * H + h) * V
            at_k = ((batch * T + t) * G + hk) * K
            M, E = _write(M, E, k, v, b, decay + bh * padded + t, t, at_k, at_v, T, H, G, rows, keys,
                          K, V, WIDTH, PARTS, 4, MASK_T, MASK_V, MASK_K)
            if (i + 1) % (BLOCK // 4) == 0:
                place = states + own + (i // (BLOCK // 4)) * SIZE
                store_state(place, M, E, rows, keys, K, V, WIDTH, PARTS, MASK_V, MASK_K)
        tl.debug_barrier()
        for i_block in range(blocks):
            block = blocks - 1 - i_block
            at_block = tl.where(block == 0, at_chunk, own + (block - 1) * SIZE)
            M, E = load_state(states + at_block, rows, keys, K, V, WIDTH, PARTS, MASK_V, MASK_K)
            for i in range(BLOCK // 4 - 1):
                t = t_chunk + block * BLOCK + i * 4
                at_v = ((batch * T + t) * H + h) * V
                at_k = ((batch * T + t) * G + hk) * K
                M, E = _write(M, E, k, v, b, decay + bh * padded + t, t, at_k, at_v, T, H, G, rows, keys,
                              K, V, WIDTH, PARTS, 4, MASK_T, MASK_V, MASK_K)
                place = states + own + (CHUNK // BLOCK - 1 + i) * SIZE
                store_state(place, M, E, rows, keys, K, V, WIDTH, PARTS, MASK_V, MASK_K)
            tl.debug_barrier()
            for i in range(BLOCK // 4 - 1, -1, -1):
                at_step = tl.where(i == 0, at_block, own + (CHUNK // BLOCK - 2 + i) * SIZE)
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
                m0, e0 = _load_tile(states + at_step, rows, keys, K, V, MASK_V, MASK_K)
                for n in tl.static_range(PARTS):
                    columns = n * WIDTH + keys
                    ks = ()
                    vs = ()
                    bs = ()
                    for u in tl.static_range(4):
                        ks = ks + (load_vector(k + at_k + u * G * K, columns, K, t + u, T, MASK_K, MASK_T)[None, :],)
                        vs = vs + (load_vector(v + at_v + u * H * V, rows, V, t + u, T, MASK_V, MASK_T)[:, None],)
                        bs = bs + (load_vector(b + at_v + u * H * V, rows, V, t + u, T, MASK_V, MASK_T)[:, None],)
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
                            e = e3 * a[3] + bs[3] * (ks[3] * ks[3])
                            m_before = m3
                            e_before = e3
                        if u == 2:
                            m = m3
                            e = e3
                            m_before = m2
                            e_before = e2
                        if u == 1:
                            m = m2
                            e = e2
                            m_before = m0 * a[0] + vs[0] * ks[0]
                            e_before = e0 * a[0] + bs[0] * (ks[0] * ks[0])
                        if u == 0:
                            m = m_before
                            e = e_before
                            m_before = m0
                            e_before = e0
                        qq = load_vector(q + at_k + u * G * K, columns, K, t + u, T, MASK_K, MASK_T)[None, :]
                        dd = load_vector(dy + at_v + u * H * V, rows, V, t + u, T, MASK_V, MASK_T)[:, None]
                        r = reciprocal(e + p, ASSEMBLY)
                        mu = m * r
                        w = (dd * qq) * r
                        wm = w * mu
                        read = dd * mu
                        if VARIANCE:
                            ss = load_vector(dvariance + at_v + u * H * V, rows, V, t + u, T, MASK_V, MASK_T)[:, None]
                            sr = (ss * qq) * r
                            wm += sr * (qq * r)
                            read += 2.0 * sr
                        lm = lm * a_next[u] + w
                        le = le * a_next[u] - wm
                        dI -= _over_rows(_over_keys(wm, ROWS, LANES), ROWS, STRIDE, LANES)
                        dqs = (_over_rows(read, ROWS, STRIDE, WIDTH),) + dqs
                        from_b = _over_rows(bs[u] * le, ROWS, STRIDE, WIDTH)
                        dks = (_over_rows(vs[u] * lm, ROWS, STRIDE, WIDTH) + (2.0 * ks[u]) * from_b,) + dks
                        to_v = _over_keys(lm * ks[u], ROWS, LANES)
                        to_b = _over_keys(le * (ks[u] * ks[u]), ROWS, LANES)
                        kept = _over_keys(lm * m_before, ROWS, LANES) + _over_keys(le * e_before, ROWS, LANES)
                        to_g = _over_rows(kept, ROWS, STRIDE, LANES) * a[u]
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
                    if n + 1 < PARTS:
                        # before the sums across threads, which would hold the loads back
                        m0, e0 = _load_tile(states + at_step, rows, columns + WIDTH, K, V, MASK_V, MASK_K)
                    token = (batch * (count * CHUNK) + t - first * CHUNK + slots % 4) * H + h
                    place = ((token * blocks_v + block_v) * 2 + slots // 4) * K + columns[None, :]
                    if MASK_K:
                        tl.store(dqk + place, _sum_rows(dqs, dks, STRIDE, LANES), mask=(columns < K)[None, :])
                    else:
                        tl.store(dqk + place, _sum_rows(dqs, dks, STRIDE, LANES))
                LM = LM_next
                LE = LE_next
                place = at_v + steps * H * V + rows[:, None, None]
                dv_all = tl.sum(_stack(dv_sum), 1).to(dv.dtype.element_ty)
                db_all = tl.sum(_stack(db_sum), 1).to(db.dtype.element_ty)
                # the decay's gradient is left as a sum a thread row
                place_g = ((batch * T + t + steps) * H + h) * blocks_v + block_v
                place_g = place_g * STRIDE + threads_rows[:, None, None]
                dg_all = tl.sum(_stack(dg_sum), 1)
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
        tl.debug_barrier()
    tl.store(dprior + (bh * S + segment) * blocks_v + block_v, tl.sum(tl.sum(dI, 1), 0))
    if T < 0:
        # never: it keeps the early reads alive
        tl.store(dg + tl.arange(0, CHUNK)[:, None] * SECTORS + tl.arange(0, SECTORS)[None, :], used)
    if segment == 0:
        LM_next = ()
        LE_next = ()
        for n in tl.static_range(PARTS):
            LM_next = LM_next + (LM[n] * a_after,)
            LE_next = LE_next + (LE[n] * a_after,)
        store_state(entering + bh * SIZE, LM_next, LE_next, rows, keys, K, V, WIDTH, PARTS, MASK_V, MASK_K)
