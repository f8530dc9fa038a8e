"""transformers' ``kimi_linear``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.nn.functional import softplus

from surgery.hosts.hybrid import HybridAdapter


class KimiLinearAdapter(HybridAdapter):
    """Kimi Linear: ``model.layers.i.self_attn.*`` in the layers of Kimi Delta Attention, which decays each key channel
    on its own. Latent attention has the same name in the others and is left alone, as experts are."""

    name = "kimi_linear"
    class_name = "KimiLinear"
    mixer_name = "self_attn"
    title = "Kimi Linear"
    checkpoints = ("moonshotai/Kimi-Linear-48B-A3B-Instruct", "moonshotai/Kimi-Linear-48B-A3B-Base")
    style = "delta"
    channel_decay = True

    def static_log_decay(self, tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> dict[int, Tensor]:
        """[H, K] of each layer."""
        estimate = {}
        for layer in self.mixer_layers(config):
            prefix = self.tensor_prefix(config, layer)
            rate = tensors[prefix + "A_log"].float().exp().view(-1, 1)
            estimate[layer] = -rate * softplus(tensors[prefix + "dt_bias"].float()).view(rate.shape[0], -1)
        return estimate
