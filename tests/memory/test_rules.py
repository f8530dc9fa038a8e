"""What every memory rule keeps: the host at dose 0, state, padding, packing, causality, gradients, casts, options."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch

from surgery.errors import UsageError
from surgery.memory import RULES, HostMemory, create

CASES = {
    "host-additive": ("host", "additive", {}, {}),
    "host-delta": ("host", "delta", {}, {}),
    "palimpsa-additive": ("palimpsa", "additive", {"learn_prior": True}, {}),
    "palimpsa-delta": ("palimpsa", "delta", {"rank": 3}, {}),
    "bayesian-additive": ("bayesian", "additive", {}, {}),
    "bayesian-additive-constant": ("bayesian", "additive", {"noise": "constant", "noise_groups": 2}, {}),
    "bayesian-delta": ("bayesian", "delta", {"retention": 0.7}, {}),
    "bayesian-delta-constant": ("bayesian", "delta", {"noise": "constant"}, {}),
    "bayesian-delta-groups": ("bayesian", "delta", {"noise_groups": 3}, {}),
    "bayesian-delta-negative": ("bayesian", "delta", {}, {"negative_eigenvalues": True}),
    "bayesian-delta-negative-constant": ("bayesian", "delta", {"noise": "constant"}, {"negative_eigenvalues": True}),
    "bayesian-additive-token": ("bayesian", "additive", {"noise_from": "token", "noise_groups": 2}, {}),
    "bayesian-additive-token-constant": ("bayesian", "additive", {"noise_from": "token", "noise": "constant"}, {}),
    "bayesian-delta-token": ("bayesian", "delta", {"noise_from": "token"}, {}),
    "bayesian-delta-token-constant": ("bayesian", "delta", {"noise_from": "token", "noise": "constant"}, {}),
    "bayesian-delta-token-negative": ("bayesian", "delta", {"noise_from": "token"}, {"negative_eigenvalues": True}),
    "bayesian-delta-rotations": ("bayesian", "delta", {"rotations": True, "noise_groups": 3}, {}),
    "bayesian-delta-rotations-token": (
        "bayesian", "delta", {"rotations": True, "noise": "constant", "noise_from": "token"}, {}
    ),
    "bayesian-additive-rotations": ("bayesian", "additive", {"rotations": True, "noise_groups": 2}, {}),
    "bayesian-delta-forgetful": ("bayesian", "delta", {"noise": "constant", "retention": 0.0}, {}),
}


@pytest.fixture(params=CASES)
def memory(request, geometry):
    rule, style, options, changes = CASES[request.param]
    return create(rule, geometry(style, **changes), **options)


def reads_hidden(memory) -> bool:
    """Whether the rule projects a gate of its own from the mixer's input."""
    return memory.rule == "palimpsa" or getattr(memory, "noise_from", "head") == "token"


def close(a, b, tolerance=1e-11):
    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("dtype", "tolerance"), ((torch.float64, 1e-12), (torch.float32, 1e-6)))
def test_dose_0_is_the_hosts_rule(memory, inputs, moved, dtype, tolerance):
    """Whatever the added parameters are. On a delta host Palimpsa at dose 0 is the additive rule."""
    memory = moved(memory, 0.0)
    style = memory.geometry.style if memory.exact_limit else "additive"
    host = HostMemory(dataclasses.replace(memory.geometry, style=style))
    given = inputs(memory.geometry, 70, dtype, padded=True, packed=True)
    o, _ = memory(given)
    expected, _ = host(given)
    real = given.mask[..., None, None]
    assert ((o - expected) * real).norm() <= tolerance * (expected * real).norm()
    assert memory.exact_limit == (memory.rule != "palimpsa" or memory.geometry.style == "additive")


def test_a_dose_above_0_is_not_the_hosts_rule(memory, inputs, moved):
    given = inputs(memory.geometry, 70)
    start, _ = memory(given)
    o, _ = moved(memory, 0.5)(given)
    if memory.rule == "host":
        assert torch.equal(o, start)
    else:
        assert (o - start).norm() > 1e-4 * start.norm()


