"""From a data specification to documents and text.

A specification is what a recipe or a command names:

    bundled                     ``pydoc_data.topics``, which every Python carries: the first 80% trains, the rest is
                                for evaluation only
    path/to/file                UTF-8 text, also .xz, .gz, .bz2; .jsonl holds one document a line under ``text``; a
                                directory stands for the text files in it, in order of name
    owner/name, hub:NAME        a data set of the Hugging Face hub, read as a stream; with further fields
                                ``hub:NAME,config=C,split=S,column=text``
    [path, path, ...]           one after the other
    [{path, weight}, ...]       a mixture: weights are shares of the characters

In a text file a line that holds the single character U+001E ends a document. Nothing here imports heavy libraries
before it needs them.
"""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import platform
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from surgery.errors import JobError, UsageError
from surgery.places import is_hub_id, near, on_machine

BUNDLED = "bundled"
SEPARATOR = "\x1e"
TRAINING_SHARE = 0.8
PIECE = 1 << 20  # characters; a longer document is cut at the next line end: one piece tokenises in little memory
SHARED_PARAGRAPH = 100  # characters from which a paragraph of the held-out part counts as seen in training

Part = Literal["train", "heldout", "all"]

_OPENERS = {".xz": lzma.open, ".gz": gzip.open, ".bz2": bz2.open}
_TEXT_SUFFIXES = {".txt", ".md", ".rst", ".py", ".jsonl", ".text"}


@dataclass(frozen=True)
class Text:
    """A text to measure on, and how to name it in a table."""

    name: str
    text: str


@dataclass(frozen=True)
class Source:
    """One source of documents and its share in a mixture."""

    kind: Literal["bundled", "file", "hub"]
    name: str
    weight: float = 1.0
    options: dict[str, str] = field(default_factory=dict)

    def rows(self, part: Part = "all") -> Iterator[dict[str, Any]]:
        """The source's records: {"text": ...} of a text, the fields as they stand of a .jsonl file or a data set."""
        if self.kind == "bundled":
            for document in _bundled_documents(part):
                yield {"text": document}
        elif self.kind == "hub":
            yield from _hub_rows(self)
        elif _is_jsonl(Path(self.name)):
            yield from _jsonl_rows(Path(self.name))
        else:
            for document in _file_documents(Path(self.name)):
                yield {"text": document}

    def documents(self, part: Part = "all") -> Iterator[str]:
        """The source's documents, none empty, none much longer than ``PIECE`` characters.

        Raises:
            UsageError: a record without the text field, a file that is not UTF-8.
            JobError: a data set that cannot be loaded.
        """
        column = self.options.get("column", "text")
        for number, row in enumerate(self.rows(part), 1):
            text = row.get(column)
            if not isinstance(text, str):
                fields = ", ".join(row) or "none"
                remedy = f"\nname the field: hub:{self.name},column=FIELD" if self.kind == "hub" else ""
                raise UsageError(f"{self.name}: record {number} has no text under {column!r}, only {fields}{remedy}")
            for piece in _pieces(text):
                if piece.strip():
                    yield piece


def sources(spec: Any, root: Path | None = None) -> list[Source]:
    """What ``spec`` names, checked as far as that goes without reading: files exist, weights are positive.

    Args:
        spec: a specification as in the module's description.
        root: the directory against which relative paths are taken when they do not stand in the current one.

    Raises:
        UsageError: a missing file, an unknown form, a weight that is not a positive number.
    """
    items = list(spec) if isinstance(spec, (list, tuple)) else [spec]
    if not items:
        raise UsageError("the list is empty; name 'bundled', a text file or a hub data set")
    found: list[Source] = []
    for item in items:
        weight, options = 1.0, {}
        if isinstance(item, Mapping):
            options = {key: str(value) for key, value in item.items() if key not in ("path", "weight")}
            unknown = set(options) - {"config", "split", "column"}
            if unknown or "path" not in item:
                raise UsageError(
                    f"{dict(item)!r}: an entry is {{path, weight}}, with config, split, column for a data set"
                )
            try:
                weight = float(item.get("weight", 1.0))
            except (TypeError, ValueError):
                weight = float("nan")
            if not 0 < weight < float("inf"):
                raise UsageError(f"{item['path']}: weight {item.get('weight')!r} must be a positive number")
            item = item["path"]
        if not isinstance(item, (str, Path)):
            raise UsageError(f"{item!r} is neither 'bundled', a path nor a hub data set")
        places = _resolve(str(item), root)
        found += [Source(kind, name, weight / len(places), {**extra, **options}) for kind, name, extra in places]
    return found


