"""The delta rule with a decay for each key channel (Kimi Delta Attention)."""

from __future__ import annotations

import importlib

import pytest
import torch

from surgery.kernels.delta.chunked import delta as chunked
from surgery.kernels.delta.reference import delta as reference

FORMS = pytest.mark.parametrize("form", [reference, chunked], ids=["reference", "chunked"])


@pytest.fixture
def rule(contract):
    """The contract every form keeps, on problems whose decays differ from channel to channel."""

    class ByChannel(contract):
        def problem(self, tokens, decay="mild", **options):
            arguments = super().problem(tokens, decay, **options)
            channels = super().problem(tokens, decay, batch=2, heads=4 * arguments["k"].shape[-1])["log_decay"]
            shape = (*arguments["log_decay"].shape, arguments["k"].shape[-1])
            arguments["log_decay"] = channels.flatten()[: torch.Size(shape).numel()].view(shape)
            return arguments

    return ByChannel("delta", reference)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
@pytest.mark.parametrize("decay", ["mild", "hard", "mixed"])
@pytest.mark.parametrize("tokens", [1, 63, 130])
def test_chunked_equals_sequential(rule, tokens, decay, dtype):
    rule.equals_reference(chunked, rule.problem(tokens, decay), dtype)
    rule.equals_reference(chunked, rule.problem(tokens, decay), dtype, reset=rule.resets(2, tokens))


@FORMS
def test_equal_channels_are_one_decay(contract, form):
    arguments = contract("delta", reference).problem(70)
    repeated = arguments["log_decay"][..., None].expand(*arguments["log_decay"].shape, arguments["k"].shape[-1])
    for a, b in zip(form(**{**arguments, "log_decay": repeated}), form(**arguments), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-11)


@FORMS
def test_a_channel_forgets_alone(form):
    """A key of two channels, one of which forgets at once: half of what was written is left."""
    q = k = torch.tensor([[[[1.0, 1.0]]], [[[0.0, 0.0]]]], dtype=torch.float64).transpose(0, 1)
    v = torch.tensor([[[[6.0]], [[0.0]]]], dtype=torch.float64)
    log_decay = torch.tensor([[[[0.0, 0.0]], [[0.0, -torch.inf]]]], dtype=torch.float64)
    o, memory = form(q, k, v, log_decay, torch.full((1, 2, 1), 0.5, dtype=torch.float64))
    torch.testing.assert_close(memory.flatten(), torch.tensor([3.0, 0.0], dtype=torch.float64))
    assert o[0, 0, 0, 0] == 6.0


@FORMS
def test_contract(rule, form):
    rule.is_kept(form)


def test_compiles(rule):
    rule.compiles(chunked, 70)


@FORMS
def test_flash_linear_attention(rule, form):
    """Outputs and gradients of fla's plain recurrence, which computes in float32."""
    try:
        naive = importlib.import_module("fla.ops.kda.naive").naive_recurrent_kda
    except Exception as error:
        pytest.skip(f"fla cannot be imported: {error}")
    arguments = {name: value.float() for name, value in rule.problem(70).items()}

    def theirs(q, k, v, log_decay, beta, state):
        return naive(q, k, v, log_decay, beta, scale=1.0, initial_state=state, output_final_state=True)

    expected, expected_gradients, weights = rule.gradients(theirs, arguments)
    found, gradients, _ = rule.gradients(form, arguments, weights)
    for a, b in zip((*found, *gradients.values()), (*expected, *expected_gradients.values()), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
