"""The Bayesian rule in matrix form where decays and process noise have a value for every key channel (KDA hosts).

As :mod:`surgery.kernels.bayesian.chunked`, with vectors of K entries in place of the decays. D[t, s] is the elementwise
product of sqrt c over s < j <= t, C_t that from the chunk's start to t, N_t = c_t N_{t-1} + n_t, all diagonal matrices:

    S[t, s] = (C_t k_t)^T P_0 (C_s k_s) + k_t^T D[t, s] N_s k_s,  s <= t
    x S + diag(y) = L diag(1/h) L^T                     where r = x; otherwise by elimination
    u_t = sum_{s<=t} L^-1[t, s] D[t, s] (C_s P_0 C_s k_s + N_s k_s)
    P_end = C P_0 C + N - sum_s r_s h_s (D[end, s] u_s) (D[end, s] u_s)^T

For a scalar decay, D[t, s] factors out and the third line is the triangular system there. With D and A now the products
of a, the mean is the chunked delta rule

    E[t] + sum_{s<t} p_t h_s (k_t^T D[t, s] u_s) E[s] = z_t v_t - p_t M_0^T A_t k_t
    o_t = M_0^T A_t q_t + sum_{s<=t} h_s (q_t^T D[t, s] u_s) E[s]
    M_end = A M_0 + sum_s D[end, s] u_s h_s E[s]^T
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..channels import Spans, gathered, mix, overlaps, spans
from .factor import cholesky, eliminate


def covariance_pass(
    k: Tensor, c_sqrt: Tensor, n: Tensor, x: Tensor, y: Tensor, shrink: Tensor | None, covariance: Tensor
) -> tuple[Tensor, Tensor, list[Tensor], Tensor]:
    """The write directions u [B, H, N, C, K], the gains h [B, H, N, C], the covariance before each chunk and that after
    the last one.

    Args:
        k, c_sqrt, n: [B, H, N, C, K]. x: [H, 1, 1]. y, shrink: [B, H, N, C]; ``shrink`` is None where it equals x.
        covariance: [B, H, K, K], before the first chunk.
    """
    steps = spans(c_sqrt)
    noise = gathered(n, steps)
    lower = overlaps(k, noise * k, steps)
    own = lower + torch.tril(lower, -1).mT
    decayed = steps.from_start * k
    fresh = noise * k
    identity = torch.eye(k.shape[-2], dtype=k.dtype, device=k.device)
    tiny = 2 * torch.finfo(k.dtype).eps

    directions, gains, starts = [], [], []
    for i in range(k.shape[2]):
        starts.append(covariance)
        here = steps.at(2, i)
        predicted = decayed[:, :, i] @ covariance
        gram = predicted @ decayed[:, :, i].mT + own[:, :, i]
        if shrink is None:
            factor, gain = cholesky(gram, x, y[:, :, i])
            shrunk = x[..., 0] * gain
        else:
            factor, gain = eliminate(gram, x, y[:, :, i], shrink[:, :, i])
            shrunk = shrink[:, :, i] * gain
        inverse = torch.linalg.solve_triangular(factor, identity.expand_as(factor), upper=False, unitriangular=True)
        u = mix(inverse, here.from_start * predicted + fresh[:, :, i], here)
        at_end = here.to_end * u
        spent = (shrunk[..., None] * at_end).mT @ at_end
        covariance = here.whole[..., :, None] * covariance * here.whole[..., None, :] - spent
        # rounding must not leave a negative direction; a floor that is small beside the noise that enters anyway
        replenished = noise[:, :, i, -1]
        peak = (covariance.diagonal(dim1=-2, dim2=-1) + replenished).amax(-1, keepdim=True)
        floor = tiny * torch.minimum(peak, replenished)
        covariance = 0.5 * (covariance + covariance.mT) + torch.diag_embed(replenished + floor.detach())
        directions.append(u)
        gains.append(gain)
    return torch.stack(directions, 2), torch.stack(gains, 2), starts, covariance


def variance_pass(q: Tensor, c_sqrt: Tensor, n: Tensor, u: Tensor, shrunk: Tensor, starts: Tensor) -> Tensor:
    """The variances [B, H, N, C] of the reads, q_t.P_t q_t.

    Args:
        q, c_sqrt, n, u: [B, H, N, C, K]. shrunk: [B, H, N, C], r_s h_s. starts: [B, H, N, K, K], the covariance before
            each chunk.
    """
    steps = spans(c_sqrt)
    decayed = steps.from_start * q
    before = ((decayed @ starts) * decayed).sum(-1)
    fresh = (gathered(n, steps) * q.square()).sum(-1)
    spent = (overlaps(q, u, steps).square() @ shrunk[..., None]).squeeze(-1)
    return before + fresh - spent


def mean_pass(
    q: Tensor, k: Tensor, values: Tensor, a: Tensor, p: Tensor, u: Tensor, gain: Tensor, mean: Tensor
) -> tuple[Tensor, Tensor]:
    """The reads [B, H, N, C, V] and the mean [B, H, K, V] after the last chunk, given write directions and gains.

    Args:
        q, k, a, u: [B, H, N, C, K]. values: [B, H, N, C, V], scaled by z. p, gain: [B, H, N, C].
    """
    steps: Spans = spans(a)
    written = gain[..., None] * u
    coupling = torch.tril(p[..., None] * overlaps(k, written, steps), -1)
    known = torch.cat((values, p[..., None] * steps.from_start * k), dim=-1)
    solved = torch.linalg.solve_triangular(coupling, known, upper=False, unitriangular=True)
    free, driven = solved.split((values.shape[-1], k.shape[-1]), dim=-1)
    at_end = (steps.to_end * written).mT

    means, errors = [], []
    for i in range(k.shape[2]):
        error = free[:, :, i] - driven[:, :, i] @ mean
        means.append(mean)
        errors.append(error)
        mean = steps.whole[:, :, i, :, None] * mean + at_end[:, :, i] @ error
    read = (steps.from_start * q) @ torch.stack(means, 2) + overlaps(q, written, steps) @ torch.stack(errors, 2)
    return read, mean
