"""``falcon_h1``: a Mamba-2 mixer beside attention in every layer, both fed the same normed stream.

The mixer scales its input and the five parts of its input projection; its norm may be absent or follow the gate.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import initialization as init
from transformers.models.falcon_h1.configuration_falcon_h1 import FalconH1Config
from transformers.models.falcon_h1.modeling_falcon_h1 import FalconH1ForCausalLM

from surgery.graft import Mamba2Graft
from surgery.memory.base import MemoryRule
from surgery.models.bamba import MambaKeys
from surgery.models.hybrid import share_conversions


class SurgeryFalconH1Config(FalconH1Config):
    """FalconH1Config and what was swapped."""

    model_type = "surgery_falcon_h1"

    surgery: dict | None = None


class FalconH1Graft(Mamba2Graft):
    """A Mamba-2 mixer with scaled projections.

    Args:
        input_scale: of the mixer's input. row_scales: of the rows z, x, B, C and dt of its input projection, bias
            included.
    """

    def __init__(
        self, memory: MemoryRule, *, input_scale: float, row_scales: list[float], out_bias: bool, **layout
    ) -> None:
        super().__init__(memory, **layout)
        self.input_scale = input_scale
        self.row_scales = row_scales
        if out_bias != (self.out_proj.bias is not None):
            self.out_proj = nn.Linear(self.out_proj.in_features, self.out_proj.out_features, bias=out_bias)
        # the name by which transformers fills it on loading
        self.register_buffer("mup_vector", self.scales(), persistent=False)

    def scales(self) -> Tensor:
        """[1, 1, rows]"""
        sizes = (self.inner, self.inner, self.keys, self.keys, self.geometry.num_heads)
        return torch.cat([torch.full((1, 1, n), s) for n, s in zip(sizes, self.row_scales, strict=True)], dim=-1)

    def _apply(self, fn, recurse=True):
        super()._apply(fn, recurse)
        if not self.mup_vector.is_meta:  # cast up, it would keep the roundings of the dtype that it comes from
            with torch.no_grad():
                self.mup_vector.copy_(self.scales())
        return self

    def _rows(self, hidden: Tensor) -> Tensor:
        return self.in_proj(hidden * self.input_scale) * self.mup_vector


class GraftedFalconH1ForCausalLM(MambaKeys, FalconH1ForCausalLM):
    """A ``falcon_h1`` language model whose Mamba-2 mixers are grafts."""

    config: FalconH1Config
    config_class = FalconH1Config

    @classmethod
    def mixer_paths(cls, config: FalconH1Config) -> dict[int, str]:
        return {layer: f"model.layers.{layer}.mamba" for layer in range(config.num_hidden_layers)}

    @classmethod
    def mixer(cls, config: FalconH1Config, memory: MemoryRule, layer: int) -> FalconH1Graft:
        return FalconH1Graft(
            memory,
            input_scale=config.ssm_in_multiplier,
            row_scales=list(config.ssm_multipliers),
            out_bias=config.projectors_bias,
            layer_idx=layer,
            conv_kernel=config.mamba_d_conv,
            norm_eps=config.rms_norm_eps,
            time_step_limit=cls.step_limit(config),
            use_bias=config.mamba_proj_bias,
            use_conv_bias=config.mamba_conv_bias,
            norm=config.mamba_rms_norm,
            norm_before_gate=config.mamba_norm_before_gate,
        )

    def _init_graft(self, graft: FalconH1Graft) -> None:
        super()._init_graft(graft)
        init.copy_(graft.mup_vector, graft.scales())


class SurgeryFalconH1ForCausalLM(GraftedFalconH1ForCausalLM):
    """A ``falcon_h1`` language model with swapped memories, as ``config.surgery`` says."""

    config: SurgeryFalconH1Config
    config_class = SurgeryFalconH1Config


share_conversions(
    "falcon_h1", "surgery_falcon_h1", FalconH1ForCausalLM, GraftedFalconH1ForCausalLM, SurgeryFalconH1ForCausalLM
)
