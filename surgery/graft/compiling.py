"""torch.compile for training on a GPU: a mixer's forward and backward pass as a few fused kernels around its products.

    with compiled_mixers():
        train()

Within it, a graft's call on a whole batch (more than one token, no cache) is compiled, once for each shape, dtype,
memory rule and set of trained parameters; layers that agree in these share one compilation. Decoding, and everything
outside, runs as it is written. What cannot be compiled runs as it is written too, and torch says so.

Compilers err, differently on each device and in each version: before a compilation is used, its outputs and gradients
are compared with those of what it compiles, on the first batch.
"""

from __future__ import annotations

import functools
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from surgery.errors import UsageError
from surgery.kernels.chunks import TRITON
from surgery.kernels.operators import operator

SWITCH = "SURGERY_COMPILE"
VARIANTS = 64  # compilations of one function: shapes, rules, and who gets gradients
# how far a compiled output or gradient may be off, relative: the faults seen were 0.4 and more. But a compiler rounds
# in another order, and a gradient may be made of that (0.14 of a delta rule's was, with random weights in bfloat16): so
# it may also be off by RESPONSES times what a rounding of the input does to it, and by MOST at most where it is more
# than SMALL times the largest
TOLERANCE, RESPONSES, MOST, SMALL = 0.1, 2.0, 0.3, 1e-3
ROUNDING = {True: 2.0**-8, False: 2.0**-11}  # in half precision and, for kernels that take products in tf32, otherwise

_active = False
# whether a kind of mixer agrees with its compilation, and what of that each mixer has asked for
_verdicts: dict[tuple, bool] = {}
_known: WeakKeyDictionary[nn.Module, dict[tuple, bool]] = WeakKeyDictionary()


def wanted(device: str) -> bool:
    """Whether training on ``device`` compiles: on CUDA, unless SURGERY_COMPILE=0, and where Triton can build kernels.

    Raises:
        UsageError: SURGERY_COMPILE is neither 0 nor 1.
    """
    return _choice() != "0" and device.startswith("cuda") and TRITON


def _choice() -> str | None:
    choice = os.environ.get(SWITCH)
    if choice not in (None, "0", "1"):
        raise UsageError(f"{SWITCH}={choice}: choose 0 or 1")
    return choice


def remark(device: str) -> str | None:
    """What a user should know of it before the first step, if anything."""
    if wanted(device):
        return f"the first step compiles and compares what it can, which takes about a minute ({SWITCH}=0: nothing)"
    if device.startswith("cuda") and not TRITON:
        return "there is no C compiler, Python header or Triton to build kernels with: the mixers run more slowly"
    return None


@contextmanager
def compiled_mixers(active: bool = True) -> Iterator[None]:
    """Compile within the block, if ``active``."""
    global _active
    from torch._dynamo import config

    before, _active = _active, active
    _known.clear()  # other parameters may be trained than before
    try:
        with config.patch(recompile_limit=max(config.recompile_limit, VARIANTS), suppress_errors=True):
            yield
    finally:
        _active = before


def active() -> bool:
    """Whether a call that can be compiled is to be."""
    return _active and not torch.compiler.is_compiling()


def run(function: Callable[..., Tensor], module: nn.Module, kind: tuple, hidden: Tensor, *rest: Any) -> Tensor:
    """``function(module, hidden, *rest)``, a tensor like ``hidden``, compiled where that agrees with the function as it
    is written. ``kind`` is what the compilation depends on beside the module's class and parameters."""
    device = hidden.device.type
    call = (
        hidden.shape, hidden.dtype, hidden.requires_grad, torch.is_grad_enabled(), torch.is_autocast_enabled(device),
        *(x is None for x in rest),
    )
    known = _known.setdefault(module, {})
    if call not in known:
        trained = tuple((name, p.dtype, p.requires_grad) for name, p in module.named_parameters())
        kind = (function, type(module), kind, device, trained, call)
        if kind not in _verdicts:
            _verdicts[kind] = _agrees(function, module, hidden, rest)
        known[call] = _verdicts[kind]
    return (compiled(function) if known[call] else function)(module, hidden, *rest)


