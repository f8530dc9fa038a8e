"""The Bayesian rule with decays and process noise for each key channel (KDA hosts)."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize

from surgery.kernels import dispatch
from surgery.kernels.bayesian.chunked import bayesian as chunked
from surgery.kernels.bayesian.reference import bayesian as reference
from surgery.kernels.delta.reference import delta

FORMS = pytest.mark.parametrize("form", (reference, chunked), ids=("reference", "chunked"))
DOUBLE = {"dtype": torch.float64}


def problem(tokens: int, *, rho=0.9, near=False, hard=False, boundaries=False, above=False, state=False, norm=1.0):
    """Random arguments in float64, two sequences of four heads on two key heads of 8 entries, and the options.

    Noise restores a prior of its own for each head; ``boundaries`` adds a reset and some padding, ``above`` steps to 2.
    """
    batch, heads, groups, width = 2, 4, 2, 8
    k = torch.randn(batch, tokens, groups, width, **DOUBLE)
    if near:
        k = k[:, :1] + 0.02 * k
    k = norm * normalize(k, dim=-1)
    q, v = torch.randn_like(k), torch.randn(batch, tokens, heads, width - 2, **DOUBLE)
    decay = torch.exp(-(20 if hard else 0.2) * torch.rand(batch, tokens, heads, width, **DOUBLE) ** 2)
    cov_decay_sqrt = rho**0.5 * decay
    p0 = 0.5 + torch.rand(heads, **DOUBLE)
    prior = p0[:, None]
    noise = prior * (1 - cov_decay_sqrt.square())
    padding = torch.zeros(batch, tokens, 1, 1, dtype=torch.bool)
    if boundaries:
        padding[0, : tokens // 4] = True
        reset = torch.zeros_like(padding)
        reset[1, tokens // 2] = reset[0, tokens // 3] = True
        noise = torch.where(reset, cov_decay_sqrt.square() * prior + noise, noise).masked_fill(padding, 0.0)
        decay, cov_decay_sqrt = (
            x.masked_fill(reset, 0.0).masked_fill(padding, 1.0) for x in (decay, cov_decay_sqrt)
        )
        k, v = (x.masked_fill(padding, 0.0) for x in (k, v))
    square = k.square().sum(-1).repeat_interleave(heads // groups, dim=-1)
    eta = (2 if above else 1) * torch.rand(batch, tokens, heads, **DOUBLE).clamp(min=0.02)
    observation = torch.maximum((1 / eta - square).clamp(min=0), 1e-2 * p0 - noise.amin(-1))
    write = (eta * square).clamp(min=1)
    shrink = (write * (2 - write)).clamp(min=0) if above else torch.ones_like(write)
    arguments = {
        "q": q, "k": k, "v": v, "decay": decay, "cov_decay_sqrt": cov_decay_sqrt, "process_noise": noise,
        "precision": torch.ones(heads, **DOUBLE), "observation_noise": observation.masked_fill(padding[..., 0], 1.0),
        "erase": write, "shrink": shrink, "write": write.clone(), "initial_covariance": p0,
    }  # fmt: skip
    if state:
        mean, root = (torch.randn(batch, heads, width, n, **DOUBLE) for n in (width - 2, width))
        arguments["state"] = torch.cat((mean, root @ root.mT / width), -1)
    return arguments, {"unit_gain": not above}


def results(form, arguments: dict[str, Tensor], unit_gain: bool) -> dict[str, Tensor]:
    """Outputs, state, and gradients of a fixed mixture of both. Under unit gain x and r are one number."""
    leaves = {name: x.detach().clone().requires_grad_() for name, x in arguments.items()}
    outputs = form(**leaves, unit_gain=unit_gain)
    mixture = sum((x * torch.cos(torch.arange(x.numel(), dtype=x.dtype)).view_as(x)).sum() for x in outputs)
    found = dict(zip(leaves, torch.autograd.grad(mixture, list(leaves.values()), allow_unused=True), strict=True))
    if unit_gain:
        shrink = found.pop("shrink")
        if shrink is not None:
            found["precision"] = found["precision"] + shrink.sum((0, 1))
    if "state" in leaves:
        assert found.pop("initial_covariance") is None
    return {"o": outputs[0], "after": outputs[1], **{f"d{name}": x for name, x in found.items()}}


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        error = (found[name] - value).abs().max().item()
        assert error <= tolerance * max(1.0, value.abs().max().item()), f"{name}: {error:.1e}"


@pytest.mark.parametrize("options", (
    {}, {"near": True, "rho": 1.0}, {"hard": True}, {"rho": 0.0}, {"above": True, "boundaries": True},
    {"boundaries": True, "state": True}, {"norm": 1.3, "above": True},
), ids=str)  # fmt: skip
@pytest.mark.parametrize("tokens", (1, 63))
def test_chunked_equals_sequential_with_gradients(tokens, options):
    arguments, promised = problem(tokens, **options)
    assert_same(results(chunked, arguments, **promised), results(reference, arguments, **promised), 1e-8)


@pytest.mark.parametrize("above", (False, True))
def test_the_reads_variance_is_that_of_the_covariance_after_each_write(above):
    arguments, options = problem(45, boundaries=True, above=above, state=True)
    _, variance, state = reference(**arguments, **options, return_variance=True)
    query = arguments["q"][:, -1].repeat_interleave(2, dim=1)
    expected = torch.einsum("bhk,bhkl,bhl->bh", query, state[..., 6:], query)
    torch.testing.assert_close(variance[:, -1], expected, rtol=1e-12, atol=1e-12)
    for chunk_size in (4, 32):
        found = chunked(**arguments, **options, return_variance=True, chunk_size=chunk_size)
        torch.testing.assert_close(found[1], variance, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("chunk_size", (1, 4, 128))
def test_every_chunk_size_agrees(chunk_size):
    arguments, promised = problem(100, boundaries=True)
    expected = reference(**arguments, **promised)
    for found, value in zip(chunked(**arguments, **promised, chunk_size=chunk_size), expected, strict=True):
        torch.testing.assert_close(found, value, rtol=0, atol=1e-10)


@pytest.mark.parametrize("names", (
    ("decay", "cov_decay_sqrt", "process_noise"), ("decay",), ("cov_decay_sqrt",), ("process_noise",),
), ids="-".join)  # fmt: skip
@FORMS
def test_equal_channels_are_one_decay(form, names):
    arguments, promised = problem(40)
    for name in ("decay", "cov_decay_sqrt", "process_noise"):
        arguments[name] = arguments[name][..., 0]
    repeated = {name: arguments[name][..., None].expand(2, 40, 4, 8) for name in names}
    expected = reference(**arguments, **promised)
    for found, value in zip(form(**{**arguments, **repeated}, **promised), expected, strict=True):
        torch.testing.assert_close(found, value, rtol=0, atol=1e-10)


@pytest.mark.parametrize("above", (False, True))
@FORMS
def test_without_retention_it_is_the_delta_rule(form, above):
    """Retention 0 and a noise of 1, observation noise 1 / eta - |k|^2: the KDA host with step eta."""
    arguments, promised = problem(70, rho=0.0, above=above)
    square = arguments["k"].square().sum(-1).repeat_interleave(2, -1)
    eta = (2 if above else 1) * torch.rand(2, 70, 4, **DOUBLE).clamp(min=0.02)
    omega = (eta * square).clamp(min=1) if above else torch.ones_like(eta)
    arguments |= {
        "process_noise": torch.ones_like(arguments["decay"]), "initial_covariance": torch.ones(4, **DOUBLE),
        "observation_noise": (1 / eta - square).clamp(min=0), "erase": omega, "write": omega,
        "shrink": (omega * (2 - omega)).clamp(min=0) if above else omega,
    }  # fmt: skip
    o, state = form(**arguments, **promised)
    host = {name: arguments[name] for name in "qkv"}
    expected, memory = delta(**host, log_decay=arguments["decay"].log(), beta=eta)
    torch.testing.assert_close(o, expected, rtol=0, atol=1e-10)
    torch.testing.assert_close(state[..., :6], memory, rtol=0, atol=1e-10)


def test_channels_far_apart_in_float32():
    """Some channels keep everything and others forget within a token; keys nearly parallel, no noise to speak of."""
    arguments, promised = problem(300, near=True, rho=1.0)
    horizon = torch.tensor([0.0, 1e-5, 1e-3, 0.1, 1.0, 5.0, 30.0, 200.0], **DOUBLE)
    arguments["decay"] = torch.exp(-horizon).expand(2, 300, 4, 8).clone()
    arguments["cov_decay_sqrt"] = arguments["decay"].clone()
    arguments["process_noise"] = arguments["initial_covariance"][:, None] * (1 - arguments["decay"].square())
    single = {name: x.float() for name, x in arguments.items()}
    expected = results(reference, {name: x.double() for name, x in single.items()}, **promised)
    found = results(chunked, single, **promised)
    for name, value in expected.items():
        error = ((found[name].double() - value).norm() / value.norm()).item()
        assert error <= 1e-4, f"{name}: {error:.1e}"
    covariance = found["after"][..., 6:].double()
    eigenvalues = torch.linalg.eigvalsh(covariance)
    assert (eigenvalues[..., 0] >= -1e-6 * eigenvalues[..., -1]).all()


def test_state_carried_across_calls():
    arguments, promised = problem(60, boundaries=True)
    fixed = {name: arguments.pop(name) for name in ("precision", "initial_covariance")}
    o, after = chunked(**arguments, **fixed, **promised)
    first, state = chunked(**{name: x[:, :23] for name, x in arguments.items()}, **fixed, **promised)
    second, state = chunked(**{name: x[:, 23:] for name, x in arguments.items()}, **fixed, **promised, state=state)
    torch.testing.assert_close(torch.cat((first, second), 1), o, rtol=0, atol=1e-11)
    torch.testing.assert_close(state, after, rtol=0, atol=1e-11)


def test_no_output_depends_on_a_later_token():
    arguments, promised = problem(40)
    before, _ = chunked(**arguments, **promised)
    for name in arguments.keys() - {"precision", "initial_covariance"}:
        moved = {**arguments, name: arguments[name].clone()}
        moved[name][:, 21] *= 0.5
        after, _ = chunked(**moved, **promised)
        assert torch.equal(after[:, :21], before[:, :21]), name


def test_one_graph_for_torch_compile():
    arguments, promised = problem(20, boundaries=True)
    torch.compiler.reset()
    compiled = torch.compile(chunked, backend="aot_eager", fullgraph=True)
    assert_same(results(compiled, arguments, **promised), results(chunked, arguments, **promised), 1e-12)


def test_triton_leaves_channels_to_the_torch_form(monkeypatch):
    arguments, promised = problem(20)
    monkeypatch.setenv("SURGERY_KERNELS", "triton")
    expected = chunked(**arguments, **promised)
    for found, value in zip(dispatch.bayesian(**arguments, **promised), expected, strict=True):
        assert torch.equal(found, value)
    with pytest.raises(ValueError, match="for each key channel"):
        dispatch.bayesian(**arguments, **promised, backend="triton")
