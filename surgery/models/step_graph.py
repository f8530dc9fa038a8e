"""Decoding without waiting for Python: one token's pass through all blocks, recorded as a CUDA graph and replayed.

A decoded token is a hundred kernels a layer, each over in microseconds, which Python starts one by one. Where a cache
holds nothing but states of fixed size, written in place, a step is the same kernels on the same memory every time: once
a cache has been stepped :data:`AFTER` times, the next step is recorded, and those after it are started by one call.

Attention, whose keys grow, is not recorded; nor is a step that someone watches (hooks, hidden states, gradients), nor
blocks that hold modules of other libraries, which may do something else from one step to the next. What a recording
rests on (the modules, their tensors, training or not) is looked at before each replay. Python attributes of this
project's modules are not: who changes one between two steps on one cache turns recording off.
"""

from __future__ import annotations

import os
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, LinearAttentionLayer

from surgery.errors import UsageError
from surgery.kernels.operators import HOME
from surgery.memory.modules import all_hooked, resident, watched

SWITCH = "SURGERY_CUDA_GRAPHS"
AFTER = 3  # steps that run as they are written: they compile the kernels, and a short text needs no recording

_as_written: ContextVar[bool] = ContextVar("as_written", default=False)
_one_at_a_time = threading.Lock()
_streams: dict[torch.device, Any] = {}


@contextmanager
def as_written() -> Iterator[None]:
    """Within it no step is recorded or replayed."""
    before = _as_written.set(True)
    try:
        yield
    finally:
        _as_written.reset(before)


class _Recording(NamedTuple):
    """A step from ``given`` [B, 1, D] to ``made``, on the memory of ``states``."""

    states: list[Tensor]
    modules: list[weakref.ref]
    manner: list[tuple]  # of each module, see :func:`_manner`
    given: Tensor
    made: Tensor
    replay: Callable[[], None]


class _Steps:
    """What is known of one cache."""

    def __init__(self) -> None:
        self.kind: tuple | None = None
        self.count = 0
        self.recording: _Recording | None = None


_known: weakref.WeakKeyDictionary[Cache, _Steps] = weakref.WeakKeyDictionary()


def step(parts: Sequence[nn.Module], blocks: Callable[[Tensor], Tensor], hidden: Tensor, cache: Cache) -> Tensor:
    """``blocks(hidden)``, a pass of [B, 1, D] through ``parts``, that reads and writes ``cache``."""
    if torch.compiler.is_compiling() or not (_on_a_gpu(hidden) and _wanted() and _recordable(cache)):
        return blocks(hidden)
    steps = _known.setdefault(cache, _Steps())
    kind = (*hidden.shape, hidden.dtype, hidden.device, torch.is_inference_mode_enabled())
    if steps.kind != kind:
        steps.kind, steps.count, steps.recording = kind, 0, None
    modules = [module for part in parts for module in part.modules()]
    manner = list(map(_manner, modules))
    if steps.recording is not None and not _holds(steps.recording, modules, manner, cache):
        steps.count, steps.recording = 0, None
    if steps.recording is None:
        steps.count += 1
        if steps.count <= AFTER or None in manner or not all(map(_familiar, modules)):
            return blocks(hidden)
        steps.recording = _record(modules, manner, blocks, hidden, cache)
        if steps.recording is None:
            steps.count = -(2**62)  # not again
            return blocks(hidden)
    recording = steps.recording
    recording.given.copy_(hidden)
    recording.replay()
    torch.autograd.graph.increment_version(recording.states)  # who has saved one for a gradient is told
    return recording.made.clone()


def _on_a_gpu(x: Tensor) -> bool:
    # autocast keeps what it has cast until its block ends, and a recording would go on reading it
    return x.is_cuda and not torch.is_autocast_enabled("cuda") and not torch.cuda.is_current_stream_capturing()


def _wanted() -> bool:
    choice = os.environ.get(SWITCH)
    if choice not in (None, "0", "1"):
        raise UsageError(f"{SWITCH}={choice}: choose 0 or 1")
    if choice == "0" or _as_written.get() or torch.is_grad_enabled():
        return False
    return torch._C._len_torch_dispatch_stack() == 0 and not all_hooked()


def _recordable(cache: Cache) -> bool:
    """Whether ``cache`` holds only states of fixed size, and all of them already."""
    return all(
        type(layer) is LinearAttentionLayer and layer.has_previous_state[0] and not getattr(layer, "record_past", False)
        for layer in cache.layers
    )


def _familiar(module: nn.Module) -> bool:
    """Whether it is known that ``module``, of one of these libraries, does the same at every step."""
    return type(module).__module__.startswith(("torch.", "transformers.", f"{HOME}."))


def _manner(module: nn.Module) -> tuple | None:
    """How ``module`` runs, and on which memory; None where that is watched or replaced. At every step, so a look into
    its dictionary at once."""
    if watched(module):
        return None
    its = module.__dict__
    held = (*its["_parameters"].values(), *its["_buffers"].values())
    return its["training"], *((x.data_ptr(), x.dtype) for x in held if x is not None)


def _states(cache: Cache) -> list[dict[int, Tensor]]:
    """What holds the cache's states, each in slot 0."""
    return [held for layer in cache.layers for held in (layer.conv_states, layer.recurrent_states)]


def _holds(recording: _Recording, modules: list[nn.Module], manner: list[tuple | None], cache: Cache) -> bool:
    """Whether the recording still is what a step does. States that were exchanged, as beam search does, are put where
    it looks for them."""
    if manner != recording.manner or any(
        known() is not module for known, module in zip(recording.modules, modules, strict=True)
    ):
        return False
    pairs = list(zip(_states(cache), recording.states, strict=True))
    exchanged = [(held, recorded) for held, recorded in pairs if held[0] is not recorded]
    if any((held[0].shape, held[0].dtype) != (recorded.shape, recorded.dtype) for held, recorded in exchanged):
        return False
    if not exchanged:
        return True
    places = [held[0].untyped_storage().data_ptr() for held, _ in pairs if held[0].numel()]
    if len(set(places)) < len(places):  # two layers hold one state
        return False
    known = {recorded.untyped_storage().data_ptr() for recorded in recording.states}
    # where layers have exchanged theirs, none is overwritten before it has been read
    fresh = [held[0].clone() if held[0].untyped_storage().data_ptr() in known else held[0] for held, _ in exchanged]
    for (held, recorded), value in zip(exchanged, fresh, strict=True):
        recorded.copy_(value)
        held[0] = recorded
    return True


def _record(
    modules: list[nn.Module], manner: list[tuple], blocks: Callable[[Tensor], Tensor], hidden: Tensor, cache: Cache
) -> _Recording | None:
    if not all(map(resident, modules)):
        return None  # such as a shard, of which nothing says where it is
    given = hidden.clone()
    try:
        with _one_at_a_time:
            made, replay = _capture(blocks, given)
    except Exception as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        warnings.warn(f"decoding runs without a CUDA graph ({SWITCH}=0 does not try): {reason}", stacklevel=2)
        return None
    states = [held[0] for held in _states(cache)]
    return _Recording(states, list(map(weakref.ref, modules)), manner, given, made, replay)


def _capture(blocks: Callable[[Tensor], Tensor], given: Tensor) -> tuple[Tensor, Callable[[], None]]:
    """What ``blocks(given)`` returns once it is replayed. Nothing runs while it is recorded."""
    with torch.cuda.device(given.device), warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*CUDA Graph is empty.*")
        # torch's own stream for this is made once, on the device that happens to be the first
        stream = _streams.setdefault(given.device, torch.cuda.Stream())
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            made = blocks(given)
    return made, graph.replay
