"""A model read block by block gives the figures of the whole model; which of the two it is, is decided by memory."""

from __future__ import annotations

import pytest
import torch

from surgery.checkpoint import fitting
from surgery.checkpoint.reading import open_checkpoint
from surgery.evaluation.loading import load, locate
from surgery.inspection.measure import inspect_model


@pytest.mark.parametrize("family", ["mamba2", "gated_deltanet"])
@pytest.mark.parametrize("rule", [None, "palimpsa", "bayesian"])
def test_offload_gives_the_same_figures(make_checkpoint, family, rule):
    swap = None if rule is None else {"rule": rule, "layers": [0, 2]}

    def doses(adapter, model):
        for layer in swap["layers"] if swap else ():
            adapter.mixers(model)[layer].memory.dose.fill_(0.5)

    path = make_checkpoint(family, swap, doses)
    whole = inspect_model(path, tokens=3000, offload=False)
    assert inspect_model(path, tokens=3000, offload=True) == whole
    assert [figure.diagnostics is not None for figure in whole.figures[:3]] == [bool(rule), False, bool(rule)]


def test_what_does_not_fit_is_streamed_and_said(make_checkpoint, monkeypatch):
    path = make_checkpoint()
    lines = []
    for free, streamed in ((1 << 40, False), (1000, True)):
        monkeypatch.setattr(fitting, "available_bytes", lambda _, free=free: free)
        model, _ = load(locate(str(path)), "cpu", offload=None, say=lines.append)
        assert all(parameter.is_meta for parameter in model.parameters()) == streamed
    assert len(lines) == 1 and str(path) in lines[0] and "read from the disk" in lines[0]
    model, _ = load(locate(str(path)), "cpu", offload=False, say=lines.append)
    assert not any(parameter.is_meta for parameter in model.parameters()) and len(lines) == 1


def test_estimates_follow_shapes_and_dtypes(make_checkpoint):
    checkpoint = open_checkpoint(make_checkpoint())
    numel = sum(entry.numel for entry in checkpoint.tensors.values())
    activations = fitting.activation_bytes(checkpoint.config, 100)
    assert activations == 400 * 100 * 32 + 4096 * 260
    assert fitting.model_bytes(checkpoint, 100) == checkpoint_bytes(checkpoint) + activations
    assert fitting.model_bytes(checkpoint, 100, 2) == 2 * numel + activations
    assert fitting.streamed_bytes(checkpoint, 0, 4) < fitting.model_bytes(checkpoint, 0, 4)
    nested = {"text_config": {"hidden_size": 7, "vocab_size": 11}, "vocab_size": None}
    assert fitting.activation_bytes(nested, 3) == 400 * 3 * 7 + 4096 * 11


def checkpoint_bytes(checkpoint):
    return sum(entry.nbytes for entry in checkpoint.tensors.values())


def test_a_control_groups_limit_counts(tmp_path, monkeypatch):
    import psutil

    machine = fitting.available_bytes("cpu")
    assert 0 < machine <= psutil.virtual_memory().total
    (tmp_path / "memory.max").write_text("5000000\n")
    (tmp_path / "memory.current").write_text("4000000\n")
    (tmp_path / "memory.stat").write_text("anon 1\ninactive_file 300000\n")
    monkeypatch.setattr(fitting, "CONTROL_GROUP", tmp_path)
    assert fitting.available_bytes("cpu") == 1_300_000
    (tmp_path / "memory.max").write_text("max\n")
    assert fitting.available_bytes("cpu") > 1_300_000


@pytest.mark.parametrize(("gpus", "where"), [((100,), "streamed"), ((100, 10**12), "spread"), ((10**12,), "whole")])
def test_gpus_together(make_checkpoint, monkeypatch, gpus, where):
    checkpoint = open_checkpoint(make_checkpoint())
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(gpus))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda number=0: (gpus[number], 10**12))
    found, why = fitting.placement(checkpoint, "cuda", None, 2048)
    assert found == where and (why == "") == (where == "whole")
    assert where != "spread" or "2 GPUs" in why
