"""The fused causal convolution against the grafts' own, which is torch alone: in Triton's interpreter, or on a GPU."""

from __future__ import annotations

import os

import pytest
import torch

from surgery.graft.base import causal_conv
from surgery.graft.gated_delta import l2_normalised

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
device_test = (lambda test: test) if INTERPRETED else pytest.mark.gpu


@device_test
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("tokens", "width", "packed"), [(1, 4, False), (3, 4, True), (70, 4, True), (45, 2, False)])
def test_forward_and_backward(relative, tokens, width, packed, biased):
    from surgery.kernels.triton_convolution import backward, forward

    batch, channels = 2, 150
    # a slice of a wider projection, as the mixers have it
    x = torch.randn(batch, tokens, channels + 7)[..., 3:-4].double().requires_grad_()
    weight = torch.randn(channels, 1, width, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(channels, dtype=torch.float64, requires_grad=True) if biased else None
    reset = torch.rand(batch, tokens) < 0.2 if packed else None
    past = torch.zeros(batch, width - 1, channels)
    expected = causal_conv(x, past, weight, bias, reset)
    dy = torch.randn_like(expected)
    leaves = [x, weight, *([bias] if biased else [])]
    wanted = torch.autograd.grad(expected, leaves, dy)

    wide = torch.zeros(batch, tokens, channels + 7, device=DEVICE)
    x = wide[..., 3:-4].copy_(x.detach())
    arguments = (
        x, weight.detach()[:, 0].float().to(DEVICE), bias.detach().float().to(DEVICE) if biased else None,
        None if reset is None else reset.to(DEVICE),
    )
    (y,) = forward(*arguments)
    dx, rows = backward((dy.float().to(DEVICE),), *arguments)
    found = [y, dx, rows[:-1].T[:, None], *([rows[-1]] if biased else [])]
    for one, other in zip(found, (expected, *wanted), strict=True):
        assert relative(one, other) < 1e-5


@device_test
@pytest.mark.parametrize(
    ("groups", "key_dim", "values"), [(1, 256, 300), pytest.param(3, 32, 40, marks=pytest.mark.slow), (4, 64, 256)]
)
def test_normalised_heads(relative, groups, key_dim, values):
    """Queries, keys and values apart, heads of one and of several in a block of channels."""
    from surgery.kernels.triton_convolution import Heads, backward, forward

    batch, tokens, keys = 2, 70, groups * key_dim
    heads = Heads(groups, key_dim, key_dim**-0.5, 1e-6)
    x = torch.randn(batch, tokens, 2 * keys + values + 5)[..., 2:-3].double().requires_grad_()
    weight = torch.randn(2 * keys + values, 1, 4, dtype=torch.float64, requires_grad=True)
    reset = torch.rand(batch, tokens) < 0.1
    convolved = causal_conv(x, torch.zeros(batch, 3, x.shape[-1]), weight, None, reset)
    q, k, v = convolved.split([keys, keys, values], dim=-1)
    q, k = (l2_normalised(part.unflatten(-1, (groups, key_dim)), heads.eps).flatten(-2) for part in (q, k))
    expected = q * heads.scale, k, v
    weights = [torch.randn_like(part) for part in expected]
    wanted = torch.autograd.grad(expected, [x, weight], weights)

    found = x.detach().float().to(DEVICE), weight.detach()[:, 0].float().to(DEVICE), None, reset.to(DEVICE)
    outs = forward(*found, heads)
    dx, rows = backward(tuple(w.float().to(DEVICE) for w in weights), *found, heads)
    for one, other in zip((*outs, dx, rows[:-1].T[:, None]), (*expected, *wanted), strict=True):
        assert relative(one, other) < 1e-5


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_as_the_mixers_call_it(monkeypatch, dtype):
    """With no past and with zeros for one, which takes the other path; whole and compiled."""
    monkeypatch.setenv("SURGERY_KERNELS", "triton")
    x = torch.randn(2, 333, 200, device="cuda", dtype=dtype, requires_grad=True)
    weight = torch.randn(200, 1, 4, device="cuda", requires_grad=True)
    bias = torch.randn(200, device="cuda", requires_grad=True)
    reset = torch.rand(2, 333, device="cuda") < 0.02
    past = torch.zeros(2, 3, 200, device="cuda", dtype=dtype)
    dy = torch.randn_like(x)
    expected = causal_conv(x, past, weight, bias, reset)
    wanted = torch.autograd.grad(expected, [x, weight, bias], dy)
    for form in (causal_conv, torch.compile(causal_conv, fullgraph=True)):
        found = form(x, None, weight, bias, reset)
        gradients = torch.autograd.grad(found, [x, weight, bias], dy)
        for one, other in zip((found, *gradients), (expected, *wanted), strict=True):
            torch.testing.assert_close(one, other, rtol=2e-2 if dtype == torch.bfloat16 else 1e-4, atol=1e-3)
