"""transformers' ``kimi_linear``."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.nn.functional import softplus

from surgery.hosts.hybrid import HybridAdapter

DENSE = re.compile(r"\.block_sparse_moe\.((?:gate|up|down)_proj\.)")


class KimiLinearAdapter(HybridAdapter):
    """Kimi Linear: ``model.layers.i.self_attn.*`` in the layers of Kimi Delta Attention, which decays each key channel
    on its own. Latent attention has the same name in the others and is left alone, as experts are."""

    name = "kimi_linear"
    class_name = "KimiLinear"
    title = "Kimi Linear"
    checkpoints = ("moonshotai/Kimi-Linear-48B-A3B-Instruct", "moonshotai/Kimi-Linear-48B-A3B-Base")
    style = "delta"
    channel_decay = True

    def completed(self, config: dict[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
        """Whether the MLPs of layers without experts are named as experts: so transformers saves them, while published
        checkpoints call them ``mlp``."""
        return {**config, "dense_as_experts": any(DENSE.search(name) for name in shapes)}

    def disk_tensors(
        self, config: Mapping[str, Any], model: nn.Module, name: str, tensor: Tensor
    ) -> dict[str, Tensor]:
        found = super().disk_tensors(config, model, name, tensor)
        if config.get("dense_as_experts"):
            return found
        return {DENSE.sub(r".mlp.\1", stored): value for stored, value in found.items()}

    def static_log_decay(self, tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> dict[int, Tensor]:
        """[H, K] of each layer."""
        estimate = {}
        for layer in self.mixer_layers(config):
            prefix = self.tensor_prefix(config, layer)
            rate = tensors[prefix + "A_log"].float().exp().view(-1, 1)
            estimate[layer] = -rate * softplus(tensors[prefix + "dt_bias"].float()).view(rate.shape[0], -1)
        return estimate
