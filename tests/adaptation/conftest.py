"""Small things that the adaptation tests share."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="session")
def tokenizer():
    """Byte-level, one token a byte, and an end-of-text token."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: number for number, letter in enumerate(["<|end|>", *alphabet])}
    inner = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens(["<|end|>"])
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<|end|>")


MAMBA2 = {
    "model_type": "mamba2",
    "architectures": ["Mamba2ForCausalLM"],
    "num_hidden_layers": 3,
    "hidden_size": 32,
    "expand": 2,
    "num_heads": 4,
    "head_dim": 16,
    "state_size": 8,
    "n_groups": 1,
    "conv_kernel": 4,
    "vocab_size": 260,
    "tie_word_embeddings": True,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": 0,
}
GDN = {
    "model_type": "gated_deltanet",
    "architectures": ["GatedDeltaNetForCausalLM"],
    "num_hidden_layers": 3,
    "hidden_size": 32,
    "num_heads": 2,
    "head_dim": 8,
    "expand_v": 2.0,
    "intermediate_size": 64,
    "vocab_size": 260,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": 0,
}
CONFIGS = {"mamba2": MAMBA2, "gated_deltanet": GDN}


@pytest.fixture
def make_base(tmp_path, tokenizer):
    """(family, **config) -> the directory of a fresh random base, whose memories carry weight in its outputs."""
    import torch

    from surgery.hosts import adapter_for

    def make(family="mamba2", **changes):
        config = {**CONFIGS[family], **changes}
        directory = tmp_path / f"base-{family}"
        adapter = adapter_for(config)
        model = adapter.build(config)
        with torch.no_grad():
            adapter.head(model).weight.normal_(std=0.5)
            for mixer in adapter.mixers(model).values():
                for name, parameter in mixer.named_parameters():
                    if name.endswith("proj.weight") or "conv1d.weight" in name:
                        parameter.copy_(torch.randn_like(parameter) / parameter[0].numel() ** 0.5)
                    elif name == "dt_bias":
                        parameter.uniform_(-1, 1)
        model.save_pretrained(directory)
        tokenizer.save_pretrained(directory)
        return directory

    return make


@pytest.fixture
def text_file(tmp_path):
    """A text of some thousand tokens in several documents, words drawn with uneven frequencies."""
    import random

    draw = random.Random(7)
    words = ["".join(draw.choices("etaoinshrdlu", k=draw.randint(1, 6))) for _ in range(40)]
    weights = [1 / (rank + 1) for rank in range(40)]
    documents = [" ".join(draw.choices(words, weights, k=120)) + ".\n" for _ in range(12)]
    path = tmp_path / "text.txt"
    path.write_text("\x1e\n".join(documents), encoding="utf-8")
    return path


@pytest.fixture
def make_recipe(tmp_path, text_file):
    """(base, phases, **sections) -> a recipe on disk, loaded."""
    import yaml

    from surgery.recipe import load_recipe

    def make(base, phases, name="recipe", overrides=(), **sections):
        document = {
            "model": str(base),
            "layers": [0, 2],
            "memory": {"rule": "palimpsa"},
            "data": str(text_file),
            "phases": phases,
            "evaluation": {"text": str(text_file), "recall": {"lengths": [256]}},
            **sections,
        }
        path = tmp_path / f"{name}.yaml"
        path.write_text(yaml.safe_dump(document, sort_keys=False), encoding="utf-8")
        return load_recipe(path, overrides)

    return make


def phase_of(kind, **keys):
    """A phase of a few steps of four sequences of 32 tokens."""
    return {"kind": kind, "steps": 6, "context": 32, "batch": 128, "warmup": 1, "learning_rate": 3.0e-3, **keys}


@pytest.fixture
def phase():
    return phase_of


@pytest.fixture
def make_body(make_base, tmp_path):
    """(family, rule, dose) -> a student of a fresh random base, swapped in layers 0 and 2, and the base."""
    import torch

    from surgery.adaptation.teaching import body_of
    from surgery.checkpoint.reading import open_checkpoint
    from surgery.hosts import load_model
    from surgery.memory import create

    def make(family="mamba2", rule="palimpsa", dose=1.0, layers=(0, 2), **changes):
        base = open_checkpoint(make_base(family, **changes))
        model = load_model(base.directory, dtype=torch.float32)
        body = body_of(model, base.config, list(layers))
        for name in body.mixers.values():
            mixer = model.get_submodule(name)
            mixer.memory = create(rule, mixer.geometry)
            mixer.memory.dose.fill_(dose)
            if dose and rule != "host":  # a student that training has moved
                for parameter in mixer.parameters():
                    parameter.data.mul_(1 + 0.2 * torch.randn_like(parameter))
        return body, base

    return make


@pytest.fixture
def agree():
    """(run, run) asserts that both did the same but for rounding.

    AdamW turns rounding into whole steps where a gradient is nearly zero, and hides a wrong scale of all gradients: so
    single weights are not compared but the way they went together, and losses and gradient norms as they were.
    """
    from safetensors.torch import load_file

    from surgery.adaptation.monitoring import read_metrics

    def weights(directory):
        found = {}
        for shard in sorted(directory.glob("*.safetensors")):
            found |= load_file(shard)
        return found

    def check(one, other):
        folders = sorted(path.name for path in (one / "phases").iterdir())
        assert folders == sorted(path.name for path in (other / "phases").iterdir())
        start = weights(one / "applied")
        for name in folders:
            rows = [read_metrics(run / "phases" / name / "metrics.jsonl") for run in (one, other)]
            assert len(rows[0]) == len(rows[1])
            for a, b in zip(*rows, strict=True):
                tight = name == folders[0] and a["step"] == 1
                assert b["loss"] == pytest.approx(a["loss"], rel=1e-4 if tight else 2e-2, abs=1e-7)
                assert b["gradient_norm"] == pytest.approx(a["gradient_norm"], rel=1e-4 if tight else 5e-2)
                assert (a["dose"], a["tokens"], a["learning_rate"]) == (b["dose"], b["tokens"], b["learning_rate"])
            ends = [weights(run / "phases" / name / "model") for run in (one, other)]
            way = sum(float((ends[0][key] - start[key]).square().sum()) for key in start) ** 0.5
            apart = sum(float((ends[0][key] - ends[1][key]).square().sum()) for key in start) ** 0.5
            assert apart < 3e-2 * way

    return check
