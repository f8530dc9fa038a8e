"""``surgery apply``: everything that stops it, and what is left behind then: nothing."""

from __future__ import annotations

import builtins
import errno
import json
import os
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file


def test_nothing_is_overwritten(bases, recipe_for, surgery, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    (out / "mine").write_text("precious")
    surgery("apply", recipe_for(bases["mamba2"]), "--output", out).refused(2, out, "not empty")
    surgery("apply", recipe_for(bases["mamba2"]), "--output", out / "mine").refused(2, "is a file")
    assert [(path.name, path.read_text()) for path in out.iterdir()] == [("mine", "precious")]
    surgery("apply", recipe_for(bases["mamba2"])).refused(2, "--output is missing", "--dry-run")
    surgery("apply", recipe_for(bases["mamba2"]), "--dry-run", "--drift", "some").refused(2, "full, layerwise or skip")
    surgery("apply", recipe_for(bases["mamba2"]), "--dry-run", "--device", "tpu").refused(2, "auto, cpu or cuda")


def wrong_base(family, damage, *words):
    return pytest.param(family, damage, words, id=damage.__name__)


def config_edit(**changes):
    def edit(base):
        path = base / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))

    return edit


def named(name, function):
    function.__name__ = name
    return function


def missing_shard(base):
    sorted(base.glob("*.safetensors"))[1].unlink()


def truncated_shard(base):
    path = sorted(base.glob("*.safetensors"))[-1]
    path.write_bytes(path.read_bytes()[:-10])


def wrong_shape(base):
    tensors = load_file(base / "model.safetensors")
    tensors["backbone.layers.2.mixer.in_proj.weight"] = torch.zeros(5, 6)
    save_file(tensors, base / "model.safetensors")


def wrong_dtype(base):
    tensors = load_file(base / "model.safetensors")
    tensors["backbone.layers.2.mixer.D"] = torch.zeros(4, dtype=torch.int8)
    save_file(tensors, base / "model.safetensors")


def missing_tensor(base):
    tensors = load_file(base / "model.safetensors")
    del tensors["backbone.layers.2.mixer.D"]
    save_file(tensors, base / "model.safetensors")


def unknown_tensor(base):
    tensors = load_file(base / "model.safetensors")
    tensors["backbone.layers.3.mixer.gate.weight"] = torch.zeros(4)
    save_file(tensors, base / "model.safetensors")


def large_tokenizer(base):
    path = base / "tokenizer.json"
    document = json.loads(path.read_text())
    document["added_tokens"][0]["id"] = 260
    path.write_text(json.dumps(document))


def broken_tokenizer(base):
    (base / "tokenizer.json").write_text("{}")


def pickled(base):
    (base / "model.safetensors").rename(base / "pytorch_model.bin")


@pytest.mark.parametrize(("family", "damage", "words"), [
    wrong_base("gated_deltanet", missing_shard, "shards missing", "model-00002-of-"),
    wrong_base("gated_deltanet", truncated_shard, "truncated"),
    wrong_base("mamba2", wrong_shape, "layers.2.mixer.in_proj.weight", "[5, 6]", "implies"),
    wrong_base("mamba2", wrong_dtype, "layers.2.mixer.D", "I8", "unquantised"),
    wrong_base("mamba2", missing_tensor, "layers.2.mixer.D", "missing"),
    wrong_base("mamba2", unknown_tensor, "unexpected tensors", "layers.3.mixer.gate.weight"),
    wrong_base("mamba2", large_tokenizer, "token 260", "vocab_size 260", "another model"),
    wrong_base("mamba2", broken_tokenizer, "tokenizer.json", "not a tokenizer"),
    wrong_base("mamba2", pickled, "pytorch_model.bin", "run code"),
    wrong_base("mamba2", named("unsupported", config_edit(model_type="llama")), "llama", "supported:", "gated_delta"),
    wrong_base("mamba2", named("no_model_type", config_edit(model_type=None)), "model_type", "supported:", "mamba2"),
    wrong_base("mamba2", named("impossible", config_edit(num_heads=5)), "config.json"),
    wrong_base("mamba2", named("swapped_before", config_edit(
        model_type="surgery_mamba2", surgery={"schema": 1, "rule": "palimpsa", "layers": [0]})),
        "layers.0.mixer.memory.", "are missing"),
])  # fmt: skip
def test_wrong_base(family, damage, words, base, recipe_for, surgery, tmp_path):
    directory = base(family)
    damage(directory)
    recipe = recipe_for(directory)
    before = sorted(tmp_path.iterdir())
    for command in (("validate", recipe), ("apply", recipe, "--output", tmp_path / "out")):
        result = surgery(*command)
        result.refused(2, f"{recipe}:1: model: ", *words)
        assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize(("layers", "place", "words"), [
    ("[1, 9]", "2: layers[1]", ["layer 9 does not exist", "0 to 3", "0-3"]),
    ("{top: 5}", "2: layers.top", ["5 layers are asked for", "has 4", "0-3"]),
    ("{random: 7}", "2: layers.random", ["has 4"]),
])  # fmt: skip
def test_wrong_layers(layers, place, words, bases, recipe_for, surgery, tmp_path):
    recipe = recipe_for(bases["mamba2"], layers=layers, more="data: bundled\n")
    for command in (("validate", recipe), ("apply", recipe, "--output", tmp_path / "out")):
        surgery(*command).refused(2, f"{recipe}:{place}: ", *words)
    assert not (tmp_path / "out").exists()


