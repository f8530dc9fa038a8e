"""Give swapped layers their host's own mixer back.

A swap keeps every tensor of the host and only adds to them, so the way back is to leave the added ones out. The host's
own tensors are given back as they are: what was trained since, stays trained.

    report = revert("swapped", Path("restored"))
    report.identical     # True: every tensor is its base's, byte for byte
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from surgery.checkpoint.checksums import require_whole
from surgery.checkpoint.files import copy_file
from surgery.checkpoint.reading import (
    CONFIG,
    INDEX,
    SINGLE,
    Checkpoint,
    TensorEntry,
    check_tensors,
    explained,
)
from surgery.checkpoint.staging import claimed, staged_directory
from surgery.checkpoint.tensorfile import write_tensors
from surgery.checkpoint.ties import held_ties, own_head
from surgery.checkpoint.values import check_values
from surgery.checkpoint.writing import companions, write_json
from surgery.errors import UsageError
from surgery.evaluation.loading import Located, locate
from surgery.layers import ranges
from surgery.opening import swapped_before
from surgery.operation import CARD_FILE

if TYPE_CHECKING:
    from surgery.hosts import HostAdapter


@dataclass(frozen=True)
class Reverted:
    """What was done.

    Attributes:
        model: what was reverted, as the user named it. host: its family. base: what was once swapped.
        layers: those that hold the host's mixer again. remaining: those that are still swapped.
        removed: names of the tensors left out.
        changed: names of the tensors that are not the base's, None where the base is not at hand.
        phases: names of the finished phases, of a run.
        own_head: a line about a head that the configuration calls tied and the weights do not, or None.
    """

    model: str
    output: Path
    host: str
    base: str
    layers: tuple[int, ...]
    remaining: tuple[int, ...]
    removed: tuple[str, ...]
    changed: tuple[str, ...] | None
    phases: tuple[str, ...]
    own_head: str | None = None

    @property
    def identical(self) -> bool | None:
        """Whether every tensor is the base's byte for byte; None if the base is not at hand."""
        return None if self.changed is None else not self.changed

    def sentence(self) -> str:
        """What the host's tensors are, in words."""
        if self.changed is None:
            trained = f" The run trained it ({', '.join(self.phases)})." if self.phases else ""
            return (
                f"Whether the host's tensors are still those of `{self.base}` is not known, because it is not on this "
                f"machine: a swap alone leaves them as they are, training does not.{trained}"
            )
        if not self.changed:
            return f"Every tensor is `{self.base}`'s, byte for byte."
        some = ", ".join(f"`{name}`" for name in self.changed[:3])
        more = f" and {len(self.changed) - 3} more" if len(self.changed) > 3 else ""
        return (
            f"{len(self.changed)} tensors are not `{self.base}`'s: they were trained with the memories that are gone "
            f"now, or written in another dtype ({some}{more}). This is not the base again."
        )

    def as_dict(self) -> dict[str, Any]:
        return {
            "schema": 1,
            "kind": "revert",
            "model": self.model,
            "output": str(self.output),
            "host": self.host,
            "base": self.base,
            "layers": list(self.layers),
            "remaining": list(self.remaining),
            "removed": list(self.removed),
            "identical": self.identical,
            "changed": None if self.changed is None else list(self.changed),
        }


def revert(
    model: str,
    output: Path,
    layers: Sequence[int] | None = None,
    *,
    revision: str | None = None,
    progress: Callable[[int], object] | None = None,
) -> Reverted:
    """Write a checkpoint whose ``layers`` hold the host's own mixer again.

    Args:
        model: a swapped checkpoint directory, a run (its latest model), or a hub id.
        output: the directory to write, absent or empty.
        revision: of a hub id, a branch, tag or commit.
        layers: by default every swapped layer, after which the checkpoint is an ordinary one of its family.
        progress: called with the bytes written since the last call.

    Raises:
        UsageError: nothing is swapped there, or not in one of ``layers``; the output is not free.
        JobError: the disk is full. Nothing is left behind.
    """
    with claimed(output) as final:
        return _revert(model, final, layers, revision, progress)


