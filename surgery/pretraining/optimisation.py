"""Muon for the hidden matrices, AdamW for everything else, and the learning rate's schedule.

``torch.optim.Muon`` steps through its matrices one by one, some 25 small launches each, which is about 1600 a step for
the 64 matrices of tiny-gdn, and takes a fused projection for one matrix. This one does the same arithmetic on stacks of
equal shapes, parts of fused projections apart.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)  # Jordan et al., Muon (2024): the quintic's coefficients
NEWTON_SCHULZ_STEPS = 5
MOMENTUM = 0.95


def orthogonalise(matrices: Tensor) -> Tensor:
    """[N, R, C] to the nearest semi-orthogonal matrices, approximately: singular values land in about 0.7 to 1.2."""
    a, b, c = NEWTON_SCHULZ
    x = matrices.bfloat16() if matrices.is_cuda else matrices
    transposed = x.shape[-2] > x.shape[-1]
    if transposed:
        x = x.mT
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(NEWTON_SCHULZ_STEPS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return (x.mT if transposed else x).to(matrices.dtype)


class Muon(torch.optim.Optimizer):
    """Muon (Jordan et al., 2024) on stacks of matrices, with decoupled weight decay.

    Args:
        matrices: pairs of a parameter [R, C] and the row counts of its parts, which are orthogonalised separately (a
            fused projection is several matrices).
        lr: learning rate, a number or a tensor of one. An update's root mean square is 0.2 lr, as AdamW's (Liu et al.,
            2025).
    """

    def __init__(self, matrices: Iterable[tuple[nn.Parameter, list[int]]], lr: float, weight_decay: float) -> None:
        pairs = list(matrices)
        super().__init__([parameter for parameter, _ in pairs], {"lr": lr, "weight_decay": weight_decay})
        self.parts = [rows for _, rows in pairs]
        for parameter, rows in pairs:
            assert sum(rows) == parameter.shape[0], f"parts {rows} do not make {tuple(parameter.shape)}"

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            parameters = group["params"]
            gradients = [parameter.grad for parameter in parameters]
            buffers = []
            for parameter in parameters:
                if "momentum" not in self.state[parameter]:
                    self.state[parameter]["momentum"] = torch.zeros_like(parameter)
                buffers.append(self.state[parameter]["momentum"])
            torch._foreach_lerp_(buffers, gradients, 1 - MOMENTUM)
            directions = torch._foreach_lerp(gradients, buffers, MOMENTUM)  # Nesterov
            stacks: dict[tuple[int, int], list[tuple[Tensor, Tensor]]] = {}
            for parameter, direction, rows in zip(parameters, directions, self.parts, strict=True):
                for part, target in zip(direction.split(rows), parameter.split(rows), strict=True):
                    stacks.setdefault(tuple(part.shape), []).append((part, target))
            torch._foreach_mul_(parameters, 1 - group["lr"] * group["weight_decay"])
            for shape, pairs in stacks.items():
                updates = orthogonalise(torch.stack([part for part, _ in pairs]))
                updates = updates * (-0.2 * math.sqrt(max(shape)) * group["lr"])
                torch._foreach_add_([target for _, target in pairs], list(updates.unbind(0)))


def fused_rows(name: str, model) -> list[int] | None:
    """The parts of Mamba2's ``in_proj``: gate, values, keys, queries, steps."""
    config = model.config
    if not name.endswith("in_proj.weight"):
        return None
    inner = config.expand * config.hidden_size
    return [inner, inner, config.n_groups * config.state_size, config.n_groups * config.state_size, config.num_heads]


def optimisers(model, muon_lr: float, adam_lr: float, weight_decay: float) -> list[torch.optim.Optimizer]:
    """Muon on every hidden matrix with at least 8 rows, AdamW on embeddings, convolutions, vectors and thin matrices.

    Each group's ``initial_lr`` is what :func:`set_rate` scales.
    """
    matrices, embeddings, others = [], [], []
    for name, parameter in model.named_parameters():
        if "embeddings" in name or name.startswith("lm_head"):
            embeddings.append(parameter)
        elif parameter.dim() == 2 and parameter.shape[0] >= 8:
            matrices.append((parameter, fused_rows(name, model) or [parameter.shape[0]]))
        else:
            others.append(parameter)
    fused = next(model.parameters()).is_cuda
    adam = torch.optim.AdamW(
        [
            {"params": embeddings, "lr": adam_lr, "weight_decay": weight_decay / 10},
            {"params": others, "lr": adam_lr, "weight_decay": 0.0},
        ],
        betas=(0.9, 0.95),
        eps=1e-10,
        fused=fused,
    )
    found = [Muon(matrices, muon_lr, weight_decay), adam]
    for optimiser in found:
        for group in optimiser.param_groups:
            group["initial_lr"] = group["lr"]
    return found


def rate(step: int, steps: int, warmup: float = 0.02, decay: float = 0.6) -> float:
    """The learning rate's factor at ``step`` of ``steps``: linear up, flat, then linear to zero over ``decay``."""
    rising = (step + 1) / max(1.0, warmup * steps)
    falling = (steps - step) / max(1.0, decay * steps)
    return min(1.0, rising, falling)


def set_rate(found: list[torch.optim.Optimizer], factor: float | Tensor) -> None:
    """Scale every group's learning rate to ``factor`` of its initial one; in place, where it is a tensor."""
    for optimiser in found:
        for group in optimiser.param_groups:
            if isinstance(group["lr"], Tensor):
                group["lr"].copy_(group["initial_lr"] * factor)
            else:
                group["lr"] = group["initial_lr"] * factor
