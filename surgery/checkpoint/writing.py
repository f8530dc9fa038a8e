"""Write a checkpoint from a base: the base's files byte for byte, the added tensors in one shard of their own."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from surgery.checkpoint.files import How, Progress, copy_file, link_file
from surgery.checkpoint.reading import CONFIG, INDEX, SINGLE, Checkpoint
from surgery.checkpoint.remote_code import trusted

if TYPE_CHECKING:
    from torch import Tensor

# what a model needs beside its weights, and what its licence asks to travel along
COMPANIONS = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json",
    "vocab.txt", "merges.txt", "*.model", "*.tiktoken", "tokenizer.model.v*", "chat_template.json",
    "chat_template.jinja", "additional_chat_templates/*.jinja", "generation_config.json", "processor_config.json",
    "preprocessor_config.json", "video_preprocessor_config.json", "LICENSE*", "LICENCE*", "NOTICE*", "COPYING*",
)  # fmt: skip


def companions(directory: Path) -> list[Path]:
    """Tokenizer, generation and licence files in ``directory``, relative to it, in order; its code too where that is
    trusted (:mod:`surgery.checkpoint.remote_code`)."""
    patterns = (*COMPANIONS, *(("*.py",) if trusted() else ()))
    found = {path for pattern in patterns for path in directory.glob(pattern) if path.is_file()}
    found -= set(directory.glob("surgery_*.py"))  # of an export, whose next one writes it anew
    return sorted(path.relative_to(directory) for path in found)


def shard_names(shards: tuple[str, ...], extra: bool) -> dict[str, str]:
    """New names of the base's shards when one more follows: 2 of 2 become 2 of 3. Without one they keep theirs."""
    if not extra:
        return {name: name for name in shards}
    total = len(shards) + 1
    return {name: f"model-{index:05d}-of-{total:05d}.safetensors" for index, name in enumerate(shards, 1)}


def write_checkpoint(
    staging: Path,
    base: Checkpoint,
    config: Mapping[str, Any],
    added: Mapping[str, Tensor],
    files: Mapping[str, str] | None = None,
    progress: Progress | None = None,
    link: bool = False,
) -> How:
    """Write the base with ``added`` tensors into an empty directory.

    Args:
        staging: where to write; see :mod:`surgery.checkpoint.staging`.
        base: its shards and companion files are copied byte for byte.
        config: the new ``config.json``, strict JSON.
        added: tensors for the extra shard; without any, no shard is added.
        files: further text files by name.
        progress: called with the number of bytes copied since the last call.
        link: let the weight files share the base's bytes on the disk; see :func:`surgery.checkpoint.files.link_file`.

    Returns:
        How the weight files were brought over: ``copy`` where one of them had to be copied.
    """
    renamed = shard_names(base.shards, extra=bool(added))
    bring = link_file if link else copy_file
    ways = {bring(base.directory / old, staging / new, progress) for old, new in renamed.items()}
    weight_map = {entry.name: renamed[entry.shard] for entry in base.tensors.values()}
    total = sum(entry.nbytes for entry in base.tensors.values())
    if added:
        from safetensors.torch import save_file

        extra = f"model-{len(base.shards) + 1:05d}-of-{len(base.shards) + 1:05d}.safetensors"
        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in added.items()}
        save_file(tensors, staging / extra, metadata={"format": "pt"})
        (staging / extra).chmod((staging / next(iter(renamed.values()))).stat().st_mode)  # safetensors makes it private
        weight_map |= {name: extra for name in tensors}
        total += sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    if list(renamed.values()) != [SINGLE]:
        metadata = {**base.index_metadata, "total_size": total}
        metadata.pop("total_parameters", None)  # counts the base's
        index = {"metadata": metadata, "weight_map": dict(sorted(weight_map.items()))}
        write_json(staging / INDEX, index)
    for path in companions(base.directory):
        copy_file(base.directory / path, staging / path)
    write_json(staging / CONFIG, config)
    for name, text in (files or {}).items():
        # newline="" keeps the text as it is, whatever line ends it has
        with (staging / name).open("w", encoding="utf-8", newline="") as file:
            file.write(text)
    return next(how for how in ("copy", "hard link", "reflink") if how in ways)


def write_json(path: Path, value: Any) -> None:
    """Strict JSON: a number that JSON does not have is a ValueError."""
    text = json.dumps(value, indent=2, allow_nan=False, ensure_ascii=False)
    # of a name with bytes that are no text, this makes JSON's own escape
    path.write_text(text + "\n", encoding="utf-8", errors="backslashreplace")
