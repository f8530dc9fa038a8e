"""From text to tokens, each with the bytes of text that it stands for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from surgery.errors import UsageError
from surgery.evaluation.text import Text


@dataclass(frozen=True)
class Tokens:
    """A tokenised text.

    Attributes:
        ids: [N] int64.
        ends: [N] int64, bytes of the UTF-8 text up to the end of each token. A token that stops inside a character
            counts the whole character.
        name: what the text is called.
    """

    ids: Tensor
    ends: Tensor
    name: str

    def __len__(self) -> int:
        return self.ids.numel()

    def num_bytes(self, start: int = 0, stop: int | None = None) -> int:
        """Bytes of the text that the tokens from ``start`` up to ``stop`` cover."""
        stop = len(self) if stop is None else stop
        if stop <= start:
            return 0
        return int(self.ends[stop - 1]) - (int(self.ends[start - 1]) if start else 0)


def encode(tokenizer: Any, text: Text | str, limit: int | None = None) -> Tokens:
    """Tokenise without special tokens.

    Args:
        tokenizer: a fast tokenizer of transformers or a ``tokenizers.Tokenizer``.
        limit: tokenise a beginning of the text, of whole characters, that makes at most this many tokens.
    """
    name, string = (text.name, text.text) if isinstance(text, Text) else ("text", text)
    if limit is not None:
        string = _cut(tokenizer, string, limit)
    ids, spans = tokenise(tokenizer, string)
    ends = np.maximum.accumulate(spans[:, 1]) if ids else spans[:, 1]
    if ids:
        ends[-1] = len(string)  # some tokenizers leave white space out of their spans
    offsets = _byte_offsets(string)
    return Tokens(torch.tensor(ids, dtype=torch.int64), torch.from_numpy(offsets[ends].astype(np.int64)), name)


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


def _cut(tokenizer: Any, text: str, limit: int) -> str:
    """The longest beginning of ``text`` found that makes at most ``limit`` tokens."""
    size = min(len(text), 8 * limit + 256)
    while True:
        ids, spans = tokenise(tokenizer, text[:size])
        # tokens near an artificial cut may differ from the whole text's, so more are made than are kept
        if len(ids) > limit + 64 or size == len(text):
            break
        size = min(len(text), 2 * size)
    if len(ids) <= limit:
        return text
    size = int(spans[:limit, 1].max()) if limit else 0
    while size and len(tokenise(tokenizer, text[:size])[0]) > limit:
        size -= 1
    return text[:size]


def tokenise(tokenizer: Any, text: str) -> tuple[list[int], np.ndarray]:
    """Token ids and the [N, 2] spans of characters they stand for."""
    if hasattr(tokenizer, "encode_batch") and not hasattr(tokenizer, "convert_ids_to_tokens"):
        encoding = tokenizer.encode(text, add_special_tokens=False)
        ids, offsets = encoding.ids, encoding.offsets
    elif getattr(tokenizer, "is_fast", False):
        encoding = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        ids, offsets = encoding["input_ids"], encoding["offset_mapping"]
    else:
        raise UsageError(
            f"{type(tokenizer).__name__} cannot say which characters its tokens stand for; save it as a fast tokenizer"
        )
    return ids, np.asarray(offsets, dtype=np.int64).reshape(-1, 2)


def _byte_offsets(text: str) -> np.ndarray:
    """[len(text) + 1]: bytes of UTF-8 before each character."""
    code = np.frombuffer(text.encode("utf-32-le"), dtype=np.uint32)
    width = 1 + (code >= 0x80).astype(np.int64) + (code >= 0x800) + (code >= 0x10000)
    return np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(width)])
