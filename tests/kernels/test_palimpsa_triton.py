"""Palimpsa's Triton kernels against the sequential rule in float64: outputs, states and every gradient.

Without a GPU the suite imports Triton as its CPU interpreter, and the tests of small shapes run there. With one they
run on it, and so do those of large shapes: ``pytest -m gpu``.
"""

from __future__ import annotations

import functools
import importlib
import os

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from surgery.kernels.palimpsa.chunked import palimpsa as chunked
from surgery.kernels.palimpsa.reference import palimpsa as reference

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
# small shapes: for both
device_test = (lambda test: test) if INTERPRETED else pytest.mark.gpu
# relative Frobenius errors; for half precision, before the outputs are rounded, and then
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 4e-3}
UNROUNDED = 2e-3
# the interpreter cuts float32 to bfloat16 instead of rounding it, up to 2^-7 off where rounding is 2^-8
HALVES = [torch.float16] if INTERPRETED else [torch.float16, torch.bfloat16]


def form(name: str = "triton"):
    return importlib.import_module(f"surgery.kernels.palimpsa.{name}")


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    """Memory that a kernel leaves unwritten is NaN."""
    if not INTERPRETED and not torch.cuda.is_available():
        return

    def fill(make):
        @functools.wraps(make)
        def made(*args, **kwargs):
            x = make(*args, **kwargs)
            with torch.no_grad():
                return x.fill_(float("nan")) if x.is_floating_point() else x

        return made

    monkeypatch.setattr(torch, "empty", fill(torch.empty))
    monkeypatch.setattr(torch, "empty_like", fill(torch.empty_like))


@pytest.fixture
def short_chunks(monkeypatch):
    """Chunks of 32 tokens, two blocks each: every level of the walks within 40 tokens, and slabs of one segment."""
    form()  # imports the others, which copy the number
    for name in ("triton_common", "triton_forward", "triton_backward"):
        monkeypatch.setattr(form(name), "CHUNK", 32)


def problem(
    batch: int, tokens: int, heads: int, groups: int, key_dim: int, value_dim: int, dtype=torch.float32, *,
    log_decay: tuple[float, float] = (-1.0, 0.0), largest_b: float = 1.0,
) -> dict[str, Tensor]:
    """Random arguments as a caller has them: q, k, v and b in ``dtype``, the rest float32."""
    options = {"device": DEVICE}
    values = (batch, tokens, heads, value_dim)
    return {
        "q": torch.randn(batch, tokens, groups, key_dim, **options).to(dtype),
        "k": (torch.randn(batch, tokens, groups, key_dim, **options) / key_dim**0.5).to(dtype),
        "v": torch.randn(values, **options).to(dtype),
        "b": (largest_b * torch.rand(values, **options)).to(dtype),
        "log_decay": torch.empty(batch, tokens, heads, **options).uniform_(*log_decay),
        "prior": 0.5 + torch.rand(heads, **options),
        "state": torch.rand(batch, 2, heads, value_dim, key_dim, **options),
    }


def outputs_and_gradients(run, arguments: dict[str, Tensor], weights: list[Tensor] | None, **options):
    leaves = {name: x.detach().clone().requires_grad_() for name, x in arguments.items()}
    outputs = run(**leaves, **options)
    if weights is None:
        # as they reach the kernels: rounded like the outputs
        weights = [torch.randn_like(x, dtype=torch.float32).to(x.dtype) for x in outputs]
    total = sum((x.double() * weight.double()).sum() for x, weight in zip(outputs, weights, strict=True))
    found = dict(zip(leaves, torch.autograd.grad(total, list(leaves.values())), strict=True))
    names = ("o", "variance", "final") if len(outputs) == 3 else ("o", "final")
    return dict(zip(names, (x.detach() for x in outputs), strict=True)), found, weights


def relative(found: Tensor, expected: Tensor) -> float:
    return ((found.double() - expected.double()).norm() / expected.double().norm()).item()


def compare(arguments: dict[str, Tensor], exact=reference, **options) -> None:
    """The kernels' outputs and gradients, twice, against ``exact`` in float64."""
    outputs, gradients, weights = outputs_and_gradients(form().palimpsa, arguments, None, **options)
    again, gradients_again, _ = outputs_and_gradients(form().palimpsa, arguments, weights, **options)
    double = {name: x.double() for name, x in arguments.items()}
    expected, expected_gradients, _ = outputs_and_gradients(exact, double, weights, **options)
    single = any(arguments[name].dtype == torch.float32 for name in "qkvb")
    tolerance = TOLERANCE | ({} if single else {torch.float32: UNROUNDED})
    for kind, found, repeated, wanted in (
        ("", outputs, again, expected), ("gradient of ", gradients, gradients_again, expected_gradients)
    ):
        for name, value in wanted.items():
            assert torch.equal(found[name], repeated[name]), f"{kind}{name} differs from run to run"
            if value.any():
                error, allowed = relative(found[name], value), tolerance[found[name].dtype]
                if name == "prior" and error > allowed:
                    # one sum a head over everything, which may cancel: then no worse than the sequential rule is
                    _, same_gradients, _ = outputs_and_gradients(exact, arguments, weights, **options)
                    allowed = 3 * relative(same_gradients[name], value)
                assert error < allowed, f"{kind}{name}: {error:.1e}"
            else:
                assert not found[name].any(), f"{kind}{name} is not zero"