@pytest.mark.parametrize("tokens", (1, 63, 200))
def test_fast_form_equals_the_sequential_one_with_gradients(memory, inputs, moved, tokens, monkeypatch):
    memory = moved(memory, 0.5)
    given = inputs(memory.geometry, tokens, padded=tokens > 10, packed=tokens > 10)
    leaves = {name: getattr(given, name).requires_grad_() for name in ("hidden", "q", "k", "v", "log_decay", "write")}
    leaves.update(memory.named_parameters())
    results = []
    for form in ("reference", "chunked"):
        monkeypatch.setenv("SURGERY_KERNELS", form)
        o, state = memory(given)
        real = 1.0 if given.mask is None else given.mask[..., None, None]
        loss = (torch.sin(torch.arange(o.numel())).view_as(o) * o * real).sum() + state.square().sum()
        gradients = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
        results.append({"o": o * real, "state": state, **dict(zip(leaves, gradients, strict=True))})
    for name, expected in results[0].items():
        if expected is None:
            assert name == "hidden" and not reads_hidden(memory) and results[1][name] is None
            continue
        got = results[1][name]
        tolerance = 1e-10 if got.dtype == torch.float64 else 1e-5  # parameters and their gradients are float32
        error = (got - expected).abs().max().item()
        assert error <= tolerance * max(1.0, expected.abs().max().item()), f"{name}: {error:.1e}"


def test_state_shape_and_carrying_a_state_on(memory, inputs, moved):
    memory = moved(memory, 0.7).double()
    given = inputs(memory.geometry, 60, padded=True, packed=True)
    whole, expected = memory(given)
    assert expected.shape == memory.state_shape(2)
    outputs, state = [], None
    for span in (slice(0, 25), *(slice(t, t + 1) for t in range(25, 36)), slice(36, None)):
        o, state = memory(given.span(span), state)
        outputs.append(o)
    real = given.mask[..., None, None]
    close(torch.cat(outputs, 1) * real, whole * real)
    close(state, expected)


def test_padding_leaves_the_state_as_it_was(memory, inputs, moved):
    """Left padding changes nothing after it, and more padding nothing at all, whatever stands there."""
    memory = moved(memory, 0.7).double()
    given = inputs(memory.geometry, 30, padded=True)
    o, state = memory(given)
    alone, state_alone = memory(given.span(slice(5, None)))
    close(o[0, 5:], alone[0])
    close(state[0], state_alone[0])
    blank = given.span(slice(0, 7))
    blank = dataclasses.replace(blank, mask=torch.zeros(2, 7, dtype=torch.bool), v=1e4 * blank.v)
    _, after = memory(blank, state)
    assert torch.equal(after, state)


def test_packed_documents_equal_each_alone(memory, inputs, moved):
    memory = moved(memory, 0.7).double()
    given = inputs(memory.geometry, 50)
    reset = torch.zeros(2, 50, dtype=torch.bool)
    reset[:, 0] = reset[:, 23] = reset[:, 24] = True
    _, before = memory(given)
    o, state = memory(dataclasses.replace(given, reset=reset), before)
    for span in (slice(0, 23), slice(23, 24), slice(24, None)):
        alone, alone_state = memory(given.span(span))
        close(o[:, span], alone)
    close(state, alone_state)


def test_no_output_depends_on_a_later_token(memory, inputs, moved):
    memory = moved(memory, 0.7).double()
    given = inputs(memory.geometry, 70)
    t = 41
    changed = {}
    for name in ("hidden", "q", "k", "v", "log_decay", "write"):
        changed[name] = getattr(given, name).clone()
        changed[name][:, t] *= 0.8
    before, _ = memory(given)
    after, _ = memory(dataclasses.replace(given, **changed))
    close(after[:, :t], before[:, :t], 1e-13)
    assert (after[:, t] - before[:, t]).abs().max() > 1e-6


@pytest.mark.parametrize("dose", (0.005, 0.5, 1.0))
def test_every_trainable_parameter_has_a_gradient(memory, inputs, dose):
    memory.dose.fill_(dose)
    trainable = {name: parameter for name, parameter in memory.named_parameters() if parameter.requires_grad}
    assert len(trainable) == len(list(memory.parameters()))  # frozen ones are buffers, so nobody trains them
    given = inputs(memory.geometry, 70)  # float64: at a small dose p0 moves the output by less than float32 resolves
    o, _ = memory(given)
    if trainable:
        o.square().sum().backward()
    for name, parameter in trainable.items():
        assert torch.isfinite(parameter.grad).all(), name
        dead = parameter.grad == 0
        assert not dead.any(), f"{name}: {int(dead.sum())} of {dead.numel()} have no gradient"


