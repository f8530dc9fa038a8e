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

from surgery.errors import UsageError
from surgery.kernels.chunks import TRITON

SWITCH = "SURGERY_COMPILE"
VARIANTS = 64  # compilations of one function: shapes, rules, and who gets gradients

_active = False


def wanted(device: str) -> bool:
    """Whether training on ``device`` compiles: on CUDA, unless SURGERY_COMPILE=0, and where Triton can build kernels.

    Raises:
        UsageError: SURGERY_COMPILE is neither 0 nor 1.
    """
    choice = os.environ.get(SWITCH, "1")
    if choice not in ("0", "1"):
        raise UsageError(f"{SWITCH}={choice}: choose 0 or 1")
    return choice == "1" and device.startswith("cuda") and TRITON


def remark(device: str) -> str | None:
    """What a user should know of it before the first step, if anything."""
    if wanted(device):
        return f"the first step compiles the mixers, which takes a minute or two ({SWITCH}=0 runs them as they are)"
    if device.startswith("cuda") and not TRITON:
        return "there is no C compiler, Python header or Triton to build kernels with: the mixers run more slowly"
    return None


@contextmanager
def compiled_mixers(active: bool = True) -> Iterator[None]:
    """Compile within the block, if ``active``."""
    global _active
    from torch._dynamo import config

    before, _active = _active, active
    try:
        with config.patch(recompile_limit=max(config.recompile_limit, VARIANTS), suppress_errors=True):
            yield
    finally:
        _active = before


def active() -> bool:
    """Whether a call that can be compiled is to be."""
    return _active and not torch.compiler.is_compiling()


@functools.cache
def compiled(function: Callable) -> Callable:
    """``function`` under torch.compile, for fixed shapes."""
    # with padded buffers, torch 2.11 computed wrong gradients on CUDA where a text's channels are no multiple of 128
    # bytes; and a padded projection is copied for each operator that takes a slice of it
    return torch.compile(function, dynamic=False, options={"comprehensive_padding": False})
