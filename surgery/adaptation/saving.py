"""A finished phase's model: the checkpoint it started from with the trained tensors in their new values.

Trained tensors and doses are written in float32, the master weights as they are; every other tensor keeps its bytes.
The configuration then says float32, so that a plain load gives the run's own weights.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from surgery.adaptation.parameters import Selection
from surgery.checkpoint.checksums import write_checksums
from surgery.checkpoint.jsonfile import read_json
from surgery.checkpoint.reading import INDEX, SINGLE, Checkpoint, raw_config
from surgery.checkpoint.staging import staged_directory
from surgery.checkpoint.ties import held_ties
from surgery.checkpoint.writing import companions, copy_file, write_json
from surgery.errors import JobError
from surgery.memory.base import MemoryRule


def trained_tensors(
    selection: Selection,
    memories: Mapping[int, MemoryRule],
    mixers: Mapping[int, str],
    stored: Callable[[str, Tensor], Mapping[str, Tensor]],
) -> dict[str, Tensor]:
    """What a phase changes, by disk name: its trained parameters and the doses of the swapped memories, as they are now
    (moving a model replaces its buffers).

    Args:
        memories: swapped layer -> its memory.
        mixers: swapped layer -> name of its mixer module.
        stored: what a checkpoint holds, by disk name, instead of the tensor that the model calls so.
    """
    doses = {f"{name}.memory.dose": memories[layer].dose for layer, name in mixers.items()}
    changed: dict[str, Tensor] = {}
    for name, tensor in {**selection.trained, **doses}.items():
        changed |= stored(name, tensor.detach())
    return changed


def astray(stored: Collection[str], names: Iterable[str]) -> list[str]:
    """The disk names of what is trained that a checkpoint with the tensors ``stored`` has no place for."""
    return sorted(name for name in names if name not in stored)


def require_places(source: Checkpoint, names: Iterable[str]) -> None:
    """Refuse to train what could not be written back.

    Args:
        names: disk names of what is trained.

    Raises:
        JobError: ``source`` holds no tensor of that name.
    """
    if missing := astray(source.tensors, names):
        raise JobError(
            f"{source.directory}: holds no tensor {missing[0]}, so it cannot be trained and written back\n"
            "  write trainable: swapped (or swapped-memory) in the phase"
        )


@torch.no_grad()
def write_model(
    final: Path,
    source: Checkpoint,
    changed: Mapping[str, Tensor],
    about: Mapping[str, Any] | None = None,
    ties: Mapping[str, str] | None = None,
) -> None:
    """Write ``source`` with ``changed`` tensors into the new directory ``final``.

    Args:
        source: the checkpoint that training started from; shards without a changed tensor are copied byte for byte.
        changed: tensors by disk name, all of them in ``source``.
        about: what is kept beside the checksums of the files.
        ties: tensors that the configuration calls tied, name -> the name whose tensor it shares. Where ``source`` holds
            both with the same values, both are written in the new ones.

    Raises:
        JobError: a changed tensor has no place in ``source``, or the disk is full.
    """
    from safetensors.torch import load_file, save_file

    twice = {name: origin for name, origin in held_ties(source, ties or {}).items() if name in source.tensors}
    changed = {**changed, **{name: changed[origin] for name, origin in twice.items() if origin in changed}}
    require_places(source, changed)
    growth = sum(tensor.numel() * 4 for tensor in changed.values())
    with staged_directory(final, source.weight_bytes + growth) as staging:
        total = sum(entry.nbytes for entry in source.tensors.values())
        for shard in source.shards:
            mine = [name for name in changed if source.tensors[name].shard == shard]
            if not mine:
                copy_file(source.directory / shard, staging / shard)
                continue
            tensors = load_file(source.directory / shard)
            for name in mine:
                total += changed[name].numel() * 4 - source.tensors[name].nbytes
                tensors[name] = changed[name].detach().to("cpu", torch.float32, copy=True).contiguous()
            save_file(tensors, staging / shard, metadata={"format": "pt"})
        if source.shards != (SINGLE,):
            index = read_json(source.directory / INDEX)
            index["metadata"] = {**(index.get("metadata") or {}), "total_size": total}
            write_json(staging / INDEX, index)
        for path in companions(source.directory):
            copy_file(source.directory / path, staging / path)
        # as it lies there: what was opened may have more in it, taken from the tensors
        write_json(staging / "config.json", _float32(raw_config(source.directory)))
        write_checksums(staging, about)


def _float32(config: Mapping[str, Any]) -> dict[str, Any]:
    written = {key: value for key, value in config.items() if key != "torch_dtype"}
    written["dtype"] = "float32"
    return written
