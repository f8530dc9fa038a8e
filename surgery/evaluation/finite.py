"""Find where a forward pass leaves the finite numbers, and put an overflow into words."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from surgery.checkpoint.values import largest_weight


def overflow_note(perplexities: dict[str, float | None], nats: dict[str, float], directory: Path | None) -> str | None:
    """Return one line about the perplexities that are not finite, None where all are.

    Args:
        perplexities, nats: model -> its perplexity, and its mean loss per token.
        directory: a checkpoint whose largest weight is named.
    """
    over = [name for name, value in perplexities.items() if value is None or not math.isfinite(value)]
    if not over:
        return None
    losses = ", ".join(f"{nats[name]:.3g} ({name})" for name in over)
    about = "" if directory is None else f"; {largest_weight(directory)}"
    return f"perplexity inf: exp of {losses} nats per token overflows{about}"


@torch.no_grad()
def first_nonfinite(model: nn.Module, ids: Tensor) -> str:
    """Run ``ids`` [B, T] and name the first module, in order of computation, whose output is not finite.

    The innermost module that was called is named; where all outputs are finite, it is the loss.
    """
    found: list[str] = []

    def watch(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            if found:
                return
            for tensor in _tensors(output):
                bad = ~torch.isfinite(tensor)
                if bool(bad.any()):
                    value = float(tensor[bad][0])
                    found.append(f"the output of {name or type(module).__name__}, which holds {value:g}")
                    return

        return hook

    handles = [module.register_forward_hook(watch(name)) for name, module in model.named_modules()]
    training = model.training
    try:
        model.eval()(input_ids=ids, use_cache=False)
    finally:
        model.train(training)
        for handle in handles:
            handle.remove()
    return found[0] if found else "the loss itself"


def _tensors(output: Any) -> Iterator[Tensor]:
    """Yield the floating-point tensors in a module's output."""
    if torch.is_tensor(output):
        if output.is_floating_point():
            yield output
    elif isinstance(output, dict):
        for part in output.values():
            yield from _tensors(part)
    elif isinstance(output, (list, tuple)):
        for part in output:
            yield from _tensors(part)
