"""The fused causal convolution against the grafts' own, which is torch alone: in Triton's interpreter, or on a GPU."""

from __future__ import annotations

import os

import pytest
import torch

from surgery.graft.base import causal_conv

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
device_test = (lambda test: test) if INTERPRETED else pytest.mark.gpu


@device_test
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("tokens", "width", "packed"), [(1, 4, False), (3, 4, True), (70, 4, True), (45, 2, False)])
def test_forward_and_backward(tokens, width, packed, biased):
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
    y = forward(*arguments)
    dx, dweight, dbias = backward(dy.float().to(DEVICE), *arguments)
    found = [y, dx, dweight[:, None], *([dbias] if biased else [])]
    for one, other in zip(found, (expected, *wanted), strict=True):
        torch.testing.assert_close(one.double().cpu(), other.detach(), rtol=1e-5, atol=1e-5)


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