def test_casts_keep_the_dose_and_the_small_parameters_in_float32(memory, inputs, moved):
    memory = moved(memory, 0.123456789)
    before = copy.deepcopy(memory.state_dict())
    memory.to(torch.bfloat16)
    kept = 0
    for name, tensor in memory.state_dict().items():
        if name.startswith(("b_proj", "b_rank_proj")):
            assert tensor.dtype == torch.bfloat16
        else:
            assert tensor.dtype == torch.float32 and torch.equal(tensor, before[name]), name
            kept += 1
    assert kept >= 1 and "dose" in before
    given = inputs(memory.geometry, 20, torch.bfloat16)
    o, state = memory(given)
    assert o.dtype == torch.bfloat16 and state.dtype == torch.float32
    assert torch.isfinite(o).all() and torch.isfinite(state).all()
    # a plan reads the dtypes off a module that was never allocated
    shadow = copy.deepcopy(memory).to("meta").float().to(torch.bfloat16)
    assert {name: t.dtype for name, t in shadow.state_dict().items()} == {
        name: t.dtype for name, t in memory.state_dict().items()
    }


def test_a_module_made_under_a_bf16_default_keeps_float32_parameters(geometry):
    torch.set_default_dtype(torch.bfloat16)
    try:
        made = [create("palimpsa", geometry("additive")), create("bayesian", geometry("additive"))]
    finally:
        torch.set_default_dtype(torch.float32)
    for memory in made:
        for name, tensor in memory.state_dict().items():
            assert name.startswith(("b_proj", "b_rank_proj")) or tensor.dtype == torch.float32, name


def test_autocast_leaves_the_recurrence_in_float32(memory, inputs, moved):
    memory = moved(memory, 0.5)
    given = inputs(memory.geometry, 40, torch.float32)
    o, _ = memory(given)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast, _ = memory(given)
    # Palimpsa's gate is a host-like projection, which autocast may lower
    tolerance = 5e-3 if memory.rule == "palimpsa" else 1e-6
    assert (o - cast).norm() <= tolerance * o.norm()


def test_starts(memory):
    memory.reset_parameters("exact")
    assert memory.dose.item() == 0
    memory.reset_parameters("paper")
    assert memory.dose.item() == 1
    if memory.rule == "bayesian":
        for name, parameter in memory.named_parameters():
            if name == "noise_proj":
                assert (parameter == 0).all()
                continue
            assert torch.allclose(parameter.exp(), torch.tensor(1 / 8 if name == "log_lambda" else 1.0))
    if memory.rule == "palimpsa":
        assert memory.b_scale.min() >= 0.1 and memory.b_scale.max() <= 1.0 and (memory.Ip_log == 0).all()
        assert memory.b_scale.unique().numel() > 1


@pytest.mark.parametrize(
    ("rule", "options", "says"),
    (
        ("bayes", {}, "bayesian"),
        ("bayesian", {"nose": "restoring"}, "noise"),
        ("bayesian", {"noise": "white"}, "restoring"),
        ("bayesian", {"noise_from": "layer"}, "head nor token"),
        ("bayesian", {"retention": 1.5}, "from 0 to 1"),
        ("bayesian", {"retention": float("nan")}, "from 0 to 1"),
        ("bayesian", {"retention": True}, "from 0 to 1"),
        ("bayesian", {"noise_groups": 0}, "above 0"),
        ("bayesian", {"noise_groups": 4}, "divide"),
        ("bayesian", {"rotations": "yes"}, "true nor false"),
        ("palimpsa", {"rank": 0}, "above 0"),
        ("palimpsa", {"rank": 2.5}, "above 0"),
        ("palimpsa", {"b_scale": [1.0, 0.1]}, "in order"),
        ("palimpsa", {"b_scale": 0.5}, "two finite numbers"),
        ("palimpsa", {"learn_prior": "yes"}, "true nor false"),
        ("host", {"rank": 4}, "none"),
    ),
)
def test_wrong_options_are_usage_errors(geometry, rule, options, says):
    with pytest.raises(UsageError, match=says) as error:
        create(rule, geometry("delta"), **options)
    assert str(error.value).startswith("memory.") and len(str(error.value).splitlines()) == 1


def test_every_rule_takes_its_declared_defaults(geometry):
    for name, rule in RULES.items():
        assert rule.rule == name
        for style in ("additive", "delta"):
            assert create(name, geometry(style), **rule.defaults).dose.item() == 0
            assert create(name, geometry(style), **{**rule.defaults, **rule.paper_defaults}).rule == name
