"""What all grafts share: the causal convolution, padding, packing, the cache, float32 gates.

Shapes: B batch, T tokens, D hidden, C convolution channels, W convolution width; the rest as in
:mod:`surgery.memory.base`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from surgery.graft import cache as carried
from surgery.graft import compiling
from surgery.kernels import convolution
from surgery.memory.base import MemoryInputs, MemoryRule


def wide(x: Tensor) -> Tensor:
    """``x`` in float32, or float64 if it is already that."""
    return x if x.dtype == torch.float64 else x.float()


def _hooked(module: nn.Module) -> bool:
    """Whether calling ``module`` does more than its own forward and backward pass."""
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    return any(len(each) > 0 for each in hooks)


def project(hidden: Tensor, first: Sequence[nn.Module], rest: Sequence[nn.Module]) -> tuple[Tensor, list[Tensor]]:
    """The projections ``first`` of [B, T, D] side by side, and each of ``rest``.

    Under torch.compile all are slices of one product: it and its two gradients cost a GPU less than each projection's
    own, and nothing has to be put together.
    """
    projections = (*first, *rest)
    plain = all(type(p) is nn.Linear and p.bias is None and not _hooked(p) for p in projections)
    if torch.compiler.is_compiling() and plain:
        rows = F.linear(hidden, torch.cat([p.weight for p in projections]))
        widths = [sum(p.out_features for p in first), *(p.out_features for p in rest)]
        x, *others = rows.split(widths, dim=-1)
        return x, others
    outputs = [p(hidden) for p in first]
    x = outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=-1)
    return x, [p(hidden) for p in rest]


def padding(attention_mask: Tensor | None, tokens: int) -> Tensor | None:
    """The last ``tokens`` columns of a [B, S] mask as bool (True on tokens), None if there is no padding mask."""
    if attention_mask is None or attention_mask.ndim != 2:
        return None
    return attention_mask[:, -tokens:].bool()


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


class Graft(nn.Module):
    """A mixer: projections -> convolution -> memory inputs -> memory -> norm and gate -> output projection.

    To watch a graft at work, put a forward hook on its ``memory``: its arguments are the :class:`MemoryInputs` (with
    ``log_decay``) and the state before, its result the outputs and the state after.
    """

    float32 = ("A_log", "dt_bias")  # never cast to a half precision: it would shift every decay

    def __init__(self, memory: MemoryRule, *, layer_idx: int, norm_eps: float) -> None:
        super().__init__()
        self.memory = memory
        self.geometry = memory.geometry
        self.layer_idx = layer_idx
        self.norm_eps = norm_eps
        self.A_log = nn.Parameter(torch.zeros(self.geometry.num_heads, dtype=torch.float32))
        self.dt_bias = nn.Parameter(torch.zeros(self.geometry.num_heads, dtype=torch.float32))

    # what a family fills in

    def _project(self, hidden: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """[B, T, D] -> the convolution's input [B, T, C] and the projections that bypass it."""
        raise NotImplementedError

    def _convolution(self) -> tuple[Tensor, Tensor | None] | None:
        """Weight [C, 1, W] and bias [C] of the convolution, or None where the mixer has none."""
        raise NotImplementedError

    def _convolve(
        self, x: Tensor, past: Tensor | None, weight: Tensor, bias: Tensor | None, reset: Tensor | None
    ) -> Tensor | tuple[Tensor, ...]:
        """:func:`causal_conv`; or, where a family's kernel gives them, the parts of it that ``_compose`` makes."""
        return causal_conv(x, past, weight, bias, reset)

    def _compose(self, hidden: Tensor, x: Tensor | tuple[Tensor, ...], rest: tuple[Tensor, ...]) -> MemoryInputs:
        """The memory's inputs from the convolved projections ``x`` [B, T, C]; the caller adds mask and reset."""
        raise NotImplementedError

    def _emit(self, o: Tensor, inputs: MemoryInputs, rest: tuple[Tensor, ...]) -> Tensor:
        """Norm, gate and output projection: the memory's outputs [B, T, H, V] -> [B, T, D]."""
        raise NotImplementedError

    # what a user calls

    def inputs(
        self,
        hidden_states: Tensor,
        cache: Any = None,
        attention_mask: Tensor | None = None,
        reset: Tensor | None = None,
    ) -> MemoryInputs:
        """The memory's inputs for ``hidden_states`` [B, T, D]; the cache's window is read, the cache not written."""
        window, _ = carried.read(cache, self.layer_idx)
        mask = padding(attention_mask, hidden_states.shape[1])
        return self._gather(hidden_states, mask, reset, window)[0]

    def forward(
        self,
        hidden_states: Tensor,
        cache: Any = None,
        attention_mask: Tensor | None = None,
        reset: Tensor | None = None,
        *,
        cache_params: Any = None,
        past_key_values: Any = None,
        **_: Any,
    ) -> Tensor:
        """Mix tokens.

        Args:
            hidden_states: [B, T, D], after the block's norm.
            cache: a transformers cache; its window and state continue the text, and are updated.
            attention_mask: [B, S >= T], 0 on padding; the last T columns count. Padding leaves the state as it was
                and is a zero input of the convolution; its own outputs are those of an empty memory.
            reset: [B, T] bool, True on the first token of a document.

        Returns:
            [B, T, D] in the dtype of ``hidden_states``.
        """
        cache = carried.chosen(cache, cache_params, past_key_values)
        window, state = carried.read(cache, self.layer_idx)
        mask = padding(attention_mask, hidden_states.shape[1])
        if cache is None and hidden_states.shape[1] > 1 and compiling.active() and self._compiles(hidden_states):
            return compiling.run(_mixed, self, (self.memory.rule, self.geometry), hidden_states, mask, reset)
        # the cache's own state, whose old value nothing needs once there is a new one, except a hook that is given both
        in_place = cache is not None and not torch.is_grad_enabled() and not _hooked(self.memory)
        mixed, window, state = _mix(self, hidden_states, mask, reset, window, state, in_place)
        if cache is not None:
            carried.write(cache, self.layer_idx, window, state)
        return mixed

    def _compiles(self, hidden: Tensor) -> bool:
        # a hook that comes after the compilation would not be called; the mixer's own are, outside of it
        watched = any(_hooked(module) for module in self.modules() if module is not self)
        return not watched and self.memory.compiles(hidden.device)

    def _gather(
        self, hidden: Tensor, mask: Tensor | None, reset: Tensor | None, window: Tensor | None
    ) -> tuple[MemoryInputs, tuple[Tensor, ...], Tensor]:
        """Memory inputs, the projections that bypass the convolution, and the window [B, C, W] for the next call."""
        x, rest = self._project(hidden)
        convolution = self._convolution()
        if convolution is None:
            x = F.silu(x)
            window = x.new_zeros(x.shape[0], 0, 1)
        else:
            weight, bias = convolution
            if mask is not None:
                x = x * mask[..., None].to(x.dtype)
            width = weight.shape[-1]
            past = None
            if window is not None:
                past = window[..., window.shape[-1] - (width - 1) :].transpose(1, 2)
            window = _window(x, past, reset, width)
            x = (causal_conv if mask is not None else self._convolve)(x, past, weight, bias, reset)
        if mask is not None:
            x = x * mask[..., None].to(x.dtype)
        return replace(self._compose(hidden, x, rest), mask=mask, reset=reset), rest, window

    def _apply(self, fn, recurse: bool = True):
        """Casts to a half precision leave A_log and dt_bias in float32."""
        kept = {name: getattr(self, name).data for name in self.float32}
        super()._apply(fn, recurse)
        for name, before in kept.items():
            parameter = getattr(self, name)
            if parameter.dtype in (torch.float16, torch.bfloat16):
                parameter.data = before.to(parameter.device, torch.float32)
                if parameter.grad is not None:
                    parameter.grad = parameter.grad.float()
        return self


