"""Gradients through the Bayesian rule's covariance, without its elimination: one symmetric recurrence from chunk to
chunk, and everything else by chunks in parallel.

Let D be the adjoint of P, m_t the gradient of u_t from the mean and g_t that of h_t. With m' = m - x h^2 g k, one token
back is

    D <- c ((I - r h k u^T) D (I - r h u k^T) + r (x - r) h^2 (u^T D u) k k^T + sym(m' k^T))

where the term in the middle is zero if r = x. A chunk's tokens together, R the ratios of sqrt c, sqrt C those since the
chunk's start, L = I + tril(R (K U^T), -1) diag(r h) and J = L^-1:

    D <- D_0^T D D_0 + sym(S^T F) + F^T diag(lambda) F        D_0 = sqrt C I - W^T F
    F = J (sqrt C K)        W = (sqrt C / sqrt C_s r h) U        S = sqrt C m' - tril(R (m' U^T), -1) diag(r h) F

with lambda_t = r (x - r) h^2 chi_t and chi_t = u_t^T D_t u_t, which a triangular system in the chunk's tokens gives. F
and S need no D and come first, in parallel. Then D walks back over the chunks. Last, in parallel again, comes every
gradient, from the D after its chunk, by the chain rule through the factorised form. There the elimination's own adjoint
is, with dL and dh the gradients from outside of it,

    dS = J^T Y J symmetrised        Y = tril(L^T dL, -1) diag(r h) - diag(h^2 (r dh + (x - r) (g - r chi)))
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..devices import shared_memory
from .triton_backward_common import in_float32, steps_gradient_kernel
from .triton_common import CHUNK, OPTIONS, Shape, Table, exact
from .triton_covariance_adjoint import (
    _closed_loop_kernel,
    _congruence_kernel,
    _covariance_adjoint_kernel,
    _factor_inverse_kernel,
    _shrink_kernel,
)
from .triton_covariance_gradients import (
    _elimination_gradient_kernel,
    _entering_kernel,
    _keys_gradient_kernel,
    _known_gradient_kernel,
    _scalars_gradient_kernel,
)


class Layout(NamedTuple):
    """How the kernels are laid out; a block is of keys."""

    block: int  # of the kernels that run over all chunks at once, on 4 warps
    part: int  # of the sums over keys in the walk back
    stages: int  # of loads under way there


LAYOUT = Layout(block=64, part=64, stages=3)
# where shared memory does not hold as much: for r != x, and on GPUs that have less than the walk takes
SMALLER = LAYOUT._replace(part=32, stages=2)
WALK_BYTES = 192 * 2**10  # with keys of more than 64; SMALLER's walk takes 64 KB, for r != x 128


class CovarianceGradients(NamedTuple):
    """Gradients by value head, the scalars' [B, H, N CHUNK]."""

    dk: Tensor  # [B, T, H, K], the mean's part with it
    cov_decay_sqrt: Tensor
    process_noise: Tensor
    observation_noise: Tensor
    shrink: Tensor
    precision: Tensor  # [B, H, N]
    start: Tensor  # [B, H, K, K], of the covariance before the first token


