"""flash-linear-attention's ``mamba2``: transformers' names for the tensors, the library's own configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from surgery.errors import UsageError
from surgery.hosts.mamba2 import Mamba2Layout, is_fla


class FlaMamba2Adapter(Mamba2Layout):
    """Mamba-2 in the layout of flash-linear-attention, told from transformers' by the keys of its configuration.

    Importing that library would take over transformers' Auto classes for every ``mamba2`` checkpoint, so nothing here
    does, except where its own implementation is asked for.
    """

    name = "fla_mamba2"
    base_type = "mamba2"
    title = "Mamba-2, flash-linear-attention's layout"

    def claims(self, config: Mapping[str, Any]) -> bool:
        return is_fla(config) or config.get("model_type") == self.model_types[1]

    def _classes(self, upgraded: bool) -> tuple[type, type]:
        from surgery.models import fla_mamba2 as models

        if upgraded:
            return models.SurgeryFlaMamba2Config, models.SurgeryFlaMamba2ForCausalLM
        return models.FlaMamba2Config, models.FlaMamba2ForCausalLM

    def _upstream(self) -> type:
        try:
            from fla.models import Mamba2ForCausalLM
        except ImportError:
            raise UsageError(
                "fla_mamba2: the upstream implementation is flash-linear-attention, which is not installed"
            ) from None
        return Mamba2ForCausalLM
