"""Mamba-2 language models in the layout of mamba_ssm, their authors' library (``state-spaces/mamba2-*``), every mixer
a graft.

The tensors are named as transformers names them, but for ``backbone.embedding``. Every epsilon is 1e-5.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from surgery.graft import Mamba2Graft
from surgery.models import mamba2
from surgery.models.initial import init_drawn_heads, init_dt_bias
from surgery.models.mamba2_configuration import MambaSSMConfig, SurgeryMambaSSMConfig


def refusal(config: MambaSSMConfig) -> str | None:
    """Why a configuration cannot be run here, or None."""
    layer = config.ssm_cfg.get("layer", "Mamba1")
    if layer != "Mamba2":
        return f"ssm_cfg.layer: {layer!r} is not supported, only Mamba2; Mamba-1 decays every state channel on its own"
    if config.attn_layer_idx:
        return f"attn_layer_idx: layers {config.attn_layer_idx} are softmax attention; such hybrids are not supported"
    if config.d_intermediate:
        return f"d_intermediate: an MLP of {config.d_intermediate} behind each mixer is not supported"
    if not config.rms_norm:
        return "rms_norm: layer norms are not supported"
    if config.ssm_cfg.get("activation", "swish") not in ("silu", "swish"):
        return f"ssm_cfg.activation: {config.ssm_cfg['activation']!r} is not supported, only swish"
    if not 0 < config.memory_size <= config.inner_size:
        return f"ssm_cfg.d_ssm: {config.memory_size} is not within the inner width, {config.inner_size}"
    if config.memory_size % config.head_dim:
        return f"ssm_cfg.headdim: the memory's width {config.memory_size} is no multiple of {config.head_dim}"
    return mamba2.uneven(config, "ssm_cfg.ngroups", "ssm_cfg.dt_limit")


class MambaSSMBlock(mamba2.Mamba2Block):
    """x + mixer(norm(x)), as in transformers' layout."""

    @staticmethod
    def layout(config: MambaSSMConfig) -> dict[str, Any]:
        return {
            "norm": config.rmsnorm,
            "norm_before_gate": config.norm_before_gate,
            "skip_per_channel": config.D_has_hdim,
            "mlp_size": config.inner_size - config.memory_size,
        }


class MambaSSMBackbone(mamba2.Mamba2Backbone):
    """The embeddings are called ``embedding``."""

    embeddings_name = "embedding"
    block = MambaSSMBlock

    @property
    def embeddings(self) -> nn.Embedding:
        return self.embedding


class MambaSSMForCausalLM(mamba2.Mamba2ForCausalLM):
    """A language model of mamba_ssm with Mamba-2 mixers.

    Raises:
        ValueError: the configuration asks for something that is not supported; see :func:`refusal`.
    """

    config: MambaSSMConfig
    config_class = MambaSSMConfig
    backbone_class = MambaSSMBackbone
    refusal = staticmethod(refusal)
    _tied_weights_keys = {"lm_head.weight": "backbone.embedding.weight"}  # noqa: RUF012

    def set_input_embeddings(self, value: nn.Embedding) -> None:
        self.backbone.embedding = value

    def _init_graft(self, graft: Mamba2Graft) -> None:
        init_drawn_heads(graft, 1.0, 16.0)
        init_dt_bias(graft.dt_bias, 1e-3, 0.1, 1e-4)


class SurgeryMambaSSMForCausalLM(MambaSSMForCausalLM):
    """The same with swapped memories, as ``config.surgery`` says."""

    config: SurgeryMambaSSMConfig
    config_class = SurgeryMambaSSMConfig
