"""Forgetting, importance and loss over a training: what is read is what the layers' own tensors say."""

from __future__ import annotations

import math

import pytest
import torch

from surgery.experiments import device_loop
from surgery.experiments.importance import QUICK, Importance, measure
from surgery.experiments.jobs import ended
from surgery.experiments.mqar import build, memories
from surgery.experiments.trained import Job, run

TINY = {
    "lengths": (8, 16), "vocabulary": 32, "width": 16, "heads": 2, "key_dim": 4, "value_dim": 8, "steps": 12,
    "tokens": 64, "rates": (1e-2,), "tested": 4, "records": 4, "probed": 3,
}  # fmt: skip
JOB = Job("palimpsa", 1e-2, 1)


def test_the_figures_are_of_decays_and_of_the_memory_after_the_sequences():
    settings = Importance(**TINY)
    body, (ids, _) = build(settings, JOB, "cpu"), settings.recall(16).draw(3, torch.Generator().manual_seed(0))
    caught = []
    for memory in memories(body):
        memory.register_forward_hook(lambda module, args, output: caught.append((args[0].log_decay, output[1])))
    found = measure(body, ids)
    assert len(caught) == 2
    logs = [-(1 - decay.double().exp()).log().mean() for decay, _ in caught]
    assert found["log_horizon"] == pytest.approx((sum(logs) / 2).item(), rel=1e-4)
    spreads = []
    for _, state in caught:
        importance = 1 + state[:, 1].flatten(2)
        spreads.append(((importance.amax(-1) - importance.amin(-1)) / importance.amin(-1)).mean())
    assert found["spread"] == pytest.approx((sum(spreads) / 2).item(), rel=1e-4) and found["spread"] > 0
    assert all(len(memory._forward_hooks) == 1 for memory in memories(body))  # its own are gone again


def test_records_span_the_training_and_carry_the_loss_of_their_steps(monkeypatch):
    for module in ("surgery.experiments.device_loop.BLOCK", "surgery.experiments.importance.BLOCK"):
        monkeypatch.setattr(module, 2)
    assert device_loop.BLOCK == 2
    result = ended(Importance(**TINY).training(JOB, "cpu"))
    records, losses = result["records"], result["losses"]
    assert [record["step"] for record in records] == [0, 4, 6, 10, 12] and len(losses) == 6
    assert [record["loss"] for record in records] == [losses[0], losses[1], losses[2], losses[4], losses[5]]
    assert all(math.isfinite(figure) for record in records for figure in record.values())


def test_recording_changes_nothing_of_the_training():
    first, second = (
        ended(Importance(**TINY | {"records": records, "probed": records}).training(JOB, "cpu")) for records in (1, 4)
    )
    assert first["losses"] == second["losses"] and first["test"] == second["test"]


def test_rows_are_the_ends_of_the_training():
    records = [{"step": n, "log_horizon": 1.0 + n, "spread": 2.0 * n, "loss": 5.0 - n} for n in (0, 1, 2)]
    settings = Importance(**TINY)
    rows = settings.rows({"palimpsa": [{"records": records, "test": {"16": 0.5}}] * 2})
    assert [one["mean"] for one in rows] == [1, 3, 0, 4, 5, 3, 0.5]
    assert [one["paper"] for one in rows] == [None, None, None, 40, None, None, None]


def test_a_training_that_is_not_finite_is_drawn_and_shown(monkeypatch, tmp_path):
    loss = device_loop.DeviceLoop._loss
    monkeypatch.setattr(device_loop.DeviceLoop, "_loss", lambda self, *rest: loss(self, *rest) * math.nan)
    settings = Importance(**TINY, seeds=(0,))
    result = run(settings, tmp_path / "results")
    assert any("Not finite" in note for note in result["notes"])
    assert [math.isnan(one["mean"]) for one in result["rows"] if "loss" in one["reading"]] == [True, True]
    settings.plot(result, tmp_path / "figure.svg")
    assert "<svg" in (tmp_path / "figure.svg").read_text()


def test_quick_names_its_sizes():
    assert "600 steps of 1024 tokens" in Importance(**QUICK).sizes()