def covariance_backward(
    shape: Shape, k: Tensor, table: Table, precision: Tensor, U: Tensor, gains: Tensor, P: Tensor, dU: Tensor,
    dk: Tensor, dgains: Tensor, dfinal: Tensor, unit_gain: bool,
) -> CovarianceGradients:
    """dU is overwritten."""
    width, blocks = shape.key_blocks(LAYOUT.block)
    digits = {"K": shape.key_dim, "C": CHUNK, "PRECISION": "tf32x3", "num_stages": 1, **OPTIONS}
    keys = {"BD": width, "NB": blocks, "num_warps": 4, **digits}
    sizes = (shape.tokens, shape.heads, shape.groups, shape.padded)
    grid = (shape.chunks, shape.programs)
    logs = in_float32(table.logs[1])
    dP, lam, inverse = _covariance_adjoint(
        shape, k, table, logs, precision, U, gains, dU, dgains, dfinal, unit_gain, keys, digits
    )
    leaving, known_key, known_read = (torch.empty_like(gains) for _ in range(3))
    _known_gradient_kernel[grid](
        k, U, dU, dP, gains, table.scalars, logs, inverse, leaving, known_key, *sizes, **keys
    )
    read_keys, keys_keys, dfactors = (torch.empty_like(inverse) for _ in range(3))
    pairs, traces, dprecision = (
        torch.empty(shape.batch, shape.heads, shape.chunks, dtype=torch.float32, device=k.device) for _ in range(3)
    )
    _entering_kernel[grid](
        k, dU, P, dP, read_keys, keys_keys, known_read, pairs, traces, *sizes, P.shape[2], EXACT=exact(k), **keys
    )
    dscalars = torch.empty(4, *gains.shape, dtype=torch.float32, device=k.device)
    _elimination_gradient_kernel[grid](
        k, U, dU, gains, dgains, table.scalars, logs, precision, inverse, leaving, *lam, dfactors, dscalars,
        dprecision, *sizes, UNIT=unit_gain, EXACT=exact(k), **keys,
    )
    _scalars_gradient_kernel[grid](
        gains, table.scalars, logs, precision, inverse, read_keys, keys_keys, dfactors, leaving, known_key, known_read,
        pairs, traces, dscalars, dprecision, shape.heads, shape.padded, C=CHUNK, UNIT=unit_gain, num_warps=4, **OPTIONS
    )
    del keys_keys
    steps_gradient_kernel[grid](
        dfactors, known_read, logs, dscalars, shape.padded, C=CHUNK, PRECISION="tf32x3", num_warps=4, **OPTIONS
    )
    # rounded once only: a sum over the value heads of a key head comes before
    dtype = k.dtype if shape.heads == shape.groups else torch.float32
    dkeys = torch.empty(shape.batch, shape.tokens, shape.heads, shape.key_dim, dtype=dtype, device=k.device)
    _keys_gradient_kernel[(blocks, *grid)](
        k, dU, dk, inverse, read_keys, table.scalars, logs, P, dkeys, *sizes, P.shape[2], BN=width, EXACT=exact(k),
        **keys,
    )
    return CovarianceGradients(dkeys, *dscalars, dprecision, 0.5 * (dP[:, :, 0] + dP[:, :, 0].mT))


def _covariance_adjoint(
    shape: Shape, k: Tensor, table: Table, logs: Tensor, precision: Tensor, U: Tensor, gains: Tensor, dU: Tensor,
    dgains: Tensor, dfinal: Tensor, unit_gain: bool, keys: dict, digits: dict,
) -> tuple[Tensor, tuple[Tensor, Tensor], Tensor]:
    """D at the chunks' boundaries [B, H, N + 1, K, K]; chi without what the chunk adds and lambda, [B, H, N CHUNK] each
    (of no meaning if ``unit_gain``); J [B, H, N, CHUNK, CHUNK]."""
    sizes = (shape.tokens, shape.heads, shape.groups, shape.padded)
    grid = (shape.chunks, shape.programs)
    inverse = torch.empty(
        shape.batch, shape.heads, shape.chunks, CHUNK, CHUNK, dtype=torch.float32, device=k.device
    )
    _factor_inverse_kernel[grid](k, U, gains, table.scalars, logs, inverse, *sizes, EXACT=exact(k), **keys)
    F, pulls = torch.empty_like(U), torch.empty_like(U)
    _closed_loop_kernel[grid](
        k, U, dU, gains, dgains, table.scalars, logs, precision, inverse, F, pulls, *sizes, EXACT=exact(k), **keys
    )
    # what shrinking other than by the gain needs; never touched otherwise
    psi, solve, base, lam = (F, inverse, gains, gains) if unit_gain else (
        torch.empty_like(U), torch.empty_like(inverse), torch.empty_like(gains), torch.empty_like(gains)
    )
    if not unit_gain:
        _shrink_kernel[grid](
            k, U, dU, gains, dgains, table.scalars, logs, precision, inverse, psi, solve, base, *sizes,
            EXACT=exact(k), **keys,
        )
    square = (shape.key_dim, shape.key_dim)
    dP = torch.empty(shape.batch, shape.heads, shape.chunks + 1, *square, dtype=torch.float32, device=k.device)
    dP[:, :, -1] = 0.5 * (dfinal + dfinal.mT)
    phi = torch.empty(shape.batch, shape.heads, shape.chunks, *square, dtype=torch.float32, device=k.device)
    width, blocks = shape.key_blocks(128)
    _congruence_kernel[(blocks, *grid)](
        U, F, pulls, gains, table.scalars, logs, phi, dP, shape.padded, BD=width, NB=blocks, num_warps=8, **digits
    )
    del pulls
    scratch = torch.empty(shape.programs, *square, dtype=torch.float32, device=k.device)
    walk = LAYOUT if unit_gain and shared_memory(k.device) >= WALK_BYTES else SMALLER
    digits = {**digits, "num_stages": walk.stages}
    _covariance_adjoint_kernel[(shape.programs,)](
        phi, F, psi, scratch, gains, table.scalars, precision, solve, base, lam, dP, shape.heads, shape.chunks,
        BD=width, NB=blocks, BK=min(walk.part, width), UNIT=unit_gain, num_warps=8, **digits,
    )
    return dP, (base, lam), inverse
