"""The additive and the delta rule where they use half precision and Triton: their scans over chunks in its interpreter,
and on a GPU (``pytest -m gpu``) the rules as they run there."""

from __future__ import annotations

import functools
import importlib
import os

import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize

from surgery.kernels.additive import reference as additive_reference
from surgery.kernels.additive.chunked import additive, additive_in
from surgery.kernels.additive.states import additive_states
from surgery.kernels.delta import reference as delta_reference
from surgery.kernels.delta import states as delta_states
from surgery.kernels.delta.chunked import delta, delta_in

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
device_test = (lambda test: test) if INTERPRETED else pytest.mark.gpu
HALF = {"additive": 4e-3, "delta": 5e-3}  # relative Frobenius errors with bfloat16 inputs
RULES = {
    "additive": (additive, additive_in, additive_reference.additive),
    "delta": (delta, delta_in, delta_reference.delta),
}


def relative(found: Tensor, expected: Tensor) -> float:
    return ((found.double() - expected.double()).norm() / expected.double().norm()).item()


@pytest.fixture
def poisoned(monkeypatch):
    """Memory that a kernel leaves unwritten is NaN."""

    def fill(make):
        @functools.wraps(make)
        def made(*args, **kwargs):
            return make(*args, **kwargs).fill_(float("nan"))

        return made

    monkeypatch.setattr(torch, "empty", fill(torch.empty))
    monkeypatch.setattr(torch, "empty_like", fill(torch.empty_like))


def random(*shape: int) -> Tensor:
    return torch.randn(shape).to(DEVICE)


def compare(found, expected) -> None:
    for one, other in zip(found, expected, strict=True):
        assert one.shape == other.shape and one.dtype == other.dtype
        assert relative(one, other) < 1e-5


# batch, chunks, tokens a chunk, value heads, key heads, key width, value width
SHAPES = pytest.mark.parametrize("shape", [(2, 3, 16, 4, 2, 24, 40), (1, 2, 32, 2, 1, 16, 8)])


@device_test
@SHAPES
@pytest.mark.parametrize("reverse", [False, True])
def test_additive_scan(poisoned, monkeypatch, shape, reverse):
    from surgery.kernels.additive.triton_states import states

    batch, chunks, length, heads, groups, key_dim, value_dim = shape
    arguments = (
        random(batch, chunks, length, groups, key_dim), random(batch, chunks, length, heads, value_dim),
        random(batch, chunks, length, heads).sigmoid(), random(batch, chunks, heads).sigmoid(),
        random(batch, heads, value_dim, key_dim), reverse,
    )
    monkeypatch.setenv("SURGERY_KERNELS", "chunked")
    compare(states(*arguments), additive_states(*arguments))


@device_test
@SHAPES
@pytest.mark.parametrize("programs", [1, 512])
def test_additive_inside_chunks(poisoned, monkeypatch, shape, programs):
    """Blocks of all heads of a group and of one head each; hard forgetting and resets among the decays."""
    from surgery.kernels.additive import triton_chunks
    from surgery.kernels.additive.inside import gradients_in_torch, output_in_torch

    batch, chunks, length, heads, groups, key_dim, value_dim = shape
    monkeypatch.setattr(triton_chunks, "PROGRAMS", programs)
    monkeypatch.setenv("SURGERY_KERNELS", "chunked")
    q, k = (random(batch, chunks, length, groups, key_dim) for _ in range(2))
    v, do = (random(batch, chunks, length, heads, value_dim) for _ in range(2))
    met, left = (random(batch, chunks, heads, value_dim, key_dim) for _ in range(2))
    steps = -random(batch, chunks, length, heads).double().exp()
    total = steps.masked_fill(random(batch, chunks, length, 1) > 2, -800.0).cumsum(2)
    write = random(batch, chunks, length, heads).exp()
    arguments = (q, k, v, write, met, total)
    compare([triton_chunks.output(*arguments)], [output_in_torch(*arguments)])
    arguments = (q, k, v, write, do, met, left, total)
    # torch adds its sums up in float64
    compare(triton_chunks.gradients(*arguments), [x.float() for x in gradients_in_torch(*arguments)])


