"""transformers' ``falcon_h1``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from surgery.hosts.hybrid import HybridAdapter


class FalconH1Adapter(HybridAdapter):
    """Falcon-H1: ``model.layers.i.mamba.*`` beside attention in every layer."""

    name = "falcon_h1"
    class_name = "FalconH1"
    title = "Falcon-H1"
    checkpoints = ("tiiuae/Falcon-H1-0.5B-Base", "tiiuae/Falcon-H1-1.5B-Deep-Instruct")
    style = "additive"

    def logit_scale(self, config: Mapping[str, Any]) -> float:
        return self.parse(config).lm_head_multiplier
