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
from surgery.graft import compiling
from surgery.graft.base import _mix

CLASSIFIED = 16384  # tokens whose logits exist at once


class Carry(NamedTuple):
    """What one layer hands from window to window: convolution inputs [B, C, W] and the memory's state [B, ...]."""

    window: Tensor
    state: Tensor

    def detached(self, keep: Tensor) -> Carry:
        """Without gradients, and back at zero in the rows where ``keep`` [B] is 0."""
        return Carry(*(x.detach() * keep.view(-1, *[1] * (x.dim() - 1)).to(x.dtype) for x in self))


def mamba2_block(
    block: nn.Module, x: Tensor, reset: Tensor | None, window: Tensor, state: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """One block of a Mamba2 model: x + mixer(norm(x))."""
    mixed, *carry = _mix(block.mixer, block.norm(x), None, reset, window, state)
    return x + mixed, *carry


def gated_deltanet_block(
    block: nn.Module, x: Tensor, reset: Tensor | None, window: Tensor, state: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """One block of a Gated DeltaNet model: the mixer, then the MLP, each on a normed residual."""
    mixed, *carry = _mix(block.attn, block.attn_norm(x), None, reset, window, state)
    x = x + mixed
    return x + block.mlp(block.mlp_norm(x)), *carry


def head_losses(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """[N] cross-entropies of [N, D] hidden states under the output matrix [V, D]."""
    return F.cross_entropy(F.linear(hidden, weight).float(), targets, reduction="none")


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
        self.written = mamba2_block if self.mamba2 else gated_deltanet_block, head_losses
        self.block, self.head_losses = map(compiling.compiled, self.written) if compiled else self.written

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

    def hidden(
        self, tokens: Tensor, carries: list[Carry], reset: Tensor | None = None
    ) -> tuple[Tensor, list[Carry]]:
        """[B, T] to the normed hidden states [B, T, D] before the head. ``reset`` [B, T] is True where a memory starts
        anew."""
        x = self.embeddings(tokens)
        after = []
        for block, carry in zip(self.blocks, carries, strict=True):
            x, *new = self.block(block, x, reset, *carry)
            after.append(Carry(*new))
        return self.norm(x), after

    def losses(
        self, tokens: Tensor, targets: Tensor, carries: list[Carry], reset: Tensor | None = None
    ) -> tuple[Tensor, list[Carry]]:
        """Nats of each target, [B, T], and the carries after the last token."""
        with torch.autocast(tokens.device.type, torch.bfloat16, enabled=self.autocast, cache_enabled=False):
            hidden, after = self.hidden(tokens, carries, reset)
            parts = zip(hidden.flatten(0, 1).split(CLASSIFIED), targets.flatten().split(CLASSIFIED), strict=True)
            found = [self.head_losses(part, self.weight, goal) for part, goal in parts]
        return torch.cat(found).view(targets.shape), after

    def loss(self, tokens: Tensor, targets: Tensor, carries: list[Carry]) -> tuple[Tensor, list[Carry]]:
        """Mean nats a token over [B, T], and the carries after the last token."""
        losses, after = self.losses(tokens, targets, carries)
        return losses.mean(), after

    def settle(self, tokens: Tensor, targets: Tensor, reset: Tensor | None) -> str | None:
        """Compare what was compiled with what is written, loss and gradients of one batch, and go on as it is written
        where they differ by more than rounding or nothing could be compiled.

        Returns:
            a line for the user, if something is not as it should be.
        """
        parameters = [parameter for parameter in self.model.parameters() if parameter.requires_grad]

        def outcome() -> list[Tensor]:
            loss = self.losses(tokens, targets, self.start(len(tokens)), reset)[0].mean()
            return [x.float() for x in torch.autograd.grad(loss, parameters)]

        compiled = self.block, self.head_losses
        try:
            made = outcome()
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # a compiler's errors are of any type
            self.block, self.head_losses = self.written
            reason = " ".join(str(error).split())[:300]
            return f"runs uncompiled, because compiling failed: {type(error).__name__}: {reason}"
        self.block, self.head_losses = self.written
        try:
            written = outcome()
        except torch.OutOfMemoryError:
            self.block, self.head_losses = compiled
            return "what was compiled could not be compared: out of GPU memory"
        difference = sum((a - b).square().sum() for a, b in zip(made, written, strict=True)).sqrt()
        error = (difference / sum(b.square().sum() for b in written).sqrt()).item()
        if not error <= compiling.TOLERANCE:
            return f"runs uncompiled, because compiled gradients are {error:.1e} off"
        self.block, self.head_losses = compiled
        return None

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
                x = self.written[0](block, x, None, *carry)[0]
                if not torch.isfinite(x).all():
                    found.append(f"layer {index} is the first whose output is not finite")
                    break
        place = "; ".join(found) or "no layer shows it from an empty memory, so a gradient overflowed"
        raise JobError(f"step {step}: the loss or its gradient is not finite: {place}")
