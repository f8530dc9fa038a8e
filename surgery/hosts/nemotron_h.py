"""transformers' ``nemotron_h``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from surgery.hosts.hybrid import HybridAdapter


class NemotronHAdapter(HybridAdapter):
    """Nemotron-H: ``backbone.layers.i.mixer.*``, where the pattern has an M; loaded, the prefix is ``model.``."""

    name = "nemotron_h"
    class_name = "NemotronH"
    backbone_prefix = "backbone."
    title = "Nemotron-H"
    checkpoints = ("nvidia/Nemotron-H-8B-Base-8K", "nvidia/NVIDIA-Nemotron-Nano-9B-v2")
    style = "additive"

    def disk_name(self, config: Mapping[str, Any], name: str) -> str:
        return f"backbone.{name.removeprefix('model.')}" if name.startswith("model.") else name

    def ties(self, config: Mapping[str, Any]) -> dict[str, str]:
        return {}  # this family never ties its head, whatever its configuration says
