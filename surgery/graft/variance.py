"""Ask a model how unsure its swapped layers are of what they read."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from surgery.graft.base import Graft
from surgery.memory.modules import fetched


@contextmanager
def read_variances(model: nn.Module) -> Iterator[dict[int, Tensor]]:
    """Within it every call of the model leaves the variance of each swapped layer's reads, by layer, [B, T, H, V].

        with read_variances(model) as variances:
            model(input_ids)
        variances[5]

    The model is any that holds grafts, of the project's own classes or a hybrid's; each call replaces what the last one
    left. The outputs are those without it. A layer runs its rule once more for its variance, through the chunked form,
    with gradients where they are on. What a variance is says each rule's ``read_variance``.
    """
    found: dict[int, Tensor] = {}

    def watch(layer: int) -> Callable[..., None]:
        def hook(memory: nn.Module, args: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
            with fetched(memory):
                found[layer] = memory.read_variance(*args)

        return hook

    grafts = [module for module in model.modules() if isinstance(module, Graft) and module.memory.rule != "host"]
    handles = [graft.memory.register_forward_hook(watch(graft.layer_idx)) for graft in grafts]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()
