"""What torch.compile is told of each operator, shapes, dtypes and strides, is what the operator returns."""

from __future__ import annotations

import contextlib

import pytest
import torch

from surgery.kernels import chunks, convolution, gated_norm
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


class Elsewhere(torch.Tensor):
    """A tensor that says it is on the second GPU."""

    device = torch.device("cuda", 1)


def test_operators_run_on_their_tensors_gpu(monkeypatch):
    """Triton starts a kernel on the current GPU, whichever one its tensors are on."""
    current = [0]

    @contextlib.contextmanager
    def within(device):
        current.append(device.index)
        yield
        current.pop()

    monkeypatch.setattr(torch.cuda, "current_device", lambda: current[-1])
    monkeypatch.setattr(torch.cuda, "device", within)
    seen = []
    run = chunks.on_its_device(lambda *_: seen.append(torch.cuda.current_device()))
    run(None, torch.zeros(1).as_subclass(Elsewhere), torch.zeros(1))
    run(torch.zeros(1))
    assert seen == [1, 0] and current == [0]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_on_a_gpu(dtype):
    everything("cuda", dtype)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there is one GPU")
def test_on_a_gpu_that_is_not_the_current_one():
    everything("cuda:1", torch.bfloat16)
    rules("cuda:1")
    assert torch.cuda.current_device() == 0


def rules(device: str) -> None:
    """The rules whose operators are Triton's alone: a pass each way, and a step."""
    from surgery.kernels.bayesian.triton import bayesian
    from surgery.kernels.palimpsa.triton import palimpsa

    q, k = (torch.randn(B, 70, G, K, device=device) / K**0.5 for _ in range(2))
    v = torch.randn(B, 70, H, V, device=device)
    gate, prior = torch.rand(B, 70, H, device=device), torch.ones(H, device=device)
    memory, covariance = torch.zeros(B, 2, H, V, K, device=device), torch.eye(K, device=device).expand(B, H, K, K)
    state = torch.cat((memory[:, 0].mT, covariance), -1)

    def mixed(q, k, v, gate):
        yield palimpsa(q, k, v, v.sigmoid(), -gate, prior, state=memory)[0]
        gates = *[gate] * 3, prior, *[gate] * 4
        yield bayesian(q, k, v, *gates, state=state, initial_covariance=prior, unit_gain=False)[0]

    inputs = [x.requires_grad_() for x in (q, k, v, gate)]
    found = list(mixed(*inputs))
    found += torch.autograd.grad(sum(x.sum() for x in found), inputs)
    with torch.no_grad():
        found += mixed(*(x[:, :1] for x in inputs))
    assert all(x.device == q.device and x.isfinite().all() for x in found)


def everything(device: str, dtype: torch.dtype) -> None:
    scans(inputs(device, dtype))
    x, dy, gate, values = (wide(B, 77, 200, device=device, dtype=dtype) for _ in range(4))
    weight, bias = torch.randn(200, 4, device=device), torch.randn(200, device=device)
    reset = torch.rand(B, 77, device=device) < 0.1
    for options in ((bias, reset), (None, None)):
        agree(convolution._forward, x, weight, *options)
        agree(convolution._backward, dy, x, weight, *options)
        heads = 2, 32, 0.5, 1e-6
        agree(convolution._forward_heads, x, weight, *options, *heads)
        agree(convolution._backward_heads, *dy.split([64, 64, 72], dim=-1), x, weight, *options, *heads)
    for skip in ((values, bias), (None, None)):
        arguments = x, gate, bias, *skip, 2, 1e-5, False, True
        agree(gated_norm._forward, *arguments)
        agree(gated_norm._backward, dy, *arguments)
    x = inputs(device, torch.bfloat16)
    q, k, v, do = (x[name] for name in ("q", "k", "v", "do"))
    agree(additive.output, q, k, v, x["write"], x["met"], x["total"])
    agree(additive.gradients, q, k, v, x["write"], do, x["met"], x["met"], x["total"])
    state, met = x["state"].mT.contiguous(), x["met"].mT.contiguous()
    gates = x["by_head"], x["total"].transpose(2, 3), x["by_head"], x["by_head"], x["whole"]
    agree(delta._forward, q, k, v, *gates, state)
    agree(delta._backward, do, state, q, k, v, *gates, x["square"], x["square"], met, x["chunk"])
