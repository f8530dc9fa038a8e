"""How far a swapped model stands from its base, on text, in float32.

Both ways load one model at a time: the base is run first and only what is compared later is kept of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from surgery.errors import JobError
from surgery.evaluation.loading import load_tokenizer
from surgery.evaluation.perplexity import Reader, evaluating
from surgery.evaluation.text import Text, encode, load_text, require_context

if TYPE_CHECKING:
    from surgery.hosts import HostAdapter

CONTEXT = 512
TOKENS = 4096
ROWS = 64  # tokens whose two full distributions exist at once, in float64

Progress = Callable[[str], Any]  # called with what starts now


@dataclass(frozen=True)
class Drift:
    """The base's and the swapped model's next-token distributions on the same text.

    Attributes:
        tokens: positions compared. context: tokens a window.
        kl: mean over positions of KL(base || swapped), nats. kl_max: its largest value.
        max_logit_difference: over all positions and the vocabulary.
        perplexity, base_perplexity, perplexity_ratio: of the next token.
    """

    text: str
    tokens: int
    context: int
    kl: float
    kl_max: float
    max_logit_difference: float
    perplexity: float
    base_perplexity: float
    perplexity_ratio: float

    def as_dict(self) -> dict[str, Any]:
        return {"kind": "full", **asdict(self)}


@dataclass(frozen=True)
class LayerDrift:
    """Each swapped mixer against the base's, both fed the base's input of that layer.

    Attributes:
        relative_error: layer -> |swapped - base| / |base|, Frobenius, over the mixer's outputs.
    """

    text: str
    tokens: int
    context: int
    relative_error: dict[int, float]

    def as_dict(self) -> dict[str, Any]:
        return {"kind": "layerwise", **asdict(self)}


def windows(
    directory: Path, spec: Any, root: Path | None = None, tokens: int = TOKENS, context: int = CONTEXT
) -> tuple[str, Tensor]:
    """The text's name and its first tokens as [windows, context]; a text shorter than ``tokens`` gives fewer.

    Raises:
        UsageError: no tokenizer, no text, or a text shorter than one window.
    """
    tokenizer = load_tokenizer(directory)
    text: Text = load_text(spec, root=root, limit=16 * tokens)
    found = encode(tokenizer, text, tokens)
    require_context(found, context)
    count = len(found) // context
    return text.name, found.ids[: count * context].view(count, context)


def measure_drift(
    adapter: HostAdapter,
    base: Path,
    swapped: Path,
    text: tuple[str, Tensor],
    *,
    device: str = "cpu",
    progress: Progress | None = None,
) -> Drift:
    """Run base and swapped model on the same windows and compare their distributions.

    Args:
        text: from :func:`windows`.

    Raises:
        JobError: a model cannot be loaded, or gives logits that are not finite.
    """
    from surgery.hosts import read_config

    say = progress or (lambda _: None)
    name, ids = text
    say("running the base")
    model = adapter.load(base, dtype=torch.float32, device=device)
    before = _hidden(model, ids, device)
    del model
    say("running the swapped model")
    model = adapter.load(swapped, dtype=torch.float32, device=device)
    scale = adapter.logit_scale(read_config(swapped))
    after = _hidden(model, ids, device)
    targets = ids[:, 1:].flatten()
    before, after = before[:, :-1].flatten(0, 1), after[:, :-1].flatten(0, 1)
    kl, losses, base_losses, largest = [], [], [], 0.0
    say("comparing")
    with evaluating(model):
        for start in range(0, targets.numel(), ROWS):
            rows = slice(start, start + ROWS)
            old, new = (_logits(model, part[rows].to(device), scale) for part in (before, after))
            largest = max(largest, float((old - new).abs().max()))
            old, new = old.log_softmax(-1), new.log_softmax(-1)
            kl.append((old.exp() * (old - new)).sum(-1).cpu())
            target = targets[rows, None].to(device)
            base_losses.append(-old.gather(-1, target).cpu())
            losses.append(-new.gather(-1, target).cpu())
    kl = torch.cat(kl)
    loss, base_loss = (float(torch.cat(parts).mean()) for parts in (losses, base_losses))
    if not math.isfinite(largest) or not math.isfinite(float(kl.sum())):
        raise JobError(f"{swapped.name}: logits that are not finite\n  the base's weights may be damaged")
    return Drift(
        text=name,
        tokens=targets.numel(),
        context=ids.shape[1],
        kl=float(kl.mean()),
        kl_max=float(kl.max()),
        max_logit_difference=largest,
        perplexity=math.exp(loss),
        base_perplexity=math.exp(base_loss),
        perplexity_ratio=math.exp(loss - base_loss),
    )


def measure_layers(
    adapter: HostAdapter,
    base: Path,
    swapped: Path,
    layers: tuple[int, ...],
    text: tuple[str, Tensor],
    *,
    device: str = "cpu",
    progress: Progress | None = None,
) -> LayerDrift:
    """Run the base once, then each swapped mixer on what the base's mixer of its layer read.

    Raises:
        JobError: a model cannot be loaded, or gives outputs that are not finite.
    """
    say = progress or (lambda _: None)
    name, ids = text
    say("running the base")
    model = adapter.load(base, dtype=torch.float32, device=device)
    taken = _watch(adapter.mixers(model), layers, model, ids, device)
    del model
    say("running the swapped mixers")
    model = adapter.load(swapped, dtype=torch.float32, device=device)
    mixers = adapter.mixers(model)
    errors = {}
    with evaluating(model):
        for layer in layers:
            wrong = right = 0.0
            for read, given in taken[layer]:
                answer = mixers[layer](read.to(device)).cpu().double()
                wrong += float((answer - given.double()).square().sum())
                right += float(given.double().square().sum())
            errors[layer] = math.sqrt(wrong / right) if right else math.sqrt(wrong)
            if not math.isfinite(errors[layer]):
                raise JobError(f"layer {layer}: outputs that are not finite\n  the base's weights may be damaged")
    return LayerDrift(text=name, tokens=ids.numel(), context=ids.shape[1], relative_error=errors)


def _hidden(model: nn.Module, ids: Tensor, device: str) -> Tensor:
    """[windows, context, D] float32 on the CPU: the head's input (or the logits, where a model has no plain head)."""
    reader = Reader(model)
    with evaluating(model):
        return torch.cat([reader.read(row[None].to(device), carry=False).float().cpu() for row in ids])


def _logits(model: nn.Module, hidden: Tensor, scale: float) -> Tensor:
    head = Reader(model).head
    return (hidden if head is None else head(hidden) * scale).double()


def _watch(
    mixers: dict[int, nn.Module], layers: tuple[int, ...], model: nn.Module, ids: Tensor, device: str
) -> dict[int, list[tuple[Tensor, Tensor]]]:
    """layer -> its mixer's (input, output), window by window, on the CPU."""
    taken: dict[int, list[tuple[Tensor, Tensor]]] = {layer: [] for layer in layers}

    def hook(layer: int) -> Callable[..., None]:
        def keep(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            read = args[0] if args else kwargs["hidden_states"]
            given = output[0] if isinstance(output, tuple) else output
            taken[layer].append((read.float().cpu(), given.float().cpu()))

        return keep

    handles = [mixers[layer].register_forward_hook(hook(layer), with_kwargs=True) for layer in layers]
    try:
        _hidden(model, ids, device)
    finally:
        for handle in handles:
            handle.remove()
    return taken
