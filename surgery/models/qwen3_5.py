"""``qwen3_5``: the language model inside a multimodal one, Gated DeltaNet layers among gated attention.

Such a checkpoint is opened for text, as transformers' AutoModelForCausalLM opens it: from ``text_config`` in its
configuration and ``model.language_model.*`` among its tensors. A checkpoint of the language model alone
(``qwen3_5_text``) has the configuration flat and either name. A configuration of the type ``surgery_qwen3_5``, flat,
serves all of them.
"""

from __future__ import annotations

from typing import Any, ClassVar

from transformers.configuration_utils import PreTrainedConfig
from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5Config, Qwen3_5TextConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5ForCausalLM

from surgery.graft.packed_delta import FlatDeltaGraft
from surgery.models.delta_hybrid import DeltaHybrid
from surgery.models.hybrid import OwnType, share_conversions


class TextOfMultimodal(OwnType):
    """The same, and reads a text configuration out of a multimodal one, too."""

    base_config_key = ""  # or transformers would read text_config alone, and what was swapped stands beside it
    from_tensors = ("nested_names",)
    multimodal: ClassVar[type[PreTrainedConfig]]

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        if "text_config" in config_dict:
            beside = {key: config_dict[key] for key in ("surgery", "architectures", "auto_map") if key in config_dict}
            dtype = config_dict.get("dtype") or config_dict.get("torch_dtype")
            apart = ("surgery", "model_type", *cls.from_tensors)
            whole = {key: value for key, value in config_dict.items() if key not in apart}
            config_dict = {**cls.multimodal.from_dict(whole).get_text_config().to_dict(), **beside}
            if whole.get("tie_word_embeddings") and "tie_word_embeddings" not in whole["text_config"]:
                config_dict["tie_word_embeddings"] = True
            if dtype is not None:  # what the tools write stands at the top
                config_dict["dtype"] = dtype
        return super().from_dict(config_dict, **kwargs)


class SurgeryQwen3_5Config(TextOfMultimodal, Qwen3_5TextConfig):
    """Qwen3_5TextConfig and what was swapped; reads a multimodal checkpoint's configuration as well."""

    model_type = "surgery_qwen3_5"
    multimodal = Qwen3_5Config

    surgery: dict | None = None


class GraftedQwen3_5ForCausalLM(DeltaHybrid, Qwen3_5ForCausalLM):
    """A ``qwen3_5`` language model whose Gated DeltaNet mixers are grafts."""

    config: SurgeryQwen3_5Config
    config_class = SurgeryQwen3_5Config
    graft = FlatDeltaGraft


class SurgeryQwen3_5ForCausalLM(GraftedQwen3_5ForCausalLM):
    """A ``qwen3_5`` language model with swapped memories, as ``config.surgery`` says."""


share_conversions("qwen3_5_text", "surgery_qwen3_5", Qwen3_5ForCausalLM)
