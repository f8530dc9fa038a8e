"""What a model will take of a device's memory, before it is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from surgery.checkpoint.reading import Checkpoint

if TYPE_CHECKING:
    import torch

RUNTIME_BYTES = 400_000_000  # Python, torch and transformers, loaded
CONTROL_GROUP = Path("/sys/fs/cgroup")  # of this process, where it is confined to one
SHARE = 0.9  # of what is free that may be used

Placement = Literal["whole", "spread", "streamed"]


def activation_bytes(config: Mapping[str, Any], window: int) -> int:
    """Activations of ``window`` tokens in one block, and a few rows of logits; measured at 5M and 136M parameters."""
    return 400 * window * _size(config, "hidden_size", "d_model") + 4096 * _size(config, "vocab_size")


def model_bytes(checkpoint: Checkpoint, window: int, itemsize: int | None = None) -> int:
    """A whole model with the activations of ``window`` tokens.

    Args:
        itemsize: bytes a parameter takes in memory; None for what it takes on disk.
    """
    entries = checkpoint.tensors.values()
    parameters = sum(entry.numel * itemsize if itemsize else entry.nbytes for entry in entries)
    return parameters + activation_bytes(checkpoint.config, window)


def streamed_bytes(checkpoint: Checkpoint, window: int, itemsize: int | None = None) -> int:
    """The same where the weights are streamed: the largest tensor, as it is read and as it is used, or a block with
    the activations of ``window`` tokens."""
    largest, blocks = 0, {}
    for entry in checkpoint.tensors.values():
        cost = entry.nbytes + (entry.numel * itemsize if itemsize else 0)
        largest = max(largest, cost)
        layer = next((part for part in entry.name.split(".") if part.isdigit()), None)
        if layer is not None:
            blocks[layer] = blocks.get(layer, 0) + cost
    return max(largest, max(blocks.values(), default=0) + activation_bytes(checkpoint.config, window))


def available_bytes(device: str) -> int:
    """Free memory of ``cpu`` (within its control group's limit) or of the current CUDA device."""
    if device != "cpu":
        import torch

        return torch.cuda.mem_get_info()[0]
    import psutil

    free = psutil.virtual_memory().available
    try:
        limit = int((CONTROL_GROUP / "memory.max").read_text())
        used = int((CONTROL_GROUP / "memory.current").read_text())
        lines = (CONTROL_GROUP / "memory.stat").read_text().splitlines()
        cached = next(int(line.split()[1]) for line in lines if line.startswith("inactive_file "))
    except (OSError, ValueError, StopIteration):  # no control group, or one without a limit
        return free
    return min(free, limit - used + cached)


def placement(checkpoint: Checkpoint, device: str, dtype: torch.dtype | None, window: int) -> tuple[Placement, str]:
    """Where a model can go, and a line that says why it cannot go there whole (empty where it can).

    Args:
        device: ``cpu`` or ``cuda``. dtype: what it is loaded in; None for the checkpoint's own.
    """
    from surgery.sizes import format_bytes

    needed = model_bytes(checkpoint, window, dtype.itemsize if dtype is not None else None)
    free = SHARE * available_bytes(device)
    if needed <= free:
        return "whole", ""
    reason = f"the model needs about {format_bytes(needed)} on {device}, and {format_bytes(int(free))} may be used"
    if device != "cpu":
        import torch

        count = torch.cuda.device_count()
        if count > 1 and needed <= SHARE * sum(torch.cuda.mem_get_info(number)[0] for number in range(count)):
            return "spread", f"{reason}: its blocks are spread over {count} GPUs"
    return "streamed", f"{reason}: each block is read from the disk when it runs"


def _size(config: Mapping[str, Any], *names: str) -> int:
    """The first of these keys that the configuration, or its text model's, has."""
    for part in (config, config.get("text_config") or {}):
        for name in names:
            if isinstance(part.get(name), int):
                return part[name]
    return 0
