"""transformers' ``granitemoehybrid``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from surgery.hosts.hybrid import HybridAdapter

# the experts' names in a loaded model -> on disk
EXPERTS = {
    "block_sparse_moe.experts.gate_up_proj": "block_sparse_moe.input_linear.weight",
    "block_sparse_moe.experts.down_proj": "block_sparse_moe.output_linear.weight",
    "block_sparse_moe.router.weight": "block_sparse_moe.router.layer.weight",
}


class GraniteMoeHybridAdapter(HybridAdapter):
    """Granite 4.0 H: ``model.layers.i.mamba.*`` among attention layers, with or without experts."""

    name = "granitemoehybrid"
    class_name = "GraniteMoeHybrid"
    title = "Granite 4.0 H"
    checkpoints = ("ibm-granite/granite-4.0-h-micro", "ibm-granite/granite-4.0-h-tiny")
    style = "additive"
    note = "documents are not packed for flash attention; load with `attn_implementation='sdpa'` to train on them"

    def disk_name(self, config: Mapping[str, Any], name: str) -> str:
        for loaded, stored in EXPERTS.items():
            if name.endswith(loaded):
                return name.removesuffix(loaded) + stored
        return name

    def logit_scale(self, config: Mapping[str, Any]) -> float:
        return 1.0 / self.parse(config).logits_scaling
