"""The variance of a read: that of the state after each write, by both rules and from a whole model."""

from __future__ import annotations

import pytest
import torch

from surgery.graft import read_variances
from surgery.memory import create
from surgery.pretraining.bases import create as base

CASES = {
    "palimpsa": ("palimpsa", "additive", {"learn_prior": True}, {}),
    "palimpsa-delta": ("palimpsa", "delta", {}, {}),
    "palimpsa-channels": ("palimpsa", "delta", {}, {"channel_decay": True, "num_key_heads": 4}),
    "bayesian": ("bayesian", "delta", {"noise_groups": 2}, {}),
    "bayesian-above-1": ("bayesian", "delta", {}, {"negative_eigenvalues": True}),
    "bayesian-additive": ("bayesian", "additive", {"noise": "constant", "noise_from": "token"}, {}),
    "bayesian-rotations": ("bayesian", "delta", {"rotations": True, "noise": "constant"}, {}),
    "bayesian-channels": ("bayesian", "delta", {}, {"channel_decay": True, "num_key_heads": 4}),
}


def from_state(memory, query, state):
    """[B, H, V] for queries [B, H, K], straight from a packed state."""
    geometry = memory.geometry
    if memory.rule == "palimpsa":
        importance = (memory.dose * memory.Ip_log).exp()[:, None, None] + state[:, 1]
        return (query[:, :, None].square() / importance).sum(-1)
    width = geometry.value_dim // memory.noise_groups
    covariance = state[..., width : width + geometry.key_dim]
    query = query.repeat_interleave(memory.noise_groups, dim=1)
    variance = torch.einsum("blk,blkj,blj->bl", query, covariance, query)
    return variance.repeat_interleave(width, dim=1).unflatten(1, (geometry.num_heads, -1))


@pytest.mark.parametrize("form", ("reference", "chunked"))
@pytest.mark.parametrize("dose", (0.0, 0.7))
@pytest.mark.parametrize("case", CASES)
def test_it_is_of_the_state_after_the_tokens_write(case, dose, form, geometry, inputs, moved, monkeypatch):
    monkeypatch.setenv("SURGERY_KERNELS", form)
    rule, style, options, changes = CASES[case]
    memory = moved(create(rule, geometry(style, **changes), **options), dose).double()
    given = inputs(memory.geometry, 40, packed=True)
    if memory.geometry.channel_decay:
        given.__dict__["log_decay"] = -0.2 * torch.rand(2, 40, 4, 8, dtype=torch.float64)
    _, start = memory(given.span(slice(0, 4)))
    rest = given.span(slice(4, None))
    variance = memory.read_variance(rest, start)
    assert variance.shape == rest.v.shape
    state, heads = start, memory.geometry.num_heads
    for t in range(36):
        one = rest.span(slice(t, t + 1))
        _, state = memory(one, state)
        query = one.q[:, 0].repeat_interleave(heads // one.q.shape[2], dim=1)
        torch.testing.assert_close(variance[:, t], from_state(memory, query, state), rtol=1e-6, atol=1e-8)


def test_what_is_read_often_is_sure_and_what_was_never_written_is_not(geometry, inputs):
    memory = create("bayesian", geometry("delta"), noise="constant").double()
    memory.dose.fill_(1.0)
    given = inputs(memory.geometry, 20)
    given.k[:] = torch.eye(8)[0]
    given.log_decay.zero_()
    given.q[:, -1], given.q[:, -2] = torch.eye(8)[0].double(), torch.eye(8)[1].double()
    variance = memory.read_variance(given)
    assert variance[:, -1].max() < 1 / 10 * variance[:, -2].min()


def test_the_hosts_rule_has_none(geometry, inputs):
    memory = create("host", geometry("delta"))
    with pytest.raises(NotImplementedError, match="host rule"):
        memory.read_variance(inputs(memory.geometry))


@pytest.fixture
def model():
    """Three layers of a tiny Gated DeltaNet, the second and third swapped."""
    from surgery.pretraining.bases import GATED_DELTANET

    config = {**GATED_DELTANET, "vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 3, "head_dim": 8}
    network = base({**config, "num_heads": 2, "num_v_heads": 2, "intermediate_size": 16}).eval()
    for layer, rule in ((1, "bayesian"), (2, "palimpsa")):
        mixer = network.model.layers[layer].attn
        mixer.memory = create(rule, mixer.geometry)
        mixer.memory.dose.fill_(1.0)
    return network


def test_a_model_is_asked_for_it(model):
    ids = torch.randint(40, (2, 12))
    with torch.no_grad():
        expected = model(ids).logits
        with read_variances(model) as variances:
            assert variances == {}
            assert model(ids).logits.equal(expected)
            first = dict(variances)
            assert {layer: tuple(x.shape) for layer, x in first.items()} == {1: (2, 12, 2, 8), 2: (2, 12, 2, 8)}
            assert all((x > 0).all() for x in first.values())
            # a text read in parts, and decoded: the same, from the cache's states
            cache = model(ids[:, :7], use_cache=True).cache
            parts = [dict(variances)]
            for t in range(7, 12):
                model(ids[:, t : t + 1], cache=cache)
                parts.append(dict(variances))
        for layer in (1, 2):
            torch.testing.assert_close(torch.cat([x[layer] for x in parts], 1), first[layer], rtol=1e-4, atol=1e-5)
        assert not any(module._forward_hooks for module in model.modules())


def test_a_loss_of_it_reaches_the_weights(model):
    with read_variances(model) as variances:
        model(torch.randint(40, (2, 12)))
    sum(x.sum() for x in variances.values()).backward()
    for layer in (1, 2):
        assert model.model.layers[layer].attn.k_proj.weight.grad.any()
