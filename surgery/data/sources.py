"""From a data specification to its sources: which files, which data sets, in which shares.

A specification is what a recipe or a command names:

    bundled                     ``pydoc_data.topics``, which every Python carries: the first 80% trains, the rest is
                                for evaluation only
    path/to/file                text, JSON lines (.jsonl, .ndjson), JSON, CSV, TSV, parquet or arrow, each also as .gz,
                                .xz, .zst, .bz2; a path may have stars, as ``data/*.jsonl``
    path/to/directory           its data files in order of name; what ``save_to_disk`` wrote; or a data set repository,
                                whose card is no data
    owner/name, hub:NAME        a data set of the Hugging Face hub, read as a stream
    NAME,key=value,...          any of these with options: ``column`` (the field that holds the text, ``text`` where
                                none is named; ``a.b`` is b inside a), ``split`` and ``config`` of data sets,
                                ``revision`` of those of a hub
    [path, path, ...]           one after the other
    {path, column, ...}         the same options as a mapping
    [{path, weight}, ...]       a mixture: weights are shares of the characters

In a text file a line that holds the single character U+001E ends a document. Nothing here imports heavy libraries
before it needs them.
"""

from __future__ import annotations

import glob
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

from surgery.data import rows
from surgery.data.bundled import BUNDLED, Part, bundled_documents
from surgery.data.forms import READ, REFUSED, inner_suffix, is_data, refuse_by_name
from surgery.data.streams import Told, read_lines, reading
from surgery.errors import UsageError
from surgery.places import is_hub_id, near, on_machine

SEPARATOR = "\x1e"
PIECE = 1 << 20  # characters; a longer document comes in pieces that end with a line, or at this length
OPTIONS = ("column", "split", "config", "revision")

Kind = Literal["bundled", "file", "hub"]


class Piece(NamedTuple):
    """A stretch of a document, and whether the document ends with it."""

    text: str
    ends: bool


@dataclass(frozen=True)
class Source:
    """One source of documents and its share in a mixture."""

    kind: Kind
    name: str
    weight: float = 1.0
    options: dict[str, str] = field(default_factory=dict)

    @property
    def column(self) -> str:
        """The field that holds a record's text."""
        return self.options.get("column", "text")

    def rows(self, part: Part = "all", told: Told | None = None) -> Iterator[dict[str, Any]]:
        """The source's records: {"text": ...} of a text, the fields as they stand of what has records."""
        if self.kind == "hub":
            from surgery.data.hub import hub_rows

            yield from hub_rows(self.name, self.options)
        elif self.kind == "bundled" or rows.form(Path(self.name)) == "text":
            for document in self.documents(part, told):
                yield {"text": document}
        else:
            yield from rows.file_rows(Path(self.name), told)

    def pieces(self, part: Part = "all", told: Told | None = None) -> Iterator[Piece]:
        """The source's documents in pieces of some ``PIECE`` characters; a document of white space is left out.

        Args:
            told: called now and then with the bytes read of a file.

        Raises:
            UsageError: a record without the text field, a file that is not UTF-8.
            JobError: a data set that cannot be loaded.
        """
        if self.kind == "bundled":
            found = (Piece(document, True) for document in bundled_documents(part))
        elif self.kind == "file" and rows.form(Path(self.name)) == "text":
            yield from _text_pieces(Path(self.name), told)
            return
        else:
            found = (
                Piece(rows.text_of(row, self.column, f"{self.name}, record {number}"), True)
                for number, row in enumerate(self.rows(part, told), 1)
            )
        yield from (piece for piece in found if piece.text.strip())

    def documents(self, part: Part = "all", told: Told | None = None) -> Iterator[str]:
        """The source's documents, each whole; errors as :meth:`pieces`."""
        parts: list[str] = []
        for piece in self.pieces(part, told):
            parts.append(piece.text)
            if piece.ends:
                yield "".join(parts)
                parts = []


