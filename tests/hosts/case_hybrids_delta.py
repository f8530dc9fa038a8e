"""transformers' hybrids with Gated DeltaNet mixers."""

from __future__ import annotations

import json

import torch
import torch.nn.functional as F
from hosts_battery import VOCABULARY, Case, scatter, write_layout
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    KimiLinearConfig,
    KimiLinearForCausalLM,
    OlmoHybridConfig,
    OlmoHybridForCausalLM,
    Qwen3_5Config,
    Qwen3_5ForCausalLM,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

LAYERS = (0, 1, 3)
SHAPE = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4,
    "num_attention_heads": 2, "num_key_value_heads": 1, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 12,
}  # fmt: skip
# every expert is asked, so that rounding never decides between two of them
EXPERTS = {
    "num_experts": 4, "num_experts_per_tok": 4, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16,
}  # fmt: skip


def load(path):
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


def rewrite(path, tensors):
    write_layout(path, json.loads((path / "config.json").read_text()), tensors)


def step_decay(read, raw):
    return -read("A_log").float().exp() * F.softplus(raw + read("dt_bias").float())


def decay(projection):
    return lambda read, hidden: step_decay(read, hidden.float() @ read(f"{projection}.weight").float().T)


def interleaved_decay(read, hidden):
    """in_proj_ba holds for each key head the rows b [r] | a [r]."""
    keys, share = SHAPE["linear_num_key_heads"], 2
    weight = read("in_proj_ba.weight").float().reshape(keys, 2, share, -1)[:, 1].reshape(keys * share, -1)
    return step_decay(read, hidden.float() @ weight.T)


def case(name, write, log_decay, **options) -> Case:
    shared = {"exact": frozenset({"host", "bayesian"}), "layers": LAYERS, "swapped": (0, 3), "upstream": load}
    options = shared | options
    return Case(name=name, write=write, log_decay=log_decay, **options)


# Qwen


def scatter_qwen(model):
    """All norms but the mixers' multiply by one more than their weight."""
    scatter(model)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight") and "linear_attn" not in name:
                parameter.sub_(1)
    return model


def write_qwen3_next(path, **changes):
    """With tensors for the prediction of several tokens, which upstream neither reads nor writes."""
    config = Qwen3NextConfig(**{**SHAPE, **EXPERTS, "head_dim": 16, **changes})
    scatter_qwen(Qwen3NextForCausalLM(config)).save_pretrained(path)
    extra = {"mtp.fc.weight": torch.randn(32, 64), "mtp.layers.0.mlp.gate.weight": torch.randn(4, 32).bfloat16()}
    rewrite(path, load_file(path / "model.safetensors") | extra)


def write_qwen3_5(path, **changes):
    """The multimodal checkpoint, vision tower and all."""
    text = Qwen3_5TextConfig(**SHAPE, head_dim=16, **changes)
    vision = {
        "depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32,
        "num_position_embeddings": 16, "patch_size": 4,
    }  # fmt: skip
    whole = Qwen3_5Config(text_config=text.to_dict(), vision_config=vision, **changes)
    scatter_qwen(Qwen3_5ForConditionalGeneration(whole)).save_pretrained(path)
    rewrite(path, load_file(path / "model.safetensors") | {"mtp.fc.weight": torch.randn(32, 64)})


def write_qwen3_5_text(path):
    """The configuration flat, the tensors named as inside a multimodal checkpoint: so transformers writes a language
    model that it took out of one."""
    config = Qwen3_5TextConfig(**SHAPE, head_dim=16, tie_word_embeddings=True)
    scatter_qwen(Qwen3_5ForCausalLM(config)).save_pretrained(path)
    tensors = load_file(path / "model.safetensors")
    rewrite(path, {n.replace("model.", "model.language_model.", 1): tensor for n, tensor in tensors.items()})


def write_qwen3_5_moe(path):
    scatter_qwen(Qwen3_5MoeForCausalLM(Qwen3_5MoeTextConfig(**SHAPE, **EXPERTS, head_dim=16))).save_pretrained(path)


# Olmo


def write_olmo(path, **changes):
    """With the convolutions cut where q, k and v meet: upstream's save_pretrained cuts them into equal parts."""
    model = scatter(OlmoHybridForCausalLM(OlmoHybridConfig(**{**SHAPE, **changes})))
    model.save_pretrained(path)
    tensors = load_file(path / "model.safetensors")
    for name in [name for name in tensors if name.endswith("q_conv1d.weight")]:
        names = [name.replace("q_conv1d", f"{part}_conv1d") for part in "qkv"]
        joint = torch.cat([tensors[one] for one in names])
        rows = [tensors[one.replace("conv1d", "proj")].shape[0] for one in names]
        tensors |= dict(zip(names, joint.split(rows), strict=True))
    rewrite(path, tensors)


def joint_conv(name):
    for part in "qkv":
        name = name.replace(f".{part}_conv1d.", ".conv1d.")
    return name


def conv_part(keys, values):
    """The rows of the joint convolution that are q's, k's or v's."""
    rows = {"q": slice(0, keys), "k": slice(keys, 2 * keys), "v": slice(2 * keys, 2 * keys + values)}

    def part(name, tensor):
        return tensor[rows[name[name.index("_conv1d") - 1]]] if "_conv1d." in name else tensor

    return part


# Kimi


def write_kimi(path, **changes):
    shape = {
        **{key: value for key, value in SHAPE.items() if not key.startswith("linear_")},
        "num_key_value_heads": 2, "linear_num_heads": 3, "linear_head_dim": 8, "kv_lora_rank": 8, "v_head_dim": 8,
        "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "moe_intermediate_size": 16, "num_local_experts": 4,
        "num_experts_per_tok": 4, "mlp_layer_types": ["dense", "sparse", "dense", "sparse"],
    }  # fmt: skip
    scatter(KimiLinearForCausalLM(KimiLinearConfig(**{**shape, **changes}))).save_pretrained(path)


def channel_decay(read, hidden):
    """[B, T, H, K]"""
    low = hidden.float() @ read("f_a_proj.weight").float().T
    step = F.softplus(low @ read("f_b_proj.weight").float().T + read("dt_bias").float())
    rate = read("A_log").float().exp()
    return -rate * step.unflatten(-1, (rate.shape[2], -1))


def inside_upstream(name):
    """Upstream joins the convolutions and has the decay's parameters in a module of their own."""
    name = joint_conv(name)
    for leaf in ("f_a_proj", "f_b_proj", "dt_bias", "A_log"):
        name = name.replace(f"self_attn.{leaf}", f"self_attn.forget_gate.{leaf}")
    return name


CASES = [
    case(
        "qwen3_next-tied",
        lambda path: write_qwen3_next(path, tie_word_embeddings=True, mlp_only_layers=[1]),
        interleaved_decay,
    ),
    case("qwen3_5-multimodal", write_qwen3_5, decay("in_proj_a")),
    case("qwen3_5-text-tied", write_qwen3_5_text, decay("in_proj_a")),
    case("qwen3_5_moe-text", write_qwen3_5_moe, decay("in_proj_a")),
    case("olmo_hybrid-plain", write_olmo, decay("a_proj"), upstream_name=joint_conv, part=conv_part(16, 48)),
    case(
        "olmo_hybrid-positive-tied",
        lambda path: write_olmo(path, linear_allow_neg_eigval=False, tie_word_embeddings=True),
        decay("a_proj"),
        upstream_name=joint_conv,
        part=conv_part(16, 48),
    ),
    case("kimi_linear-plain", write_kimi, channel_decay, upstream_name=inside_upstream, part=conv_part(24, 24)),
]
