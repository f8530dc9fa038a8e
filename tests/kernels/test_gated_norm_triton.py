"""The kernels' gated norm against the grafts' own, which is torch alone: in Triton's interpreter, or on a GPU."""

from __future__ import annotations

import os

import pytest
import torch

from surgery.graft.gated_delta import GatedRMSNorm
from surgery.graft.mamba2 import GatedGroupRMSNorm

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
device_test = (lambda test: test) if INTERPRETED else pytest.mark.gpu


def gradients(form, tensors, dout):
    leaves = [x.detach().requires_grad_() for x in tensors]
    out = form(*leaves)
    return out, *torch.autograd.grad(out, leaves, dout)


@device_test
@pytest.mark.parametrize("gate_first", [True, False])
@pytest.mark.parametrize(("tokens", "width", "groups"), [(1, 40, 2), (37, 300, 1), (70, 24, 3)])
def test_with_a_skip(relative, tokens, width, groups, gate_first):
    """As a Mamba-2 mixer has it, the gate and the values slices of wider tensors."""
    from surgery.kernels.triton_gated_norm import backward, forward

    size = width * groups
    norm = GatedGroupRMSNorm(size, groups, 1e-5, gate_first).double()
    y = torch.randn(2, tokens, size).double()
    gate, values = (torch.randn(2, tokens, size + 5)[..., 3:-2].double() for _ in range(2))
    weight, skip, dout = torch.randn(size).double(), torch.randn(size).double(), torch.randn_like(y)

    def own(y, gate, weight, values, skip):
        return torch.func.functional_call(norm, {"weight": weight}, (y, gate, values, skip))

    expected, dy, dgate, dweight, _, dskip = gradients(own, (y, gate, weight, values, skip), dout)
    y, weight, skip, dout = (x.float().to(DEVICE) for x in (y, weight, skip, dout))
    gate, values = (torch.zeros(2, tokens, size + 5, device=DEVICE)[..., 3:-2].copy_(x) for x in (gate, values))
    arguments = (y, gate, weight, values, skip, groups, 1e-5, False, gate_first)
    *found, rows = forward(*arguments), *backward(dout, *arguments)
    found = *found, *rows
    for one, other in zip(found, (expected, dy, dgate, dweight, dskip), strict=True):
        assert relative(one, other) < 1e-5


@device_test
@pytest.mark.parametrize("activation", ["silu", "sigmoid"])
def test_by_heads(relative, activation):
    from surgery.kernels.triton_gated_norm import backward, forward

    heads, width = 3, 20
    norm = GatedRMSNorm(width, 1e-6, activation).double()
    y, gate, dout = (torch.randn(2, 45, heads, width).double() for _ in range(3))
    weight = torch.randn(width).double()

    def own(y, gate, weight):
        return torch.func.functional_call(norm, {"weight": weight}, (y, gate))

    expected = gradients(own, (y, gate, weight), dout)
    y, gate, dout = (x.flatten(2).float().to(DEVICE) for x in (y, gate, dout))
    weight = weight.repeat(heads).float().to(DEVICE)
    arguments = (y, gate, weight, None, None, heads, 1e-6, activation == "sigmoid", False)
    dy, dgate, rows = backward(dout, *arguments)
    found = forward(*arguments), dy, dgate, rows[0].unflatten(0, (heads, width)).sum(0)
    for one, other in zip(found, expected, strict=True):
        assert relative(one.view(other.shape), other) < 1e-5


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_as_the_mixers_call_it(monkeypatch, dtype):
    """Whole and compiled, against torch in float64."""
    norm = GatedGroupRMSNorm(600, 2, 1e-5).cuda()
    tensors = [torch.randn(2, 333, 600, device="cuda", dtype=dtype) for _ in range(3)]
    tensors.append(torch.randn(600, device="cuda"))
    dout = torch.randn(2, 333, 600, device="cuda", dtype=dtype)

    def run(form, *arguments):
        weight = norm.weight
        leaves = [x.detach().requires_grad_() for x in arguments]
        out = form(*leaves)
        return out, *torch.autograd.grad(out, [*leaves, weight], dout.to(out.dtype))

    norm.double()
    expected = run(norm, *(x.double() for x in tensors))
    norm.float()
    monkeypatch.setenv("SURGERY_KERNELS", "triton")
    for form in (norm, torch.compile(norm, fullgraph=True)):
        for one, other in zip(run(form, *tensors), expected, strict=True):
            error = (one.double() - other).norm() / other.norm()
            assert error < (1e-5 if dtype == torch.float32 else 4e-3), error
