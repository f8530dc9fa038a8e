"""How far a swapped model stands from its base, on text, in float32.

The whole output is compared with one model in memory at a time: the base is run first and only what its head reads is
kept of it. Single mixers are compared with no model in memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from surgery.checkpoint.values import largest_weight
from surgery.data.texts import Text, load_text
from surgery.data.tokens import encode, require_context
from surgery.errors import JobError
from surgery.evaluation.finite import first_nonfinite
from surgery.evaluation.loading import load_tokenizer
from surgery.evaluation.perplexity import Reader, evaluating, perplexity

if TYPE_CHECKING:
    from surgery.hosts import HostAdapter

CONTEXT = 512
TOKENS = 4096
HEAD_ROWS = 512  # tokens whose logits exist at once, in the model's dtype
ROWS = 64  # tokens whose two full distributions exist at once, in float64

Progress = Callable[[str], Any]  # called with what starts now


@dataclass(frozen=True)
class Drift:
    """The base's and the swapped model's next-token distributions on the same text.

    Attributes:
        tokens: positions compared. context: tokens a window.
        kl: mean over positions of KL(base || swapped), nats. kl_max: its largest value.
        max_logit_difference: over all positions and the vocabulary.
        loss, base_loss: of the next token, nats. perplexity, base_perplexity, perplexity_ratio: exp of them and of
            their difference; infinity where that is more than a float holds.
    """

    text: str
    tokens: int
    context: int
    kl: float
    kl_max: float
    max_logit_difference: float
    loss: float
    base_loss: float
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
    return text_windows(load_tokenizer(directory), spec, root, tokens, context)


def text_windows(
    tokenizer: Any, spec: Any, root: Path | None = None, tokens: int = TOKENS, context: int = CONTEXT
) -> tuple[str, Tensor]:
    """As :func:`windows`, with a tokenizer that is loaded."""
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
    streamed: bool = False,
    progress: Progress | None = None,
) -> Drift:
    """Run base and swapped model on the same windows and compare their distributions.

    Args:
        text: from :func:`windows`.
        streamed: read each block from the disk when it runs, where the models do not fit into memory.

    Raises:
        JobError: a model cannot be loaded, or gives logits that are not finite.
    """
    from surgery.hosts import read_config
    from surgery.hosts.streaming import load_streamed

    say = progress or (lambda _: None)
    load = partial(load_streamed, adapter) if streamed else adapter.load
    name, ids = text
    say("running the base")
    model = load(base, dtype=torch.float32, device=device)
    before = _hidden(model, ids, device)
    del model
    say("running the swapped model")
    model = load(swapped, dtype=torch.float32, device=device)
    after = _hidden(model, ids, device)
    say("comparing")
    with evaluating(model):
        logits = head_of(model, adapter.logit_scale(read_config(swapped)), device)
        found = compare(logits, before[:, :-1].flatten(0, 1), after[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    for place, hidden in ((base, before), (swapped, after)):
        _check_finite(adapter, load, base, place, hidden, ids, device)
    if not math.isfinite(found.largest) or not math.isfinite(float(found.kl.sum())):
        raise JobError(f"{base}: its logits are not finite, before the swap or after it; {largest_weight(base)}")
    loss, base_loss = float(found.loss.mean()), float(found.base_loss.mean())
    return Drift(
        text=name,
        tokens=found.kl.numel(),
        context=ids.shape[1],
        kl=float(found.kl.mean()),
        kl_max=float(found.kl.max()),
        max_logit_difference=found.largest,
        loss=loss,
        base_loss=base_loss,
        perplexity=perplexity(loss),
        base_perplexity=perplexity(base_loss),
        perplexity_ratio=perplexity(loss - base_loss),
    )


class Comparison(NamedTuple):
    """Token by token, float64: KL(base || other) [N], next-token losses [N] of other and base, all in nats; and the
    largest difference of logits."""

    kl: Tensor
    loss: Tensor
    base_loss: Tensor
    largest: float


def compare(logits: Callable[[Tensor], Tensor], before: Tensor, after: Tensor, targets: Tensor) -> Comparison:
    """Two models that share a head, by what their heads read.

    Args:
        logits: the head, from [n, D] on any device to [n, vocabulary]; see :func:`head_of`.
        before, after: [N, D], the base's and the other's. targets: [N], the tokens that follow.
    """
    kl, losses, base_losses, largest = [], [], [], 0.0
    for start in range(0, targets.numel(), HEAD_ROWS):
        part = slice(start, start + HEAD_ROWS)
        pair = logits(before[part]), logits(after[part])
        for row in range(0, len(pair[0]), ROWS):
            old, new = (side[row : row + ROWS].double() for side in pair)
            largest = max(largest, float((old - new).abs().max()))
            old, new = old.log_softmax(-1), new.log_softmax(-1)
            kl.append((old.exp() * (old - new)).sum(-1).cpu())
            target = targets[part][row : row + ROWS, None].to(old.device)
            base_losses.append(-old.gather(-1, target)[:, 0].cpu())
            losses.append(-new.gather(-1, target)[:, 0].cpu())
    return Comparison(torch.cat(kl), torch.cat(losses), torch.cat(base_losses), largest)


def head_of(model: nn.Module, scale: float, device: str | torch.device) -> Callable[[Tensor], Tensor]:
    """What makes logits of a model's last hidden states; they are its logits already where it has no plain head."""
    head = Reader(model).head
    return lambda hidden: hidden.to(device) if head is None else head(hidden.to(device)) * scale


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
    """Run the base block by block, and each swapped mixer on what the base's mixer of its layer reads.

    Both models stay on the disk but for the block that runs and its swapped mixer, and nothing is kept but sums.

    Raises:
        JobError: a model cannot be loaded, or gives outputs that are not finite.
    """
    from surgery.hosts.streaming import load_streamed

    say = progress or (lambda _: None)
    name, ids = text
    model = load_streamed(adapter, base, dtype=torch.float32, device=device)
    other = load_streamed(adapter, swapped, dtype=torch.float32, device=device, unit="mixer")
    mixers, others = adapter.mixers(model), adapter.mixers(other)
    wrong, right = dict.fromkeys(layers, 0.0), dict.fromkeys(layers, 0.0)

    def hook(layer: int) -> Callable[..., None]:
        def run(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            read = args[0] if args else kwargs["hidden_states"]
            given = (output[0] if isinstance(output, tuple) else output).double()
            answer = others[layer](read)
            answer = (answer[0] if isinstance(answer, tuple) else answer).double()
            wrong[layer] += float((answer - given).square().sum())
            right[layer] += float(given.square().sum())

        return run

    for layer in layers:
        mixers[layer].register_forward_hook(hook(layer), with_kwargs=True)
    reader = Reader(model)
    with evaluating(model), evaluating(other):
        for number, row in enumerate(ids, 1):
            say(f"running the base and the swapped mixers, window {number} of {len(ids)}")
            reader.read(row[None].to(device), carry=False)
    errors = {layer: math.sqrt(wrong[layer] / (right[layer] or 1.0)) for layer in layers}
    for layer, error in errors.items():
        if not math.isfinite(error):
            raise JobError(f"{base}: layer {layer}: the mixer's outputs are not finite; {largest_weight(base)}")
    return LayerDrift(text=name, tokens=ids.numel(), context=ids.shape[1], relative_error=errors)


def _check_finite(
    adapter: HostAdapter,
    load: Callable[..., nn.Module],
    base: Path,
    place: Path,
    hidden: Tensor,
    ids: Tensor,
    device: str,
) -> None:
    """Raise where the head's input is not finite, naming the base and the module.

    Raises:
        JobError: of the base itself, or of the base once its memories are swapped.
    """
    bad = (~torch.isfinite(hidden)).flatten(1).any(1).nonzero()
    if not bad.numel():
        return
    source = first_nonfinite(load(place, dtype=torch.float32, device=device), ids[int(bad[0])][None].to(device))
    when = "" if place == base else " once its memories are swapped"
    raise JobError(
        f"{base}: outputs that are not finite{when}; first not finite: {source}\n  {largest_weight(base)}"
    )


def _hidden(model: nn.Module, ids: Tensor, device: str) -> Tensor:
    """[windows, context, D] float32 on the CPU: the head's input (or the logits, where a model has no plain head)."""
    reader = Reader(model)
    with evaluating(model):
        return torch.cat([reader.read(row[None].to(device), carry=False).float().cpu() for row in ids])
