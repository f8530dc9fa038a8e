"""The causal convolution in front of a memory, fused where its modules are plain and by their own calls where not.

Shapes: B batch, T tokens, C channels, W convolution width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from surgery.kernels import convolution
from surgery.memory.modules import all_hooked, hooked, in_dtype_of, plain, require_loaded


def wide(x: Tensor) -> Tensor:
    """``x`` in float32, or float64 if it is already that."""
    return x if x.dtype == torch.float64 else x.float()


def causal_conv(x: Tensor, past: Tensor | None, weight: Tensor, bias: Tensor | None, reset: Tensor | None) -> Tensor:
    """Depthwise causal convolution followed by SiLU, which never reads across the start of a document.

    Args:
        x: [B, T, C]. past: [B, W-1, C], the inputs before them; None at the start of a text, for zeros.
        weight: [C, 1, W]. bias: [C] or None.
        reset: [B, T] bool or None, True on the first token of a document.

    Returns:
        [B, T, C] in x's dtype, computed in float32.
    """
    tokens, width = x.shape[1], weight.shape[-1]
    if past is None and convolution.fused(x, width):
        return convolution.causal_conv(x, weight[:, 0], bias, reset)
    # padding fuses under torch.compile, where a concatenation is written out
    full = F.pad(x, (0, 0, width - 1, 0)) if past is None else torch.cat([past.to(x.dtype), x], dim=1)
    if reset is None and x.device.type == "cpu" and x.dtype == weight.dtype:
        out = F.conv1d(full.transpose(1, 2), weight, bias, groups=weight.shape[0]).transpose(1, 2)
        return F.silu(out)
    # a sum of W shifts: it fuses under torch.compile, and each shift can be cut at a document's start
    full, taps = wide(full), wide(weight)[:, 0]
    document = None
    if reset is not None:
        document = F.pad(reset.to(torch.int32).cumsum(1), (width - 1, 0))
    out = None if bias is None else wide(bias)
    for tap in range(width):
        shifted = full[:, tap : tap + tokens]
        if document is not None and tap < width - 1:
            same = document[:, tap : tap + tokens] == document[:, width - 1 :]
            shifted = shifted * same[..., None]
        term = shifted * taps[:, tap]
        out = term if out is None else out + term
    return F.silu(out).to(x.dtype)


class CausalConv1d(nn.Conv1d):
    """A depthwise convolution with W - 1 zeros on either side, which can also hand over its weights.

    Handing them over is a call of the module too, so that what moves weights for the length of a call (accelerate)
    serves the fused convolution.
    """

    def forward(self, x: Tensor, hand_over: bool = False) -> Tensor | tuple[Tensor, Tensor | None]:
        """[B, C, T] -> [B, C, T + W - 1]; with ``hand_over``, the weight [C, 1, W] and the bias [C] or None."""
        require_loaded(self, x)
        return (self.weight, self.bias) if hand_over else super().forward(x)


def depthwise(channels: int, width: int, bias: bool) -> CausalConv1d:
    """A causal convolution of ``channels`` channels, each by itself."""
    return CausalConv1d(channels, channels, width, groups=channels, padding=width - 1, bias=bias)


def convolve(
    convolutions: Sequence[tuple[nn.Module, int]],
    width: int,
    x: Tensor,
    past: Tensor | None,
    reset: Tensor | None,
    fused: Callable[..., Tensor | tuple[Tensor, ...]],
) -> Tensor | tuple[Tensor, ...]:
    """``fused(x, past, weight, bias, reset)`` with the weights of all ``convolutions`` where these are plain; else what
    :func:`causal_conv` gives, made by each module's own call. Modules whose weights accelerate moves hand them over.

    Args:
        convolutions: the modules side by side, each with its number of channels. width: W, of all.
        x: [B, T, C]. past: [B, W-1, C] or None. reset: [B, T] bool or None.
    """
    found = []
    for module, _ in convolutions:
        if plain(module, CausalConv1d):
            found.append((module.weight, module.bias))
        elif _moved(module):
            found.append(module(x, hand_over=True))
        else:
            break
    else:
        if len(found) == 1:
            return fused(x, past, *found[0], reset)
        weights, biases = zip(*found, strict=True)
        return fused(x, past, torch.cat(weights), None if biases[0] is None else torch.cat(biases), reset)
    sizes = [channels for _, channels in convolutions]
    pasts = [None] * len(sizes) if past is None else past.split(sizes, dim=-1)
    cut = zip(convolutions, x.split(sizes, dim=-1), pasts, strict=True)
    parts = [_called(module, width, part, before, reset) for (module, _), part, before in cut]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)


def _moved(module: nn.Module) -> bool:
    """Whether all that a stranger changed in ``module`` is that accelerate moves its weights around its own forward."""
    its = module.__dict__
    if type(module) is not CausalConv1d or "_hf_hook" not in its or hooked(module) or all_hooked():
        return False
    own, forward = its.get("_old_forward"), its.get("forward")
    return (
        getattr(own, "__func__", None) is CausalConv1d.forward
        and getattr(forward, "__wrapped__", None) is own
        and getattr(getattr(forward, "func", None), "__module__", None) == "accelerate.hooks"
    )


def _called(module: nn.Module, width: int, x: Tensor, past: Tensor | None, reset: Tensor | None) -> Tensor:
    """:func:`causal_conv` by ``module``'s call on [B, C, S]: the inputs are laid out so that W - 1 zeros precede each
    document, and only the outputs at tokens are taken."""
    before = 0 if past is None else past.shape[1]
    full = x if past is None else torch.cat([past.to(x.dtype), x], dim=1)
    if reset is None:
        out = module(in_dtype_of(module, full).transpose(1, 2))[..., before : before + x.shape[1]]
        return F.silu(out.transpose(1, 2)).to(x.dtype)
    document = F.pad(reset.long().cumsum(1), (before, 0))
    place = torch.arange(full.shape[1], device=x.device) + (width - 1) * document  # [B, past and T]
    place = place[..., None].expand(-1, -1, x.shape[-1])
    unread = x.is_meta or torch.compiler.is_compiling()  # the number of documents cannot be asked for
    gaps = (width - 1) * (x.shape[1] if unread else int(document.max()))
    spread = x.new_zeros(x.shape[0], full.shape[1] + gaps, x.shape[-1]).scatter(1, place, full)
    out = module(in_dtype_of(module, spread).transpose(1, 2)).transpose(1, 2).gather(1, place[:, before:])
    return F.silu(out).to(x.dtype)
