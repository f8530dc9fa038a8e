"""Process noise from the token: its bounds, and the largest variance that it adds up to."""

from __future__ import annotations

import math

import torch
from torch import Tensor

# log nu_t and log l2_t from the token stay within it of 0: both noises lie between 1e-4 and 1e4
TOKEN_NOISE_BOUND = math.log(1e4)


def bounded(log_noise: Tensor) -> Tensor:
    """Keep log noise within TOKEN_NOISE_BOUND of 0; the identity near 0, with a gradient everywhere."""
    return log_noise * torch.rsqrt(1 + (log_noise / TOKEN_NOISE_BOUND).square())


def affine_scan(factor: Tensor, term: Tensor, start: Tensor) -> Tensor:
    """s_t = factor_t s_{t-1} + term_t along dimension 1 of [B, T, ...], from s_0 = start [B, ...]; log2(T) steps."""
    term = torch.cat((term[:, :1] + factor[:, :1] * start[:, None], term[:, 1:]), dim=1)
    shift = 1
    while shift < factor.shape[1]:
        term = torch.cat((term[:, :shift], term[:, shift:] + factor[:, shift:] * term[:, :-shift]), dim=1)
        factor = torch.cat((factor[:, :shift], factor[:, shift:] * factor[:, :-shift]), dim=1)
        shift *= 2
    return term
