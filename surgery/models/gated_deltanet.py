"""Gated DeltaNet language models in flash-linear-attention's ``gated_deltanet`` layout, every mixer a graft; the
softmax attention of hybrids stays as it is.

``GatedDeltaNetForCausalLM`` reads and writes plain ``gated_deltanet`` checkpoints, without that library;
``SurgeryGatedDeltaNetForCausalLM`` those with swapped layers.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import initialization as init
from transformers.modeling_layers import GradientCheckpointingLayer

from surgery.graft import GatedDeltaGraft
from surgery.graft.base import RMSNorm
from surgery.graft.gated_delta import GATES
from surgery.memory.base import MemoryGeometry, MemoryRule
from surgery.models.attention import Attention, AttentionSpec, Sight, attention_specs
from surgery.models.common import Backbone, GraftedCausalLM, layer_memory
from surgery.models.configuration import GatedDeltaNetConfig, SurgeryGatedDeltaNetConfig, Swap
from surgery.models.initial import init_dt_bias


def refusal(config: GatedDeltaNetConfig) -> str | None:
    """Why a configuration cannot be run here, or None."""
    try:
        attention_layers(config)
    except ValueError as error:
        return str(error)
    if config.attnres_block_size is not None:
        return "attnres_block_size: attention residuals between blocks are not supported"
    if config.hidden_act not in ("swish", "silu"):
        return f"hidden_act: {config.hidden_act!r} is not supported, only swish"
    if config.output_gate_activation not in GATES:
        return f"output_gate_activation: {config.output_gate_activation!r} is not supported, only {', '.join(GATES)}"
    heads = config.num_v_heads or config.num_heads
    if heads % config.num_heads:
        return f"num_v_heads: {heads} is no multiple of num_heads {config.num_heads}"
    if abs(config.head_dim * config.expand_v - round(config.head_dim * config.expand_v)) > 1e-4:
        return f"expand_v: head_dim {config.head_dim} times {config.expand_v} is no whole number"
    return None


def attention_layers(config: GatedDeltaNetConfig) -> dict[int, AttentionSpec]:
    """The softmax attention layers of a hybrid."""
    return attention_specs(config.attn, config.hidden_size, config.num_hidden_layers)


def geometry(config: GatedDeltaNetConfig) -> MemoryGeometry:
    """What a memory rule sees of one layer."""
    return MemoryGeometry(
        style="delta",
        hidden_size=config.hidden_size,
        num_heads=config.num_v_heads or config.num_heads,
        num_key_heads=config.num_heads,
        key_dim=config.head_dim,
        value_dim=round(config.head_dim * config.expand_v),
        negative_eigenvalues=config.allow_neg_eigval,
    )


def mixer(config: GatedDeltaNetConfig, memory: MemoryRule, layer: int) -> GatedDeltaGraft:
    """The graft of one layer."""
    return GatedDeltaGraft(
        memory,
        layer_idx=layer,
        conv_size=config.conv_size,
        norm_eps=config.norm_eps,
        use_short_conv=config.use_short_conv,
        conv_bias=config.conv_bias,
        use_gate=config.use_gate,
        gate_activation=config.output_gate_activation,
    )


class GatedMLP(nn.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class GatedDeltaNetBlock(GradientCheckpointingLayer):
    """y = x + attn(attn_norm(x)); y + mlp(mlp_norm(y)), where ``attn`` is a graft or, in a hybrid, attention."""

    def __init__(self, config: GatedDeltaNetConfig, swap: Swap, layer: int, attention: AttentionSpec | None) -> None:
        super().__init__()
        self.attn_norm = RMSNorm(config.hidden_size, config.norm_eps)
        if attention is None:
            self.attn = mixer(config, layer_memory(swap, geometry(config), layer), layer)
        elif layer in swap.layers:
            raise ValueError(f"surgery.layers: layer {layer} is softmax attention, which holds no memory to swap")
        else:
            self.attn = Attention(attention, config.hidden_size, layer)
        self.mlp_norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.mlp = GatedMLP(config.hidden_size, config.mlp_size)

    def forward(
        self,
        hidden: Tensor,
        cache: Any = None,
        mask: Tensor | None = None,
        reset: Tensor | None = None,
        sight: Sight | None = None,
    ) -> Tensor:
        normed = self.attn_norm(hidden)
        if isinstance(self.attn, Attention):
            hidden = hidden + self.attn(normed, sight, cache)
        else:
            hidden = hidden + self.attn(normed, cache, mask, reset)
        return hidden + self.mlp(self.mlp_norm(hidden))


class GatedDeltaNetBackbone(Backbone):
    """Embeddings, :class:`GatedDeltaNetBlock` and ``norm``."""

    norm_name = "norm"

    def __init__(self, config: GatedDeltaNetConfig) -> None:
        super().__init__(config)
        swap = Swap.of(config)
        attention = attention_layers(config)
        self.attention_layer = min(attention, default=None)
        self.embeddings = nn.Embedding(config.vocab_size, config.hidden_size, padding_idx=config.pad_token_id)
        self.layers = nn.ModuleList(
            GatedDeltaNetBlock(config, swap, layer, attention.get(layer)) for layer in range(config.num_hidden_layers)
        )
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)

    def layer_arguments(
        self, hidden: Tensor, attention_mask: Tensor | None, cache: Any, reset: Tensor | None
    ) -> dict[str, Any]:
        if self.attention_layer is None:
            return {}
        kept = None if cache is None else cache.layers[self.attention_layer]
        return {"sight": Sight.of(hidden.shape[1], attention_mask, kept, reset, hidden.device)}


class GatedDeltaNetForCausalLM(GraftedCausalLM):
    """A ``gated_deltanet`` language model.

    Raises:
        ValueError: the configuration asks for something that is not supported; see :func:`refusal`.
    """

    config: GatedDeltaNetConfig
    config_class = GatedDeltaNetConfig
    base_model_prefix = "model"
    _no_split_modules = ("GatedDeltaNetBlock",)
    _tied_weights_keys = {"lm_head.weight": "model.embeddings.weight"}  # noqa: RUF012
    refusal = staticmethod(refusal)
    # a skip weight that early checkpoints carry and no forward pass ever read; frequencies that follow from rope_theta
    _keys_to_ignore_on_load_unexpected = [r"\.attn\.D$", r"\.attn\.rotary\.inv_freq$"]  # noqa: RUF012

    def __init__(self, config: GatedDeltaNetConfig) -> None:
        super().__init__(config)
        reason = self.refusal(config)
        if reason is not None:
            raise ValueError(reason)
        self.model = GatedDeltaNetBackbone(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.finish()

    def _init_graft(self, graft: GatedDeltaGraft) -> None:
        # A is uniform on (0, 16); its logarithm must stay finite
        init.copy_(graft.A_log, torch.rand_like(graft.A_log).mul(16).clamp(min=1e-4).log())
        init_dt_bias(graft.dt_bias, 1e-3, 0.1, 1e-4)


class SurgeryGatedDeltaNetForCausalLM(GatedDeltaNetForCausalLM):
    """A ``gated_deltanet`` language model with swapped memories, as ``config.surgery`` says."""

    config: SurgeryGatedDeltaNetConfig
    config_class = SurgeryGatedDeltaNetConfig
