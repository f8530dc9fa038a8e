"""The mixers' gated root mean square norm, on CUDA: operators that torch.compile does not look into.

torch.compile reads the norm's inputs again for each of its gradients, and makes the gate's once more inside the
concatenation of the projections' gradients; here the backward pass is one kernel.
"""

from __future__ import annotations

from torch import Tensor

from . import chunks
from .operators import operator

BY_DEFAULT = True  # whether it runs unasked
MAX_WIDTH = 16384  # of a group: a program of the kernels holds all of it


def fused(x: Tensor, width: int) -> bool:
    """Whether the operators are to take ``x`` and groups of ``width`` channels."""
    return width <= MAX_WIDTH and chunks.fused(x, BY_DEFAULT)


def gated_norm(
    x: Tensor,
    gate: Tensor,
    weight: Tensor,
    groups: int,
    eps: float,
    *,
    activation: str = "silu",
    gate_first: bool = False,
    values: Tensor | None = None,
    skip: Tensor | None = None,
) -> Tensor:
    """With y = x + skip values, a = activation(gate), and rms the root of eps plus the mean square in each group:

        weight y / rms(y) a, or weight (a y) / rms(a y) where ``gate_first``.

    Args:
        x, gate, values: [B, T, C]. weight, skip: [C]. groups: of C / groups neighbouring channels each.
        activation: ``silu`` or ``sigmoid``.

    Returns:
        [B, T, C] in x's dtype, computed in float32.
    """
    skip = None if skip is None else skip.float()
    return _forward(x, gate, weight.float(), values, skip, groups, eps, activation == "sigmoid", gate_first)


@operator("gated_norm", device_types="cuda")
@chunks.on_its_device
def _forward(
    x: Tensor, gate: Tensor, weight: Tensor, values: Tensor | None, skip: Tensor | None, groups: int, eps: float,
    sigmoid: bool, gate_first: bool,
) -> Tensor:
    from .triton_gated_norm import forward

    return forward(x, gate, weight, values, skip, groups, eps, sigmoid, gate_first)


@operator("gated_norm_backward", device_types="cuda")
@chunks.on_its_device
def _backward(
    dout: Tensor, x: Tensor, gate: Tensor, weight: Tensor, values: Tensor | None, skip: Tensor | None, groups: int,
    eps: float, sigmoid: bool, gate_first: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of x, of the gate, and of the weight and skip, there or not, in rows [2, C]."""
    from .triton_gated_norm import backward

    return backward(dout, x, gate, weight, values, skip, groups, eps, sigmoid, gate_first)


@_forward.register_fake
def _(x, gate, weight, values, skip, groups, eps, sigmoid, gate_first):
    return x.new_empty(x.shape)


@_backward.register_fake
def _(dout, x, gate, weight, values, skip, groups, eps, sigmoid, gate_first):
    return x.new_empty(x.shape), gate.new_empty(gate.shape), weight.new_empty(2, weight.shape[0])


def _save(ctx, inputs, output):
    *tensors, groups, eps, sigmoid, gate_first = inputs
    ctx.options = groups, eps, sigmoid, gate_first
    ctx.save_for_backward(*tensors)


def _differentiate(ctx, dout):
    x, gate, weight, values, skip = ctx.saved_tensors
    dx, dgate, rows = _backward(dout, x, gate, weight, values, skip, *ctx.options)
    if values is None:
        return dx, dgate, rows[0], *[None] * 6
    return dx, dgate, rows[0], (dx * skip).to(values.dtype), rows[1], *[None] * 4


_forward.register_autograd(_differentiate, setup_context=_save)
