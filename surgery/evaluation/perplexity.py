"""Negative log-likelihood of a text: the state carried on through it, or in separate windows.

    losses = stream_losses(model, encode(tokenizer, load_text("bundled")))
    losses.perplexity, losses.bits_per_byte

A stream is read in segments; each continues from the recurrent state that the one before it left, so every token is
predicted from all that precedes it. The first token of a stream or window has nothing before it and is not scored, nor
are its bytes counted. Logits exist for a few hundred tokens at a time.
"""

from __future__ import annotations

import inspect
import itertools
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from surgery.data.tokens import Tokens, encode, require_context
from surgery.errors import JobError, UsageError
from surgery.evaluation.finite import first_nonfinite
from surgery.evaluation.intervals import Interval, consecutive_blocks, mean_interval
from surgery.memory.modules import device_of, in_dtype_of

HEAD_TOKENS = 512  # tokens whose logits exist at once
_CACHE_NAMES = ("cache", "past_key_values", "cache_params")
# settings under which logits are more than the head's product with the hidden state
_LOGIT_SETTINGS = ("logits_scaling", "lm_head_multiplier", "final_logit_softcapping", "logit_scale")

Progress = Callable[[int], Any]  # called with the number of tokens just read


@dataclass(frozen=True)
class Losses:
    """What a model made of a text, token by token.

    Attributes:
        nll: [N] float32, nats, of each scored token.
        position: [N] int64, tokens before it in its stream or window (1 or more).
        window: [N] int64, the window it stands in; all 0 in a stream.
        num_bytes: bytes of text that the scored tokens cover.
    """

    nll: Tensor
    position: Tensor
    window: Tensor
    num_bytes: int

    @property
    def mean(self) -> float:
        """Nats a token."""
        return self.nll.double().mean().item()

    @property
    def perplexity(self) -> float:
        return perplexity(self.mean)

    @property
    def bits_per_byte(self) -> float:
        return self.nll.double().sum().item() / (math.log(2) * self.num_bytes)

    def groups(self) -> Tensor:
        """[N] groups inside which losses depend on each other: windows, or blocks of consecutive tokens of a stream."""
        if self.window.numel() and int(self.window[-1]) > 0:
            return self.window
        return consecutive_blocks(self.nll.numel())

    def as_dict(self) -> dict[str, Any]:
        return {
            "nll": self.mean,
            "perplexity": self.perplexity,
            "bits_per_byte": self.bits_per_byte,
            "tokens": self.nll.numel(),
            "bytes": self.num_bytes,
        }


