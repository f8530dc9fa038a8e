"""Random problems for the Bayesian rule's Triton kernels, and how far their gradients are from what is expected."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import normalize

UNIT_GAIN = {"gdn": True, "gdn-above-1": False, "mamba2": True}
DOUBLE = {"dtype": torch.float64}


class Problem(NamedTuple):
    q: Tensor
    k: Tensor
    v: Tensor
    decay: Tensor
    cov_decay_sqrt: Tensor
    process_noise: Tensor
    precision: Tensor
    observation_noise: Tensor
    erase: Tensor
    shrink: Tensor
    write: Tensor
    p0: Tensor
    state: Tensor | None


def problem(
    form: str, tokens: int, *, batch=1, heads=2, groups=1, key_dim=20, value_dim=18, near=False, decay=None, rho=1.0,
    noise: str | float = "restoring", boundaries=False, state=False, rate=1.0,
) -> Problem:  # fmt: skip
    """Random float64 arguments as the memory module lowers them.

    Args:
        near: keys at an overlap of about 0.999. decay: one for all tokens, or None for random ones.
        noise: ``restoring``, or constant at this value. boundaries: with a reset and some padding.
        rate: of the mamba2 form's lambda; 0 is the host.
    """
    k = normalize(torch.randn(batch, tokens, groups, key_dim, **DOUBLE), dim=-1)
    if near:
        k = normalize(normalize(torch.randn(batch, 1, groups, key_dim, **DOUBLE), dim=-1) + 0.0316 * k, dim=-1)
    q = normalize(torch.randn_like(k), dim=-1)
    v = torch.randn(batch, tokens, heads, value_dim, **DOUBLE)
    a = torch.exp(-0.2 * torch.rand(batch, tokens, heads, **DOUBLE) ** 2)
    if decay is not None:
        a = torch.full_like(a, decay)
    c_sqrt = math.sqrt(rho) * a
    p0 = 0.5 + torch.rand(heads, **DOUBLE)
    n = p0 * (1 - c_sqrt.square()) if noise == "restoring" else torch.full_like(a, noise)
    padding = torch.zeros(batch, tokens, 1, dtype=torch.bool)
    if boundaries:
        padding[0, : tokens // 4] = True
        reset = torch.zeros_like(padding)
        reset[-1, tokens // 2] = reset[0, tokens // 3] = True
        n = torch.where(reset, c_sqrt.square() * p0 + n, n).masked_fill(padding, 0.0)
        a, c_sqrt = (x.masked_fill(reset, 0.0).masked_fill(padding, 1.0) for x in (a, c_sqrt))
        k, v = k.masked_fill(padding[..., None], 0.0), v.masked_fill(padding[..., None], 0.0)
    square = k.square().sum(-1).repeat_interleave(heads // groups, dim=-1)
    if form == "mamba2":
        x = rate * (0.1 + torch.rand(heads, **DOUBLE))
        p = r = x.expand_as(a)
        z, y = 1 / p0 + x * square, torch.ones_like(a)
    else:
        eta = (2 if form == "gdn-above-1" else 1) * torch.rand(batch, tokens, heads, **DOUBLE).clamp(min=0.02)
        x = torch.ones(heads, **DOUBLE)
        y = torch.maximum((1 / eta - square).clamp(min=0), 1e-2 * p0 - n).masked_fill(padding, 1.0)
        z = p = (eta * square).clamp(min=1)
        r = (p * (2 - p)).clamp(min=0) if form == "gdn-above-1" else torch.ones_like(p)
    carried = None
    if state:
        direction = normalize(torch.randn(batch, heads, key_dim, **DOUBLE), dim=-1)
        covariance = torch.eye(key_dim, **DOUBLE) - 0.7 * direction[..., None] * direction[..., None, :]
        mean = torch.randn(batch, heads, key_dim, value_dim, **DOUBLE)
        carried = torch.cat((mean, p0[:, None, None] * covariance), dim=-1)
    return Problem(q, k, v, a, c_sqrt, n, x, y, p, r, z, p0, carried)


def cast(problem: Problem, dtype: torch.dtype) -> Problem:
    """q, k and v in ``dtype``, everything else in float32."""
    rest = [None if x is None else x.float() for x in problem[3:]]
    return Problem(*(x.to(dtype) for x in problem[:3]), *rest)


def call(rule: Callable, problem: Problem, form: str) -> tuple[Tensor, Tensor]:
    return rule(*problem[:11], initial_covariance=problem.p0, state=problem.state, unit_gain=UNIT_GAIN[form])


def gradients(rule: Callable, problem: Problem, form: str, weights: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
    """Outputs, and gradients of their product with ``weights``. Under unit gain x and r are one number."""
    leaves = Problem(*(None if x is None else x.detach().clone().requires_grad_() for x in problem))
    outputs = call(rule, leaves, form)
    loss = sum((out * weight.to(out.dtype)).sum() for out, weight in zip(outputs, weights, strict=True))
    wanted = {name: x for name, x in leaves._asdict().items() if x is not None}
    found = dict(zip(wanted, torch.autograd.grad(loss, list(wanted.values()), allow_unused=True), strict=True))
    if UNIT_GAIN[form]:
        shrink = found.pop("shrink")
        if shrink is not None:
            found["precision"] = found["precision"] + shrink.sum((0, 1))
    if problem.state is not None:
        assert found.pop("p0") is None
    return {"o": outputs[0].detach(), "after": outputs[1].detach(), **found}


def assert_close(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float) -> None:
    """Relative error by the norm; ``precision`` and ``p0``, sums of a few numbers, by the terms that they sum."""
    assert found.keys() == expected.keys()
    for name, exact in expected.items():
        scale = exact.norm().item()
        if name in ("precision", "p0"):
            scale = max(scale, expected["k"].norm().item())
        error = (found[name].double() - exact).norm().item()
        assert error <= tolerance * scale + 1e-12, f"{name}: {error:.1e} of {scale:.1e}"


def weights_for(problem: Problem) -> tuple[Tensor, Tensor]:
    batch, _, heads, value_dim = problem.v.shape
    key_dim = problem.k.shape[-1]
    state = torch.randn(batch, heads, key_dim, value_dim + key_dim, **DOUBLE)
    return torch.randn_like(problem.v), state.to(problem.v.device)
