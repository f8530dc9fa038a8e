"""What is exported: a run's latest model, or a swapped checkpoint directory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from surgery.checkpoint.checksums import require_whole
from surgery.checkpoint.reading import Checkpoint, check_tensors, explained
from surgery.checkpoint.values import check_values
from surgery.errors import UsageError
from surgery.evaluation.loading import Located, locate
from surgery.operation import RECIPE_FILE

if TYPE_CHECKING:
    from surgery.checkpoint.manifest import RunManifest
    from surgery.hosts import HostAdapter
    from surgery.recipe import Recipe

RUN_RECIPE = "recipe.yaml"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Source:
    """A swapped checkpoint and what is known of how it came about.

    Attributes:
        located: its name, checkpoint directory and run.
        swap: ``config.surgery``.
        doses: swapped layer -> dose; empty where the memory is the host's own.
        recipe: None where the checkpoint carries none.
        recipe_text: the recipe's file, verbatim.
        manifest: of the run, None for a plain checkpoint.
    """

    located: Located
    checkpoint: Checkpoint
    adapter: HostAdapter
    swap: dict[str, Any]
    doses: dict[int, float]
    recipe: Recipe | None
    recipe_text: str | None
    manifest: RunManifest | None

    @property
    def dtype(self) -> str:
        """The dtype that a plain load of the checkpoint gives."""
        named = self.checkpoint.config.get("dtype") or self.checkpoint.config.get("torch_dtype")
        if named in DTYPES:
            return named
        names = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
        largest = max(self.checkpoint.tensors.values(), key=lambda entry: entry.nbytes)
        return names.get(largest.dtype, "float32")

    @property
    def base(self) -> str:
        """The base that was swapped, as its recipe named it."""
        return self.swap.get("base") or "its base"

    @property
    def unfinished(self) -> list[str]:
        """Names of the run's phases that have not been finished."""
        phases = self.manifest.phases if self.manifest else []
        return [phase.name for phase in phases if phase.status != "finished"]


def open_source(name: str) -> Source:
    """Find and check what ``name`` stands for.

    Raises:
        UsageError: no run and no checkpoint, nothing swapped in it, tensors that do not fit its configuration,
            or weights that are not finite.
    """
    from surgery.hosts import open_model, recognise

    located = locate(name)
    require_whole(located.path)
    _, adapter = recognise(located.path)
    checkpoint = open_model(located.path)
    swap = checkpoint.config.get("surgery") or {}
    if not swap.get("layers"):
        raise UsageError(
            f"{name}: no layer of this model was swapped, so there is nothing to export\n"
            "  give a run of surgery distill, or a directory that surgery apply wrote"
        )
    with explained(located.path):
        expected = adapter.expected_tensors(checkpoint.config)
    check_tensors(checkpoint, expected, adapter.name)
    check_values(checkpoint, adapter.is_unused)
    doses = {}
    if swap["rule"] != "host":
        for layer in sorted(swap["layers"]):
            doses[layer] = float(checkpoint.read(f"{adapter.tensor_prefix(checkpoint.config, layer)}memory.dose"))
    manifest = None
    if located.run is not None:
        from surgery.checkpoint.manifest import read_manifest

        manifest = read_manifest(located.run)
    recipe, text = _recipe(located, manifest)
    return Source(located, checkpoint, adapter, swap, doses, recipe, text, manifest)


def _recipe(located: Located, manifest: RunManifest | None) -> tuple[Recipe | None, str | None]:
    from surgery.checkpoint.remote_code import recipe_says
    from surgery.recipe import load_recipe

    path = located.path / RECIPE_FILE if located.run is None else located.run / RUN_RECIPE
    if not path.is_file():
        return None, None
    recipe = load_recipe(path, manifest.overrides if manifest else ())
    recipe_says(recipe.trust_remote_code)
    return recipe, recipe.text