@device_test
@pytest.mark.parametrize(
    ("tokens", "log_decay", "largest_b"),
    [
        pytest.param(40, (-1.0, 0.0), 1.0, marks=pytest.mark.slow),
        (37, (-20.0, -15.0), 1e4),
        (33, (-1e-6, -1e-6), 0.0),
        (1, (-1.0, 0.0), 1.0),
    ],
    ids=["mild", "hard", "none", "one"],
)
def test_every_level_of_the_walks(short_chunks, tokens, log_decay, largest_b):
    compare(problem(1, tokens, 2, 1, 16, 16, log_decay=log_decay, largest_b=largest_b))


@device_test
def test_slabs_and_segments(short_chunks, monkeypatch):
    # one chunk a slab and one a segment; then all in one slab of one segment
    for size, segment in ((1, 1), (2**30, 3)):
        monkeypatch.setattr(form("triton_backward"), "SLAB_BYTES", size)
        monkeypatch.setattr(form("triton_backward"), "segment_chunks", lambda *shape, count=segment: count)
        arguments = problem(1, 44, 1, 1, 16, 16)
        compare(arguments, reset=torch.rand(1, 44, device=DEVICE) < 0.1)


@device_test
@pytest.mark.parametrize(("batch", "key_dim", "value_dim"), [(2, 12, 20), (1, 48, 24)])
def test_odd_widths_and_the_variance(short_chunks, batch, key_dim, value_dim):
    # two value heads share a key head
    arguments = problem(batch, 5, 2, 1, key_dim, value_dim)
    compare(arguments, return_variance=True, reset=torch.rand(batch, 5, device=DEVICE) < 0.3)


@device_test
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(("tokens", "key_dim", "value_dim"), [(9, 16, 16), (40, 12, 20)])
def test_half_precision(short_chunks, monkeypatch, tokens, key_dim, value_dim, dtype):
    # two segments of one chunk, where there are two
    monkeypatch.setattr(form("triton_backward"), "segment_chunks", lambda *shape: 1)
    compare(problem(1, tokens, 1, 1, key_dim, value_dim, dtype))


@device_test
def test_mixed_precision_and_no_state():
    arguments = problem(1, 9, 2, 1, 16, 16)
    arguments |= {"q": arguments["q"].to(HALVES[-1]), "b": arguments["b"].half()}
    del arguments["state"]
    compare(arguments)


@device_test
def test_a_step_works_in_place():
    arguments = problem(2, 1, 4, 2, 48, 20)
    state = arguments.pop("state")
    # a token of a longer text's resets: its neighbours in memory belong to other tokens
    reset = torch.tensor([[False, False, True], [True, True, False]], device=DEVICE)[:, 2:]
    for options in ({}, {"reset": reset}):
        double = {name: x.double() for name, x in arguments.items()}
        expected, after = reference(**double, state=state.double(), **options)
        with torch.no_grad():
            o, final = form().palimpsa(**arguments, state=state, **options)
        updated = state.clone()
        same = form().palimpsa_step(**arguments, state=updated, **options)
        assert torch.equal(o, same) and torch.equal(final, updated)
        assert relative(o, expected) < 1e-5
        assert relative(updated, after) < 1e-5


@device_test
def test_padding_is_the_identity():
    arguments = problem(1, 6, 1, 1, 16, 16)
    _, final = form().palimpsa(**arguments)
    padded = {
        name: x if name in ("prior", "state") else torch.cat((x, torch.zeros_like(x[:, :3])), 1)
        for name, x in arguments.items()
    }
    assert torch.equal(form().palimpsa(**padded)[1], final)


@device_test
def test_operators_keep_their_promises():
    """Schema, shapes without data and registration, as torch.compile relies on them; checkpoints recompute."""
    arguments = problem(1, 3, 2, 1, 16, 16)
    leaves = {name: x.requires_grad_() for name, x in arguments.items()}
    utilities = ("test_schema", "test_faketensor", "test_autograd_registration")
    for variance in (False, True):
        torch.library.opcheck(form()._palimpsa, (*leaves.values(), None, variance), test_utils=utilities)
    with torch.no_grad():
        one = [x if name in ("prior", "state") else x[:, :1] for name, x in arguments.items()]
        torch.library.opcheck(form()._palimpsa_step, (*one, None), test_utils=utilities[:2])

    palimpsa = form().palimpsa

    def read(*inputs):
        return palimpsa(*inputs[:6], state=inputs[6])[0].square().sum()

    expected = torch.autograd.grad(read(*leaves.values()), list(leaves.values()))
    found = torch.autograd.grad(checkpoint(read, *leaves.values(), use_reentrant=False), list(leaves.values()))
    compiled = torch.compile(read, backend="aot_eager", fullgraph=True)
    traced = torch.autograd.grad(compiled(*leaves.values()), list(leaves.values()))
    for a, b, c in zip(expected, found, traced, strict=True):
        assert torch.equal(a, b)
        assert torch.equal(a, c)


