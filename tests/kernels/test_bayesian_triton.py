"""The Bayesian rule's Triton kernels in Triton's interpreter, on small shapes, without a GPU; on one see
``test_bayesian_gpu.py``. The expected values are the sequential rule's in float64."""

from __future__ import annotations

import pytest
import torch
from bayesian_problems import UNIT_GAIN, Problem, assert_close, call, cast, gradients, problem, weights_for

from surgery.kernels.bayesian.reference import bayesian as reference

pytest.importorskip("triton")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# on a GPU the kernels are compiled, and what is tested in the interpreter would be tested twice
interpreted = pytest.mark.skipif(DEVICE == "cuda", reason="the interpreter's tests; on a GPU run -m gpu")


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
