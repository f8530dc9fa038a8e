"""From text to tokens, as the model's own tokenizer reads a whole text.

One rule holds for training, perplexity and recall: a text begins with the tokens that the tokenizer itself puts before
a text (``<s>`` for Llama's, nothing for GPT-NeoX's), once, and with no others. A training document is closed by the
end-of-text token, once; a text to measure is not.

A long text is tokenised in windows that overlap, and two windows are joined where both read the same tokens, so that
the cut leaves no trace: no space that a tokenizer puts before a text, no word in two halves.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from surgery.data.texts import Text
from surgery.errors import UsageError

WINDOW = 1 << 18  # characters that are tokenised at once
OVERLAP = 1 << 11  # characters that two windows share
_PROBE = "a b"


@dataclass(frozen=True)
class Tokens:
    """A tokenised text.

    Attributes:
        ids: [N] int64.
        ends: [N] int64, bytes of the UTF-8 text up to the end of each token; none for tokens that stand before the
            text. A token that stops inside a character counts the whole character.
        name: what the text is called.
        begin: the tokens before the text, as the tokenizer writes them.
    """

    ids: Tensor
    ends: Tensor
    name: str
    begin: str = ""

    def __len__(self) -> int:
        return self.ids.numel()

    def num_bytes(self, start: int = 0, stop: int | None = None) -> int:
        """Bytes of the text that the tokens from ``start`` up to ``stop`` cover."""
        stop = len(self) if stop is None else stop
        if stop <= start:
            return 0
        return int(self.ends[stop - 1]) - (int(self.ends[start - 1]) if start else 0)


class Spans(NamedTuple):
    """Tokens of a string: ids [N], and [N, 2] the characters that each stands for."""

    ids: np.ndarray
    spans: np.ndarray


def encode(tokenizer: Any, text: Text | str, limit: int | None = None) -> Tokens:
    """Tokenise a text to measure on.

    Args:
        tokenizer: a fast tokenizer of transformers or a ``tokenizers.Tokenizer``.
        limit: keep a beginning of at most this many tokens that ends with a whole character.
    """
    name, string = (text.name, text.text) if isinstance(text, Text) else ("text", text)
    begin = begin_tokens(tokenizer)
    found: list[Spans] = []
    count = 0
    for part in _windows(tokenizer, [string]):
        found.append(part)
        count += len(part.ids)
        if limit is not None and count > limit + 64:
            break
    ids = np.concatenate([part.ids for part in found]) if found else np.empty(0, dtype=np.int64)
    spans = np.concatenate([part.spans for part in found]) if found else np.empty((0, 2), dtype=np.int64)
    ends = np.maximum.accumulate(spans[:, 1])
    whole = limit is None or len(ids) + len(begin) <= limit
    if not whole:
        kept = max(0, limit - len(begin))
        while kept and spans[kept, 0] < ends[kept - 1]:  # the next token is of the same character
            kept -= 1
        ids, ends = ids[:kept], ends[:kept]
    if len(ids) and whole:
        ends[-1] = len(string)  # some tokenizers leave white space out of their spans
    offsets = _byte_offsets(string[: int(ends[-1])] if len(ends) else "")
    ends = np.concatenate([np.zeros(len(begin), dtype=np.int64), offsets[ends].astype(np.int64)])
    ids = np.concatenate([np.asarray(begin, dtype=np.int64), ids])
    return Tokens(torch.from_numpy(ids), torch.from_numpy(ends), name, begin_text(tokenizer, begin))


def begin_tokens(tokenizer: Any) -> list[int]:
    """The tokens that the tokenizer itself puts before a text."""
    bare, whole = _ids(tokenizer, _PROBE, False), _ids(tokenizer, _PROBE, True)
    for start in range(len(whole) - len(bare) + 1):
        if whole[start : start + len(bare)] == bare:
            return whole[:start]
    return []


def begin_text(tokenizer: Any, begin: list[int] | None = None) -> str:
    """Those tokens as the tokenizer writes them, for a report; empty where there are none."""
    begin = begin_tokens(tokenizer) if begin is None else begin
    convert = getattr(tokenizer, "convert_ids_to_tokens", None) or (lambda ids: [tokenizer.id_to_token(i) for i in ids])
    return "".join(convert(begin))


def require_context(tokens: Tokens | int, context: int, name: str = "text") -> None:
    """Refuse a text that is shorter than one context.

    Raises:
        UsageError: naming the text, its tokens and the context.
    """
    count, name = (tokens, name) if isinstance(tokens, int) else (len(tokens), tokens.name)
    if count < context:
        raise UsageError(
            f"{name}: {count} tokens are shorter than one context of {context}; give a longer text or a smaller context"
        )


def document_tokens(tokenizer: Any, pieces: Iterable[str]) -> Iterator[list[int]]:
    """The tokens of one long document that comes in pieces, part by part, without special tokens."""
    if not _tells_spans(tokenizer):
        yield _ids(tokenizer, "".join(pieces), False)
        return
    for part in _windows(tokenizer, pieces):
        yield part.ids.tolist()


def spans_of(tokenizer: Any, text: str) -> Spans:
    """Tokens of a string without special tokens, and the characters that each stands for."""
    found = list(_windows(tokenizer, [text]))
    if not found:
        return Spans(np.empty(0, dtype=np.int64), np.empty((0, 2), dtype=np.int64))
    return Spans(np.concatenate([part.ids for part in found]), np.concatenate([part.spans for part in found]))


def _windows(tokenizer: Any, pieces: Iterable[str]) -> Iterator[Spans]:
    """The tokens of the joined pieces in parts, as those of the whole text; spans count from its beginning."""
    text, origin = "", 0  # what is still to be read, and the character at which it begins
    left: Spans | None = None  # the tokens of text[:left_end], of which the first ``skip`` were given out
    left_end = skip = 0
    pieces = iter(pieces)
    over = False
    while True:
        while not over and len(text) <= left_end + WINDOW + OVERLAP:
            piece = next(pieces, None)
            over = piece is None
            text += piece or ""
        if left is None:
            left_end = len(text) if len(text) <= WINDOW + OVERLAP else WINDOW
            left = _tokenise(tokenizer, text[:left_end])
        if left_end == len(text):
            yield Spans(left.ids[skip:], left.spans[skip:] + origin)
            return
        size = OVERLAP
        while True:
            begin = left_end - size
            if begin <= 0:  # nothing in the window can be told apart: read on with a longer one
                left_end = min(len(text), left_end + WINDOW)
                left = _tokenise(tokenizer, text[:left_end])
                break
            end = len(text) if len(text) - begin <= WINDOW + OVERLAP else begin + WINDOW
            right = _tokenise(tokenizer, text[begin:end])
            met = _meeting(left, right, begin, left_end)
            if met is not None and met[0] >= skip:
                yield Spans(left.ids[skip : met[0]], left.spans[skip : met[0]] + origin)
                text, origin = text[begin:], origin + begin
                left, left_end, skip = right, end - begin, met[1]
                break
            size *= 2


def _meeting(left: Spans, right: Spans, begin: int, end: int) -> tuple[int, int] | None:
    """A token, by its number in two windows that share the characters from ``begin`` to ``end``, around which both read
    the same tokens; None where they differ in the middle half of what they share."""
    quarter = (end - begin) // 4
    low, high = begin + quarter, end - quarter
    inside = [np.flatnonzero((s[:, 0] >= low) & (s[:, 1] <= high)) for s in (left.spans, right.spans + begin)]
    if not all(len(numbers) for numbers in inside):
        return None
    (a, b), (c, d) = ((int(numbers[0]), int(numbers[-1]) + 1) for numbers in inside)
    if b - a != d - c or not np.array_equal(left.ids[a:b], right.ids[c:d]):
        return None
    if not np.array_equal(left.spans[a:b], right.spans[c:d] + begin):
        return None
    middle = (b - a) // 2
    return a + middle, c + middle


def _tells_spans(tokenizer: Any) -> bool:
    return _is_plain(tokenizer) or getattr(tokenizer, "is_fast", False)


def _is_plain(tokenizer: Any) -> bool:
    """Whether it is a ``tokenizers.Tokenizer`` rather than one of transformers."""
    return hasattr(tokenizer, "encode_batch") and not hasattr(tokenizer, "convert_ids_to_tokens")


def _ids(tokenizer: Any, text: str, special: bool) -> list[int]:
    if _is_plain(tokenizer):
        return tokenizer.encode(text, add_special_tokens=special).ids
    return tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"]


def _tokenise(tokenizer: Any, text: str) -> Spans:
    if _is_plain(tokenizer):
        encoding = tokenizer.encode(text, add_special_tokens=False)
        ids, offsets = encoding.ids, encoding.offsets
    elif getattr(tokenizer, "is_fast", False):
        encoding = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        ids, offsets = encoding["input_ids"], encoding["offset_mapping"]
    else:
        raise UsageError(
            f"{type(tokenizer).__name__} cannot say which characters its tokens stand for; save it as a fast tokenizer"
        )
    return Spans(np.asarray(ids, dtype=np.int64), np.asarray(offsets, dtype=np.int64).reshape(-1, 2))


def _byte_offsets(text: str) -> np.ndarray:
    """[len(text) + 1]: bytes of UTF-8 before each character."""
    code = np.frombuffer(text.encode("utf-32-le"), dtype=np.uint32)
    width = 1 + (code >= 0x80).astype(np.int64) + (code >= 0x800) + (code >= 0x10000)
    return np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(width)])
