"""Tiny random models on disk, and the command line run in this process."""

from __future__ import annotations

import json
import os
import shutil
import sys
from dataclasses import dataclass

import pytest
import torch

MAMBA2 = {
    "model_type": "mamba2",
    "num_heads": 4,
    "head_dim": 8,
    "hidden_size": 16,
    "expand": 2,
    "state_size": 8,
    "n_groups": 2,
    "num_hidden_layers": 4,
    "vocab_size": 260,
    "tie_word_embeddings": True,
}
GDN = {
    "model_type": "gated_deltanet",
    "num_heads": 2,
    "num_v_heads": 4,
    "head_dim": 8,
    "expand_v": 1.0,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 4,
    "vocab_size": 260,
    "tie_word_embeddings": False,
}


def byte_tokenizer():
    """A byte-level tokenizer without merges: 256 bytes and an end-of-text token."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end|>"])
    return tokenizer


def save_base(config, directory, dtype=torch.float32, max_shard_size="5GB"):
    """A random model of ``config`` with a tokenizer and generation settings, as a user would have it on disk."""
    from transformers import Mamba2Config, Mamba2ForCausalLM

    from surgery.hosts import adapter_for

    if config["model_type"] == "mamba2":
        model = Mamba2ForCausalLM(Mamba2Config(**{k: v for k, v in config.items() if k != "model_type"}))
    else:
        model = adapter_for(config).build(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("A_log", "dt_bias")):
                continue
            if parameter.ndim > 1:
                parameter.mul_(3)  # a sharper model than a fresh one: differences show in its logits
            parameter.data = parameter.data.to(dtype)
    model.save_pretrained(directory, max_shard_size=max_shard_size)
    byte_tokenizer().save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text('{"tokenizer_class":   "PreTrainedTokenizerFast"}\n')
    (directory / "generation_config.json").write_text('{"max_new_tokens": 7,\n "do_sample": false}')
    (directory / "LICENSE").write_text("anyone may\n")
    return directory


@pytest.fixture(scope="session")
def bases(tmp_path_factory):
    """Directories of tiny random models: mamba2 in one file, gated_deltanet in several."""
    torch.manual_seed(int.from_bytes(os.urandom(4), "little"))
    root = tmp_path_factory.mktemp("bases")
    return {
        "mamba2": save_base(MAMBA2, root / "mamba2"),
        "gated_deltanet": save_base(GDN, root / "gdn", dtype=torch.bfloat16, max_shard_size="20KB"),
    }


@dataclass
class Result:
    """What a command did."""

    code: int
    out: str
    err: str

    @property
    def json(self):
        return json.loads(self.out)

    def refused(self, code, *words):
        """The command ended with ``code`` and one short error that holds ``words``."""
        assert self.code == code, self.err
        assert len(self.err.splitlines()) <= 5, self.err
        assert self.err.startswith("error: "), self.err
        assert "Traceback" not in self.err
        for word in words:
            assert str(word) in self.err, self.err


@pytest.fixture
def surgery(capsys, monkeypatch):
    """Run ``surgery ARGS...`` through its entry point."""
    from surgery.cli import main

    monkeypatch.setenv("COLUMNS", "200")

    def run(*args):
        monkeypatch.setattr(sys, "argv", ["surgery", *map(str, args)])
        capsys.readouterr()
        code = 0
        try:
            main()
        except SystemExit as stop:
            code = stop.code if isinstance(stop.code, int) else 0 if stop.code is None else 1
        out, err = capsys.readouterr()
        return Result(code, out, err)

    return run


@pytest.fixture
def write_recipe(tmp_path):
    """Write a recipe file; returns its path."""

    def write(text, name="recipe.yaml"):
        path = tmp_path / name
        path.write_text(text, encoding="utf-8")
        return path

    return write


@pytest.fixture
def base(bases, tmp_path):
    """A private copy of a base, to be damaged."""

    def copy(family="mamba2"):
        return shutil.copytree(bases[family], tmp_path / "base")

    return copy


@pytest.fixture
def recipe_for(write_recipe):
    def write(model, rule="palimpsa", layers="[1, 3]", more=""):
        return write_recipe(f"model: {model}\nlayers: {layers}\nmemory: {{rule: {rule}}}\n{more}")

    return write
