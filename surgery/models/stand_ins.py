"""Configurations of upgraded hybrids, before their real classes can exist.

Those derive from transformers' own configuration classes, which cannot be imported while transformers fills its table
of them. So the table holds a stand-in for each, which gives way to the real class, and makes the model class known,
the first time that one is asked for.
"""

from __future__ import annotations

import importlib
from typing import Any

from transformers.configuration_utils import PreTrainedConfig

# model type -> (module of surgery.models, name its classes are built from)
HYBRIDS: dict[str, tuple[str, str]] = {
    "surgery_bamba": ("bamba", "Bamba"),
    "surgery_qwen3_next": ("qwen3_next", "Qwen3Next"),
    "surgery_qwen3_5": ("qwen3_5", "Qwen3_5"),
    "surgery_qwen3_5_moe": ("qwen3_5_moe", "Qwen3_5Moe"),
    "surgery_olmo_hybrid": ("olmo_hybrid", "OlmoHybrid"),
    "surgery_kimi_linear": ("kimi_linear", "KimiLinear"),
    "surgery_granitemoehybrid": ("granitemoehybrid", "GraniteMoeHybrid"),
    "surgery_zamba2": ("zamba2", "Zamba2"),
    "surgery_falcon_h1": ("falcon_h1", "FalconH1"),
    "surgery_nemotron_h": ("nemotron_h", "NemotronH"),
}


def hybrid_configuration(model_type: str) -> type[PreTrainedConfig]:
    """The real configuration class, known to the Auto classes from now on, as its model is.

    Raises:
        ImportError: the installed transformers has no such family.
    """
    from transformers.models.auto.configuration_auto import AutoConfig

    module, name = HYBRIDS[model_type]
    classes = importlib.import_module(f"surgery.models.{module}")
    configuration = getattr(classes, f"Surgery{name}Config")
    AutoConfig.register(model_type, configuration, exist_ok=True)
    introduce(configuration, getattr(classes, f"Surgery{name}ForCausalLM"))
    return configuration


def introduce(configuration: type[PreTrainedConfig], model: type) -> None:
    """Let AutoModelForCausalLM know a model class, and ``transformers serve``; see :mod:`surgery.models.serving`."""
    from transformers.models.auto.modeling_auto import AutoModelForCausalLM

    from surgery.models.serving import show

    AutoModelForCausalLM.register(configuration, model, exist_ok=True)
    show(model)


def stand_ins() -> list[type[PreTrainedConfig]]:
    """One stand-in a hybrid, each an acceptable entry of transformers' table."""
    return [_stand_in(model_type) for model_type in HYBRIDS]


def _stand_in(model_type: str) -> type[PreTrainedConfig]:
    kind = model_type

    class StandIn(PreTrainedConfig):
        model_type = kind

        def __new__(cls, *args: Any, **kwargs: Any) -> PreTrainedConfig:
            return hybrid_configuration(kind)(*args, **kwargs)

        @classmethod
        def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
            return hybrid_configuration(kind).from_dict(config_dict, **kwargs)

    return StandIn
