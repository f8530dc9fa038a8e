"""``qwen3_next``: Gated DeltaNet layers among gated attention, each followed by experts."""

from __future__ import annotations

from transformers.models.qwen3_next.configuration_qwen3_next import Qwen3NextConfig
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextForCausalLM

from surgery.graft.packed_delta import InterleavedDeltaGraft
from surgery.models.delta_hybrid import DeltaHybrid
from surgery.models.hybrid import share_conversions


class SurgeryQwen3NextConfig(Qwen3NextConfig):
    """Qwen3NextConfig and what was swapped."""

    model_type = "surgery_qwen3_next"

    surgery: dict | None = None


class GraftedQwen3NextForCausalLM(DeltaHybrid, Qwen3NextForCausalLM):
    """A ``qwen3_next`` language model whose Gated DeltaNet mixers are grafts."""

    config: Qwen3NextConfig
    config_class = Qwen3NextConfig
    graft = InterleavedDeltaGraft


class SurgeryQwen3NextForCausalLM(GraftedQwen3NextForCausalLM):
    """A ``qwen3_next`` language model with swapped memories, as ``config.surgery`` says."""

    config: SurgeryQwen3NextConfig
    config_class = SurgeryQwen3NextConfig


share_conversions(
    "qwen3_next",
    "surgery_qwen3_next",
    Qwen3NextForCausalLM,
    GraftedQwen3NextForCausalLM,
    SurgeryQwen3NextForCausalLM,
)
