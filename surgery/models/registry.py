"""The upgraded model types: where each one's configuration and model class stand.

transformers asks for the configurations while it imports itself, and for the model classes never before a
configuration's first instance; so both tables are filled by name, each at its time.
"""

from __future__ import annotations

import importlib
from typing import Any

from surgery.models.stand_ins import introduce, stand_ins

# (module of the configuration, its class, module of the model, its class), all under surgery.models
MODELS: tuple[tuple[str, str, str, str], ...] = (
    ("configuration", "SurgeryMamba2Config", "mamba2", "SurgeryMamba2ForCausalLM"),
    ("configuration", "SurgeryGatedDeltaNetConfig", "gated_deltanet", "SurgeryGatedDeltaNetForCausalLM"),
    ("mamba2_configuration", "SurgeryFlaMamba2Config", "fla_mamba2", "SurgeryFlaMamba2ForCausalLM"),
    ("mamba2_configuration", "SurgeryMambaSSMConfig", "mamba_ssm", "SurgeryMambaSSMForCausalLM"),
)
_announced = False


def configurations() -> list[type]:
    """The configuration classes, or what stands in for them until they are asked for. From now on the first instance
    of one calls :func:`announce_models`."""
    from surgery.models.configuration import Announced

    Announced.announce = staticmethod(announce_models)
    return [*(_load(module, name) for module, name, _, _ in MODELS), *stand_ins()]


def announce_models() -> None:
    """Let transformers know the model classes. Called by a configuration's first instance, which always comes
    before the model and always after transformers has finished importing itself."""
    global _announced
    if _announced:
        return
    _announced = True
    for config_module, config, model_module, model in MODELS:
        introduce(_load(config_module, config), _load(model_module, model))


def _load(module: str, name: str) -> Any:
    return getattr(importlib.import_module(f"surgery.models.{module}"), name)
