"""What a recipe will do to a base, tensor by tensor, before it is done.

    plan = make_plan(load_recipe("demo-bayesian"))
    plan.layers, plan.added, plan.bytes_written
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from surgery.checkpoint.fitting import RUNTIME_BYTES, model_bytes, streamed_bytes
from surgery.checkpoint.reading import DTYPE_NAMES, Checkpoint, TensorEntry
from surgery.checkpoint.writing import companions
from surgery.layers import Measure, resolve_layers
from surgery.opening import open_base, swappable, swapped_before
from surgery.recipe import Recipe

if TYPE_CHECKING:
    import torch

    from surgery.hosts import HostAdapter
    from surgery.memory import MemoryRule


@dataclass(frozen=True)
class Added:
    """A tensor that the graft adds to one layer."""

    name: str
    layer: int
    shape: tuple[int, ...]
    dtype: str  # safetensors' name
    nbytes: int


@dataclass(frozen=True)
class Plan:
    """A recipe bound to its base.

    Attributes:
        layers: the layers that are swapped, ascending.
        horizons: metric -> layer -> N_t, where layers were chosen by it.
        options: the memory rule's options, all of them.
        exact: the swapped model computes the base's function.
        reason: why it does not, where it does not.
        kept: the host's tensors in the swapped mixers, as they are.
    """

    recipe: Recipe
    base: Checkpoint
    adapter: HostAdapter
    layers: tuple[int, ...]
    horizons: dict[str, dict[int, float]] | None
    options: dict[str, Any]
    dose: float
    exact: bool
    reason: str | None
    kept: tuple[TensorEntry, ...]
    added: tuple[Added, ...]

    @property
    def added_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.added)

    @property
    def bytes_written(self) -> int:
        """Weights, companion files and a little for configuration, index and card."""
        files = sum((self.base.directory / path).stat().st_size for path in companions(self.base.directory))
        headers = 200 * (len(self.base.tensors) + len(self.added)) + 20_000
        return self.base.weight_bytes + self.added_bytes + files + headers

    def peak_memory(self, drift: str, streamed: bool = False) -> int:
        """An estimate, in bytes, within a third of what was measured: at 5M and 136M parameters, streamed at 2.7B.

        Models run one at a time in float32: whole, each beside its file's pages, or ``streamed`` block by block, as
        the layerwise drift always is.
        """
        writing = 2 * self.added_bytes
        if self.horizons is not None:
            window = 2048
        elif drift != "skip":
            window, streamed = 512, streamed or drift == "layerwise"
        else:
            return RUNTIME_BYTES + writing
        if streamed:
            return RUNTIME_BYTES + max(writing, streamed_bytes(self.base, window, 4))
        model = model_bytes(self.base, window, 4) + self.base.weight_bytes + self.added_bytes
        return RUNTIME_BYTES + max(writing, model)

    def surgery(self) -> dict[str, Any]:
        """What config.json says under ``surgery``: this operation, and those that the base has behind it."""
        from surgery.hosts import commit
        from surgery.models.configuration import Swap

        before = self.base.config.get("surgery") or {}
        rules = dict(swapped_before(self.base, self.adapter))
        rules |= dict.fromkeys(self.layers, (self.recipe.memory.rule, self.options))
        about = {"base": before.get("base", self.recipe.model)}
        found = before.get("revision") if before else commit(self.base.directory)
        return Swap(rules).written(**about, **({"revision": found} if found else {}))

    def create_memory(self, layer: int) -> MemoryRule:
        """The new memory of one layer, at the recipe's start, drawn from the recipe's seed."""
        from surgery.memory import draw_memory

        geometry = self.adapter.geometry(self.base.config, layer)
        memory = draw_memory(
            self.recipe.memory.rule, geometry, self.options, self.recipe.memory.start, self.recipe.seed, layer
        )
        return memory.to(mixer_dtype(self.base, self.adapter.tensor_prefix(self.base.config, layer)))

    def added_tensors(self) -> dict[str, torch.Tensor]:
        """Disk name -> tensor, for every swapped layer."""
        return {
            f"{self.adapter.tensor_prefix(self.base.config, layer)}memory.{name}": tensor
            for layer in self.layers
            for name, tensor in self.create_memory(layer).state_dict().items()
        }

    def as_dict(self) -> dict[str, Any]:
        return {
            "recipe": self.recipe.name,
            "overrides": list(self.recipe.overrides),
            "base": self.recipe.model,
            "host": self.adapter.name,
            "rule": self.recipe.memory.rule,
            "options": self.options,
            "layers": list(self.layers),
            "horizons": self.horizons,
            "dose": self.dose,
            "exact": self.exact,
            "reason": self.reason,
            "kept": [_tensor(entry) for entry in self.kept],
            "added": [_tensor(tensor) for tensor in self.added],
            "bytes_written": self.bytes_written,
        }


def _tensor(tensor: Added | TensorEntry) -> dict[str, Any]:
    return {"name": tensor.name, "shape": list(tensor.shape), "dtype": tensor.dtype, "bytes": tensor.nbytes}


def make_plan(
    recipe: Recipe,
    *,
    measure: Measure | None = None,
    offline: bool | None = None,
    opened: tuple[Checkpoint, HostAdapter] | None = None,
) -> Plan:
    """Bind a recipe to its base and check everything that can fail before work starts.

    Args:
        measure: measures N_t where the recipe chooses layers by it; None for :func:`surgery.layers.inspection_measure`.
        offline: never ask a hub.
        opened: what :func:`surgery.opening.open_base` gave, where that was done before.

    Raises:
        UsageError: the model is not there or not supported, its files are incomplete, the layers are not what the
            recipe says, the tokenizer does not fit.
    """
    checkpoint, adapter = opened or open_base(recipe, offline=offline)
    layers, horizons = resolve_layers(recipe, swappable(checkpoint, adapter), checkpoint, measure)
    return bind(recipe, checkpoint, adapter, layers, horizons)


def bind(
    recipe: Recipe,
    checkpoint: Checkpoint,
    adapter: HostAdapter,
    layers: tuple[int, ...],
    horizons: dict[str, dict[int, float]] | None = None,
) -> Plan:
    """The plan for layers that are known.

    Raises:
        UsageError: an option does not fit the host's shapes.
    """
    options, added, exact_limit = plan_memory(recipe, checkpoint, adapter, layers)
    dose = 1.0 if recipe.memory.start == "paper" else 0.0
    prefixes = tuple(adapter.tensor_prefix(checkpoint.config, layer) for layer in layers)
    kept = tuple(entry for entry in checkpoint.tensors.values() if entry.name.startswith(prefixes))
    reason = why_inexact(recipe.memory.rule, adapter.name, dose, exact_limit)
    return Plan(
        recipe, checkpoint, adapter, layers, horizons, options, dose, reason is None, reason, kept, added
    )


def plan_memory(
    recipe: Recipe, checkpoint: Checkpoint, adapter: HostAdapter, layers: Sequence[int]
) -> tuple[dict[str, Any], tuple[Added, ...], bool]:
    """Return the memory rule's options, all of them, the tensors it adds, and whether its dose 0 is the host's rule.

    Raises:
        UsageError: an option does not fit the host's shapes.
    """
    import torch

    from surgery.memory import RULES, create

    options = dict(recipe.memory.options)
    if recipe.memory.start == "paper":
        options = {**getattr(RULES[recipe.memory.rule], "paper_defaults", {}), **options}
    added = []
    exact_limit = True
    written: dict[str, Any] = {}
    for layer in layers:
        prefix = adapter.tensor_prefix(checkpoint.config, layer)
        geometry = adapter.geometry(checkpoint.config, layer)
        rank = options.get("rank") or 1
        if rank > geometry.hidden_size:
            problem = f"a rank of {rank} is above the model's width of {geometry.hidden_size}"
            raise recipe.error(("memory", "rank"), problem, f"use {geometry.hidden_size} or less")
        with recipe.at(("memory",)), torch.device("meta"):
            memory = create(recipe.memory.rule, geometry, **options)
        memory = memory.to(mixer_dtype(checkpoint, prefix))
        exact_limit &= memory.exact_limit
        written = memory.options
        for name, tensor in memory.state_dict().items():
            dtype = DTYPE_NAMES[str(tensor.dtype).removeprefix("torch.")]
            nbytes = tensor.numel() * tensor.element_size()
            added.append(Added(f"{prefix}memory.{name}", layer, tuple(tensor.shape), dtype, nbytes))
    return written, tuple(added), exact_limit


def why_inexact(rule: str, host: str, dose: float, exact_limit: bool) -> str | None:
    """Why a swap does not compute the base's function, None if it does."""
    if rule == "host":
        return None
    reasons = []
    if not exact_limit:
        reasons.append(
            f"{rule} has no error correction, which {host} relies on: even at dose 0 its memory only adds what is "
            "written, so the swap is approximate"
        )
    if dose > 0:
        reasons.append(f"the recipe starts at dose {dose:g} (start: paper): the full {rule} rule, not the host's")
    return "; ".join(reasons) or None


def mixer_dtype(checkpoint: Checkpoint, prefix: str) -> torch.dtype:
    """The dtype of most of a mixer's bytes, which its new projections take too."""
    import torch

    sizes: Counter[str] = Counter()
    for entry in checkpoint.tensors.values():
        if entry.name.startswith(prefix):
            sizes[entry.dtype] += entry.nbytes
    known = {name: getattr(torch, dtype) for dtype, name in DTYPE_NAMES.items()}
    return known[sizes.most_common(1)[0][0]] if sizes else torch.float32
