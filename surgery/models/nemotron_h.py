"""``nemotron_h``: one mixer a layer, which is Mamba-2, attention, an MLP or experts, as a pattern says.

The Mamba-2 mixers' inner width is heads times head width, whatever ``expand`` says, and dt has a lower bound only,
``time_step_min``, whatever ``time_step_limit`` says.
"""

from __future__ import annotations

import math

from transformers.models.nemotron_h.configuration_nemotron_h import NemotronHConfig
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHForCausalLM

from surgery.graft import Mamba2Graft
from surgery.memory.base import MemoryGeometry, MemoryRule
from surgery.models.hybrid import Hybrid, share_conversions
from surgery.models.initial import init_dt_bias, init_numbered_heads


class SurgeryNemotronHConfig(NemotronHConfig):
    """NemotronHConfig and what was swapped."""

    model_type = "surgery_nemotron_h"

    surgery: dict | None = None


class GraftedNemotronHForCausalLM(Hybrid, NemotronHForCausalLM):
    """A ``nemotron_h`` language model whose Mamba-2 mixers are grafts."""

    config: NemotronHConfig
    config_class = NemotronHConfig

    @classmethod
    def refusal(cls, config: NemotronHConfig) -> str | None:
        if config.mamba_hidden_act not in ("silu", "swish"):
            return f"mamba_hidden_act: {config.mamba_hidden_act!r} is not supported, only silu"
        if config.mamba_num_heads % config.n_groups:
            return f"mamba_num_heads: {config.mamba_num_heads} is no multiple of n_groups {config.n_groups}"
        return None

    @classmethod
    def mixer_paths(cls, config: NemotronHConfig) -> dict[int, str]:
        kinds = enumerate(config.layers_block_type)
        return {layer: f"model.layers.{layer}.mixer" for layer, kind in kinds if kind == "linear_attention"}

    @classmethod
    def geometry(cls, config: NemotronHConfig, layer: int) -> MemoryGeometry:
        return MemoryGeometry(
            style="additive",
            hidden_size=config.hidden_size,
            num_heads=config.mamba_num_heads,
            num_key_heads=config.n_groups,
            key_dim=config.ssm_state_size,
            value_dim=config.mamba_head_dim,
        )

    @classmethod
    def step_limit(cls, config: NemotronHConfig) -> tuple[float, float]:
        return config.time_step_min, math.inf

    @classmethod
    def mixer(cls, config: NemotronHConfig, memory: MemoryRule, layer: int) -> Mamba2Graft:
        return Mamba2Graft(
            memory,
            layer_idx=layer,
            conv_kernel=config.conv_kernel,
            norm_eps=config.layer_norm_epsilon,
            time_step_limit=cls.step_limit(config),
            use_bias=config.use_bias,
            use_conv_bias=config.use_conv_bias,
        )

    def _init_graft(self, graft: Mamba2Graft) -> None:
        config = self.config
        init_numbered_heads(graft)
        init_dt_bias(graft.dt_bias, config.time_step_min, config.time_step_max, config.time_step_floor)


class SurgeryNemotronHForCausalLM(GraftedNemotronHForCausalLM):
    """A ``nemotron_h`` language model with swapped memories, as ``config.surgery`` says."""

    config: SurgeryNemotronHConfig
    config_class = SurgeryNemotronHConfig


share_conversions(
    "nemotron_h", "surgery_nemotron_h", NemotronHForCausalLM, GraftedNemotronHForCausalLM, SurgeryNemotronHForCausalLM
)
