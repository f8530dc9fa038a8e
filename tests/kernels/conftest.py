"""Random problems for the memory rules, and the checks that every form of every rule must pass."""

from __future__ import annotations

import importlib.util
import itertools
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize

# beside the tests, which are imported without a package
_spec = importlib.util.spec_from_file_location("bayesian_problems", Path(__file__).parent / "bayesian_problems.py")
sys.modules[_spec.name] = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(sys.modules[_spec.name])

Arguments = dict[str, Tensor]

DECAYS = ("mild", "hard", "none", "mixed")
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}


def log_decays(kind: str, *shape: int) -> Tensor:
    if kind == "mild":
        return -0.2 * torch.rand(shape, dtype=torch.float64)
    if kind == "hard":
        return torch.full(shape, -20.0, dtype=torch.float64)
    if kind == "none":
        return torch.zeros(shape, dtype=torch.float64)
    # from a horizon of thousands of tokens to none at all, side by side
    return -torch.exp(3 * torch.randn(shape, dtype=torch.float64) - 2).clamp(max=20.0)


def relative(found: Tensor, expected: Tensor) -> float:
    """Relative Frobenius error; the plain norm where the expected value is zero throughout."""
    found, expected = found.double().cpu(), expected.double().cpu()
    scale = expected.norm()
    return ((found - expected).norm() / (scale if scale > 0 else 1.0)).item()


@pytest.fixture(name="relative")
def _relative():
    return relative


