"""Each memory rule, in the form that would run on a device, against the sequential rule in float64 on the CPU."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import normalize

from surgery.kernels import dispatch

# relative Frobenius errors in float32: the torch forms reach 1e-6; the kernels may multiply in TF32
TOLERANCES = {"reference": 1e-5, "chunked": 1e-5, "triton": 2e-3}
HALF_TOLERANCE = 8e-3  # with bfloat16 inputs, outputs and gradients, each of which alone rounds by 1.7e-3


class Sizes(NamedTuple):
    """Of a problem: B, T, G, H, K, V."""

    batch: int = 2
    tokens: int = 130
    groups: int = 2
    heads: int = 4
    key_dim: int = 32
    value_dim: int = 48

    @classmethod
    def of_width(cls, key_dim: int, value_dim: int) -> Sizes:
        """A model's own widths: kernels are compiled for each. Short, since the sequential rule keeps every state."""
        return cls(batch=1, tokens=70, groups=1, heads=2, key_dim=key_dim, value_dim=value_dim)


@dataclass(frozen=True)
class RuleCheck:
    """What runs a rule on a device, and how far it is from the sequential rule in float64."""

    rule: str
    form: str  # for sequences
    decode_form: str  # for one token
    output_error: float  # the largest of outputs and states, of the sequences and of a decode step
    gradient_error: float  # the largest over the arguments
    worst_gradient: str  # the argument that has it
    tolerance: float

    @property
    def passed(self) -> bool:
        # a comparison with NaN is false
        return self.output_error <= self.tolerance and self.gradient_error <= self.tolerance

    def as_dict(self) -> dict[str, object]:
        return {**asdict(self), "passed": self.passed}


def check(
    rule: str, device: str, dtype: torch.dtype = torch.float32, sizes: Sizes = Sizes()
) -> RuleCheck:
    """Run ``rule`` forward and backward on ``device``, on a problem drawn from a fixed seed, and compare.

    Args:
        dtype: of queries, keys and values.

    Raises:
        ValueError: SURGERY_KERNELS names no form.
    """
    form = dispatch.picked(rule, device)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        arguments, options = _problem(rule, sizes)
        arguments |= {name: arguments[name].to(dtype) for name in ("q", "k", "v")}
        weights = [torch.randn(arguments["v"].shape), torch.randn(arguments["state"].shape)]
    exact = {name: value.double() for name, value in arguments.items()}
    expected, expected_gradients = _run(rule, exact, {**options, "backend": "reference"}, weights)
    found, gradients = _run(rule, *(_move(x, device) for x in (arguments, options)), weights)
    with torch.no_grad():
        expected += _first_token(rule, exact, {**options, "backend": "reference"}, sizes.tokens)
        found += _first_token(rule, _move(arguments, device), _move(options, device), sizes.tokens)
    _, output_error = _worst({i: _relative(a, b) for i, (a, b) in enumerate(zip(found, expected, strict=True))})
    errors = {name: _relative(gradients[name], value) for name, value in expected_gradients.items()}
    worst, gradient_error = _worst(errors)
    return RuleCheck(
        rule=rule,
        form=form,
        decode_form=dispatch.picked_to_decode(rule, device),
        output_error=output_error,
        gradient_error=gradient_error,
        worst_gradient=worst,
        tolerance=TOLERANCES[form] if dtype == torch.float32 else HALF_TOLERANCE,
    )


def _problem(rule: str, sizes: Sizes) -> tuple[dict[str, Tensor], dict[str, object]]:
    """Random differentiable arguments in float32, and the other options. Keys are unit vectors; documents reset."""
    batch, tokens, groups, heads, key_dim, value_dim = sizes
    scalars = (batch, tokens, heads)
    keys = (batch, tokens, groups, key_dim)
    arguments = {
        "q": torch.randn(keys),
        "k": normalize(torch.randn(keys), dim=-1),
        "v": torch.randn(*scalars, value_dim),
    }
    log_decay = -0.3 * torch.rand(scalars)
    matrix = (value_dim, key_dim)
    if rule == "bayesian":
        # a Gated DeltaNet host: steps in (0, 1), half of the covariance kept, noise that restores a unit prior
        step, ones = 0.1 + 0.8 * torch.rand(scalars), torch.ones(scalars)
        covariance_decay = 0.5 * (2 * log_decay).exp()
        covariance = torch.eye(key_dim).expand(batch, heads, -1, -1)
        arguments |= {
            "decay": log_decay.exp(),
            "cov_decay_sqrt": covariance_decay.sqrt(),
            "process_noise": 1 - covariance_decay,
            "observation_noise": 1 / step - 1,
            "erase": ones,
            "write": ones.clone(),
            "state": torch.cat((torch.randn(batch, heads, key_dim, value_dim), covariance), -1),
        }
        ones = torch.ones(heads)
        return arguments, {
            "precision": ones,
            "shrink": torch.ones(scalars),
            "initial_covariance": ones,
            "unit_gain": True,
        }
    arguments["log_decay"] = log_decay
    if rule == "delta":
        arguments["beta"] = torch.rand(scalars)
        matrix = matrix[::-1]
    if rule == "palimpsa":
        arguments["b"] = torch.rand(*scalars, value_dim)
        arguments["prior"] = 0.5 + torch.rand(heads)
        arguments["state"] = torch.rand(batch, 2, heads, *matrix)
    else:
        arguments["state"] = torch.randn(batch, heads, *matrix)
    reset = torch.zeros(batch, tokens, dtype=torch.bool)
    reset[0, tokens // 3] = True
    return arguments, {"reset": reset}


def _run(
    rule: str, arguments: dict[str, Tensor], options: dict[str, object], weights: list[Tensor]
) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
    """Outputs, and the gradients of every argument for the weighted sum of the outputs."""
    leaves = {name: value.detach().requires_grad_() for name, value in arguments.items()}
    outputs = getattr(dispatch, rule)(**leaves, **options)
    total = sum((output * weight.to(output)).sum() for output, weight in zip(outputs, weights, strict=True))
    return outputs, dict(zip(leaves, torch.autograd.grad(total, list(leaves.values())), strict=True))


def _first_token(
    rule: str, arguments: dict[str, Tensor], options: dict[str, object], tokens: int
) -> tuple[Tensor, ...]:
    """A decode step from the problem's state, by the kernels for one token where there are any."""
    first = {
        name: value[:, :1] if isinstance(value, Tensor) and value.shape[1:2] == (tokens,) else value
        for name, value in {**arguments, **options}.items()
    }
    with torch.no_grad():  # as a cache's state, which is overwritten
        return getattr(dispatch, rule)(**{**first, "state": first["state"].clone()}, in_place=True)


def _move(values: dict[str, object], device: str) -> dict[str, object]:
    return {name: value.to(device) if isinstance(value, Tensor) else value for name, value in values.items()}


def _relative(found: Tensor, expected: Tensor) -> float:
    return ((found.double().cpu() - expected).norm() / expected.norm()).item()


def _worst(errors: dict) -> tuple[object, float]:
    """The entry with the largest error, a NaN before any number."""
    return max(errors.items(), key=lambda item: (math.isnan(item[1]), item[1]))
