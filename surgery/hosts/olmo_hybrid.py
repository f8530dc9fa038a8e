"""transformers' ``olmo_hybrid``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from surgery.errors import UsageError
from surgery.hosts.hybrid import HybridAdapter

# a norm's name in a loaded model -> on disk, where it has its old name
OLD_NORMS = {"input_layernorm": "attention_layer_norm", "post_attention_layernorm": "feedforward_layer_norm"}


class OlmoHybridAdapter(HybridAdapter):
    """Olmo Hybrid: ``model.layers.i.linear_attn.*`` among attention layers, write strengths up to 2."""

    name = "olmo_hybrid"
    class_name = "OlmoHybrid"
    title = "Olmo Hybrid"
    checkpoints = ("allenai/Olmo-Hybrid-7B",)
    style = "delta"
    note = "not where transformers' save_pretrained wrote its convolutions in equal thirds"

    def completed(self, config: dict[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
        """Which norms have their old names: transformers renames some on loading, and not the same ones on saving.

        Raises:
            UsageError: the three convolutions have each other's rows. Upstream holds them as one, and its
                save_pretrained cuts that into equal parts whatever their widths.
        """
        for name, shape in shapes.items():
            if name.endswith(".linear_attn.q_conv1d.weight"):
                rows = shapes.get(name.replace("q_conv1d", "q_proj"), shape)[0]
                if shape[0] != rows:
                    raise UsageError(
                        f"{name} has {shape[0]} rows, its projection {rows}: transformers' save_pretrained cut the "
                        "joint convolution into equal thirds\n"
                        "  cut it again: concatenate q_conv1d, k_conv1d and v_conv1d, and split them by the rows of "
                        "q_proj, k_proj and v_proj"
                    )
        old = [name for name in shapes if name.removesuffix(".weight").endswith(tuple(OLD_NORMS.values()))]
        return {**config, "old_norms": sorted(old)}

    def disk_name(self, config: Mapping[str, Any], name: str) -> str:
        for new, old in OLD_NORMS.items():
            renamed = name.replace(f".{new}.", f".{old}.")
            if renamed != name and renamed in config.get("old_norms", ()):
                return renamed
        return name

    def disk_tensors(
        self, config: Mapping[str, Any], model: nn.Module, name: str, tensor: Tensor
    ) -> dict[str, Tensor]:
        """One for one, under the names that are there; transformers would give some norms others."""
        return {self.disk_name(config, name): tensor}
