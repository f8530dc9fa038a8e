"""The mixers' short causal convolution with SiLU, on CUDA: operators that torch.compile does not look into.

torch.compile turns a sum of shifts into kernels that make the same activations again for every gradient; here the
backward pass is one kernel. The second operator splits what comes out into queries, keys and values and normalises the
heads of the first two: nothing is read again for that, and nothing has to be put together backward.
"""

from __future__ import annotations

from torch import Tensor

from . import chunks
from .operators import operator

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


@operator("causal_conv", device_types="cuda")
@chunks.on_its_device
def _forward(x: Tensor, weight: Tensor, bias: Tensor | None, reset: Tensor | None) -> Tensor:
    from .triton_convolution import forward

    return forward(x, weight, bias, reset)[0]


@operator("causal_conv_backward", device_types="cuda")
@chunks.on_its_device
def _backward(
    dy: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, reset: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The gradients of x, and of the weight and the bias, there or not, in rows [W + 1, C]."""
    from .triton_convolution import backward

    return backward((dy,), x, weight, bias, reset)


@_forward.register_fake
def _(x, weight, bias, reset):
    return x.new_empty(x.shape)


@_backward.register_fake
def _(dy, x, weight, bias, reset):
    return x.new_empty(x.shape), weight.new_empty(weight.shape[1] + 1, weight.shape[0])


def _save(ctx, inputs, output):
    x, weight, bias, reset = inputs
    ctx.biased = bias is not None
    ctx.save_for_backward(x, weight, bias, reset)


def _differentiate(ctx, dy):
    dx, rows = _backward(dy, *ctx.saved_tensors)
    return dx, rows[:-1].T, rows[-1] if ctx.biased else None, None


_forward.register_autograd(_differentiate, setup_context=_save)


def fused_heads(x: Tensor, width: int, key_dim: int) -> bool:
    """Whether :func:`normalised_conv` is to take ``x``, a convolution of ``width`` taps and keys of ``key_dim``."""
    return fused(x, width) and 16 <= key_dim <= 256 and key_dim & (key_dim - 1) == 0


def normalised_conv(
    x: Tensor, weight: Tensor, bias: Tensor | None, reset: Tensor | None, *, groups: int, key_dim: int, scale: float,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """:func:`causal_conv` of queries, keys and values side by side, the heads of the first two divided by their norms.

    Args:
        x: [B, T, 2 G K + H V]. weight, bias, reset: as there.
        groups, key_dim: G, and K, a power of two from 16 to 256. scale: what queries are multiplied by, after all.
        eps: is added to a head's squares.

    Returns:
        q, k [B, T, G K], v [B, T, H V] in x's dtype, computed in float32.
    """
    return _forward_heads(
        x, weight.float(), None if bias is None else bias.float(), reset, groups, key_dim, scale, eps
    )


@operator("normalised_conv", device_types="cuda")
@chunks.on_its_device
def _forward_heads(
    x: Tensor, weight: Tensor, bias: Tensor | None, reset: Tensor | None, groups: int, key_dim: int, scale: float,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    from .triton_convolution import Heads, forward

    return forward(x, weight, bias, reset, Heads(groups, key_dim, scale, eps))


@operator("normalised_conv_backward", device_types="cuda")
@chunks.on_its_device
def _backward_heads(
    dq: Tensor, dk: Tensor, dv: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, reset: Tensor | None,
    groups: int, key_dim: int, scale: float, eps: float,
) -> tuple[Tensor, Tensor]:
    """As for ``_backward``."""
    from .triton_convolution import Heads, backward

    return backward((dq, dk, dv), x, weight, bias, reset, Heads(groups, key_dim, scale, eps))


@_forward_heads.register_fake
def _(x, weight, bias, reset, groups, key_dim, scale, eps):
    keys = groups * key_dim
    return tuple(x.new_empty(*x.shape[:2], width) for width in (keys, keys, x.shape[2] - 2 * keys))


@_backward_heads.register_fake
def _(dq, dk, dv, x, weight, bias, reset, groups, key_dim, scale, eps):
    return x.new_empty(x.shape), weight.new_empty(weight.shape[1] + 1, weight.shape[0])


def _save_heads(ctx, inputs, output):
    x, weight, bias, reset, *ctx.heads = inputs
    ctx.biased = bias is not None
    ctx.save_for_backward(x, weight, bias, reset)


def _differentiate_heads(ctx, dq, dk, dv):
    dx, rows = _backward_heads(dq, dk, dv, *ctx.saved_tensors, *ctx.heads)
    return dx, rows[:-1].T, rows[-1] if ctx.biased else None, None, None, None, None, None


_forward_heads.register_autograd(_differentiate_heads, setup_context=_save_heads)