def sources(spec: Any, root: Path | None = None) -> list[Source]:
    """What ``spec`` names, checked as far as that goes without reading: files exist, weights are positive.

    Args:
        spec: a specification as in the module's description.
        root: the directory against which relative paths are taken when they do not stand in the current one.

    Raises:
        UsageError: a missing file, a form that is not read, a weight that is not a positive number.
    """
    items = list(spec) if isinstance(spec, (list, tuple)) else [spec]
    if not items:
        raise UsageError("the list is empty; name 'bundled', a text file or a hub data set")
    found: list[Source] = []
    for item in items:
        weight, options = 1.0, {}
        if isinstance(item, Mapping):
            options = {key: str(value) for key, value in item.items() if key not in ("path", "weight")}
            unknown = set(options) - set(OPTIONS)
            if unknown or "path" not in item:
                raise UsageError(f"{dict(item)!r}: an entry is {{path, weight}}, with {', '.join(OPTIONS)} if needed")
            try:
                weight = float(item.get("weight", 1.0))
            except (TypeError, ValueError):
                weight = float("nan")
            if not 0 < weight < float("inf"):
                raise UsageError(f"{item['path']}: weight {item.get('weight')!r} must be a positive number")
            item = item["path"]
        if not isinstance(item, (str, Path)):
            raise UsageError(f"{item!r} is neither 'bundled', a path nor a hub data set")
        found += _resolve(str(item), root, weight, options)
    return found


def is_mixture(spec: Any) -> bool:
    """Whether the sources of a specification are mixed by weight rather than read one after the other."""
    return isinstance(spec, (list, tuple)) and any(isinstance(item, Mapping) for item in spec)


def split_options(name: str) -> tuple[str, dict[str, str]]:
    """A name without the options behind its commas, and those options."""
    options: dict[str, str] = {}
    while "," in name:
        rest, _, last = name.rpartition(",")
        key, equals, value = last.partition("=")
        if not equals or key.strip() not in OPTIONS or not value:
            break
        name, options = rest, {key.strip(): value.strip(), **options}
    return name, options


def _resolve(name: str, root: Path | None, weight: float, options: dict[str, str]) -> list[Source]:
    if name == BUNDLED:
        if options:
            raise UsageError(f"bundled: is one text and has no {', '.join(options)}")
        return [Source("bundled", BUNDLED, weight)]
    whole = name
    if not _place(name, root).exists():  # a file's own name may have commas and equal signs
        name, given = split_options(name)
        options = {**given, **options}
    if name.startswith("hub:"):
        repository = name.removeprefix("hub:")
        if not repository or "," in repository or "=" in repository:
            known = ",".join(f"{key}=..." for key in ("config", "split", "column", "revision"))
            raise UsageError(f"{whole}: write hub:NAME,{known}")
        return [Source("hub", repository, weight, options)]
    path = _place(name, root)
    if path.exists():
        with reading(path):
            files = _directory_files(path, options) if path.is_dir() else _one_file(path, options)
    elif glob.has_magic(name):
        files = _matching(name, path, options, root)
    elif is_hub_id(name, root) and not is_data(path) and path.suffix.lower() not in REFUSED:
        return [Source("hub", name, weight, options)]
    else:
        remedy = "name a text file, 'bundled' or a data set as hub:NAME"
        raise UsageError(f"{name}: no such file; {remedy}{near(name, root)}")
    if "revision" in options:
        raise UsageError(f"{name}: only a hub's data sets have revisions; leave out revision: {options['revision']}")
    kept = {key: value for key, value in options.items() if key == "column"}
    return [Source("file", str(file), weight / len(files), kept) for file in files]


def _place(name: str, root: Path | None) -> Path:
    """Where a path is taken to stand: in the current directory, or beside the recipe."""
    path = Path(name)
    try:
        path = path.expanduser()
        path.exists()
    except (OSError, ValueError, RuntimeError) as error:  # a name too long, a zero character, ~nobody
        raise UsageError(f"{name[:100]!r}: is no path ({getattr(error, 'strerror', None) or error})") from None
    if (found := on_machine(name, root)) is not None:
        return found
    inside = root is not None and not path.is_absolute() and glob.has_magic(name)
    return root / path if inside and not glob.glob(str(path), recursive=True) else path


def _one_file(path: Path, options: Mapping[str, str]) -> list[Path]:
    refuse_by_name(path)
    if not path.is_file():
        raise UsageError(f"{path}: is no regular file; name a file or a directory")
    if odd := [key for key in ("split", "config") if key in options]:
        raise UsageError(f"{path}: is one file and has no {odd[0]}; leave out {odd[0]}: {options[odd[0]]}")
    return [path]


