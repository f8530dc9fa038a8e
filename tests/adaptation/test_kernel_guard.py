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
    bad, checked = "", []

    def check(rule, device, dtype=torch.float32):
        checked.append((rule, dtype))
        return dataclasses.replace(found, rule=rule, gradient_error=0.3 if rule == bad else 0.0)

    monkeypatch.setattr(kernel_check, "check", check)
    check_kernels("palimpsa", "cuda")
    hosts = [("additive", torch.bfloat16), ("delta", torch.bfloat16)]
    assert checked == [("palimpsa", torch.float32), *hosts]
    checked.clear()
    check_kernels("host", "cuda")  # no rule of its own
    assert checked == hosts
    for bad in ("palimpsa", "delta"):
        with pytest.raises(JobError, match=rf"{bad}.*\n?.*3.0e-01(.|\n)*SURGERY_KERNELS=chunked"):
            check_kernels("palimpsa", "cuda")


@pytest.mark.parametrize("rule", ["additive", "delta"])
def test_half_precision_inputs_of_the_hosts_rules(rule):
    """Their error is that of rounding, which the check sees; a wrong kernel's would be far above the tolerance."""
    found = kernel_check.check(rule, "cpu", torch.bfloat16)
    assert found.passed and found.tolerance == kernel_check.HALF_TOLERANCE
    assert found.output_error > 1e-4


def test_torch_forms_are_not_checked_again(monkeypatch):
    monkeypatch.setattr(kernel_check, "check", lambda rule, device: pytest.fail("checked"))
    check_kernels("bayesian", "cpu")


def test_triton_forms_that_no_gpu_has_passed_are_asked_for(monkeypatch):
    monkeypatch.delenv("SURGERY_KERNELS", raising=False)
    monkeypatch.setattr(dispatch, "TRITON_BY_DEFAULT", frozenset({"palimpsa"}))
    assert dispatch.picked("bayesian", "cuda") == "chunked"
