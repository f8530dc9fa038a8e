"""The Bayesian rule's Triton kernels: in Triton's interpreter on small shapes without a GPU, at full size on one.

The expected values are the sequential rule's in float64; on a GPU, where that takes too long, the chunked form's.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize

from surgery.kernels.bayesian.chunked import bayesian as chunked
from surgery.kernels.bayesian.reference import bayesian as reference

pytest.importorskip("triton")

UNIT_GAIN = {"gdn": True, "gdn-above-1": False, "mamba2": True}
DOUBLE = {"dtype": torch.float64}
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# on a GPU the kernels are compiled, and what is tested in the interpreter would be tested twice
interpreted = pytest.mark.skipif(DEVICE == "cuda", reason="the interpreter's tests; on a GPU run -m gpu")


class Problem(NamedTuple):
    q: Tensor
    k: Tensor
    v: Tensor
    decay: Tensor
    cov_decay_sqrt: Tensor
    process_noise: Tensor
    precision: Tensor
    observation_noise: Tensor
    erase: Tensor
    shrink: Tensor
    write: Tensor
    p0: Tensor
    state: Tensor | None


def problem(
    form: str, tokens: int, *, batch=1, heads=2, groups=1, key_dim=20, value_dim=18, near=False, decay=None, rho=1.0,
    noise: str | float = "restoring", boundaries=False, state=False, rate=1.0,
) -> Problem:  # fmt: skip
    """Random float64 arguments as the memory module lowers them.

    Args:
        near: keys at an overlap of about 0.999. decay: one for all tokens, or None for random ones.
        noise: ``restoring``, or constant at this value. boundaries: with a reset and some padding.
        rate: of the mamba2 form's lambda; 0 is the host.
    """
    k = normalize(torch.randn(batch, tokens, groups, key_dim, **DOUBLE), dim=-1)
    if near:
        k = normalize(normalize(torch.randn(batch, 1, groups, key_dim, **DOUBLE), dim=-1) + 0.0316 * k, dim=-1)
    q = normalize(torch.randn_like(k), dim=-1)
    v = torch.randn(batch, tokens, heads, value_dim, **DOUBLE)
    a = torch.exp(-0.2 * torch.rand(batch, tokens, heads, **DOUBLE) ** 2)
    if decay is not None:
        a = torch.full_like(a, decay)
    c_sqrt = math.sqrt(rho) * a
    p0 = 0.5 + torch.rand(heads, **DOUBLE)
    n = p0 * (1 - c_sqrt.square()) if noise == "restoring" else torch.full_like(a, noise)
    padding = torch.zeros(batch, tokens, 1, dtype=torch.bool)
    if boundaries:
        padding[0, : tokens // 4] = True
        reset = torch.zeros_like(padding)
        reset[-1, tokens // 2] = reset[0, tokens // 3] = True
        n = torch.where(reset, c_sqrt.square() * p0 + n, n).masked_fill(padding, 0.0)
        a, c_sqrt = (x.masked_fill(reset, 0.0).masked_fill(padding, 1.0) for x in (a, c_sqrt))
        k, v = k.masked_fill(padding[..., None], 0.0), v.masked_fill(padding[..., None], 0.0)
    square = k.square().sum(-1).repeat_interleave(heads // groups, dim=-1)
    if form == "mamba2":
        x = rate * (0.1 + torch.rand(heads, **DOUBLE))
        p = r = x.expand_as(a)
        z, y = 1 / p0 + x * square, torch.ones_like(a)
    else:
        eta = (2 if form == "gdn-above-1" else 1) * torch.rand(batch, tokens, heads, **DOUBLE).clamp(min=0.02)
        x = torch.ones(heads, **DOUBLE)
        y = torch.maximum((1 / eta - square).clamp(min=0), 1e-2 * p0 - n).masked_fill(padding, 1.0)
        z = p = (eta * square).clamp(min=1)
        r = (p * (2 - p)).clamp(min=0) if form == "gdn-above-1" else torch.ones_like(p)
    carried = None
    if state:
        direction = normalize(torch.randn(batch, heads, key_dim, **DOUBLE), dim=-1)
        covariance = torch.eye(key_dim, **DOUBLE) - 0.7 * direction[..., None] * direction[..., None, :]
        mean = torch.randn(batch, heads, key_dim, value_dim, **DOUBLE)
        carried = torch.cat((mean, p0[:, None, None] * covariance), dim=-1)
    return Problem(q, k, v, a, c_sqrt, n, x, y, p, r, z, p0, carried)


def cast(problem: Problem, dtype: torch.dtype) -> Problem:
    """q, k and v in ``dtype``, everything else in float32."""
    rest = [None if x is None else x.float() for x in problem[3:]]
    return Problem(*(x.to(dtype) for x in problem[:3]), *rest)


def call(rule: Callable, problem: Problem, form: str) -> tuple[Tensor, Tensor]:
    return rule(*problem[:11], initial_covariance=problem.p0, state=problem.state, unit_gain=UNIT_GAIN[form])


def gradients(rule: Callable, problem: Problem, form: str, weights: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
    """Outputs, and gradients of their product with ``weights``. Under unit gain x and r are one number."""
    leaves = Problem(*(None if x is None else x.detach().clone().requires_grad_() for x in problem))
    outputs = call(rule, leaves, form)
    loss = sum((out * weight.to(out.dtype)).sum() for out, weight in zip(outputs, weights, strict=True))
    wanted = {name: x for name, x in leaves._asdict().items() if x is not None}
    found = dict(zip(wanted, torch.autograd.grad(loss, list(wanted.values()), allow_unused=True), strict=True))
    if UNIT_GAIN[form]:
        shrink = found.pop("shrink")
        if shrink is not None:
            found["precision"] = found["precision"] + shrink.sum((0, 1))
    if problem.state is not None:
        assert found.pop("p0") is None
    return {"o": outputs[0].detach(), "after": outputs[1].detach(), **found}


def assert_close(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float) -> None:
    """Relative error by the norm; ``precision`` and ``p0``, sums of a few numbers, by the terms that they sum."""
    assert found.keys() == expected.keys()
    for name, exact in expected.items():
        scale = exact.norm().item()
        if name in ("precision", "p0"):
            scale = max(scale, expected["k"].norm().item())
        error = (found[name].double() - exact).norm().item()
        assert error <= tolerance * scale + 1e-12, f"{name}: {error:.1e} of {scale:.1e}"


def weights_for(problem: Problem) -> tuple[Tensor, Tensor]:
    batch, _, heads, value_dim = problem.v.shape
    key_dim = problem.k.shape[-1]
    state = torch.randn(batch, heads, key_dim, value_dim + key_dim, **DOUBLE)
    return torch.randn_like(problem.v), state.to(problem.v.device)


@pytest.fixture
def nan_filled():
    """What a kernel leaves unwritten shows."""
    before = torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(before[0])
    torch.utils.deterministic.fill_uninitialized_memory = before[1]


@interpreted
@pytest.mark.parametrize("form", UNIT_GAIN)
@pytest.mark.parametrize("tokens, options", [
    (1, {"state": True, "batch": 3}),
    (70, {"boundaries": True, "state": True}),
    (33, {"rho": 0.0, "noise": 0.3}),
], ids=("one-token", "boundaries", "no-retention"))  # fmt: skip
def test_equals_the_sequential_rule_with_gradients(form, tokens, options, nan_filled):
    from surgery.kernels.bayesian.triton import bayesian

    exact = problem(form, tokens, **options)
    weights = weights_for(exact)
    expected = gradients(reference, exact, form, weights)
    assert_close(gradients(bayesian, cast(exact, torch.float32), form, weights), expected, 2e-5)


@interpreted
@pytest.mark.parametrize("form", ("gdn", "gdn-above-1"))
def test_keys_of_several_blocks(form, nan_filled):
    from surgery.kernels.bayesian.triton import bayesian

    exact = problem(form, 20, heads=1, key_dim=136, value_dim=72, state=True)
    weights = weights_for(exact)
    expected = gradients(reference, exact, form, weights)
    assert_close(gradients(bayesian, cast(exact, torch.float32), form, weights), expected, 1e-5)


@interpreted
def test_nearly_parallel_keys_and_a_decay_near_one():
    from surgery.kernels.bayesian.triton import bayesian

    exact = problem("gdn", 100, heads=1, near=True, decay=0.999)
    weights = weights_for(exact)
    expected = gradients(reference, exact, "gdn", weights)
    assert_close(gradients(bayesian, cast(exact, torch.float32), "gdn", weights), expected, 1e-4)


@interpreted
def test_bf16_inputs():
    """The state and the gates stay float32; the error is that of tf32 and of the outputs' own rounding."""
    from surgery.kernels.bayesian.triton import bayesian

    low = cast(problem("gdn", 70, boundaries=True), torch.bfloat16)
    exact = Problem(*(None if x is None else x.double() for x in low))
    weights = weights_for(exact)
    weights = weights[0].bfloat16().double(), weights[1]
    expected = gradients(reference, exact, "gdn", weights)
    found = gradients(bayesian, low, "gdn", weights)
    assert found["o"].dtype == found["k"].dtype == torch.bfloat16
    assert found["after"].dtype == found["decay"].dtype == torch.float32
    assert_close(found, expected, 5e-3)


