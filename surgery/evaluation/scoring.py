"""Read prompts once, then score candidates or write answers from the state that they leave.

    for batch in batches([len(prompt) for prompt in prompts], model):
        state = State.of(model, [prompts[index] for index in batch])
        scores = candidate_scores(state, [values[index] for index in batch])
        answers = greedy(state, steps)

A batch holds prompts of one length, or, where the model's mixers are grafts, prompts padded on the left. Candidates are
read from a copy of the state, all of a prompt's in one forward pass; the state itself stays as it is until
:func:`greedy` writes on from it.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from surgery.errors import JobError
from surgery.evaluation.finite import first_nonfinite
from surgery.evaluation.perplexity import HEAD_TOKENS, Reader
from surgery.memory.modules import device_of, in_dtype_of

BATCH_TOKENS = 2**15  # tokens of one forward pass
BATCH_BYTES = 2**28  # logits of one forward pass stay under this
STATE_BYTES = 2**31  # copies of a state that exist at once
PADDING = 1.25  # the longest prompt of a padded batch over its shortest
_CACHES = ("cache", "past_key_values", "cache_params")  # transformers has renamed it over time


def takes_padding(model: nn.Module) -> bool:
    """Whether a prompt padded on the left leaves the state that it leaves alone: true of grafts and what holds them."""
    from surgery.graft import Graft

    return any(isinstance(module, Graft) for module in model.modules())


def batches(lengths: Sequence[int], model: nn.Module, *, padded: bool | None = None) -> Iterator[list[int]]:
    """Yield the indices of prompts that are read together, the shortest first.

    Args:
        lengths: tokens of each prompt.
        padded: prompts of different lengths may share a batch; None: as :func:`takes_padding` says.
    """
    padded = takes_padding(model) if padded is None else padded
    whole_logits = "logits_to_keep" not in inspect.signature(model.forward).parameters
    token_bytes = 4 * model.config.vocab_size
    batch: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda index: lengths[index]):
        longest = lengths[index]
        rows = BATCH_TOKENS // longest
        if whole_logits:
            rows = min(rows, BATCH_BYTES // (token_bytes * longest))
        far = longest > lengths[batch[0]] * (PADDING if padded else 1) if batch else False
        if batch and (far or len(batch) >= rows):
            yield batch
            batch = []
        batch.append(index)
    if batch:
        yield batch


@dataclass
class State:
    """What a model has read of a batch of prompts.

    Attributes:
        logits: [B, vocabulary] float32, of the token that follows each prompt.
        mask: [B, S] int64, 0 on padding, of all that was read; None without padding.
    """

    model: nn.Module
    logits: Tensor
    cache: Any
    mask: Tensor | None

    @classmethod
    def of(cls, model: nn.Module, prompts: Sequence[Sequence[int]], device: Any = None) -> State:
        """Read prompts [B][T] from empty states."""
        device = device or device_of(model)
        longest = max(map(len, prompts))
        ids = torch.tensor([[0] * (longest - len(prompt)) + list(prompt) for prompt in prompts], device=device)
        mask = None
        if any(len(prompt) < longest for prompt in prompts):
            mask = torch.tensor(
                [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts], device=device
            )
        keep = {"logits_to_keep": 1} if "logits_to_keep" in inspect.signature(model.forward).parameters else {}
        output = model(ids, use_cache=True, **keep, **({} if mask is None else {"attention_mask": mask}))
        return cls(model, output.logits[:, -1].float(), _cache_of(model, output), mask)

    @cached_property
    def _cache_name(self) -> str:
        """The argument that takes a cache."""
        accepted = inspect.signature(self.model.forward).parameters
        return next(name for name in _CACHES if name in accepted)

    def selected(self, rows: Tensor) -> State:
        """Return a copy that holds ``rows`` [N] of the batch, in which one may stand several times."""
        cache = copy.copy(self.cache)
        cache.layers = [_shallow(layer) for layer in self.cache.layers]
        cache.reorder_cache(rows)
        return State(self.model, self.logits[rows], cache, None if self.mask is None else self.mask[rows])

    def row_bytes(self) -> int:
        """Bytes of the state that one prompt leaves."""
        held = [tensor for layer in self.cache.layers for tensor in _tensors(vars(layer))]
        return sum(tensor.numel() * tensor.element_size() for tensor in held) // self.logits.shape[0]

    def read(self, ids: Tensor) -> Tensor:
        """Read on ``ids`` [B, T] and return the logits [B, T, vocabulary] float32 after each."""
        if self.mask is not None:
            self.mask = torch.cat([self.mask, torch.ones_like(ids)], dim=1)
        masked = {} if self.mask is None else {"attention_mask": self.mask}
        output = self.model(ids, use_cache=True, **{self._cache_name: self.cache}, **masked)
        self.cache = _cache_of(self.model, output)
        logits = output.logits.float()
        self.logits = logits[:, -1]
        return logits


def candidate_scores(state: State, candidates: Sequence[Sequence[Sequence[int]]]) -> list[Tensor]:
    """Log-probabilities in nats, one tensor [candidates of the row] for each row, of candidates [B][C][tokens] that
    follow the prompts. The state is left as it is.

    Every candidate's first token is scored by the prompt's own logits; the others are read in one forward pass, each
    candidate from a copy of its prompt's state. Shorter candidates are padded behind, where nothing is read any more.
    """
    device = state.logits.device
    rows = [row for row, values in enumerate(candidates) for _ in values]
    flat = [list(value) for values in candidates for value in values]
    first = torch.tensor([value[0] for value in flat], device=device)
    at = torch.tensor(rows, device=device)
    total = state.logits.log_softmax(-1)[at, first]
    steps = max(map(len, flat)) - 1
    if steps:
        logits_bytes = 4 * steps * state.logits.shape[1]
        part = max(1, min(BATCH_BYTES // logits_bytes, STATE_BYTES // max(1, state.row_bytes())))
        for start in range(0, len(flat), part):
            values = flat[start : start + part]
            ids = torch.tensor([value + [0] * (steps + 1 - len(value)) for value in values], device=device)
            scored = torch.tensor(
                [[index < len(value) - 1 for index in range(steps)] for value in values], device=device
            )
            logs = state.selected(at[start : start + part]).read(ids[:, :-1]).log_softmax(-1)
            following = logs.gather(2, ids[:, 1:, None]).squeeze(2)
            total[start : start + part] += torch.where(scored, following, 0.0).sum(1)
    return list(total.split([len(values) for values in candidates]))


def greedy(state: State, steps: int) -> Tensor:
    """Write ``steps`` tokens [B, steps] after the prompts, the most probable each time. The state moves on."""
    written = [state.logits.argmax(-1)]
    while len(written) < steps:
        state.read(written[-1][:, None])
        written.append(state.logits.argmax(-1))
    return torch.stack(written, dim=1)


def teacher_forced(
    model: nn.Module, documents: Sequence[Sequence[int]], answers: Sequence[Sequence[tuple[int, int]]]
) -> tuple[list[list[bool]], list[list[float]]]:
    """One forward pass over whole documents: is each answer written token by token, given what stands before it?

    Args:
        documents: token lists; shorter ones are padded behind, which a causal model does not see.
        answers: of each document, [start, stop) of each answer; nothing before token 1.

    Returns:
        Of every answer: whether all its tokens are the most probable ones, and its log-probability in nats.
    """
    device = device_of(model)
    longest = max(map(len, documents))
    ids = torch.tensor([[*document, *[0] * (longest - len(document))] for document in documents], device=device)
    places = [
        (row, token) for row, spans in enumerate(answers) for start, stop in spans for token in range(start, stop)
    ]
    row, token = torch.tensor(places, device=device).T
    hits, logs = [], []
    wanted = ids[row, token].split(HEAD_TOKENS)
    for logits, part in zip(_logits_at(model, ids, row, token - 1), wanted, strict=True):
        hits.append(logits.argmax(-1) == part)
        logs.append(logits.float().log_softmax(-1).gather(1, part[:, None])[:, 0])
    hit, log = torch.cat(hits).tolist(), torch.cat(logs).tolist()
    right: list[list[bool]] = []
    nats: list[list[float]] = []
    at = 0
    for spans in answers:
        right.append([])
        nats.append([])
        for start, stop in spans:
            right[-1].append(all(hit[at : at + stop - start]))
            nats[-1].append(sum(log[at : at + stop - start]))
            at += stop - start
    return right, nats


def _logits_at(model: nn.Module, ids: Tensor, row: Tensor, token: Tensor) -> Iterator[Tensor]:
    """Yield the logits after the tokens ``ids[row, token]`` of whole documents, :data:`HEAD_TOKENS` of them at a time.

    ``row`` ascends. Where logits are more than the head's product with the hidden state, the model makes those of one
    document at a time, at the places asked for alone if it can.
    """
    reader = Reader(model)
    if reader.head is not None:
        hidden = reader.read(ids, carry=False)[row, token]
        for part in hidden.split(HEAD_TOKENS):
            yield reader.head(in_dtype_of(reader.head, part))
        return
    keeps = "logits_to_keep" in inspect.signature(model.forward).parameters
    found = []
    for index in row.unique().tolist():
        places = token[row == index]
        keep = {"logits_to_keep": places} if keeps else {}
        logits = model(ids[index : index + 1], use_cache=False, **keep).logits[0]
        found.append(logits if keeps else logits[places])
    yield from torch.cat(found).split(HEAD_TOKENS)


def check_finite(values: Tensor, model: nn.Module, tokens: Sequence[int], what: str) -> None:
    """Refuse scores that are not numbers.

    Args:
        tokens: what they were computed from. what: was measured, for the error.

    Raises:
        JobError: naming the first module whose output is not finite.
    """
    if bool(values.isfinite().all()):
        return
    source = first_nonfinite(model, torch.tensor([list(tokens)], device=device_of(model)))
    name = getattr(model, "name_or_path", "") or type(model).__name__
    raise JobError(f"{name}: {what}: probabilities that are not numbers; first not finite: {source}")


def _cache_of(model: nn.Module, output: Any) -> Any:
    """The cache in a model's output."""
    cache = next((cache for name in _CACHES if (cache := getattr(output, name, None)) is not None), None)
    if cache is None:
        raise TypeError(f"{type(model).__name__} returns no cache")
    return cache


def _shallow(layer: Any) -> Any:
    """A cache's layer with its own places for the same tensors, so that reordering the copy leaves the original."""
    twin = copy.copy(layer)
    for name, value in vars(layer).items():
        if isinstance(value, (dict, list)):
            setattr(twin, name, copy.copy(value))
    return twin


def _tensors(held: dict[str, Any]) -> Iterator[Tensor]:
    """The tensors in a cache layer's attributes."""
    for value in held.values():
        for part in value.values() if isinstance(value, dict) else [value]:
            if torch.is_tensor(part):
                yield part
