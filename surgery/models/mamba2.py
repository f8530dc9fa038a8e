"""Mamba-2 language models in transformers' ``mamba2`` layout, every mixer a graft.

``Mamba2ForCausalLM`` reads and writes plain ``mamba2`` checkpoints; ``SurgeryMamba2ForCausalLM`` those with swapped
layers. Layers that are not swapped hold the host's own rule, so the numbers do not depend on transformers' release.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import initialization as init
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.models.mamba2.configuration_mamba2 import Mamba2Config

from surgery.graft import Mamba2Graft
from surgery.graft.base import RMSNorm
from surgery.memory.base import MemoryGeometry, MemoryRule
from surgery.memory.modules import in_dtype_of
from surgery.models.common import Backbone, GraftedCausalLM, layer_memory
from surgery.models.configuration import SurgeryMamba2Config, Swap
from surgery.models.initial import init_dt_bias, init_numbered_heads


def refusal(config: Mamba2Config) -> str | None:
    """Why a configuration cannot be run here, or None."""
    inner = config.num_heads * config.head_dim
    if inner != config.hidden_size * config.expand:
        return f"num_heads * head_dim: {inner} is not hidden_size * expand, {config.hidden_size * config.expand}"
    if config.hidden_act not in ("silu", "swish"):
        return f"hidden_act: {config.hidden_act!r} is not supported, only silu"
    return uneven(config, "n_groups", "time_step_limit")


def uneven(config: Any, groups: str, steps: str) -> str | None:
    """Why the heads do not share groups evenly, or dt has no range; a layout's own names of both keys are given."""
    if config.num_heads % config.n_groups:
        return f"{groups}: {config.num_heads} heads are no multiple of {config.n_groups}"
    limit = tuple(config.time_step_limit)
    if len(limit) != 2 or not 0 <= limit[0] <= limit[1]:
        return f"{steps}: {limit} is no range of positive steps"
    return None


def geometry(config: Mamba2Config) -> MemoryGeometry:
    """What a memory rule sees of one layer."""
    return MemoryGeometry(
        style="additive",
        hidden_size=config.hidden_size,
        num_heads=config.num_heads,
        num_key_heads=config.n_groups,
        key_dim=config.state_size,
        value_dim=config.head_dim,
    )


def mixer(config: Mamba2Config, memory: MemoryRule, layer: int, **layout: Any) -> Mamba2Graft:
    """The graft of one layer; ``layout`` is what only other libraries' layouts vary."""
    return Mamba2Graft(
        memory,
        layer_idx=layer,
        conv_kernel=config.conv_kernel,
        norm_eps=config.layer_norm_epsilon,
        time_step_limit=tuple(config.time_step_limit),
        use_bias=config.use_bias,
        use_conv_bias=config.use_conv_bias,
        **layout,
    )


class Mamba2Block(GradientCheckpointingLayer):
    """x + mixer(norm(x)), the sum in float32 where ``residual_in_fp32``."""

    def __init__(self, config: Mamba2Config, swap: Swap, layer: int) -> None:
        super().__init__()
        self.residual_in_fp32 = config.residual_in_fp32
        self.norm = RMSNorm(config.hidden_size, config.layer_norm_epsilon)
        self.mixer = mixer(config, layer_memory(swap, geometry(config), layer), layer, **self.layout(config))

    @staticmethod
    def layout(config: Any) -> dict[str, Any]:
        """Further arguments of the mixer."""
        return {}

    def forward(self, hidden: Tensor, cache: Any = None, mask: Tensor | None = None, reset: Tensor | None = None):
        residual = hidden.float() if self.residual_in_fp32 and hidden.dtype != torch.float64 else hidden
        return residual + self.mixer(self.norm(in_dtype_of(self.norm, hidden)), cache, mask, reset)


class Mamba2Backbone(Backbone):
    """Embeddings, :class:`Mamba2Block` and ``norm_f``."""

    embeddings_first = False
    norm_name = "norm_f"
    embeddings_name = "embeddings"
    block = Mamba2Block

    def __init__(self, config: Mamba2Config) -> None:
        super().__init__(config)
        swap = Swap.of(config)
        self.add_module(self.embeddings_name, nn.Embedding(config.vocab_size, config.hidden_size))
        self.layers = nn.ModuleList(self.block(config, swap, layer) for layer in range(config.num_hidden_layers))
        self.norm_f = RMSNorm(config.hidden_size, config.layer_norm_epsilon)


class Mamba2ForCausalLM(GraftedCausalLM):
    """A ``mamba2`` language model.

    Raises:
        ValueError: the configuration asks for something that is not supported; see :func:`refusal`.
    """

    config: Mamba2Config
    config_class = Mamba2Config
    base_model_prefix = "backbone"
    _no_split_modules = ("Mamba2Block",)
    _tied_weights_keys = {"lm_head.weight": "backbone.embeddings.weight"}  # noqa: RUF012
    backbone_class: ClassVar[type[Backbone]] = Mamba2Backbone
    refusal = staticmethod(refusal)

    def __init__(self, config: Mamba2Config) -> None:
        super().__init__(config)
        reason = self.refusal(config)
        if reason is not None:
            raise ValueError(reason)
        self.backbone = self.backbone_class(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.finish()

    def _init_graft(self, graft: Mamba2Graft) -> None:
        config = self.config
        init_numbered_heads(graft)
        init_dt_bias(graft.dt_bias, config.time_step_min, config.time_step_max, config.time_step_floor)
        init.kaiming_uniform_(graft.conv1d.weight, a=math.sqrt(5))
        init.kaiming_uniform_(graft.out_proj.weight, a=math.sqrt(5))
        if config.rescale_prenorm_residual and not getattr(graft.out_proj.weight, "_is_hf_initialized", False):
            graft.out_proj.weight.div_(math.sqrt(config.num_hidden_layers))


class SurgeryMamba2ForCausalLM(Mamba2ForCausalLM):
    """A ``mamba2`` language model with swapped memories, as ``config.surgery`` says."""

    config: SurgeryMamba2Config
    config_class = SurgeryMamba2Config
