"""transformers' ``qwen3_5`` and ``qwen3_5_moe``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from surgery.hosts.hybrid import HybridAdapter

NESTED = "model.language_model."


class Qwen3_5Adapter(HybridAdapter):
    """Qwen3.5: the language model of a multimodal checkpoint, ``model.language_model.layers.i.linear_attn.*`` among
    attention layers, or that language model alone (``qwen3_5_text``), under either name. The vision tower and the
    tensors under ``mtp`` are read by nothing here and kept."""

    name = "qwen3_5"
    class_name = "Qwen3_5"
    title = "Qwen3.5"
    checkpoints = ("Qwen/Qwen3.5-27B",)
    style = "delta"
    note = "for text: the vision tower stays in the checkpoint and is not run"

    def claims(self, config: Mapping[str, Any]) -> bool:
        return config.get("model_type") in (*self.model_types, f"{self.name}_text")

    def completed(self, config: dict[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
        """Whether the language model's tensors are named as inside the multimodal model."""
        return {**config, "nested_names": any(name.startswith(NESTED) for name in shapes)}

    def disk_name(self, config: Mapping[str, Any], name: str) -> str:
        nested = config.get("nested_names", "text_config" in config)
        return NESTED + name.removeprefix("model.") if nested and name.startswith("model.") else name


class Qwen3_5MoeAdapter(Qwen3_5Adapter):
    """Qwen3.5 with experts."""

    name = "qwen3_5_moe"
    class_name = "Qwen3_5Moe"
    title = "Qwen3.5 MoE"
    checkpoints = ("Qwen/Qwen3.5-35B-A3B",)
