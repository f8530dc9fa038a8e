"""``granitemoehybrid``: Mamba-2 layers among attention, each followed by experts, a shared MLP, or both.

Embeddings and residual branches are scaled, and logits are divided by ``logits_scaling``.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn
from transformers.masking_utils import create_causal_mask
from transformers.models.granitemoehybrid.configuration_granitemoehybrid import GraniteMoeHybridConfig
from transformers.models.granitemoehybrid.modeling_granitemoehybrid import GraniteMoeHybridForCausalLM

from surgery.memory.modules import in_dtype_of
from surgery.models.bamba import MambaKeys
from surgery.models.hybrid import share_conversions

ATTENTION_MASKED = ("eager", "sdpa", "flex_attention")  # attention that reads a mask; flash attention takes lengths


class SurgeryGraniteMoeHybridConfig(GraniteMoeHybridConfig):
    """GraniteMoeHybridConfig and what was swapped."""

    model_type = "surgery_granitemoehybrid"

    surgery: dict | None = None


class GraftedGraniteMoeHybridForCausalLM(MambaKeys, GraniteMoeHybridForCausalLM):
    """A ``granitemoehybrid`` language model whose Mamba-2 mixers are grafts."""

    config: GraniteMoeHybridConfig
    config_class = GraniteMoeHybridConfig

    def __init__(self, config: GraniteMoeHybridConfig) -> None:
        super().__init__(config)
        self.trunk.register_forward_pre_hook(_documents_apart, with_kwargs=True)


def _documents_apart(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    """Attention masks of packed documents: upstream makes its own without a look at the position ids.

    Raises:
        ValueError: documents were packed for flash attention, which takes no mask.
    """
    if kwargs.get("reset") is None:
        return args, kwargs
    kind = module.config._attn_implementation
    if kind not in ATTENTION_MASKED:
        raise ValueError(f"documents cannot be packed for {kind}: load the model with attn_implementation='sdpa'")
    embedded = kwargs.get("inputs_embeds")
    if embedded is None:  # of the embeddings only shape, device and precision are read
        ids = args[0] if args else kwargs["input_ids"]
        embedded = in_dtype_of(module.embed_tokens, torch.empty((*ids.shape, 1), device=ids.device))
    cache = "cache" if "cache" in inspect.signature(create_causal_mask).parameters else "past_key_values"
    mask = create_causal_mask(
        config=module.config,
        inputs_embeds=embedded,
        attention_mask=None,
        position_ids=kwargs["position_ids"],
        **{cache: None},
    )
    return args, {**kwargs, "attention_mask": {"full_attention": mask, "linear_attention": None}}


class SurgeryGraniteMoeHybridForCausalLM(GraftedGraniteMoeHybridForCausalLM):
    """A ``granitemoehybrid`` language model with swapped memories, as ``config.surgery`` says."""

    config: SurgeryGraniteMoeHybridConfig
    config_class = SurgeryGraniteMoeHybridConfig


share_conversions(
    "granitemoehybrid",
    "surgery_granitemoehybrid",
    GraniteMoeHybridForCausalLM,
    GraftedGraniteMoeHybridForCausalLM,
    SurgeryGraniteMoeHybridForCausalLM,
)
