"""The gated delta rule: both forms against each other, a dense solve, and others' code where installed."""

from __future__ import annotations

import importlib

import pytest
import torch
from torch.nn.functional import normalize

from surgery.kernels.delta.chunked import delta as chunked
from surgery.kernels.delta.reference import delta as reference
from surgery.kernels.triangular import _invert, unit_lower_inverse

FORMS = pytest.mark.parametrize("form", [reference, chunked], ids=["reference", "chunked"])


@pytest.fixture
def rule(contract):
    return contract("delta", reference)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
@pytest.mark.parametrize("decay", ["mild", "hard", "none", "mixed"])
@pytest.mark.parametrize("tokens", [1, 2, 63, 65, 130])
def test_chunked_equals_sequential(rule, tokens, decay, dtype):
    rule.equals_reference(chunked, rule.problem(tokens, decay), dtype)
    rule.equals_reference(chunked, rule.problem(tokens, decay), dtype, reset=rule.resets(2, tokens))


@pytest.mark.parametrize("decay", ["none", "mixed"])
def test_a_thousand_tokens(rule, decay):
    rule.equals_reference(chunked, rule.problem(1000, decay, batch=1, heads=2, state=False), torch.float32)


@pytest.mark.parametrize(("groups", "heads"), [(1, 1), (1, 6), (3, 3)])
def test_key_groups(rule, groups, heads):
    rule.equals_reference(chunked, rule.problem(70, groups=groups, heads=heads), torch.float64)


@pytest.mark.parametrize("spread", [0.0, 0.05])
def test_one_key_again_and_again(rule, spread):
    """Near copies of one key at full steps: powers of the coupling matrix explode, its inverse does not."""
    arguments = rule.problem(128, "none")
    arguments["k"] = normalize(arguments["k"][:, :1] + spread * arguments["k"], dim=-1)
    arguments["beta"] = torch.ones_like(arguments["beta"])
    rule.equals_reference(chunked, arguments, torch.float64)


def test_steps_above_one(rule):
    arguments = rule.problem(130)
    arguments["beta"] = 2 * arguments["beta"]
    rule.equals_reference(chunked, arguments, torch.float32)


@FORMS
def test_dense_solve(rule, form):
    """A sequence's errors from one triangular system: e_t = v_t - sum_{s < t} beta_s (A_t / A_s) (k_s . k_t) e_s."""
    arguments = rule.problem(40, groups=4, state=False)
    total = arguments["log_decay"].cumsum(1).transpose(1, 2)
    weights = (total[..., :, None] - total[..., None, :]).tril().exp().tril()
    weights = weights * arguments["beta"].transpose(1, 2)[..., None, :]
    overlaps = torch.einsum("bthk,bshk->bhts", arguments["k"], arguments["k"])
    system = torch.eye(40, dtype=torch.float64) + (weights * overlaps).tril(-1)
    errors = torch.linalg.solve(system, arguments["v"].transpose(1, 2))
    scores = weights * torch.einsum("bthk,bshk->bhts", arguments["q"], arguments["k"])
    torch.testing.assert_close(form(**arguments)[0], (scores @ errors).transpose(1, 2), rtol=0, atol=1e-11)


@FORMS
def test_a_full_step_stores_the_value(rule, form):
    """With beta = 1, a unit key and no decay, reading with the key just written returns its value."""
    arguments = rule.problem(70, "none")
    arguments["beta"] = torch.ones_like(arguments["beta"])
    arguments["q"] = arguments["k"]
    torch.testing.assert_close(form(**arguments)[0], arguments["v"], rtol=0, atol=1e-11)


@FORMS
def test_contract(rule, form):
    rule.is_kept(form)


def test_compiles(rule):
    rule.compiles(chunked, 70)


@FORMS
def test_flash_linear_attention(rule, form):
    """Outputs and gradients of fla's plain recurrence, which computes in float32."""
    try:
        naive = importlib.import_module("fla.ops.gated_delta_rule.naive").naive_recurrent_gated_delta_rule
    except Exception as error:
        pytest.skip(f"fla cannot be imported: {error}")
    arguments = {name: value.float() for name, value in rule.problem(70, groups=4).items()}

    def theirs(q, k, v, log_decay, beta, state):
        return naive(q, k, v, beta, log_decay, scale=1.0, initial_state=state, output_final_state=True)

    expected, expected_gradients, weights = rule.gradients(theirs, arguments)
    found, gradients, _ = rule.gradients(form, arguments, weights)
    for a, b in zip((*found, *gradients.values()), (*expected, *expected_gradients.values()), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("base", [1, 16])
@pytest.mark.parametrize("scale", [0.1, 3.0])
def test_inverse_from_blocks(base, scale):
    """A GPU starts from single entries; both starts hold where powers of the matrix would not."""
    lower = (scale * torch.randn(3, 64, 64, dtype=torch.float64)).tril(-1) / 8
    identity = torch.eye(64, dtype=torch.float64)
    torch.testing.assert_close((identity + lower) @ _invert(lower, base), identity.expand(3, -1, -1))
    ones = torch.ones(1, 32, 32, dtype=torch.float64).tril(-1)
    expected = torch.linalg.inv(torch.eye(32, dtype=torch.float64) + ones)
    torch.testing.assert_close(_invert(ones, base), expected)


@pytest.mark.parametrize("size", [16, 32, 64])
def test_unit_lower_inverse(size):
    lower = torch.randn(3, 2, size, size, dtype=torch.float64).tril(-1) / 4
    identity = torch.eye(size, dtype=torch.float64)
    weight = torch.randn_like(lower)
    dense = lower.clone().requires_grad_()
    expected = torch.linalg.inv(identity + dense.tril(-1))
    lower.requires_grad_()
    found = unit_lower_inverse(lower)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
    for a, b in zip(
        torch.autograd.grad((weight * found).sum(), lower),
        torch.autograd.grad((weight * expected).sum(), dense),
        strict=True,
    ):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)
