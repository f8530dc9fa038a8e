"""transformers' ``mamba2``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from surgery.hosts.base import HostAdapter
from surgery.memory.base import MemoryGeometry

# keys that flash-linear-attention's mamba2 configurations have and transformers' have not; norm_before_gate is none of
# them: early releases of transformers wrote it too, and never read it
FLA_KEYS = (
    "norm_eps", "dt_limit", "dt_min", "dt_max", "dt_init_floor", "rmsnorm", "A_init_range", "D_has_hdim", "conv_init",
    "fuse_norm", "fuse_cross_entropy", "fuse_linear_cross_entropy",
)  # fmt: skip
MAMBA_SSM_KEYS = ("ssm_cfg", "d_model", "n_layer")


def is_fla(config: Mapping[str, Any]) -> bool:
    """Whether a ``mamba2`` config.json was written by flash-linear-attention, whose model type is the same."""
    return config.get("model_type") == "mamba2" and any(key in config for key in FLA_KEYS)


class Mamba2Layout(HostAdapter):
    """What the libraries' layouts share: Mamba-2 alone, ``backbone.layers.i.mixer.*``."""

    backbone_prefix = "backbone."
    mixer_name = "mixer"
    style = "additive"

    def geometry(self, config: Mapping[str, Any], layer: int) -> MemoryGeometry:
        from surgery.models.mamba2 import geometry

        return geometry(self.parse(config))

    def _limit_step(self, step: Tensor, config: Mapping[str, Any]) -> Tensor:
        return step.clamp(*self.parse(config).time_step_limit)


class Mamba2Adapter(Mamba2Layout):
    """Mamba-2 in the layout of transformers."""

    name = "mamba2"
    title = "Mamba-2, transformers' layout"
    checkpoints = ("AntonV/mamba2-2.7b-hf", "mistralai/Mamba-Codestral-7B-v0.1")

    def _classes(self, upgraded: bool) -> tuple[type, type]:
        from surgery.models import mamba2 as models

        if upgraded:
            return models.SurgeryMamba2Config, models.SurgeryMamba2ForCausalLM
        return models.Mamba2Config, models.Mamba2ForCausalLM

    def claims(self, config: Mapping[str, Any]) -> bool:
        return super().claims(config) and not is_fla(config)

    def _foreign(self, config: Mapping[str, Any]) -> str | None:
        found = [key for key in MAMBA_SSM_KEYS if key in config]
        if found:
            return (
                f"{found[0]!r} is a key of mamba_ssm's configurations, which have no model_type, not of transformers' "
                "mamba2: give the checkpoint as its library wrote it"
            )
        return None

    def _upstream(self) -> type:
        from transformers import Mamba2ForCausalLM

        return Mamba2ForCausalLM
