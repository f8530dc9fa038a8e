"""Decays of their own for every key channel, inside a chunk of tokens: from products of matrices, without a quotient.

With D[t, s] the elementwise product of the steps over s < j <= t, a pair of tokens s < t stands, for exactly one m in
1, 2, 4, ..., in the two halves of an aligned block of 2 m tokens, and there D[t, s] splits at the middle: into the
product from s to the first half's end and that from the second half's start to t. So a chunk of C tokens takes log2 C
products of matrices, every factor is a product of steps and at most 1, and a step of 0 costs no digits and has a
finite gradient. Nothing of size C x C x K is formed.

Shapes: C tokens a chunk (a power of two), K key width; leading dimensions are free and equal.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .products import product


class Spans(NamedTuple):
    """Products of the steps of each chunk."""

    halves: tuple[tuple[Tensor, Tensor], ...]
    """For m = 1, 2, ..., C / 2 and each block of 2 m tokens: from its middle to each token of its second half, that
    token's step included, and from just after each token of its first half to the middle; both [..., C / 2 m, m, K]."""
    from_start: Tensor  # [..., C, K], the chunk's steps up to t, that of t included
    to_end: Tensor  # [..., C, K], the steps after t

    @property
    def whole(self) -> Tensor:
        """[..., K], over the chunk."""
        return self.from_start[..., -1, :]

    def at(self, dim: int, index: int) -> Spans:
        """The spans at one index of a leading dimension, counted from the front."""
        halves = tuple((later.select(dim, index), earlier.select(dim, index)) for later, earlier in self.halves)
        return Spans(halves, self.from_start.select(dim, index), self.to_end.select(dim, index))


def _pairs(x: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """[..., C, K] -> the first and the second halves [..., C / 2 size, size, K] of blocks of 2 size tokens."""
    return x.unflatten(-2, (-1, 2, size)).unbind(-3)


def spans(step: Tensor) -> Spans:
    """Of the steps [..., C, K] in [0, 1]."""
    from_start, to_end = step, torch.ones_like(step)
    halves = []
    size = 1
    while size < step.shape[-2]:
        first, second = _pairs(from_start, size)
        first_end, second_end = _pairs(to_end, size)
        halves.append((second, first_end))
        from_start = torch.cat((first, first[..., -1:, :] * second), -2).flatten(-3, -2)
        to_end = torch.cat((first_end * second[..., -1:, :], second_end), -2).flatten(-3, -2)
        size *= 2
    return Spans(tuple(halves), from_start, to_end)


def overlaps(x: Tensor, y: Tensor, steps: Spans) -> Tensor:
    """[..., C, C]: x_t . (D[t, s] y_s) at [t, s] for s <= t, zeros above the diagonal; x and y are [..., C, K]."""
    blocks = (x * y).sum(-1)[..., None, None]
    for later, earlier in steps.halves:
        size = later.shape[-2]
        below = product("...tk,...sk->...ts", later * _pairs(x, size)[1], earlier * _pairs(y, size)[0])
        first, second = blocks.unflatten(-3, (-1, 2)).unbind(-3)
        blocks = torch.cat((torch.cat((first, torch.zeros_like(below)), -1), torch.cat((below, second), -1)), -2)
    return blocks.squeeze(-3)


def mix(weights: Tensor, y: Tensor, steps: Spans) -> Tensor:
    """[..., C, K]: the sum over s <= t of weights[t, s] D[t, s] y_s; weights is [..., C, C], y [..., C, K]."""
    mixed = weights.diagonal(dim1=-2, dim2=-1)[..., None] * y
    for later, earlier in steps.halves:
        size = later.shape[-2]
        grid = weights.unflatten(-1, (-1, 2, size))[..., 0, :].unflatten(-3, (-1, 2, size))[..., 1, :, :, :]
        below = grid.diagonal(dim1=-4, dim2=-2).movedim(-1, -3)  # [..., C / 2 size, size, size]
        first, second = _pairs(mixed, size)
        second = second + later * product("...ts,...sk->...tk", below, earlier * _pairs(y, size)[0])
        mixed = torch.cat((first, second), -2).flatten(-3, -2)
    return mixed


def gathered(inflow: Tensor, steps: Spans) -> Tensor:
    """[..., C, K]: the sum over s <= t of D[t, s]^2 inflow_s, elementwise."""
    total = inflow
    for later, _ in steps.halves:
        first, second = _pairs(total, later.shape[-2])
        total = torch.cat((first, second + later.square() * first[..., -1:, :]), -2).flatten(-3, -2)
    return total
