"""``zamba2``: Mamba-2 layers, before some of which a shared attention block runs.

The shared blocks are tied in a cycle and stay as they are; in a layer that has one, the mixer stands one level deeper.
"""

from __future__ import annotations

import math

from transformers.models.zamba2.configuration_zamba2 import Zamba2Config
from transformers.models.zamba2.modeling_zamba2 import Zamba2ForCausalLM

from surgery.graft import Mamba2Graft
from surgery.memory.base import MemoryGeometry, MemoryRule
from surgery.models.hybrid import Hybrid, share_conversions
from surgery.models.initial import init_dt_bias, init_numbered_heads

MIXERS = {"linear_attention": "mamba", "hybrid": "mamba_decoder.mamba"}  # kind of layer -> name inside it
NORM_EPS = 1e-5  # of the mixers, whatever rms_norm_eps is


class SurgeryZamba2Config(Zamba2Config):
    """Zamba2Config and what was swapped."""

    model_type = "surgery_zamba2"

    surgery: dict | None = None


class GraftedZamba2ForCausalLM(Hybrid, Zamba2ForCausalLM):
    """A ``zamba2`` language model whose Mamba-2 mixers are grafts."""

    config: Zamba2Config
    config_class = Zamba2Config

    @classmethod
    def refusal(cls, config: Zamba2Config) -> str | None:
        inner = int(config.mamba_expand * config.hidden_size)
        if inner % config.n_mamba_heads:
            return f"n_mamba_heads: {config.n_mamba_heads} does not divide mamba_expand * hidden_size, {inner}"
        if config.n_mamba_heads % config.mamba_ngroups:
            return f"n_mamba_heads: {config.n_mamba_heads} is no multiple of mamba_ngroups {config.mamba_ngroups}"
        return None

    @classmethod
    def mixer_paths(cls, config: Zamba2Config) -> dict[int, str]:
        kinds = enumerate(config.layers_block_type)
        return {layer: f"model.layers.{layer}.{MIXERS[kind]}" for layer, kind in kinds}

    @classmethod
    def geometry(cls, config: Zamba2Config, layer: int) -> MemoryGeometry:
        return MemoryGeometry(
            style="additive",
            hidden_size=config.hidden_size,
            num_heads=config.n_mamba_heads,
            num_key_heads=config.mamba_ngroups,
            key_dim=config.mamba_d_state,
            value_dim=config.mamba_headdim,
        )

    @classmethod
    def step_limit(cls, config: Zamba2Config) -> tuple[float, float]:
        return config.time_step_min, math.inf

    @classmethod
    def mixer(cls, config: Zamba2Config, memory: MemoryRule, layer: int) -> Mamba2Graft:
        return Mamba2Graft(
            memory,
            layer_idx=layer,
            conv_kernel=config.mamba_d_conv,
            norm_eps=NORM_EPS,
            time_step_limit=cls.step_limit(config),
            use_bias=config.add_bias_linear,
            use_conv_bias=True,  # use_conv_bias is not read upstream
        )

    def _init_graft(self, graft: Mamba2Graft) -> None:
        config = self.config
        init_numbered_heads(graft)
        init_dt_bias(graft.dt_bias, config.time_step_min, config.time_step_max, config.time_step_floor)


class SurgeryZamba2ForCausalLM(GraftedZamba2ForCausalLM):
    """A ``zamba2`` language model with swapped memories, as ``config.surgery`` says."""

    config: SurgeryZamba2Config
    config_class = SurgeryZamba2Config


share_conversions("zamba2", "surgery_zamba2", Zamba2ForCausalLM, GraftedZamba2ForCausalLM, SurgeryZamba2ForCausalLM)
