"""flash-linear-attention's ``mamba2``: transformers' names for the tensors, the library's own configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from surgery.errors import UsageError
from surgery.hosts.base import HostAdapter, decode_floats
from surgery.hosts.mamba2 import is_fla
from surgery.memory.base import MemoryGeometry


class FlaMamba2Adapter(HostAdapter):
    """Mamba-2 in the layout of flash-linear-attention, told from transformers' by the keys of its configuration.

    Importing that library would take over transformers' Auto classes for every ``mamba2`` checkpoint, so nothing here
    does, except where its own implementation is asked for.
    """

    name = "fla_mamba2"
    base_type = "mamba2"
    backbone_prefix = "backbone."
    mixer_name = "mixer"
    title = "Mamba-2, flash-linear-attention's layout"
    style = "additive"

    def claims(self, config: Mapping[str, Any]) -> bool:
        return is_fla(config) or config.get("model_type") == self.model_types[1]

    def _classes(self, upgraded: bool) -> tuple[type, type]:
        from surgery.models import fla_mamba2 as models

        if upgraded:
            return models.SurgeryFlaMamba2Config, models.SurgeryFlaMamba2ForCausalLM
        return models.FlaMamba2Config, models.FlaMamba2ForCausalLM

    def _refusal(self, config: Any) -> str | None:
        from surgery.models.configuration import Swap
        from surgery.models.fla_mamba2 import refusal

        Swap.of(config)
        return refusal(config)

    def geometry(self, config: Mapping[str, Any], layer: int) -> MemoryGeometry:
        from surgery.models.mamba2 import geometry

        return geometry(self.parse(config))

    def _limit_step(self, step: Tensor, config: Mapping[str, Any]) -> Tensor:
        return step.clamp(*decode_floats(list(config.get("dt_limit", (0.0, float("inf"))))))

    def _upstream(self) -> type:
        try:
            from fla.models import Mamba2ForCausalLM
        except ImportError:
            raise UsageError(
                "fla_mamba2: the upstream implementation is flash-linear-attention, which is not installed"
            ) from None
        return Mamba2ForCausalLM
