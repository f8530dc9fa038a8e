"""What all grafts share: padding, packing, the cache, float32 gates.

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
from surgery.graft.short_conv import causal_conv, convolve, wide
from surgery.memory.base import MemoryInputs, MemoryRule
from surgery.memory.modules import all_hooked, fetched, plain, replaced, require_loaded, resident, watched


def project(hidden: Tensor, first: Sequence[nn.Module], rest: Sequence[nn.Module]) -> tuple[Tensor, list[Tensor]]:
    """The projections ``first`` of [B, T, D] side by side, and each of ``rest``.

    Under torch.compile all are slices of one product: it and its two gradients cost a GPU less than each projection's
    own, and nothing has to be put together.
    """
    projections = (*first, *rest)
    if torch.compiler.is_compiling() and all(plain(p, nn.Linear) and p.bias is None for p in projections):
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


class Graft(nn.Module):
    """A mixer: projections -> convolution -> memory inputs -> memory -> norm and gate -> output projection.

    To watch a graft at work, put a forward hook on its ``memory``: its arguments are the :class:`MemoryInputs` (with
    ``log_decay``) and the state before, its result the outputs and the state after.
    """

    float32 = ("A_log", "dt_bias")  # never cast to a half precision: it would shift every decay

    def __init__(self, memory: MemoryRule, *, layer_idx: int, norm_eps: float, conv_width: int = 0) -> None:
        super().__init__()
        self.conv_width = conv_width  # W, 0 where the mixer has no convolution
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

    def _convolutions(self) -> Sequence[tuple[nn.Module, int]]:
        """The convolutions over parts of x side by side, each with its channels; none where the mixer has none."""
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
        with fetched(self):
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
        in_place = cache is not None and not torch.is_grad_enabled() and not (watched(self.memory) or all_hooked())
        mixed, window, state = _mix(self, hidden_states, mask, reset, window, state, in_place)
        if cache is not None:
            carried.write(cache, self.layer_idx, window, state)
        return mixed

    def _compiles(self, hidden: Tensor) -> bool:
        # a hook that comes after the compilation would not be called; the mixer's own are, outside of it
        if all_hooked() or replaced(self) or any(watched(module) for module in self.modules() if module is not self):
            return False
        return all(map(resident, self.modules())) and self.memory.compiles(hidden.device)

    def _gather(
        self, hidden: Tensor, mask: Tensor | None, reset: Tensor | None, window: Tensor | None
    ) -> tuple[MemoryInputs, tuple[Tensor, ...], Tensor]:
        """Memory inputs, the projections that bypass the convolution, and the window [B, C, W] for the next call."""
        require_loaded(self, hidden)
        x, rest = self._project(hidden)
        convolutions = self._convolutions()
        if not convolutions:
            x = F.silu(x)
            window = x.new_zeros(x.shape[0], 0, 1)
        else:
            if mask is not None:
                x = x * mask[..., None].to(x.dtype)
            width, past = self.conv_width, None
            if window is not None:
                past = window[..., window.shape[-1] - (width - 1) :].transpose(1, 2)
            window = _window(x, past, reset, width)
            fused = causal_conv if mask is not None else self._convolve
            x = convolve(convolutions, width, x, past, reset, fused)
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
        if compiling.active() and x.shape[-2] > 1 and plain(self, RMSNorm):
            return compiling.run(_normed, self, (self.eps,), x)
        return _normed(self, x)


def _normed(norm: RMSNorm, x: Tensor) -> Tensor:
    y = wide(x)
    y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + norm.eps)
    return (y * wide(norm.weight)).to(x.dtype)
