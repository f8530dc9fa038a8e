"""``surgery check``: what it reports, and that a wrong form does not pass."""

from __future__ import annotations

import json

import pytest
import torch

from surgery.kernels import dispatch


@pytest.fixture(autouse=True)
def unforced(monkeypatch):
    monkeypatch.delenv("SURGERY_KERNELS", raising=False)
    monkeypatch.setattr(dispatch, "_FORMS", dict(dispatch._FORMS))


def test_reports_every_rule(surgery):
    result = surgery("check", "--device", "cpu", "--json", "-")
    assert result.code == 0, result.err
    report = json.loads(result.out)
    assert report["versions"]["torch"] == torch.__version__
    assert report["passed"] is True
    assert [rule["rule"] for rule in report["rules"]] == list(dispatch.RULES)
    for rule in report["rules"]:
        assert (rule["form"], rule["decode_form"]) == ("chunked", "reference")
        assert 0 < rule["output_error"] < rule["tolerance"] == 1e-5
        assert 0 < rule["gradient_error"] < rule["tolerance"]


def test_table(surgery, monkeypatch):
    monkeypatch.setenv("SURGERY_KERNELS", "reference")
    result = surgery("check", "--device", "cpu")
    assert result.code == 0, result.err
    lines = {line.split()[0]: line.split() for line in result.out.splitlines()}
    for rule in dispatch.RULES:
        assert lines[rule][1:3] == ["reference", "reference"]
        assert lines[rule][-2:] == ["within", "1e-05"]


class Broken:
    """A form of the delta rule with a fault that a user would not see."""

    def __init__(self, fault):
        self.form, self.fault = dispatch._FORMS["delta", "chunked"], fault

    def __call__(self, q, k, v, log_decay, beta, **options):
        if self.fault == "gradient":
            beta = beta.detach() + 0 * beta
        o, state = self.form(q, k, v, log_decay, beta, **options)
        if self.fault == "nan":
            o = o.masked_fill(o == o.max(), float("nan"))
        return (o, 1.001 * state) if self.fault == "state" else (o, state)


@pytest.mark.parametrize("fault", ["state", "gradient", "nan"])
def test_a_wrong_form_is_warned_of(surgery, monkeypatch, fault):
    monkeypatch.setitem(dispatch._FORMS, ("delta", "chunked"), Broken(fault))
    result = surgery("check", "--device", "cpu", "--json", "-")
    assert result.code == 0
    report = json.loads(result.out)
    assert report["passed"] is False
    assert [rule["rule"] for rule in report["rules"] if not rule["passed"]] == ["delta"]
    assert "warning: out of tolerance on cpu: delta (chunked)" in result.err


def test_strict_fails_on_a_wrong_form_alone(surgery, monkeypatch):
    assert surgery("check", "--device", "cpu", "--strict").code == 0
    monkeypatch.setitem(dispatch._FORMS, ("delta", "chunked"), Broken("state"))
    result = surgery("check", "--device", "cpu", "--strict")
    assert result.code == 1
    assert "out of tolerance on cpu: delta (chunked)" in result.err
    assert "over" in result.out


def test_a_wrong_decode_step_is_found(surgery, monkeypatch):
    sequential = dispatch._FORMS["additive", "reference"]

    def step(q, k, v, log_decay, **options):
        o, state = sequential(q, k, v, log_decay, **options)
        # the float64 run is what forms are measured against
        return (o, state) if v.dtype == torch.float64 else (1.001 * o, state)

    monkeypatch.setitem(dispatch._FORMS, ("additive", "reference"), step)
    result = surgery("check", "--device", "cpu", "--json", "-", "--strict")
    assert result.code == 1
    assert [rule["rule"] for rule in json.loads(result.out)["rules"] if not rule["passed"]] == ["additive"]


def test_an_unknown_form_is_a_usage_error(surgery, monkeypatch):
    monkeypatch.setenv("SURGERY_KERNELS", "fast")
    result = surgery("check", "--device", "cpu")
    assert result.code == 2
    assert "SURGERY_KERNELS=fast: choose one of reference, chunked, triton" in result.err