def _agrees(function: Callable[..., Tensor], module: nn.Module, hidden: Tensor, rest: tuple) -> bool:
    trained = {f"gradient of {name}": p for name, p in module.named_parameters() if p.requires_grad}
    # drawn apart: a run's own random numbers are those of a run that compiles nothing
    generator = torch.Generator(hidden.device).manual_seed(0)
    weight = torch.randn(hidden.shape, generator=generator, device=hidden.device)
    noise = 2 * torch.rand(hidden.shape, generator=generator, device=hidden.device) - 1
    half = torch.is_autocast_enabled(hidden.device.type) or hidden.dtype in (torch.bfloat16, torch.float16)

    def outcome(form: Callable[..., Tensor], given: Tensor) -> dict[str, Tensor]:
        given = given.detach().requires_grad_(hidden.requires_grad)
        out = form(module, given, *rest)
        found = {"output": out.detach()}
        if out.requires_grad:
            leaves = {"gradient of its input": given, **trained} if given.requires_grad else trained
            gradients = torch.autograd.grad(out, list(leaves.values()), weight.to(out.dtype), allow_unused=True)
            found |= zip(leaves, gradients, strict=True)
        return {name: x.float() for name, x in found.items() if x is not None}

    name = type(module).__name__
    # within activation checkpointing these passes must leave no trace: it counts what a pass saves
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):
        made = outcome(compiled(function), hidden)
        try:
            written = outcome(function, hidden)
            try:
                rounded = outcome(function, (hidden * (1 + ROUNDING[half] * noise)).to(hidden.dtype))
            except torch.OutOfMemoryError:
                rounded = {}
            fault = _fault(made, written, rounded)
        except torch.OutOfMemoryError:
            # which as it is written takes more memory
            warnings.warn(f"{name}, compiled, could not be compared: out of GPU memory", stacklevel=2)
            return True
    if fault is None:
        return True
    what, error = fault
    warnings.warn(
        f"{name}, compiled, is {error:.1e} off what it compiles, in the {what}: it runs uncompiled", stacklevel=2
    )
    return False


def _fault(
    made: dict[str, Tensor], written: dict[str, Tensor], rounded: dict[str, Tensor]
) -> tuple[str, float] | None:
    """The first tensor of what is ``written`` that was ``made`` otherwise, and how far off it is."""
    largest = max(map(_size, written.values()))
    for what, x in written.items():
        # a gradient of zero may be rounding beside the largest
        error, size = _error(made.get(what), x), max(_size(x), 1e-7 * largest, 1e-30)
        response = _error(rounded.get(what, x), x)
        allowed = TOLERANCE
        if response < torch.inf:
            most = MOST if size > SMALL * largest else torch.inf
            allowed = max(TOLERANCE, min(most, RESPONSES * response / size))
        if not error <= allowed * size:
            return what, error / size
    return None


def _size(x: Tensor) -> float:
    """The root mean square of what is finite."""
    finite = x[x.isfinite()]
    return torch.linalg.vector_norm(finite, dtype=torch.float64).item() / max(1, finite.numel()) ** 0.5


def _error(found: Tensor | None, x: Tensor) -> float:
    """The root mean square of the difference; infinite where other entries are finite, or nothing was found."""
    if found is None or not (torch.equal(found.isfinite(), x.isfinite()) and torch.equal(found.isnan(), x.isnan())):
        return float("inf")
    return _size(found - x)


@functools.cache
def compiled(function: Callable) -> Callable:
    """``function`` under torch.compile, for fixed shapes."""
    # with padded buffers, torch 2.11 computed wrong gradients on CUDA where a text's channels are no multiple of 128
    # bytes; and a padded projection is copied for each operator that takes a slice of it
    return torch.compile(function, dynamic=False, options={"comprehensive_padding": False})


class _Settled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        return _written_out(grad)


@operator("written_out")
def _written_out(x: Tensor) -> Tensor:
    return x.clone(memory_format=torch.contiguous_format)


@_written_out.register_fake
def _(x):
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def settled(x: Tensor) -> Tensor:
    """``x``, a narrow slice of a wide projection; under torch.compile its gradient is written out by itself. Otherwise
    the compiler, which puts the gradients of all slices side by side, works out the slice's for every entry."""
    return _Settled.apply(x) if torch.compiler.is_compiling() else x
