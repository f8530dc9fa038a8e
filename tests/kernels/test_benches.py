"""The benches from their inputs to their tables, with tiny shapes and without a clock, in Triton's interpreter."""

from __future__ import annotations

import importlib
import json

import pytest
import torch

from surgery.kernels.bench import __main__ as command
from surgery.kernels.bench import timing


@pytest.fixture
def on_a_cpu(monkeypatch):
    ran = []
    monkeypatch.setattr(timing, "DEVICE", "cpu")
    for clock in ("median", "graphed"):
        monkeypatch.setattr(timing, clock, lambda run, milliseconds: ran.append(run()) or 2.0)
    monkeypatch.setattr(timing, "peak", lambda run: ran.append(run()) or 64.0)
    for name, value in {"is_available": True, "synchronize": None}.items():
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
    return ran


@pytest.mark.parametrize("rule", command.BENCHES)
def test_every_shape_is_measured_and_told(on_a_cpu, monkeypatch, tmp_path, capsys, rule):
    bench = importlib.import_module(f"surgery.kernels.bench.{rule}")
    tiny = timing.Shape(1, 3, 2, 1, 16, 16)
    monkeypatch.setattr(bench, "SHAPES", dict.fromkeys(list(bench.SHAPES)[:2], tiny))
    if hasattr(bench, "DECODE"):
        monkeypatch.setattr(bench, "DECODE", tiny._replace(tokens=1))
    monkeypatch.setattr(bench, "_kernels", lambda run: {"one": 1.0}, raising=False)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    path = tmp_path / "figures.json"
    assert command.main([rule, "--dtype", "fp32", "--json", str(path)]) == 0
    figures = json.loads(path.read_text())
    assert list(figures["shapes"]) == list(bench.SHAPES)
    assert all(row["forward_ms"] == 2.0 and row["peak_memory_mib"] == 64.0 for row in figures["shapes"].values())
    told = capsys.readouterr()
    assert all(name in told.out and name in told.err for name in bench.SHAPES)
    outputs = [x for each in on_a_cpu if each is not None for x in each if isinstance(x, torch.Tensor)]
    assert outputs and all(x.isfinite().all() for x in outputs)


def test_both_ways():
    forward, both = timing.both_ways(lambda v: (2 * v, None), {"v": torch.ones(3, requires_grad=True)})
    assert not forward()[0].requires_grad
    (gradient,) = both()
    assert gradient.shape == (3,)
