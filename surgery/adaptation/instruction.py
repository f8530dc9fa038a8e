"""Instruction data: records to prompts and answers, answers scored, prompts not.

A record is one JSON object a line, in one of three forms:

    {"instruction": ..., "input": ..., "output": ...}      input may be absent or empty
    {"prompt": ..., "answer": ...}                         the answer also under completion, response or output
    {"messages": [{"role": ..., "content": ...}, ...]}     every assistant turn is an answer
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from surgery.adaptation.losses import IGNORED
from surgery.adaptation.packing import Deck, Item
from surgery.errors import UsageError

ANSWER_KEYS = ("answer", "completion", "response", "output")
FORMS = "instruction and output, prompt and answer, or messages"


@dataclass(frozen=True)
class Piece:
    """A stretch of text and whether it is an answer."""

    text: str
    answer: bool


@dataclass(frozen=True)
class Example:
    """One conversation as tokens: ids [N], answer [N] bool, True on the tokens that are scored as targets."""

    ids: np.ndarray
    answer: np.ndarray


def pieces(record: Mapping[str, Any], place: str, tokenizer: Any = None) -> list[Piece]:
    """A record's text, prompt and answer apart.

    Args:
        record: one of the module's three forms.
        place: file and line, for errors.
        tokenizer: its chat template renders messages, where it has one.

    Raises:
        UsageError: another form, a field that is not text, no answer.
    """
    if "messages" in record:
        return _conversation(record["messages"], place, tokenizer)
    if "instruction" in record:
        question = _text(record, "instruction", place)
        context = _text(record, "input", place) if record.get("input") else ""
        prompt = f"Instruction:\n{question}\n\n" + (f"Input:\n{context}\n\n" if context else "") + "Answer:\n"
    elif "prompt" in record:
        prompt = _text(record, "prompt", place)
    else:
        raise UsageError(f"{place}: found the fields {', '.join(record) or 'none'}; a record holds {FORMS}")
    key = next((key for key in ANSWER_KEYS if key in record), None)
    if key is None:
        raise UsageError(f"{place}: no answer; a record holds {FORMS}")
    answer = _text(record, key, place)
    if not answer:
        raise UsageError(f"{place}: the answer under {key!r} is empty; drop the record")
    return [Piece(prompt, False), Piece(answer, True)]


def encode(record: Mapping[str, Any], place: str, tokenizer: Any) -> Example:
    """A record as tokens; the end-of-text token closes the last answer and is scored with it."""
    ids: list[int] = []
    answer: list[bool] = []
    for piece in pieces(record, place, tokenizer):
        part = tokenizer(piece.text, add_special_tokens=False, verbose=False)["input_ids"]
        ids += part
        answer += [piece.answer] * len(part)
    if tokenizer.eos_token_id is not None and ids[-1] != tokenizer.eos_token_id:
        ids.append(tokenizer.eos_token_id)
        answer.append(answer[-1])
    return Example(np.asarray(ids, dtype=np.int64), np.asarray(answer, dtype=bool))


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
                f"data: {name}: none of {len(examples)} examples fits a context of {context} tokens; raise context"
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
        """As :meth:`surgery.adaptation.packing.PackedDataset.passes`."""
        return [max(0, items - 1) // self.deck.size]


def records(rows: Iterable[Mapping[str, Any]], name: str) -> Iterator[tuple[Mapping[str, Any], str]]:
    """Rows with the place each stands at."""
    for number, row in enumerate(rows, 1):
        yield row, f"{name}, record {number}"


def _text(record: Mapping[str, Any], key: str, place: str) -> str:
    value = record.get(key)
    if not isinstance(value, str):
        raise UsageError(f"{place}: {key!r} is {type(value).__name__}, not text")
    return value


def _conversation(messages: Any, place: str, tokenizer: Any) -> list[Piece]:
    if not isinstance(messages, list) or not messages:
        raise UsageError(f"{place}: messages is not a list of {{role, content}}")
    for message in messages:
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise UsageError(f"{place}: messages holds {message!r}, which is not {{role, content}}")
        _text(message, "content", place)
    if not any(message["role"] == "assistant" for message in messages):
        raise UsageError(f"{place}: messages holds no assistant turn, so nothing to learn")
    if getattr(tokenizer, "chat_template", None):
        return _rendered(messages, place, tokenizer)
    end = getattr(tokenizer, "eos_token", None) or "\n\n"
    found = []
    for message in messages:
        is_answer = message["role"] == "assistant"
        found.append(Piece(f"{message['role'].capitalize()}:\n", False))
        found.append(Piece(message["content"] + (end if is_answer else "\n\n"), is_answer))
    return found


def _rendered(messages: list[Mapping[str, Any]], place: str, tokenizer: Any) -> list[Piece]:
    """The chat template's text, cut where each assistant turn begins and ends."""
    found: list[Piece] = []
    done = ""
    for number, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        asked = tokenizer.apply_chat_template(messages[:number], tokenize=False, add_generation_prompt=True)
        answered = tokenizer.apply_chat_template(messages[: number + 1], tokenize=False)
        if not (asked.startswith(done) and answered.startswith(asked)):
            raise UsageError(
                f"{place}: the tokenizer's chat template rewrites earlier turns, so answers cannot be told apart\n"
                "give prompt and answer instead"
            )
        found += [Piece(asked[len(done) :], False), Piece(answered[len(asked) :], True)]
        done = answered
    return [piece for piece in found if piece.text]
