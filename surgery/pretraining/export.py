"""A trained base as an ordinary checkpoint: bf16 weights with A_log and dt_bias in float32, and the tokenizer."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch

from surgery.errors import UsageError
from surgery.memory import MemoryRule

FLOAT32 = ("A_log", "dt_bias")
LARGEST = 10_000_000  # bytes of a base's weights
ARCHITECTURES = {"mamba2": "Mamba2ForCausalLM", "gated_deltanet": "GatedDeltaNetForCausalLM"}


def _in_float32(model: torch.nn.Module) -> set[str]:
    """The tensors that are stored in float32: decays, and what a swapped memory never casts."""
    found = {name for name, _ in model.named_parameters() if name.endswith(FLOAT32)}
    for prefix, module in model.named_modules():
        if isinstance(module, MemoryRule):
            found |= {f"{prefix}.{name}" for name, _ in module._float32_tensors()}
    return found


def stored_tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The tensors of the checkpoint by name: no tied head, in the precision they are stored in."""
    kept, tied = _in_float32(model), {"lm_head.weight"} if model.config.tie_word_embeddings else set()
    return {
        name: tensor.detach().to("cpu", torch.float32 if name in kept else torch.bfloat16).contiguous()
        for name, tensor in model.state_dict().items()
        if name not in tied
    }


def round_to_stored(model: torch.nn.Module) -> None:
    """Give the float32 model the values that its checkpoint holds, so that what is measured is what is stored."""
    kept = _in_float32(model)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name not in kept:
                parameter.copy_(parameter.bfloat16())


def stored_config(config: dict[str, Any]) -> dict[str, Any]:
    """config.json: the base's keys and what transformers needs. ``dtype`` is float32, so that a stock reader computes
    with A_log and dt_bias as they are stored; the bf16 weights lose nothing by it."""
    if "surgery" in config:
        return {**config, "dtype": "float32"}
    return {"architectures": [ARCHITECTURES[config["model_type"]]], **config, "dtype": "float32"}


def export_base(
    model: torch.nn.Module, config: dict[str, Any], tokenizer: Path, output: Path, largest: int | None = LARGEST
) -> int:
    """Write the checkpoint into ``output`` and return the bytes of its weights. An existing README.md stays.

    Args:
        largest: bytes that the weights may have, None for any number.

    Raises:
        UsageError: the weights are larger than a bundled base may be.
    """
    from safetensors.torch import save_file

    output.mkdir(parents=True, exist_ok=True)
    weights = output / "model.safetensors"
    save_file(stored_tensors(model), weights, metadata={"format": "pt"})
    weights.chmod(0o644)
    size = weights.stat().st_size
    if largest is not None and size > largest:
        raise UsageError(f"{weights}: {size} bytes; a bundled base has at most {largest}")
    _write_json(stored_config(config), output / "config.json")
    _write_json(
        {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0, "do_sample": False}, output / "generation_config.json"
    )
    for name in ("tokenizer.json", "tokenizer_config.json"):
        if (tokenizer / name).resolve() != (output / name).resolve():
            shutil.copyfile(tokenizer / name, output / name)
    return size


def _write_json(value: Any, path: Path) -> None:
    path.write_text(json.dumps(value, indent=2, allow_nan=False) + "\n", encoding="utf-8")
