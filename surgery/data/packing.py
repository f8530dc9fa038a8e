"""Training text as packed windows: documents one after the other, reset flags where each begins.

A phase's tokens are fixed before its first step: each source is tokenised once into the run directory, as many tokens
as the phase can use, and item i of the data set is a function of i and the seed alone. A resumed run therefore reads
the same batches, on any number of devices.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from surgery.checkpoint.checksums import describe_files, sha256
from surgery.checkpoint.staging import write_atomic
from surgery.data.sources import Piece
from surgery.data.tokens import WINDOW, begin_tokens, document_tokens
from surgery.errors import UsageError

Item = dict[str, Tensor]
DOCUMENTS_AT_ONCE = 64
IGNORED = -100  # the label of a token that is not scored


@dataclass(frozen=True)
class PackedTokens:
    """Documents of one source, concatenated.

    Attributes:
        ids: [N] token ids, often a memory map.
        starts: [M] where each document begins, ascending, the first 0.
        name: what the source is called.
        digest: SHA-256 of what the files hold, empty where they are not kept.
    """

    ids: np.ndarray
    starts: np.ndarray
    name: str
    digest: str = ""

    def windows(self, context: int) -> int:
        """Whole windows of ``context`` tokens and the one that follows each."""
        return max(0, (len(self.ids) - 1) // context)

    def window(self, index: int, context: int) -> Item:
        """Window ``index``.

        Returns:
            input_ids [T] int64; targets [T] int64, the token that follows, ``IGNORED`` where it opens another
            document; reset [T] bool, True where a document begins.
        """
        first = index * context
        ids = torch.from_numpy(self.ids[first : first + context + 1].astype(np.int64))
        low, high = np.searchsorted(self.starts, [first, first + context + 1])
        opens = torch.zeros(context + 1, dtype=torch.bool)
        opens[torch.from_numpy(self.starts[low:high].astype(np.int64) - first)] = True
        targets = ids[1:].masked_fill(opens[1:], IGNORED)
        return {"input_ids": ids[:-1], "targets": targets, "reset": opens[:-1]}


def require_window(name: str, tokens: int, context: int) -> None:
    """Refuse a text of ``tokens`` tokens that does not fill one window.

    Raises:
        UsageError: naming the text.
    """
    if tokens <= context:
        raise UsageError(
            f"{name}: {tokens} tokens are shorter than one context of {context} and the token after it\n"
            "  give a longer text or a smaller context"
        )


def tokenise(pieces: Iterable[Piece | str], tokenizer: Any, limit: int | None = None) -> Iterator[list[int]]:
    """Token ids of each document, between what the tokenizer puts before a text and its end-of-text token, each once,
    until ``limit`` tokens have been made; the last document is cut there.

    Args:
        pieces: documents in pieces, or whole documents.
    """
    begin = begin_tokens(tokenizer)
    end = tokenizer.eos_token_id
    made = 0
    for ids in _documents(pieces, tokenizer, limit):
        if ids[: len(begin)] != begin:
            ids = [*begin, *ids]
        if end is not None and ids[-1:] != [end]:
            ids = [*ids, end]
        if limit is not None and made + len(ids) >= limit:
            yield ids[: limit - made]
            return
        made += len(ids)
        yield ids


def _documents(pieces: Iterable[Piece | str], tokenizer: Any, limit: int | None) -> Iterator[list[int]]:
    """Token ids of each document without special tokens; of one longer than ``limit`` tokens, no more than that."""
    pieces = (Piece(piece, True) if isinstance(piece, str) else piece for piece in pieces)
    short: list[str] = []  # whole documents, which the tokenizer takes many at a time
    for piece in pieces:
        if piece.ends and len(piece.text) <= WINDOW:
            short.append(piece.text)
            if len(short) == DOCUMENTS_AT_ONCE:
                yield from _together(short, tokenizer)
                short = []
            continue
        yield from _together(short, tokenizer)
        short = []
        ids: list[int] = []
        parts = document_tokens(tokenizer, _until_its_end(piece, pieces))
        for part in parts:
            ids += part
            if limit is not None and len(ids) >= limit:
                break
        yield ids
    yield from _together(short, tokenizer)


def _together(texts: list[str], tokenizer: Any) -> list[list[int]]:
    return tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"] if texts else []


def _until_its_end(piece: Piece, others: Iterator[Piece]) -> Iterator[str]:
    yield piece.text
    while not piece.ends:
        piece = next(others)
        yield piece.text


def write_tokens(
    path: Path, documents: Iterable[Sequence[int]], vocabulary: int, content: Sequence[str] = ()
) -> None:
    """Write the token ids, the documents' starts and, last, ``path``.json with their checksums.

    Args:
        content: SHA-256 of what the documents were read from.

    Raises:
        UsageError: a token that the model's vocabulary does not hold.
    """
    kind = np.uint16 if vocabulary <= 1 << 16 else np.uint32
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    starts: list[int] = []
    count = 0
    with partial.open("wb") as stream:
        for ids in documents:
            if not len(ids):
                continue
            if max(ids) >= vocabulary:
                raise UsageError(
                    f"the tokenizer makes token {max(ids)}, the model's vocabulary holds {vocabulary}; "
                    "use the tokenizer that belongs to the model"
                )
            starts.append(count)
            count += len(ids)
            stream.write(np.asarray(ids, dtype=kind).tobytes())
    for former in (f"{path.name}.json", f"{path.name}.uint16", f"{path.name}.uint32"):
        path.with_name(former).unlink(missing_ok=True)  # never beside new starts
    np.save(_starts_file(path), np.asarray(starts, dtype=np.int64))
    # the ids' name is the one that a reader looks for, so it appears after the starts
    os.replace(partial, _ids_file(path, np.dtype(kind).name))
    _describe_tokens(path, np.dtype(kind).name, content)


def read_tokens(
    path: Path,
    name: str,
    content: Sequence[str] = (),
    *,
    verify: bool = True,
    say: Callable[[str], None] = lambda text: None,
) -> PackedTokens | None:
    """What :func:`write_tokens` wrote; None where it is not there, was made from other content, or is damaged.

    Args:
        content: as it is now; see :func:`write_tokens`.
        verify: read the files and compare their checksums.
        say: told of damage.
    """
    kind = next((kind for kind in (np.uint16, np.uint32) if _ids_file(path, np.dtype(kind).name).is_file()), None)
    if kind is None:
        return None
    about = path.with_name(path.name + ".json")
    if not about.is_file():  # of a version that kept none, or killed before it was written
        _describe_tokens(path, np.dtype(kind).name, content)
    try:
        kept = json.loads(about.read_text(encoding="utf-8"))
        files, made_from = dict(kept["files"]), list(kept["content"])
        own = {_ids_file(path, np.dtype(kind).name).name, _starts_file(path).name}
        whole = files.keys() == own and all(
            (path.parent / file).stat().st_size == row["bytes"]
            and (not verify or sha256(path.parent / file) == row["sha256"])
            for file, row in files.items()
        )
        digest = " ".join(str(row["sha256"]) for row in files.values())
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        whole, made_from, digest = False, list(content), ""
    if not whole:
        say(f"{path}: the tokens kept of {name} are damaged (they are not what was written) and are made again")
        return None
    if made_from != list(content):
        return None
    file = _ids_file(path, np.dtype(kind).name)
    ids = np.memmap(file, dtype=kind, mode="r") if file.stat().st_size else np.empty(0, dtype=kind)
    return PackedTokens(ids, np.load(_starts_file(path)), name, digest)


def _ids_file(path: Path, kind: str) -> Path:
    return path.with_name(f"{path.name}.{kind}")


def _starts_file(path: Path) -> Path:
    return path.with_name(path.name + ".starts.npy")


def _describe_tokens(path: Path, kind: str, content: Sequence[str]) -> None:
    files = describe_files(path.parent, [_ids_file(path, kind).name, _starts_file(path).name])
    write_atomic(path.with_name(path.name + ".json"), json.dumps({"files": files, "content": list(content)}) + "\n")


def tokens_key(**what: Any) -> str:
    """A name for cached tokens that changes with what they were made from."""
    return hashlib.sha256(json.dumps(what, sort_keys=True, default=str).encode()).hexdigest()[:16]


class Deck:
    """The numbers 0..size-1 dealt again and again, in a new order each time around."""

    def __init__(self, size: int, seed: Sequence[int]) -> None:
        self.size, self.seed = size, tuple(seed)
        self._round, self._order = -1, np.empty(0, dtype=np.int64)

    def __getitem__(self, index: int) -> int:
        around, place = divmod(index, self.size)
        if around != self._round:
            self._order = np.random.default_rng([*self.seed, around]).permutation(self.size)
            self._round = around
        return int(self._order[place])


class PackedDataset(Dataset):
    """``length`` windows of ``context`` tokens dealt from one or more sources.

    Each source's windows come in a new order on every pass over it. With several sources, which one an item comes
    from is drawn by weight.

    Args:
        sources: the tokens of each source.
        weights: the share of windows of each; any positive numbers.
        context: T, tokens a window.
        length: number of items, all of a phase's steps.
        seed: decides orders and draws.

    Raises:
        UsageError: a source shorter than one context.
    """

    def __init__(
        self, sources: Sequence[PackedTokens], weights: Sequence[float], context: int, length: int, seed: int
    ) -> None:
        for source in sources:
            require_window(source.name, len(source.ids), context)
        self.sources, self.context, self.length = list(sources), context, length
        self.digest = " ".join(source.digest for source in sources)  # of all that is read
        self.decks = [Deck(s.windows(context), (seed, 1 + number)) for number, s in enumerate(sources)]
        self._choice = self._place = None
        if len(self.sources) > 1:
            share = np.asarray(weights, dtype=np.float64)
            draws = np.random.default_rng([seed, 0]).choice(len(share), size=length, p=share / share.sum())
            self._choice = draws.astype(np.uint16)
            # how many earlier items the same source gave
            self._place = np.empty(length, dtype=np.int64)
            for number in range(len(share)):
                mine = draws == number
                self._place[mine] = np.arange(int(mine.sum()))

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Item:
        if not 0 <= index < self.length:
            raise IndexError(index)
        number, place = self._where(index)
        return self.sources[number].window(self.decks[number][place], self.context)

    def passes(self, items: int) -> list[int]:
        """How many times each source's start has been passed again within the first ``items`` items."""
        if self._choice is None:
            counts = [items]
        else:
            counts = np.bincount(self._choice[:items], minlength=len(self.sources)).tolist()
        return [max(0, count - 1) // deck.size for count, deck in zip(counts, self.decks, strict=True)]

    def _where(self, index: int) -> tuple[int, int]:
        if self._choice is None:
            return 0, index
        return int(self._choice[index]), int(self._place[index])


def collate(items: Sequence[Item]) -> Item:
    """Stack items; ``mask`` [B, T] is present only where one of them is padded."""
    keys = [key for key in items[0] if key != "mask"]
    batch = {key: torch.stack([item[key] for item in items]) for key in keys}
    if any("mask" in item for item in items):
        full = torch.ones_like(batch["reset"][0])
        batch["mask"] = torch.stack([item.get("mask", full) for item in items])
    return batch
