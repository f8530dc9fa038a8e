"""The Bayesian rule: its chunked forms against the sequential one, its limits, its worked values, its precision."""

from __future__ import annotations

import math
from typing import NamedTuple

import pytest
import torch
from bayesian_problems import UNIT_GAIN
from torch import Tensor

from surgery.kernels.bayesian.chunked import _require_ieee_products
from surgery.kernels.bayesian.chunked import bayesian as chunked
from surgery.kernels.bayesian.reference import bayesian as reference
from surgery.kernels.delta.reference import delta


class Arguments(NamedTuple):
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


def lowered(form: str, tokens: int, *, near=False, rho=1.0, noise="restoring", norm=1.0, width=8, boundaries=False):
    """A random problem in float64, two sequences of four heads on two key heads, as the memory module lowers it.

    Returns the arguments and p0; ``boundaries`` adds a reset and some padding.
    """
    batch, heads, groups = 2, 4, 2
    double = {"dtype": torch.float64}
    k = torch.randn(batch, tokens, groups, width, **double)
    if near:
        k = k[:, :1] + 0.02 * k
    k = norm * torch.nn.functional.normalize(k, dim=-1)
    q, v = torch.randn_like(k), torch.randn(batch, tokens, heads, width - 2, **double)
    decay = torch.exp(-0.2 * torch.rand(batch, tokens, heads, **double) ** 2)
    cov_decay_sqrt = math.sqrt(rho) * decay
    p0 = 0.5 + torch.rand(heads, **double)
    if noise == "restoring":
        process_noise = p0 * (1 - cov_decay_sqrt.square())
    else:
        process_noise = (0.1 + torch.rand(heads, **double)).expand_as(decay)
    padding = torch.zeros(batch, tokens, 1, dtype=torch.bool)
    if boundaries:
        padding[0, : tokens // 4] = True
        reset = torch.zeros(batch, tokens, 1, dtype=torch.bool)
        reset[1, tokens // 2] = reset[0, tokens // 3] = True
        process_noise = torch.where(reset, cov_decay_sqrt.square() * p0 + process_noise, process_noise)
        decay, cov_decay_sqrt = decay.masked_fill(reset, 0.0), cov_decay_sqrt.masked_fill(reset, 0.0)
        decay, cov_decay_sqrt = decay.masked_fill(padding, 1.0), cov_decay_sqrt.masked_fill(padding, 1.0)
        process_noise = process_noise.masked_fill(padding, 0.0)
        k, v = k.masked_fill(padding[..., None], 0.0), v.masked_fill(padding[..., None], 0.0)
    square = k.square().sum(-1).repeat_interleave(heads // groups, dim=-1)
    if form == "mamba2":
        precision = 0.1 + torch.rand(heads, **double)
        erase = shrink = precision.expand_as(decay)
        write, observation_noise = 1 / p0 + precision * square, torch.ones_like(decay)
    else:
        strength = (2 if form == "gdn-above-1" else 1) * torch.rand(batch, tokens, heads, **double).clamp(min=0.02)
        precision = torch.ones(heads, **double)
        observation_noise = torch.maximum((1 / strength - square).clamp(min=0), 1e-2 * p0 - process_noise)
        observation_noise = observation_noise.masked_fill(padding, 1.0)
        write = erase = (strength * square).clamp(min=1)
        shrink = (erase * (2 - erase)).clamp(min=0)
    arguments = (decay, cov_decay_sqrt, process_noise, precision, observation_noise, erase, shrink, write)
    return Arguments(q, k, v, *arguments), p0


def random_state(arguments: Arguments, p0: Tensor) -> Tensor:
    batch, _, heads, value_dim = arguments.v.shape
    width = arguments.k.shape[-1]
    mean = torch.randn(batch, heads, width, value_dim, dtype=torch.float64)
    direction = torch.nn.functional.normalize(torch.randn(batch, heads, width, dtype=torch.float64), dim=-1)
    covariance = torch.eye(width, dtype=torch.float64) - 0.7 * direction[..., None] * direction[..., None, :]
    return torch.cat((mean, p0[:, None, None] * covariance), dim=-1)


def results_and_gradients(rule, arguments: Arguments, p0: Tensor, state: Tensor | None, unit_gain: bool, **options):
    """Outputs, state and the gradients of a fixed mixture of both with respect to every input.

    x and r are one number under unit gain, and their gradients are added.
    """
    inputs = [tensor.detach().clone().requires_grad_() for tensor in (*arguments, p0)]
    if state is not None:
        inputs.append(state.detach().clone().requires_grad_())
    o, after = rule(
        *inputs[:11], initial_covariance=inputs[11], state=inputs[12] if state is not None else None,
        unit_gain=unit_gain, **options,
    )
    weights = [torch.cos(torch.arange(x.numel(), dtype=x.dtype, device=x.device)).view_as(x) for x in (o, after)]
    loss = (o * weights[0]).sum() + (after * weights[1]).sum()
    gradients = dict(zip((*Arguments._fields, "p0", "state"), torch.autograd.grad(loss, inputs, allow_unused=True),
                         strict=False))
    if unit_gain:
        shrink = gradients.pop("shrink")
        if shrink is not None:
            gradients["precision"] = gradients["precision"] + shrink.sum((0, 1))
    if state is not None:
        assert gradients.pop("p0") is None
    return o, after, gradients


def assert_same(got, expected, tolerance: float) -> None:
    names = ["o", "state", *expected[2]]
    for name, a, b in zip(names, (*got[:2], *got[2].values()), (*expected[:2], *expected[2].values()), strict=True):
        error = (a - b).abs().max().item()
        assert error <= tolerance * max(1.0, b.abs().max().item()), f"{name}: {error:.1e}"


@pytest.mark.parametrize("tokens", (1, 63, 200))
@pytest.mark.parametrize("near", (False, True), ids=("random", "near-parallel"))
@pytest.mark.parametrize("form", UNIT_GAIN)
def test_chunked_equals_sequential_with_gradients(form, near, tokens):
    arguments, p0 = lowered(form, tokens, near=near, boundaries=tokens > 8)
    for state in (None, random_state(arguments, p0)):
        expected = results_and_gradients(reference, arguments, p0, state, UNIT_GAIN[form])
        assert_same(results_and_gradients(chunked, arguments, p0, state, UNIT_GAIN[form]), expected, 1e-10)


@pytest.mark.parametrize("noise", ("restoring", "constant"))
@pytest.mark.parametrize("rho", (0.0, 0.6))
@pytest.mark.parametrize("form", UNIT_GAIN)
def test_chunked_equals_sequential_for_other_noises(form, rho, noise):
    arguments, p0 = lowered(form, 75, rho=rho, noise=noise)
    expected = results_and_gradients(reference, arguments, p0, None, UNIT_GAIN[form])
    assert_same(results_and_gradients(chunked, arguments, p0, None, UNIT_GAIN[form]), expected, 1e-10)


@pytest.mark.parametrize("tokens", (1, 45))
@pytest.mark.parametrize("form", UNIT_GAIN)
def test_the_reads_variance_is_that_of_the_covariance_after_each_write(form, tokens):
    """Against the states of the sequential form; the chunked one with its gradients."""
    arguments, p0 = lowered(form, tokens, boundaries=tokens > 8)
    state = random_state(arguments, p0)
    options = {"initial_covariance": p0, "unit_gain": UNIT_GAIN[form]}
    o, variance, after = reference(*arguments, state=state, **options, return_variance=True)
    plain = reference(*arguments, state=state, **options)
    assert o.equal(plain[0]) and after.equal(plain[1]) and variance.shape == (2, tokens, 4)
    carried = state
    for t in range(tokens):
        one = Arguments(*(x if x.ndim == 1 else x[:, t : t + 1] for x in arguments))
        _, carried = reference(*one, state=carried, **options)
        query = one.q[:, 0].repeat_interleave(2, dim=1)
        expected = torch.einsum("bhk,bhkl,bhl->bh", query, carried[..., 6:], query)
        torch.testing.assert_close(variance[:, t], expected, rtol=1e-12, atol=1e-12)

    def gradients(rule, **more):
        leaves = [x.detach().clone().requires_grad_() for x in (*arguments, state)]
        found = rule(*leaves[:-1], state=leaves[-1], **options, return_variance=True, **more)[1]
        weight = torch.cos(torch.arange(found.numel(), dtype=found.dtype)).view_as(found)
        got = torch.autograd.grad((weight * found).sum(), leaves, allow_unused=True)
        fields = dict(zip((*Arguments._fields, "state"), got, strict=True))
        shrink = fields.pop("shrink")
        if UNIT_GAIN[form] and shrink is not None:
            fields["precision"] = fields["precision"] + shrink.sum((0, 1))
        elif not UNIT_GAIN[form]:
            fields["shrink"] = shrink
        return found, {name: x for name, x in fields.items() if x is not None}

    expected, wanted = gradients(reference)
    for chunk_size in (4, 32):
        found, got = gradients(chunked, chunk_size=chunk_size)
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
        assert got.keys() <= wanted.keys()
        for name, gradient in wanted.items():
            torch.testing.assert_close(got.get(name, torch.zeros_like(gradient)), gradient, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("chunk_size", (1, 4, 16, 64, 128))
def test_every_chunk_size_and_both_factorisations_agree(chunk_size):
    arguments, p0 = lowered("gdn", 75, boundaries=True)
    expected = reference(*arguments, initial_covariance=p0, unit_gain=True)
    for unit_gain in (True, False):
        got = chunked(*arguments, initial_covariance=p0, unit_gain=unit_gain, chunk_size=chunk_size)
        for a, b in zip(got, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("rule", (reference, chunked), ids=("reference", "chunked"))
@pytest.mark.parametrize("norm", (0.5, 1.0, 1.3))
@pytest.mark.parametrize("form", ("gdn", "gdn-above-1"))
def test_without_retention_it_is_the_delta_rule(form, norm, rule):
    """P = I at every token: the step is eta whatever the key's norm, above 1 as well."""
    arguments, _ = lowered(form, 70, rho=0.0, norm=norm)
    square = arguments.k.square().sum(-1).repeat_interleave(2, dim=-1)
    strength = (2 if form == "gdn-above-1" else 1) * torch.rand_like(square)
    omega = (strength * square).clamp(min=1)
    one = torch.ones_like(square)
    o, state = rule(
        *arguments[:4], 0 * one, one, torch.ones(4, dtype=torch.float64), (1 / strength - square).clamp(min=0),
        omega, (omega * (2 - omega)).clamp(min=0), omega, initial_covariance=torch.ones(4, dtype=torch.float64),
        unit_gain=False,
    )
    expected, memory = delta(*arguments[:3], arguments.decay.log(), strength)
    torch.testing.assert_close(o, expected, rtol=0, atol=1e-12 * max(1, expected.abs().max().item()))
    torch.testing.assert_close(state[..., :6], memory, rtol=0, atol=1e-12 * max(1, memory.abs().max().item()))


def test_gradients_stay_finite_where_the_covariance_is_forgotten_at_once():
    arguments, p0 = lowered("gdn", 40, rho=0.0, boundaries=True)
    assert bool((arguments.cov_decay_sqrt == 0).any()) and bool((arguments.decay == 0).any())
    for unit_gain in (True, False):
        _, _, gradients = results_and_gradients(chunked, arguments, p0, None, unit_gain)
        for name, gradient in gradients.items():
            assert torch.isfinite(gradient).all(), name


@pytest.mark.parametrize("form", UNIT_GAIN)
def test_state_carried_across_calls(form):
    arguments, p0 = lowered(form, 90, boundaries=True)
    cut, options = 41, {"initial_covariance": p0, "unit_gain": UNIT_GAIN[form]}
    whole, expected = chunked(*arguments, **options)
    parts, state = [], None
    for span, rule in ((slice(0, cut), chunked), (slice(cut, cut + 1), reference), (slice(cut + 1, None), chunked)):
        piece = [x if x.dim() == 1 else x[:, span] for x in arguments]
        o, state = rule(*piece, state=state, **options)
        parts.append(o)
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(state, expected, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("form", UNIT_GAIN)
def test_no_output_depends_on_a_later_token(form):
    arguments, p0 = lowered(form, 100)
    t = 57
    disturbed = Arguments(*(x.clone() for x in arguments))
    for name in ("q", "k", "v", "decay", "process_noise", "observation_noise", "write"):
        getattr(disturbed, name)[:, t] *= 0.7
    before, _ = chunked(*arguments, initial_covariance=p0, unit_gain=UNIT_GAIN[form])
    after, _ = chunked(*disturbed, initial_covariance=p0, unit_gain=UNIT_GAIN[form])
    torch.testing.assert_close(after[:, :t], before[:, :t], rtol=0, atol=1e-13)
    assert (after[:, t] - before[:, t]).abs().max() > 1e-6


def repeated_key_problem(tokens: int, decay: float, noise: str, dtype: torch.dtype):
    """One key, nearly repeated, at restoring or unit noise, with the floor of the observation noise."""
    direction, variation = torch.randn(1, 1, 1, 64), torch.randn(1, tokens, 1, 64)
    k = torch.nn.functional.normalize(direction + 0.01 * variation, dim=-1).double()
    a = torch.full((1, tokens, 1), decay, dtype=torch.float64)
    one = torch.ones_like(a)
    n = 1 - a.square() if noise == "restoring" else one
    y = torch.maximum(1 / torch.sigmoid(2 * torch.randn_like(a)) - 1, 1e-4 - n)
    arguments = Arguments(k, k, torch.randn(1, tokens, 1, 16).double(), a, a, n, torch.ones(1), y, one, one, one)
    return Arguments(*(x.to(dtype) for x in arguments)), torch.ones(1, dtype=dtype)


@pytest.mark.parametrize("noise", ("restoring", "constant"))
@pytest.mark.parametrize("decay", (0.99, 1.0))
def test_covariance_stays_positive_semidefinite_over_a_long_run(decay, noise):
    arguments, p0 = repeated_key_problem(4096, decay, noise, torch.float32)
    for unit_gain in (True, False):
        o, state = chunked(*arguments, initial_covariance=p0, unit_gain=unit_gain)
        assert torch.isfinite(o).all()
        covariance = state[0, 0, :, 16:]
        assert torch.equal(covariance, covariance.mT)
        assert torch.linalg.eigvalsh(covariance.double())[0] > 0


def test_float32_keeps_its_digits_over_a_long_run():
    arguments, p0 = repeated_key_problem(2048, 0.99, "constant", torch.float32)
    o, _ = chunked(*arguments, initial_covariance=p0, unit_gain=True)
    exact, _ = chunked(*(x.double() for x in arguments), initial_covariance=p0.double(), unit_gain=True)
    assert (o - exact).norm() / exact.norm() < 5e-5


@pytest.mark.parametrize("rule", (reference, chunked), ids=("reference", "chunked"))
def test_autocast_changes_nothing(rule):
    arguments, p0 = lowered("gdn", 40)
    arguments = [x.float() for x in arguments]
    o, state = rule(*arguments, initial_covariance=p0.float(), unit_gain=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        lowered_o, lowered_state = rule(*arguments, initial_covariance=p0.float(), unit_gain=True)
    assert torch.equal(o, lowered_o) and torch.equal(state, lowered_state)


def test_bf16_inputs_give_bf16_outputs_and_a_float32_state():
    arguments, p0 = lowered("gdn", 40)
    low = [x.bfloat16() if x.dim() == 4 else x.float() for x in arguments]
    o, state = chunked(*low, initial_covariance=p0.float(), unit_gain=True)
    exact, _ = reference(*(x.double() for x in low), initial_covariance=p0, unit_gain=True)
    assert o.dtype == torch.bfloat16 and state.dtype == torch.float32
    torch.testing.assert_close(o.double(), exact, rtol=2**-8, atol=1e-5)


def test_chunked_is_one_graph_for_torch_compile():
    arguments, p0 = lowered("gdn", 40)

    def call(*tensors):
        return chunked(*tensors, initial_covariance=p0, unit_gain=True)

    compiled = torch.compile(call, fullgraph=True, backend="eager")
    for a, b in zip(compiled(*arguments), call(*arguments), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


def test_tf32_products_on_cuda_are_refused():
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("high")
        with pytest.raises(RuntimeError, match="set_float32_matmul_precision"):
            _require_ieee_products("cuda")
        _require_ieee_products("cpu")
        torch.set_float32_matmul_precision("highest")
        _require_ieee_products("cuda")
    finally:
        torch.set_float32_matmul_precision(before)


@pytest.mark.gpu
@pytest.mark.parametrize("form", UNIT_GAIN)
def test_float32_on_a_gpu_equals_sequential_float64_with_gradients(form):
    arguments, p0 = lowered(form, 200, boundaries=True)
    expected = results_and_gradients(reference, arguments, p0, None, UNIT_GAIN[form])
    on_gpu = Arguments(*(x.float().cuda() for x in arguments))
    got = results_and_gradients(chunked, on_gpu, p0.float().cuda(), None, UNIT_GAIN[form])
    back = (got[0].double().cpu(), got[1].double().cpu(), {name: x.double().cpu() for name, x in got[2].items()})
    assert_same(back, expected, 3e-5)


def test_repeated_unit_key_gain_and_cross_variance():
    """The paper's scalar Riccati map: gain to 0.618, and the variance of a key at overlap 0.92 grows by 0.00768."""
    noise, overlap, tokens, width = 0.05, 0.92, 400, 4
    k = torch.zeros(1, tokens, 1, width, dtype=torch.float64)
    k[..., 0] = 1
    other = torch.zeros(width, dtype=torch.float64)
    other[0], other[1] = overlap, math.sqrt(1 - overlap**2)
    one = torch.ones(1, tokens, 1, dtype=torch.float64)
    arguments = [k, k, one[..., None], one, one, noise * one, one[0, 0], noise * one, one, one, one]
    covariances = []
    state = None
    for span in (slice(0, tokens - 2), slice(tokens - 2, tokens - 1), slice(tokens - 1, tokens)):
        piece = [x if x.dim() == 1 else x[:, span] for x in arguments]
        _, state = chunked(*piece, state=state, initial_covariance=3 * one[0, 0], unit_gain=True)
        covariances.append(state[0, 0, :, 1:])
    before, after = covariances[-2:]
    predicted = before[0, 0] + noise
    limit = (noise + math.sqrt(noise**2 + 4 * noise**2)) / 2
    assert predicted.item() == pytest.approx(limit, abs=1e-12)
    assert (predicted / (noise + predicted)).item() == pytest.approx(0.618, abs=5e-4)
    growth = (other @ after @ other - other @ before @ other).item()
    assert growth == pytest.approx((1 - overlap**2) * noise, abs=1e-12)
    assert growth == pytest.approx(0.00768, abs=5e-9)
