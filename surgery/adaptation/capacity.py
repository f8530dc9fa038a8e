"""What a phase needs of memory, checked before it starts."""

from __future__ import annotations

from pathlib import Path

from torch import nn

from surgery.errors import JobError
from surgery.sizes import format_bytes

CPU_TOKENS = 4096  # tokens a forward on a CPU, where more at once is not faster
ACTIVATION_BYTES = 64  # a token, a layer and a unit of width, kept for the backward pass
ACTIVATION_SHARE = 0.4  # of the free memory of a GPU that activations may take


def free_memory(device: str) -> int | None:
    """Bytes free on the device, None where the system does not say."""
    if device == "cuda":
        import torch

        return torch.cuda.mem_get_info()[0]
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    found = [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    return found[0] if found else None


def check_second_model(base_parameters: int, trained: int, phase: str, device: str) -> str:
    """A sentence that says that the teacher takes a second model, and why.

    Args:
        base_parameters: of the base; its copy stands in float32.
        trained: parameters that get a gradient and two moments each.

    Raises:
        JobError: the device has no room for it.
    """
    needed = 4 * base_parameters + 12 * trained
    free = free_memory(device)
    if free is not None and needed > free:
        raise JobError(
            f"phase {phase}: the weights outside the swapped mixers are or were trained, so the teacher needs a second "
            f"copy of the base: {format_bytes(needed)} with gradients and optimizer, {format_bytes(free)} are free\n"
            "train the swapped mixers only (trainable: swapped), or use a device with more memory"
        )
    return (
        f"phase {phase}: the weights outside the swapped mixers are or were trained, so the teacher is a second copy "
        f"of the base ({format_bytes(4 * base_parameters)})"
    )


def sequences_a_forward(model: nn.Module, context: int, device: str) -> int:
    """Sequences that one forward takes where the caller does not say."""
    if device == "cpu":
        return max(1, CPU_TOKENS // context)
    config = model.config
    token = ACTIVATION_BYTES * config.num_hidden_layers * config.hidden_size
    return max(1, int(ACTIVATION_SHARE * (free_memory(device) or 0) / (token * context)))