@device_test
@SHAPES
def test_delta_scan_and_its_adjoint(poisoned, monkeypatch, shape):
    from surgery.kernels.delta.triton_states import adjoint, scan

    batch, chunks, length, heads, groups, key_dim, value_dim = shape
    solve = random(batch, chunks, heads, length, length).tril() / length
    beta = random(batch, chunks, heads, length).sigmoid()
    k = normalize(random(batch, chunks, length, groups, key_dim), dim=-1)
    gates = (
        random(batch, chunks, heads, length).sigmoid(), random(batch, chunks, heads, length).sigmoid(),
        random(batch, chunks, heads).sigmoid(),
    )
    start = random(batch, heads, key_dim, value_dim)
    monkeypatch.setenv("SURGERY_KERNELS", "chunked")
    v = random(batch, chunks, length, heads, value_dim)
    compare(scan(solve, beta, v, k, *gates, start), delta_states._forward(solve, beta, v, k, *gates, start))
    of_corrections = random(batch, chunks, heads, length, value_dim)
    of_states = random(batch, chunks, heads, key_dim, value_dim)
    arguments = (solve, beta, of_corrections, k, *gates, of_states, start)
    compare(adjoint(*arguments), delta_states._adjoint(*arguments))


@device_test
@pytest.mark.parametrize("rule", RULES)
def test_more_heads_than_a_launch_takes(monkeypatch, rule):
    """The scans go by torch then."""
    states = importlib.import_module(f"surgery.kernels.{rule}.states")
    kernels = importlib.import_module(f"surgery.kernels.{rule}.triton_states")
    launched = []
    for name in {"additive": ["states"], "delta": ["scan", "adjoint"]}[rule]:
        run = getattr(kernels, name)
        monkeypatch.setattr(kernels, name, lambda *args, run=run: launched.append(True) or run(*args))
    monkeypatch.setattr(states, "fused", lambda k, by_default: True)
    arguments, reset = problem(rule, 40, 16, 24, DEVICE, torch.float32)
    weights = [torch.randn_like(arguments["v"]), torch.randn_like(arguments["state"])]
    found = gradients(RULES[rule][0], arguments, reset, weights)
    assert len(launched) == 2
    monkeypatch.setattr(states, "MAX_HEADS", 7)  # of 2 times 4
    expected = gradients(RULES[rule][0], arguments, reset, weights)
    assert len(launched) == 2
    compare(found, expected)


