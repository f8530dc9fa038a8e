"""Hybrids of transformers with Mamba-2 mixers, each written by its upstream class."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
import transformers
from hosts_battery import VOCABULARY, Case, scatter
from transformers import (
    BambaConfig,
    BambaForCausalLM,
    FalconH1Config,
    FalconH1ForCausalLM,
    GraniteMoeHybridConfig,
    GraniteMoeHybridForCausalLM,
    NemotronHConfig,
    NemotronHForCausalLM,
    Zamba2Config,
    Zamba2ForCausalLM,
)

# bamba and granitemoehybrid normalise in the groups of B and C since a release after 5.17, the others always
GROUPED = tuple(map(int, transformers.__version__.split(".")[:2])) >= (5, 24)

COMMON = dict(
    vocab_size=VOCABULARY, hidden_size=32, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
    pad_token_id=0, bos_token_id=1, eos_token_id=None,
)  # fmt: skip
MAMBA = dict(mamba_n_heads=8, mamba_n_groups=1, mamba_d_state=8, mamba_d_head="auto", mamba_chunk_size=16)


# upstream convolves an input projection's bias where padding stands, so that padding is not as if it were absent
BIASED = {"masks": False}


def log_decay(limit=(0.0, math.inf), scales=(1.0, 1.0), bias=False):
    """dt is the last H rows of in_proj; ``scales`` are of its input and of these rows."""

    def decay(read, hidden):
        heads = read("A_log").shape[0]
        projected = scales[0] * hidden.float() @ read("in_proj.weight").float()[-heads:].T
        if bias:
            projected = projected + read("in_proj.bias").float()[-heads:]
        step = F.softplus(scales[1] * projected + read("dt_bias").float()).clamp(*limit)
        return -read("A_log").float().exp() * step

    return decay


def case(model, config, name, layers, swapped, decay=None, **options) -> Case:
    def write(path):
        made = scatter(model(config()))
        for parameter_name, parameter in made.named_parameters():
            if parameter_name.endswith("conv1d.weight"):  # so small at first that the memories would not count
                torch.nn.init.normal_(parameter, std=0.4)
        made.save_pretrained(path)

    return Case(
        name=name,
        write=write,
        upstream=lambda path: model.from_pretrained(path, dtype=torch.float32).eval(),
        log_decay=decay or log_decay(),
        layers=layers,
        swapped=swapped,
        **options,
    )


def bamba(name, limit=(0.0, math.inf), **changes) -> Case:
    options = {**COMMON, **MAMBA, "intermediate_size": 48, "num_hidden_layers": 4, "attn_layer_indices": [1]}
    return case(
        BambaForCausalLM,
        lambda: BambaConfig(**{**options, **changes}, time_step_limit=limit),
        f"bamba-{name}", (0, 2, 3), (0, 3), log_decay(limit, bias="mamba_proj_bias" in changes),
        **(BIASED if "mamba_proj_bias" in changes else {}),
    )  # fmt: skip


def granite(name, limit=(0.0, math.inf), **changes) -> Case:
    options = dict(
        layer_types=["mamba", "attention", "mamba", "mamba"], num_hidden_layers=4, intermediate_size=16,
        shared_intermediate_size=48, num_local_experts=0, embedding_multiplier=3.0, residual_multiplier=0.4,
        attention_multiplier=0.2, logits_scaling=5.0,
    )  # fmt: skip
    return case(
        GraniteMoeHybridForCausalLM,
        lambda: GraniteMoeHybridConfig(**{**COMMON, **MAMBA, **options, **changes}, time_step_limit=limit),
        f"granitemoehybrid-{name}", (0, 2, 3), (0, 3), log_decay(limit),
    )  # fmt: skip


def zamba2(name, floor=0.001, **changes) -> Case:
    options = dict(
        num_hidden_layers=6, layers_block_type=["mamba", "hybrid", "mamba", "hybrid", "hybrid", "hybrid"],
        mamba_d_state=8, mamba_ngroups=2, n_mamba_heads=8, chunk_size=16, intermediate_size=48, num_mem_blocks=2,
        adapter_rank=4, time_step_min=floor,
    )  # fmt: skip
    return case(
        Zamba2ForCausalLM,
        lambda: Zamba2Config(**{**COMMON, **options, **changes}),
        f"zamba2-{name}", tuple(range(6)), (0, 3), log_decay((floor, math.inf), bias="add_bias_linear" in changes),
        **(BIASED if "add_bias_linear" in changes else {}),
    )  # fmt: skip


def falcon(name, limit=(0.0, math.inf), **changes) -> Case:
    options = dict(
        num_hidden_layers=3, intermediate_size=48, mamba_d_ssm=48, mamba_n_groups=2, lm_head_multiplier=0.3,
        embedding_multiplier=2.0, mlp_multipliers=[0.7, 1.4], key_multiplier=0.6, attention_out_multiplier=0.8,
        attention_in_multiplier=1.2, ssm_multipliers=[0.7, 1.3, 0.8, 1.6, 0.5], ssm_in_multiplier=1.25,
        ssm_out_multiplier=0.9,
    )  # fmt: skip
    return case(
        FalconH1ForCausalLM,
        lambda: FalconH1Config(**{**COMMON, **MAMBA, **options, **changes}, time_step_limit=limit),
        f"falcon_h1-{name}", (0, 1, 2), (0, 2), log_decay(limit, (1.25, 0.5), "mamba_proj_bias" in changes),
        **(BIASED if "mamba_proj_bias" in changes else {}),
    )  # fmt: skip


def nemotron(name, floor=0.001, pattern="M-M*EM", **changes) -> Case:
    options = dict(
        hybrid_override_pattern=pattern, head_dim=8, intermediate_size=48, mamba_num_heads=6, mamba_head_dim=8,
        n_groups=2, ssm_state_size=8, chunk_size=16, n_routed_experts=4, num_experts_per_tok=2,
        moe_intermediate_size=16, moe_shared_expert_intermediate_size=24, time_step_min=floor,
        time_step_limit=(0.0, 0.05),
    )  # fmt: skip
    return case(
        NemotronHForCausalLM,
        lambda: NemotronHConfig(**{**COMMON, **options, **changes}),
        f"nemotron_h-{name}", (0, 2, 5), (0, 5), log_decay((floor, math.inf), bias="use_bias" in changes),
        **(BIASED if "use_bias" in changes else {}),
    )  # fmt: skip


# where they are compared with upstream's own
GROUPS = {"mamba_n_groups": 2} if GROUPED else {}

CASES = [
    bamba("plain", limit=(0.01, 0.9), **GROUPS),
    bamba("bias-tied", mamba_proj_bias=True, mamba_conv_bias=False, tie_word_embeddings=True),
    granite("dense", position_embedding_type="rope", tie_word_embeddings=True),
    granite("experts", limit=(0.02, 0.8), num_local_experts=4, num_experts_per_tok=2, **GROUPS),
    zamba2("bias", add_bias_linear=True),
    zamba2("adapters", floor=0.3, use_shared_attention_adapter=True, use_mem_rope=True, num_key_value_heads=4),
    falcon("no-norm-bias-tied", mamba_d_ssm=None, mamba_proj_bias=True, projectors_bias=True, tie_word_embeddings=True),
    falcon("norm-first", limit=(0.01, 0.6), mamba_rms_norm=True, mamba_conv_bias=False),
    nemotron("experts", floor=0.2),
    nemotron("bias", pattern="M-M*-M", use_bias=True, use_conv_bias=False),
]  # fmt: skip

# one of each family: with experts, a tied head, a limit of dt or multipliers where it has them
CHOSEN = ("bamba-plain", "granitemoehybrid-experts", "zamba2-adapters", "falcon_h1-norm-first", "nemotron_h-experts")
BY_NAME = {case.name: case for case in CASES}
