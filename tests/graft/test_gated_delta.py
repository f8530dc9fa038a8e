"""The gated-delta graft with the host's rule against the published layer, restated token by token in float64.

In float64 they agree to rounding, which is the sharper test; the float32 graft is held to 1e-5.
"""

from __future__ import annotations

import pytest
import torch
from transformers import DynamicCache

from surgery.models.configuration import GatedDeltaNetConfig

LAYERS = [
    {},
    {"key_heads": 2},
    {"key_heads": 2, "heads": 6, "negative": True},
    {"use_short_conv": False},
    {"use_gate": False},
    {"conv_bias": True, "gate_activation": "sigmoid", "conv_size": 3},
    {"key_heads": 2, "use_short_conv": False, "use_gate": False, "negative": True},
]


def published_layer(
    parameters, hidden, *, key_heads, heads, negative=False, conv_size=4, gate_activation="swish", norm_eps=1e-6, **_
):
    """Gated DeltaNet: projections, convolutions with SiLU, unit keys and queries, gates, the delta rule, gated norm."""
    batch, tokens, _ = hidden.shape
    key_dim = parameters["q_proj.weight"].shape[0] // key_heads
    value_dim = parameters["v_proj.weight"].shape[0] // heads

    def project(name):
        return hidden @ parameters[f"{name}_proj.weight"].T

    def convolve(name):
        x = project(name)
        if f"{name}_conv1d.weight" in parameters:
            taps = parameters[f"{name}_conv1d.weight"][:, 0]
            rows = []
            for t in range(tokens):
                row = parameters.get(f"{name}_conv1d.bias", torch.zeros((), dtype=x.dtype))
                for back in range(min(conv_size, t + 1)):
                    row = row + taps[:, conv_size - 1 - back] * x[:, t - back]
                rows.append(row)
            x = torch.stack(rows, dim=1)
        return x * torch.sigmoid(x)

    q = convolve("q").reshape(batch, tokens, key_heads, key_dim)
    k = convolve("k").reshape(batch, tokens, key_heads, key_dim)
    v = convolve("v").reshape(batch, tokens, heads, value_dim)
    q = q / (q.square().sum(-1, keepdim=True) + 1e-6).sqrt()
    k = k / (k.square().sum(-1, keepdim=True) + 1e-6).sqrt()
    step = torch.nn.functional.softplus(project("a") + parameters["dt_bias"])
    alpha = torch.exp(-torch.exp(parameters["A_log"]) * step)
    eta = torch.sigmoid(project("b")) * (2 if negative else 1)
    every = []
    for head in range(heads):
        shared = head // (heads // key_heads)
        memory = torch.zeros(batch, key_dim, value_dim, dtype=hidden.dtype)
        outputs = []
        for t in range(tokens):
            key, query = k[:, t, shared], q[:, t, shared]
            memory = alpha[:, t, head, None, None] * memory
            error = v[:, t, head] - torch.einsum("bk,bkv->bv", key, memory)
            memory = memory + eta[:, t, head, None, None] * torch.einsum("bk,bv->bkv", key, error)
            outputs.append(torch.einsum("bk,bkv->bv", query, memory) / key_dim**0.5)
        every.append(torch.stack(outputs, dim=1))
    o = torch.stack(every, dim=2)
    o = o / (o.square().mean(-1, keepdim=True) + norm_eps).sqrt() * parameters["o_norm.weight"]
    if "g_proj.weight" in parameters:
        gate = project("g").reshape(o.shape)
        o = o * torch.sigmoid(gate) * (1 if gate_activation == "sigmoid" else gate)
    return o.flatten(-2) @ parameters["o_proj.weight"].T


@pytest.fixture
def layer(delta_graft):
    """Factory: (graft, its float64 parameters as leaves, the published layer's options)."""

    def make(options, dtype=torch.float64):
        graft = delta_graft(**options).to(dtype)
        parameters = {name: value.detach().double().requires_grad_() for name, value in graft.named_parameters()}
        return graft, parameters, {"key_heads": 4, "heads": 4, **options}

    return make


@pytest.fixture
def cache():
    def make():
        config = GatedDeltaNetConfig(hidden_size=32, num_hidden_layers=1, num_heads=4, head_dim=24)
        return DynamicCache(config=config)

    return make


