"""Configurations of the models.

transformers imports this file while it imports itself (see :mod:`surgery.registration`), so nothing but its
configuration base class is needed here: not even its own Mamba2Config, whose keys are therefore repeated.

``config.surgery`` says what was swapped: {"schema": 1, "rule": name, "layers": [indices], "options": {...}, "base":
name}. Where the layers do not all hold the same rule with the same options, "schema" is 2 and "swaps" lists {"rule",
"layers", "options"} of each operation; "layers" then names all of them. Empty or missing, no layer is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from transformers.configuration_utils import PreTrainedConfig

SCHEMAS = (1, 2)


@dataclass(frozen=True)
class Swap:
    """What ``config.surgery`` says, checked: layer -> its rule and the rule's options."""

    rules: Mapping[int, tuple[str, dict[str, Any]]] = field(default_factory=dict)

    @property
    def layers(self) -> frozenset[int]:
        """The swapped layers."""
        return frozenset(self.rules)

    @classmethod
    def of(cls, config: PreTrainedConfig) -> Swap:
        """Read ``config.surgery``.

        Raises:
            ValueError: another schema, a missing rule, or layers that are not distinct indices of this model.
        """
        return cls.read(getattr(config, "surgery", None), config.num_hidden_layers)

    @classmethod
    def read(cls, swap: Mapping[str, Any] | None, num_layers: int) -> Swap:
        """The same from the value itself, for a model of ``num_layers``."""
        if not swap:
            return cls()
        if not isinstance(swap, Mapping):
            raise ValueError(f"surgery: {swap!r} is no mapping of rule and layers")
        schema = swap.get("schema")
        if schema not in SCHEMAS:
            raise ValueError(f"surgery.schema is {schema!r}; this release reads {' and '.join(map(str, SCHEMAS))}")
        rules: dict[int, tuple[str, dict[str, Any]]] = {}
        for one in swap.get("swaps", []) if schema == 2 else [swap]:
            layers = one.get("layers", [])
            if not all(isinstance(layer, int) and 0 <= layer < num_layers for layer in layers) or len(
                {*layers, *rules}
            ) < len(layers) + len(rules):
                raise ValueError(f"surgery.layers {layers} are not distinct indices below {num_layers}")
            if not isinstance(one.get("rule"), str):
                raise ValueError("surgery.rule names no memory rule")
            rules |= {layer: (one["rule"], dict(one.get("options") or {})) for layer in layers}
        return cls(rules)

    def written(self, **about: Any) -> dict[str, Any]:
        """``config.surgery``, with ``about`` beside it: schema 1 where all layers hold one rule, else schema 2."""
        swaps: list[dict[str, Any]] = []
        for layer, (rule, options) in sorted(self.rules.items()):
            known = next((one for one in swaps if (one["rule"], one["options"]) == (rule, options)), None)
            if known is None:
                swaps.append(known := {"rule": rule, "layers": [], "options": options})
            known["layers"].append(layer)
        if len(swaps) == 1:
            return {"schema": 1, **swaps[0], **about}
        rules = " + ".join(dict.fromkeys(one["rule"] for one in swaps))
        return {"schema": 2, "rule": rules, "layers": sorted(self.rules), "swaps": swaps, **about}


class Announced:
    """Comes before a configuration among a class's bases: each instance lets its model be known.

    Attributes:
        announce: makes the model classes known; nothing until :mod:`surgery.models.registry` sets it, and in the copy
            of this file beside a checkpoint, whose configuration names the model class itself.
    """

    announce: ClassVar[Callable[[], None]] = staticmethod(lambda: None)

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**kwargs)
        Announced.announce()