@interpreted
def test_half_precision_keys_beside_float32_queries(monkeypatch):
    """Products keep the digits of the wider input, with operands cut to tf32 as tensor cores cut them."""
    from triton.runtime import interpreter

    from surgery.kernels.bayesian.triton import bayesian

    def cutting(dot):
        def cut(handle):
            return interpreter.TensorHandle((handle.data.view("int32") & -0x2000).view("float32"), handle.dtype)

        def run(self, a, b, c, precision, *rest):
            if precision == interpreter._ir.INPUT_PRECISION.TF32:
                a, b = cut(a), cut(b)
            return dot(self, a, b, c, precision, *rest)

        return run

    builder = interpreter.InterpreterBuilder
    monkeypatch.setattr(builder, "create_dot", cutting(builder.create_dot))
    low = cast(problem("gdn", 20), torch.float32)
    low = low._replace(k=low.k.half())
    exact = Problem(*(None if x is None else x.double() for x in low))
    weights = weights_for(exact)
    expected, found = (gradients(rule, x, "gdn", weights) for rule, x in ((reference, exact), (bayesian, low)))
    assert found["k"].dtype == torch.float16
    # the gradient of half precision keys is rounded to it
    assert_close({"k": found.pop("k")}, {"k": expected.pop("k")}, 1e-3)
    assert_close(found | {"k": expected["q"]}, expected | {"k": expected["q"]}, 1e-5)


