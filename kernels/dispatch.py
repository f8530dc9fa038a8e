"""One door to every memory rule: picks the form that suits the device and the length, and says which.

``SURGERY_KERNELS=reference|chunked|triton`` forces one form for the whole process (where a rule has no such form its
usual one runs), ``backend=`` for one call.
"""

from __future__ import annotations

import importlib.util
import math
import os
from collections.abc import Callable
from types import ModuleType

import torch
from torch import Tensor

from .additive import chunked as additive_chunked
from .additive import reference as additive_reference
from .bayesian import chunked as bayesian_chunked
from .bayesian import reference as bayesian_reference
from .chunks import MAX_HEADS, TRITON, steps
from .delta import chunked as delta_chunked
from .delta import reference as delta_reference
from .palimpsa import chunked as palimpsa_chunked
from .palimpsa import reference as palimpsa_reference

RULES = ("additive", "delta", "palimpsa", "bayesian")
BACKENDS = ("reference", "chunked", "triton")

# a table, not imports by name: torch.compile traces through it
_FORMS: dict[tuple[str, str], Callable] = {
    ("additive", "reference"): additive_reference.additive,
    ("additive", "chunked"): additive_chunked.additive,
    ("delta", "reference"): delta_reference.delta,
    ("delta", "chunked"): delta_chunked.delta,
    ("palimpsa", "reference"): palimpsa_reference.palimpsa,
    ("palimpsa", "chunked"): palimpsa_chunked.palimpsa,
    ("bayesian", "reference"): bayesian_reference.bayesian,
    ("bayesian", "chunked"): bayesian_chunked.bayesian,
}


def _palimpsa_in_triton() -> ModuleType:
    from .palimpsa import triton

    return triton


def _bayesian_in_triton() -> ModuleType:
    from .bayesian import triton

    return triton


# what imports a rule's Triton form; the hosts' rules have kernels for one token alone, and inside their chunks
_TRITON_FORMS: dict[str, Callable[[], ModuleType]] = {"palimpsa": _palimpsa_in_triton, "bayesian": _bayesian_in_triton}

# rules whose Triton form is taken on CUDA without being asked for: those that a GPU has passed
TRITON_BY_DEFAULT = frozenset({"palimpsa", "bayesian"})

# the widest keys and values that a Triton form takes, known once it is imported
_LIMITS: dict[str, tuple[float, float]] = {}


@torch.compiler.assume_constant_result
def _has(rule: str, backend: str) -> bool:
    """Whether ``rule`` has the form ``backend``. Triton forms are imported when first asked for."""
    if (rule, backend) in _FORMS:
        return True
    if backend != "triton" or rule not in _TRITON_FORMS or importlib.util.find_spec("triton") is None:
        return False
    module = _TRITON_FORMS[rule]()
    key_dim = module.max_key() if hasattr(module, "max_key") else getattr(module, "MAX_KEY", math.inf)
    _LIMITS[rule] = key_dim, getattr(module, "MAX_VALUE", math.inf)
    _FORMS[rule, backend] = getattr(module, rule)
    return True


def picked(rule: str, device: str | torch.device, tokens: int | None = None) -> str:
    """The form that would run ``rule`` on ``device``, for float32 or bfloat16 inputs of usual widths.

    Args:
        tokens: how many tokens the call has; None for any number above one. For one that continues a state see
            :func:`picked_to_decode`.

    Raises:
        ValueError: SURGERY_KERNELS names no form.
    """
    forced = os.environ.get("SURGERY_KERNELS")
    if forced:
        if forced not in BACKENDS:
            raise ValueError(f"SURGERY_KERNELS={forced}: choose one of {', '.join(BACKENDS)}")
        if _has(rule, forced):
            return forced
    if str(device).startswith("cuda") and rule in TRITON_BY_DEFAULT and TRITON and _has(rule, "triton"):
        return "triton"
    return "reference" if tokens == 1 else "chunked"


