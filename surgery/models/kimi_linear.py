"""``kimi_linear``: Kimi Delta Attention layers among latent attention, each followed by experts.

On disk the decay's parameters lie in ``self_attn`` itself and q, k and v have a convolution each, as in the grafts;
upstream renames and joins them on loading. A configuration of the type ``surgery_kimi_linear`` therefore stands for
base models, too: transformers renames tensors by that type.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import initialization as init
from transformers.models.kimi_linear.configuration_kimi_linear import KimiLinearConfig
from transformers.models.kimi_linear.modeling_kimi_linear import KimiLinearForCausalLM

from surgery.graft.kda import KimiDeltaGraft
from surgery.memory.base import MemoryGeometry, MemoryRule
from surgery.models.hybrid import Hybrid, OwnType, share_conversions
from surgery.models.initial import init_dt_bias


class SurgeryKimiLinearConfig(OwnType, KimiLinearConfig):
    """KimiLinearConfig and what was swapped, if anything was."""

    model_type = "surgery_kimi_linear"
    from_tensors = ("dense_as_experts",)

    surgery: dict | None = None


class GraftedKimiLinearForCausalLM(Hybrid, KimiLinearForCausalLM):
    """A ``kimi_linear`` language model whose Kimi Delta Attention mixers are grafts."""

    config: SurgeryKimiLinearConfig
    config_class = SurgeryKimiLinearConfig

    @classmethod
    def refusal(cls, config: Any) -> str | None:
        if config.hidden_act not in ("silu", "swish"):
            return f"hidden_act: {config.hidden_act!r} is not supported, only silu"
        return None

    @classmethod
    def mixer_paths(cls, config: Any) -> dict[int, str]:
        kinds = enumerate(config.layer_types)
        return {layer: f"model.layers.{layer}.self_attn" for layer, kind in kinds if kind == "linear_attention"}

    @classmethod
    def geometry(cls, config: Any, layer: int) -> MemoryGeometry:
        return MemoryGeometry(
            style="delta",
            hidden_size=config.hidden_size,
            num_heads=config.linear_num_heads,
            num_key_heads=config.linear_num_heads,
            key_dim=config.linear_head_dim,
            value_dim=config.linear_head_dim,
            channel_decay=True,
        )

    @classmethod
    def mixer(cls, config: Any, memory: MemoryRule, layer: int) -> KimiDeltaGraft:
        return KimiDeltaGraft(
            memory, layer_idx=layer, conv_size=config.linear_conv_kernel_dim, norm_eps=config.rms_norm_eps
        )

    def _init_graft(self, graft: KimiDeltaGraft) -> None:
        init.copy_(graft.A_log, torch.empty_like(graft.A_log).uniform_(1, 16).log())
        init_dt_bias(graft.dt_bias, 1e-3, 0.1, 1e-4)


class SurgeryKimiLinearForCausalLM(GraftedKimiLinearForCausalLM):
    """A ``kimi_linear`` language model with swapped memories, as ``config.surgery`` says."""


share_conversions("kimi_linear", "surgery_kimi_linear", KimiLinearForCausalLM, without=("forget_gate", "conv1d"))
