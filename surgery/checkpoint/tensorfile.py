"""Write one safetensors file tensor by tensor: what is held at any time is one tensor, not the file."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from surgery.checkpoint.reading import TensorEntry

if TYPE_CHECKING:
    from torch import Tensor


def write_tensors(
    path: Path,
    entries: Sequence[TensorEntry],
    read: Callable[[str], Tensor],
    progress: Callable[[int], object] | None = None,
) -> None:
    """Write ``entries`` in their order (safetensors' format: header length, JSON header, the bytes back to back).

    Args:
        read: gives a tensor by its name, of the entry's dtype and shape, when its turn has come.
        progress: called with the bytes written since the last call.
    """
    import torch

    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for entry in entries:
        header[entry.name] = {
            "dtype": entry.dtype,
            "shape": list(entry.shape),
            "data_offsets": [offset, offset + entry.nbytes],
        }
        offset += entry.nbytes
    text = json.dumps(header, separators=(",", ":")).encode("utf-8")
    text += b" " * (-len(text) % 8)  # the data begins at a multiple of 8 bytes
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for entry in entries:
            data = read(entry.name).detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
            if data.nbytes != entry.nbytes:
                raise ValueError(f"{entry.name}: {data.nbytes} bytes, not the {entry.nbytes} of its entry")
            file.write(data)
            if progress is not None:
                progress(entry.nbytes)
