"""What a recipe will do to a base, tensor by tensor, before it is done.

    plan = make_plan(load_recipe("demo-bayesian"))
    plan.layers, plan.added, plan.bytes_written
"""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from surgery.checkpoint.fitting import RUNTIME_BYTES, model_bytes, streamed_bytes
from surgery.checkpoint.reading import Checkpoint, TensorEntry, check_tensors, open_checkpoint
from surgery.checkpoint.writing import companions
from surgery.errors import UsageError
from surgery.recipe import LayerChoice, Recipe

if TYPE_CHECKING:
    import torch

    from surgery.hosts import HostAdapter
    from surgery.memory.base import MemoryGeometry, MemoryRule

# model directory and recipe -> metric -> layer -> N_t in tokens
Measure = Callable[[Path, Recipe], Mapping[str, Mapping[int, float]]]

DTYPE_NAMES = {"float64": "F64", "float32": "F32", "bfloat16": "BF16", "float16": "F16"}


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
        options: the memory rule's options, defaults left out.
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
    recipe: Recipe, *, measure: Measure | None = None, offline: bool | None = None, base: Path | None = None
) -> Plan:
    """Bind a recipe to its base and check everything that can fail before work starts.

    Args:
        measure: measures N_t where the recipe chooses layers by it; None for :func:`inspection_measure`.
        offline: never ask a hub.
        base: the base's directory, where it is already known.

    Raises:
        UsageError: the model is not there or not supported, its files are incomplete, the layers are not what the
            recipe says, the tokenizer does not fit.
    """
    checkpoint, adapter = open_base(recipe, offline=offline, base=base)
    layers, horizons = resolve_layers(recipe, swappable(checkpoint, adapter), checkpoint, measure)
    check_mixers(recipe, checkpoint, adapter, layers)
    options, added, exact_limit = plan_memory(recipe, checkpoint, adapter, layers)
    dose = 1.0 if recipe.memory.start == "paper" else 0.0
    prefixes = tuple(adapter.tensor_prefix(checkpoint.config, layer) for layer in layers)
    kept = tuple(entry for entry in checkpoint.tensors.values() if entry.name.startswith(prefixes))
    reason = why_inexact(recipe.memory.rule, adapter.name, dose, exact_limit)
    return Plan(
        recipe, checkpoint, adapter, layers, horizons, options, dose, reason is None, reason, kept, added
    )


def draw_memory(
    rule: str, geometry: MemoryGeometry, options: Mapping[str, Any], start: str, seed: int, layer: int
) -> MemoryRule:
    """A memory in float32 whose random start depends on the seed and the layer alone."""
    import torch

    from surgery.memory import create

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed * 1_000_003 + layer)
        memory = create(rule, geometry, **options)
        memory.reset_parameters(start)
    return memory


def plan_memory(
    recipe: Recipe, checkpoint: Checkpoint, adapter: HostAdapter, layers: Sequence[int]
) -> tuple[dict[str, Any], tuple[Added, ...], bool]:
    """The memory rule's options, the tensors it adds, and whether its dose 0 is the host's rule.

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
    for layer in layers:
        prefix = adapter.tensor_prefix(checkpoint.config, layer)
        with at(recipe, ("memory",)), torch.device("meta"):
            memory = create(recipe.memory.rule, adapter.geometry(checkpoint.config, layer), **options)
        memory = memory.to(mixer_dtype(checkpoint, prefix))
        exact_limit &= memory.exact_limit
        for name, tensor in memory.state_dict().items():
            dtype = DTYPE_NAMES[str(tensor.dtype).removeprefix("torch.")]
            nbytes = tensor.numel() * tensor.element_size()
            added.append(Added(f"{prefix}memory.{name}", layer, tuple(tensor.shape), dtype, nbytes))
    return options, tuple(added), exact_limit


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


def open_base(
    recipe: Recipe, *, offline: bool | None = None, base: Path | None = None
) -> tuple[Checkpoint, HostAdapter]:
    """The recipe's base, read as far as its headers and checked against its own configuration.

    Raises:
        UsageError: naming the recipe's line and what is wrong with the base.
    """
    from surgery.hosts import adapter_for, resolve

    with at(recipe, ("model",)):
        directory = base or resolve(recipe.model, recipe.revision, offline)
        checkpoint = open_checkpoint(directory)
        adapter = adapter_for(checkpoint.config)
        check_tensors(checkpoint, adapter.expected_tensors(checkpoint.config), adapter.name)
        check_tokenizer(checkpoint)
    return checkpoint, adapter


def swapped_before(checkpoint: Checkpoint, adapter: HostAdapter) -> Mapping[int, tuple[str, dict[str, Any]]]:
    """The layers that an earlier operation swapped, each with its rule and the rule's options."""
    from surgery.models.configuration import Swap

    if not checkpoint.config.get("surgery"):
        return {}
    return Swap.of(adapter.parse(checkpoint.config)).rules


