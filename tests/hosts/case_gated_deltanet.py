"""Gated DeltaNet in flash-linear-attention's layout, hybrids included. That library's model does not run on a CPU, so
what is compared with is its arithmetic written out: one row at a time, one token after the other, in float64."""

from __future__ import annotations

import json
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from hosts_battery import VOCABULARY, Case, scatter, write_layout
from safetensors.torch import load_file
from torch import nn

BASE = {
    "architectures": ["GatedDeltaNetForCausalLM"], "model_type": "gated_deltanet", "hidden_size": 32, "num_heads": 2,
    "num_v_heads": None, "head_dim": 12, "expand_v": 1.5, "intermediate_size": 48, "num_hidden_layers": 3,
    "use_gate": True, "use_short_conv": True, "allow_neg_eigval": False, "conv_size": 4, "norm_eps": 1e-5,
    "vocab_size": VOCABULARY, "tie_word_embeddings": False, "hidden_act": "swish", "attn": None,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "max_position_embeddings": 2048,
}  # fmt: skip


class Leaf(nn.Module):
    """Parameters under a name."""

    def forward(self, x):
        return x


class Naive(nn.Module):
    """The tensors of a checkpoint as parameters of the same names, and the model's function of them."""

    def __init__(self, path):
        super().__init__()
        self.config = json.loads((path / "config.json").read_text())
        for name, tensor in load_file(path / "model.safetensors").items():
            *folders, leaf = name.split(".")
            module = self
            for folder in folders:
                if folder not in module._modules:
                    module.add_module(folder, Leaf())
                module = module._modules[folder]
            module.register_parameter(leaf, nn.Parameter(tensor.double()))
        attn = self.config["attn"] or []
        self.specs = {i: one for one in (attn if isinstance(attn, list) else [attn]) for i in one["layers"]}

    def forward(self, input_ids, attention_mask=None):
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        logits = torch.zeros(*input_ids.shape, self.config["vocab_size"], dtype=torch.float64)
        for row, kept in enumerate(mask.bool()):
            logits[row, kept] = self.text(input_ids[row, kept])
        return SimpleNamespace(logits=logits)

    def text(self, ids):
        eps = self.config["norm_eps"]
        x = self.model.embeddings.weight[ids]
        for i in range(self.config["num_hidden_layers"]):
            block = self.model.layers._modules[str(i)]
            read = rms(x, block.attn_norm.weight, eps)
            block.attn(read[None])  # for whoever watches what a mixer reads
            mix = self.attention(block.attn, read, self.specs[i]) if i in self.specs else self.delta(block.attn, read)
            x = x + mix
            y = rms(x, block.mlp_norm.weight, eps)
            mlp = block.mlp
            x = x + (F.silu(y @ mlp.gate_proj.weight.T) * (y @ mlp.up_proj.weight.T)) @ mlp.down_proj.weight.T
        head = self.model.embeddings if self.config["tie_word_embeddings"] else self.lm_head
        return rms(x, self.model.norm.weight, eps) @ head.weight.T

    def delta(self, mixer, x):
        c = self.config
        heads, keys = c["num_v_heads"] or c["num_heads"], c["num_heads"]
        q, k, v = (getattr(mixer, f"{name}_proj").weight @ x.T for name in "qkv")  # [C, T]
        parts = []
        for name, part in (("q", q), ("k", k), ("v", v)):
            if c["use_short_conv"]:
                weight = getattr(mixer, f"{name}_conv1d").weight
                part = F.conv1d(F.pad(part, (weight.shape[-1] - 1, 0)), weight, groups=weight.shape[0])
            parts.append(F.silu(part).T)
        q, k, v = (part.unflatten(-1, (count, -1)) for part, count in zip(parts, (keys, keys, heads), strict=True))
        q, k = (part / (part.square().sum(-1, keepdim=True) + 1e-6).sqrt() for part in (q, k))
        q, k = (part.repeat_interleave(heads // keys, dim=1) for part in (q * c["head_dim"] ** -0.5, k))
        decay = (-mixer.A_log.exp() * F.softplus(x @ mixer.a_proj.weight.T + mixer.dt_bias)).exp()
        eta = (x @ mixer.b_proj.weight.T).sigmoid() * (2 if c["allow_neg_eigval"] else 1)
        state = torch.zeros(heads, k.shape[-1], v.shape[-1], dtype=x.dtype)
        out = []
        for t in range(x.shape[0]):
            state = state * decay[t, :, None, None]
            error = v[t] - torch.einsum("hkv,hk->hv", state, k[t])
            state = state + torch.einsum("hk,hv->hkv", k[t], eta[t, :, None] * error)
            out.append(torch.einsum("hkv,hk->hv", state, q[t]))
        o = rms(torch.stack(out), mixer.o_norm.weight, c["norm_eps"])
        if c["use_gate"]:
            o = o * F.silu((x @ mixer.g_proj.weight.T).unflatten(-1, (heads, -1)))
        return o.flatten(1) @ mixer.o_proj.weight.T

    def attention(self, mixer, x, spec):
        heads, kv = spec["num_heads"], spec.get("num_kv_heads") or spec["num_heads"]
        q, k, v = (project(getattr(mixer, f"{name}_proj"), x) for name in "qkv")
        q, k, v = (part.unflatten(-1, (count, -1)) for part, count in zip((q, k, v), (heads, kv, kv), strict=True))
        if spec.get("qk_norm"):
            q, k = rms(q, mixer.q_norm.weight, 1e-5), rms(k, mixer.k_norm.weight, 1e-5)
        rows = []
        for t in range(x.shape[0]):
            first = max(0, t + 1 - (spec.get("window_size") or t + 1))
            query = turned(q[t], t, spec.get("rope_theta", 10000.0))
            row = []
            for head in range(heads):
                group = head // (heads // kv)
                seen = torch.stack(
                    [turned(k[s, group], s, spec.get("rope_theta", 10000.0)) for s in range(first, t + 1)]
                )
                weights = (seen @ query[head] / q.shape[-1] ** 0.5).softmax(0)
                row.append(weights @ v[first : t + 1, group])
            rows.append(torch.cat(row))
        return torch.stack(rows) @ mixer.o_proj.weight.T


def project(linear, x):
    return x @ linear.weight.T + (linear.bias if hasattr(linear, "bias") else 0)


def rms(x, weight, eps):
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def turned(x, position, theta):
    """Pairs (i, i + d/2) turned by position / theta^(2i/d)."""
    half = x.shape[-1] // 2
    angle = position / theta ** (torch.arange(half, dtype=torch.float64) / half)
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()], -1)


