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
    assert "auto_map" in json.loads((output / "config.json").read_text())
    again = surgery("export", run, "--output", output)
    refused(again, 2, "not empty", "nothing is overwritten")
    # what was exported can be inspected, measured and exported again
    assert surgery("inspect", output, "--tokens", 300).code == 0
    table = surgery("export", output, "--output", tmp_path / "again", "--dtype", "bfloat16", "--shard-size", "5kB")
    assert table.code == 0, table.err
    assert "fresh process" in table.out and "from float32: KL" in table.out
    # what comes of it again carries the code of its own export, or none where it is swapped back
    assert (tmp_path / "again" / "surgery_models_mamba2.py").is_file()
    assert surgery("revert", output, "--output", tmp_path / "reverted").code == 0
    assert "auto_map" not in json.loads((tmp_path / "reverted" / "config.json").read_text())
    assert not list((tmp_path / "reverted").glob("*.py"))


def test_verify(surgery, run, tmp_path):
    output = tmp_path / "out"
    assert surgery("export", run, "--output", output, "--no-code").code == 0
    assert not list(output.glob("*.py"))
    good = surgery("verify", output)
    assert good.code == 0, good.err
    assert good.out.count("good") == 4 and "equal the fingerprint" in " ".join(good.out.split())
    (output / "README.md").write_text("mine")
    bad = surgery("verify", output, "--json", "-")
    assert bad.code == 1 and "files: README.md holds 4 bytes" in bad.err and "Traceback" not in bad.err
    assert [check["check"] for check in bad.json["checks"] if check["faults"]] == ["files"]
    refused(surgery("verify", tmp_path / "none"), 2, "no such directory")
    refused(surgery("verify", run), 2, "surgery_manifest.json", "surgery export")


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
