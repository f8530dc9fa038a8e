"""The door to the rules: which form runs, how it is forced, and that it is the form asked for."""

from __future__ import annotations

import importlib
import importlib.util
import types

import pytest
import torch

from surgery.kernels import dispatch


@pytest.fixture(autouse=True)
def unforced(monkeypatch):
    monkeypatch.delenv("SURGERY_KERNELS", raising=False)
    monkeypatch.setattr(dispatch, "_FORMS", dict(dispatch._FORMS))
    monkeypatch.setattr(dispatch, "_LIMITS", dict(dispatch._LIMITS))


@pytest.fixture
def kernel(monkeypatch):
    """Gives the delta rule a Triton form for keys of at most 16 entries, which returns zeros."""

    def delta(q, k, v, log_decay, beta, *, state=None, reset=None):
        return torch.zeros_like(v), state

    module = types.ModuleType("surgery.kernels.delta.triton")
    module.delta, module.MAX_KEY, module.MAX_VALUE = delta, 16, 512
    monkeypatch.setitem(dispatch._TRITON_FORMS, "delta", lambda: module)
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *at: name == "triton" or find_spec(name, *at))
    monkeypatch.delitem(dispatch._FORMS, ("delta", "triton"), raising=False)
    return delta


def delta_arguments(tokens: int, key_dim: int = 8, dtype: torch.dtype = torch.float32):
    q, k = torch.randn(2, 1, tokens, 2, key_dim, dtype=dtype)
    return q, k, torch.randn(1, tokens, 2, 4, dtype=dtype), -torch.rand(1, tokens, 2), torch.rand(1, tokens, 2)


@pytest.mark.parametrize("rule", dispatch.RULES)
def test_on_a_cpu(rule):
    """Decode steps are sequential, everything else is chunked, and both forms exist."""
    assert dispatch.picked(rule, "cpu", 1) == "reference"
    assert dispatch.picked(rule, "cpu", 2) == dispatch.picked(rule, torch.device("cpu")) == "chunked"
    for backend in ("reference", "chunked"):
        module = importlib.import_module(f"surgery.kernels.{rule}.{backend}")
        assert dispatch._FORMS[rule, backend] is getattr(module, rule)


def test_kernels_run_on_cuda_once_they_are_listed(kernel, monkeypatch):
    assert dispatch.picked("delta", "cuda") == "chunked"
    monkeypatch.setattr(dispatch, "TRITON_BY_DEFAULT", frozenset({"delta"}))
    assert dispatch.picked("delta", "cuda:1") == dispatch.picked("delta", "cuda", 1) == "triton"
    assert dispatch.picked("delta", "cpu") == "chunked"


@pytest.mark.parametrize("rule", dispatch.RULES)
def test_decoding(monkeypatch, rule):
    """As :func:`chunks.steps` decides for the hosts' rules, whose other forms are torch's."""
    monkeypatch.setattr(dispatch, "TRITON", True)
    assert dispatch.picked_to_decode(rule, "cpu") == "reference"
    assert dispatch.picked_to_decode(rule, "cuda") == "triton"
    monkeypatch.setenv("SURGERY_KERNELS", "chunked")
    assert dispatch.picked_to_decode(rule, "cuda") == "chunked"
    monkeypatch.setattr(dispatch, "TRITON", False)
    monkeypatch.delenv("SURGERY_KERNELS")
    assert dispatch.picked_to_decode(rule, "cuda") == "reference"


@pytest.mark.parametrize("backend", dispatch.BACKENDS)
def test_forced_for_the_process(kernel, monkeypatch, backend):
    monkeypatch.setenv("SURGERY_KERNELS", backend)
    for tokens in (1, 5):
        assert dispatch.picked("delta", "cpu", tokens) == dispatch.picked("delta", "cuda", tokens) == backend