class SurgeryMamba2Config(Announced, PreTrainedConfig):
    """The keys and defaults of transformers' Mamba2Config, and what was swapped."""

    model_type = "surgery_mamba2"

    num_heads: int = 128
    head_dim: int = 64
    vocab_size: int = 32768
    hidden_size: int = 4096
    state_size: int = 128
    num_hidden_layers: int = 64
    layer_norm_epsilon: float = 1e-5
    pad_token_id: int | None = 1
    bos_token_id: int | None = 0
    eos_token_id: int | list[int] | None = 2
    expand: int = 2
    conv_kernel: int = 4
    n_groups: int = 8
    use_bias: bool = False
    use_conv_bias: bool = True
    hidden_act: str = "silu"
    initializer_range: float = 0.1
    residual_in_fp32: bool = True
    time_step_rank: str | int = "auto"
    time_step_min: float = 0.001
    time_step_max: float = 0.1
    time_step_floor: float = 1e-4
    time_step_limit: list[float] | tuple[float, ...] = (0.0, float("inf"))
    rescale_prenorm_residual: bool = False
    use_cache: bool = True
    chunk_size: int = 256
    tie_word_embeddings: bool = False
    surgery: dict | None = None

    def __post_init__(self, **kwargs):
        if self.time_step_rank == "auto":
            self.time_step_rank = math.ceil(self.hidden_size / 16)
        super().__post_init__(**kwargs)

    @property
    def layer_types(self) -> list[str]:
        """Every layer is linear attention; transformers' cache asks."""
        return ["linear_attention"] * self.num_hidden_layers


class GatedDeltaNetConfig(PreTrainedConfig):
    """flash-linear-attention's keys for ``gated_deltanet``; keys it adds that change nothing here are kept as they are.

    ``attn`` names a hybrid's attention layers; see :mod:`surgery.models.attention`.
    """

    model_type = "gated_deltanet"
    keys_to_ignore_at_inference = ("past_key_values", "cache")

    vocab_size: int = 32000
    hidden_size: int = 2048
    num_hidden_layers: int = 21
    num_heads: int = 6
    num_v_heads: int | None = None
    head_dim: int = 256
    expand_v: float = 2.0
    use_gate: bool = True
    output_gate_activation: str = "swish"
    use_short_conv: bool = True
    conv_size: int = 4
    conv_bias: bool = False
    allow_neg_eigval: bool = False
    attn_mode: str = "chunk"
    attn: Any = None
    attnres_block_size: int | None = None
    hidden_ratio: int | None = 4
    intermediate_size: int | None = None
    hidden_act: str = "swish"
    norm_eps: float = 1e-6
    max_position_embeddings: int = 2048
    initializer_range: float = 0.02
    use_cache: bool = True
    pad_token_id: int | None = None
    bos_token_id: int | None = 1
    eos_token_id: int | list[int] | None = 2
    tie_word_embeddings: bool = False

    def _attention(self) -> list[dict]:
        return self.attn if isinstance(self.attn, list) else [self.attn] if self.attn else []

    @property
    def sliding_window(self) -> int | None:
        """The tokens that windowed attention layers see; None where there are none, or where they differ in it, since
        transformers' cache, which asks, knows one window alone: it then keeps all tokens, and masks leave out the rest.
        """
        windows = {one["window_size"] for one in self._attention() if one.get("window_size") is not None}
        return windows.pop() if len(windows) == 1 else None

    @sliding_window.setter
    def sliding_window(self, value: Any) -> None:
        self.__dict__["sliding_window"] = value  # a key of no meaning in this layout: kept and written as it was

    @property
    def layer_types(self) -> list[str]:
        """Linear attention, and in a hybrid full or windowed attention; transformers' cache asks."""
        kinds = ["linear_attention"] * self.num_hidden_layers
        for one in self._attention():
            windowed = one.get("window_size") is not None and self.sliding_window is not None
            # what is no index of a layer is told when the model is built
            for layer in set(one.get("layers") or ()).intersection(range(self.num_hidden_layers)):
                kinds[layer] = "sliding_attention" if windowed else "full_attention"
        return kinds

    @property
    def mlp_size(self) -> int:
        """``intermediate_size``, or the multiple of 256 at or above two thirds of hidden_size * hidden_ratio."""
        if self.intermediate_size is not None:
            return self.intermediate_size
        return -(-int(self.hidden_size * (self.hidden_ratio or 4) * 2 / 3) // 256) * 256


class SurgeryGatedDeltaNetConfig(Announced, GatedDeltaNetConfig):
    """GatedDeltaNetConfig and what was swapped."""

    model_type = "surgery_gated_deltanet"

    surgery: dict | None = None
