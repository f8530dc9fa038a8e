"""Products of matrices that autocast never lowers, in either direction.

Switching autocast off around a rule protects its forward pass alone: torch.compile traces the backward pass under the
autocast that surrounds the call, and lowers every product in it to bfloat16 (relative error of the gradients 3e-3).
"""

from __future__ import annotations

import torch
from torch import Tensor


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, equation: str, left: Tensor, right: Tensor) -> Tensor:
        ctx.save_for_backward(left, right)
        ctx.equation = equation
        with torch.autocast(left.device.type, enabled=False):
            return torch.einsum(equation, left, right)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[None, Tensor, Tensor]:
        left, right = ctx.saved_tensors
        operands, _, result = ctx.equation.partition("->")
        of_left, _, of_right = operands.partition(",")
        with torch.autocast(grad.device.type, enabled=False):
            return (
                None,
                torch.einsum(f"{result},{of_right}->{of_left}", grad, right),
                torch.einsum(f"{result},{of_left}->{of_right}", grad, left),
            )


def product(equation: str, left: Tensor, right: Tensor) -> Tensor:
    """torch.einsum of two operands in which every index stands in two of the three terms of ``equation``."""
    # torch.compile cannot trace a function of the same tensor twice
    return _Product.apply(equation, left, right.view_as(right) if left is right else right)
