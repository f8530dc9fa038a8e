"""What the Bayesian rule's chunked forms share: chunks of tokens, and the factor of a chunk's symmetric matrix."""

from __future__ import annotations

import torch
from torch import Tensor


def by_chunk(x: Tensor, size: int, fill: float = 0.0) -> Tensor:
    """[B, T, H, ...] -> [B, H, N, C, ...], the last chunk filled up."""
    missing = -x.shape[1] % size
    if missing:
        x = torch.cat((x, x.new_full((x.shape[0], missing, *x.shape[2:]), fill)), dim=1)
    return x.transpose(1, 2).unflatten(2, (-1, size))


def cholesky(gram: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """The unit lower factor L of x gram + diag(y) = L diag(1/h) L^T, and h."""
    root = torch.linalg.cholesky_ex(x * gram + torch.diag_embed(y)).L
    pivot = root.diagonal(dim1=-2, dim2=-1)
    return root / pivot[..., None, :], pivot.square().reciprocal()


def eliminate(gram: Tensor, x: Tensor, y: Tensor, shrink: Tensor) -> tuple[Tensor, Tensor]:
    """The same factor where the shrinking r differs from x: its column s is r_s h_s times that of the matrix left over
    after the columns before it, h_s = 1 / (y_s + x left[s, s])."""
    columns, gains = [], []
    rest = gram
    for s in range(gram.shape[-1]):
        column = rest[..., 0].contiguous()
        gain = 1 / (y[..., s] + x[..., 0, 0] * column[..., 0])
        scaled = (shrink[..., s] * gain)[..., None] * column[..., 1:]
        columns.append(torch.nn.functional.pad(scaled, (s + 1, 0)))
        gains.append(gain)
        rest = rest[..., 1:, 1:] - scaled[..., :, None] * column[..., None, 1:]
    identity = torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device)
    return torch.stack(columns, -1) + identity, torch.stack(gains, -1)
