"""Operators of our own, under names that no other copy of this code has.

torch knows an operator by its name in the whole process, while this code may stand there several times: as the
installed package, and beside each checkpoint that carries it, of this version or another.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence

import torch

# the package that holds this copy: surgery, or the one that transformers makes of a checkpoint's files
HOME = __package__.removesuffix(".kernels")
NAMESPACE = HOME if HOME.isidentifier() else f"surgery_{hashlib.sha256(HOME.encode()).hexdigest()[:16]}"


def operator(name: str, device_types: str | Sequence[str] | None = None) -> Callable[[Callable], Callable]:
    """Decorate a function with annotated arguments as torch's operator ``name``; it changes none of its arguments.

    Args:
        device_types: where it runs, such as ``cuda``; None for everywhere.
    """
    return torch.library.custom_op(f"{NAMESPACE}::{name}", mutates_args=(), device_types=device_types)
