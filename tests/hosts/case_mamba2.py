"""Mamba-2 in its three layouts. transformers' class is upstream of all: the others are its models, converted."""

from __future__ import annotations

import inspect
import json

import torch
import torch.nn.functional as F
from hosts_battery import VOCABULARY, Case, scatter, write_layout
from transformers import Mamba2Config, Mamba2ForCausalLM
from transformers.models.mamba2.modeling_mamba2 import MambaRMSNormGated

LAYERS = 3
# transformers normalises in the groups of B and C since a release after 5.17
GROUPED = "group_size" in inspect.signature(MambaRMSNormGated).parameters


def config(**changes) -> Mamba2Config:
    options = dict(
        num_heads=4, head_dim=16, hidden_size=32, expand=2, state_size=8, n_groups=1, num_hidden_layers=LAYERS,
        vocab_size=VOCABULARY, chunk_size=16, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    return Mamba2Config(**{**options, **changes})


def log_decay(limit=(0.0, float("inf")), bias=False):
    """dt is the last H rows of in_proj."""

    def decay(read, hidden):
        heads = read("A_log").shape[0]
        weight = read("in_proj.weight").float()[-heads:]
        dt = hidden.float() @ weight.T + (read("in_proj.bias").float()[-heads:] if bias else 0)
        step = F.softplus(dt + read("dt_bias").float()).clamp(*limit)
        return -read("A_log").float().exp() * step

    return decay


def transformers_case(name, **changes) -> Case:
    limit = changes.get("time_step_limit", (0.0, float("inf")))
    return Case(
        name=f"mamba2-{name}",
        write=lambda path: scatter(Mamba2ForCausalLM(config(**changes))).save_pretrained(path),
        upstream=lambda path: Mamba2ForCausalLM.from_pretrained(path, dtype=torch.float32).eval(),
        log_decay=log_decay(limit, changes.get("use_bias", False)),
        layers=(0, 1, 2),
        swapped=(0, 2),
        # it masks what goes into in_proj, whose bias the convolution then reads from the padding
        masks=not changes.get("use_bias", False),
    )


# mamba_ssm


def write_mamba_ssm(path, tie=False, explicit=False, **changes):
    """transformers' model under mamba_ssm's names; the vocabulary of 257 is padded to 264 there."""
    of = config(vocab_size=264, tie_word_embeddings=tie, residual_in_fp32=True, **changes)
    model = scatter(Mamba2ForCausalLM(of))
    tensors = {name.replace(".embeddings.", ".embedding."): value for name, value in model.state_dict().items()}
    shape = {"d_state": of.state_size, "headdim": of.head_dim, "ngroups": of.n_groups} if explicit else {}
    write_layout(
        path,
        {
            "d_model": of.hidden_size, "d_intermediate": 0, "n_layer": of.num_hidden_layers, "vocab_size": 257,
            "ssm_cfg": {"layer": "Mamba2", **shape}, "attn_layer_idx": [], "attn_cfg": {}, "rms_norm": True,
            "residual_in_fp32": True, "fused_add_norm": True, "pad_vocab_size_multiple": 8, "tie_embeddings": tie,
        },
        tensors,
    )  # fmt: skip


def mamba_ssm_upstream(groups=1, state=8):
    def load(path):
        from safetensors.torch import load_file

        written = json.loads((path / "config.json").read_text())
        of = config(vocab_size=264, tie_word_embeddings=written["tie_embeddings"], n_groups=groups, state_size=state)
        model = Mamba2ForCausalLM(of).eval()
        tensors = load_file(path / "model.safetensors")
        tensors = {name.replace(".embedding.", ".embeddings."): value for name, value in tensors.items()}
        model.load_state_dict(tensors)
        return model

    return load


def mamba_ssm_case(name, groups=1, **options) -> Case:
    return Case(
        name=f"mamba_ssm-{name}",
        write=lambda path: write_mamba_ssm(path, n_groups=groups, **options),
        upstream=mamba_ssm_upstream(groups),
        log_decay=log_decay(),
        layers=(0, 1, 2),
        swapped=(0, 2),
        upstream_name=lambda name: name.replace(".embedding.", ".embeddings."),
    )


# flash-linear-attention


def write_fla(path, **changes):
    of = config(**changes)
    model = scatter(Mamba2ForCausalLM(of))
    write_layout(
        path,
        {
            "architectures": ["Mamba2ForCausalLM"], "model_type": "mamba2", "head_dim": 16, "num_heads": 4,
            "hidden_size": 32, "state_size": 8, "expand": 2, "n_groups": of.n_groups, "num_hidden_layers": LAYERS,
            "norm_eps": of.layer_norm_epsilon, "rmsnorm": True, "norm_before_gate": False, "dt_min": 0.001,
            "dt_max": 0.1, "dt_limit": list(of.time_step_limit), "conv_kernel": 4, "residual_in_fp32": True,
            "vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu",
            "fuse_norm": True, "chunk_size": 256, "tie_word_embeddings": of.tie_word_embeddings,
        },
        model.state_dict() if not of.tie_word_embeddings else
        {name: value for name, value in model.state_dict().items() if name != "lm_head.weight"},
    )  # fmt: skip


def fla_case(name, **changes) -> Case:
    def load(path):
        from safetensors.torch import load_file

        model = Mamba2ForCausalLM(config(**changes)).eval()
        model.load_state_dict(load_file(path / "model.safetensors"), strict=not changes.get("tie_word_embeddings"))
        return model

    return Case(
        name=f"fla_mamba2-{name}",
        write=lambda path: write_fla(path, **changes),
        upstream=load,
        log_decay=log_decay(limit=changes.get("time_step_limit", (0.0, float("inf")))),
        layers=(0, 1, 2),
        swapped=(0, 2),
    )


CASES = [
    transformers_case("plain"),
    transformers_case("bias-tied", use_bias=True, use_conv_bias=False, tie_word_embeddings=True),
    mamba_ssm_case("plain"),
    mamba_ssm_case("tied", tie=True),
    fla_case("plain", layer_norm_epsilon=3e-5),
    fla_case("limit-tied", time_step_limit=(0.01, 0.4), tie_word_embeddings=True),
]
if GROUPED:
    CASES += [
        transformers_case("codestral", n_groups=8, num_heads=16, head_dim=4, time_step_limit=(0.0, 0.7)),
        mamba_ssm_case("groups", groups=2, explicit=True),
        fla_case("groups", n_groups=2),
    ]
