"""What the adapters of transformers' hybrids share: linear mixers among layers that the tools leave alone."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from surgery.errors import UsageError
from surgery.hosts.base import HostAdapter
from surgery.memory.base import MemoryGeometry


class HybridAdapter(HostAdapter):
    """A family of :mod:`surgery.models.hybrid`.

    Attributes:
        module: of :mod:`surgery.models`, where its classes are; the model type's name unless told.
        class_name: upstream's language model, ``<class_name>ForCausalLM``; its configuration ``<class_name>Config``.
    """

    class_name: ClassVar[str]
    backbone_prefix = "model."

    @property
    def module(self) -> str:
        return self.name

    def _module(self) -> Any:
        try:
            return importlib.import_module(f"surgery.models.{self.module}")
        except ImportError as error:
            raise UsageError(f"{self.name}: the installed transformers has no such model ({error})") from None

    def _classes(self, upgraded: bool) -> tuple[type, type]:
        kind = "Surgery" if upgraded else "Grafted"
        model = getattr(self._module(), f"{kind}{self.class_name}ForCausalLM")
        return model.config_class, model

    def _upstream(self) -> type:
        import transformers

        return getattr(transformers, f"{self.class_name}ForCausalLM")

    def surgery_config(self, config: Mapping[str, Any], surgery: Mapping[str, Any]) -> dict[str, Any]:
        return super().surgery_config(self._as_written(config), surgery)

    def base_config(self, config: Mapping[str, Any]) -> dict[str, Any]:
        return super().base_config(self._as_written(config))

    def _as_written(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Without what :meth:`completed` added."""
        added = getattr(self._classes(False)[0], "from_tensors", ())
        return {key: value for key, value in config.items() if key not in added}

    def geometry(self, config: Mapping[str, Any], layer: int) -> MemoryGeometry:
        return self._classes(False)[1].geometry(self.parse(config), layer)

    def _paths(self, config: Mapping[str, Any]) -> dict[int, str]:
        return self._classes(False)[1].mixer_paths(self.parse(config))

    def mixer_layers(self, config: Mapping[str, Any]) -> list[int]:
        return sorted(self._paths(config))

    def tensor_prefix(self, config: Mapping[str, Any], layer: int) -> str:
        return self.disk_name(config, f"{self._paths(config)[layer]}.")

    def expected_tensors(self, config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
        """Name and shape of every tensor of the mixers. What else a hybrid holds is named in several ways on disk, and
        passes through the operation untouched; :func:`surgery.opening.check_names` looks whether it is complete."""
        from surgery.models.common import layer_memory
        from surgery.models.configuration import Swap

        parsed = self.parse(config)
        model_class = self._classes(False)[1]
        swap = Swap.of(parsed)
        expected = {}
        for layer, path in model_class.mixer_paths(parsed).items():
            with torch.device("meta"):
                memory = layer_memory(swap, model_class.geometry(parsed, layer), layer)
                graft = model_class.mixer(parsed, memory, layer)
            prefix = self.disk_name(config, f"{path}.")
            expected |= {prefix + name: tuple(tensor.shape) for name, tensor in graft.state_dict().items()}
        return expected

    def disk_tensors(
        self, config: Mapping[str, Any], model: nn.Module, name: str, tensor: Tensor
    ) -> dict[str, Tensor]:
        """As transformers would save it: it stacks on loading what the disk holds one by one, experts above all."""
        from transformers.core_model_loading import revert_weight_conversion

        return revert_weight_conversion(model, {name: tensor})

    def _limit_step(self, step: Tensor, config: Mapping[str, Any]) -> Tensor:
        return step.clamp(*self._classes(False)[1].step_limit(self.parse(config)))

    def ties(self, config: Mapping[str, Any]) -> dict[str, str]:
        if not self.parse(config).tie_word_embeddings:
            return {}
        names = ("lm_head.weight", "model.embed_tokens.weight")
        head, embeddings = (self.disk_name(config, name) for name in names)
        return {head: embeddings}

    def mixers(self, model: nn.Module) -> dict[int, nn.Module]:
        paths = self._classes(False)[1].mixer_paths(model.config)
        return {layer: model.get_submodule(path) for layer, path in paths.items()}

    def backbone(self, model: nn.Module) -> nn.Module:
        return getattr(model, model.base_model_prefix)
