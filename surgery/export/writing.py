"""Write a checkpoint's tensors in one dtype, in shards no larger than asked."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from surgery.checkpoint.reading import CONFIG, INDEX, SINGLE, TensorEntry
from surgery.checkpoint.ties import held_ties
from surgery.checkpoint.writing import companions, copy_file, write_json
from surgery.errors import JobError
from surgery.export.standalone import auto_map, code_of

if TYPE_CHECKING:
    from surgery.export.source import Source

GENERATION = "generation_config.json"

Progress = Callable[[int], Any]  # called with the number of bytes just written


def float32_tensors(source: Source) -> set[str]:
    """Disk names of what stays in float32 whatever the dtype: decays, the memories' own figures and dose, and what the
    host's library loads in float32 always, as some routers of experts."""
    from surgery.graft import Graft
    from surgery.memory import MemoryRule

    with torch.device("meta"):
        model = source.adapter.build(source.checkpoint.config, device="meta")
    names = set()
    for name, module in model.named_modules():
        if isinstance(module, Graft):
            names |= {f"{name}.{leaf}" for leaf in module.float32}
        elif isinstance(module, MemoryRule):
            names |= {f"{name}.{leaf}" for leaf, _ in module._float32_tensors()}
    # transformers looks for these parts anywhere in a name; they are the same in memory and on disk
    parts = tuple(getattr(model, "_keep_in_fp32_modules_strict", None) or ())
    always = {name for name in source.checkpoint.tensors if any(part in name for part in parts)}
    return always | {source.adapter.disk_name(source.checkpoint.config, name) for name in names}


def plan_shards(sizes: dict[str, int], shard_size: int) -> list[list[str]]:
    """Tensor names by shard, in order: each shard as full as ``shard_size`` bytes allow, a larger tensor alone."""
    shards: list[list[str]] = []
    filled = 0
    for name, size in sizes.items():
        if not shards or filled + size > shard_size:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += size
    return shards


def planned_sizes(source: Source, dtype: torch.dtype) -> dict[str, int]:
    """Bytes of every tensor as it will be written, in the checkpoint's order. A head that is tied is left out, one
    that only the configuration calls tied is not."""
    kept = float32_tensors(source)
    tied = held_ties(source.checkpoint, source.adapter.ties(source.checkpoint.config))
    return {
        name: entry.numel * _target(entry, dtype, kept).itemsize
        for name, entry in source.checkpoint.tensors.items()
        if name not in tied
    }


def write_export(
    staging: Path,
    source: Source,
    dtype: str,
    shard_size: int,
    files: dict[str, str],
    progress: Progress | None = None,
    *,
    code: bool = True,
) -> list[str]:
    """Write weights, index, configuration, tokenizer and generation files into an empty directory.

    Args:
        dtype: ``float32``, ``bfloat16`` or ``float16``; see :func:`float32_tensors` for what does not follow it.
        shard_size: bytes; at most one shard's tensors are in memory at once.
        files: further text files by name, written as they are.
        code: write the modelling code beside the weights, and name it in the configuration; see
            :mod:`surgery.export.standalone`.

    Returns:
        The names of the weight files.

    Raises:
        JobError: a weight is beyond the range of ``dtype``.
    """
    from safetensors.torch import save_file

    target = getattr(torch, dtype)
    kept = float32_tensors(source)
    sizes = planned_sizes(source, target)
    shards = plan_shards(sizes, shard_size)
    names = [SINGLE] if len(shards) == 1 else [
        f"model-{number:05d}-of-{len(shards):05d}.safetensors" for number in range(1, len(shards) + 1)
    ]
    config = source.adapter.surgery_config(source.checkpoint.config, source.swap)
    config.pop("torch_dtype", None)
    if code:
        config["auto_map"] = auto_map(config["model_type"])
        files = {**files, **code_of(config["model_type"])}
    write_json(staging / CONFIG, {**config, "dtype": dtype})
    for name, members in zip(names, shards, strict=True):
        tensors = {}
        for member in members:
            entry = source.checkpoint.tensors[member]
            tensors[member] = _cast(source, entry, _target(entry, target, kept))
            if progress is not None:
                progress(sizes[member])
        save_file(tensors, staging / name, metadata={"format": "pt"})
        (staging / name).chmod((staging / CONFIG).stat().st_mode)  # safetensors writes for the owner alone
    if len(shards) > 1:
        weight_map = {member: name for name, members in zip(names, shards, strict=True) for member in members}
        metadata = {"total_size": sum(sizes.values())}
        write_json(staging / INDEX, {"metadata": metadata, "weight_map": dict(sorted(weight_map.items()))})
    for path in companions(source.located.path):
        copy_file(source.located.path / path, staging / path)
    if not (staging / GENERATION).is_file():
        write_json(staging / GENERATION, _generation({**(config.get("text_config") or {}), **config}))
    for name, text in files.items():
        with (staging / name).open("w", encoding="utf-8", newline="") as file:
            file.write(text)
    return names


def _cast(source: Source, entry: TensorEntry, dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor of the checkpoint in ``dtype``.

    Raises:
        JobError: a value is beyond the dtype's range.
    """
    stored = source.checkpoint.read(entry.name)
    cast = stored.to(dtype).contiguous()
    over = ~torch.isfinite(cast)
    if bool(over.any()):
        name = str(dtype).removeprefix("torch.")
        raise JobError(
            f"{source.located.path}: {entry.name} holds {float(stored[over][0]):.4g}, which {name} cannot hold; "
            "nothing was written\n  export with --dtype bfloat16 or float32"
        )
    return cast


def _target(entry: TensorEntry, dtype: torch.dtype, kept: set[str]) -> torch.dtype:
    return torch.float32 if entry.name in kept else dtype


def _generation(config: dict[str, Any]) -> dict[str, Any]:
    """The special tokens of a base that has no generation file of its own."""
    keys = ("bos_token_id", "eos_token_id", "pad_token_id")
    return {key: config[key] for key in keys if config.get(key) is not None}
