"""An own head beside ``tie_word_embeddings: true`` is one thing from apply to export, eval, inspect and revert.

transformers ties two tensors only where the checkpoint holds one of them, or both with the same values; so does every
command, and says it in one line.
"""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, BambaConfig, BambaForCausalLM

from surgery.hosts import adapter_for, load_model, read_config
from surgery.hosts.streaming import load_streamed

BAMBA = BambaConfig(
    vocab_size=260, hidden_size=16, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
    intermediate_size=32, mamba_n_heads=4, mamba_d_head=8, mamba_d_state=8, mamba_n_groups=1, attn_layer_indices=[1],
    tie_word_embeddings=True, pad_token_id=0,
)  # fmt: skip
RULES = {"mamba2": "palimpsa", "gated_deltanet": "bayesian", "bamba": "palimpsa"}
TEXT = "some words that a model reads, and some more of them. "


@pytest.fixture(params=RULES)
def host(request):
    return request.param


@pytest.fixture
def own(host, bases, tmp_path):
    """A base of one file whose configuration ties a head that it holds with other values, and the head."""
    import shutil

    directory = tmp_path / "base"
    shutil.copytree(bases["mamba2"], directory)
    if host == "bamba":
        BambaForCausalLM(BAMBA).save_pretrained(directory)
    elif host == "gated_deltanet":
        model = load_model(bases[host], dtype=torch.float32)
        model.config.tie_word_embeddings = True
        model.save_pretrained(directory)
    tensors = load_file(directory / "model.safetensors")
    embeddings = next(tensor for name, tensor in tensors.items() if "embed" in name)
    tensors["lm_head.weight"] = torch.randn_like(embeddings)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((directory / "config.json").read_text())
    assert config["tie_word_embeddings"] is True
    return directory, tensors["lm_head.weight"]


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text(TEXT * 200)
    return path


def head(directory):
    tensors = {}
    for file in directory.glob("*.safetensors"):
        tensors |= load_file(file)
    return tensors["lm_head.weight"]


def test_every_command_reads_and_keeps_the_own_head(surgery, own, host, recipe_for, text, tmp_path, monkeypatch):
    directory, weight = own
    ids = torch.arange(20)[None] + 40
    if host == "gated_deltanet":  # its own library is not installed; the graft goes through the same from_pretrained
        upstream = load_model(directory, dtype=torch.float32)
    else:
        upstream = AutoModelForCausalLM.from_pretrained(directory).eval()
    with torch.no_grad():
        wanted = upstream(ids).logits
        assert torch.equal(upstream.lm_head.weight, weight)
        torch.testing.assert_close(load_model(directory, dtype=torch.float32)(ids).logits, wanted, rtol=1e-4, atol=1e-4)
        adapter = adapter_for(read_config(directory))
        streamed = load_streamed(adapter, directory, dtype=torch.float32)
        torch.testing.assert_close(streamed(ids).logits, wanted, rtol=1e-4, atol=1e-4)

    says = "is kept as a head of its own"
    recipe = recipe_for(directory, RULES[host], layers="[2]", more=f"evaluation: {{text: {text}}}\n")
    assert says in " ".join(surgery("validate", recipe).out.split())
    applied = surgery("apply", recipe, "--output", tmp_path / "swapped")
    assert applied.code == 0 and (applied.out + applied.err).count(says) == 1
    assert torch.equal(head(tmp_path / "swapped"), weight)
    arguments = ("--text", text, "--tokens", "300", "--recall-lengths", "none")
    found = surgery("eval", tmp_path / "swapped", *arguments, "--baseline", directory, "--json", "-")
    assert found.err.count(says) == 2  # once per model
    entries = found.json
    assert entries["model"]["nll"] == pytest.approx(entries["baseline"]["nll"], rel=1e-5)
    assert says in surgery("inspect", directory, "--text", text, "--tokens", "1k").err

    from surgery.export import verify

    def reload(exported, ids, code):
        return verify.model_logits(AutoModelForCausalLM.from_pretrained(exported), ids)

    monkeypatch.setattr(verify, "reload_logits", reload)  # in this process: a fresh one takes seconds
    exported = surgery("export", tmp_path / "swapped", "--output", tmp_path / "exported", "--dtype", "float32")
    assert exported.code == 0 and exported.err.count(says) == 1, exported.err
    assert torch.equal(head(tmp_path / "exported"), weight)
    reverted = surgery("revert", tmp_path / "exported", "--output", tmp_path / "restored")
    assert reverted.code == 0 and reverted.err.count(says) == 1
    assert torch.equal(head(tmp_path / "restored"), weight)
    assert read_config(tmp_path / "restored")["tie_word_embeddings"] is True


def test_a_head_that_repeats_the_embeddings_is_tied(surgery, own, recipe_for, text, tmp_path):
    directory, _ = own
    tensors = load_file(directory / "model.safetensors")
    tensors["lm_head.weight"] = next(tensor for name, tensor in tensors.items() if "embed" in name).clone()
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    recipe = recipe_for(directory, "host", layers="[2]", more=f"evaluation: {{text: {text}}}\n")
    applied = surgery("apply", recipe, "--output", tmp_path / "swapped")
    assert applied.code == 0 and "head of its own" not in applied.out + applied.err
    model = load_model(directory)
    assert model.lm_head.weight is model.get_input_embeddings().weight
