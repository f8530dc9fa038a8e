"""flash-linear-attention's ``gated_deltanet``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from surgery.errors import UsageError
from surgery.hosts.base import HostAdapter
from surgery.memory.base import MemoryGeometry


class GatedDeltaNetAdapter(HostAdapter):
    """Gated DeltaNet in the layout of flash-linear-attention: ``model.layers.i.attn.*``."""

    name = "gated_deltanet"
    backbone_prefix = "model."
    mixer_name = "attn"
    title = "Gated DeltaNet, flash-linear-attention's layout"
    style = "delta"

    def _classes(self, upgraded: bool) -> tuple[type, type]:
        from surgery.models import gated_deltanet as models

        if upgraded:
            return models.SurgeryGatedDeltaNetConfig, models.SurgeryGatedDeltaNetForCausalLM
        return models.GatedDeltaNetConfig, models.GatedDeltaNetForCausalLM

    def mixer_layers(self, config: Mapping[str, Any]) -> list[int]:
        from surgery.models.gated_deltanet import attention_layers

        parsed = self.parse(config)
        attention = attention_layers(parsed)
        return [layer for layer in range(parsed.num_hidden_layers) if layer not in attention]

    def mixers(self, model: nn.Module) -> dict[int, nn.Module]:
        return {layer: block.attn for layer, block in enumerate(model.model.layers) if hasattr(block.attn, "memory")}

    def geometry(self, config: Mapping[str, Any], layer: int) -> MemoryGeometry:
        from surgery.models.gated_deltanet import geometry

        return geometry(self.parse(config))

    def _upstream(self) -> type:
        try:
            from fla.models import GatedDeltaNetForCausalLM
        except ImportError:
            raise UsageError(
                "gated_deltanet: the upstream implementation is flash-linear-attention, which is not installed"
            ) from None
        return GatedDeltaNetForCausalLM
