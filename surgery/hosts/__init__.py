"""The model families that surgery knows, one adapter each, and how a model's name becomes a model.

    adapter = adapter_for(read_config(path))     # what the tools know of the family
    model = load_model(resolve("bundled:tiny-gdn"))

A new family is a subclass of :class:`HostAdapter` in its own module and an entry of ``ADAPTERS``.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from surgery.errors import UsageError
from surgery.hosts.base import HostAdapter, Implementation, decode_floats, encode_floats, read_config
from surgery.hosts.gated_deltanet import GatedDeltaNetAdapter
from surgery.hosts.mamba2 import Mamba2Adapter
from surgery.hosts.resolve import bundled, resolve

__all__ = [
    "ADAPTERS",
    "REFUSED",
    "HostAdapter",
    "adapter_for",
    "bundled",
    "decode_floats",
    "encode_floats",
    "load_model",
    "read_config",
    "resolve",
    "supported",
]

ADAPTERS: tuple[HostAdapter, ...] = (Mamba2Adapter(), GatedDeltaNetAdapter())

# families with a Mamba-2 or delta-rule mixer that are recognised and refused: model type -> why
REFUSED: dict[str, str] = {
    "mamba": "Mamba-1 decays every state channel on its own; only Mamba-2 is supported",
    "qwen3_next": "its interleaved projections are not supported yet",
    "qwen3_5": "its nested text model is not supported yet",
    "olmo_hybrid": "hybrids with attention are not supported yet",
    "bamba": "hybrids with attention are not supported yet",
    "granitemoehybrid": "hybrids with attention are not supported yet",
    "zamba2": "hybrids with attention are not supported yet",
    "falcon_h1": "hybrids with attention are not supported yet",
    "nemotron_h": "hybrids with attention are not supported yet",
    "kimi_linear": "its channel-wise decay is not supported yet",
}


def supported() -> str:
    """The supported families in one line."""
    return "mamba2 (transformers' layout), gated_deltanet (flash-linear-attention's layout)"


def adapter_for(config: Mapping[str, Any]) -> HostAdapter:
    """The adapter of a checkpoint's configuration.

    Raises:
        UsageError: the family is not supported; the message lists those that are.
    """
    model_type = config.get("model_type")
    for adapter in ADAPTERS:
        if model_type in adapter.model_types:
            return adapter
    if model_type is None:
        hint = "; it looks like mamba_ssm's own, convert it to transformers' first" if "ssm_cfg" in config else ""
        raise UsageError(f"config.json: no model_type{hint}\nsupported: {supported()}")
    reason = REFUSED.get(model_type, "unsupported architecture")
    raise UsageError(f"config.json: model_type {model_type!r}: {reason}\nsupported: {supported()}")


def load_model(
    path: str | Path,
    *,
    dtype: Any = None,
    device: Any = "cpu",
    implementation: Implementation = "graft",
) -> Any:
    """The model of any supported checkpoint directory, base or upgraded; see :meth:`HostAdapter.load`."""
    adapter = adapter_for(read_config(path))
    return adapter.load(path, dtype=dtype, device=device, implementation=implementation)