def picked_to_decode(rule: str, device: str | torch.device) -> str:
    """The form that takes one token from a state on ``device``, with nothing to differentiate: the hosts' rules have
    kernels for that alone."""
    asked = os.environ.get("SURGERY_KERNELS") in (None, "", "triton")
    if asked and rule in ("additive", "delta") and str(device).startswith("cuda") and TRITON:
        return "triton"
    return picked(rule, device, 1)


def _form(rule: str, k: Tensor, v: Tensor, backend: str | None) -> Callable:
    tokens = v.shape[1]
    name = backend or picked(rule, v.device, tokens)
    if not _has(rule, name):
        raise ValueError(f"the {rule} rule has no form {name!r}")
    if name == "triton" and backend is None:
        key_dim, value_dim = _LIMITS[rule]
        wide = k.shape[-1] > key_dim or v.shape[-1] > value_dim or v.shape[0] * v.shape[2] > MAX_HEADS
        if wide or v.dtype == torch.float64:
            name = "reference" if tokens == 1 else "chunked"
    return _FORMS[rule, name]


# ``in_place``: the state that is given may be overwritten with the one returned, as one token's kernels do


def additive(q, k, v, log_decay, *, write=None, state=None, reset=None, backend=None, in_place=False):
    """The additive rule in the form picked; see :func:`surgery.kernels.additive.reference.additive`."""
    if backend is None and steps(q, k, v, state):
        from .additive.triton_decode import step

        return step(q, k, v, log_decay, write, state, reset, in_place and state.is_contiguous())
    return _form("additive", k, v, backend)(q, k, v, log_decay, write=write, state=state, reset=reset)


def delta(q, k, v, log_decay, beta, *, state=None, reset=None, backend=None, in_place=False):
    """The gated delta rule in the form picked; see :func:`surgery.kernels.delta.reference.delta`."""
    if backend is None and steps(q, k, v, state):
        from .delta.triton_decode import step

        return step(q, k, v, log_decay, beta, state, reset, in_place and state.is_contiguous())
    return _form("delta", k, v, backend)(q, k, v, log_decay, beta, state=state, reset=reset)


def palimpsa(
    q, k, v, b, log_decay, prior, *, state=None, reset=None, return_variance=False, backend=None, in_place=False
):
    """Palimpsa in the form picked; see :func:`surgery.kernels.palimpsa.reference.palimpsa`."""
    form = _form("palimpsa", k, v, backend)
    options = {"in_place": True} if in_place and form is _FORMS.get(("palimpsa", "triton")) else {}
    return form(q, k, v, b, log_decay, prior, state=state, reset=reset, return_variance=return_variance, **options)


def bayesian(
    q,
    k,
    v,
    decay,
    cov_decay_sqrt,
    process_noise,
    precision,
    observation_noise,
    erase,
    shrink,
    write,
    *,
    state=None,
    initial_covariance,
    unit_gain,
    return_variance=False,
    backend=None,
    in_place=False,
):
    """The Bayesian rule in the form picked; see :func:`surgery.kernels.bayesian.reference.bayesian`.

    Where decay, cov_decay_sqrt or process_noise is [B, T, H, K], one for each key channel, and where variances are
    asked for, the form is one of torch's.
    """
    gates = (decay, cov_decay_sqrt, process_noise, precision, observation_noise, erase, shrink, write)
    options = {"state": state, "initial_covariance": initial_covariance, "unit_gain": unit_gain}
    if return_variance:
        options["return_variance"] = True
    form = _form("bayesian", k, v, backend)
    if form is _FORMS.get(("bayesian", "triton")):
        by_channel = 4 in (decay.dim(), cov_decay_sqrt.dim(), process_noise.dim())
        if backend and (by_channel or return_variance):
            what = "a decay for each key channel" if by_channel else "variances"
            raise ValueError(f"the bayesian rule has no form 'triton' with {what}")
        if by_channel or return_variance:
            form = _FORMS["bayesian", "reference" if v.shape[1] == 1 else "chunked"]
    if in_place and form is _FORMS.get(("bayesian", "triton")):
        options["in_place"] = True
    return form(q, k, v, *gates, **options)
