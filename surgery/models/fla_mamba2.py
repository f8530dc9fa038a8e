"""Mamba-2 language models in flash-linear-attention's ``mamba2`` layout, every mixer a graft.

The tensors are named as transformers names them; the configuration's keys are that library's own, and so are a few
numbers: D may be a channel's, the norm may be absent or stand before the gate, and in half precision the residual
stream is rounded after every block.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from surgery.graft import Mamba2Graft
from surgery.memory.modules import in_dtype_of
from surgery.models import mamba2
from surgery.models.initial import init_drawn_heads, init_dt_bias
from surgery.models.mamba2_configuration import FlaMamba2Config, SurgeryFlaMamba2Config


def refusal(config: FlaMamba2Config) -> str | None:
    """Why a configuration cannot be run here, or None."""
    inner = int(config.expand * config.hidden_size)
    if inner % config.head_dim:
        return f"head_dim: expand * hidden_size {inner} is no multiple of {config.head_dim}"
    if config.hidden_act not in ("silu", "swish"):
        return f"hidden_act: {config.hidden_act!r} is not supported, only silu"
    return mamba2.uneven(config, "n_groups", "dt_limit")


class FlaMamba2Block(mamba2.Mamba2Block):
    """x + mixer(norm(x)), rounded to the norm's dtype."""

    @staticmethod
    def layout(config: FlaMamba2Config) -> dict[str, Any]:
        return {
            "norm": config.rmsnorm,
            "norm_before_gate": config.norm_before_gate,
            "skip_per_channel": config.D_has_hdim,
        }

    def forward(self, hidden: Tensor, cache: Any = None, mask: Tensor | None = None, reset: Tensor | None = None):
        return in_dtype_of(self.norm, super().forward(hidden, cache, mask, reset))


class FlaMamba2Backbone(mamba2.Mamba2Backbone):
    """The same names as in transformers' layout."""

    embeddings_first = True
    block = FlaMamba2Block


class FlaMamba2ForCausalLM(mamba2.Mamba2ForCausalLM):
    """A ``mamba2`` language model of flash-linear-attention.

    Raises:
        ValueError: the configuration asks for something that is not supported; see :func:`refusal`.
    """

    config: FlaMamba2Config
    config_class = FlaMamba2Config
    backbone_class = FlaMamba2Backbone
    refusal = staticmethod(refusal)

    def _init_graft(self, graft: Mamba2Graft) -> None:
        config = self.config
        init_drawn_heads(graft, *config.A_init_range)
        init_dt_bias(graft.dt_bias, config.dt_min, config.dt_max, config.dt_init_floor)


class SurgeryFlaMamba2ForCausalLM(FlaMamba2ForCausalLM):
    """The same with swapped memories, as ``config.surgery`` says."""

    config: SurgeryFlaMamba2Config
    config_class = SurgeryFlaMamba2Config
