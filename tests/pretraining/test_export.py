"""Bases as checkpoints: what is stored, who can read it, what the card says; and the two that are bundled."""

from __future__ import annotations

import copy
import json
import math

import pytest
import torch
from safetensors import safe_open
from transformers import Mamba2ForCausalLM as StockMamba2

from surgery.hosts import load_model, resolve
from surgery.pretraining.bases import BASES, base_config, create, initialise
from surgery.pretraining.card import model_card
from surgery.pretraining.export import LARGEST, export_base, round_to_stored
from surgery.pretraining.tokenizer import save_tokenizer, train_tokenizer

SMALL = {
    "tiny-mamba2": {"num_hidden_layers": 2, "hidden_size": 32, "num_heads": 4, "head_dim": 16, "state_size": 8},
    "tiny-gdn": {"num_hidden_layers": 2, "hidden_size": 32, "num_heads": 2, "num_v_heads": 2, "head_dim": 8,
                 "intermediate_size": 24},
}


@pytest.mark.parametrize("base", BASES)
def test_what_is_stored_is_what_was_measured(base, tmp_path):
    config = {**base_config(base), **SMALL[base]}
    model = create(config)
    initialise(model, (4, 40), 0)
    save_tokenizer(train_tokenizer(["some words"] * 3, 270), tmp_path / "tokenizer")
    before = copy.deepcopy(model)
    round_to_stored(model)
    size = export_base(model, config, tmp_path / "tokenizer", tmp_path / "out")
    assert size == (tmp_path / "out/model.safetensors").stat().st_size

    ids = torch.randint(1, 270, (2, 70))
    with torch.no_grad():
        expected = model.eval()(ids, use_cache=False).logits
        loaded = load_model(tmp_path / "out", dtype=torch.float32)(ids, use_cache=False).logits
        assert torch.equal(loaded, expected)
        assert not torch.equal(before.eval()(ids, use_cache=False).logits, expected), "rounding changed nothing"
    with safe_open(tmp_path / "out/model.safetensors", "pt") as tensors:
        dtypes = {name: tensors.get_tensor(name).dtype for name in tensors.keys()}  # noqa: SIM118
    assert "lm_head.weight" not in dtypes
    for name, dtype in dtypes.items():
        assert dtype == (torch.float32 if name.endswith(("A_log", "dt_bias")) else torch.bfloat16), name


@pytest.mark.parametrize("base", BASES)
def test_a_bundled_base_is_within_its_limits(base):
    path = resolve(f"bundled:{base}")
    weights = path / "model.safetensors"
    assert weights.stat().st_size <= LARGEST
    with safe_open(weights, "pt") as tensors:
        parameters = sum(math.prod(tensors.get_slice(name).get_shape()) for name in tensors.keys())  # noqa: SIM118
    assert 4_000_000 <= parameters <= 5_000_000
    config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    assert {key: config[key] for key in base_config(base)} == base_config(base)
    assert config["num_hidden_layers"] >= 8 and config["num_heads"] >= 4 and config["vocab_size"] == 4096


def test_stock_transformers_reads_the_bundled_mamba2():
    path = resolve("bundled:tiny-mamba2")
    ids = torch.randint(1, 4096, (2, 150))
    with torch.no_grad():
        stock = StockMamba2.from_pretrained(path, dtype=torch.float32).eval()(ids, use_cache=False).logits
        ours = load_model(path, dtype=torch.float32).eval()(ids, use_cache=False).logits
    assert (ours - stock).norm() < 1e-5 * stock.norm()


def test_the_card_says_which_bars_were_missed():
    item = {"length": 256, "right": 7, "total": 10, "fraction": 0.7, "interval": [0.4, 0.9]}
    measured = {
        "text": "somewhere/book.txt",
        "language": {"bytes": 1234567, "tokens": 345678},
        "horizons": {"mean": [10.0, 90.0], "log_mean": [5.0, 50.0], "spread": 9.0, "tokens": 1000},
        "recall": {"numbers": {"lengths": [item]}},
        "bars": {
            "bits_per_byte": {"bar": 1.45, "measured": 1.5},
            "recall at 256": {"bar": 0.8, "measured": 0.7},
            "horizon spread": {"bar": 5.0, "measured": 9.0},
        },
    }
    training = {
        "settings": {"context": 1024, "batch": 8, "restart": 0.1, "muon_lr": 0.1, "adam_lr": 0.2, "weight_decay": 0.3,
                     "seed": 4, "tokens": 5},
        "history": [{"tokens_per_second": 10.0}], "tokens": 99, "steps": 3, "device": "CPU", "torch": "2",
    }
    card = model_card("tiny-gdn", base_config("tiny-gdn"), 1000, 500, training, measured)
    assert "| bits per byte | at most 1.45 | 1.500 | missed |" in card
    assert "| recall at 256 | at least 0.8 | 0.700 | missed |" in card
    assert "| horizon spread | at least 5 | 9.000 | met |" in card
    assert "`book.txt`" in card and "7/10 = 0.70 (0.40 to 0.90)" in card
