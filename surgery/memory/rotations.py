"""Damped rotations: a memory whose dynamics turn pairs of key channels while they decay.

A_t = a_t R, where R turns each pair of channels (2i, 2i + 1) by an angle of its own, is no diagonal matrix, and still
needs no other recurrence. Let Q_t be the product of the rotations since a call began. Then M_t = Q_t N_t and
P_t = Q_t S_t Q_t^T, where N and S follow the rule without rotations on the keys Q_t^T k_t and the queries Q_t^T q_t:
isotropic noise and a decay per head commute with Q_t. So keys and queries are turned back before the rule, and the
state forward after it.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def phases(angle: Tensor, tokens: int, mask: Tensor | None) -> Tensor:
    """Return how far each token's Q_t has turned, [B or 1, T, G, K / 2] in float64, within [0, 2 pi).

    Args:
        angle: [G, K / 2], a token's. mask: [B, T] bool or None, False on padding, which does not turn.
    """
    place = torch.arange(1, tokens + 1, device=angle.device)[None] if mask is None else mask.cumsum(1)
    # in float64: after 1e5 tokens a float32 product would be off by a hundredth of a turn
    return torch.remainder(place[..., None, None] * angle.double(), 2 * math.pi)


def turn(x: Tensor, phase: Tensor, dim: int = -1) -> Tensor:
    """Turn the pairs of channels of ``dim`` by ``phase``, whose last dimension stands for the pairs, in float32 or x's
    own dtype, if that is wider; returned in x's dtype."""
    wide = torch.promote_types(x.dtype, torch.float32)
    y = x.movedim(dim, -1).to(wide).unflatten(-1, (-1, 2))
    cos, sin = phase.cos().to(wide), phase.sin().to(wide)
    first, second = y.unbind(-1)
    turned = torch.stack((first * cos - second * sin, first * sin + second * cos), dim=-1)
    return turned.flatten(-2).movedim(-1, dim).to(x.dtype)


def turn_state(state: Tensor, phase: Tensor, value_dim: int) -> Tensor:
    """Turn a state [B, L, K, V + K], M beside P, by ``phase`` [B, L, K / 2]: Q M and Q P Q^T, symmetric to the last bit
    as the kernels ask for it."""
    state = turn(state, phase[:, :, None], dim=-2)
    mean, covariance = state[..., :value_dim], turn(state[..., value_dim:], phase[:, :, None])
    return torch.cat((mean, 0.5 * (covariance + covariance.mT)), dim=-1)