def documents(spec: Any, part: Part = "train", *, repeat: bool = False, root: Path | None = None) -> Iterator[str]:
    """Documents of ``spec`` for training; ``part`` matters to the bundled text only.

    A list is read in order, a mixture so that after every document the sources' characters stand as near to their
    weights as they can; a mixture ends when its first source does. With ``repeat`` each source starts over at its end.
    """
    parts = sources(spec, root)
    mixture = isinstance(spec, (list, tuple)) and any(isinstance(item, Mapping) for item in spec)
    if not mixture:
        while True:
            count = 0
            for source in parts:
                for document in source.documents(part):
                    count += 1
                    yield document
            if not repeat:
                return
            if not count:
                raise UsageError(f"{describe(spec)} holds no text")
    readers = [_cycle(source, part) if repeat else source.documents(part) for source in parts]
    read = [0.0] * len(parts)
    while True:
        pick = min(range(len(parts)), key=lambda index: read[index] / parts[index].weight)
        document = next(readers[pick], None)
        if document is None:
            return
        read[pick] += len(document)
        yield document


def load_text(spec: Any, part: Part = "heldout", root: Path | None = None, limit: int | None = None) -> Text:
    """The text of ``spec`` in one piece, for measuring.

    Args:
        part: of the bundled text; the default is the part that training never reads.
        limit: stop after about this many characters (data sets and large files).

    Raises:
        UsageError: as :func:`sources`; an empty text.
        JobError: a data set that cannot be loaded.
    """
    parts: list[str] = []
    size = 0
    for source in sources(spec, root):
        for document in source.documents(part):
            parts.append(document)
            size += len(document)
            if limit is not None and size >= limit:
                break
        if limit is not None and size >= limit:
            break
    text = "".join(parts)
    if not text.strip():
        raise UsageError(f"{describe(spec, part)}: holds no text")
    return Text(describe(spec, part), text if limit is None else text[:limit])


def describe(spec: Any, part: Part = "all") -> str:
    """A name for ``spec`` that says what was read; the bundled text names its Python, whose wording it depends on."""
    if isinstance(spec, (list, tuple)):
        return " + ".join(describe(item, part) for item in spec)
    if isinstance(spec, Mapping):
        return f"{describe(spec.get('path'), part)} (weight {spec.get('weight', 1)})"
    if str(spec) == BUNDLED:
        share = {"train": ", first 80%", "heldout": ", last 20%", "all": ""}[part]
        return f"pydoc_data.topics of Python {platform.python_version()}{share}"
    return str(spec)


def _resolve(name: str, root: Path | None) -> list[tuple[Literal["bundled", "file", "hub"], str, dict[str, str]]]:
    if name == BUNDLED:
        return [("bundled", BUNDLED, {})]
    if name.startswith("hub:"):
        repository, *rest = name.removeprefix("hub:").split(",")
        options = dict(item.partition("=")[::2] for item in rest)
        unknown = set(options) - {"config", "split", "column"}
        if unknown or not repository:
            raise UsageError(f"{name}: write hub:NAME,config=...,split=...,column=...")
        return [("hub", repository, options)]
    path = on_machine(name, root)
    if path is not None and path.is_dir():
        files = sorted(file for file in path.iterdir() if file.is_file() and _suffix(file) in _TEXT_SUFFIXES)
        if not files:
            raise UsageError(f"{name}: a directory without a text file ({', '.join(sorted(_TEXT_SUFFIXES))})")
        return [("file", str(file), {}) for file in files]
    if path is not None and path.exists():
        return [("file", str(path), {})]
    if not is_hub_id(name, root):
        remedy = "name a text file, 'bundled' or a data set as hub:NAME"
        raise UsageError(f"{name}: no such file; {remedy}{near(name, root)}")
    return [("hub", name, {})]


