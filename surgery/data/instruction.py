"""Instruction data: conversations as tokens, answers scored, prompts not."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from surgery.data.chat import Piece, pieces, special_texts
from surgery.data.packing import IGNORED, Deck, Item
from surgery.data.tokens import begin_tokens, spans_of
from surgery.errors import UsageError


@dataclass(frozen=True)
class Example:
    """One conversation as tokens: ids [N], answer [N] bool, True on the tokens that are scored as targets."""

    ids: np.ndarray
    answer: np.ndarray


def encode(record: Mapping[str, Any], place: str, tokenizer: Any, column: str | None = None) -> Example:
    """A record as the tokens of its whole text; the end-of-text token closes the last answer and is scored with it.

    A token that holds the end of a prompt and the start of an answer is scored. A text that a chat template wrote has
    the special tokens that the template gives it; any other begins as the tokenizer begins a text.

    Args:
        column: the field that holds the conversation, where it was named.

    Raises:
        UsageError: as :func:`surgery.data.chat.pieces`.
    """
    found = pieces(record, place, tokenizer, column)
    if getattr(tokenizer, "is_fast", False):
        ids, answer = _by_characters(found, tokenizer)
    else:
        ids, answer = _by_pieces(found, tokenizer)
    if not getattr(tokenizer, "chat_template", None):
        begin = begin_tokens(tokenizer)
        if ids[: len(begin)] != begin:
            ids, answer = [*begin, *ids], [False] * len(begin) + answer
    ends = tokenizer.eos_token_id
    if ends is not None and not _is_closed(ids, found, tokenizer):
        ids.append(ends)
        answer.append(answer[-1])
    return Example(np.asarray(ids, dtype=np.int64), np.asarray(answer, dtype=bool))


def _by_characters(found: Sequence[Piece], tokenizer: Any) -> tuple[list[int], list[bool]]:
    """The tokens of the joined text; scored are those that stand for a character of an answer."""
    text = "".join(piece.text for piece in found)
    scored = np.zeros(len(text) + 1, dtype=np.int64)  # how many characters of answers come before each
    at = 0
    for piece in found:
        scored[at + 1 : at + len(piece.text) + 1] = piece.answer
        at += len(piece.text)
    scored = np.cumsum(scored)
    ids, spans = spans_of(tokenizer, text)
    # some tokenizers leave white space out of their spans; it belongs to the token behind it
    ends = np.maximum.accumulate(spans[:, 1])
    starts = np.minimum(spans[:, 0], np.concatenate([np.zeros(1, dtype=np.int64), ends[:-1]])[: len(ends)])
    return ids.tolist(), (scored[spans[:, 1]] > scored[starts]).tolist()


def _by_pieces(found: Sequence[Piece], tokenizer: Any) -> tuple[list[int], list[bool]]:
    """As :func:`_by_characters`, for a tokenizer that cannot say which characters its tokens stand for."""
    ids: list[int] = []
    answer: list[bool] = []
    text = ""
    for piece in found:
        text += piece.text
        whole = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        same = next((n for n, (a, b) in enumerate(zip(ids, whole, strict=False)) if a != b), min(len(ids), len(whole)))
        answer = answer[:same] + [piece.answer] * (len(whole) - same)
        ids = whole
    return ids, answer


def _is_closed(ids: Sequence[int], found: Sequence[Piece], tokenizer: Any) -> bool:
    """Whether the text ends with a token that ends it, white space behind it aside."""
    text = "".join(piece.text for piece in found).rstrip()
    if ids[-1] == tokenizer.eos_token_id or text.endswith(tokenizer.eos_token or "\0"):
        return True
    # of a chat template: <|im_end|>, <end_of_turn> and their kind end a turn as its makers meant it
    return bool(getattr(tokenizer, "chat_template", None)) and text.endswith(tuple(special_texts(tokenizer)))


class InstructDataset(Dataset):
    """``length`` windows of ``context`` tokens, whole examples packed into each, the rest of a window padded.

    An example never spans two windows: a prompt cut off would be another prompt.

    Args:
        examples: at least one that fits.
        context: T, tokens a window.
        length: number of items.
        seed: decides which examples share a window and the order of windows.
        padding: the token that fills a window.

    Attributes:
        dropped: examples longer than a window, left out.
        digest: SHA-256 of all that is read.

    Raises:
        UsageError: every example is longer than a window.
    """

    def __init__(
        self, examples: Sequence[Example], context: int, length: int, seed: int, padding: int, name: str = "data"
    ) -> None:
        fitting = [example for example in examples if len(example.ids) <= context]
        self.dropped = len(examples) - len(fitting)
        if not fitting:
            raise UsageError(
                f"{name}: none of {len(examples)} examples fits a context of {context} tokens; raise context"
            )
        self.context, self.length, self.padding = context, length, padding
        read = hashlib.sha256()
        for example in examples:
            read.update(len(example.ids).to_bytes(8, "little") + example.ids.tobytes() + example.answer.tobytes())
        self.digest = read.hexdigest()
        self.bins: list[list[Example]] = []
        room = 0
        for number in np.random.default_rng([seed, 0]).permutation(len(fitting)):
            example = fitting[number]
            if len(example.ids) > room:
                self.bins.append([])
                room = context
            self.bins[-1].append(example)
            room -= len(example.ids)
        self.deck = Deck(len(self.bins), (seed, 1))

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Item:
        if not 0 <= index < self.length:
            raise IndexError(index)
        ids = torch.full((self.context,), self.padding, dtype=torch.int64)
        targets = torch.full((self.context,), IGNORED, dtype=torch.int64)
        reset = torch.zeros(self.context, dtype=torch.bool)
        mask = torch.zeros(self.context, dtype=torch.bool)
        at = 0
        for example in self.bins[self.deck[index]]:
            size = len(example.ids)
            tokens, scored = torch.from_numpy(example.ids), torch.from_numpy(example.answer)
            ids[at : at + size] = tokens
            targets[at : at + size - 1] = tokens[1:].masked_fill(~scored[1:], IGNORED)
            reset[at] = mask[at : at + size] = True
            at += size
        return {"input_ids": ids, "targets": targets, "reset": reset, "mask": mask}

    def passes(self, items: int) -> list[int]:
        """As :meth:`surgery.data.packing.PackedDataset.passes`."""
        return [max(0, items - 1) // self.deck.size]
