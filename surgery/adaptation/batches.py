"""A phase's micro-batches, in the order in which its devices take them."""

from __future__ import annotations

from typing import Any

from torch.utils.data import Dataset

from surgery.adaptation.schedules import BatchShape
from surgery.data.packing import Item, collate


class MicroBatches(Dataset):
    """A phase's micro-batches in order: step by step, and within a step device by device for each forward.

    Args:
        data: at least steps x sequences items.
    """

    def __init__(self, data: Any, shape: BatchShape, steps: int) -> None:
        self.data, self.shape, self.steps = data, shape, steps

    def __len__(self) -> int:
        return self.steps * self.shape.parts

    def __getitem__(self, index: int) -> Item:
        if not 0 <= index < len(self):
            raise IndexError(index)
        step, part = divmod(index, self.shape.parts)
        first, last = self.shape.bounds(part)
        begin = step * self.shape.sequences
        return collate([self.data[begin + number] for number in range(first, last)])
