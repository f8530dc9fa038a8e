"""One door to every memory rule: picks the form that suits the device and the length, and says which.

``SURGERY_KERNELS=reference|chunked|triton`` forces one form for the whole process, ``backend=`` for one call.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Callable

from torch import Tensor

RULES = ("additive", "delta", "palimpsa", "bayesian")
BACKENDS = ("reference", "chunked", "triton")


def _available(rule: str, backend: str) -> bool:
    return importlib.util.find_spec(f"{__package__}.{rule}.{backend}") is not None


def picked(rule: str, device: str, tokens: int | None = None) -> str:
    """The form that would run ``rule`` on ``device`` for ``tokens`` tokens (None: more than one)."""
    forced = os.environ.get("SURGERY_KERNELS")
    if forced:
        return forced
    if tokens == 1:
        return "reference"
    if device.startswith("cuda") and _available(rule, "triton"):
        return "triton"
    return "chunked" if _available(rule, "chunked") else "reference"


def _form(rule: str, v: Tensor, backend: str | None) -> Callable:
    name = backend or picked(rule, v.device.type, v.shape[1])
    return getattr(importlib.import_module(f"{__package__}.{rule}.{name}"), rule)


def additive(q, k, v, log_decay, *, state=None, reset=None, backend=None):
    """The additive rule in the form picked; see :func:`surgery.kernels.additive.reference.additive`."""
    return _form("additive", v, backend)(q, k, v, log_decay, state=state, reset=reset)


def delta(q, k, v, log_decay, beta, *, state=None, reset=None, backend=None):
    """The gated delta rule in the form picked; see :func:`surgery.kernels.delta.reference.delta`."""
    return _form("delta", v, backend)(q, k, v, log_decay, beta, state=state, reset=reset)


def palimpsa(q, k, v, b, log_decay, prior, *, state=None, reset=None, return_variance=False, backend=None):
    """Palimpsa in the form picked; see :func:`surgery.kernels.palimpsa.reference.palimpsa`."""
    form = _form("palimpsa", v, backend)
    return form(q, k, v, b, log_decay, prior, state=state, reset=reset, return_variance=return_variance)


def bayesian(q, k, v, *gates, backend=None, **options):
    """The Bayesian rule in the form picked; see :func:`surgery.kernels.bayesian.reference.bayesian`."""
    return _form("bayesian", v, backend)(q, k, v, *gates, **options)