def _mix(
    graft: Graft,
    hidden: Tensor,
    mask: Tensor | None,
    reset: Tensor | None,
    window: Tensor | None = None,
    state: Tensor | None = None,
    in_place: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """A mixer's output, window and state, for which the old one may be overwritten."""
    inputs, rest, window = graft._gather(hidden, mask, reset, window)
    o, state = graft.memory(replace(inputs, in_place=in_place), state)
    if mask is not None:
        o = o * mask[..., None, None].to(o.dtype)
    return graft._emit(o, inputs, rest), window, state


def _mixed(graft: Graft, hidden: Tensor, mask: Tensor | None, reset: Tensor | None) -> Tensor:
    # a function and no method of each layer, so that all layers share what is compiled
    return _mix(graft, hidden, mask, reset)[0]


def _window(x: Tensor, past: Tensor | None, reset: Tensor | None, width: int) -> Tensor:
    """The last W convolution inputs [B, C, W], zero where they belong to an earlier document than the last token."""
    full = F.pad(x, (0, 0, width - 1, 0)) if past is None else torch.cat([past.to(x.dtype), x], dim=1)
    full = full[:, -width:]
    if reset is not None:
        document = F.pad(reset.to(torch.int32).cumsum(1), (width - 1, 0))
        full = full * (document[:, -width:] == document[:, -1:])[..., None]
    return full.transpose(1, 2)


class RMSNorm(nn.Module):
    """Root mean square norm over the last dimension with a weight; computed in float32, returned in x's dtype."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        if compiling.active() and x.shape[-2] > 1:
            return compiling.run(_normed, self, (self.eps,), x)
        return _normed(self, x)


def _normed(norm: RMSNorm, x: Tensor) -> Tensor:
    y = wide(x)
    y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + norm.eps)
    return (y * wide(norm.weight)).to(x.dtype)