@interpreted
def test_a_gpu_of_less_shared_memory(monkeypatch):
    """The walk back in narrower parts is the same walk."""
    from surgery.kernels.bayesian import triton_covariance_backward as module
    from surgery.kernels.bayesian.triton import bayesian

    single = cast(problem("gdn", 20, heads=1, key_dim=72), torch.float32)
    weights = weights_for(single)
    expected = gradients(bayesian, single, "gdn", weights)
    parts = []
    kernel = module._covariance_adjoint_kernel

    class Watched:
        def __getitem__(self, grid):
            return lambda *args, **options: parts.append(options["BK"]) or kernel[grid](*args, **options)

    monkeypatch.setattr(module, "_covariance_adjoint_kernel", Watched())
    for size in (227, 163):
        monkeypatch.setattr(module, "shared_memory", lambda device, size=size: size * 2**10)
        assert_close(gradients(bayesian, single, "gdn", weights), expected, 1e-5)
    assert parts == [64, 32]


@interpreted
def test_segments_change_nothing(monkeypatch, nan_filled):
    """The passes go along the chunks in parts, each pass a part behind the one before."""
    from surgery.kernels.bayesian import triton_streams
    from surgery.kernels.bayesian.triton import bayesian

    kept = cast(problem("gdn", 180, boundaries=True, state=True), torch.float32)
    monkeypatch.setattr(triton_streams, "SHORTEST", 1)
    assert triton_streams.segments(3) == [(0, 1), (1, 2), (2, 3)]
    for keep in (False, True):
        with torch.set_grad_enabled(keep):
            leaves = kept._replace(k=kept.k.requires_grad_(keep))
            parts = call(bayesian, leaves, "gdn")
            with monkeypatch.context() as patch:
                patch.setattr(triton_streams, "SEGMENTS", 1)
                whole = call(bayesian, leaves, "gdn")
        assert all(torch.equal(one, other) for one, other in zip(parts, whole, strict=True))


