"""``qwen3_5_moe``: :mod:`surgery.models.qwen3_5` with experts."""

from __future__ import annotations

from transformers.models.qwen3_5_moe.configuration_qwen3_5_moe import Qwen3_5MoeConfig, Qwen3_5MoeTextConfig
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeForCausalLM

from surgery.graft.packed_delta import FlatDeltaGraft
from surgery.models.delta_hybrid import DeltaHybrid
from surgery.models.hybrid import share_conversions
from surgery.models.qwen3_5 import TextOfMultimodal


class SurgeryQwen3_5MoeConfig(TextOfMultimodal, Qwen3_5MoeTextConfig):
    """Qwen3_5MoeTextConfig and what was swapped; reads a multimodal checkpoint's configuration as well."""

    model_type = "surgery_qwen3_5_moe"
    multimodal = Qwen3_5MoeConfig

    surgery: dict | None = None


class GraftedQwen3_5MoeForCausalLM(DeltaHybrid, Qwen3_5MoeForCausalLM):
    """A ``qwen3_5_moe`` language model whose Gated DeltaNet mixers are grafts."""

    config: SurgeryQwen3_5MoeConfig
    config_class = SurgeryQwen3_5MoeConfig
    graft = FlatDeltaGraft


class SurgeryQwen3_5MoeForCausalLM(GraftedQwen3_5MoeForCausalLM):
    """A ``qwen3_5_moe`` language model with swapped memories, as ``config.surgery`` says."""


share_conversions("qwen3_5_moe_text", "surgery_qwen3_5_moe", Qwen3_5MoeForCausalLM)
