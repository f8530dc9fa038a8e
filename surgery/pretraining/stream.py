"""A base's forward pass with its memories as plain tensors in and out, for training on a carried-on stream.

The models' own forward carries state in a cache that keeps values only and cannot be compiled; this one threads each
layer's convolution window and memory state through, block by block, so that one compiled block serves every layer.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from surgery.errors import JobError
from surgery.kernels.additive.chunked import additive
from surgery.kernels.delta.chunked import delta

CLASSIFIED = 16384  # tokens whose logits exist at once


class Carry(NamedTuple):
    """What one layer hands from window to window: convolution inputs [B, C, W] and the memory's state [B, ...]."""

    window: Tensor
    state: Tensor

    def detached(self, keep: Tensor) -> Carry:
        """Without gradients, and back at zero in the rows where ``keep`` [B] is 0."""
        return Carry(*(x.detach() * keep.view(-1, *[1] * (x.dim() - 1)).to(x.dtype) for x in self))


def _mix(graft: nn.Module, hidden: Tensor, carry: Carry) -> tuple[Tensor, Carry]:
    """One mixer under its host's rule. The kernels are called by name: picking one by device cannot be compiled."""
    inputs, rest, window = graft._gather(hidden, None, None, carry.window)
    if graft.geometry.style == "additive":
        write = inputs.v * inputs.write[..., None]
        o, state = additive(inputs.q, inputs.k, write, inputs.log_decay, state=carry.state)
    else:
        o, state = delta(inputs.q, inputs.k, inputs.v, inputs.log_decay, inputs.write, state=carry.state)
    return graft._emit(o.to(inputs.v.dtype), inputs, rest), Carry(window, state)


def mamba2_block(block: nn.Module, x: Tensor, window: Tensor, state: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """One block of a Mamba2 model: x + mixer(norm(x))."""
    mixed, carry = _mix(block.mixer, block.norm(x), Carry(window, state))
    return x + mixed, *carry


def gated_deltanet_block(block: nn.Module, x: Tensor, window: Tensor, state: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """One block of a Gated DeltaNet model: the mixer, then the MLP, each on a normed residual."""
    mixed, carry = _mix(block.attn, block.attn_norm(x), Carry(window, state))
    x = x + mixed
    return x + block.mlp(block.mlp_norm(x)), *carry


def head_loss(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Summed cross-entropy of [N, D] hidden states under the output matrix [V, D]."""
    return F.cross_entropy(F.linear(hidden, weight).float(), targets, reduction="sum")


class StreamModel:
    """Reads [B, T] tokens and each layer's carry; returns the mean loss and the new carries.

    Args:
        model: a base from ``surgery.pretraining.bases.create``.
        compiled: compile a block and the loss with torch.compile.
        autocast: compute matrix products in bfloat16.
    """

    def __init__(self, model: nn.Module, compiled: bool, autocast: bool) -> None:
        self.model = model
        self.mamba2 = hasattr(model, "backbone")
        body = model.backbone if self.mamba2 else model.model
        self.embeddings, self.blocks = body.embeddings, list(body.layers)
        self.norm = body.norm_f if self.mamba2 else body.norm
        self.weight = model.get_output_embeddings().weight
        self.autocast = autocast
        block = mamba2_block if self.mamba2 else gated_deltanet_block
        self.block = torch.compile(block, fullgraph=True, dynamic=False) if compiled else block
        self.head_loss = torch.compile(head_loss, fullgraph=True, dynamic=False) if compiled else head_loss

    def grafts(self) -> list[nn.Module]:
        return [block.mixer if self.mamba2 else block.attn for block in self.blocks]

    def start(self, batch: int) -> list[Carry]:
        """Zero carries of ``batch`` rows."""
        device = self.weight.device
        dtype = torch.bfloat16 if self.autocast else self.weight.dtype
        carries = []
        for graft in self.grafts():
            channels = sum(size for _, size in graft._convolutions())
            window = torch.zeros(batch, channels, graft.conv_width, device=device, dtype=dtype)
            carries.append(Carry(window, torch.zeros(graft.memory.state_shape(batch), device=device)))
        return carries

    def hidden(self, tokens: Tensor, carries: list[Carry]) -> tuple[Tensor, list[Carry]]:
        """[B, T] to the normed hidden states [B, T, D] before the head."""
        x = self.embeddings(tokens)
        after = []
        for block, carry in zip(self.blocks, carries, strict=True):
            x, *new = self.block(block, x, *carry)
            after.append(Carry(*new))
        return self.norm(x), after

    def loss(self, tokens: Tensor, targets: Tensor, carries: list[Carry]) -> tuple[Tensor, list[Carry]]:
        """Mean nats a token over [B, T], and the carries after the last token."""
        with torch.autocast(tokens.device.type, torch.bfloat16, enabled=self.autocast):
            hidden, after = self.hidden(tokens, carries)
            flat, goals = hidden.flatten(0, 1), targets.flatten()
            parts = zip(flat.split(CLASSIFIED), goals.split(CLASSIFIED), strict=True)
            total = sum(self.head_loss(part, self.weight, goal) for part, goal in parts)
        return total / goals.numel(), after

    def check_finite(self, step: int, tokens: Tensor, carries: list[Carry]) -> None:
        """The watchdog: if there was a ``step`` whose loss or gradient was not finite, name the first layer at fault.

        Args:
            step: the first such step, or -1 if there was none.
            tokens: [B, T], what it read. carries: the latest; what is not finite stays so in them.

        Raises:
            JobError: naming step and layer.
        """
        if step < 0:
            return
        found = [
            f"parameter {name} is not finite"
            for name, parameter in self.model.named_parameters()
            if not torch.isfinite(parameter).all()
        ][:1]
        for index, carry in enumerate(carries):
            if not all(torch.isfinite(part).all() for part in carry):
                found.append(f"the memory of layer {index} is the first that is not finite")
                break
        with torch.no_grad(), torch.autocast(tokens.device.type, torch.bfloat16, enabled=self.autocast):
            x = self.embeddings(tokens)
            for index, (block, carry) in enumerate(zip(self.blocks, self.start(len(tokens)), strict=True)):
                x = self.block(block, x, *carry)[0]
                if not torch.isfinite(x).all():
                    found.append(f"layer {index} is the first whose output is not finite")
                    break
        place = "; ".join(found) or "no layer shows it from an empty memory, so a gradient overflowed"
        raise JobError(f"step {step}: the loss or its gradient is not finite: {place}")
