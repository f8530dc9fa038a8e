"""Keys by which transformers would fetch code or kernels are left out, with a line that says so."""

from __future__ import annotations

import logging

import pytest

from surgery.checkpoint.reading import open_checkpoint
from surgery.hosts import adapter_for, load_model

KEYS = [
    ("attn_implementation", "someone/kernel"),
    ("_attn_implementation", "someone/kernel:fn"),
    ("_attn_implementation_internal", "someone/kernel@main"),
    ("attn_implementation", "flash_attention_2"),
    ("attn_implementation", {"": "sdpa", "text_config": "someone/kernel"}),
    ("attn_implementation", ["someone/kernel"]),
    ("experts_implementation", "someone/kernel"),
    ("use_kernels", True),
    ("kernel_config", {"kernel_mapping": {"RMSNorm": "someone/kernel:RMSNorm"}}),
    ("allow_all_kernels", True),
    ("custom_generate", "someone/generate"),
    ("transformers_weights", "other.safetensors"),
]


@pytest.mark.parametrize(("key", "value"), KEYS, ids=[f"{key}={value}" for key, value in KEYS])
@pytest.mark.parametrize("inside", [False, True])
def test_a_key_that_fetches(key, value, inside, edit, base, caplog):
    edit(**({"text_config": {key: value}} if inside else {key: value}))
    with caplog.at_level(logging.WARNING, logger="surgery"):
        config = open_checkpoint(base).config
        open_checkpoint(base)
    assert key not in config and key not in config.get("text_config", {})
    said = [record.getMessage() for record in caplog.records if record.name == "surgery"]
    assert len(said) == 1  # however often the file is read
    assert "config.json" in said[0] and key in said[0] and "left out" in said[0]
    # nor does it come into a checkpoint that is written from this one
    assert key not in adapter_for(config).surgery_config(config, {"layers": [0]})


def test_own_attention_is_kept(edit, base, caplog):
    edit(attn_implementation="eager")
    with caplog.at_level(logging.WARNING, logger="surgery"):
        assert open_checkpoint(base).config["attn_implementation"] == "eager"
    assert not caplog.records


def test_a_model_is_built_with_none_of_them(edit, base):
    edit(**dict(KEYS[:1]), kernel_config={"a": "someone/kernel"}, auto_map={"AutoModelForCausalLM": "evil.Evil"})
    (base / "evil.py").write_text("raise SystemExit('run')")
    config = load_model(base).config
    assert "someone" not in str(config.to_dict()) and "evil" not in str(config.to_dict())
    assert config._attn_implementation in (None, "eager", "sdpa")


def test_code_of_a_model_is_not_run_and_said(edit, base, caplog):
    edit(auto_map={"AutoModelForCausalLM": "evil.Evil", "AutoConfig": "evil.Evil"})
    with caplog.at_level(logging.WARNING, logger="surgery"):
        config = open_checkpoint(base).config
    assert "auto_map names code" in caplog.text and "not run" in caplog.text
    adapter = adapter_for(config)
    upgraded = adapter.surgery_config(config, {"layers": [0]})
    assert "auto_map" not in upgraded
    assert adapter.base_config(upgraded)["auto_map"] == config["auto_map"]  # a reverted model is the base again


def test_code_of_an_export_is_not_run(edit, base, tmp_path):
    """A directory that says it is an export, with code that an attacker wrote: read as any other checkpoint is."""
    config = open_checkpoint(base).config
    adapter = adapter_for(config)
    code = {"AutoConfig": "surgery_models_mamba2.C", "AutoModelForCausalLM": "surgery_models_mamba2.M"}
    edit(**adapter.surgery_config(config, {}), auto_map=code)
    (base / "surgery_models_mamba2.py").write_text(f"open({str(tmp_path / 'run')!r}, 'w')\nraise SystemExit('run')")
    assert type(load_model(base)).__module__ == "surgery.models.mamba2"
    from transformers import AutoModelForCausalLM

    # nor by transformers, trusted or not, where the package is imported
    for trusted in (True, False, None):
        model = AutoModelForCausalLM.from_pretrained(base, trust_remote_code=trusted)
        assert type(model).__module__ == "surgery.models.mamba2"
    assert not (tmp_path / "run").exists()
