"""One token of the hosts' rules by a kernel of its own: Triton's interpreter here, a GPU with ``pytest -m gpu``."""

from __future__ import annotations

import os

import pytest
import torch
from torch.nn.functional import normalize

from surgery.kernels import chunks, dispatch
from surgery.kernels.additive.reference import additive
from surgery.kernels.delta.reference import delta

pytest.importorskip("triton")

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
device_test = (lambda test: test) if INTERPRETED else pytest.mark.gpu
RULES = {"additive": (dispatch.additive, additive), "delta": (dispatch.delta, delta)}
WIDTHS = [(5, 3), (16, 40), (24, 160), (128, 64), (256, 300)]


@pytest.fixture
def taken(monkeypatch):
    """The interpreter counts as a GPU."""
    if INTERPRETED:
        monkeypatch.setattr(chunks, "fused", lambda x, by_default: x.dtype != torch.float64)
    return monkeypatch


def problem(rule: str, key_dim: int, value_dim: int, dtype=torch.float32, by_channel=False):
    batch, groups, heads = 16, 2, 4
    k = normalize(torch.randn(batch, 1, groups, key_dim), dim=-1).to(dtype)
    q, v = torch.randn(batch, 1, groups, key_dim).to(dtype), torch.randn(batch, 1, heads, value_dim).to(dtype)
    decays = (batch, 1, heads, key_dim) if by_channel else (batch, 1, heads)
    shape = (key_dim, value_dim) if rule == "delta" else (value_dim, key_dim)
    state, strength = torch.randn(batch, heads, *shape), torch.rand(batch, 1, heads)
    log_decay = -torch.randn(decays).exp()
    last = {"write": strength} if rule == "additive" else {"beta": strength}
    arguments = {"q": q, "k": k, "v": v, "log_decay": log_decay, **last, "state": state}
    return {name: x.to(DEVICE) for name, x in arguments.items()}


def compare(rule, arguments, tolerance, **options):
    step, reference = RULES[rule]
    expected = reference(**{name: x.double() for name, x in arguments.items()}, **options)
    with torch.no_grad():
        found = step(**arguments, **options)
    assert found[0].dtype == arguments["v"].dtype and found[1].dtype == torch.float32
    for one, other, allowed in zip(found, expected, (tolerance, 1e-6), strict=True):
        assert one.shape == other.shape
        assert (one.double() - other).norm() <= allowed * other.norm()
    return found


@device_test
@pytest.mark.parametrize(("key_dim", "value_dim"), WIDTHS)
@pytest.mark.parametrize("rule", RULES)
def test_equals_the_sequential_rule(taken, nan_filled, rule, key_dim, value_dim):
    arguments = problem(rule, key_dim, value_dim)
    before = arguments["state"].clone()
    compare(rule, arguments, 1e-6)
    assert torch.equal(arguments["state"], before)
    compare(rule, problem(rule, key_dim, value_dim, torch.bfloat16), 4e-3)
    reset = torch.arange(16, device=DEVICE)[:, None] % 3 == 0
    compare(rule, problem(rule, key_dim, value_dim), 1e-6, reset=reset)


@device_test
@pytest.mark.parametrize("value_dim", [3, 64])
def test_decays_for_each_key_channel(taken, nan_filled, value_dim):
    compare("delta", problem("delta", 24, value_dim, by_channel=True), 1e-6)
    compare("delta", problem("delta", 24, value_dim, by_channel=True), 1e-6, reset=torch.ones(16, 1, device=DEVICE) > 0)


@device_test
@pytest.mark.parametrize("rule", RULES)
def test_in_place_and_strided(taken, nan_filled, rule):
    arguments = problem(rule, 24, 40)
    expected = compare(rule, arguments, 1e-6)
    wide = {name: torch.stack((x, x), -1)[..., 0] for name, x in arguments.items()}  # no two entries side by side
    state = arguments["state"].clone()
    with torch.no_grad():
        found = RULES[rule][0](**{**wide, "state": state}, in_place=True)
        copied = RULES[rule][0](**wide, in_place=True)
    assert found[1] is state and copied[1] is not wide["state"]
    assert torch.equal(wide["state"], arguments["state"])
    for one in (found, copied):
        assert all(torch.equal(x, y) for x, y in zip(one, expected, strict=True))


@device_test
def test_additive_without_write_strengths(taken, nan_filled):
    arguments = problem("additive", 16, 24)
    del arguments["write"]
    compare("additive", arguments, 1e-6)


def test_when_it_is_taken(taken):
    """One token, a float32 state, nothing to differentiate."""
    arguments = problem("delta", 8, 8)
    given = [arguments[name] for name in ("q", "k", "v")]
    with torch.no_grad():
        assert chunks.steps(*given, arguments["state"])
        assert not chunks.steps(*given, None)
        assert not chunks.steps(*given, arguments["state"].double())
        assert not chunks.steps(arguments["q"].double(), *given[1:], arguments["state"])
        assert not chunks.steps(*(x.expand(-1, 2, -1, -1) for x in given), arguments["state"])
    assert not chunks.steps(*given, arguments["state"])


@device_test
@pytest.mark.parametrize("rule", RULES)
def test_shapes_that_do_not_fit_are_refused(taken, rule):
    """A kernel would read and write beyond what there is."""
    arguments = problem(rule, 8, 16)
    with torch.no_grad():
        with pytest.raises(AssertionError, match="the state"):
            RULES[rule][0](**{**arguments, "state": arguments["state"][:1]}, in_place=True)
        with pytest.raises(AssertionError, match="no multiple"):
            RULES[rule][0](**{**arguments, "v": arguments["v"][:, :, :3]})
