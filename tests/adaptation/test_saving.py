"""A finished phase's model on disk: a tied tensor that the base holds twice stays one tensor."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from surgery.adaptation.saving import write_model
from surgery.checkpoint.reading import Checkpoint, read_header

TIES = {"lm_head.weight": "embeddings.weight"}


@pytest.fixture
def source(tmp_path):
    def make(head):
        directory = tmp_path / "base"
        directory.mkdir()
        tensors = {"embeddings.weight": torch.ones(4, 3), "lm_head.weight": head, "norm.weight": torch.ones(3)}
        save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
        (directory / "config.json").write_text(json.dumps({"tie_word_embeddings": True}))
        entries = {entry.name: entry for entry in read_header(directory / "model.safetensors")}
        return Checkpoint(directory, {}, ("model.safetensors",), entries, {})

    return make


def test_both_copies_of_a_trained_tied_tensor_are_written(source, tmp_path):
    """Otherwise the head would load as one of its own, with the values from before the training."""
    trained = torch.full((4, 3), 2.5)
    write_model(tmp_path / "model", source(torch.ones(4, 3)), {"embeddings.weight": trained}, ties=TIES)
    written = load_file(tmp_path / "model" / "model.safetensors")
    assert torch.equal(written["lm_head.weight"], trained) and torch.equal(written["embeddings.weight"], trained)
    assert torch.equal(written["norm.weight"], torch.ones(3))


def test_an_own_head_keeps_its_values_and_is_trained_on_its_own(source, tmp_path):
    base = source(torch.zeros(4, 3))
    write_model(tmp_path / "one", base, {"embeddings.weight": torch.full((4, 3), 2.5)}, ties=TIES)
    assert torch.equal(load_file(tmp_path / "one" / "model.safetensors")["lm_head.weight"], torch.zeros(4, 3))
    changed = {name: torch.full((4, 3), value) for name, value in (("embeddings.weight", 2.0), ("lm_head.weight", 3.0))}
    write_model(tmp_path / "two", base, changed, ties=TIES)
    written = load_file(tmp_path / "two" / "model.safetensors")
    assert {name: float(written[name].mean()) for name in changed} == {"embeddings.weight": 2.0, "lm_head.weight": 3.0}