def log_decay(read, hidden):
    gate = hidden.double() @ read("a_proj.weight").double().T
    return -read("A_log").double().exp() * F.softplus(gate + read("dt_bias").double())


def case(name, **changes):
    config = {**BASE, **changes}
    attn = config["attn"] or []
    attention = {i for one in (attn if isinstance(attn, list) else [attn]) for i in one["layers"]}
    layers = tuple(i for i in range(config["num_hidden_layers"]) if i not in attention)

    def write(path):
        from surgery.hosts import adapter_for

        model = scatter(adapter_for(config).build(config))
        tied = {"lm_head.weight"} if config["tie_word_embeddings"] else set()
        write_layout(path, config, {n: t for n, t in model.state_dict().items() if n not in tied})

    return Case(
        name=f"gated_deltanet-{name}",
        write=write,
        upstream=Naive,
        log_decay=log_decay,
        layers=layers,
        swapped=(layers[0], layers[-1]),
        exact=frozenset({"host", "bayesian"}),
        dtype=torch.float64,
        gradient_tolerance=2e-5,
    )


CASES = [
    case("values", num_v_heads=4, allow_neg_eigval=True),
    case("bare", use_short_conv=False, use_gate=False, tie_word_embeddings=True),
    case("hybrid", num_hidden_layers=4, attn={"layers": [1], "num_heads": 4, "num_kv_heads": 2, "rope_theta": 500.0}),
    case("hybrid-first", num_hidden_layers=4, num_v_heads=4, attn=[
        {"layers": [0], "num_heads": 2, "qkv_bias": True, "qk_norm": True},
        {"layers": [2], "num_heads": 4, "window_size": 7},
    ]),
]  # fmt: skip
