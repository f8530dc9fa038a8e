"""Models of transformers that hold linear mixers among other layers, with every such mixer a graft.

The rest of the model is transformers' own: attention, experts, norms, multipliers, cache. A family is a module with
three classes around its upstream language model; :mod:`surgery.models.bamba` shows the smallest.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers.conversion_mapping import get_checkpoint_conversion_mapping, register_checkpoint_conversion_mapping

from surgery.graft import Graft
from surgery.graft.cache import chosen
from surgery.memory.base import MemoryGeometry, MemoryRule
from surgery.models.common import OLD_CACHE_NAME, PACKING, layer_memory
from surgery.models.configuration import Swap
from surgery.models.initial import InitialWeights


class Hybrid(InitialWeights):
    """Comes before the upstream language model among a class's bases and replaces that model's linear mixers.

    Raises:
        ValueError: on construction, where the configuration asks for something that is not supported, or where a layer
            was swapped that holds no mixer.
    """

    # the upstream class reads this to keep decays and memories from being loaded in a half precision
    _keep_in_fp32_modules_strict: ClassVar[Any] = None

    @classmethod
    def refusal(cls, config: Any) -> str | None:
        """Why a configuration cannot be run here, or None."""
        return None

    @classmethod
    def mixer_paths(cls, config: Any) -> dict[int, str]:
        """Layer -> the name of its linear mixer inside the language model, for every layer that holds one."""
        raise NotImplementedError

    @classmethod
    def geometry(cls, config: Any, layer: int) -> MemoryGeometry:
        """What a memory rule sees of one layer."""
        raise NotImplementedError

    @classmethod
    def step_limit(cls, config: Any) -> tuple[float, float]:
        """What the mixers clamp dt to."""
        return 0.0, math.inf

    @classmethod
    def mixer(cls, config: Any, memory: MemoryRule, layer: int) -> Graft:
        """The graft of one layer."""
        raise NotImplementedError

    def __init__(self, config: Any) -> None:
        reason = self.refusal(config)
        if reason is not None:
            raise ValueError(reason)
        super().__init__(config)
        swap = Swap.of(config)
        paths = self.mixer_paths(config)
        astray = sorted(swap.layers - set(paths))
        if astray:
            raise ValueError(f"surgery.layers: layer {astray[0]} holds no mixer that can be swapped")
        kept = set(Graft.float32) | set(self._keep_in_fp32_modules_strict or ())
        for layer, path in paths.items():
            memory = layer_memory(swap, self.geometry(config, layer), layer)
            self.set_submodule(path, self.mixer(config, memory, layer))
            kept.update(f"memory.{name}" for name, _ in memory._float32_tensors())
        self._keep_in_fp32_modules_strict = kept
        self.trunk._init_weights = self._init_weights  # transformers asks the innermost model around a module
        if OLD_CACHE_NAME:
            for part in (self, self.trunk):
                part.register_forward_pre_hook(old_cache_name, with_kwargs=True)
        self.trunk.register_forward_pre_hook(packed_positions, with_kwargs=True)
        self.post_init()

    # transformers reads a class's source file to learn which forms of attention and experts it has, and remembers the
    # answer for classes derived from it: a graft's own file says neither, so what ran would depend on what was asked
    # first, upstream or the graft, and differ by rounding

    @classmethod
    def _upstream(cls) -> Any:
        return next(base for base in cls.__mro__ if base.__module__.startswith("transformers."))

    @classmethod
    def _can_set_attn_implementation(cls) -> bool:
        return cls._upstream()._can_set_attn_implementation()

    @classmethod
    def _can_set_experts_implementation(cls) -> bool:
        return cls._upstream()._can_set_experts_implementation()

    @property
    def trunk(self) -> nn.Module:
        """All but the head."""
        return getattr(self, self.base_model_prefix)


class OwnType:
    """Comes before an upstream configuration among a class's bases and keeps the class's model type, whatever type the
    configuration that is read has.

    Attributes:
        from_tensors: keys that an adapter adds after looking at the tensors, which no configuration keeps.
    """

    from_tensors: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        apart = ("model_type", *cls.from_tensors)
        return super().from_dict({key: value for key, value in config_dict.items() if key not in apart}, **kwargs)


def old_cache_name(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    """A cache under the one name that a transformers without ``cache`` knows."""
    cache = chosen(*(kwargs.pop(name, None) for name in ("cache", "cache_params", "past_key_values")))
    return args, kwargs if cache is None else {**kwargs, "past_key_values": cache}


def packed_positions(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    """Before the trunk runs: from ``reset`` [B, T] bool (True on the first token of each packed document), position ids
    that begin anew in each document, by which transformers keeps attention inside it. ``reset`` itself reaches the
    grafts through the blocks' keyword arguments.

    Raises:
        ValueError: packing in another way, which the grafts would not see, or packing beside a cache.
    """
    given = [name for name in PACKING if kwargs.get(name) is not None]
    if given:
        raise ValueError(f"{given[0]} is not read here: mark the first token of each document in reset [B, T]")
    reset = kwargs.get("reset")
    if reset is None:
        kwargs.pop("reset", None)
        return args, kwargs
    if chosen(*(kwargs.get(name) for name in ("cache", "cache_params", "past_key_values"))) is not None:
        raise ValueError("packed documents cannot continue a cache: give reset or a cache, not both")
    mask = kwargs.pop("attention_mask", None)
    reset = reset.bool()
    if mask is not None:
        # padding becomes a document of its own, since transformers sees documents only where there is no mask
        reset = reset.clone()
        reset[:, 1:] |= mask[:, 1:].bool() != mask[:, :-1].bool()
    kwargs |= {"reset": reset, "position_ids": restarting_positions(reset), "use_cache": False}
    return args, kwargs


def restarting_positions(reset: Tensor) -> Tensor:
    """[B, T] bool -> [B, T] int64: the number of tokens since the document began."""
    place = torch.arange(reset.shape[1], device=reset.device).expand(reset.shape)
    return place - torch.where(reset, place, 0).cummax(1).values


def share_conversions(
    host: str, upgraded: str, upstream: type, *models: type, without: tuple[str, ...] = ()
) -> None:
    """Let transformers rename the tensors of these models on loading and saving as it does the upstream model's.

    Args:
        host, upgraded: the model types of base and upgraded checkpoints.
        upstream: the upstream language model; models: those made of it.
        without: parts of names in upstream's memory that the grafts do not have: they hold those tensors as the disk
            does. The upgraded type's configuration must then serve base models as well.
    """
    by_class = get_checkpoint_conversion_mapping(upstream.__name__)
    types = (upgraded,) if without else (upgraded, host)
    for name in types if by_class is None else [model.__name__ for model in models]:
        mapping = get_checkpoint_conversion_mapping(host) if by_class is None else by_class
        if mapping is not None:
            mapping = [step for step in mapping if not any(part in str(step.target_patterns) for part in without)]
            register_checkpoint_conversion_mapping(name, mapping, overwrite=True)
