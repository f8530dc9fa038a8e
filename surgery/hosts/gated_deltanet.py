"""flash-linear-attention's ``gated_deltanet``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from surgery.errors import UsageError
from surgery.hosts.base import HostAdapter
from surgery.memory.base import MemoryGeometry


class GatedDeltaNetAdapter(HostAdapter):
    """Gated DeltaNet in the layout of flash-linear-attention: ``model.layers.i.attn.*``."""

    name = "gated_deltanet"
    backbone_prefix = "model."
    mixer_name = "attn"

    def _classes(self, upgraded: bool) -> tuple[type, type]:
        from surgery.models import gated_deltanet as models

        if upgraded:
            return models.SurgeryGatedDeltaNetConfig, models.SurgeryGatedDeltaNetForCausalLM
        return models.GatedDeltaNetConfig, models.GatedDeltaNetForCausalLM

    def _refusal(self, config: Any) -> str | None:
        from surgery.models.configuration import Swap
        from surgery.models.gated_deltanet import refusal

        Swap.of(config)
        return refusal(config)

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
