"""``bamba``: Mamba-2 layers among attention, each followed by a gated MLP.

Its mixers' configuration keys, ``mamba_*``, are also those of ``granitemoehybrid`` and ``falcon_h1``.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn
from transformers import initialization as init
from transformers.models.bamba.configuration_bamba import BambaConfig
from transformers.models.bamba.modeling_bamba import BambaForCausalLM

from surgery.graft import Mamba2Graft
from surgery.graft.cache import chosen
from surgery.memory.base import MemoryGeometry, MemoryRule
from surgery.models.hybrid import Hybrid, share_conversions
from surgery.models.initial import init_numbered_heads


class SurgeryBambaConfig(BambaConfig):
    """BambaConfig and what was swapped."""

    model_type = "surgery_bamba"

    surgery: dict | None = None


class MambaKeys(Hybrid):
    """A hybrid whose Mamba-2 mixers stand at ``mamba`` in a block, sized by ``mamba_*``."""

    @classmethod
    def refusal(cls, config: Any) -> str | None:
        if config.hidden_act not in ("silu", "swish"):
            return f"hidden_act: {config.hidden_act!r} is not supported, only silu"
        if config.mamba_n_heads % config.mamba_n_groups:
            return f"mamba_n_heads: {config.mamba_n_heads} is no multiple of mamba_n_groups {config.mamba_n_groups}"
        return None

    @classmethod
    def mixer_paths(cls, config: Any) -> dict[int, str]:
        kinds = enumerate(config.layers_block_type)
        return {layer: f"model.layers.{layer}.mamba" for layer, kind in kinds if kind == "linear_attention"}

    @classmethod
    def geometry(cls, config: Any, layer: int) -> MemoryGeometry:
        return MemoryGeometry(
            style="additive",
            hidden_size=config.hidden_size,
            num_heads=config.mamba_n_heads,
            num_key_heads=config.mamba_n_groups,
            key_dim=config.mamba_d_state,
            value_dim=config.mamba_d_head,
        )

    @classmethod
    def step_limit(cls, config: Any) -> tuple[float, float]:
        return tuple(config.time_step_limit or (0.0, math.inf))

    @classmethod
    def mixer(cls, config: Any, memory: MemoryRule, layer: int) -> Mamba2Graft:
        return Mamba2Graft(
            memory,
            layer_idx=layer,
            conv_kernel=config.mamba_d_conv,
            norm_eps=config.rms_norm_eps,
            time_step_limit=cls.step_limit(config),
            use_bias=config.mamba_proj_bias,
            use_conv_bias=config.mamba_conv_bias,
        )

    def _init_graft(self, graft: Mamba2Graft) -> None:
        init_numbered_heads(graft)
        init.ones_(graft.dt_bias)


class GraftedBambaForCausalLM(MambaKeys, BambaForCausalLM):
    """A ``bamba`` language model whose Mamba-2 mixers are grafts."""

    config: BambaConfig
    config_class = BambaConfig

    def __init__(self, config: BambaConfig) -> None:
        super().__init__(config)
        self.trunk.register_forward_pre_hook(_continued_positions, with_kwargs=True)


def _continued_positions(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    """Position ids that go on where the cache ends: upstream begins at 0 again unless it is told them."""
    cache = chosen(*(kwargs.get(name) for name in ("cache", "past_key_values")))
    if cache is not None and kwargs.get("position_ids") is None:
        given = next(x for x in (*args, kwargs.get("input_ids"), kwargs.get("inputs_embeds")) if x is not None)
        place = torch.arange(given.shape[1], device=given.device) + cache.get_seq_length()
        kwargs = {**kwargs, "position_ids": place[None]}
    return args, kwargs


class SurgeryBambaForCausalLM(GraftedBambaForCausalLM):
    """A ``bamba`` language model with swapped memories, as ``config.surgery`` says."""

    config: SurgeryBambaConfig
    config_class = SurgeryBambaConfig


share_conversions("bamba", "surgery_bamba", BambaForCausalLM, GraftedBambaForCausalLM, SurgeryBambaForCausalLM)
