"""Documents for training and texts for measuring, from a data specification."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from surgery.data.bundled import BUNDLED, Part, bundled_name
from surgery.data.sources import Source, is_mixture, sources
from surgery.errors import UsageError

BETWEEN = "\n\n"  # stands between two documents of one text, where the first does not end its line itself


@dataclass(frozen=True)
class Text:
    """A text to measure on, and how to name it in a table."""

    name: str
    text: str


def documents(spec: Any, part: Part = "train", *, repeat: bool = False, root: Path | None = None) -> Iterator[str]:
    """Documents of ``spec`` for training; ``part`` matters to the bundled text only.

    A list is read in order, a mixture so that after every document the sources' characters stand as near to their
    weights as they can; a mixture ends when its first source does. With ``repeat`` each source starts over at its end.
    """
    parts = sources(spec, root)
    if not is_mixture(spec):
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
    """The text of ``spec`` in one piece, for measuring; documents that do not end a line stand a blank line apart.

    Args:
        part: of the bundled text; the default is the part that training never reads.
        limit: stop after about this many characters (data sets and large files).

    Raises:
        UsageError: as :func:`surgery.data.sources.sources`; an empty text.
        JobError: a data set that cannot be loaded.
    """
    parts: list[str] = []
    size = 0
    found = sources(spec, root)
    for piece in (piece for source in found for piece in source.pieces(part)):
        if limit is not None and size >= limit:
            break
        parts.append(piece.text)
        size += len(piece.text)
        if piece.ends and not piece.text.endswith(("\n", "\r")):
            parts.append(BETWEEN)
    if parts and parts[-1] == BETWEEN:
        parts.pop()
    text = "".join(parts)
    if not text.strip():
        raise UsageError(f"{describe(spec, part)}: holds no text")
    return Text(describe(spec, part) + _commits(found), text if limit is None else text[:limit])


def describe(spec: Any, part: Part = "all") -> str:
    """A name for ``spec`` that says what was read; the bundled text names its Python, whose wording it depends on."""
    if isinstance(spec, (list, tuple)):
        return " + ".join(describe(item, part) for item in spec)
    if isinstance(spec, Mapping):
        options = "".join(f",{key}={value}" for key, value in spec.items() if key not in ("path", "weight"))
        weight = f" (weight {spec['weight']})" if "weight" in spec else ""
        return f"{describe(spec.get('path'), part)}{options}{weight}"
    return bundled_name(part) if str(spec) == BUNDLED else str(spec)


def _commits(found: Iterable[Source]) -> str:
    """The commits that a hub's data sets were read at, as a part of the text's name."""
    names = [source for source in found if source.kind == "hub"]
    if not names:
        return ""
    from surgery.data.hub import hub_commit

    commits = dict.fromkeys(hub_commit(source.name, source.options.get("revision")) for source in names)
    return f" (commit {', '.join(commits)})"


def _cycle(source: Source, part: Part) -> Iterator[str]:
    while True:
        document = None
        for document in source.documents(part):
            yield document
        if document is None:
            raise UsageError(f"{source.name} holds no text")
