"""What a GPU has room for."""

from __future__ import annotations

import functools
import sys

import torch
import triton

# what kernels in their usual layouts take at most. An A100 has 163 KB, GPUs for workstations 99 KB
ENOUGH_SHARED = 160 * 2**10


@functools.cache
def shared_memory(device: torch.device) -> int:
    """Bytes of shared memory that a program may take."""
    if device.type != "cuda":
        return sys.maxsize
    return triton.runtime.driver.active.utils.get_device_properties(device.index)["max_shared_mem"]
