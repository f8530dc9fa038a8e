"""Palimpsa: both forms against each other and against sums written out, its limits, its worked values, its contract."""

from __future__ import annotations

import functools

import pytest
import torch

from surgery.kernels.additive.reference import additive
from surgery.kernels.palimpsa import chunked as module
from surgery.kernels.palimpsa.chunked import palimpsa as chunked
from surgery.kernels.palimpsa.reference import palimpsa as reference

FORMS = pytest.mark.parametrize("form", [reference, chunked], ids=["reference", "chunked"])


@pytest.fixture
def rule(contract):
    return contract("palimpsa", reference)


def one_channel(precision: float, mean: float, a: float, *, key=1.0, value=0.0):
    """One head of width 1 with I0 = b = 1 after one token, from a given precision and mean; read with q = 1."""
    number = functools.partial(torch.tensor, dtype=torch.float64)
    return {
        "q": number([[[[1.0]]]]),
        "k": number([[[[key]]]]),
        "v": number([[[[value]]]]),
        "b": number([[[[1.0]]]]),
        "log_decay": number([[[a]]]).log(),
        "prior": number([1.0]),
        "state": number([precision * mean, precision - 1]).view(1, 2, 1, 1, 1),
    }


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
@pytest.mark.parametrize("decay", ["mild", "hard", "none", "mixed"])
@pytest.mark.parametrize("tokens", [1, 2, 17, 63, 65, 130])
def test_chunked_equals_sequential(rule, tokens, decay, dtype):
    rule.equals_reference(chunked, rule.problem(tokens, decay), dtype)
    rule.equals_reference(chunked, rule.problem(tokens, decay), dtype, reset=rule.resets(2, tokens))


@pytest.mark.parametrize("decay", ["none", "mixed"])
def test_a_thousand_tokens(rule, decay):
    rule.equals_reference(chunked, rule.problem(1000, decay, batch=1, heads=2, state=False), torch.float32)


@pytest.mark.parametrize(("groups", "heads"), [(1, 1), (1, 6), (3, 3)])
def test_key_groups(rule, groups, heads):
    rule.equals_reference(chunked, rule.problem(70, groups=groups, heads=heads), torch.float64)


def test_long_sequences_go_by_segments(rule, monkeypatch):
    monkeypatch.setattr(module, "segment_tokens", lambda *shape: 32)
    rule.equals_reference(chunked, rule.problem(130), torch.float64, reset=rule.resets(2, 130))


@pytest.mark.parametrize("tokens", [1, 63, 130])
def test_variance(rule, tokens):
    """The variance and its gradients, alone and beside the read's; the read is the same with and without."""
    arguments = rule.problem(tokens, "mixed")
    both = functools.partial(chunked, return_variance=True)
    contract = type(rule)("palimpsa", functools.partial(reference, return_variance=True))
    contract.equals_reference(both, arguments, torch.float64, reset=rule.resets(2, tokens))

    def alone(form, **options):
        return form(return_variance=True, **options)[1:]

    contract = type(rule)("palimpsa", functools.partial(alone, reference))
    contract.equals_reference(functools.partial(alone, chunked), arguments, torch.float64)
    torch.testing.assert_close(both(**arguments)[0], chunked(**arguments)[0], rtol=1e-12, atol=1e-12)


@FORMS
def test_sums_written_out(rule, form):
    """M_t, E_t = sum_{s <= t} exp(g_{s+1} + ... + g_t) (v_s k_s^T, b_s (k_s^2)^T)."""
    arguments = rule.problem(40, "mixed", groups=4, state=False)
    total = arguments["log_decay"].cumsum(1).transpose(1, 2)
    weights = (total[..., :, None] - total[..., None, :]).tril().exp().tril()
    k = arguments["k"]
    memory = torch.einsum("bhts,bshv,bshk->bthvk", weights, arguments["v"], k)
    precision = torch.einsum("bhts,bshv,bshk->bthvk", weights, arguments["b"], k**2)
    precision = precision + arguments["prior"][:, None, None]
    o, variance, state = form(**arguments, return_variance=True)
    q = arguments["q"][..., None, :]
    torch.testing.assert_close(o, (memory / precision * q).sum(-1), rtol=0, atol=1e-11)
    torch.testing.assert_close(variance, (q**2 / precision).sum(-1), rtol=0, atol=1e-11)
    torch.testing.assert_close(state[:, 0], memory[:, -1], rtol=0, atol=1e-11)


