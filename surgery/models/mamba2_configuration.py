"""Configurations of Mamba-2 models in other libraries' layouts.

Each keeps its library's own keys, and shows the models the names that transformers' Mamba2Config has. As in
:mod:`surgery.models.configuration`, nothing of transformers but its base class may be imported here.
"""

from __future__ import annotations

from dataclasses import field
from typing import Any

from transformers.configuration_utils import PreTrainedConfig

from surgery.models.configuration import Announced

# a Mamba-2 mixer's own defaults in mamba_ssm, where neither its configuration nor its tensors say otherwise
SSM_DEFAULTS = {"d_state": 128, "d_conv": 4, "expand": 2, "headdim": 64, "ngroups": 1}


def _settable(config: PreTrainedConfig, more: dict[str, Any]) -> dict[str, Any]:
    """Further keys of a file without those that follow from its others, such as a count of heads, or transformers'
    names beside the library's own."""
    return {key: value for key, value in more.items() if not isinstance(getattr(type(config), key, None), property)}


class FlaMamba2Config(PreTrainedConfig):
    """flash-linear-attention's keys for its ``mamba2``; keys of it that change nothing here are kept as they are."""

    model_type = "mamba2"
    keys_to_ignore_at_inference = ("past_key_values", "cache")

    head_dim: int = 64
    vocab_size: int = 32000
    hidden_size: int = 2048
    state_size: int = 128
    num_hidden_layers: int = 48
    norm_eps: float = 1e-5
    pad_token_id: int | None = 0
    bos_token_id: int | None = 1
    eos_token_id: int | list[int] | None = 2
    expand: int | float = 2
    conv_kernel: int = 4
    n_groups: int = 1
    use_bias: bool = False
    use_conv_bias: bool = True
    conv_init: float | None = None
    A_init_range: list[float] | tuple[float, ...] = (1, 16)
    D_has_hdim: bool = False
    hidden_act: str = "silu"
    initializer_range: float = 0.02
    residual_in_fp32: bool = True
    dt_min: float = 0.001
    dt_max: float = 0.1
    dt_init_floor: float = 1e-4
    dt_limit: list[float] | tuple[float, ...] = (0.0, float("inf"))
    rescale_prenorm_residual: bool = True
    use_cache: bool = True
    rmsnorm: bool = True
    norm_before_gate: bool = False
    chunk_size: int = 256
    tie_word_embeddings: bool = False

    def __post_init__(self, **kwargs):
        super().__post_init__(**_settable(self, kwargs))

    @property
    def num_heads(self) -> int:
        return int(self.expand * self.hidden_size) // self.head_dim

    @property
    def layer_norm_epsilon(self) -> float:
        return self.norm_eps

    @property
    def time_step_limit(self) -> tuple[float, ...]:
        return tuple(self.dt_limit)

    @property
    def layer_types(self) -> list[str]:
        """Every layer is linear attention; transformers' cache asks."""
        return ["linear_attention"] * self.num_hidden_layers


class SurgeryFlaMamba2Config(Announced, FlaMamba2Config):
    """FlaMamba2Config and what was swapped."""

    model_type = "surgery_fla_mamba2"

    surgery: dict | None = None


class MambaSSMConfig(PreTrainedConfig):
    """The keys of mamba_ssm's own checkpoints (``state-spaces/mamba2-*``), which carry no ``model_type``.

    ``ssm_cfg`` is the mixers': {"layer": "Mamba2", "d_state", "d_conv", "expand", "headdim", "d_ssm", "ngroups",
    "D_has_hdim", "rmsnorm", "norm_before_gate", "dt_limit", "bias", "conv_bias"}, defaults left out. The vocabulary is
    rounded up to a multiple of ``pad_vocab_size_multiple``, as that library does before it makes its embeddings.
    """

    model_type = ""
    keys_to_ignore_at_inference = ("past_key_values", "cache")
    attribute_map = {"hidden_size": "d_model", "num_hidden_layers": "n_layer"}  # noqa: RUF012

    d_model: int = 2560
    d_intermediate: int = 0
    n_layer: int = 64
    vocab_size: int = 50277
    ssm_cfg: dict[str, Any] = field(default_factory=dict)
    attn_layer_idx: list[int] = field(default_factory=list)
    attn_cfg: dict[str, Any] = field(default_factory=dict)
    rms_norm: bool = True
    residual_in_fp32: bool = True
    fused_add_norm: bool = True
    pad_vocab_size_multiple: int = 8
    tie_embeddings: bool = True
    initializer_range: float = 0.02
    use_cache: bool = True
    pad_token_id: int | None = None
    bos_token_id: int | None = 0
    eos_token_id: int | list[int] | None = 0

    layer_norm_epsilon = 1e-5  # no key of that library sets it

    def __post_init__(self, **kwargs):
        kwargs.pop("completed", None)  # of the file before its tensors completed it
        super().__post_init__(**_settable(self, kwargs))
        multiple = max(self.pad_vocab_size_multiple, 1)
        self.vocab_size = -(-self.vocab_size // multiple) * multiple

    def _ssm(self, key: str, default: Any = None) -> Any:
        value = self.ssm_cfg.get(key)
        return SSM_DEFAULTS.get(key, default) if value is None else value

    @property
    def tie_word_embeddings(self) -> bool:
        return self.tie_embeddings

    @property
    def inner_size(self) -> int:
        """Width of a mixer, what bypasses its memory included."""
        return round(self.d_model * self._ssm("expand"))

    @property
    def memory_size(self) -> int:
        """Width of a mixer's memory, ``d_ssm``."""
        return self._ssm("d_ssm", self.inner_size)

    @property
    def head_dim(self) -> int:
        return self._ssm("headdim")

    @property
    def num_heads(self) -> int:
        return self.memory_size // self.head_dim

    @property
    def n_groups(self) -> int:
        return self._ssm("ngroups")

    @property
    def state_size(self) -> int:
        return self._ssm("d_state")

    @property
    def conv_kernel(self) -> int:
        return self._ssm("d_conv")

    @property
    def use_bias(self) -> bool:
        return self._ssm("bias", False)

    @property
    def use_conv_bias(self) -> bool:
        return self._ssm("conv_bias", True)

    @property
    def D_has_hdim(self) -> bool:
        return self._ssm("D_has_hdim", False)

    @property
    def rmsnorm(self) -> bool:
        return self._ssm("rmsnorm", True)

    @property
    def norm_before_gate(self) -> bool:
        return self._ssm("norm_before_gate", False)

    @property
    def time_step_limit(self) -> tuple[float, ...]:
        return tuple(self._ssm("dt_limit", (0.0, float("inf"))))

    @property
    def layer_types(self) -> list[str]:
        """Every layer is linear attention; transformers' cache asks."""
        return ["linear_attention"] * self.n_layer


class SurgeryMambaSSMConfig(Announced, MambaSSMConfig):
    """MambaSSMConfig and what was swapped."""

    model_type = "surgery_mamba_ssm"

    surgery: dict | None = None