@pytest.mark.parametrize("options", LAYERS)
@pytest.mark.parametrize(
    ("batch", "tokens", "dtype", "tolerance"),
    [(1, 70, torch.float64, 1e-11), (2, 9, torch.float64, 1e-11), (2, 40, torch.float32, 1e-5)],
)
def test_equals_the_published_layer(layer, close, options, batch, tokens, dtype, tolerance):
    if dtype == torch.float32:  # a head that reads nearly nothing is all rounding once the norm has scaled it up
        options = {**options, "norm_eps": 1e-2}
    graft, parameters, options = layer(options, dtype)
    hidden = torch.randn(batch, tokens, 32, dtype=dtype)
    weight = torch.randn_like(hidden)
    mine = hidden.clone().requires_grad_()
    out = graft(mine)
    (out * weight).sum().backward()
    theirs = hidden.double().requires_grad_()
    expected = published_layer(parameters, theirs, **options)
    (expected * weight).sum().backward()
    assert out.dtype == dtype
    close(out, expected, tolerance)
    close(mine.grad, theirs.grad, tolerance)
    for name, parameter in graft.named_parameters():
        close(parameter.grad, parameters[name].grad, tolerance)


@pytest.mark.parametrize("options", LAYERS)
def test_padding_and_tokens(layer, close, cache, options):
    graft, parameters, options = layer(options)
    hidden = torch.randn(2, 24, 32, dtype=torch.float64)
    mask = torch.ones(2, 24, dtype=torch.long)
    mask[0, :6] = 0
    with torch.no_grad():
        expected = torch.zeros(2, 24, 32, dtype=torch.float64)
        expected[0, 6:] = published_layer(parameters, hidden[:1, 6:], **options)
        expected[1] = published_layer(parameters, hidden[1:], **options)
        close(graft(hidden, attention_mask=mask), expected, 1e-11)
        store = cache()
        parts = [graft(hidden[:, :10], store, mask[:, :10])]
        parts += [graft(hidden[:, t : t + 1], store, mask[:, : t + 1]) for t in range(10, 17)]
        parts += [graft(hidden[:, 17:], store, mask)]
        close(torch.cat(parts, dim=1), expected, 1e-11)


@pytest.mark.parametrize("options", LAYERS)
def test_packed_equals_each_document(layer, close, options):
    graft, parameters, options = layer(options)
    lengths = (5, 1, 2, 13, 11)
    hidden = torch.randn(1, sum(lengths), 32, dtype=torch.float64)
    reset = torch.zeros(1, sum(lengths), dtype=torch.bool)
    reset[0, torch.tensor([0, *lengths[:-1]]).cumsum(0)] = True
    weight = torch.randn_like(hidden)
    mine = hidden.clone().requires_grad_()
    out = graft(mine, reset=reset)
    (out * weight).sum().backward()
    theirs = hidden.clone().requires_grad_()
    documents = [published_layer(parameters, document, **options) for document in theirs.split(lengths, dim=1)]
    expected = torch.cat(documents, dim=1)
    (expected * weight).sum().backward()
    close(out, expected, 1e-11)
    close(mine.grad, theirs.grad, 1e-11)
    for name, parameter in graft.named_parameters():
        close(parameter.grad, parameters[name].grad, 1e-11)


def test_casts_keep_the_decay_in_float32(delta_graft):
    graft = delta_graft().bfloat16()
    assert graft.A_log.dtype == graft.dt_bias.dtype == graft.memory.dose.dtype == torch.float32
    assert graft.q_proj.weight.dtype == torch.bfloat16
    assert graft(torch.randn(1, 9, 32, dtype=torch.bfloat16)).dtype == torch.bfloat16


def test_refuses_what_it_cannot_be(delta_graft, mamba2_pair):
    with pytest.raises(ValueError, match="output_gate_activation"):
        delta_graft(gate_activation="gelu")
    memory = mamba2_pair()[1].memory
    with pytest.raises(ValueError, match="needs a delta memory geometry"):
        type(delta_graft())(memory)


def test_equals_fla_naive_form(layer, close):
    """The library's own torch form of the rule inside the layer, with gradients."""
    naive = pytest.importorskip("fla.ops.gated_delta_rule.naive")
    graft, _, _ = layer({"key_heads": 2, "negative": True}, torch.float32)
    hidden = torch.randn(2, 33, 32)
    weight = torch.randn(2, 33, 4, 16)
    results = []
    for form in ("graft", "fla"):
        graft.zero_grad()
        inputs = graft.inputs(hidden)
        if form == "graft":
            o, _ = graft.memory(inputs)
        else:
            q, k = (x.repeat_interleave(2, dim=2) for x in (inputs.q, inputs.k))
            o, _ = naive.naive_recurrent_gated_delta_rule(
                q, k, inputs.v, inputs.write, inputs.log_decay, scale=1.0
            )
        (o * weight).sum().backward()
        grads = {name: value.grad.clone() for name, value in graft.named_parameters() if value.grad is not None}
        results.append((o, grads))
    (o, grads), (expected, expected_grads) = results
    close(o, expected)
    assert grads.keys() == expected_grads.keys() and "A_log" in grads
    for name, grad in grads.items():
        close(grad, expected_grads[name])
