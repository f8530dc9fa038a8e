"""Stops a phase at the first number that is not finite, and says where it arose."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import nn

from surgery.adaptation.distiller import Distiller
from surgery.adaptation.teaching import Side
from surgery.errors import JobError


def explain_loss(loss: float, inputs: Mapping[str, Any], distiller: Distiller, where: str, remedy: str) -> NoReturn:
    """Raise for a loss that is not finite.

    Raises:
        JobError: naming step, and the first module whose output is not finite.
    """
    source = first_nonfinite(distiller, inputs)
    raise JobError(f"{where}: the loss is {loss}, from {source}\n{remedy}")


def require_gradients(trained: Mapping[str, nn.Parameter], layer_of: Callable[[str], str], where: str) -> None:
    """Refuse to step where a trained parameter got no gradient.

    Raises:
        JobError: naming step and layer.
    """
    dead = [name for name, parameter in trained.items() if parameter.grad is None]
    if dead:
        raise JobError(
            f"{where}: {layer_of(dead[0])} gets no gradient ({dead[0]}"
            + (f" and {len(dead) - 1} more)" if len(dead) > 1 else ")")
            + "\nthe loss does not reach it: leave it out of trainable"
        )


def explain_gradients(
    trained: Mapping[str, nn.Parameter],
    norms: Sequence[float],
    layer_of: Callable[[str], str],
    where: str,
    remedy: str,
) -> NoReturn:
    """Raise for gradients whose norm is not finite.

    Args:
        norms: each trained parameter's, in order.

    Raises:
        JobError: naming step and layer.
    """
    bad = [name for name, norm in zip(trained, norms, strict=True) if not math.isfinite(norm)]
    name = bad[0] if bad else next(iter(trained))
    raise JobError(
        f"{where}: the gradient of {layer_of(name)} is not finite ({name}"
        + (f" and {len(bad) - 1} more)" if len(bad) > 1 else ")")
        + f"\n{remedy}"
    )


@torch.no_grad()
def first_nonfinite(distiller: Distiller, inputs: Mapping[str, Any]) -> str:
    """The first module, in order of computation, whose parameters or output are not finite on ``inputs``."""
    found: list[str] = []
    handles = []
    body = distiller.runner

    def watch(name: str) -> Callable:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            if found:
                return
            for own, parameter in module.named_parameters():
                if not torch.isfinite(parameter).all():
                    found.append(f"{name}, whose weight {own} is not finite")
                    return
            tensors = [part for part in (output if isinstance(output, tuple) else (output,)) if torch.is_tensor(part)]
            if any(not torch.isfinite(part).all() for part in tensors):
                found.append(f"{name}, whose output is not finite")

        return hook

    for layer, name in body.mixers.items():
        mixer = body.switches[layer].student if layer in body.switches else body.model.get_submodule(name)
        handles.append(mixer.register_forward_hook(watch(f"the mixer of layer {layer}")))
    for layer, block in body.every_block.items():
        handles.append(block.register_forward_hook(watch(f"the block of layer {layer}")))
    try:
        side = Side.BOTH if distiller.objective.mixers_only else Side.STUDENT
        with body.turned(side):
            body.run(**{key: inputs.get(key) for key in ("input_ids", "reset", "mask")})
        for switch in body.switches.values():
            switch.pair = None
    finally:
        for handle in handles:
            handle.remove()
    return found[0] if found else "the head or the loss itself"
