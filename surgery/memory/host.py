"""The host's own rule: what a graft with nothing swapped computes, and the control of every comparison."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from surgery.kernels import dispatch

from .base import MemoryInputs, MemoryRule


class HostMemory(MemoryRule):
    """The additive rule on a Mamba2 host, the gated delta rule on a delta host, there with one decay a head or one for
    each key channel. It adds no parameters, and its dose changes nothing.

    State: M, [B, H, V, K] additive, [B, H, K, V] delta.
    """

    rule = "host"

    @property
    def exact_limit(self) -> bool:
        return True

    def state_shape(self, batch: int) -> tuple[int, ...]:
        geometry = self.geometry
        if geometry.style == "additive":
            return batch, geometry.num_heads, geometry.value_dim, geometry.key_dim
        return batch, geometry.num_heads, geometry.key_dim, geometry.value_dim

    def reset_parameters(self, start: Literal["exact", "paper"] = "exact") -> None:
        self.dose.fill_(0.0 if start == "exact" else 1.0)

    def compiles(self, device: torch.device) -> bool:
        return not self.geometry.channel_decay

    def forward(self, inputs: MemoryInputs, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
        inputs = inputs.masked()
        given = inputs.q, inputs.k, inputs.v, inputs.log_decay
        options = {"state": state, "reset": inputs.reset, "in_place": inputs.in_place}
        if self.geometry.style == "additive":
            return dispatch.additive(*given, write=inputs.write, **options)
        return dispatch.delta(*given, inputs.write, **options)
