"""The additive rule: both forms against each other, against the quadratic form of attention, and their contract."""

from __future__ import annotations

import pytest
import torch

from surgery.kernels.additive.chunked import additive as chunked
from surgery.kernels.additive.reference import additive as reference

FORMS = pytest.mark.parametrize("form", [reference, chunked], ids=["reference", "chunked"])


@pytest.fixture
def rule(contract):
    return contract("additive", reference)


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


@FORMS
def test_quadratic_form(rule, form):
    """o_t = sum_{s <= t} exp(g_{s+1} + ... + g_t) (q_t . k_s) v_s, written out."""
    arguments = rule.problem(40, "mixed", groups=4, state=False)
    total = arguments["log_decay"].cumsum(1).transpose(1, 2)
    weights = (total[..., :, None] - total[..., None, :]).tril().exp().tril()
    scores = torch.einsum("bthk,bshk->bhts", arguments["q"], arguments["k"]) * weights
    expected = torch.einsum("bhts,bshv->bthv", scores, arguments["v"])
    torch.testing.assert_close(form(**arguments)[0], expected, rtol=0, atol=1e-11)


@FORMS
@pytest.mark.parametrize("decay", [-1e4, -float("inf")])
def test_forgets_everything(rule, form, decay):
    """Beyond the range of exp, only the token itself is read, and gradients are numbers."""
    arguments = rule.problem(70)
    arguments["log_decay"] = torch.full_like(arguments["log_decay"], decay)
    (o, _), gradients, _ = rule.gradients(form, arguments)
    q, k = (arguments[name].repeat_interleave(2, 2) for name in ("q", "k"))
    torch.testing.assert_close(o, (q * k).sum(-1, keepdim=True) * arguments["v"])
    assert all(gradient.isfinite().all() for gradient in gradients.values())


@FORMS
def test_contract(rule, form):
    rule.is_kept(form)


def test_compiles(rule):
    rule.compiles(chunked, 70)
