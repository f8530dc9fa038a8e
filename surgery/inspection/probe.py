"""What a swap of each layer alone would cost and offer, on a text, before anything is written.

A layer that remembers long is a candidate; how much the model leans on the old memory there, and whether the new one
helps at once, N_t does not say. So each candidate's memory is swapped in turn, in the model that is loaded, and two
figures are taken of the whole model's next-token distribution:

- the drift at dose 1, KL(base || swapped) in nats a token: how far training will have to bring the model back;
- the slope at dose 0, d loss / d dose in nats a token: negative where a little of the new rule already predicts better.

The slope is autograd's, through the dose, at a dose of 2^-32 rather than at 0: the loss has a derivative from above
there, but a rule need not have one inside (the Bayesian rule acts through the square root of its retention). Finite
differences will not do in float32. What a memory holds adds up over hundreds of tokens, so the loss bends within doses
of a thousandth, and a step small enough for that leaves nothing of the difference but rounding.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from surgery.data.tokens import Tokens, require_context
from surgery.drift import CONTEXT, TOKENS, compare
from surgery.errors import JobError, UsageError
from surgery.evaluation.perplexity import evaluating
from surgery.memory import draw_memory
from surgery.memory.modules import device_of

if TYPE_CHECKING:
    from surgery.hosts import HostAdapter
    from surgery.memory.base import MemoryRule

NEAR_ZERO = 2.0**-32  # the dose at which the slope is taken

Progress = Callable[[int, int], Any]  # layers probed, layers in all


@dataclass(frozen=True)
class LayerProbe:
    """One layer, swapped alone.

    Attributes:
        kl: KL(base || swapped) at dose 1, mean over tokens, nats.
        slope: d loss / d dose at dose 0, from above, nats a token.
    """

    layer: int
    kl: float
    slope: float


@dataclass(frozen=True)
class Probe:
    """All candidate layers, in order.

    Attributes:
        rule, options: what was put in. tokens: positions scored. context: tokens a window, each read from an empty
        state. loss: the base's, nats a token.
    """

    rule: str
    options: dict[str, Any]
    tokens: int
    context: int
    loss: float
    layers: list[LayerProbe]

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def probe_windows(tokens: Tokens) -> Tensor:
    """The text's first tokens as [windows, context], as many as a drift is measured on.

    Raises:
        UsageError: the text is shorter than one window.
    """
    require_context(tokens, CONTEXT)
    count = min(len(tokens), TOKENS) // CONTEXT
    return tokens.ids[: count * CONTEXT].view(count, CONTEXT)


def probe_layers(
    model: nn.Module,
    adapter: HostAdapter,
    config: Mapping[str, Any],
    ids: Tensor,
    rule: str,
    options: Mapping[str, Any] | None = None,
    *,
    layers: Collection[int] | None = None,
    seed: int = 0,
    progress: Progress | None = None,
) -> Probe:
    """Swap layers that hold the host's own memory, each alone and in turn, and measure.

    The hidden state that enters the layer is kept, so that only this layer and those behind it run again: once at
    dose 1, once and back near dose 0. Backward passes hold the blocks' inputs and one block's activations.

    Args:
        model: with grafts as mixers, in memory or streamed, in float32 or float64.
        config: its config.json.
        ids: [windows, T] tokens, each window read from an empty state.
        rule, options: the memory to try, at its exact start; random tensors are those that ``apply`` would draw from
            ``seed``.
        layers: among these only; None for all.

    Raises:
        UsageError: no layer is left to swap, or the rule does not fit the host.
        JobError: logits that are not finite.
    """
    device = device_of(model)
    mixers = {
        layer: mixer
        for layer, mixer in adapter.mixers(model).items()
        if mixer.memory.rule == "host" and (layers is None or layer in layers)
    }
    if not mixers:
        raise UsageError("every layer was swapped before, so there is none to probe\n  probe the untouched base")
    options = dict(options or {})
    path = _Path(adapter, model, [row[None].to(device) for row in ids])
    scale, head = adapter.logit_scale(config), adapter.head(model)
    logits = lambda hidden: head(hidden.to(device)) * scale  # noqa: E731
    targets = ids[:, 1:].flatten()
    found = []
    with evaluating(model), _frozen(model):
        base, hidden, reached = path.final(), None, 0
        base_loss = float(compare(logits, _scored(base), _scored(base), targets).base_loss.mean())
        for number, layer in enumerate(sorted(mixers)):
            if progress is not None:
                progress(number, len(mixers))
            hidden, reached = path.run(hidden, reached, layer), layer
            memory = draw_memory(rule, adapter.geometry(config, layer), options, "exact", seed, layer)
            memory.to(device=device, dtype=hidden[0].dtype).eval().requires_grad_(False)
            with swapped(mixers[layer], memory):
                slope = _slope(memory, path, hidden, layer, logits, ids)
                memory.dose.fill_(1.0)
                after = path.final(hidden, layer)
            kl = float(compare(logits, _scored(base), _scored(after), targets).kl.mean())
            if not math.isfinite(kl) or not math.isfinite(slope):
                raise JobError(f"layer {layer}: logits that are not finite once its memory is {rule}")
            found.append(LayerProbe(layer, kl, slope))
    if progress is not None:
        progress(len(mixers), len(mixers))
    return Probe(rule, options, targets.numel(), ids.shape[1], base_loss, found)


def _slope(
    memory: MemoryRule,
    path: _Path,
    hidden: Sequence[Tensor],
    layer: int,
    logits: Callable[[Tensor], Tensor],
    ids: Tensor,
) -> float:
    """d loss / d dose near dose 0."""
    memory.dose.fill_(NEAR_ZERO).requires_grad_(True)
    with torch.enable_grad():
        for number, row in enumerate(ids):
            made = logits(path.final_of(number, hidden[number], layer, replay=True)[0, :-1])
            loss = F.cross_entropy(made, row[1:].to(made.device), reduction="sum")
            (loss / ids[:, 1:].numel()).backward()
    memory.dose.requires_grad_(False)
    return float(memory.dose.grad)


def _scored(hidden: Sequence[Tensor]) -> Tensor:
    """[N, D]: every window's positions that have a next token."""
    return torch.cat([part[0, :-1] for part in hidden])


