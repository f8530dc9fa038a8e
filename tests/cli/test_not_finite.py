"""Bases whose weights, activations or losses are not finite: every command names the base, the tensor and the value."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from surgery.hosts import load_model


@pytest.fixture
def spoil(base):
    """A private copy of a base of one file with one value changed."""
    directory = base("mamba2")

    def spoilt(name, value, index=0):
        tensors = load_file(directory / "model.safetensors")
        tensors[name].view(-1)[index] = value
        save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
        return directory

    return spoilt


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("some words that a model reads, and some more of them. " * 200)
    return path


@pytest.mark.parametrize(
    ("name", "value", "shown"),
    [
        ("backbone.norm_f.weight", float("nan"), "nan at [0]"),
        ("backbone.layers.2.mixer.in_proj.weight", 1e30, "1e+30 at [0, 0]"),
        ("backbone.layers.1.mixer.A_log", float("-inf"), "-inf at [0]"),
    ],
)
def test_every_command_names_base_tensor_and_value(surgery, spoil, recipe_for, text, tmp_path, name, value, shown):
    directory = spoil(name, value)
    phases = f"data: {text}\nphases: [{{kind: next-token, tokens: 1k, context: 64, batch: 64}}]\n"
    recipe = recipe_for(directory, more=f"evaluation: {{text: {text}}}\n{phases}")
    out = tmp_path / "out"
    for command in (
        ("inspect", directory, "--text", text, "--tokens", "1k"),
        ("inspect", directory, "--static"),
        ("validate", recipe),
        ("apply", recipe, "--dry-run"),
        ("apply", recipe, "--output", out),
        ("eval", directory, "--text", text, "--recall-lengths", "none"),
    ):
        surgery(*command).refused(2, directory, f"{name} holds {shown}", "download the weights again")
    run = surgery("distill", recipe, "--run", out)
    assert run.code == 2 and f"{name} holds {shown}" in run.err and "Traceback" not in run.err
    assert not (out / "config.json").exists() and not list(tmp_path.glob(".*partial*"))


def test_what_came_after_a_swap_is_named_too_and_a_damaged_memory_can_be_left_out(
    surgery, bases, recipe_for, text, tmp_path
):
    recipe = recipe_for(bases["mamba2"], layers="[1]", more=f"evaluation: {{text: {text}}}\n")
    swapped = tmp_path / "swapped"
    assert surgery("apply", recipe, "--output", swapped, "--drift", "skip").code == 0
    shard = swapped / "model-00002-of-00002.safetensors"
    tensors = load_file(shard)
    name = next(name for name in tensors if name.endswith("b_proj.weight"))
    tensors[name][3, 0] = float("nan")
    save_file(tensors, shard, metadata={"format": "pt"})
    words = (swapped, f"{name} holds nan at [3, 0]")
    exported = surgery("export", swapped, "--output", tmp_path / "exported")
    assert exported.code == 2 and all(str(word) in exported.err for word in words)
    surgery("eval", swapped, "--text", text, "--recall-lengths", "none").refused(2, *words)
    surgery("inspect", swapped, "--static").refused(2, *words)
    assert surgery("revert", swapped, "--output", tmp_path / "restored").code == 0
    shard = swapped / "model-00001-of-00002.safetensors"
    tensors = load_file(shard)
    tensors["backbone.norm_f.weight"][2] = float("inf")
    save_file(tensors, shard, metadata={"format": "pt"})
    surgery("revert", swapped, "--output", tmp_path / "again").refused(2, swapped, "norm_f.weight holds inf at [2]")


def test_a_perplexity_beyond_floats_is_inf_with_a_word(surgery, spoil, recipe_for, text, tmp_path):
    directory = spoil("backbone.norm_f.weight", 5.0e5, index=3)
    why = f"the largest weight of {directory}: backbone.norm_f.weight holds 5e+05 at [3]"
    # logits of a million differ in float32's last digits, so the drift is not the point here
    recipe = recipe_for(directory, more=f"evaluation: {{text: {text}}}\nmax_drift: {{kl: 1.0e+30}}\n")
    applied = surgery("apply", recipe, "--output", tmp_path / "swapped")
    assert applied.code == 0, applied.err
    assert "perplexity, base" in applied.out and " inf" in applied.out and why in applied.out
    assert "more than a float holds" in (tmp_path / "swapped" / "README.md").read_text()
    found = surgery("eval", directory, "--text", text, "--tokens", "300", "--recall-lengths", "none")
    assert found.code == 0 and " inf" in found.out and why in found.err
    report = surgery("eval", directory, "--text", text, "--tokens", "300", "--recall-lengths", "none", "--json", "-")
    assert json.loads(report.out)["model"]["perplexity"] is None


def test_activations_that_overflow_name_their_layer(surgery, spoil, recipe_for, text, tmp_path):
    """Weights below the limit whose products leave float32: the module is named, and the base, not a staging place."""
    directory = spoil("backbone.embeddings.weight", 0.0)
    tensors = load_file(directory / "model.safetensors")
    for name in ("in_proj.weight", "out_proj.weight", "conv1d.weight", "D", "norm.weight"):
        tensors[f"backbone.layers.2.mixer.{name}"].fill_(9.0e5)
    for layer in (2, 3):
        tensors[f"backbone.layers.{layer}.norm.weight"].fill_(9.0e5)
        tensors[f"backbone.layers.{layer}.mixer.conv1d.weight"].fill_(9.0e5)
        tensors[f"backbone.layers.{layer}.mixer.in_proj.weight"].fill_(9.0e5)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    with torch.no_grad():
        assert not load_model(directory, dtype=torch.float32)(torch.arange(64)[None] + 3).logits.isfinite().all()
    recipe = recipe_for(directory, more=f"evaluation: {{text: {text}}}\n")
    for command in (
        ("apply", recipe, "--output", tmp_path / "swapped"),
        ("eval", directory, "--text", text, "--tokens", "300", "--recall-lengths", "none"),
    ):
        result = surgery(*command)
        result.refused(1, directory, "first not finite: the output of backbone.layers.2.")
        assert "partial" not in result.err
