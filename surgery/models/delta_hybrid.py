"""What transformers' hybrids with Gated DeltaNet mixers share: ``linear_attn`` in the layers of ``layer_types``."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from transformers import initialization as init

from surgery.graft import Graft
from surgery.memory.base import MemoryGeometry, MemoryRule
from surgery.models.hybrid import Hybrid


class DeltaHybrid(Hybrid):
    """A hybrid whose mixers are of one class of grafts, which a family names in ``graft``."""

    graft: ClassVar[type[Graft]]

    @classmethod
    def refusal(cls, config: Any) -> str | None:
        if config.hidden_act not in ("silu", "swish"):
            return f"hidden_act: {config.hidden_act!r} is not supported, only silu"
        keys, values = config.linear_num_key_heads, config.linear_num_value_heads
        if values % keys:
            return f"linear_num_value_heads: {values} is no multiple of linear_num_key_heads {keys}"
        return None

    @classmethod
    def mixer_paths(cls, config: Any) -> dict[int, str]:
        kinds = enumerate(config.layer_types)
        return {layer: f"model.layers.{layer}.linear_attn" for layer, kind in kinds if kind == "linear_attention"}

    @classmethod
    def geometry(cls, config: Any, layer: int) -> MemoryGeometry:
        return MemoryGeometry(
            style="delta",
            hidden_size=config.hidden_size,
            num_heads=config.linear_num_value_heads,
            num_key_heads=config.linear_num_key_heads,
            key_dim=config.linear_key_head_dim,
            value_dim=config.linear_value_head_dim,
        )

    @classmethod
    def mixer(cls, config: Any, memory: MemoryRule, layer: int) -> Graft:
        return cls.graft(
            memory,
            layer_idx=layer,
            conv_kernel=config.linear_conv_kernel_dim,
            norm_eps=config.rms_norm_eps,
        )

    def _init_graft(self, graft: Graft) -> None:
        # A is uniform on (0, 16), away from 0 so that its logarithm is finite
        init.copy_(graft.A_log, torch.empty_like(graft.A_log).uniform_(0.01, 16).log())
        init.ones_(graft.dt_bias)
