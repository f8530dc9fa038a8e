"""The memory rules as modules with one interface; see :mod:`surgery.memory.base`.

Adding one: a subclass of :class:`MemoryRule` in its own module here, and a line in ``RULES``.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

import torch

from surgery.errors import UsageError

from .base import MemoryGeometry, MemoryInputs, MemoryRule
from .bayesian import Bayesian
from .host import HostMemory
from .palimpsa import Palimpsa

__all__ = [
    "RULES",
    "Bayesian",
    "HostMemory",
    "MemoryGeometry",
    "MemoryInputs",
    "MemoryRule",
    "Palimpsa",
    "create",
    "draw_memory",
]

RULES: dict[str, type[MemoryRule]] = {memory.rule: memory for memory in (Palimpsa, Bayesian, HostMemory)}


def create(rule: str, geometry: MemoryGeometry, **options: Any) -> MemoryRule:
    """The memory rule named ``rule`` for a mixer of ``geometry``, at its exact start.

    Args:
        options: the rule's own options; what is left out has the value in its ``defaults``.

    Raises:
        UsageError: an unknown rule or option, or a value that an option does not take.
    """
    if rule not in RULES:
        raise UsageError(f"memory.rule: {rule!r} is no memory rule{_closest(rule, RULES)}; choose {', '.join(RULES)}")
    memory = RULES[rule]
    for name in options:
        if name not in memory.defaults:
            known = ", ".join(memory.defaults) or "none"
            raise UsageError(f"memory.{name}: unknown{_closest(name, memory.defaults)}; {rule} has the options {known}")
    return memory(geometry, **{**memory.defaults, **options})


def draw_memory(
    rule: str, geometry: MemoryGeometry, options: Mapping[str, Any], start: str, seed: int, layer: int
) -> MemoryRule:
    """A memory in float32 whose random start depends on the seed and the layer alone.

    Args:
        start: ``exact`` or ``paper``; see :meth:`MemoryRule.reset_parameters`.

    Raises:
        UsageError: as :func:`create`.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed((seed * 1_000_003 + layer) % 2**64)  # the range of torch's generator
        memory = create(rule, geometry, **options)
        memory.reset_parameters(start)
    return memory


def _closest(name: str, known: Any) -> str:
    match = difflib.get_close_matches(str(name), list(known), n=1)
    return f" (did you mean {match[0]}?)" if match else ""