@pytest.mark.skipif(not INTERPRETED, reason="a GPU's products of float32 numbers would be TF32's")
@pytest.mark.parametrize("shape", [(2, 3, 16, 4, 2, 24, 40), (1, 2, 32, 2, 2, 80, 72), (1, 2, 64, 1, 1, 160, 96)])
def test_delta_inside_chunks(poisoned, shape):
    """All of the fused form, against the sequential rule in float64; a reset and hard forgetting among the decays."""
    from surgery.kernels.delta.inside import gate_gradients
    from surgery.kernels.delta.triton_chunks import backward, forward

    batch, chunks, length, heads, groups, key_dim, value_dim = shape
    tokens = chunks * length
    arguments = {
        "q": torch.randn(batch, tokens, groups, key_dim), "k": torch.randn(batch, tokens, groups, key_dim),
        "v": torch.randn(batch, tokens, heads, value_dim), "log_decay": -torch.randn(batch, tokens, heads).exp(),
        "beta": torch.rand(batch, tokens, heads), "state": torch.randn(batch, heads, key_dim, value_dim),
    }
    arguments["k"] = normalize(arguments["k"], dim=-1)
    reset = torch.zeros(batch, tokens, dtype=torch.bool)
    reset[0, tokens // 3] = True
    weights = torch.randn(arguments["v"].shape), torch.randn(arguments["state"].shape)
    exact = {name: x.double() for name, x in arguments.items()}
    o, after, *expected = gradients(delta_reference.delta, exact, reset, weights)

    def chunked(x):
        return x.unflatten(1, (chunks, length))

    steps = arguments["log_decay"].double().masked_fill(reset[..., None], -800.0)
    total = chunked(steps).transpose(2, 3).cumsum(3)
    last = total[..., -1:]
    gates = chunked(arguments["beta"]).transpose(2, 3), total, total.float().exp(), (last - total).float().exp()
    inputs = *(chunked(arguments[name]) for name in ("q", "k", "v")), *gates, last[..., 0].float().exp()
    out, final, *kept = forward(*inputs, arguments["state"])
    dq, dk, dv, *sums, dstate = backward(chunked(weights[0]), weights[1], *inputs, *kept)
    dbeta, dsteps = gate_gradients(*sums, inputs[-1])
    dsteps = dsteps.masked_fill(chunked(reset)[..., None], 0.0)
    found = out, final, dq, dk, dv, dsteps, dbeta, dstate
    expected = o, after, *expected
    names = ("o", "after", *arguments)
    for name, one, other in zip(names, found, expected, strict=True):
        one = one if one.shape == other.shape else one.flatten(1, 2)
        assert relative(one, other) < 1e-5, (name, relative(one, other))


def problem(rule: str, tokens: int, key_dim: int, value_dim: int, device: str, dtype: torch.dtype):
    """bfloat16 keys, queries and values, decays from 0.5 to nearly 1, two documents in the first sequence. Many
    sequences where they are short: what is compared in norm should not be a few inner products, of which some cancel
    (of 60 draws of 2 sequences of 25 tokens, one had the decay's gradient 6e-3 off; of 20, none 4e-3)."""
    batch, groups, heads = max(2, min(32, 1024 // tokens)), 2, 4
    k = normalize(torch.randn(batch, tokens, groups, key_dim), dim=-1)
    arguments = {
        "q": torch.randn(batch, tokens, groups, key_dim).to(dtype),
        "k": k.to(dtype),
        "v": torch.randn(batch, tokens, heads, value_dim).to(dtype),
        "log_decay": -torch.nn.functional.softplus(2 * torch.randn(batch, tokens, heads) - 4),
    }
    if rule == "delta":
        arguments["beta"] = torch.rand(batch, tokens, heads)
    state = (key_dim, value_dim) if rule == "delta" else (value_dim, key_dim)
    arguments["state"] = torch.randn(batch, heads, *state)
    reset = torch.zeros(batch, tokens, dtype=torch.bool)
    reset[0, tokens // 3] = True
    return {name: x.to(device) for name, x in arguments.items()}, reset.to(device)


def gradients(form, arguments, reset, weights):
    leaves = {name: x.detach().requires_grad_() for name, x in arguments.items()}
    outputs = form(**leaves, reset=reset)
    total = sum((output * weight.to(output)).sum() for output, weight in zip(outputs, weights, strict=True))
    return *outputs, *torch.autograd.grad(total, list(leaves.values()))


def largest_error(form, rule, arguments, reset):
    exact = {name: x.double() for name, x in arguments.items()}
    shapes = (arguments["v"].shape, arguments["state"].shape)
    # like the outputs, of bfloat16 numbers
    weights = [torch.randn(shape).bfloat16().to(reset.device) for shape in shapes]
    expected = gradients(RULES[rule][2], exact, reset, weights)
    found = gradients(form, arguments, reset, weights)
    names = ("o", "after", *arguments)
    errors = {name: relative(one, other) for name, one, other in zip(names, found, expected, strict=True)}
    return max(errors.values()), found


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("tokens", [37, 300])
def test_half_precision_operands(rule, tokens):
    """The products that a GPU takes in bfloat16, taken so on the CPU."""
    arguments, reset = problem(rule, tokens, 16, 24, "cpu", torch.bfloat16)
    form = functools.partial(RULES[rule][1], torch.bfloat16)
    error, _ = largest_error(form, rule, arguments, reset)
    assert 1e-4 < error < HALF[rule]


@pytest.mark.gpu
@pytest.mark.parametrize("kernels", ["", "triton", "chunked"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("key_dim", "value_dim"), [(128, 64), (48, 96), (256, 256), (24, 160)])
@pytest.mark.parametrize("tokens", [1, 25, 63, 1000])
@pytest.mark.parametrize("rule", RULES)
def test_on_a_gpu(poisoned, monkeypatch, rule, tokens, key_dim, value_dim, dtype, kernels):
    monkeypatch.setenv("SURGERY_KERNELS", kernels)
    arguments, reset = problem(rule, tokens, key_dim, value_dim, "cuda", dtype)
    error, found = largest_error(RULES[rule][0], rule, arguments, reset)
    assert error < (HALF[rule] if dtype == torch.bfloat16 else 1e-5)
    assert all(x.isfinite().all() for x in found)


@pytest.mark.gpu
@pytest.mark.parametrize("rule", RULES)
def test_equal_from_run_to_run_on_a_gpu(monkeypatch, rule):
    monkeypatch.setenv("SURGERY_KERNELS", "triton")
    arguments, reset = problem(rule, 500, 128, 64, "cuda", torch.bfloat16)
    weights = [torch.ones_like(arguments["v"]), torch.ones_like(arguments["state"])]
    first, second = (gradients(RULES[rule][0], arguments, reset, weights) for _ in range(2))
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))