@interpreted
def test_state_carried_across_calls():
    from surgery.kernels.bayesian.triton import bayesian

    whole = cast(problem("gdn-above-1", 90, boundaries=True), torch.float32)
    expected = call(bayesian, whole, "gdn-above-1")
    reads, state = [], None
    for span in (slice(0, 40), slice(40, 41), slice(41, None)):
        part = Problem(*(x[:, span] if x is not None and x.dim() > 2 else x for x in whole[:-1]), state)
        with torch.no_grad():
            read, state = call(bayesian, part, "gdn-above-1")
        reads.append(read)
    torch.testing.assert_close(torch.cat(reads, 1), expected[0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(state, expected[1], rtol=1e-4, atol=1e-5)
    covariance = state[..., whole.v.shape[-1] :]
    assert torch.equal(covariance, covariance.mT)


@interpreted
@pytest.mark.parametrize("key_dim", (20, 160))
def test_a_step_updates_the_state_in_place(key_dim, nan_filled):
    from surgery.kernels.bayesian.triton import bayesian, bayesian_step

    exact = problem("gdn-above-1", 1, batch=2, key_dim=key_dim, state=True)
    expected = call(reference, exact, "gdn-above-1")
    single = cast(exact, torch.float32)
    with torch.no_grad():
        o, after = call(bayesian, single, "gdn-above-1")
    assert torch.equal(single.state, exact.state.float())
    for found, value in zip((o, after), expected, strict=True):
        assert (found - value).norm() <= 2e-6 * value.norm()
    covariance = after[..., exact.v.shape[-1] :]
    assert torch.equal(covariance, covariance.mT)
    state = single.state.clone()
    # while a model is loaded, the default is the checkpoint's dtype
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float16)
    try:
        assert torch.equal(bayesian_step(*single[:11], state), o)
    finally:
        torch.set_default_dtype(default)
    assert torch.equal(state, after)


@interpreted
def test_operators_have_the_shapes_they_promise_and_are_one_graph():
    from surgery.kernels.bayesian.triton import bayesian

    single = cast(problem("gdn", 20, state=True), torch.float32)
    weights = weights_for(single)
    expected = gradients(bayesian, single, "gdn", weights)
    torch.compiler.reset()
    compiled = torch.compile(bayesian, backend="aot_eager", fullgraph=True)
    with torch.autocast("cpu", torch.bfloat16):
        found = gradients(compiled, single, "gdn", weights)
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


@interpreted
def test_activation_checkpointing_changes_nothing():
    from surgery.kernels.bayesian.triton import bayesian

    def checkpointed(*arguments, **options):
        return torch.utils.checkpoint.checkpoint(
            lambda *tensors: bayesian(*tensors, **options), *arguments, use_reentrant=False
        )

    single = cast(problem("gdn", 20), torch.float32)
    weights = weights_for(single)
    expected = gradients(bayesian, single, "gdn", weights)
    for name, value in gradients(checkpointed, single, "gdn", weights).items():
        assert torch.equal(value, expected[name]), name


@interpreted
@pytest.mark.parametrize("key_dim, value_dim", ((257, 16), (16, 513)))
def test_what_is_too_wide_is_refused(key_dim, value_dim):
    from surgery.kernels.bayesian.triton import bayesian

    with pytest.raises(AssertionError, match="at most"):
        call(bayesian, cast(problem("gdn", 2, key_dim=key_dim, value_dim=value_dim), torch.float32), "gdn")


def on_gpu(problem: Problem) -> Problem:
    return Problem(*(None if x is None else x.cuda() for x in problem))


def compare_on_gpu(form: str, dtype: torch.dtype, tolerance: float, tokens: int, **options) -> None:
    """Outputs and gradients of the kernels against the chunked form in float64, from the same rounded inputs."""
    from surgery.kernels.bayesian.triton import bayesian

    low = on_gpu(cast(problem(form, tokens, **options), dtype))
    exact = Problem(*(None if x is None else x.double() for x in low))
    weights = weights_for(exact)
    weights = weights[0].to(dtype).double(), weights[1].float().double()
    expected = gradients(chunked, exact, form, weights)
    assert_close(gradients(bayesian, low, form, weights), expected, tolerance)


PRECISIONS = pytest.mark.parametrize(
    "dtype, tolerance", ((torch.float32, 1e-4), (torch.bfloat16, 5e-3)), ids=("fp32", "bf16")
)


@pytest.mark.gpu
@PRECISIONS
@pytest.mark.parametrize("tokens", (1, 63, 1000))
@pytest.mark.parametrize("form", UNIT_GAIN)
def test_gpu_equals_float64_with_gradients(form, tokens, dtype, tolerance, nan_filled):
    compare_on_gpu(form, dtype, tolerance, tokens, batch=2, heads=4, groups=2, key_dim=64, value_dim=64,
                   boundaries=tokens > 8, state=True)  # fmt: skip


# every width, dtype and form compiles kernels of its own, half a minute of one core: not the full table
@pytest.mark.gpu
@PRECISIONS
@pytest.mark.parametrize("key_dim, value_dim, form", (
    (96, 192, "gdn"), (128, 128, "gdn-above-1"), (128, 128, "gdn"), (128, 512, "gdn"), (256, 256, "gdn"),
    (256, 80, "gdn-above-1"), (20, 18, "gdn"),
))  # fmt: skip
def test_gpu_widths(key_dim, value_dim, form, dtype, tolerance, nan_filled):
    compare_on_gpu(form, dtype, tolerance, 300, heads=2, groups=2, key_dim=key_dim, value_dim=value_dim, state=True)


@pytest.mark.gpu
@PRECISIONS
@pytest.mark.parametrize("options", [
    {"near": True}, {"near": True, "decay": 0.999}, {"decay": 0.999}, {"decay": math.exp(-20)}, {"rho": 0.0},
    {"rho": 0.0, "noise": 1.0}, {"noise": 1e-4}, {"noise": 1e2}, {"noise": 1e2, "decay": 0.999, "near": True},
], ids=str)  # fmt: skip
@pytest.mark.parametrize("form", ("gdn", "mamba2"))
def test_gpu_hard_inputs(form, options, dtype, tolerance):
    compare_on_gpu(form, dtype, tolerance, 1000, heads=2, key_dim=64, value_dim=64, **options)


@pytest.mark.gpu
@PRECISIONS
def test_gpu_host_of_the_additive_form(dtype, tolerance):
    compare_on_gpu("mamba2", dtype, tolerance, 200, key_dim=64, value_dim=64, rate=0.0, noise=1.0, rho=0.0)


@pytest.mark.gpu
@PRECISIONS
def test_gpu_long_sequence(dtype, tolerance):
    compare_on_gpu("gdn", dtype, tolerance, 32768, heads=1, key_dim=64, value_dim=64, decay=0.999)


@pytest.mark.gpu
def test_gpu_products_ignore_torchs_switches():
    from surgery.kernels.bayesian.triton import bayesian

    single = on_gpu(cast(problem("gdn", 300, key_dim=64, value_dim=64), torch.float32))
    weights = weights_for(single)
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("highest")
        expected = gradients(bayesian, single, "gdn", weights)
        torch.set_float32_matmul_precision("high")
        found = gradients(bayesian, single, "gdn", weights)
    finally:
        torch.set_float32_matmul_precision(before)
    # to the bit, so equal from run to run as well
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


@pytest.mark.gpu
def test_gpu_segments_change_nothing(monkeypatch):
    """On two streams, again and again, with the memory that one call leaves used by the next."""
    from surgery.kernels.bayesian import triton_streams
    from surgery.kernels.bayesian.triton import bayesian

    kept = on_gpu(cast(problem("gdn", 2000, batch=2, heads=8, groups=8, key_dim=64, value_dim=64), torch.bfloat16))
    with torch.no_grad():
        monkeypatch.setattr(triton_streams, "SEGMENTS", 1)
        whole = call(bayesian, kept, "gdn")
        monkeypatch.setattr(triton_streams, "SEGMENTS", 4)
        for _ in range(20):
            parts = call(bayesian, kept, "gdn")
            assert all(torch.equal(one, other) for one, other in zip(parts, whole, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("noise", ("restoring", 1.0))
@pytest.mark.parametrize("near", (False, True), ids=("random", "near-parallel"))
def test_gpu_covariance_stays_positive_semidefinite(noise, near):
    """A million steps, the covariance at every fourth boundary of chunks, gains never negative."""
    state = None
    for _ in range(16):
        part = problem("gdn", 65536, heads=1, key_dim=64, value_dim=16, near=near, decay=0.9999, noise=noise)
        o, state, gains, covariances = run_and_keep(part._replace(p0=torch.ones(1)), state)
        assert torch.isfinite(o).all()
        assert (gains >= 0).all()
        values = torch.linalg.eigvalsh(covariances[0, 0, 4:-2:4].double())
        assert (values[:, 0] >= -1e-6 * values[:, -1]).all()


@pytest.mark.gpu
@pytest.mark.parametrize("noise", ("restoring", 1.0))
def test_gpu_where_the_problem_is_ill_posed(noise):
    """One key 4096 times and no decay: finite, no negative gain; the errors are printed beside the sequential rule's
    in float32, since no float32 can do well there."""
    whole = problem("gdn", 4096, heads=1, key_dim=64, value_dim=64, decay=1.0, noise=noise)
    whole = whole._replace(k=whole.k[:, :1].expand_as(whole.k).contiguous())
    single = on_gpu(cast(whole, torch.float32))
    exact, _ = call(chunked, Problem(*(None if x is None else x.double() for x in single)), "gdn")
    sequential, _ = call(reference, single, "gdn")
    o, state, gains, _ = run_and_keep(whole, None)
    assert torch.isfinite(o).all()
    assert torch.isfinite(state).all()
    assert (gains >= 0).all()
    errors = [((x.double() - exact).norm() / exact.norm()).item() for x in (o, sequential)]
    print(f"noise {noise}: kernels {errors[0]:.1e}, sequential in float32 {errors[1]:.1e}")


def run_and_keep(problem: Problem, state: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """o, the state, the gains [B, H, N 64] and the covariances between chunks [B, H, N + 3, K, K] (N + 1 of them)."""
    from surgery.kernels.bayesian.reference import initial_state

    low = on_gpu(cast(problem, torch.float32))
    start = initial_state(low.v, low.k.shape[-1], state, low.p0, torch.float32)
    o, after, _, gains, covariances, *_ = torch.ops.surgery.bayesian(*low[:11], *start, True, True)
    return o, after, gains, covariances


@pytest.mark.gpu
@PRECISIONS
def test_gpu_without_retention_is_the_delta_rule(dtype, tolerance):
    from surgery.kernels.bayesian.triton import bayesian
    from surgery.kernels.delta.chunked import delta

    whole = problem("gdn", 1000, heads=2, key_dim=128, value_dim=128, rho=0.0, noise=1.0)
    low = on_gpu(cast(whole, dtype))
    square = low.k.float().square().sum(-1)
    eta = torch.rand_like(low.decay).clamp(min=0.02)
    low = low._replace(observation_noise=1 / eta - square)
    exact = (x.double() for x in (low.q, low.k, low.v, low.decay.log(), eta))
    for found, value in zip(call(bayesian, low, "gdn"), delta(*exact), strict=True):
        assert (found[..., :128].double() - value).norm() <= tolerance * value.norm()


@pytest.mark.gpu
def test_gpu_compiled_and_checkpointed():
    from surgery.kernels.bayesian.triton import bayesian

    low = on_gpu(cast(problem("gdn", 300, heads=2, key_dim=64, value_dim=64), torch.bfloat16))
    weights = weights_for(low)
    expected = gradients(bayesian, low, "gdn", weights)

    def checkpointed(*arguments, **options):
        return torch.utils.checkpoint.checkpoint(
            lambda *tensors: bayesian(*tensors, **options), *arguments, use_reentrant=False
        )

    for name, value in gradients(checkpointed, low, "gdn", weights).items():
        assert torch.equal(value, expected[name]), name
    torch.compiler.reset()
    # sums around the operators may go in another order
    compiled = gradients(torch.compile(bayesian, fullgraph=True), low, "gdn", weights)
    assert_close(compiled, {name: value.double() for name, value in expected.items()}, 1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("key_dim, value_dim", ((64, 64), (96, 192), (128, 128), (256, 256), (128, 512)))
def test_gpu_step(key_dim, value_dim, nan_filled):
    from surgery.kernels.bayesian.triton import bayesian_step

    exact = problem("gdn-above-1", 1, batch=3, heads=4, groups=2, key_dim=key_dim, value_dim=value_dim, state=True)
    expected = call(reference, exact, "gdn-above-1")
    single = on_gpu(cast(exact, torch.float32))
    o = bayesian_step(*single[:11], single.state)
    for found, value in zip((o, single.state), expected, strict=True):
        assert (found.double().cpu() - value).norm() <= 1e-5 * value.norm()


@pytest.mark.gpu
def test_gpu_peak_memory():
    """Forward and backward take at most 2.5 times what the gated delta rule's public kernel takes, 1044 MiB."""
    from surgery.kernels.bayesian.triton import bayesian

    low = on_gpu(cast(problem("gdn", 512, batch=4, heads=16, groups=16, key_dim=96, value_dim=192), torch.bfloat16))
    low = Problem(*(x if x is None or x.dim() < 3 else x.repeat(1, 8, *[1] * (x.dim() - 2)) for x in low))
    leaves = Problem(*(None if x is None else x.detach().requires_grad_() for x in low))
    weight = torch.randn_like(low.v)
    wanted = [x for x in leaves if x is not None]

    def both():
        return torch.autograd.grad(call(bayesian, leaves, "gdn")[0], wanted, weight, allow_unused=True)

    both()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    both()
    assert torch.cuda.max_memory_allocated() - before <= 2.5 * 1044 * 2**20
