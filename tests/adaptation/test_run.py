"""A run from the swap to the last phase's model, on tiny random models."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file

from surgery.adaptation.phases import Options
from surgery.adaptation.run import distill
from surgery.hosts import load_model


def weights(directory):
    found = {}
    for shard in sorted(directory.glob("*.safetensors")):
        found |= load_file(shard)
    return found


@pytest.mark.parametrize(
    ("family", "rule"), [("mamba2", "palimpsa"), ("gated_deltanet", "bayesian")]
)
def test_a_run_from_the_swap_to_the_last_model(make_base, make_recipe, phase, tmp_path, family, rule):
    base = make_base(family)
    phases = [phase("hidden"), phase("logits", name="distil"), phase("next-token")]
    recipe = make_recipe(base, phases, memory={"rule": rule})
    run = tmp_path / "run"
    result = distill(recipe, run, options=Options(micro_batch=2), evaluate=False)
    assert [p["status"] for p in result["manifest"]["phases"]] == ["finished"] * 3
    applied, final = weights(run / "applied"), weights(run / "phases" / "03-next-token" / "model")
    assert applied.keys() == final.keys()
    prefixes = ("layers.0.m", "layers.2.m", "layers.0.attn.", "layers.2.attn.")
    for name, tensor in final.items():
        if any(p in name for p in prefixes) and "mlp" not in name and "norm" not in name.split("layers.")[1][2:8]:
            continue
        assert tensor.dtype == applied[name].dtype and torch.equal(tensor, applied[name]), name
    doses = {name: float(tensor) for name, tensor in final.items() if name.endswith("dose")}
    assert len(doses) == 2 and set(doses.values()) == {1.0}
    rows = [json.loads(line) for line in (run / "phases" / "01-hidden" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, 7))
    load_model(run / "phases" / "03-next-token" / "model")