class Contract:
    """What every form of a rule promises, as checks of one callable."""

    tolerance = TOLERANCE

    def __init__(self, rule: str, reference: Callable) -> None:
        self.rule = rule
        self.reference = reference

    def problem(
        self, tokens: int, decay: str = "mild", *, batch=2, groups=2, heads=4, key_dim=8, value_dim=12, state=True
    ) -> Arguments:
        """Random float64 arguments; keys are unit vectors, so that the delta rule is stable."""
        double = {"dtype": torch.float64}
        arguments = {
            "q": torch.randn(batch, tokens, groups, key_dim, **double),
            "k": normalize(torch.randn(batch, tokens, groups, key_dim, **double), dim=-1),
            "v": torch.randn(batch, tokens, heads, value_dim, **double),
            "log_decay": log_decays(decay, batch, tokens, heads),
        }
        shape = {
            "additive": (batch, heads, value_dim, key_dim),
            "delta": (batch, heads, key_dim, value_dim),
            "palimpsa": (batch, 2, heads, value_dim, key_dim),
        }[self.rule]
        if self.rule == "delta":
            arguments["beta"] = torch.rand(batch, tokens, heads, **double)
        if self.rule == "palimpsa":
            arguments["b"] = torch.rand(batch, tokens, heads, value_dim, **double)
            arguments["prior"] = 0.5 + torch.rand(heads, **double)
        if state:
            # excess precision is never negative
            arguments["state"] = torch.rand(shape, **double)
        return arguments

    @staticmethod
    def resets(batch: int, tokens: int) -> Tensor:
        """Document starts: at random, at the first token of one sequence, and at the end of another."""
        reset = torch.rand(batch, tokens) < 0.1
        reset[0, 0] = reset[-1, -1] = True
        return reset

    def gradients(self, form, arguments: Arguments, weights=None, **options):
        """Outputs, gradients of every argument for a random (or given) weighting of the outputs, and the weights."""
        leaves = {name: value.detach().clone().requires_grad_() for name, value in arguments.items()}
        outputs = form(**leaves, **options)
        if weights is None:
            weights = [torch.randn(output.shape, dtype=torch.float64) for output in outputs]
        total = sum((output * weight.to(output.dtype)).sum() for output, weight in zip(outputs, weights, strict=True))
        found = torch.autograd.grad(total, list(leaves.values()), allow_unused=True)
        return outputs, dict(zip(leaves, found, strict=True)), weights

    def equals_reference(self, form, arguments: Arguments, dtype: torch.dtype, **options) -> None:
        """Outputs and gradients of ``form`` in ``dtype`` against the sequential rule in float64."""
        arguments = {name: value.to(dtype) for name, value in arguments.items()}
        exact = {name: value.double() for name, value in arguments.items()}
        expected, expected_gradients, weights = self.gradients(self.reference, exact, **options)
        found, gradients, _ = self.gradients(form, arguments, weights, **options)
        names = ["o", "variance", "state"] if len(found) == 3 else ["o", "state"]
        for name, a, b in zip(names, found, expected, strict=True):
            assert a.dtype == dtype, name
            assert relative(a, b) < TOLERANCE[dtype], (name, relative(a, b))
        for name, value in expected_gradients.items():
            assert gradients[name].dtype == dtype, name
            error = relative(gradients[name], value)
            assert error < TOLERANCE[dtype], (f"gradient of {name}", error)

    def is_kept(self, form) -> None:
        """All of it, at lengths within a chunk, of a chunk, and across several."""
        self.carries_its_state(form, 100, 37)
        self.keeps_documents_apart(form, (1, 63, 7, 64))
        self.ignores_padding(form, 70, 9)
        self.is_causal(form, 70)
        self.computes_in_float32(form, 70)

    def carries_its_state(self, form, tokens: int, cut: int) -> None:
        """Two calls with the state handed over equal one, gradients included."""
        arguments = self.problem(tokens)

        def halves(state=None, **whole):
            outputs = []
            for part in (slice(0, cut), slice(cut, None)):
                *read, state = form(**{n: x if n == "prior" else x[:, part] for n, x in whole.items()}, state=state)
                outputs.append(read)
            return *(torch.cat(parts, 1) for parts in zip(*outputs, strict=True)), state

        expected, expected_gradients, weights = self.gradients(form, arguments)
        found, gradients, _ = self.gradients(halves, arguments, weights)
        for a, b in zip(found, expected, strict=True):
            assert relative(a, b) < 1e-12
        for name, value in expected_gradients.items():
            assert relative(gradients[name], value) < 1e-12, name

    def keeps_documents_apart(self, form, lengths: tuple[int, ...]) -> None:
        """A packed row equals its documents one by one, to the last state."""
        arguments = self.problem(sum(lengths), batch=1, state=False)
        reset = torch.zeros(1, sum(lengths), dtype=torch.bool)
        starts = torch.tensor((0, *lengths)).cumsum(0)
        reset[0, starts[:-1]] = True
        o, state = form(**arguments, reset=reset)
        for first, last in itertools.pairwise(starts):
            document = {n: x if n == "prior" else x[:, first:last] for n, x in arguments.items()}
            alone, state_alone = form(**document)
            assert relative(o[:, first:last], alone) < 1e-12
        assert relative(state, state_alone) < 1e-12

    def ignores_padding(self, form, tokens: int, padding: int) -> None:
        """Tokens without decay, key or write leave state and later reads as they were, wherever they stand."""
        arguments = self.problem(tokens)
        for at in (0, tokens // 2, tokens):
            padded = dict(arguments)
            for name in arguments.keys() - {"prior", "state"}:
                x = arguments[name]
                # a query of padding may be anything
                gap = torch.randn if name == "q" else torch.zeros
                gap = gap(x.shape[0], padding, *x.shape[2:], dtype=x.dtype)
                padded[name] = torch.cat((x[:, :at], gap, x[:, at:]), 1)
            o, state = form(**arguments)
            o_padded, state_padded = form(**padded)
            assert relative(torch.cat((o_padded[:, :at], o_padded[:, at + padding :]), 1), o) < 1e-12
            assert relative(state_padded, state) < 1e-12

    def is_causal(self, form, tokens: int) -> None:
        """No read moves, to the last bit, when a later token does; and the reads from there on do."""
        arguments = self.problem(tokens, "none")
        o, _ = form(**arguments)
        for moved in (1, tokens // 2, tokens - 1):
            for name in arguments.keys() - {"prior", "state"}:
                other = {**arguments, name: arguments[name].clone()}
                other[name][:, moved] += -0.5 if name == "log_decay" else 0.5
                o_other, _ = form(**other)
                assert torch.equal(o_other[:, :moved], o[:, :moved]), name
                assert not torch.equal(o_other[:, moved:], o[:, moved:]), name

    def computes_in_float32(self, form, tokens: int) -> None:
        """bfloat16 inputs under autocast: the state and the gates stay float32, forward and backward."""
        arguments = {
            name: value.bfloat16() if name in ("q", "k", "v", "b") else value.float()
            for name, value in self.problem(tokens).items()
        }
        exact = {name: value.double() for name, value in arguments.items()}
        # only the state is weighted: a gradient through the reads, which are bfloat16, would be rounded to it
        read, memory = self.reference(**exact)
        weights = [torch.zeros_like(read), torch.randn_like(memory)]
        _, expected_gradients, _ = self.gradients(self.reference, exact, weights)
        with torch.autocast("cpu", torch.bfloat16):
            (o, state), gradients, _ = self.gradients(form, arguments, weights)
        assert o.dtype == torch.bfloat16
        assert state.dtype == torch.float32
        torch.testing.assert_close(o.double(), read, rtol=2**-8, atol=1e-5)
        assert relative(state, memory) < TOLERANCE[torch.float32]
        for name in gradients.keys() & {"log_decay", "beta", "state"}:
            assert gradients[name].dtype == torch.float32
            assert relative(gradients[name], expected_gradients[name]) < TOLERANCE[torch.float32], name

    def compiles(self, form, tokens: int) -> None:
        """Traced whole by torch.compile under autocast, it computes what it computes without."""
        arguments = {name: value.float() for name, value in self.problem(tokens).items()}
        reset = self.resets(2, tokens)
        expected, expected_gradients, weights = self.gradients(form, arguments, reset=reset)
        torch.compiler.reset()
        compiled = torch.compile(form, backend="aot_eager", fullgraph=True)
        with torch.autocast("cpu", torch.bfloat16):
            found, gradients, _ = self.gradients(compiled, arguments, weights, reset=reset)
        for a, b in zip(found, expected, strict=True):
            assert relative(a, b) < 1e-6
        for name, value in expected_gradients.items():
            assert relative(gradients[name], value) < 1e-6, name


@pytest.fixture
def contract() -> type[Contract]:
    return Contract


@pytest.fixture
def nan_filled():
    """What a kernel leaves unwritten shows."""
    before = torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(before[0])
    torch.utils.deterministic.fill_uninitialized_memory = before[1]
