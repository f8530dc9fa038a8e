"""``olmo_hybrid``: Gated DeltaNet layers among attention.

On disk q, k and v have a convolution each, as the grafts do; upstream makes one of them on loading. A configuration of
the type ``surgery_olmo_hybrid`` therefore stands for base models, too: transformers renames tensors by that type.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from transformers import initialization as init
from transformers.models.olmo_hybrid.configuration_olmo_hybrid import OlmoHybridConfig
from transformers.models.olmo_hybrid.modeling_olmo_hybrid import OlmoHybridForCausalLM

from surgery.graft import GatedDeltaGraft
from surgery.memory.base import MemoryGeometry, MemoryRule
from surgery.models.delta_hybrid import DeltaHybrid
from surgery.models.hybrid import OwnType, share_conversions
from surgery.models.initial import init_dt_bias

NORM_EPS = 1e-5  # of the mixers' output norm, whatever the configuration says


class SurgeryOlmoHybridConfig(OwnType, OlmoHybridConfig):
    """OlmoHybridConfig and what was swapped, if anything was."""

    model_type = "surgery_olmo_hybrid"
    from_tensors = ("old_norms",)

    surgery: dict | None = None


class GraftedOlmoHybridForCausalLM(DeltaHybrid, OlmoHybridForCausalLM):
    """An ``olmo_hybrid`` language model whose Gated DeltaNet mixers are grafts."""

    config: SurgeryOlmoHybridConfig
    config_class = SurgeryOlmoHybridConfig

    @classmethod
    def geometry(cls, config: Any, layer: int) -> MemoryGeometry:
        return replace(super().geometry(config, layer), negative_eigenvalues=config.linear_allow_neg_eigval)

    @classmethod
    def mixer(cls, config: Any, memory: MemoryRule, layer: int) -> GatedDeltaGraft:
        return GatedDeltaGraft(memory, layer_idx=layer, conv_size=config.linear_conv_kernel_dim, norm_eps=NORM_EPS)

    def _init_graft(self, graft: GatedDeltaGraft) -> None:
        c = self.config
        a = torch.empty_like(graft.A_log).uniform_(c.linear_a_log_min, c.linear_a_log_max)
        init.copy_(graft.A_log, a.clamp(min=1e-4).log())
        init_dt_bias(graft.dt_bias, c.linear_dt_min, c.linear_dt_max, c.linear_dt_init_floor)


class SurgeryOlmoHybridForCausalLM(GraftedOlmoHybridForCausalLM):
    """An ``olmo_hybrid`` language model with swapped memories, as ``config.surgery`` says."""


share_conversions("olmo_hybrid", "surgery_olmo_hybrid", OlmoHybridForCausalLM, without=("conv1d",))
