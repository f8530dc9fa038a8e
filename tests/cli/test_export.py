"""``surgery export``: from a recipe to a checkpoint, and what it refuses."""

from __future__ import annotations

import json

import pytest


def refused(result, code, *words):
    assert result.code == code, result.err
    assert "Traceback" not in result.err and not result.out
    for word in words:
        assert word in result.err


@pytest.fixture
def run(surgery, bases, write_recipe, tmp_path):
    """A run without phases: the swap alone, at dose 0."""
    recipe = write_recipe(f"model: {bases['mamba2']}\nlayers: [1]\nmemory: {{rule: palimpsa}}\n# kept\n")
    assert surgery("distill", recipe, "--run", tmp_path / "run").code == 0
    return tmp_path / "run"


def test_export_of_a_run(surgery, run, tmp_path):
    output = tmp_path / "out"
    result = surgery("export", run, "--output", output, "--dtype", "float32", "--json", "-")
    assert result.code == 0, result.err
    done = result.json
    assert done["check"]["bit_exact"] and not done["check"]["cast"]
    assert done["doses"] == {"1": 0.0} and done["rule"] == "palimpsa"
    assert "warning: 1 of 1 swapped layers are at dose 0" in result.err
    assert (output / "surgery_recipe.yaml").read_bytes() == (run / "recipe.yaml").read_bytes()
    assert json.loads((output / "config.json").read_text())["model_type"] == "surgery_mamba2"
    again = surgery("export", run, "--output", output)
    refused(again, 2, "not empty", "nothing is overwritten")
    # what was exported can be inspected, measured and exported again
    assert surgery("inspect", output, "--tokens", 300).code == 0
    table = surgery("export", output, "--output", tmp_path / "again", "--dtype", "bfloat16", "--shard-size", "5kB")
    assert table.code == 0, table.err
    assert "fresh process" in table.out and "from float32: KL" in table.out


def test_refusals(surgery, bases, tmp_path):
    model = bases["mamba2"]
    refused(surgery("export", model), 2, "--output is missing")
    refused(surgery("export", model, "--output", tmp_path / "out"), 2, "nothing to export")
    refused(surgery("export", model, "--output", tmp_path / "out", "--shard-size", "5 potatoes"), 2, "--shard-size")
    refused(surgery("export", model, "--output", tmp_path / "out", "--shard-size", "0"), 2, "--shard-size")
    refused(surgery("export", model, "--output", tmp_path / "out", "--dtype", "fp8"), 2, "--dtype fp8")
    refused(surgery("export", tmp_path / "none", "--output", tmp_path / "out"), 2, "no such directory")
    assert not (tmp_path / "out").exists()


def test_help_has_examples(surgery):
    result = surgery("export", "--help")
    assert result.code == 0 and "surgery export runs/demo-palimpsa --output my-model" in result.out
