"""The delta rule's states at chunk boundaries, and what each chunk corrects in the state it meets.

Two operators that torch.compile does not look into, the scan and its adjoint: by a Triton kernel on CUDA (the state
stays in registers from chunk to chunk), in torch elsewhere, for float64, and under ``SURGERY_KERNELS=chunked``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..chunks import MAX_HEADS, fused, on_its_device
from ..operators import operator

MAX_KEY = 256  # a program of the kernels holds all rows of a state's columns


@operator("delta_states")
@on_its_device
def _forward(
    solve: Tensor, beta: Tensor, v: Tensor, k: Tensor, from_start: Tensor, to_end: Tensor, whole: Tensor, start: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """As :func:`delta_states`."""
    if _fused(k, whole):
        from .triton_states import scan

        return scan(solve, beta, v, k, from_start, to_end, whole, start)
    state, met, corrections = start, [], []
    keys, values = _by_head(k, v).to(start.dtype), v.transpose(2, 3).to(start.dtype)
    for n in range(k.shape[1]):
        met.append(state)
        error = beta[:, n, :, :, None] * (values[:, n] - from_start[:, n, :, :, None] * (keys[:, n] @ state))
        corrections.append(solve[:, n].to(start.dtype) @ error)
        # the decayed state is added elementwise: it never passes through a product of lower precision (TF32)
        written = keys[:, n].mT @ (to_end[:, n, :, :, None] * corrections[-1])
        state = torch.addcmul(written, whole[:, n, :, None, None], state)
    final = state.clone(memory_format=torch.contiguous_format)
    return torch.stack(met, 1).to(k.dtype), torch.stack(corrections, 1).to(k.dtype), final


@operator("delta_states_adjoint")
@on_its_device
def _adjoint(
    solve: Tensor, beta: Tensor, dcorrections: Tensor, k: Tensor, from_start: Tensor, to_end: Tensor, whole: Tensor,
    dmet: Tensor, dfinal: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The adjoints of the states at the chunks' ends [B, N, H, K, V], of the corrections and of what they solve for
    [B, N, H, C, V], and of the start."""
    if _fused(k, whole):
        from .triton_states import adjoint

        return adjoint(solve, beta, dcorrections, k, from_start, to_end, whole, dmet, dfinal)
    chunks, dtype = k.shape[1], dfinal.dtype
    state, left, total, errors = dfinal, [dfinal] * chunks, [dfinal] * chunks, [dfinal] * chunks
    keys = _by_head(k, dcorrections.transpose(2, 3)).to(dtype)
    for n in reversed(range(chunks)):
        left[n] = state
        total[n] = dcorrections[:, n].to(dtype) + to_end[:, n, :, :, None] * (keys[:, n] @ state)
        errors[n] = solve[:, n].to(dtype).mT @ total[n]
        erased = (from_start[:, n] * beta[:, n])[..., None] * errors[n]
        read = dmet[:, n].to(dtype) - keys[:, n].mT @ erased
        state = torch.addcmul(read, whole[:, n, :, None, None], state)
    dstart = state.clone(memory_format=torch.contiguous_format)
    return *(torch.stack(x, 1).to(k.dtype) for x in (left, total, errors)), dstart


@_forward.register_fake
def _(solve, beta, v, k, from_start, to_end, whole, start):
    batch, chunks, length, heads, value_dim = v.shape
    met = k.new_empty(batch, chunks, heads, *start.shape[2:])
    return met, k.new_empty(batch, chunks, heads, length, value_dim), start.new_empty(start.shape)


@_adjoint.register_fake
def _(solve, beta, dcorrections, k, from_start, to_end, whole, dmet, dfinal):
    sizes = (dmet.shape, dcorrections.shape, dcorrections.shape)
    return *(k.new_empty(size) for size in sizes), dfinal.new_empty(dfinal.shape)


def _fused(k: Tensor, whole: Tensor) -> bool:
    return fused(k, by_default=True) and k.shape[-1] <= MAX_KEY and whole.shape[0] * whole.shape[2] <= MAX_HEADS


def _by_head(k: Tensor, v: Tensor) -> Tensor:
    """[B, N, C, G, K] -> [B, N, H, C, K], for v [B, N, C, H, V]."""
    return k.transpose(2, 3).repeat_interleave(v.shape[3] // k.shape[3], dim=2)


class _States(torch.autograd.Function):
    @staticmethod
    def forward(ctx, solve, beta, v, k, from_start, to_end, whole, start):
        with torch.autocast(k.device.type, enabled=False):
            met, corrections, final = _forward(solve, beta, v, k, from_start, to_end, whole, start)
        ctx.save_for_backward(solve, beta, v, k, from_start, to_end, whole, met, corrections)
        return met, corrections, final

    @staticmethod
    def backward(ctx, dmet, dcorrections, dfinal):
        solve, beta, v, k, from_start, to_end, whole, met, corrections = ctx.saved_tensors
        dtype, groups = whole.dtype, (k.shape[3], -1)
        with torch.autocast(k.device.type, enabled=False):
            left, dcorrections, adjoints, dstart = _adjoint(
                solve, beta, dcorrections, k, from_start, to_end, whole, dmet, dfinal
            )
            keys = k.transpose(2, 3)[:, :, :, None]  # [B, N, G, 1, C, K]
            known = torch.einsum("bngxck,bngrkv->bngrcv", keys, met.unflatten(2, groups)).flatten(2, 3)
            errors = v.transpose(2, 3) - from_start[..., None] * known
            dbeta = (adjoints * errors).sum(-1)
            derrors = beta[..., None] * adjoints
            dsolve = torch.einsum("bnhtv,bnhsv->bnhts", dcorrections, (beta[..., None] * errors).to(k.dtype))
            erased = torch.einsum("bnhcv,bnhkv->bnhck", derrors.to(k.dtype), met).to(dtype)
            written = torch.einsum("bnhcv,bnhkv->bnhck", corrections, left).to(dtype)
            dk = to_end[..., None] * written - from_start[..., None] * erased
            dk = dk.unflatten(2, groups).sum(3).transpose(2, 3)
            dfrom_start = -(keys * erased.unflatten(2, groups)).sum(-1).flatten(2, 3)
            dto_end = (keys * written.unflatten(2, groups)).sum(-1).flatten(2, 3)
            dwhole = (met.to(dtype) * left).sum((-2, -1))
        dv = derrors.transpose(2, 3).to(v.dtype)
        return dsolve, dbeta, dv, dk.to(k.dtype), dfrom_start, dto_end, dwhole, dstart


def delta_states(
    solve: Tensor, beta: Tensor, v: Tensor, k: Tensor, from_start: Tensor, to_end: Tensor, whole: Tensor, start: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """E_n = solve_n beta_n (v_n - from_start_n k_n S)        S <- whole_n S + k_n^T (to_end_n E_n), chunk after chunk.

    The error is formed before it is solved for, so that what the state knows already cancels in float32.

    Args:
        solve: [B, N, H, C, C]. v: [B, N, C, H, V]. k: [B, N, C, G, K]. All of one dtype.
        beta, from_start, to_end: [B, N, H, C], whole: [B, N, H], start: [B, H, K, V], float32, or float64 like k.

    Returns:
        The state that each chunk meets [B, N, H, K, V] and E [B, N, H, C, V] in k's dtype, and the state after all.
    """
    return _States.apply(solve, beta, v, k, from_start, to_end, whole, start)
