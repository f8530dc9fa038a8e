"""torch.compile for training on a GPU: a mixer's forward and backward pass as a few fused kernels around its products.

    with compiled_mixers():
        train()

Within it, a graft's call on a whole batch (more than one token, no cache) is compiled, once for each shape, dtype,
memory rule and set of trained parameters; layers that agree in these share one compilation. Decoding, and everything
outside, runs as it is written. What cannot be compiled runs as it is written too, and torch says so.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from surgery.errors import UsageError
from surgery.kernels.chunks import TRITON

SWITCH = "SURGERY_COMPILE"
# the style and the memory rule of mixers whose compiled form has passed its test on a GPU
# (``pytest -m gpu tests/graft/test_compiling.py``): the others are compiled under SURGERY_COMPILE=1 alone
TESTED = frozenset({("additive", "host"), ("additive", "palimpsa")})
VARIANTS = 64  # compilations of one function: shapes, rules, and who gets gradients

_active = False
_rules: frozenset[tuple[str, str]] | None = None  # None: all


def wanted(device: str) -> bool:
    """Whether training on ``device`` compiles: on CUDA, unless SURGERY_COMPILE=0, and where Triton can build kernels.

    Raises:
        UsageError: SURGERY_COMPILE is neither 0 nor 1.
    """
    return _choice() != "0" and device.startswith("cuda") and TRITON


def tested() -> frozenset[tuple[str, str]] | None:
    """What training compiles: what has been tested, or all (None) under SURGERY_COMPILE=1."""
    return None if _choice() == "1" else TESTED


def _choice() -> str | None:
    choice = os.environ.get(SWITCH)
    if choice not in (None, "0", "1"):
        raise UsageError(f"{SWITCH}={choice}: choose 0 or 1")
    return choice


def remark(device: str) -> str | None:
    """What a user should know of it before the first step, if anything."""
    if wanted(device):
        return f"the first step compiles what it can, which takes about a minute ({SWITCH}=0: nothing)"
    if device.startswith("cuda") and not TRITON:
        return "there is no C compiler, Python header or Triton to build kernels with: the mixers run more slowly"
    return None


@contextmanager
def compiled_mixers(active: bool = True, rules: frozenset[tuple[str, str]] | None = None) -> Iterator[None]:
    """Compile within the block, if ``active``: mixers of all memory rules, or of these styles and rules."""
    global _active, _rules
    from torch._dynamo import config

    before = _active, _rules
    _active, _rules = active, rules
    try:
        with config.patch(recompile_limit=max(config.recompile_limit, VARIANTS), suppress_errors=True):
            yield
    finally:
        _active, _rules = before


def active() -> bool:
    """Whether a call that can be compiled is to be."""
    return _active and not torch.compiler.is_compiling()


def includes(style: str, rule: str) -> bool:
    """Whether mixers of this style and memory rule are among those to compile."""
    return _rules is None or (style, rule) in _rules


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


@torch.library.custom_op("surgery::written_out", mutates_args=())
def _written_out(x: Tensor) -> Tensor:
    return x.clone(memory_format=torch.contiguous_format)


@_written_out.register_fake
def _(x):
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def settled(x: Tensor) -> Tensor:
    """``x``, a narrow slice of a wide projection; under torch.compile its gradient is written out by itself. Otherwise
    the compiler, which puts the gradients of all slices side by side, works out the slice's for every entry."""
    return _Settled.apply(x) if torch.compiler.is_compiling() else x