def perplexity(nats: float) -> float:
    """Return exp of a mean loss; infinity where that is more than a float holds."""
    try:
        return math.exp(nats)
    except OverflowError:
        return math.inf


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode without gradients; the mode before is restored."""
    training = model.training
    model.eval()
    try:
        with torch.no_grad():  # not inference mode: what a kernel keeps from here may meet autograd in training later
            yield
    finally:
        model.train(training)


def stream_losses(
    model: nn.Module,
    tokens: Tokens,
    *,
    segment: int = 2048,
    progress: Progress | None = None,
    name: str | None = None,
) -> Losses:
    """Losses of a text read once from its beginning, the state carried on from segment to segment.

    Args:
        model: a causal language model of transformers whose cache continues over several tokens.
        tokens: the text; at least two tokens.
        segment: tokens a call. The result does not depend on it, memory does.
        name: of the model in errors; None for the directory that it was loaded from.

    Raises:
        UsageError: the text is too short, or the model takes no cache.
        JobError: a loss that is not finite.
    """
    require_context(tokens, 2)
    device = device_of(model)
    reader = Reader(model)
    if reader.cache_name is None:
        raise UsageError(f"{type(model).__name__} takes no cache, so no state can be carried on; measure in windows")
    if reader.head is None:
        segment = min(segment, HEAD_TOKENS)
    parts: list[Tensor] = []
    with evaluating(model):
        for start in range(0, len(tokens) - 1, segment):
            ids = tokens.ids[start : start + segment + 1].to(device)
            outputs = reader.read(ids[None, : min(segment, ids.numel())], carry=True)
            targets = ids[1:]
            parts.append(reader.losses(outputs[0, : targets.numel()], targets).cpu())
            if progress is not None:
                progress(targets.numel())
    nll = torch.cat(parts)
    _check_finite(nll, model, lambda bad: tokens.ids[bad // segment * segment :][None, :segment], name)
    position = torch.arange(1, len(tokens))
    return Losses(nll, position, torch.zeros_like(position), tokens.num_bytes(1))


def window_losses(
    model: nn.Module,
    tokens: Tokens,
    context: int,
    *,
    batch_tokens: int = 4096,
    progress: Progress | None = None,
    name: str | None = None,
) -> Losses:
    """Losses of a text cut into windows of ``context`` tokens, each read from an empty state; a remainder is left out.

    Raises:
        UsageError: the text is shorter than one window.
        JobError: a loss that is not finite.
    """
    require_context(tokens, context)
    if context < 2:
        raise UsageError(f"a window of {context} tokens predicts nothing; use 2 or more")
    device = device_of(model)
    reader = Reader(model)
    count = len(tokens) // context
    windows = tokens.ids[: count * context].view(count, context)
    rows = max(1, (batch_tokens if reader.head is not None else HEAD_TOKENS) // context)
    parts: list[Tensor] = []
    with evaluating(model):
        for start in range(0, count, rows):
            ids = windows[start : start + rows].to(device)
            outputs = reader.read(ids, carry=False)[:, :-1]
            parts.append(reader.losses(outputs.flatten(0, 1), ids[:, 1:].flatten()).cpu())
            if progress is not None:
                progress(ids.numel())
    nll = torch.cat(parts)
    _check_finite(nll, model, lambda bad: windows[bad // (context - 1)][None], name)
    num_bytes = sum(tokens.num_bytes(start + 1, start + context) for start in range(0, count * context, context))
    position = torch.arange(1, context).repeat(count)
    window = torch.arange(count).repeat_interleave(context - 1)
    return Losses(nll, position, window, num_bytes)


def bits_per_byte(
    model: nn.Module, tokenizer: Any, text: str, *, limit: int | None = None, segment: int = 2048
) -> float:
    """Bits a byte of UTF-8 of ``text``, read with the state carried on; ``limit`` bounds the tokens."""
    return stream_losses(model, encode(tokenizer, text, limit), segment=segment).bits_per_byte


def difference(losses: Losses, baseline: Losses) -> Interval:
    """Mean of the losses minus the baseline's, paired token by token, with its confidence interval.

    Raises:
        ValueError: the two did not score the same tokens.
    """
    return mean_interval(_paired(losses, baseline), losses.groups())


def position_edges(context: int, first: int = 16) -> list[int]:
    """Edges of buckets of positions, doubling from ``first``: [1, 16, 32, ..., context]; a last bucket less than half
    as long as it should be joins the one before it."""
    edges = [1]
    edge = first
    while edge < context:
        edges.append(edge)
        edge *= 2
    if len(edges) > 1 and context - edges[-1] < edges[-1] // 2:
        edges.pop()
    return [*edges, context]


def by_position(losses: Losses, edges: list[int], baseline: Losses | None = None) -> list[dict[str, Any]]:
    """Mean loss, or mean difference to ``baseline``, in each bucket [edge, next edge) of positions, with intervals.

    A bucket without a token is left out.
    """
    values = losses.nll if baseline is None else _paired(losses, baseline)
    groups = losses.groups()
    buckets = []
    for start, stop in itertools.pairwise(edges):
        inside = (losses.position >= start) & (losses.position < stop)
        count = int(inside.sum())
        if count:
            interval = mean_interval(values[inside], groups[inside])
            buckets.append({"from": start, "to": stop, "tokens": count, **interval.as_dict()})
    return buckets


def _paired(losses: Losses, baseline: Losses) -> Tensor:
    if losses.nll.shape != baseline.nll.shape or not torch.equal(losses.position, baseline.position):
        raise ValueError("the two models did not score the same tokens; a paired difference needs one tokenizer")
    return losses.nll.double() - baseline.nll.double()


def _check_finite(nll: Tensor, model: nn.Module, inputs: Callable[[int], Tensor], name: str | None) -> None:
    """Raise a JobError that says where the numbers left the finite range, where a loss did.

    Args:
        inputs: the tokens [1, T] that the loss of a scored token comes from.
        name: of the model; None for the directory that it was loaded from.
    """
    bad = (~torch.isfinite(nll)).nonzero()
    if not bad.numel():
        return
    source = first_nonfinite(model, inputs(int(bad[0])).to(next(model.parameters()).device))
    name = name or getattr(model, "name_or_path", "") or type(model).__name__
    dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
    raise JobError(
        f"{name}: the loss is not finite from scored token {int(bad[0])} on ({bad.numel()} of {nll.numel()}); first "
        f"not finite: {source}\n  every weight is finite, but what they give leaves the range of {dtype}"
    )


class Reader:
    """A model as hidden states and a head where its logits are no more than that, as a whole otherwise."""

    def __init__(self, model: nn.Module) -> None:
        backbone = getattr(model, "base_model", model)
        get_head = getattr(model, "get_output_embeddings", None)
        head = get_head() if get_head is not None else None
        settings = [getattr(getattr(model, "config", None), name, None) for name in _LOGIT_SETTINGS]
        plain = all(setting in (None, 1, 1.0) for setting in settings)
        split = backbone is not model and head is not None and plain
        self.head = head if split else None
        self.body = backbone if split else model
        parameters = inspect.signature(self.body.forward).parameters
        self.cache_name = next((name for name in _CACHE_NAMES if name in parameters), None)
        self.cache: Any = None

    def read(self, ids: Tensor, *, carry: bool) -> Tensor:
        """[B, T] to hidden states [B, T, D], or to logits [B, T, vocabulary] where the model has no plain head."""
        if carry:
            outputs = self.body(input_ids=ids, use_cache=True, **{self.cache_name: self.cache})
            self.cache = next(
                (cache for name in _CACHE_NAMES if (cache := getattr(outputs, name, None)) is not None), None
            )
            if self.cache is None:
                raise JobError(f"{type(self.body).__name__} returned no cache, so its state cannot be carried on")
        else:
            outputs = self.body(input_ids=ids, use_cache=False)
        return outputs.logits if self.head is None else outputs.last_hidden_state

    def losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """[N, D or vocabulary] and [N] to nats [N]."""
        parts = []
        for start in range(0, targets.numel(), HEAD_TOKENS):
            part = outputs[start : start + HEAD_TOKENS]
            if self.head is not None:
                part = self.head(in_dtype_of(self.head, part))
            parts.append(F.cross_entropy(part.float(), targets[start : start + HEAD_TOKENS], reduction="none"))
        return torch.cat(parts)
