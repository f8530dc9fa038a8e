"""Decoding without waiting for Python: one token's pass through all blocks, recorded as a CUDA graph and replayed.

A decoded token is a hundred kernels a layer, each over in microseconds, which Python starts one by one. Where a cache
holds nothing but states of fixed size, written in place, a step is the same kernels on the same memory every time: once
a cache has been stepped :data:`AFTER` times, the next step is recorded, and those after it are started by one call.

Attention, whose keys grow, is not recorded; nor is a step that someone watches (hooks, hidden states, gradients).
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, LinearAttentionLayer

from surgery.errors import UsageError
from surgery.graft.base import hooked

SWITCH = "SURGERY_CUDA_GRAPHS"
AFTER = 3  # steps that run as they are written: they compile the kernels, and a short text needs no recording


_wanted = True


@contextmanager
def as_written() -> Iterator[None]:
    """Within it no step is recorded or replayed."""
    global _wanted
    before, _wanted = _wanted, False
    try:
        yield
    finally:
        _wanted = before


class _Recording(NamedTuple):
    """A step from ``given`` [B, 1, D] to ``made``, on the memory of ``states``."""

    states: list[Tensor]
    places: list[int]  # of the model's tensors
    modules: list[nn.Module]
    given: Tensor
    made: Tensor
    replay: Callable[[], None]


class _Steps:
    """What is known of one cache."""

    def __init__(self) -> None:
        self.shape: tuple[int, ...] | None = None
        self.count = 0
        self.recording: _Recording | None = None


_known: WeakKeyDictionary[Cache, _Steps] = WeakKeyDictionary()


def step(backbone: nn.Module, blocks: Callable[[Tensor], Tensor], hidden: Tensor, cache: Cache) -> Tensor:
    """``blocks(hidden)``, a pass of [B, 1, D] through ``backbone``'s blocks that reads and writes ``cache``."""
    if not (_wanted and _on_a_gpu(hidden) and _chosen() and _recordable(cache)):
        return blocks(hidden)
    steps = _known.setdefault(cache, _Steps())
    shape = (*hidden.shape, hidden.dtype, hidden.device)
    if steps.shape != shape:
        steps.shape, steps.count, steps.recording = shape, 0, None
    recording = steps.recording
    if recording is not None and not _holds(recording, backbone, cache):
        recording = steps.recording = None
        steps.count = 0
    if recording is None:
        steps.count += 1
        if steps.count <= AFTER or _watched(backbone.modules()):
            return blocks(hidden)
        recording = steps.recording = _record(backbone, blocks, hidden, cache)
        if recording is None:
            steps.count = -(2**62)  # not again
            return blocks(hidden)
    recording.given.copy_(hidden)
    recording.replay()
    return recording.made.clone()


def _chosen() -> bool:
    choice = os.environ.get(SWITCH)
    if choice not in (None, "0", "1"):
        raise UsageError(f"{SWITCH}={choice}: choose 0 or 1")
    return choice != "0" and not torch.is_grad_enabled() and not torch.compiler.is_compiling()


def _on_a_gpu(x: Tensor) -> bool:
    # autocast keeps what it has cast until its block ends, and a recording would go on reading it
    return x.is_cuda and not torch.is_autocast_enabled("cuda")


def _recordable(cache: Cache) -> bool:
    """Whether ``cache`` holds only states of fixed size, and all of them already."""
    return all(
        type(layer) is LinearAttentionLayer and layer.has_previous_state[0] and not getattr(layer, "record_past", False)
        for layer in cache.layers
    )


def _states(cache: Cache) -> list[tuple[dict[int, Tensor], int]]:
    return [(held, 0) for layer in cache.layers for held in (layer.conv_states, layer.recurrent_states)]


def _holds(recording: _Recording, backbone: nn.Module, cache: Cache) -> bool:
    """Whether the recording still is what a step does. States that were exchanged, as beam search does, are put where
    it looks for them."""
    if _watched(recording.modules) or recording.places != _places(backbone):
        return False
    states = _states(cache)
    for (held, slot), recorded in zip(states, recording.states, strict=True):
        if held[slot] is not recorded and (held[slot].shape, held[slot].dtype) != (recorded.shape, recorded.dtype):
            return False
    for (held, slot), recorded in zip(states, recording.states, strict=True):
        if held[slot] is not recorded:
            recorded.copy_(held[slot])
            held[slot] = recorded
    return True


def _watched(modules: Any) -> bool:
    # accelerate moves weights in and out of a module's forward
    return any(hooked(module) or hasattr(module, "_hf_hook") for module in modules)


def _places(backbone: nn.Module) -> list[int]:
    return [x.data_ptr() for tensors in (backbone.parameters(), backbone.buffers()) for x in tensors]


def _record(
    backbone: nn.Module, blocks: Callable[[Tensor], Tensor], hidden: Tensor, cache: Cache
) -> _Recording | None:
    given = hidden.clone()
    states = [held[slot] for held, slot in _states(cache)]
    try:
        made, replay = _capture(blocks, given)
    except RuntimeError as error:
        warnings.warn(
            f"decoding runs without a CUDA graph ({SWITCH}=0 does not try): {str(error).splitlines()[0]}", stacklevel=2
        )
        return None
    return _Recording(states, _places(backbone), list(backbone.modules()), given, made, replay)


def _capture(blocks: Callable[[Tensor], Tensor], given: Tensor) -> tuple[Tensor, Callable[[], None]]:
    """What ``blocks(given)`` returns once it is replayed. Nothing runs while it is recorded."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.device(given.device), torch.cuda.graph(graph, capture_error_mode="thread_local"):
        made = blocks(given)
    return made, graph.replay
