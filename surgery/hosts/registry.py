"""The families that surgery knows, one adapter each: one line of ``ADAPTERS`` names each of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from surgery.checkpoint.layout import CONFIG
from surgery.checkpoint.reading import Checkpoint, explained, open_checkpoint, raw_config, shapes_there
from surgery.checkpoint.sizes import check_sizes
from surgery.errors import UsageError
from surgery.hosts.bamba import BambaAdapter
from surgery.hosts.base import HostAdapter, Implementation
from surgery.hosts.falcon_h1 import FalconH1Adapter
from surgery.hosts.fla_mamba2 import FlaMamba2Adapter
from surgery.hosts.gated_deltanet import GatedDeltaNetAdapter
from surgery.hosts.granitemoehybrid import GraniteMoeHybridAdapter
from surgery.hosts.kimi_linear import KimiLinearAdapter
from surgery.hosts.mamba2 import Mamba2Adapter
from surgery.hosts.mamba_ssm import MambaSSMAdapter
from surgery.hosts.nemotron_h import NemotronHAdapter
from surgery.hosts.olmo_hybrid import OlmoHybridAdapter
from surgery.hosts.qwen3_5 import Qwen3_5Adapter, Qwen3_5MoeAdapter
from surgery.hosts.qwen3_next import Qwen3NextAdapter
from surgery.hosts.zamba2 import Zamba2Adapter

ADAPTERS: tuple[HostAdapter, ...] = (
    Mamba2Adapter(),
    FlaMamba2Adapter(),
    MambaSSMAdapter(),
    GatedDeltaNetAdapter(),
    Qwen3NextAdapter(),
    Qwen3_5Adapter(),
    Qwen3_5MoeAdapter(),
    OlmoHybridAdapter(),
    KimiLinearAdapter(),
    BambaAdapter(),
    GraniteMoeHybridAdapter(),
    Zamba2Adapter(),
    FalconH1Adapter(),
    NemotronHAdapter(),
)

# families that are recognised and refused: model type -> why
REFUSED: dict[str, str] = dict.fromkeys(
    ("mamba", "falcon_mamba", "jamba", "zamba"),
    "Mamba-1 decays every state channel on its own; only Mamba-2 is supported",
)


def supported() -> str:
    """The supported families in one line, each with the model type in its config.json."""
    return "; ".join(f"{adapter.title} ({adapter.model_types[0] or 'no model_type'})" for adapter in ADAPTERS)


def adapter_for(config: Mapping[str, Any]) -> HostAdapter:
    """The adapter of a checkpoint's configuration.

    Raises:
        UsageError: the family is not supported; the message lists those that are.
    """
    reason = quantised(config)
    if reason is not None:
        raise UsageError(f"config.json: {reason}")
    for adapter in ADAPTERS:
        if adapter.claims(config):
            return adapter
    model_type = config.get("model_type")
    if model_type is None:
        raise UsageError(f"config.json: no model_type\nsupported: {supported()}")
    reason = REFUSED.get(model_type, "unsupported architecture")
    if config.get("auto_map"):
        reason += "; the code that it brings along (auto_map) is never run"
    raise UsageError(f"config.json: model_type {model_type!r}: {reason}\nsupported: {supported()}")


def quantised(config: Mapping[str, Any]) -> str | None:
    """Why a checkpoint of quantised weights is refused, None if its configuration speaks of none."""
    found = config.get("quantization_config") or (config.get("text_config") or {}).get("quantization_config")
    if not found:
        return None
    found = found if isinstance(found, Mapping) else {}
    method = found.get("quant_method") or "an unnamed method"
    bits = next((bits for key, bits in (("load_in_4bit", 4), ("load_in_8bit", 8)) if found.get(key)), found.get("bits"))
    return (
        f"quantization_config: the weights are quantised ({method}{f', {bits} bits' if bits else ''}), and a swap "
        "needs them as they were trained: use the model's unquantised checkpoint"
    )


def read_config(path: str | Path) -> dict[str, Any]:
    """config.json of a checkpoint directory, with what only its tensors say (see :meth:`HostAdapter.completed`).

    Raises:
        UsageError: there is none, or it is no JSON object.
    """
    config = raw_config(Path(path))
    adapter = _claiming(config)
    if adapter is not None:
        return adapter.read(path)
    check_sizes(config, shapes_there(Path(path)), str(Path(path) / CONFIG))
    return config


def open_model(directory: Path) -> Checkpoint:
    """As :func:`surgery.checkpoint.reading.open_checkpoint`, the configuration completed as above."""
    checkpoint = open_checkpoint(directory)
    shapes = {name: entry.shape for name, entry in checkpoint.tensors.items()}
    with explained(checkpoint.directory):
        return replace(checkpoint, config=complete_config(checkpoint.config, shapes))


def recognise(path: str | Path) -> tuple[dict[str, Any], HostAdapter]:
    """The config.json of a checkpoint directory as :func:`read_config` reads it, and its family's adapter.

    Raises:
        UsageError: as :func:`adapter_for` and :meth:`HostAdapter.parse` raise it, with the directory's name.
    """
    try:
        config = read_config(path)
        adapter = adapter_for(config)
        adapter.parse(config)
    except UsageError as error:
        at = f"{Path(path)}/" if str(error).startswith("config.json: ") else ""
        raise UsageError(f"{at}{error}") from None
    return config, adapter


def complete_config(config: dict[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    """A config.json with what only the tensors say; one of no supported family is returned as it is."""
    adapter = _claiming(config)
    return config if adapter is None else adapter.completed(config, shapes)


def _claiming(config: Mapping[str, Any]) -> HostAdapter | None:
    return next((adapter for adapter in ADAPTERS if adapter.claims(config)), None)


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