def swappable(checkpoint: Checkpoint, adapter: HostAdapter) -> list[int]:
    """The layers that hold the host's own memory."""
    before = swapped_before(checkpoint, adapter)
    return [layer for layer in adapter.mixer_layers(checkpoint.config) if layer not in before]


def check_mixers(recipe: Recipe, checkpoint: Checkpoint, adapter: HostAdapter, layers: Sequence[int]) -> None:
    """Refuse tensors inside a swapped mixer that the host's family does not know: they would be lost in silence."""
    expected = adapter.expected_tensors(checkpoint.config)
    prefixes = tuple(adapter.tensor_prefix(checkpoint.config, layer) for layer in layers)
    own = [name for name in checkpoint.tensors if name.startswith(prefixes)]
    unknown = [name for name in own if name not in expected and not adapter.is_unused(name)]
    if unknown:
        shown = ", ".join(unknown[:3]) + (f" and {len(unknown) - 3} more" if len(unknown) > 3 else "")
        with at(recipe, ("model",)):
            raise UsageError(
                f"{checkpoint.directory}: {adapter.name} has no use for {shown}\n"
                "  the checkpoint is of another architecture than its config.json says"
            )


def check_tokenizer(checkpoint: Checkpoint) -> None:
    """Refuse a tokenizer that makes ids the embeddings do not have.

    Raises:
        UsageError: with both sizes.
    """
    path = checkpoint.directory / "tokenizer.json"
    if not path.is_file():
        return
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        vocabulary = document["model"]["vocab"]
        # a unigram model lists its tokens in order, others map them to ids
        largest = max(vocabulary.values(), default=-1) if isinstance(vocabulary, dict) else len(vocabulary) - 1
        largest = max([largest, *(token["id"] for token in document.get("added_tokens") or ())])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{path}: not a tokenizer ({type(error).__name__})\n  download this file again") from None
    from surgery.hosts import adapter_for

    size = adapter_for(checkpoint.config).parse(checkpoint.config).vocab_size
    if largest >= size:
        raise UsageError(
            f"{path}: makes token {largest}, but the model's vocabulary ends at {size - 1} (vocab_size {size})\n"
            "  the tokenizer belongs to another model: use the one that this model was trained with"
        )


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
        for index, layer in enumerate(choice):
            if layer in (checkpoint.config.get("surgery") or {}).get("layers", ()):
                raise recipe.error(
                    ("layers", index),
                    f"layer {layer} was swapped before",
                    f"layers that were not: {ranges(available)}; surgery revert gives a layer its own memory back",
                )
            if layer not in available:
                problem = (
                    f"layer {layer} does not exist: the model has {count}, 0 to {count - 1}"
                    if layer >= count
                    else f"layer {layer} holds no mixer that can be swapped"
                )
                raise recipe.error(("layers", index), problem, f"layers that do: {ranges(available)}")
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

        root = recipe.path.parent
        with at(recipe, ("inspection", "data") if recipe.inspection.data else ("data",)):
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
            for metric in ("mean", "log-mean", "median")
        }

    return measure


def mixer_dtype(checkpoint: Checkpoint, prefix: str) -> torch.dtype:
    """The dtype of most of a mixer's bytes, which its new projections take too."""
    import torch

    sizes: Counter[str] = Counter()
    for entry in checkpoint.tensors.values():
        if entry.name.startswith(prefix):
            sizes[entry.dtype] += entry.nbytes
    known = {name: getattr(torch, dtype) for dtype, name in DTYPE_NAMES.items()}
    return known[sizes.most_common(1)[0][0]] if sizes else torch.float32


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


@contextmanager
def at(recipe: Recipe, path: tuple[str | int, ...]) -> Iterator[None]:
    """Put the recipe's line in front of an error about what that line names."""
    try:
        yield
    except UsageError as error:
        text = str(error)
        if text.startswith(f"{recipe.path}:") or text.startswith("--set "):
            raise
        raise UsageError(f"{recipe.where(path)}: {'.'.join(map(str, path))}: {text}") from None