def test_forced_where_there_is_no_such_form(monkeypatch):
    """The other rules of a model go on in their usual forms."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *at: None)
    monkeypatch.setenv("SURGERY_KERNELS", "triton")
    assert dispatch.picked("additive", "cpu", 1) == "reference"
    assert dispatch.picked("additive", "cuda") == "chunked"
    with pytest.raises(ValueError, match="additive rule has no form 'triton'"):
        q = torch.randn(1, 3, 1, 4)
        dispatch.additive(q, q, q, -torch.rand(1, 3, 1), backend="triton")


def test_forced_by_a_wrong_name(monkeypatch):
    monkeypatch.setenv("SURGERY_KERNELS", "trition")
    with pytest.raises(ValueError, match="SURGERY_KERNELS=trition: choose one of reference, chunked, triton"):
        dispatch.picked("delta", "cpu")


def test_what_a_kernel_cannot_take_is_chunked(kernel, monkeypatch):
    monkeypatch.setenv("SURGERY_KERNELS", "triton")
    assert not dispatch.delta(*delta_arguments(5))[0].any()
    for arguments in (delta_arguments(5, key_dim=17), delta_arguments(5, dtype=torch.float64)):
        torch.testing.assert_close(dispatch.delta(*arguments), dispatch.delta(*arguments, backend="chunked"))
    assert not dispatch.delta(*delta_arguments(5, key_dim=17), backend="triton")[0].any()
    monkeypatch.setattr(dispatch, "MAX_HEADS", 1)
    arguments = delta_arguments(5)
    torch.testing.assert_close(dispatch.delta(*arguments), dispatch.delta(*arguments, backend="chunked"))


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")
@pytest.mark.parametrize(("least", "key_dim"), [(228, 256), (163, 256), (99, 64)])
def test_keys_are_as_wide_as_the_least_gpu_takes(monkeypatch, least, key_dim):
    """KB of shared memory of an H200 and, beside it, another, an A100, or a card with less."""
    from surgery.kernels.bayesian import triton

    kilobytes = {0: 228, 1: least}
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(kilobytes))
    monkeypatch.setattr(triton, "shared_memory", lambda device: kilobytes[device.index] * 1024)
    dispatch._FORMS.pop(("bayesian", "triton"), None)
    assert dispatch._has("bayesian", "triton")
    assert dispatch._LIMITS["bayesian"] == (key_dim, triton.MAX_VALUE)


@pytest.mark.parametrize("backend", [None, "reference", "chunked"])
def test_the_form_asked_for_runs(monkeypatch, backend):
    """Every argument of every rule reaches the form that was asked for."""
    seen = {}

    def form(rule, name):
        def run(*args, **options):
            seen[rule] = name, args, options

        return run

    for rule, name in list(dispatch._FORMS):
        dispatch._FORMS[rule, name] = form(rule, name)
    x, state, reset = torch.zeros(1, 3, 1, 2), object(), object()
    gates = [object() for _ in range(8)]
    options = {"state": state, "reset": reset}
    dispatch.additive(x, x, x, 1, write=2, **options, backend=backend)
    dispatch.delta(x, x, x, 1, 2, **options, backend=backend)
    dispatch.palimpsa(x, x, x, 1, 2, 3, **options, return_variance=True, backend=backend)
    covariance = {"state": state, "initial_covariance": object(), "unit_gain": True}
    dispatch.bayesian(x, x, x, *gates, **covariance, backend=backend)
    name = backend or "chunked"
    assert seen == {
        "additive": (name, (x, x, x, 1), {**options, "write": 2}),
        "delta": (name, (x, x, x, 1, 2), options),
        "palimpsa": (name, (x, x, x, 1, 2, 3), {**options, "return_variance": True}),
        "bayesian": (name, (x, x, x, *gates), covariance),
    }


def test_a_kernel_is_found_while_compiling(kernel, monkeypatch):
    monkeypatch.setenv("SURGERY_KERNELS", "triton")
    torch.compiler.reset()
    o, _ = torch.compile(dispatch.delta, backend="eager", fullgraph=True)(*delta_arguments(5))
    assert not o.any()
