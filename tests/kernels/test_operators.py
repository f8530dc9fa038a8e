"""What torch.compile is told of each operator, shapes, dtypes and strides, is what the operator returns."""

from __future__ import annotations

import pytest
import torch

from surgery.kernels import convolution, gated_norm
from surgery.kernels.additive import inside as additive
from surgery.kernels.additive.states import additive_states
from surgery.kernels.delta import inside as delta
from surgery.kernels.delta import states as delta_states

B, N, C, G, H, K, V = 2, 3, 16, 2, 4, 24, 40


def wide(*shape: int, device: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Slices of wider rows, as projections are."""
    return torch.randn(*shape[:-1], shape[-1] + 8, device=device).to(dtype)[..., 4:-4]


def inputs(device: str, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    rows = wide(B, N, C, 2 * G * K + H * V, device=device, dtype=dtype)
    q, k, v = rows.split([G * K, G * K, H * V], dim=-1)
    state = torch.randn(B, H, V, K, device=device)
    met = torch.randn(B, N, H, V, K, device=device).to(dtype)
    steps = -torch.rand(B, N, C, H, device=device).double()
    return {
        "q": q.unflatten(-1, (G, K)), "k": k.unflatten(-1, (G, K)), "v": v.unflatten(-1, (H, V)),
        "write": torch.rand(B, N, C, H, device=device), "total": steps.cumsum(2), "state": state, "met": met,
        "whole": torch.rand(B, N, H, device=device), "do": torch.randn(B, N, C, H, V, device=device).to(dtype),
        "by_head": torch.rand(B, N, H, C, device=device), "square": torch.rand(B, N, H, C, C, device=device).to(dtype),
        "chunk": torch.randn(B, N, H, C, V, device=device).to(dtype),
    }


def agree(operator, *arguments) -> None:
    torch.library.opcheck(operator, arguments, test_utils=("test_schema", "test_faketensor"))


def scans(x) -> None:
    arguments = x["k"], x["v"], x["write"], x["whole"], x["state"]
    for reverse in (False, True):
        agree(additive_states, *arguments, reverse)
    gates = x["by_head"], x["by_head"], x["whole"]
    state, met = x["state"].mT.contiguous(), x["met"].mT.contiguous()
    agree(delta_states._forward, x["square"], x["by_head"], x["v"], x["k"], *gates, state)
    agree(delta_states._adjoint, x["square"], x["by_head"], x["chunk"], x["k"], *gates, met, state)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_scans(dtype):
    x = inputs("cpu", dtype)
    scans({name: y.double() if dtype == torch.float64 else y for name, y in x.items()})


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_on_a_gpu(dtype):
    scans(inputs("cuda", dtype))
    x, dy, gate, values = (wide(B, 77, 200, device="cuda", dtype=dtype) for _ in range(4))
    weight, bias = torch.randn(200, 4, device="cuda"), torch.randn(200, device="cuda")
    reset = torch.rand(B, 77, device="cuda") < 0.1
    for options in ((bias, reset), (None, None)):
        agree(convolution._forward, x, weight, *options)
        agree(convolution._backward, dy, x, weight, *options)
    for skip in ((values, bias), (None, None)):
        arguments = x, gate, bias, *skip, 2, 1e-5, False, True
        agree(gated_norm._forward, *arguments)
        agree(gated_norm._backward, dy, *arguments)
    x = inputs("cuda", torch.bfloat16)
    q, k, v, do = (x[name] for name in ("q", "k", "v", "do"))
    agree(additive.output, q, k, v, x["write"], x["met"], x["total"])
    agree(additive.gradients, q, k, v, x["write"], do, x["met"], x["met"], x["total"])
    state, met = x["state"].mT.contiguous(), x["met"].mT.contiguous()
    gates = x["by_head"], x["total"].transpose(2, 3), x["by_head"], x["by_head"], x["whole"]
    agree(delta._forward, q, k, v, *gates, state)
    agree(delta._backward, do, state, q, k, v, *gates, x["square"], met, x["chunk"])
