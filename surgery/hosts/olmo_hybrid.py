"""transformers' ``olmo_hybrid``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from surgery.errors import UsageError
from surgery.hosts.hybrid import HybridAdapter


class OlmoHybridAdapter(HybridAdapter):
    """Olmo Hybrid: ``model.layers.i.linear_attn.*`` among attention layers, write strengths up to 2."""

    name = "olmo_hybrid"
    class_name = "OlmoHybrid"
    mixer_name = "linear_attn"
    title = "Olmo Hybrid"
    checkpoints = ("allenai/Olmo-Hybrid-7B",)
    style = "delta"
    note = "not where transformers' save_pretrained wrote its convolutions in equal thirds"

    def completed(self, config: dict[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
        """The configuration as it is.

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
        return config
