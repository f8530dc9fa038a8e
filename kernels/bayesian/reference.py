"""The Bayesian rule, one token after another: the form the others are measured against, and the decode step."""

from __future__ import annotations

import torch
from torch import Tensor

from ..chunks import check, compute_dtype, expand_heads


def initial_state(v: Tensor, key_dim: int, state: Tensor | None, initial_covariance: Tensor, dtype: torch.dtype):
    """The mean [B, H, K, V] and the covariance [B, H, K, K] to start from: those of ``state``, or 0 and p0 I.

    The covariance is made symmetric, so that a gradient on it is symmetric as well, whatever the form.
    """
    batch, _, heads, value_dim = v.shape
    if state is not None:
        assert state.shape == (batch, heads, key_dim, value_dim + key_dim), f"state {tuple(state.shape)}"
        mean, covariance = state.to(dtype).split((value_dim, key_dim), dim=-1)
        return mean, 0.5 * (covariance + covariance.mT)
    mean = v.new_zeros(batch, heads, key_dim, value_dim, dtype=dtype)
    identity = torch.eye(key_dim, dtype=dtype, device=v.device)
    return mean, (initial_covariance.to(dtype)[:, None, None] * identity).expand(batch, -1, -1, -1)


def over_channels(x: Tensor, key_dim: int) -> Tensor:
    """A scalar a head, [B, T, H], or one a key channel, [B, T, H, K], as [B, T, H, K]."""
    return x if x.dim() == 4 else x[..., None].expand(*x.shape, key_dim)


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
) -> tuple[Tensor, ...]:
    """A linear-Gaussian filter over the memory: a mean M and, in key space, the covariance P of its columns.

        Pbar_t = c_t P_{t-1} + n_t I        u_t = Pbar_t k_t        h_t = 1 / (y_t + x k_t.u_t)
        M_t = a_t M_{t-1} + h_t u_t (z_t v_t - p_t a_t M_{t-1}^T k_t)^T
        P_t = Pbar_t - r_t h_t u_t u_t^T                            o_t = M_t^T q_t        variance_t = q_t.P_t q_t

    With decays for each key channel (KDA hosts), a and sqrt c stand for diagonal matrices on the key side, and n for
    another: Pbar_t = diag(sqrt c) P_{t-1} diag(sqrt c) + diag(n), M_t = diag(a) M_{t-1} + ...; noise that restores the
    prior nu I at retention rho is n = nu (1 - rho a^2), channel by channel.

    Source: the Bayesian Layer of "Memory by Design: Probabilistic Sequence Layers", Proposition 1, with the scalars
    that make one recurrence serve every host: the paper's layer is x = p = r = z = 1, y = r_t^2, n = l_t^2, c = a^2.

    A reset before token t is given by its scalars: a = sqrt c = 0 and n = c p0 + n with the c and n of that token.
    Padding is a = sqrt c = 1, n = 0, k = v = 0.

    Args:
        q, k: [B, T, G, K]. v: [B, T, H, V].
        decay: [B, T, H] or [B, T, H, K], a in [0, 1]. cov_decay_sqrt: [B, T, H] or [B, T, H, K], sqrt c in [0, 1].
        process_noise: [B, T, H] or [B, T, H, K], n >= 0. Each of the three has its own choice of shape.
        precision: [H], x >= 0. observation_noise: [B, T, H], y > 0 where x k.u = 0.
        erase: [B, T, H], p. shrink: [B, T, H], r; 0 <= r <= x keeps P positive semidefinite.
        write: [B, T, H], z.
        state: [B, H, K, V + K], M beside P, or None for M = 0 and P = p0 I.
        initial_covariance: [H], p0.
        unit_gain: promises r = x for every token; it allows a faster form elsewhere and changes nothing here.
        return_variance: also return the variance of the read, which all of a head's values share.

    Returns:
        o [B, T, H, V] in v's dtype; with ``return_variance`` the variance [B, T, H] in the computing dtype; and the
        state after the last token in float32 (float64 for float64 inputs).
    """
    check(q, k, v, decay, channels=True)
    dtype = compute_dtype(q, k, v)
    heads, key_dim = v.shape[2], k.shape[-1]
    mean, covariance = initial_state(v, key_dim, state, initial_covariance, dtype)
    scalars = (decay, cov_decay_sqrt, process_noise, observation_noise, erase, shrink, write)
    # [B, T, H, 1], or [B, T, H, K]
    a, c_sqrt, n, y, p, r, z = (x.to(dtype) if x.dim() == 4 else x.to(dtype)[..., None] for x in scalars)
    x = precision.to(dtype)[:, None]
    values = z * v.to(dtype)
    q, k = (expand_heads(tensor.to(dtype), heads) for tensor in (q, k))
    outputs, variances = [], []
    for t in range(v.shape[1]):
        key = k[:, t, ..., None]  # [B, H, K, 1]
        # products and sums, no matmul: autocast would lower its operands
        decayed = c_sqrt[:, t, ..., None] * covariance * c_sqrt[:, t, ..., None, :]
        u = (decayed * key).sum(-2) + n[:, t] * k[:, t]
        h = 1 / (y[:, t] + x * (k[:, t] * u).sum(-1, keepdim=True))
        mean = a[:, t, ..., None] * mean
        error = values[:, t] - p[:, t] * (mean * key).sum(-2)
        mean = mean + u[..., None] * (h * error)[..., None, :]
        # u u^T is symmetric to the last bit, and so is P
        covariance = decayed + torch.diag_embed(n[:, t].expand_as(u))
        covariance = covariance - (r[:, t] * h)[..., None] * (u[..., None] * u[..., None, :])
        outputs.append((mean * q[:, t, ..., None]).sum(-2))
        if return_variance:
            variances.append(((covariance * q[:, t, ..., None]).sum(-2) * q[:, t]).sum(-1))
    o, state = torch.stack(outputs, dim=1).to(v.dtype), torch.cat((mean, covariance), dim=-1)
    return (o, torch.stack(variances, dim=1), state) if return_variance else (o, state)
