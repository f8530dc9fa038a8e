"""Models without a tokenizer: where to get one, said alike by every command that needs one."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save_file

PHASE = "phases: [{kind: next-token, tokens: 64, context: 16, batch: 32, learning_rate: 1.0e-3}]\n"
COMMANDS = {
    "inspect": ("inspect", "MODEL", "--tokens", "300"),
    "eval": ("eval", "MODEL", "--tokens", "300", "--recall-lengths", "none"),
    "baseline": ("eval", "OTHER", "--baseline", "MODEL", "--tokens", "300", "--recall-lengths", "none"),
    "validate": ("validate", "RECIPE"),
    "apply": ("apply", "RECIPE", "--output", "OUT"),
    "by N_t": ("apply", "RECIPE", "--dry-run", "--set", "layers={top: 1}", "--set", "inspection.tokens=300"),
    "distill": ("distill", "RECIPE", "--run", "OUT", "--no-evaluation"),
}


@pytest.fixture
def without(bases, tmp_path, write_recipe):
    """Factory: a checkpoint of mamba_ssm's layout without a tokenizer, and the words of a command for it."""
    from surgery.hosts import adapter_for

    def make(vocabulary, pickled=False):
        config = {
            "d_model": 8, "n_layer": 2, "vocab_size": vocabulary, "pad_vocab_size_multiple": 16,
            "tie_embeddings": True, "ssm_cfg": {"layer": "Mamba2", "d_state": 4, "headdim": 4},
        }  # fmt: skip
        directory = tmp_path / "own"
        directory.mkdir()
        tensors = adapter_for(config).build(config).state_dict()
        if pickled:
            torch.save(tensors, directory / "pytorch_model.bin")
        else:
            tied = {name: value.contiguous() for name, value in tensors.items() if not name.startswith("lm_head")}
            save_file(tied, directory / "model.safetensors", metadata={"format": "pt"})
        (directory / "config.json").write_text(json.dumps(config))
        recipe = write_recipe(f"model: {directory}\nlayers: [1]\nmemory: {{rule: palimpsa}}\ndata: bundled\n{PHASE}")
        places = {"MODEL": directory, "OTHER": bases["mamba2"], "RECIPE": recipe, "OUT": tmp_path / "out"}
        return directory, lambda command: [places.get(word, word) for word in COMMANDS[command]]

    return make


@pytest.mark.parametrize("command", COMMANDS)
def test_the_authors_tokenizer_is_named(command, surgery, without):
    directory, words = without(50277)
    result = surgery(*words(command))
    assert result.code == 2 and f"{directory}: no tokenizer can be read there" in result.err, result.err
    first, remedy = result.err.strip().splitlines()[-2:]
    assert "recipe.yaml" not in first or "recipe.yaml:1: model: " in first  # not at the line of some text
    hub = "EleutherAI/gpt-neox-20b"
    files = "tokenizer.json tokenizer_config.json special_tokens_map.json"
    assert remedy == f"  its authors use {hub}'s: hf download {hub} {files} --local-dir {directory}"


@pytest.mark.parametrize("command", ["validate", "eval"])
@pytest.mark.parametrize("pickled", [False, True])
def test_what_the_remedy_says_helps(command, pickled, surgery, without, bases, monkeypatch, tmp_path):
    monkeypatch.setenv("SURGERY_CACHE", str(tmp_path / "cache"))
    directory, words = without(50277, pickled)
    allowed = ["--allow-pickle"] * pickled
    refused = surgery(*words(command), *allowed)
    assert refused.code == 2 and f"--local-dir {directory}" in refused.err, refused.err
    (directory / "tokenizer.json").write_bytes((bases["mamba2"] / "tokenizer.json").read_bytes())
    done = surgery(*words(command), *allowed)
    assert done.code == 0, done.err


def test_nothing_is_guessed_of_another_vocabulary(surgery, without):
    directory, words = without(272)
    result = surgery(*words("eval"))
    result.refused(2, f"{directory}: no tokenizer", "the model was trained with", "no option or recipe key")
    assert "gpt-neox" not in result.err


def test_what_needs_no_tokenizer_runs_without(surgery, without):
    directory, words = without(50277)
    assert surgery("inspect", directory, "--static").code == 0
    assert surgery(*words("apply"), "--drift", "skip").code == 0
