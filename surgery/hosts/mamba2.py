"""transformers' ``mamba2``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from surgery.hosts.base import HostAdapter, decode_floats
from surgery.memory.base import MemoryGeometry

# keys that other libraries' mamba2 configurations have and transformers' has not; norm_before_gate is none of them:
# early releases of transformers wrote it too, and never read it
FLA_KEYS = ("rmsnorm", "norm_eps", "dt_limit", "fuse_norm")
MAMBA_SSM_KEYS = ("ssm_cfg", "d_model", "n_layer")


class Mamba2Adapter(HostAdapter):
    """Mamba-2 in the layout of transformers: ``backbone.layers.i.mixer.*``."""

    name = "mamba2"
    backbone_prefix = "backbone."
    mixer_name = "mixer"

    def _classes(self, upgraded: bool) -> tuple[type, type]:
        from surgery.models import mamba2 as models

        if upgraded:
            return models.SurgeryMamba2Config, models.SurgeryMamba2ForCausalLM
        return models.Mamba2Config, models.Mamba2ForCausalLM

    def _refusal(self, config: Any) -> str | None:
        from surgery.models.configuration import Swap
        from surgery.models.mamba2 import refusal

        Swap.of(config)
        return refusal(config)

    def _foreign(self, config: Mapping[str, Any]) -> str | None:
        for keys, library in ((FLA_KEYS, "flash-linear-attention"), (MAMBA_SSM_KEYS, "mamba_ssm")):
            found = [key for key in keys if key in config]
            if found:
                return f"{found[0]!r} is a key of {library}'s mamba2, not of transformers'; convert it first"
        return None

    def geometry(self, config: Mapping[str, Any], layer: int) -> MemoryGeometry:
        from surgery.models.mamba2 import geometry

        return geometry(self.parse(config))

    def _limit_step(self, step: Tensor, config: Mapping[str, Any]) -> Tensor:
        low, high = decode_floats(list(config.get("time_step_limit", (0.0, float("inf")))))
        return step.clamp(low, high)

    def _upstream(self) -> type:
        from transformers import Mamba2ForCausalLM

        return Mamba2ForCausalLM
