"""Memories of a host that decays each key channel on its own, against their definitions one token after another."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F

from surgery.memory import MemoryGeometry, create
from surgery.memory.bayesian import NOISE_FLOOR
from surgery.memory.noise import TOKEN_NOISE_BOUND
from surgery.memory.palimpsa import CHANNELS

RULES = [("host", {}), ("palimpsa", {"rank": 4}), ("bayesian", {}), ("bayesian", {"noise": "constant"})]
RULES += [("bayesian", {"noise_groups": 2, "retention": 0.6})]
RULES += [("bayesian", {"noise_from": "token"}), ("bayesian", {"noise_from": "token", "noise": "constant"})]


@pytest.fixture
def channels(geometry):
    return geometry("delta", channel_decay=True, num_key_heads=4)


@pytest.fixture
def make(channels, inputs):
    """Inputs whose channels forget at rates from hardly at all to most of it at once."""

    def build(tokens=37, **options):
        given = inputs(channels, tokens, **options)
        rate = torch.rand(2, tokens, channels.num_heads, channels.key_dim, dtype=given.log_decay.dtype) ** 3
        return replace(given, log_decay=-2 * rate)

    return build


def sequential(memory, inputs):
    """Outputs [B, T, H, V] of the definition, in float64; a mask is not read."""
    rule = written_with_precision if memory.rule == "palimpsa" else filtered
    outputs = torch.empty_like(inputs.v)
    for b in range(inputs.v.shape[0]):
        for h in range(memory.geometry.num_heads):
            rule(memory, inputs, b, h, outputs[b, :, h])
    return outputs


def one_head(inputs, b, h):
    reset = inputs.reset[b] if inputs.reset is not None else torch.zeros(inputs.v.shape[1], dtype=torch.bool)
    decay, write = inputs.log_decay[b, :, h].double().exp(), inputs.write[b, :, h].double()
    return zip(inputs.q[b, :, h], inputs.k[b, :, h], inputs.v[b, :, h], decay, write, reset, strict=True)


def written_with_precision(memory, inputs, b, h, outputs):
    """M = M diag(a) + eta v k^T, E = E diag(a) + b (k^2)^T, o = (M / (1 + E)) q"""
    g = memory.geometry
    raw = inputs.hidden[b] @ memory.b_rank_proj.weight.double().T @ memory.b_proj.weight.double().T
    strength = memory.dose.double() * F.softplus(memory.b_scale[h].double())
    gate = strength * torch.sigmoid(raw.unflatten(-1, (g.num_heads, g.value_dim))[:, h])
    m = e = zero = torch.zeros(g.value_dim, g.key_dim, dtype=torch.float64)
    for t, (q, k, v, a, eta, first) in enumerate(one_head(inputs, b, h)):
        m, e = (zero, zero) if first else (m, e)
        m = m * a + torch.outer(eta * v, k)
        e = e * a + torch.outer(eta * gate[t], k**2)
        outputs[t] = (m / (1 + e)) @ q


def filtered(memory, inputs, b, h, outputs):
    """A Kalman filter with the transition diag(a) for the mean and sqrt(rho) diag(a) for the covariance; the host's own
    rule is rho = 0 and unit noise."""
    g = memory.geometry
    groups = getattr(memory, "noise_groups", 1)
    identity = torch.eye(g.key_dim, dtype=torch.float64)
    for group, columns in enumerate(torch.arange(g.value_dim).chunk(groups)):
        prior = noise = torch.ones((), dtype=torch.float64)
        rho, restoring = 0.0, True
        if memory.rule == "bayesian":
            restoring = memory.noise == "restoring"
            level = partial(dosed, memory, h * groups + group)
            rho = memory.dose.double() * memory.retention
            name = "log_nu" if restoring else "log_l2"
            prior = level(name) if restoring else level("log_p0")
        m = torch.zeros(g.key_dim, len(columns), dtype=torch.float64)
        p, unseen = prior * identity, prior.expand(g.key_dim)
        start = (m, p, unseen)
        for t, (q, k, v, a, eta, first) in enumerate(one_head(inputs, b, h)):
            m, p, unseen = start if first else (m, p, unseen)
            c = rho * a**2
            if memory.rule == "bayesian":
                noise = level(name, inputs.hidden[b, t])
            entering = noise * (1 - c) if restoring else noise.expand(g.key_dim)
            unseen = c * unseen + entering  # the diagonal without any observation
            p = c.sqrt()[:, None] * p * c.sqrt() + torch.diag(entering)
            m = a[:, None] * m
            u = p @ k
            observation = torch.maximum(1 / eta - k @ k, (NOISE_FLOOR * unseen - entering).max()).clamp(min=0)
            beta = 1 / (observation + k @ u)
            m = m + beta * torch.outer(u, v[columns] - m.T @ k)
            p = p - beta * torch.outer(u, u)
            outputs[t, columns] = m.T @ q


def dosed(memory, index, name, hidden=None):
    log = getattr(memory, name)[index].double()
    if memory.noise_from == "token" and name != "log_p0":
        if hidden is not None:
            log = log + memory.noise_proj[index].double() @ hidden.double() / len(hidden) ** 0.5
        log = log / (1 + (log / TOKEN_NOISE_BOUND) ** 2).sqrt()
    return 1 + memory.dose.double() * torch.expm1(log)


def apart(x, y):
    return ((x - y).norm() / y.norm()).item()


@pytest.mark.parametrize(("rule", "options"), RULES)
@pytest.mark.parametrize("dose", [0.0, 0.7, 1.0])
def test_outputs_are_the_definition(make, channels, moved, rule, options, dose):
    memory = moved(create(rule, channels, **options), dose)
    given = make(packed=True)
    o, state = memory(given)
    assert apart(o, sequential(memory, given)) < 1e-6
    assert state.shape == memory.state_shape(2)


@pytest.mark.parametrize(("rule", "options"), RULES)
def test_padding_and_pieces(make, channels, moved, rule, options):
    """Padding leaves the state as it was; two calls are one."""
    memory = moved(create(rule, channels, **options), 1.0)
    given = make(padded=True)
    o, state = memory(given)
    tokens = {name: getattr(given, name)[:, 5:] for name in ("hidden", "q", "k", "v", "log_decay", "write")}
    alone, own = memory(replace(given, mask=None, **tokens))
    assert apart(o[:1, 5:], alone[:1]) < 1e-6 and apart(state[:1], own[:1]) < 1e-6

    def part(where):
        names = ("hidden", "q", "k", "v", "log_decay", "write", "mask")
        return replace(given, **{name: getattr(given, name)[:, where] for name in names})

    first, middle = memory(part(slice(0, 20)))
    one, middle = memory(part(slice(20, 21)), middle)
    rest, last = memory(part(slice(21, None)), middle)
    assert apart(torch.cat([first, one, rest], 1), o) < 1e-6 and apart(last, state) < 1e-6


@pytest.mark.parametrize("rule", ["palimpsa", "bayesian"])
def test_equal_channels_are_one_decay(make, channels, geometry, moved, rule):
    """With the same decay in every channel, the rule of a host with one decay a head; gradients, too."""
    memory = moved(create(rule, channels), 1.0)
    plain = create(rule, geometry("delta", num_key_heads=4))
    plain.load_state_dict(memory.state_dict())
    given = make(dtype=torch.float32)
    decay = given.log_decay[..., :1]
    gradients = []
    for one, log_decay in ((memory, decay.expand_as(given.log_decay)), (plain, decay[..., 0])):
        leaf = log_decay.clone().requires_grad_()
        values = given.v.clone().requires_grad_()
        o, state = one(replace(given, log_decay=leaf, v=values))
        (o.square().sum() + state.square().sum()).backward()
        own = leaf.grad.sum(-1) if leaf.ndim == 4 else leaf.grad
        gradients.append([o.detach(), state.detach(), own, values.grad, *(p.grad for p in one.parameters())])
        if one is memory:
            diagnosed = one.diagnostics(state.detach())
    assert all(apart(mine, theirs) < 2e-4 for mine, theirs in zip(*gradients, strict=True))
    for name, value in plain.diagnostics(gradients[1][1]).items():
        torch.testing.assert_close(diagnosed[name], value, rtol=1e-3, atol=0)


def test_palimpsa_takes_any_number_of_channels(moved, inputs):
    shape = MemoryGeometry("delta", 16, 2, 2, 2 * CHANNELS + 3, 5, channel_decay=True)
    memory = moved(create("palimpsa", shape), 1.0)
    given = inputs(shape, 9)
    given = replace(given, log_decay=-torch.rand(2, 9, 2, shape.key_dim, dtype=torch.float64))
    assert apart(memory(given)[0], sequential(memory, given)) < 1e-6


def test_the_condition_is_the_predicted_covariances(make, channels, moved):
    memory = moved(create("bayesian", channels), 1.0)
    given = make()
    _, state = memory(given)
    decay = given.log_decay[:, -1].exp()
    nu = memory.log_nu.detach().double().exp()[:, None]
    p = state[..., channels.value_dim :]
    p = decay[..., None] * p * decay[..., None, :] + torch.diag_embed(nu * (1 - decay**2))
    expected = torch.linalg.cond(p).mean(0)
    found = memory.diagnostics(state, log_decay=given.log_decay[:, -1])["covariance_condition"]
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=0)


def test_only_delta_hosts_decay_by_channel(geometry):
    with pytest.raises(ValueError, match="channel_decay"):
        geometry("additive", channel_decay=True)