def _suffix(path: Path) -> str:
    """The suffix that says what is inside, past a compression's."""
    return Path(path.stem).suffix if path.suffix in _OPENERS else path.suffix


def _is_jsonl(path: Path) -> bool:
    return _suffix(path) == ".jsonl"


def _lines(path: Path) -> Iterator[str]:
    opener = _OPENERS.get(path.suffix, open)
    try:
        with opener(path, "rb") as stream, io.TextIOWrapper(stream, encoding="utf-8", newline="") as text:
            yield from text
    except UnicodeDecodeError as error:
        raise UsageError(f"{path}: not UTF-8 text ({error.reason}); convert it first") from None
    except (OSError, EOFError, lzma.LZMAError) as error:
        raise UsageError(f"{path}: cannot be read: {error}") from None


def _file_documents(path: Path) -> Iterator[str]:
    lines: list[str] = []
    size = 0
    for line in _lines(path):
        if line.strip("\r\n") == SEPARATOR:
            yield "".join(lines)
            lines, size = [], 0
            continue
        lines.append(line)
        size += len(line)
        if size >= PIECE:
            yield "".join(lines)
            lines, size = [], 0
    if lines:
        yield "".join(lines)


def _jsonl_rows(path: Path) -> Iterator[dict[str, Any]]:
    for number, line in enumerate(_lines(path), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            message = f"{path}, line {number}: not JSON ({error.msg}); a .jsonl file holds one object a line"
            raise UsageError(message) from None
        if not isinstance(row, dict):
            raise UsageError(f"{path}, line {number}: a .jsonl file holds one object a line, as {{\"text\": ...}}")
        yield row


def _hub_rows(source: Source) -> Iterator[dict[str, Any]]:
    from datasets import load_dataset
    from huggingface_hub import HfApi

    split = source.options.get("split", "train")
    try:
        HfApi().dataset_info(source.name, timeout=20)  # fails at once where loading would retry for half a minute
        yield from load_dataset(source.name, source.options.get("config"), split=split, streaming=True)
    except Exception as error:  # the library raises its own, the hub's, the network's and the parsers' errors here
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
        raise JobError(
            f"data set {source.name} (split {split}) cannot be read from the hub: {reason}\n"
            "offline, give a text file instead, or a directory that holds the data set's files"
        ) from None


def _bundled_documents(part: Part) -> list[str]:
    """The topics in order of name. The held-out part drops paragraphs that the training part holds too: topics quote
    each other."""
    from pydoc_data.topics import topics

    texts = [topics[name].strip() + "\n\n" for name in sorted(topics)]
    if part == "all":
        return texts
    cut = int(TRAINING_SHARE * sum(map(len, texts)))
    train: list[str] = []
    heldout: list[str] = []
    at = 0
    for text in texts:
        if at + len(text) <= cut:
            train.append(text)
        elif at >= cut:
            heldout.append(text)
        else:
            inside = text.index("\n\n", cut - at) + 2  # a paragraph cut in two would escape the comparison below
            train.append(text[:inside])
            heldout.append(text[inside:])
        at += len(text)
    if part == "train":
        return train
    seen = {paragraph for text in train for paragraph in text.split("\n\n") if len(paragraph) >= SHARED_PARAGRAPH}
    return ["\n\n".join(paragraph for paragraph in text.split("\n\n") if paragraph not in seen) for text in heldout]


def _pieces(text: str) -> Iterable[str]:
    start = 0
    while len(text) - start > PIECE:
        end = text.find("\n", start + PIECE) + 1
        if not end:
            break
        yield text[start:end]
        start = end
    yield text[start:]


def _cycle(source: Source, part: Part) -> Iterator[str]:
    while True:
        document = None
        for document in source.documents(part):
            yield document
        if document is None:
            raise UsageError(f"{source.name} holds no text")