@FORMS
def test_without_precision_it_is_additive(rule, form):
    arguments = rule.problem(70, "mixed", state=False)
    arguments.update(b=torch.zeros_like(arguments["b"]), prior=torch.ones_like(arguments["prior"]))
    o, state = form(**arguments)
    expected, memory = additive(**{name: arguments[name] for name in ("q", "k", "v", "log_decay")})
    torch.testing.assert_close(o, expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(state[:, 0], memory, rtol=0, atol=1e-12)
    assert not state[:, 1].any()


@FORMS
@pytest.mark.parametrize(("precision", "after", "mean"), [(1.0, 2.0, 0.4500), (9.0, 9.2, 0.8804)])
def test_a_certain_memory_forgets_less(form, precision, after, mean):
    """mu = 1, v = 0, k = b = I0 = 1, a = 0.9: the same token moves a certain memory less."""
    o, variance, state = form(**one_channel(precision, 1.0, 0.9), return_variance=True)
    assert 1 + state[0, 1].item() == pytest.approx(after, abs=1e-12)
    assert o.item() == pytest.approx(mean, abs=5e-5)
    assert variance.item() == pytest.approx(1 / after, abs=1e-12)


@FORMS
def test_two_keys_at_once(form):
    """k = (1, 1), v = b = 1, identity prior: the diagonal mean is (1/2, 1/2), the full Gaussian's (1/3, 1/3)."""
    k = torch.ones(2, 1, 1, 2, dtype=torch.float64)
    arguments = {
        "q": torch.eye(2, dtype=torch.float64)[:, None, None],  # one sequence reads each key
        "k": k,
        "v": torch.ones(2, 1, 1, 1, dtype=torch.float64),
        "b": torch.ones(2, 1, 1, 1, dtype=torch.float64),
        "log_decay": torch.zeros(2, 1, 1, dtype=torch.float64),
        "prior": torch.ones(1, dtype=torch.float64),
    }
    diagonal = form(**arguments)[0].flatten()
    key = k[0, 0, 0]
    precision = torch.eye(2, dtype=torch.float64) + torch.outer(key, key)
    full = torch.linalg.solve(precision, key * 1.0)
    torch.testing.assert_close(diagonal, torch.tensor([1 / 2, 1 / 2], dtype=torch.float64))
    torch.testing.assert_close(full, torch.tensor([1 / 3, 1 / 3], dtype=torch.float64))
    # the diagonal of the full posterior's precision is what Palimpsa keeps
    torch.testing.assert_close(diagonal, key / precision.diagonal())


@FORMS
def test_excess_precision_settles_at_the_horizon(form):
    """At stationarity E = N b k^2 with N = 1 / (1 - a)."""
    tokens, a = 600, 0.95
    arguments = one_channel(1.0, 0.0, a, key=0.7)
    for name in ("q", "k", "v", "b", "log_decay"):
        arguments[name] = arguments[name].repeat_interleave(tokens, 1)
    _, state = form(**arguments)
    assert state[0, 1].item() == pytest.approx(0.7**2 / (1 - a), rel=1e-9)


@FORMS
@pytest.mark.parametrize("decay", [-1e4, -float("inf")])
def test_forgets_everything(rule, form, decay):
    """Beyond the range of exp, only the token itself is read, and gradients are numbers."""
    arguments = rule.problem(70)
    arguments["log_decay"] = torch.full_like(arguments["log_decay"], decay)
    (o, _), gradients, _ = rule.gradients(form, arguments)
    q, k = (arguments[name].repeat_interleave(2, 2)[..., None, :] for name in ("q", "k"))
    precision = arguments["prior"][:, None, None] + arguments["b"][..., None] * k**2
    torch.testing.assert_close(o, (q * k / precision).sum(-1) * arguments["v"])
    assert all(gradient.isfinite().all() for gradient in gradients.values())


@FORMS
def test_contract(rule, form):
    rule.is_kept(form)


def test_no_state_of_a_token_is_kept(rule):
    """What autograd keeps is far smaller than the states of all tokens."""
    arguments = rule.problem(512, batch=1, groups=2, heads=2, key_dim=32, value_dim=32, state=False)
    kept = {}

    def keep(x):
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes() // x.element_size()
        return x

    arguments = {name: value.requires_grad_() for name, value in arguments.items()}
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        chunked(**arguments)
    given = sum(value.numel() for value in arguments.values())
    assert given <= sum(kept.values()) < given + 512 * 2 * 2 * 32 * 32 / 100
