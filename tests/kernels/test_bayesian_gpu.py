"""The Bayesian rule's Triton kernels on a GPU, at full size.

The expected values are the chunked form's in float64, where the sequential rule takes too long.
"""

from __future__ import annotations

import math

import pytest
import torch
from bayesian_problems import UNIT_GAIN, Problem, assert_close, call, cast, gradients, problem, weights_for
from torch import Tensor

from surgery.kernels.bayesian.chunked import bayesian as chunked
from surgery.kernels.bayesian.reference import bayesian as reference

pytest.importorskip("triton")


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
    from surgery.kernels.bayesian import triton  # noqa: F401  registers the operator
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