def test_layer_without_a_mixer(bases, recipe_for, surgery, monkeypatch):
    from surgery.hosts.mamba2 import Mamba2Adapter

    monkeypatch.setattr(Mamba2Adapter, "mixer_layers", lambda self, config: [0, 1, 2])
    surgery("validate", recipe_for(bases["mamba2"])).refused(2, "layers[1]: layer 3 holds no mixer", "0-2")


def test_options_that_do_not_fit_the_host(bases, recipe_for, surgery):
    recipe = recipe_for(bases["mamba2"], "bayesian, noise_groups: 3")
    surgery("validate", recipe).refused(2, f"{recipe}:3: memory", "noise_groups", "does not divide")


def test_text_that_is_missing_or_too_short(bases, recipe_for, surgery, tmp_path):
    short = tmp_path / "short.txt"
    short.write_text("too short\n")
    for name, words in ((short, ["10 tokens", "shorter than one context"]), (tmp_path / "none.txt", ["no such file"])):
        recipe = recipe_for(bases["mamba2"], more=f"evaluation: {{text: {name}}}\n")
        surgery("apply", recipe, "--output", tmp_path / "out").refused(2, f"{recipe}:4: evaluation.text: ", *words)
    assert not (tmp_path / "out").exists()
    recipe = recipe_for(bases["mamba2"], more=f"data: {short}\nphases: [{{kind: next-token, tokens: 1M}}]\n")
    surgery("validate", recipe).refused(2, f"{recipe}:4: data: ", "10 tokens", "context of 2048")


def test_no_tokenizer(base, recipe_for, surgery, tmp_path):
    directory = base()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (directory / name).unlink()
    recipe = recipe_for(directory)
    surgery("apply", recipe, "--output", tmp_path / "out").refused(2, "tokenizer")
    assert not (tmp_path / "out").exists()
    assert surgery("apply", recipe, "--output", tmp_path / "out", "--drift", "skip").code == 0


def test_model_that_is_not_there(recipe_for, surgery, tmp_path):
    recipe = recipe_for("nobody/nothing")
    surgery("apply", recipe, "--output", tmp_path / "out").refused(2, f"{recipe}:1: model: nobody/nothing")
    result = surgery("validate", recipe, "--json", "-")
    assert result.code == 0
    assert [check["checked"] for check in result.json["checks"] if check["what"] == "model"] == [False]
    surgery("validate", recipe_for("bundled:nothing")).refused(2, "bundled:nothing")


def test_no_space(bases, recipe_for, surgery, tmp_path, monkeypatch):
    from surgery.checkpoint import staging

    recipe = recipe_for(bases["mamba2"])
    before = sorted(tmp_path.iterdir())
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(staging.shutil, "disk_usage", lambda _: usage._replace(free=10))
    surgery("apply", recipe, "--output", tmp_path / "out").refused(1, "no space left", "needed", "10 B free")
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize("where", ["model-00001", "model-00002", "config.json", "tokenizer.json", "README.md"])
def test_disk_that_fills_while_writing(where, bases, recipe_for, surgery, tmp_path, monkeypatch):
    recipe = recipe_for(bases["mamba2"])
    before = sorted(tmp_path.iterdir())
    real = builtins.open

    def open_(file, mode="r", *args, **kwargs):
        name = os.path.basename(str(file))
        if "partial" in str(file) and name.startswith(where) and set(mode) & set("wx+"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(file))
        return real(file, mode, *args, **kwargs)

    monkeypatch.setattr(builtins, "open", open_)
    monkeypatch.setattr("io.open", open_)  # what pathlib calls
    if where == "model-00002":  # written by safetensors itself
        from safetensors import SafetensorError

        def full(*_, **__):
            raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

        monkeypatch.setattr("safetensors.torch.save_file", full)
    surgery("apply", recipe, "--output", tmp_path / "out").refused(1, "no space left")
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize("error", [RuntimeError("broken"), KeyboardInterrupt()])
@pytest.mark.parametrize("place", ["surgery.operation.write_checkpoint", "surgery.drift.measure_drift",
                                   "surgery.operation.card"])  # fmt: skip
def test_crash_in_the_middle_leaves_nothing(error, place, bases, recipe_for, surgery, tmp_path, monkeypatch):
    recipe = recipe_for(bases["mamba2"])
    before = sorted(tmp_path.iterdir())

    def crash(*_, **__):
        raise error

    monkeypatch.setattr(place, crash)
    result = surgery("apply", recipe, "--output", tmp_path / "out")
    assert result.code == (130 if isinstance(error, KeyboardInterrupt) else 1)
    assert "Traceback" not in result.err
    assert sorted(tmp_path.iterdir()) == before
