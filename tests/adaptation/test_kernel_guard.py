"""Training never starts with a kernel that computes something else on this device."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from surgery import kernel_check
from surgery.adaptation.run import check_kernels
from surgery.errors import JobError
from surgery.kernels import dispatch


def test_a_faulty_kernel_stops_the_run_before_its_first_step(monkeypatch):
    sound = kernel_check.check("palimpsa", "cpu")
    assert sound.passed
    found = sound
    monkeypatch.setattr(dispatch, "picked", lambda rule, device, tokens=None: "triton")
    bad, broken, checked = "", "", []

    def check(rule, device, dtype, sizes):
        checked.append((rule, dtype, sizes.key_dim, sizes.value_dim))
        if rule == broken:
            raise RuntimeError("CUDA error: an illegal memory access was encountered\nmore of it")
        return dataclasses.replace(found, rule=rule, gradient_error=0.3 if rule == bad else 0.0)

    monkeypatch.setattr(kernel_check, "check", check)
    widths = {(48, 96), (16, 24)}
    check_kernels("palimpsa", "cuda", widths)
    hosts = [(rule, torch.bfloat16, *pair) for rule in ("additive", "delta") for pair in sorted(widths)]
    own = [("palimpsa", dtype, *pair) for dtype in (torch.float32, torch.bfloat16) for pair in sorted(widths)]
    assert checked == own + hosts
    checked.clear()
    check_kernels("host", "cuda", widths)  # no rule of its own
    assert checked == hosts
    for bad in ("palimpsa", "delta"):
        with pytest.raises(JobError, match=rf"{bad}.*keys of 16.*3.0e-01(.|\n)*SURGERY_KERNELS=chunked"):
            check_kernels("palimpsa", "cuda", widths)
    bad, broken = "", "additive"
    with pytest.raises(JobError, match=r"additive.*keys of 16.*illegal memory access.*\n  set SURGERY_KERNELS=chunked"):
        check_kernels("palimpsa", "cuda", widths)


@pytest.mark.parametrize("rule", dispatch.RULES)
def test_rules_are_checked_at_a_model_s_widths(rule, monkeypatch):
    """The forms of this device, at widths that no other test has compiled."""
    seen = []
    original = getattr(dispatch, rule)

    def watched(q, k, v, *args, **options):
        seen.append((k.shape[-1], v.shape[-1]))
        return original(q, k, v, *args, **options)

    monkeypatch.setattr(dispatch, rule, watched)
    assert kernel_check.check(rule, "cpu", sizes=kernel_check.Sizes.of_width(20, 36)).passed
    assert set(seen) == {(20, 36)}


@pytest.mark.parametrize("rule", ["additive", "delta"])
def test_half_precision_inputs_of_the_hosts_rules(rule):
    """Their error is that of rounding, which the check sees; a wrong kernel's would be far above the tolerance."""
    found = kernel_check.check(rule, "cpu", torch.bfloat16)
    assert found.passed and found.tolerance == kernel_check.HALF_TOLERANCE
    assert found.output_error > 1e-4


def test_torch_forms_are_not_checked_again(monkeypatch):
    monkeypatch.setattr(kernel_check, "check", lambda *_: pytest.fail("checked"))
    check_kernels("bayesian", "cpu", {(16, 24)})


def test_triton_forms_that_no_gpu_has_passed_are_asked_for(monkeypatch):
    monkeypatch.delenv("SURGERY_KERNELS", raising=False)
    monkeypatch.setattr(dispatch, "TRITON_BY_DEFAULT", frozenset({"palimpsa"}))
    assert dispatch.picked("bayesian", "cuda") == "chunked"
