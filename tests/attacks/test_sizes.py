"""A configuration that claims more than its weights hold is refused before anything is built from it."""

from __future__ import annotations

import resource

import pytest

from surgery.checkpoint.sizes import check_sizes
from surgery.errors import UsageError
from surgery.hosts import ADAPTERS

HUGE = 10**9


@pytest.mark.parametrize(
    ("key", "held"),
    [
        ("num_hidden_layers", "hold 2 layers"),
        ("hidden_size", "embeddings of width 16"),
        ("vocab_size", "embeddings of 260 tokens"),
        ("num_heads", "exceeds 260"),
        ("head_dim", "exceeds 260"),
        ("state_size", "exceeds 260"),
        ("n_groups", "exceeds 260"),
        ("conv_kernel", "exceeds 260"),
    ],
)
def test_giant_value(key, held, edit, refused):
    edit(**{key: HUGE})
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    refused("config.json", f"{key} is {HUGE}", held)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000  # kilobytes


def test_a_list_of_more_layers_than_there_are(edit, refused):
    edit(layer_types=["linear_attention"] * 100_000)
    refused("config.json", "layer_types names 100000 layers", "hold 2 layers")


@pytest.mark.parametrize("adapter", ADAPTERS, ids=lambda adapter: adapter.name)
@pytest.mark.parametrize("key", ["num_hidden_layers", "intermediate_size", "num_attention_heads", "num_experts"])
def test_every_family_without_weights(adapter, key):
    """Where no header tells, sizes that no model has are refused before the configuration object is made."""
    config = {"model_type": adapter.model_types[0]} if adapter.model_types[0] else {"ssm_cfg": {}}
    key = "n_layer" if "ssm_cfg" in config and key == "num_hidden_layers" else key
    with pytest.raises(UsageError, match=f"{key} is {HUGE}"):
        adapter.parse({**config, key: HUGE})


def test_parts_of_other_models_and_defaults_pass():
    shapes = {
        "model.embed_tokens.weight": (260, 16), "model.layers.3.mlp.experts.7.up_proj.weight": (8, 16),
        "mtp.layers.9.weight": (4, 4), "visual.blocks.40.weight": (9, 9),
    }  # fmt: skip
    right = {"hidden_size": 16, "vocab_size": 260, "num_hidden_layers": 4, "num_experts": 8, "intermediate_size": 11008}
    more = {"max_position_embeddings": 10**7, "rope_theta": 10**8, "bos_token_id": 248_044, "chunk_size": 10**6}
    check_sizes({"text_config": right, "vision_config": {"depth": 41, "hidden_size": 9}, **more}, shapes, "c")
    with pytest.raises(UsageError, match=r"text_config\.num_experts is 9, but the weights' headers hold 8 experts"):
        check_sizes({"text_config": {**right, "num_experts": 9}}, shapes, "c")
    with pytest.raises(UsageError, match="num_hidden_layers is 10, but the weights' headers hold 4 layers"):
        check_sizes({"num_hidden_layers": 10}, shapes, "c")


def test_a_padded_vocabulary_passes():
    shapes = {"backbone.embedding.weight": (264, 16)}
    check_sizes({"ssm_cfg": {}, "vocab_size": 260}, shapes, "c")
    with pytest.raises(UsageError, match="vocab_size is 300"):
        check_sizes({"ssm_cfg": {}, "vocab_size": 300}, shapes, "c")
