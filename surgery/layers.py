"""The layers that a recipe names, or chooses by what is measured on them."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from surgery.checkpoint.reading import Checkpoint
from surgery.errors import MOST, together
from surgery.recipe import LayerChoice, Recipe
from surgery.recipe.schema import METRICS

# model directory and recipe -> metric -> layer -> N_t in tokens
Measure = Callable[[Path, Recipe], Mapping[str, Mapping[int, float]]]


def resolve_layers(
    recipe: Recipe, available: Sequence[int], checkpoint: Checkpoint, measure: Measure | None = None
) -> tuple[tuple[int, ...], dict[str, dict[int, float]] | None]:
    """The layers that a recipe names or chooses, ascending, and what was measured to choose them.

    Raises:
        UsageError: a layer without a mixer, or more layers than there are.
    """
    choice = recipe.layers
    if not isinstance(choice, LayerChoice):
        from surgery.hosts import adapter_for

        count = adapter_for(checkpoint.config).parse(checkpoint.config).num_hidden_layers
        before, free = set((checkpoint.config.get("surgery") or {}).get("layers", ())), set(available)
        wrong = [(index, layer) for index, layer in enumerate(choice) if layer not in free]
        found = []
        for index, layer in wrong[:MOST]:
            remedy = f"layers that do: {ranges(available)}"
            if layer in before:
                problem = f"layer {layer} was swapped before"
                remedy = f"layers that were not: {ranges(available)}; surgery revert gives a layer its own memory back"
            elif layer >= count:
                problem = f"layer {layer} does not exist: the model has {count}, 0 to {count - 1}"
            else:
                problem = f"layer {layer} holds no mixer that can be swapped"
            found.append(recipe.error(("layers", index), problem, remedy))
        if found:
            raise together(found, len(wrong))
        return tuple(sorted(choice)), None
    key = next(name for name in ("top", "bottom", "random") if getattr(choice, name) is not None)
    wanted = getattr(choice, key)
    if wanted > len(available):
        problem = f"{wanted} layers are asked for, and the model has {len(available)} that can be swapped"
        raise recipe.error(("layers", key), problem, f"ask for {len(available)} or fewer ({ranges(available)})")
    if key == "random":
        return tuple(sorted(random.Random(choice.seed).sample(list(available), wanted))), None
    horizons = (measure or inspection_measure())(checkpoint.directory, recipe)
    figures = horizons[choice.by]
    ordered = sorted(available, key=lambda layer: (-figures[layer], layer))
    chosen = ordered[:wanted] if key == "top" else ordered[-wanted:]
    return tuple(sorted(chosen)), {metric: dict(by_layer) for metric, by_layer in horizons.items()}


def inspection_measure(
    device: str = "cpu",
    progress: Callable[[int, int], Any] | None = None,
    say: Callable[[str], Any] | None = None,
) -> Measure:
    """A measurement of every layer's N_t on the recipe's inspection text, block by block where the model does not fit
    into memory (``say`` is called with a line about it)."""

    def measure(directory: Path, recipe: Recipe) -> dict[str, dict[int, float]]:
        from surgery.inspection.measure import inspect_model
        from surgery.opening import base_tokenizer

        root = recipe.path.parent
        base_tokenizer(recipe, directory)
        with recipe.at(("inspection", "data") if recipe.inspection.data else ("data",)):
            found = inspect_model(
                directory,
                recipe.inspection_data,
                recipe.inspection.tokens,
                device,
                root=root,
                progress=progress,
                offload=None,
                say=say,
            )
        return {
            metric: {figure.layer: figure.figure(metric) for figure in found.figures}
            for metric in METRICS
        }

    return measure


def ranges(numbers: Sequence[int]) -> str:
    """``0-3, 5, 7-9``."""
    parts: list[str] = []
    ordered = sorted(numbers)
    start = 0
    for index in range(1, len(ordered) + 1):
        if index == len(ordered) or ordered[index] != ordered[index - 1] + 1:
            first, last = ordered[start], ordered[index - 1]
            parts.append(str(first) if first == last else f"{first}-{last}")
            start = index
    return ", ".join(parts) or "none"
