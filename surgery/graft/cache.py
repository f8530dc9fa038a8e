"""What a graft keeps between calls, in transformers' linear-attention cache layers.

A layer holds one convolution window [B, C, W] (the last W inputs of the causal convolution; C is 0 for a mixer without
one) and one recurrent state, the memory's packed float32 tensor, both in slot 0. transformers marks a layer as filled
on its first convolution update only and counts its slots from the configuration, so one tensor a kind is what every
release, beam search included, handles without help.

transformers 5.17 calls the cache ``cache_params`` or ``past_key_values``; later releases call it ``cache``. Grafts and
models take all three names.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def chosen(cache: Any = None, cache_params: Any = None, past_key_values: Any = None) -> Any:
    """The one cache given under any of its names, or None.

    Raises:
        ValueError: two different caches were given.
    """
    given = [one for one in (cache, cache_params, past_key_values) if one is not None]
    if any(one is not given[0] for one in given):
        raise ValueError("cache, cache_params and past_key_values are names of one argument: give one of them")
    return given[0] if given else None


def read(cache: Any, layer_idx: int) -> tuple[Tensor | None, Tensor | None]:
    """The convolution window [B, C, W] and the memory's state left by the previous call, None where there is none."""
    if cache is None:
        return None, None
    layer = _layer(cache, layer_idx)
    # after a reset the tensors are still there, zeroed: that is not the initial state of every memory
    if not layer.has_previous_state[0]:
        return None, None
    return layer.conv_states[0], layer.recurrent_states[0]


def write(cache: Any, layer_idx: int, window: Tensor, state: Tensor) -> None:
    """Keep the window and the state for the next call. The cache carries values, not gradients."""
    layer = _layer(cache, layer_idx)
    layer.update_conv_state(window.detach(), 0, conv_kernel_size=window.shape[-1])
    held = layer.recurrent_states[0] if layer.is_recurrent_states_initialized[0] else None
    if held is not state:
        layer.update_recurrent_state(state.detach(), 0)
    else:  # a kernel has written it: who has saved the old one for a gradient is told
        torch.autograd.graph.increment_version(state)


def _layer(cache: Any, layer_idx: int) -> Any:
    layer = cache.layers[layer_idx]
    if not hasattr(layer, "recurrent_states"):
        raise ValueError(
            f"layer {layer_idx} of the cache is a {type(layer).__name__}, which holds no recurrent state: "
            "create the cache with DynamicCache(config=model.config)"
        )
    return layer