def _revert(
    model: str,
    final: Path,
    layers: Sequence[int] | None,
    revision: str | None,
    progress: Callable[[int], object] | None,
) -> Reverted:
    from surgery.hosts import open_model, recognise
    from surgery.models.configuration import Swap

    located = locate(model, revision)
    require_whole(located.path)
    _, adapter = recognise(located.path)
    source = open_model(located.path)
    rules = dict(swapped_before(source, adapter))
    chosen = _chosen(model, rules, layers)
    swap = source.config["surgery"]
    kept = {layer: rule for layer, rule in rules.items() if layer not in chosen}
    about = {key: swap[key] for key in ("base", "revision") if key in swap}
    config = adapter.base_config(source.config)
    if kept:
        config = adapter.surgery_config(source.config, Swap(kept).written(**about))
    prefixes = tuple(adapter.tensor_prefix(source.config, layer) + "memory." for layer in chosen)
    removed = tuple(name for name in source.tensors if name.startswith(prefixes))
    rest = replace(source, tensors={name: entry for name, entry in source.tensors.items() if name not in removed})
    check_values(rest, adapter.is_unused)  # what is left out may be damaged: to leave it out is the remedy
    shapes = {entry.name: entry.shape for entry in rest.tensors.values()}
    with explained(located.path):
        expected = adapter.expected_tensors(adapter.completed(config, shapes))
    check_tensors(rest, expected, adapter.name)
    report = Reverted(
        model=model,
        output=final,
        host=adapter.name,
        base=swap.get("base") or "its base",
        layers=chosen,
        remaining=tuple(sorted(kept)),
        removed=removed,
        changed=_changed(rest, adapter, swap),
        phases=_finished(located),
        own_head=own_head(source, adapter.ties(source.config)),
    )
    size = source.weight_bytes + sum((source.directory / path).stat().st_size for path in companions(source.directory))
    with staged_directory(final, size + 2**20) as staging:
        _write_weights(staging, source, rest, progress)
        for path in companions(source.directory):
            copy_file(source.directory / path, staging / path)
        write_json(staging / CONFIG, config)
        (staging / CARD_FILE).write_text(card(report, final.name), encoding="utf-8", errors="replace")
    return report


def card(report: Reverted, name: str) -> str:
    """The model card of a reverted checkpoint."""
    which = f"layers {ranges(report.layers)}" if report.remaining else "all swapped layers"
    still = f"Layers {ranges(report.remaining)} are still swapped." if report.remaining else ""
    loading = "`import surgery` first, then " if report.remaining else ""
    return f"""---
library_name: transformers
tags: [model-surgery]
---
# {name}

`{Path(report.model).name}`, once `{report.base}` with swapped memories, with the host's own mixer back in {which}.
{still}

{report.sentence()}

Loading it: {loading}as any model of its family (`{report.host}`).
"""


def _chosen(model: str, rules: Iterable[int], layers: Sequence[int] | None) -> tuple[int, ...]:
    swapped = sorted(rules)
    if not swapped:
        raise UsageError(f"{model}: no layer of this model was swapped, so there is nothing to revert")
    if layers is None:
        return tuple(swapped)
    wrong = [layer for layer in layers if layer not in swapped]
    if wrong or not layers:
        problem = f"layer {wrong[0]} was not swapped" if wrong else "no layer is named"
        raise UsageError(f"--layers: {problem}; {model} was swapped in layers {ranges(swapped)}")
    return tuple(sorted(set(layers)))


def _changed(rest: Checkpoint, adapter: HostAdapter, swap: dict[str, Any]) -> tuple[str, ...] | None:
    """Names of the base's tensors that ``rest`` holds otherwise, None where the base is not on this machine."""
    from surgery.hosts import open_model, resolve

    if not swap.get("base"):
        return None
    try:
        base = open_model(resolve(swap["base"], swap.get("revision"), offline=True))
    except UsageError:
        return None
    if base.config.get("surgery"):  # operated on before: it is no untouched host
        return None
    ties = held_ties(base, adapter.ties(base.config))
    wanted = [name for name in base.tensors if name not in ties or name in rest.tensors]
    return tuple(name for name in wanted if name not in rest.tensors or not _same(base, rest, name))


def _same(one: Checkpoint, other: Checkpoint, name: str) -> bool:
    import torch

    first, second = one.tensors[name], other.tensors[name]
    if (first.dtype, first.shape) != (second.dtype, second.shape):
        return False
    bits = [checkpoint.read(name).contiguous().reshape(-1).view(torch.uint8) for checkpoint in (one, other)]
    return torch.equal(*bits)


def _finished(located: Located) -> tuple[str, ...]:
    if located.run is None:
        return ()
    from surgery.checkpoint.manifest import read_manifest

    return tuple(phase.name for phase in read_manifest(located.run).phases if phase.status == "finished")


def _write_weights(
    staging: Path, source: Checkpoint, rest: Checkpoint, progress: Callable[[int], object] | None
) -> None:
    """A shard that loses nothing is copied as it is, one that loses all goes, the others are written again."""
    shards: dict[str, list[TensorEntry]] = {}
    for entry in rest.tensors.values():
        shards.setdefault(entry.shard, []).append(entry)
    before = {shard: sum(entry.shard == shard for entry in source.tensors.values()) for shard in shards}
    names = [shard for shard in source.shards if shard in shards]
    total = len(names)
    weight_map = {}
    for number, shard in enumerate(names, 1):
        new = SINGLE if total == 1 else f"model-{number:05d}-of-{total:05d}.safetensors"
        if len(shards[shard]) == before[shard]:
            copy_file(source.directory / shard, staging / new, progress)
        else:
            write_tensors(staging / new, shards[shard], source.read, progress)
        weight_map |= {entry.name: new for entry in shards[shard]}
    if total > 1:
        metadata = {**source.index_metadata, "total_size": sum(entry.nbytes for entry in rest.tensors.values())}
        metadata.pop("total_parameters", None)
        write_json(staging / INDEX, {"metadata": metadata, "weight_map": dict(sorted(weight_map.items()))})
