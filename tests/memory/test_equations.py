"""The modules against their rules written out token by token, as the papers and the docstrings state them."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from surgery.memory import MemoryInputs, MemoryRule, create


def spread(x: Tensor, heads: int) -> Tensor:
    return x.repeat_interleave(heads // x.shape[2], dim=2)


def head_streams(memory: MemoryRule, given: MemoryInputs):
    """(batch, memory index, and that memory's q, k [T, K], v [T, V / Gn], a, write [T], reset [T])."""
    groups = getattr(memory, "noise_groups", 1)
    batch, tokens, heads, value_dim = given.v.shape
    q, k = spread(given.q, heads), spread(given.k, heads)
    v = given.v.view(batch, tokens, heads, groups, value_dim // groups)
    reset = torch.zeros(batch, tokens, dtype=torch.bool) if given.reset is None else given.reset
    for b in range(batch):
        for h in range(heads):
            for g in range(groups):
                streams = (q[b, :, h], k[b, :, h], v[b, :, h, g], given.log_decay[b, :, h].exp(), given.write[b, :, h])
                yield b, h * groups + g, (*streams, reset[b], given.hidden[b])


def dosed(memory: MemoryRule, name: str, index: int, hidden: Tensor | None = None) -> float:
    """1 + d (exp(parameter) - 1); with the token's part, within its bounds, where a token sets the noise."""
    log = getattr(memory, name)[index].item() if hasattr(memory, name) else 0.0
    if memory.noise_from == "token" and name != "log_p0":
        if hidden is not None:
            log += (memory.noise_proj[index].double() @ hidden).item() / math.sqrt(len(hidden))
        log /= math.sqrt(1 + (log / math.log(1e4)) ** 2)
    return 1 + memory.dose.item() * (math.exp(log) - 1)


def bayesian_on_delta(memory, index, q, k, v, a, eta, reset, hidden):
    d, rho = memory.dose.item(), memory.retention
    restoring = memory.noise == "restoring"
    name = "log_nu" if restoring else "log_l2"
    p0 = dosed(memory, name, index) if restoring else dosed(memory, "log_p0", index) if rho > 0 else 1.0
    identity = torch.eye(k.shape[-1], dtype=torch.float64)
    mean, covariance, bound, reads = torch.zeros(k.shape[-1], v.shape[-1], dtype=torch.float64), p0 * identity, p0, []
    for t in range(len(k)):
        if reset[t]:
            mean, covariance, bound = 0 * mean, p0 * identity, p0
        c = d * rho * a[t] ** 2
        noise = dosed(memory, name, index, hidden[t])
        n = noise * (1 - c) if restoring else noise
        bound = c * bound + n
        enters = c * p0 + n if reset[t] else n  # a reset brings the prior back, and needs no floor
        predicted = c * covariance + n * identity
        norm = (k[t] @ k[t]).item()
        r2 = max(1 / eta[t].item() - norm, 0.0, 1e-4 * float(bound) - float(enters))
        omega = max(1.0, eta[t].item() * norm) if memory.geometry.negative_eigenvalues else 1.0
        gain = omega * predicted @ k[t] / (r2 + k[t] @ predicted @ k[t])
        mean = a[t] * mean + torch.outer(gain, v[t] - a[t] * mean.T @ k[t])
        if omega <= 2:  # Joseph's covariance of any gain; beyond, the shrinking stops at none
            kept = identity - torch.outer(gain, k[t])
            covariance = kept @ predicted @ kept.T + r2 * torch.outer(gain, gain)
        else:
            covariance = predicted
        reads.append(mean.T @ q[t])
    return torch.stack(reads)


def bayesian_on_additive(memory, index, q, k, v, a, dt, reset, hidden):
    d, rho = memory.dose.item(), memory.retention
    restoring = memory.noise == "restoring"
    name = "log_nu" if restoring else "log_l2"  # an additive host has neither parameter, and only the token's part
    lam = d * math.exp(memory.log_lambda[index].item())
    p0 = 1.0 if restoring else dosed(memory, "log_p0", index)
    identity = torch.eye(k.shape[-1], dtype=torch.float64)
    mean, covariance, s, reads = torch.zeros(k.shape[-1], v.shape[-1], dtype=torch.float64), p0 * identity, p0, []
    for t in range(len(k)):
        if reset[t]:
            mean, covariance, s = 0 * mean, p0 * identity, p0
        c = d * rho * a[t] ** 2
        noise = dosed(memory, name, index, hidden[t])
        n = noise * (1 - c) if restoring else noise
        s = c * s + n
        predicted = c * covariance + n * identity
        u = predicted @ k[t]
        b = 1 / (1 + lam * k[t] @ u)
        forget = lam * s * a[t] * mean.T @ k[t]
        mean = a[t] * mean + (b / s) * torch.outer(u, (1 + lam * s * k[t] @ k[t]) * dt[t] * v[t] - forget)
        covariance = predicted - lam * b * torch.outer(u, u)
        reads.append(mean.T @ q[t])
    return torch.stack(reads)


@pytest.mark.parametrize("dose", (0.3, 1.0))
@pytest.mark.parametrize(
    ("style", "changes", "options"),
    (
        ("delta", {}, {}),
        ("delta", {}, {"noise": "constant", "noise_groups": 2}),
        ("delta", {"negative_eigenvalues": True}, {"retention": 0.8}),
        ("delta", {"negative_eigenvalues": True}, {"noise": "constant"}),
        ("delta", {}, {"noise_from": "token", "noise_groups": 2}),
        ("delta", {}, {"noise_from": "token", "noise": "constant"}),
        ("delta", {"negative_eigenvalues": True}, {"noise_from": "token"}),
        ("additive", {}, {"noise_from": "token"}),
        ("additive", {}, {"noise_from": "token", "noise": "constant"}),
        ("additive", {}, {"noise_groups": 3}),
        ("additive", {}, {"noise": "constant", "retention": 0.9}),
    ),
)
def test_bayesian(geometry, inputs, moved, style, changes, options, dose):
    memory = moved(create("bayesian", geometry(style, **changes), **options), dose)
    given = inputs(memory.geometry, 30, packed=True)
    o, _ = memory(given)
    o = o.view(*o.shape[:2], -1, o.shape[-1] // memory.noise_groups)
    written_out = bayesian_on_delta if style == "delta" else bayesian_on_additive
    for b, index, streams in head_streams(memory, given):
        torch.testing.assert_close(o[b, :, index], written_out(memory, index, *streams), rtol=1e-8, atol=1e-8)


def test_bayesian_floors_the_observation_noise_where_nothing_else_enters(geometry, inputs):
    """A step of one on unit keys that are never forgotten: r2 and n are 0, and the floor alone divides."""
    memory = create("bayesian", geometry("delta", num_heads=1, num_key_heads=1))
    memory.dose.fill_(1.0)
    given = inputs(memory.geometry, 30)
    given.k[:] = given.k[:, :1]
    given.log_decay.zero_()
    given.write.fill_(1.0)
    o, state = memory(given)
    assert torch.isfinite(o).all() and torch.linalg.eigvalsh(state[..., 6:])[..., 0].min() > 0
    for b, index, streams in head_streams(memory, given):
        torch.testing.assert_close(o[b, :, 0], bayesian_on_delta(memory, index, *streams), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("noise", ("restoring", "constant"))
@pytest.mark.parametrize("style", ("additive", "delta"))
def test_bayesian_covariance_is_bounded_by_what_was_never_observed(geometry, inputs, moved, style, noise):
    memory = moved(create("bayesian", geometry(style), noise=noise), 1.0)
    given = inputs(memory.geometry, 200)
    _, state = memory(given)
    width = memory.geometry.key_dim
    values = torch.linalg.eigvalsh(state[..., 6 : 6 + width])
    if noise == "constant":
        bound = state[..., 0, -1]
        assert torch.equal(state[..., -1], bound[..., None].expand(2, 4, width))
    else:
        bound = memory.log_nu.double().exp() if style == "delta" else torch.ones(4, dtype=torch.float64)
    assert (values > 0).all() and (values <= (1 + 1e-9) * bound[..., None]).all()
    assert (values[..., 0] < 0.9 * bound).all()  # something was learned


@pytest.mark.parametrize("style", ("additive", "delta"))
def test_palimpsa(geometry, inputs, moved, style):
    """Eq. (5) in its own variables: the precision I and the mean mu."""
    memory = moved(create("palimpsa", geometry(style), learn_prior=True), 0.6).double()
    given = inputs(memory.geometry, 25)
    o, state = memory(given)
    gate = torch.sigmoid(given.hidden @ memory.b_rank_proj.weight.T @ memory.b_proj.weight.T).view_as(given.v)
    for b, h, (q, k, v, a, write, *_) in head_streams(memory, given):
        scale = 0.6 * math.log1p(math.exp(memory.b_scale[h].item()))
        prior = math.exp(0.6 * memory.Ip_log[h].item())
        importance = torch.full((6, 8), prior, dtype=torch.float64)
        mean = torch.zeros_like(importance)
        for t in range(25):
            strength = scale * write[t] * gate[b, t, h]
            old = importance
            importance = a[t] * old + (1 - a[t]) * prior + strength[:, None] * k[t] ** 2
            mean = a[t] * old / importance * mean + torch.outer(write[t] * v[t], k[t]) / importance
            torch.testing.assert_close(o[b, t, h], mean @ q[t], rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(state[b, 1, h], importance - prior, rtol=1e-6, atol=1e-6)


def test_palimpsas_importance_spread(geometry, inputs, moved):
    memory = moved(create("palimpsa", geometry("additive"), learn_prior=True), 0.6)
    state = torch.zeros(memory.state_shape(2))
    state[0, 1, 0, 1, 2], state[0, 1, 3] = 3.0, 5.0
    prior = (0.6 * memory.Ip_log).exp()
    spread = memory.diagnostics(state)["importance_spread"]
    expected = torch.zeros(4)
    expected[0] = 3 / prior[0] / 2  # (I_max - I_min) / I_min in one sequence of two; a head that grew evenly has none
    torch.testing.assert_close(spread, expected)


@pytest.mark.parametrize("noise", ("restoring", "constant"))
def test_bayesian_condition_of_the_predicted_covariance(geometry, noise):
    memory = create("bayesian", geometry("delta"), noise=noise, retention=0.9, noise_groups=2)
    memory.dose.fill_(1.0)
    state = torch.zeros(memory.state_shape(1))
    state[..., 3:11] = torch.eye(8)
    state[0, 0, 2, 5] = 0.1  # one direction of head 0's first group
    log_decay = torch.full((1, 4), -0.05)
    for g, c in ((None, 0.9), (log_decay, 0.9 * math.exp(-0.1))):
        n = 1 - c if noise == "restoring" else 1.0
        expected = torch.ones(4)
        expected[0] = (1 + (c + n) / (0.1 * c + n)) / 2
        torch.testing.assert_close(memory.diagnostics(state, g)["covariance_condition"], expected)
    memory.dose.fill_(0.0)
    torch.testing.assert_close(memory.diagnostics(state)["covariance_condition"], torch.ones(4))


def test_the_host_has_no_diagnostics(geometry):
    memory = create("host", geometry("delta"))
    assert memory.diagnostics(torch.zeros(memory.state_shape(1))) == {}


@pytest.mark.parametrize("noise_from", ("head", "token"))
@pytest.mark.parametrize("noise", ("restoring", "constant"))
@pytest.mark.parametrize("style", ("additive", "delta"))
@pytest.mark.parametrize("dose", (0.0, 0.8))
def test_bayesian_gain_is_what_a_write_takes_off_the_error_at_its_own_key(
    geometry, inputs, moved, style, noise, noise_from, dose
):
    """A write of zero values turns the read at its key into 1 - gain of what the decayed memory gives there."""
    memory = moved(create("bayesian", geometry(style), noise=noise, noise_from=noise_from, noise_groups=2), dose)
    memory = memory.double()
    given = inputs(memory.geometry, 40)
    _, state = memory(given.span(slice(0, 39)))
    last = given.span(slice(39, None))
    last = replace(last, q=last.k, v=torch.zeros_like(last.v))
    found = memory.write_diagnostics(last, state)
    decayed = state[..., :3] * last.log_decay[:, 0].exp().repeat_interleave(2, 1)[..., None, None]
    key = last.k[:, 0].repeat_interleave(4, 1)
    before = (decayed * key[..., None]).sum(-2)
    after = memory(last, state)[0][:, 0].unflatten(-1, (2, 3)).flatten(1, 2)
    gain = 1 - (after / before).mean(-1).unflatten(1, (-1, 2)).mean((0, 2))
    torch.testing.assert_close(found["gain"].double(), gain, rtol=1e-5, atol=1e-6)
    host = (last.write[:, 0] * key[:, ::2].square().sum(-1)).mean(0) if style == "delta" else torch.zeros(4)
    torch.testing.assert_close(found["host_gain"], host.float())
    if dose == 0:
        torch.testing.assert_close(found["gain"], found["host_gain"])
