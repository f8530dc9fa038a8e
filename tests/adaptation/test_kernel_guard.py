"""Training never starts with a kernel that computes something else on this device."""

from __future__ import annotations

import dataclasses

import pytest

from surgery import kernel_check
from surgery.adaptation.run import check_kernels
from surgery.errors import JobError
from surgery.kernels import dispatch


def test_a_faulty_kernel_stops_the_run_before_its_first_step(monkeypatch):
    sound = kernel_check.check("palimpsa", "cpu")
    assert sound.passed
    found = sound
    monkeypatch.setattr(dispatch, "picked", lambda rule, device, tokens=None: "triton")
    monkeypatch.setattr(kernel_check, "check", lambda rule, device: found)
    check_kernels("palimpsa", "cuda")
    found = dataclasses.replace(sound, gradient_error=0.3)
    with pytest.raises(JobError, match=r"palimpsa.*3.0e-01(.|\n)*SURGERY_KERNELS=chunked"):
        check_kernels("palimpsa", "cuda")
    check_kernels("host", "cuda")  # no rule of its own


def test_torch_forms_are_not_checked_again(monkeypatch):
    monkeypatch.setattr(kernel_check, "check", lambda rule, device: pytest.fail("checked"))
    check_kernels("bayesian", "cpu")


def test_triton_forms_that_no_gpu_has_passed_are_asked_for(monkeypatch):
    monkeypatch.delenv("SURGERY_KERNELS", raising=False)
    assert dispatch.picked("bayesian", "cuda") == "chunked"