def _matching(name: str, path: Path, options: Mapping[str, str], root: Path | None) -> list[Path]:
    matches = sorted(Path(match) for match in glob.glob(str(path), recursive=True))
    if not matches:
        raise UsageError(f"{name}: no such file: nothing matches it{near(name, root)}")
    files = [match for match in matches if match.is_file()]
    for directory in () if files else matches:
        files += _directory_files(directory, options)
    for file in files:
        refuse_by_name(file)
    return files


def _directory_files(directory: Path, options: Mapping[str, str]) -> list[Path]:
    """The data files of a directory."""
    from surgery.data import tables

    config, split = options.get("config"), options.get("split")
    if tables.is_saved(directory):
        return tables.saved_files(directory, split)
    if tables.is_repository(directory):
        listed = tables.repository_files(directory, config, split)
        if listed is not None:
            return [path for path in listed if not _is_about(path)] or listed
    if config is not None:
        raise UsageError(f"{directory}: has no card that names configurations; leave out config: {config}")
    every = sorted(path for path in directory.rglob("*") if path.is_file() and not _hidden(path, directory))
    if refused := [path for path in every if inner_suffix(path) in REFUSED and inner_suffix(path) != ".bin"]:
        refuse_by_name(refused[0])
    files = [path for path in every if is_data(path) and path.name not in _DESCRIPTIONS]
    # what is about the other files is read only where it stands alone, and a data set's card never
    texts = [path for path in files if not _is_about(path)]
    files = texts if texts or tables.has_card(directory) else files
    if not files:
        raise UsageError(f"{directory}: a directory without a data file{_instead(every)}\n  {READ}")
    return _of_split(directory, files, split)


def _is_about(path: Path) -> bool:
    return path.name.lower().split(".")[0] in _ABOUT


def _hidden(path: Path, directory: Path) -> bool:
    return any(part.startswith((".", "__")) for part in path.relative_to(directory).parts)


def _instead(files: list[Path]) -> str:
    """The suffixes of files that are no data, in words."""
    found = sorted({path.suffix.lower() or path.name for path in files if not is_data(path)})
    return f"; it holds {', '.join(found[:6])}" if found else ""


_ABOUT = ("readme", "license", "licence", "changelog", "notice")
_DESCRIPTIONS = ("dataset_infos.json", "dataset_info.json", "dataset_dict.json", "state.json")
_SPLITS = {"train": "train|training", "validation": "validation|valid|val|dev", "test": "test|testing|eval|evaluation"}


def _of_split(directory: Path, files: list[Path], split: str | None) -> list[Path]:
    """The files of one split, where all files carry the names of splits; otherwise all."""
    named: dict[str, list[Path]] = {}
    for path in files:
        inside = path.relative_to(directory).as_posix().lower()
        name = next((n for n, words in _SPLITS.items() if re.search(rf"(?<![a-z])({words})(?![a-z])", inside)), None)
        if name is None:
            named = {}
            break
        named.setdefault(name, []).append(path)
    if split is not None and split not in named:
        known = ", ".join(named) or "none"
        raise UsageError(f"{directory}: no files are named after a split {split!r}, only {known}\n  name the files")
    if split is not None or "train" in named:
        return named[split or "train"]
    return files


def _text_pieces(path: Path, told: Told | None) -> Iterator[Piece]:
    """A text file's documents; what is held back is what tells whether the document goes on."""
    lines: list[str] = []
    held: str | None = None
    size = 0
    begins = True
    for line in read_lines(path, told, PIECE):
        if begins and line.strip("\r\n") == SEPARATOR:
            yield from _last(held, "".join(lines))
            lines, size, held = [], 0, None
            continue
        begins = line.endswith(("\n", "\r"))
        lines.append(line)
        size += len(line)
        if size >= PIECE:
            if held is not None:
                yield Piece(held, False)
            held, lines, size = "".join(lines), [], 0
    yield from _last(held, "".join(lines))


def _last(held: str | None, rest: str) -> Iterator[Piece]:
    """The end of a document: what was held back, and what came after it."""
    if held is None:
        if rest.strip():
            yield Piece(rest, True)
    elif rest:
        yield Piece(held, False)
        yield Piece(rest, True)
    else:
        yield Piece(held, True)