@contextmanager
def swapped(mixer: nn.Module, memory: MemoryRule) -> Iterator[None]:
    """Let a mixer run another memory meanwhile.

    It is set beside the mixer's modules and not among them, because what streams a model's weights fetches those of
    every module, and this one's are on no disk.
    """
    own = mixer.memory
    del mixer.memory
    mixer.__dict__["memory"] = memory
    try:
        yield
    finally:
        del mixer.__dict__["memory"]
        mixer.memory = own


class _Path:
    """A model's way from one block to another, over some windows, by its own forward pass.

    Masks, positions and whatever else a model makes for its blocks are thus its own; blocks outside the stretch pass on
    what they are given.
    """

    def __init__(self, adapter: HostAdapter, model: nn.Module, windows: Sequence[Tensor]) -> None:
        self.backbone, self.blocks, self.windows = adapter.backbone(model), list(adapter.blocks(model)), windows
        self.forms: dict[int, int] = {}  # block -> length of the tuple that it returns, where it returns one

    def run(self, hidden: Sequence[Tensor] | None, start: int, stop: int) -> list[Tensor]:
        """What enters block ``stop``, each [1, T, D] on the CPU, when ``hidden`` enters block ``start``.

        Args:
            hidden: None with ``start`` 0 for the windows' embeddings.
        """
        return [
            self._run(number, hidden and hidden[number], start, stop)[0].cpu() for number in range(len(self.windows))
        ]

    def final(self, hidden: Sequence[Tensor] | None = None, start: int = 0) -> list[Tensor]:
        """What the head reads, each [1, T, D] on the CPU."""
        return [self.final_of(number, hidden and hidden[number], start).cpu() for number in range(len(self.windows))]

    def final_of(self, number: int, hidden: Tensor | None, start: int, replay: bool = False) -> Tensor:
        """What the head reads of one window [1, T, D]; with ``replay``, backward passes run each block again."""
        return self._run(number, hidden, start, len(self.blocks), replay)[1]

    def _run(
        self, window: int, hidden: Tensor | None, start: int, stop: int, replay: bool = False
    ) -> tuple[Tensor, Tensor]:
        caught: list[Tensor] = []

        def passing(number: int) -> Callable[..., Any]:
            def forward(*args: Any, **kwargs: Any) -> Any:
                given = args[0] if args else kwargs["hidden_states"]
                if number >= stop:
                    caught.append(given)
                elif hidden is not None:
                    given = hidden.to(given.device)
                length = self.forms.get(number)
                return given if length is None else (given, *[None] * (length - 1))

            return forward

        def note(number: int) -> Callable[..., None]:
            def hook(module: nn.Module, args: Any, output: Any) -> None:
                if isinstance(output, tuple):
                    self.forms[number] = len(output)

            return hook

        forwards = {}
        for number, block in enumerate(self.blocks):
            if not start <= number < stop:
                forwards[block] = passing(number)
            elif replay:
                forwards[block] = partial(checkpoint, block.forward, use_reentrant=False, preserve_rng_state=False)
        hooks = [self.blocks[number].register_forward_hook(note(number)) for number in range(start, stop)]
        try:
            with _replaced(forwards):
                final = self.backbone(input_ids=self.windows[window], use_cache=False).last_hidden_state
        finally:
            for hook in hooks:
                hook.remove()
        return caught[0] if caught else final, final


@contextmanager
def _frozen(model: nn.Module) -> Iterator[None]:
    """No gradients for a model's own parameters meanwhile."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    model.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in trained:
            parameter.requires_grad_(True)


@contextmanager
def _replaced(forwards: Mapping[nn.Module, Callable[..., Any]]) -> Iterator[None]:
    """Modules with another forward pass, around what hooks of accelerate have put there."""
    before = {module: module.__dict__.get("forward") for module in forwards}
    try:
        for module, forward in forwards.items():
            module.forward = forward
        yield
    finally:
        for module, forward in before.items():
            if forward is None:
                module.__dict__.pop("forward", None)
            else:
                module.forward = forward