@device_test
def test_too_wide():
    with pytest.raises(AssertionError, match="at most 256"):
        form().palimpsa(**problem(1, 1, 1, 1, 257, 16))


@device_test
def test_misaligned_inputs():
    """Views that start inside another tensor, where several entries cannot be read at once."""
    arguments = problem(1, 9, 1, 1, 16, 16, torch.float16)
    for name in "qkvb":
        x = arguments[name]
        arguments[name] = torch.cat((x.flatten()[:1], x.flatten()))[1:].view_as(x)
        assert arguments[name].data_ptr() % 16
    compare(arguments)


@device_test
def test_rounded_decays_lose_nothing():
    """Over a chunk, the product of the float32 decays and what it lost is the decay itself."""
    common = form("triton_common")
    log_decay = torch.empty(1, 3 * common.CHUNK, 2, device=DEVICE)
    log_decay[:, :, 0].fill_(-1e-6)
    log_decay[:, :, 1].uniform_(-2.0, 0.0)
    reset = torch.zeros(1, 3 * common.CHUNK, dtype=torch.bool, device=DEVICE)
    reset[:, common.CHUNK + 5] = True
    table = common.decays(log_decay, reset)
    product = table.each.double().view(1, 2, 3, common.CHUNK).prod(-1)
    whole = log_decay.double().view(1, 3, common.CHUNK, 2).sum(2).exp().transpose(1, 2)
    whole[:, :, 1] = 0.0
    torch.testing.assert_close(product * (1 + table.lost.double()), whole, rtol=1e-11, atol=0.0)
    assert ((product - whole).abs() > 1e-7 * whole)[0, 0, 0]


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("heads", "groups", "key_dim", "value_dim", "dtype", "lengths"),
    [
        (4, 4, 48, 96, torch.bfloat16, (1000,)),
        (4, 4, 48, 96, torch.float32, (1, 63)),
        (2, 1, 96, 192, torch.bfloat16, (1, 63)),
        (2, 1, 96, 192, torch.float16, (1000,)),
        (4, 1, 128, 64, torch.bfloat16, (1, 63)),
        (2, 2, 128, 128, torch.bfloat16, (1000,)),
        (2, 2, 128, 128, torch.float32, (1000,)),
        (1, 1, 256, 256, torch.bfloat16, (1000,)),
        (1, 1, 256, 256, torch.float32, (1, 63)),
        (1, 1, 192, 512, torch.float16, (1, 63)),
        (1, 1, 192, 512, torch.float32, (1000,)),
    ],
)
def test_shapes_of_models(heads, groups, key_dim, value_dim, dtype, lengths):
    for tokens in lengths:
        arguments = problem(2, tokens, heads, groups, key_dim, value_dim, dtype)
        compare(arguments, chunked, reset=torch.rand(2, tokens, device=DEVICE) < 0.01)


@pytest.mark.gpu
@pytest.mark.parametrize("log_decay", [(-1e-6, -1e-6), (-2.0, -2.0), (-20.0, 0.0)], ids=["none", "strong", "any"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_long_sequences(log_decay, dtype):
    compare(problem(1, 32768, 2, 1, 64, 64, dtype, log_decay=log_decay), chunked)


@pytest.mark.gpu
def test_compiled_under_autocast(monkeypatch):
    """torch.compile with its default backend, in a layer's way: projections in bf16 autocast, then the operator."""
    monkeypatch.undo()  # the compiler's own memory is its own affair
    palimpsa = form().palimpsa
    arguments = problem(1, 64, 2, 1, 64, 64)
    del arguments["state"]
    leaves = {name: x.requires_grad_() for name, x in arguments.items()}
    weight = torch.randn(64, 64, device=DEVICE, requires_grad=True)

    def layer(weight, q, k, v, b, log_decay, prior):
        with torch.autocast("cuda", torch.bfloat16):
            q, k = (torch.nn.functional.linear(x, weight) for x in (q, k))
            o, _ = palimpsa(q, k / 8, v.bfloat16(), b.bfloat16(), log_decay, prior)
        return o.float().square().mean()

    inputs = [weight, *leaves.values()]
    expected = torch.autograd.grad(layer(*inputs), inputs)
    found = torch.autograd.grad(torch.compile(layer, fullgraph=True)(*inputs), inputs)
    for a, b in zip(found, expected, strict=True):
        assert relative(a, b) < 1e-2


@pytest.mark.gpu
def test_memory_stays_bounded():
    """Forward and backward keep no state a token: 2048 tokens of 128 by 128 states would take 512 MiB a head."""
    arguments = {name: x.requires_grad_() for name, x in problem(1, 2048, 4, 4, 128, 128, torch.bfloat16).items()}
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    o, _ = form().palimpsa(**arguments)
    torch.autograd.grad(o.sum(), list(arguments.values()), materialize_grads=True)
    assert torch.cuda.max_memory_allocated() - before < 256 * 2**20
