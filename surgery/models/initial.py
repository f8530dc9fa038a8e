"""Initial weights of grafts and memories, for models that are built and not loaded.

Tensors that came from a checkpoint are flagged by transformers, and its initialisers leave them alone.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from transformers import initialization as init

from surgery.graft import Graft
from surgery.memory.base import MemoryRule


class InitialWeights:
    """Comes before a model class of transformers among a class's bases and initialises what that one does not know."""

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Initial weights of one module."""
        super()._init_weights(module)
        if isinstance(module, MemoryRule):
            init_memory(module)
        elif isinstance(module, Graft):
            self._init_graft(module)

    def _init_graft(self, graft: Graft) -> None:
        """A mixer's own parameters, decay and step above all, as the family's library starts them."""
        raise NotImplementedError


def init_memory(memory: MemoryRule) -> None:
    """Reset a memory's own tensors, except those that came from a checkpoint."""
    tensors = [*memory.parameters(), *memory.buffers()]
    loaded = [(tensor, tensor.clone()) for tensor in tensors if getattr(tensor, "_is_hf_initialized", False)]
    if len(loaded) == len(tensors) or any(tensor.device.type == "meta" for tensor in tensors):
        return
    memory.reset_parameters()
    for tensor, before in loaded:
        tensor.copy_(before)


def init_dt_bias(dt_bias: Tensor, low: float, high: float, floor: float) -> None:
    """Draw dt log-uniformly from [low, high], at least ``floor``, and set the bias whose softplus it is."""
    dt = torch.exp(torch.rand_like(dt_bias) * math.log(high / low) + math.log(low)).clamp(min=floor)
    init.copy_(dt_bias, dt + torch.log(-torch.expm1(-dt)))


def init_numbered_heads(graft: Graft) -> None:
    """transformers' start of a Mamba-2 mixer: A of head h, from 1, is h, and D is 1."""
    heads = torch.arange(1, graft.geometry.num_heads + 1, device=graft.A_log.device)
    init.copy_(graft.A_log, heads.float().log())
    init.ones_(graft.D)


def init_drawn_heads(graft: Graft, low: float, high: float) -> None:
    """The start of a Mamba-2 mixer in its authors' library and in flash-linear-attention: A is uniform on [low, high],
    and D is 1."""
    init.copy_(graft.A_log, torch.rand_like(graft.A_log).mul(high - low).add(low).log())
    init.ones_(graft.D)
