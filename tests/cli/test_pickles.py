"""``--allow-pickle`` on every command that opens a base."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file

from surgery.hosts import load_model

CONFIG = {
    "d_model": 16, "n_layer": 3, "vocab_size": 257, "rms_norm": True, "residual_in_fp32": True,
    "pad_vocab_size_multiple": 8, "tie_embeddings": True, "ssm_cfg": {"layer": "Mamba2"},
}  # fmt: skip


@pytest.fixture
def pickled(tmp_path, monkeypatch, bases):
    """A base in mamba_ssm's own layout, its weights one pickle."""
    from surgery.hosts import adapter_for

    monkeypatch.setenv("SURGERY_CACHE", str(tmp_path / "cache"))
    config = CONFIG | {"ssm_cfg": {"layer": "Mamba2", "d_state": 4, "headdim": 8}}
    directory = tmp_path / "pickled"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(CONFIG))
    torch.save(adapter_for(config).build(config).state_dict(), directory / "pytorch_model.bin")
    (directory / "tokenizer.json").write_bytes((bases["mamba2"] / "tokenizer.json").read_bytes())
    return directory


@pytest.fixture
def commands(pickled, write_recipe, tmp_path):
    phase = "phases: [{kind: next-token, steps: 1, context: 16, batch: 16, learning_rate: 1.0e-3, trainable: swapped}]"
    recipe = write_recipe(
        f"model: {pickled}\nlayers: [0, 2]\nmemory: {{rule: palimpsa}}\ndata: bundled\n{phase}\n"
    )
    return {
        "validate": ("validate", recipe),
        "apply": ("apply", recipe, "--output", tmp_path / "out"),
        "inspect": ("inspect", pickled, "--tokens", "512", "--json", "-"),
        "static": ("inspect", pickled, "--static", "--json", "-"),
        "eval": ("eval", pickled, "--tokens", "512", "--recall-lengths", "none", "--json", "-"),
        "distill": ("distill", recipe, "--run", tmp_path / "run", "--no-evaluation", "--device", "cpu"),
    }


@pytest.mark.parametrize("name", ["validate", "apply", "inspect", "static", "eval", "distill"])
def test_without_the_flag_nothing_is_read(name, commands, surgery, tmp_path, monkeypatch):
    monkeypatch.setattr(torch, "load", lambda *_, **__: pytest.fail("read"))
    result = surgery(*commands[name])
    assert result.code == 2 and "--allow-pickle" in result.err and "pytorch_model.bin" in result.err
    message = result.err.strip()
    assert message.startswith("error: ") and len(message.splitlines()) == 1
    assert not (tmp_path / "out").exists() and not (tmp_path / "cache").exists()


@pytest.mark.parametrize("name", ["validate", "inspect", "static", "eval"])
def test_with_the_flag_a_base_is_read(name, commands, surgery):
    result = surgery(*commands[name], "--allow-pickle")
    assert result.code == 0, result.err
    if name in ("inspect", "static"):
        assert [layer["layer"] for layer in result.json["layers"]] == [0, 1, 2]
        assert result.json["host"] == "mamba_ssm"


def test_apply_writes_safetensors(commands, surgery, tmp_path, pickled):
    result = surgery(*commands["apply"], "--allow-pickle")
    assert result.code == 0, result.err
    out = tmp_path / "out"
    assert not list(out.glob("*.bin")) and sorted(path.name for path in out.glob("*.safetensors"))
    before = torch.load(pickled / "pytorch_model.bin", weights_only=True)
    after = {name: tensor for file in out.glob("*.safetensors") for name, tensor in load_file(file).items()}
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items() if name != "lm_head.weight")
    config = json.loads((out / "config.json").read_text())
    assert config["model_type"] == "surgery_mamba_ssm" and config["surgery"]["base"] == str(pickled)
    assert load_model(out)(torch.arange(9)[None]).logits.shape == (1, 9, 264)
    again = surgery("inspect", out, "--tokens", "512", "--json", "-")  # no flag: these are no pickles
    assert again.code == 0 and again.json["layers"][0]["rule"] == "palimpsa"


def test_distill_from_a_pickle(commands, surgery, tmp_path):
    result = surgery(*commands["distill"], "--allow-pickle")
    assert result.code == 0, result.err
    model = tmp_path / "run" / "phases" / "01-next-token" / "model"
    assert load_model(model)(torch.arange(9)[None]).logits.isfinite().all()
    manifest = json.loads((tmp_path / "run" / "run.json").read_text())
    assert manifest["revision"] is None and manifest["exact"]
