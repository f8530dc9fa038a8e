"""Find weights that no model can compute with: not finite, or too large to have been trained.

    check_values(open_checkpoint(directory))

Reads every tensor once, a few megabytes at a time, and remembers each file's result, so that a command reads it once.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from surgery.checkpoint.reading import DTYPE_NAMES, ITEM_BYTES, Checkpoint, open_checkpoint
from surgery.errors import UsageError

# Trained weights fit into half precision, whose largest number is 65504, by orders of magnitude; float32 is exceeded
# when a value of 1.8e19 is squared.
LARGEST = 1.0e6
LARGEST_EXPONENT = 80.0  # of what a model takes the exponential of: float32 ends at 88.7
BLOCK = 2**24  # bytes read at once


@dataclass(frozen=True)
class Extreme:
    """Describes a tensor's value furthest from 0, or its first that is not finite.

    Attributes:
        index: its place in the flattened tensor. wrong: how many values are not finite or beyond :func:`limit_of`.
        shape: the tensor's.
    """

    name: str
    value: float
    index: int
    wrong: int
    shape: tuple[int, ...]

    @property
    def limit(self) -> float:
        """Return the magnitude beyond which a value is wrong."""
        return limit_of(self.name)

    @property
    def place(self) -> list[int]:
        """Return the index in each dimension."""
        place, rest = [], self.index
        for size in reversed(self.shape):
            rest, here = divmod(rest, size)
            place.append(here)
        return place[::-1]

    def __str__(self) -> str:
        return f"{self.name} holds {self.value:.4g} at {self.place}"


def limit_of(name: str) -> float:
    """Return the largest magnitude that a tensor of that name may hold."""
    leaf = name.rpartition(".")[2]
    exponent = leaf in ("A_log", "Ip_log") or leaf.startswith("log_")
    return LARGEST_EXPONENT if exponent else LARGEST


def check_values(checkpoint: Checkpoint, unused: Callable[[str], bool] | None = None) -> None:
    """Refuse weights that are not finite or not plausible, before anything is computed with them.

    Args:
        unused: whether nothing reads the tensor of that name.

    Raises:
        UsageError: naming the base, the tensor, and the value.
    """
    from surgery.checkpoint.pickles import origin

    wrong = [one for one in extremes(checkpoint) if one.wrong and one.name in checkpoint.tensors]
    wrong = [one for one in wrong if unused is None or not unused(one.name)]
    if not wrong:
        return
    one = next((one for one in wrong if not math.isfinite(one.value)), wrong[0])
    entry = checkpoint.tensors[one.name]
    place = origin(checkpoint.directory).get("from") or checkpoint.directory / entry.shard  # not a converted copy
    if not math.isfinite(one.value):
        what = f"{one.wrong} of its {entry.numel} values not finite or beyond {one.limit:g}"
    elif one.limit == LARGEST:
        what = f"{one.wrong} of its {entry.numel} values beyond {one.limit:g}, which no trained weight reaches"
    else:
        what = f"{one.wrong} of its {entry.numel} values beyond {one.limit:g}, where their exponential overflows"
    others = f"; {len(wrong) - 1} more tensors likewise" if len(wrong) > 1 else ""
    raise UsageError(
        f"{place}: {one}, with {what}{others}\n"
        f"  {one.name} is damaged, or its training diverged: download the weights again, or use another checkpoint"
    )


def largest_weight(directory: Path) -> str:
    """Name the checkpoint's value furthest from 0, for where a result overflows although every weight is finite."""
    found = max(extremes(open_checkpoint(directory)), key=lambda one: abs(one.value), default=None)
    return f"the largest weight of {directory}: {found}" if found is not None else f"{directory} holds no weights"


def extremes(checkpoint: Checkpoint) -> Iterable[Extreme]:
    """Yield each floating-point tensor's extreme value, file by file."""
    for shard in checkpoint.shards:
        file = (checkpoint.directory / shard).resolve()
        status = file.stat()
        yield from _scan(file, status.st_size, status.st_mtime_ns, status.st_ino)


@lru_cache(maxsize=256)
def _scan(file: Path, *_: int) -> tuple[Extreme, ...]:
    """Return the extremes of one file; the other arguments tell files apart that came to lie at the same place."""
    import torch

    dtypes = {stored: getattr(torch, name) for name, stored in DTYPE_NAMES.items()}
    found = []
    with file.open("rb") as stream:
        (length,) = struct.unpack("<Q", stream.read(8))
        header = json.loads(stream.read(length))
        for name, entry in header.items():
            if name == "__metadata__" or entry["dtype"] not in dtypes or 0 in entry["shape"]:
                continue
            start, stop = entry["data_offsets"]
            stream.seek(8 + length + start)
            dtype, size, limit = dtypes[entry["dtype"]], ITEM_BYTES[entry["dtype"]], limit_of(name)
            value, index, wrong, done = 0.0, 0, 0, 0
            while done < stop - start:
                block = bytearray(stream.read(min(BLOCK, stop - start - done)))
                values = torch.frombuffer(block, dtype=dtype)
                low, high = (float(end) for end in values.aminmax())  # NaN where one value is
                worst = high if abs(high) >= abs(low) else low
                if not -limit <= low <= high <= limit:
                    bad = ~(values.double().abs() <= limit)  # NaN compares false; half precision has no 1e6
                    infinite = (~values.isfinite()).nonzero()
                    wrong += int(bad.sum())
                    if infinite.numel() and math.isfinite(value):
                        index = done // size + int(infinite[0])
                        value = float(values[infinite[0]])
                if math.isfinite(worst) and math.isfinite(value) and abs(worst) > abs(value):
                    value, index = worst, done // size + int((values == worst).nonzero()[0])
                done += len(block)
            found.append(Extreme(name, value, index, wrong, tuple(entry["shape"])))
    return tuple(found)
