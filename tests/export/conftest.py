"""Tiny swapped checkpoints and runs on disk."""

from __future__ import annotations

import json
import shutil

import pytest
import torch

RECIPE = """\
# a comment that must survive
model: {base}
layers: [0, 2]
memory: {{rule: {rule}}}
data: bundled
phases:
  - kind: next-token
    tokens: 1k
    context: 64
    batch: 64
    learning_rate: 1.0e-3
    warmup: 0
evaluation: {{text: bundled, recall: {{lengths: [256]}}}}
export: {{dtype: float32}}
"""
FAMILIES = {
    "mamba2": {"num_heads": 4, "head_dim": 16, "expand": 2, "state_size": 8, "n_groups": 2, "chunk_size": 16},
    "gated_deltanet": {"num_heads": 2, "num_v_heads": 4, "head_dim": 8, "expand_v": 1.0, "intermediate_size": 48},
}
TOKENIZER_CONFIG = '{"tokenizer_class":   "PreTrainedTokenizerFast"}\n'  # spacing that no writer would make


def save_tokenizer(directory):
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE(vocab={letter: number for number, letter in enumerate(alphabet)}, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(TOKENIZER_CONFIG)


@pytest.fixture
def make_checkpoint(tmp_path):
    """A random model, swapped where ``rule`` is given, with sharpened weights and the given dose."""
    from surgery.hosts import adapter_for

    def make(family="mamba2", rule=None, dose=1.0, name="applied", base="base", dtype=torch.float32, **more):
        config = {
            "model_type": family,
            "vocab_size": 256,
            "hidden_size": 32,
            "num_hidden_layers": 3,
            "tie_word_embeddings": family == "mamba2",
            "bos_token_id": 5,
            "eos_token_id": 6,
            "pad_token_id": 7,
            **FAMILIES[family],
            **more,
        }
        adapter = adapter_for(config)
        if rule is not None:
            swap = {"schema": 1, "rule": rule, "layers": [0, 2], "options": {}, "base": str(base)}
            config = adapter.surgery_config(config, swap)
        model = adapter.build(config, dtype=dtype)
        with torch.no_grad():
            for parameter_name, parameter in model.named_parameters():
                if parameter.ndim > 1 and "memory." not in parameter_name:
                    parameter.mul_(3)
            for mixer in adapter.mixers(model).values():
                if mixer.memory.rule != "host":
                    mixer.memory.dose.fill_(dose)
        directory = tmp_path / name
        model.save_pretrained(directory)
        (directory / "generation_config.json").unlink()
        save_tokenizer(directory)
        return directory

    return make


@pytest.fixture
def make_run(tmp_path, make_checkpoint):
    """A run directory with one finished phase, as distill leaves it. ``report`` becomes its evaluation."""
    from surgery.checkpoint.manifest import PhaseRecord, RunManifest, write_manifest

    def make(family="mamba2", rule="palimpsa", dose=1.0, report=None, status="finished", overrides=(), name="run"):
        base = make_checkpoint(family, name=f"{name}-base")
        run = tmp_path / name
        (run / "phases" / "01-next-token").mkdir(parents=True)
        applied = make_checkpoint(family, rule, 0.0, name=f"{name}-applied", base=base)
        trained = make_checkpoint(family, rule, dose, name=f"{name}-trained", base=base)
        shutil.move(applied, run / "applied")
        shutil.move(trained, run / "phases" / "01-next-token" / "model")
        (run / "recipe.yaml").write_text(RECIPE.format(base=base, rule=rule))
        figures = {"steps": 16, "tokens": 1024, "first_loss": 5.5, "last_loss": 5.25, "dose": dose}
        phase = PhaseRecord(
            name="next-token", kind="next-token", status=status, steps=16, tokens=1024, figures=figures
        )
        manifest = RunManifest(
            surgery="0.1.0", recipe="recipe", overrides=list(overrides), base=str(base), layers=[0, 2], rule=rule,
            exact=True, phases=[phase],
        )  # fmt: skip
        write_manifest(run, manifest)
        if report is not None:
            (run / "evaluation").mkdir()
            (run / "evaluation" / "after.json").write_text(json.dumps(report))
        return run

    return make


@pytest.fixture
def quick(monkeypatch):
    """Reload in this process: a fresh one takes seconds, and where it is not the point this does what it does."""
    from transformers import AutoModelForCausalLM

    from surgery.export import verify

    def reload(directory, ids, code=False):
        return verify.model_logits(AutoModelForCausalLM.from_pretrained(directory), ids)

    monkeypatch.setattr(verify, "reload_logits", reload)


@pytest.fixture
def report():
    """A report of surgery eval as it lies in RUN/evaluation."""

    def entry(name, perplexity, right):
        row = {"length": 256, "right": right, "total": 20, "fraction": right / 20, "interval": [0.1, 0.9]}
        recall = {"lengths": [row], "cells": [], "candidates": 10, "chance": 0.1}
        figures = {"nll": 1.0, "perplexity": perplexity, "bits_per_byte": perplexity / 10, "tokens": 999, "bytes": 2000}
        return {"name": name, **figures, "positions": [], "recall": recall}

    def make(before=20.5, after=18.25, name="new"):
        return {
            "schema": 1,
            "kind": "evaluation",
            "text": {"name": "held.txt", "tokens": 1000, "bytes": 2001},
            "context": 64,
            "model": entry(name, after, 15),
            "baseline": None if before is None else entry("base", before, 12),
            "difference": None
            if before is None
            else {"paired": True, "perplexity_ratio": {"mean": after / before, "low": 0.88, "high": 0.91}},
        }

    return make
