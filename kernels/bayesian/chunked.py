"""The Bayesian rule in matrix form: one sequential step a chunk for the covariance, everything else in parallel.

Inside a chunk the covariance recursion is the factorisation of one symmetric matrix. With R[t, s] the product of sqrt c
over s < j <= t, C_t the product of c and N_t = c_t N_{t-1} + n_t from the chunk's start, and P_0 its covariance there,

    S[t, s] = R[t, s] (C_s k_s^T P_0 k_t + N_s k_s^T k_t),  s <= t
    x S + diag(y) = L diag(1/h) L^T                     where r = x; otherwise the elimination below
    (R * L) U = C K P_0 + N K                           U: the write directions u_t, L unit lower triangular
    P_end = C P_0 + N I - U^T diag(C/C_s r_s h_s) U

so P alone crosses chunks one after another, and it depends on no value. With A_t the product of a, the mean is then a
chunked delta rule that writes along u_t:

    E[t] + sum_{s<t} p_t (A_t/A_s) h_s (k_t.u_s) E[s] = z_t v_t - p_t A_t M_0^T k_t
    o_t = A_t M_0^T q_t + sum_{s<=t} (A_t/A_s) h_s (q_t.u_s) E[s]
    M_end = A M_0 + U^T diag(A/A_s h_s) E

The variance of a read, q_t.P_t q_t, is C_t q_t.P_0 q_t + N_t |q_t|^2 - sum_{s<=t} C_t/C_s r_s h_s (q_t.u_s)^2.

Source: the recursion of "Memory by Design: Probabilistic Sequence Layers", Proposition 1; the factorised form is this
project's.

Everything is computed in float32 (float64 for float64 inputs), under autocast as well. On a CUDA device float32
products must be IEEE: with TF32 products the factorised matrix is no longer positive definite.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..chunks import check, compute_dtype, expand_heads, without_autocast
from . import channelwise
from .factor import by_chunk, cholesky, eliminate
from .reference import initial_state, over_channels

# the fastest on a CPU for keys of 32 and 64, level with 64 for keys of 128; the error hardly depends on it
CHUNK = 32


@without_autocast
def bayesian(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    cov_decay_sqrt: Tensor,
    process_noise: Tensor,
    precision: Tensor,
    observation_noise: Tensor,
    erase: Tensor,
    shrink: Tensor,
    write: Tensor,
    *,
    state: Tensor | None = None,
    initial_covariance: Tensor,
    unit_gain: bool,
    return_variance: bool = False,
    chunk_size: int = CHUNK,
) -> tuple[Tensor, ...]:
    """The rule of :func:`surgery.kernels.bayesian.reference.bayesian`, same arguments and results.

    Args:
        decay, cov_decay_sqrt, process_noise: any of them may be [B, T, H, K]; the chunk then takes the form of
            :mod:`surgery.kernels.bayesian.channelwise`, some log2(chunk_size) times the work.
        unit_gain: promises shrink = precision for every token, and picks the Cholesky form; otherwise the chunk is
            eliminated token by token.
        chunk_size: tokens a chunk, a power of two.

    Raises:
        RuntimeError: on a CUDA device whose float32 products are TF32.
    """
    check(q, k, v, decay, channels=True)
    if not torch.compiler.is_compiling():
        _require_ieee_products(q.device.type)
    assert chunk_size & (chunk_size - 1) == 0, f"chunk_size {chunk_size} is no power of two"
    dtype = compute_dtype(q, k, v)
    tokens, heads, key_dim = v.shape[1], v.shape[2], k.shape[-1]
    mean, covariance = initial_state(v, key_dim, state, initial_covariance, dtype)
    size = min(chunk_size, 1 << (tokens - 1).bit_length())
    by_channel = max(x.dim() for x in (decay, cov_decay_sqrt, process_noise)) == 4
    if by_channel:
        decay, cov_decay_sqrt, process_noise = (
            over_channels(x, key_dim) for x in (decay, cov_decay_sqrt, process_noise)
        )
    q, k = (expand_heads(x.to(dtype), heads) for x in (q, k))
    q, k, values = (by_chunk(x, size) for x in (q, k, write.to(dtype)[..., None] * v.to(dtype)))
    # a token of padding is the identity on the state
    a, c_sqrt, y = (by_chunk(x.to(dtype), size, 1.0) for x in (decay, cov_decay_sqrt, observation_noise))
    n, p, r = (by_chunk(x.to(dtype), size) for x in (process_noise, erase, shrink))
    x = precision.to(dtype)[:, None, None]

    covariance_pass, mean_pass, variance_pass = (
        (channelwise.covariance_pass, channelwise.mean_pass, channelwise.variance_pass)
        if by_channel
        else (_covariance, _mean, _variance)
    )
    u, gain, starts, covariance = covariance_pass(k, c_sqrt, n, x, y, None if unit_gain else r, covariance)
    o, mean = mean_pass(q, k, values, a, p, u, gain, mean)
    o = o.flatten(2, 3)[:, :, :tokens].transpose(1, 2)
    o, state = o.to(v.dtype), torch.cat((mean, covariance), dim=-1)
    if not return_variance:
        return o, state
    variance = variance_pass(q, c_sqrt, n, u, (x if unit_gain else r) * gain, torch.stack(starts, 2))
    return o, variance.flatten(2, 3)[:, :, :tokens].transpose(1, 2), state


def _require_ieee_products(device: str) -> None:
    """A covariance lost to rounding shows as NaN much later, or not at all: better to stop at once."""
    if device == "cuda" and torch.backends.cuda.matmul.fp32_precision == "tf32":
        raise RuntimeError(
            "the Bayesian rule's chunked form needs IEEE float32 products on a CUDA device, and TF32 is on: "
            "call torch.set_float32_matmul_precision('highest')"
        )


def _ratios(step: Tensor) -> Tensor:
    """[..., C] -> [..., C, C]: the product of step over s < j <= t at [t, s], ones on the diagonal, zeros above.

    Blocks are doubled, so there are products alone: a step of zero costs no digits and has a finite gradient.
    """
    blocks = torch.ones_like(step)[..., None, None]
    size = 1
    while size < step.shape[-1]:
        first, second = blocks.unflatten(-3, (-1, 2)).unbind(-3)
        crossing = step.unflatten(-1, (-1, 2, size))[..., 1, :1]
        below = (crossing * second[..., 0])[..., :, None] * first[..., -1:, :]
        above = torch.zeros_like(below)
        blocks = torch.cat((torch.cat((first, above), -1), torch.cat((below, second), -1)), -2)
        size *= 2
    return blocks.squeeze(-3)


def _covariance(
    k: Tensor, c_sqrt: Tensor, n: Tensor, x: Tensor, y: Tensor, shrink: Tensor | None, covariance: Tensor
) -> tuple[Tensor, Tensor, list[Tensor], Tensor]:
    """The write directions u [B, H, N, C, K], the gains h [B, H, N, C], the covariance before each chunk and that after
    the last one."""
    ratio = _ratios(c_sqrt)
    since_start = c_sqrt[..., :1] * ratio[..., 0]  # sqrt C_t
    to_end = ratio[..., -1, :].square()  # C / C_s
    noise = (ratio.square() @ n[..., None]).squeeze(-1)  # N_t
    lower = ratio * noise[..., None, :] * (k @ k.mT)
    own = torch.tril(lower) + torch.tril(lower, -1).mT
    decayed = since_start[..., None] * k
    fresh = noise[..., None] * k
    kept = since_start[..., -1, None, None].square()
    replenished = noise[..., -1, None, None]
    identity = torch.eye(k.shape[-1], dtype=k.dtype, device=k.device)
    tiny = 2 * torch.finfo(k.dtype).eps

    directions, gains, starts = [], [], []
    for i in range(k.shape[2]):
        starts.append(covariance)
        predicted = decayed[:, :, i] @ covariance
        gram = predicted @ decayed[:, :, i].mT + own[:, :, i]
        if shrink is None:
            factor, gain = cholesky(gram, x, y[:, :, i])
            shrunk = x[..., 0] * gain
        else:
            factor, gain = eliminate(gram, x, y[:, :, i], shrink[:, :, i])
            shrunk = shrink[:, :, i] * gain
        u = torch.linalg.solve_triangular(
            ratio[:, :, i] * factor, since_start[:, :, i, :, None] * predicted + fresh[:, :, i],
            upper=False, unitriangular=True,
        )
        spent = ((to_end[:, :, i] * shrunk)[..., None] * u).mT @ u
        covariance = kept[:, :, i] * covariance + replenished[:, :, i] * identity - spent
        # rounding must not leave a negative direction; a floor that is small beside the noise that enters anyway, since
        # where none enters, directions written many times are truly that small
        floor = tiny * torch.minimum(covariance.diagonal(dim1=-2, dim2=-1).amax(-1), replenished[:, :, i, 0, 0])
        covariance = 0.5 * (covariance + covariance.mT) + floor.detach()[..., None, None] * identity
        directions.append(u)
        gains.append(gain)
    return torch.stack(directions, 2), torch.stack(gains, 2), starts, covariance


def _variance(q: Tensor, c_sqrt: Tensor, n: Tensor, u: Tensor, shrunk: Tensor, starts: Tensor) -> Tensor:
    """The variances [B, H, N, C] of the reads, given r_s h_s [B, H, N, C] and the covariances [B, H, N, K, K] before
    each chunk."""
    ratio = _ratios(c_sqrt)
    kept = c_sqrt[..., 0, None] * ratio[..., 0]  # sqrt C_t
    noise = (ratio.square() @ n[..., None]).squeeze(-1)
    before = ((q @ starts) * q).sum(-1)
    spent = ((ratio * (q @ u.mT)).square() @ shrunk[..., None]).squeeze(-1)
    return kept.square() * before + noise * q.square().sum(-1) - spent


def _mean(
    q: Tensor, k: Tensor, values: Tensor, a: Tensor, p: Tensor, u: Tensor, gain: Tensor, mean: Tensor
) -> tuple[Tensor, Tensor]:
    """The reads [B, H, N, C, V] and the mean after the last chunk, given the write directions and gains."""
    ratio = _ratios(a)
    since_start = a[..., :1] * ratio[..., 0]  # A_t
    weight = ratio * gain[..., None, :]
    coupling = torch.tril(p[..., None] * weight * (k @ u.mT), -1)
    known = torch.cat((values, (p * since_start)[..., None] * k), dim=-1)
    solved = torch.linalg.solve_triangular(coupling, known, upper=False, unitriangular=True)
    free, driven = solved.split((values.shape[-1], k.shape[-1]), dim=-1)
    written = (weight[..., -1, :, None] * u).mT
    kept = since_start[..., -1, None, None]

    means, errors = [], []
    for i in range(k.shape[2]):
        error = free[:, :, i] - driven[:, :, i] @ mean
        means.append(mean)
        errors.append(error)
        mean = kept[:, :, i] * mean + written[:, :, i] @ error
    o = (since_start[..., None] * q) @ torch.stack(means, 2) + (weight * (q @ u.mT)) @ torch.stack(errors, 2)
    return o, mean
