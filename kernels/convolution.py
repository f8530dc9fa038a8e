"""The mixers' short causal convolution with SiLU, on CUDA: an operator that torch.compile does not look into.

torch.compile turns a sum of shifts into kernels that make the same activations again for every gradient; here the
backward pass is one kernel.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import chunks

BY_DEFAULT = True  # whether it runs unasked
MAX_WIDTH = 4  # taps that the kernels keep in registers


def fused(x: Tensor, width: int) -> bool:
    """Whether the operator is to take ``x`` [B, T, C] and a convolution of ``width`` taps."""
    return width <= MAX_WIDTH and chunks.fused(x, BY_DEFAULT)


def causal_conv(x: Tensor, weight: Tensor, bias: Tensor | None, reset: Tensor | None) -> Tensor:
    """silu(bias + sum over taps d of weight[:, W - 1 - d] x[t - d]), where t - d lies in the document of t.

    Args:
        x: [B, T, C]. weight: [C, W]. bias: [C] or None. reset: [B, T] bool, True on a document's first token, or None.

    Returns:
        [B, T, C] in x's dtype, computed in float32.
    """
    return _forward(x, weight.float(), None if bias is None else bias.float(), reset)


@torch.library.custom_op("surgery::causal_conv", mutates_args=(), device_types="cuda")
@chunks.on_its_device
def _forward(x: Tensor, weight: Tensor, bias: Tensor | None, reset: Tensor | None) -> Tensor:
    from .triton_convolution import forward

    return forward(x, weight, bias, reset)


@torch.library.custom_op("surgery::causal_conv_backward", mutates_args=(), device_types="cuda")
@chunks.on_its_device
def _backward(
    dy: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, reset: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of x, of the weight [C, W] and of the bias [C], there or not."""
    from .triton_convolution import backward

    return backward(dy, x, weight, bias, reset)


@_forward.register_fake
def _(x, weight, bias, reset):
    return x.new_empty(x.shape)


@_backward.register_fake
def _(dy, x, weight, bias, reset):
    return x.new_empty(x.shape), weight.new_empty(weight.shape), weight.new_empty(weight.shape[0])


def _save(ctx, inputs, output):
    x, weight, bias, reset = inputs
    ctx.biased = bias is not None
    ctx.save_for_backward(x, weight, bias, reset)


def _differentiate(ctx, dy):
    x, weight, bias, reset = ctx.saved_tensors
    dx, dweight, dbias = _backward(dy, x, weight, bias, reset)
    return dx, dweight, dbias if ctx.biased else None, None


_forward.register_autograd(_differentiate, setup_context=_save)
