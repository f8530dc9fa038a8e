"""Which parameters a phase trains, and how the optimizer groups them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch
from torch import nn

from surgery.errors import UsageError

BETAS = (0.9, 0.95)
WEIGHT_DECAY = 0.1  # on matrices and convolutions alone; gates, norms and biases have none
MAX_GRAD_NORM = 1.0

Trainable = str | Sequence[str]  # swapped | swapped-memory | all | name patterns


@dataclass(frozen=True)
class Selection:
    """The parameters of one phase.

    Attributes:
        trained: name -> parameter, every parameter that gets a gradient.
        memory: names of those that the graft added.
        shared: names of those outside the swapped mixers: the teacher does not share them.
    """

    trained: dict[str, nn.Parameter]
    memory: frozenset[str]
    shared: frozenset[str]


def select(
    model: nn.Module, mixers: Mapping[int, str], trainable: Trainable, *, phase: str, silent: bool = False
) -> Selection:
    """Mark the parameters that ``trainable`` names as trained and all others as frozen.

    A parameter that its module declares fixed (``requires_grad`` False on a fresh model) stays fixed.

    Args:
        mixers: swapped layer -> the name of its mixer module.
        trainable: as in the recipe; a pattern is a shell-style wildcard on parameter names.
        phase: the phase's name, for errors.
        silent: the phase runs at dose 0 throughout, where what a graft added has no gradient; it is left out.

    Raises:
        UsageError: a pattern that matches nothing, or nothing left to train.
    """
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    prefixes = tuple(f"{name}." for name in mixers.values())
    memories = tuple(f"{name}.memory." for name in mixers.values())
    matched: set[str] = set()

    def wanted(aliases: list[str]) -> bool:
        if trainable == "all":
            return True
        if trainable == "swapped":
            return any(name.startswith(prefixes) for name in aliases)
        if trainable == "swapped-memory":
            return any(name.startswith(memories) for name in aliases)
        hits = {pattern for pattern in trainable for name in aliases if fnmatchcase(name, pattern)}
        matched.update(hits)
        return bool(hits)

    trained: dict[str, nn.Parameter] = {}
    for name, parameter in model.named_parameters():
        aliases = names[id(parameter)]
        in_memory = any(alias.startswith(memories) for alias in aliases)
        chosen = wanted(aliases) and parameter.requires_grad and not (silent and in_memory)
        parameter.requires_grad_(chosen)
        if chosen:
            trained[name] = parameter
    if not isinstance(trainable, str):
        missed = [pattern for pattern in trainable if pattern not in matched]
        if missed:
            raise UsageError(
                f"phase {phase}: trainable: {missed[0]!r} matches no parameter; "
                f"names look like {next(iter(model.named_parameters()))[0]!r}"
            )
    if not trained:
        why = "at dose 0 nothing that the graft added has a gradient" if silent else "nothing matches"
        raise UsageError(f"phase {phase}: trainable: {trainable} leaves nothing to train ({why})")
    return Selection(
        trained,
        frozenset(name for name in trained if name.startswith(memories)),
        frozenset(name for name in trained if not name.startswith(prefixes)),
    )


def parameter_groups(selection: Selection, memory_rate: float, host_rate: float) -> list[dict]:
    """Optimizer groups: what the graft added and the host's own, each with and without weight decay; empty ones are
    left out. Each group carries a ``name``."""
    groups = []
    for kind, rate in (("memory", memory_rate), ("host", host_rate)):
        members = {n: p for n, p in selection.trained.items() if (n in selection.memory) == (kind == "memory")}
        for decayed in (True, False):
            chosen = [parameter for parameter in members.values() if (parameter.ndim >= 2) == decayed]
            if chosen:
                groups.append(
                    {"params": chosen, "lr": rate, "weight_decay": WEIGHT_DECAY if decayed else 0.0, "name": kind}
                )
    return groups


def optimizer(selection: Selection, memory_rate: float, host_rate: float) -> torch.optim.Optimizer:
    """AdamW over :func:`parameter_groups`; on a GPU one fused kernel a step."""
    groups = parameter_groups(selection, memory_rate, host_rate)
    cuda = all(parameter.is_cuda for group in groups for parameter in group["params"])
    return torch.optim.AdamW(groups, betas=BETAS, fused=True if cuda else None)
