"""A YAML file as plain values, with the line each came from.

The reader takes less than YAML offers, because a recipe needs no more: one document of mappings, lists and scalars.
Anchors, aliases (an alias bomb grows a few lines to gigabytes), tags (which name types to build) and duplicate keys
(of which YAML libraries silently keep one) are refused. Scalars follow the YAML 1.2 core types, so ``1e-3`` is a number
and ``010`` is ten.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from surgery.errors import UsageError

KeyPath = tuple[str | int, ...]

MAX_BYTES = 1_000_000
LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # libyaml's parser is many times faster
MAX_DEPTH = 12

_INT = re.compile(r"[-+]?[0-9][0-9_]{0,25}")
_FLOAT = re.compile(r"[-+]?(?:[0-9]{1,20}\.?[0-9]{0,30}|\.[0-9]{1,30})(?:[eE][-+]?[0-9]{1,5})?")
_SPECIAL = {".nan": float("nan"), ".inf": float("inf"), "+.inf": float("inf"), "-.inf": float("-inf")}


class WrittenInt(int):
    """A whole number that keeps how the file writes it, for a key that takes text: ``0123``."""

    written: str

    def __repr__(self) -> str:
        return self.written

    __str__ = __repr__


class WrittenFloat(float):
    """A number that keeps how the file writes it, for a key that takes text: ``3e48291``."""

    written: str

    def __repr__(self) -> str:
        return self.written

    __str__ = __repr__


def plain_numbers(value: Any) -> Any:
    """``value`` with numbers of Python's own types, however a file writes them."""
    if isinstance(value, dict):
        return {key: plain_numbers(item) for key, item in value.items()}
    if isinstance(value, list):
        return [plain_numbers(item) for item in value]
    if isinstance(value, (WrittenInt, WrittenFloat)):
        return int(value) if isinstance(value, int) else float(value)
    return value


def show(path: KeyPath) -> str:
    """``phases[0].tokens`` for ("phases", 0, "tokens")."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else str(part)
    return text


def failure(where: str, path: KeyPath, problem: str, remedy: str) -> UsageError:
    """The one form of every recipe error: place, YAML path, problem; then the remedy."""
    place = f"{where}: {show(path)}: " if path else f"{where}: "
    return UsageError(f"{place}{_clip(problem)}\n  {_clip(remedy)}")


def _clip(text: str, limit: int = 300) -> str:
    text = " ".join(text.split())
    return text if len(text) <= limit else text[: limit - 3] + "..."


@dataclass(frozen=True)
class Document:
    """Parsed text: ``value`` as plain Python values, ``lines`` from key path to 1-based line."""

    name: str
    text: str
    value: Any
    lines: dict[KeyPath, int] = field(default_factory=dict)
    overridden: dict[KeyPath, str] = field(default_factory=dict)

    def where(self, path: KeyPath) -> str:
        """``file:line`` of the nearest place that the file has for ``path``, or the override that set it."""
        for length in range(len(path), -1, -1):
            prefix = path[:length]
            if prefix in self.overridden:
                return f"--set {self.overridden[prefix]}"
            if prefix in self.lines:
                return f"{self.name}:{self.lines[prefix]}"
        return self.name

    def line(self, path: KeyPath) -> int:
        """The line of the nearest place that the file has for ``path``; 0 where there is none."""
        return next((self.lines[path[:n]] for n in range(len(path), -1, -1) if path[:n] in self.lines), 0)

    def error(self, path: KeyPath, problem: str, remedy: str) -> UsageError:
        return failure(self.where(path), path, problem, remedy)


def read_document(path: Path) -> Document:
    """Read a YAML file.

    Raises:
        UsageError: missing, unreadable, too large, not UTF-8, or not the YAML described above.
    """
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except IsADirectoryError:
        if (path / "run.json").is_file():
            raise failure(str(path), (), "is a run, not a recipe", f"its recipe is {path / 'recipe.yaml'}") from None
        if (path / "config.json").is_file():
            remedy = f"have one written for it: surgery inspect {path} --recipe mine.yaml"
            raise failure(str(path), (), "is a model, not a recipe", remedy) from None
        raise failure(str(path), (), "is a directory, not a recipe", "name the YAML file inside it") from None
    except FileNotFoundError:
        raise failure(str(path), (), "no such file", "see the shipped ones with: surgery recipes") from None
    except OSError as error:
        raise failure(str(path), (), f"cannot be read ({error.strerror})", "check the path and its rights") from None
    if len(data) > MAX_BYTES:
        raise failure(str(path), (), f"is larger than {MAX_BYTES} bytes", "a recipe is a short file: check the path")
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise failure(f"{path}:{line}", (), "is not UTF-8 text", "save the recipe as UTF-8") from None
    return parse_document(text, str(path))


def parse_document(text: str, name: str) -> Document:
    """Parse YAML text; ``name`` is what errors call it."""
    reader = _Reader(name)
    value = reader.read(text.removeprefix("\ufeff"))
    return Document(name=name, text=text, value=value, lines=reader.lines)


class _Reader:
    def __init__(self, name: str) -> None:
        self.name = name
        self.lines: dict[KeyPath, int] = {}

    def read(self, text: str) -> Any:
        try:
            events = iter(yaml.parse(text, Loader=LOADER))
            next(events)  # the stream's start
            event = next(events)
            if isinstance(event, yaml.StreamEndEvent):
                return None
            value = self._value(next(events), events, ())
            next(events)  # the document's end
            event = next(events)
            if not isinstance(event, yaml.StreamEndEvent):
                self._refuse(event, (), "a second YAML document starts here", "keep one a file: remove the '---'")
            return value
        except yaml.reader.ReaderError as error:
            found = yaml.reader.Reader.NON_PRINTABLE.search(text)  # libyaml counts bytes, and gives a number
            line = text[: found.start() if found else 0].count("\n") + 1
            character = repr(found[0]) if found else str(error.character)
            problem = f"the character {character} is not allowed in YAML"
            raise failure(f"{self.name}:{line}", (), problem, "remove it") from None
        except yaml.MarkedYAMLError as error:
            mark = error.problem_mark or error.context_mark
            where = f"{self.name}:{mark.line + 1}" if mark else self.name
            if "nesting depth" in str(error.problem):  # libyaml's own limit, met while it reads ahead
                self._refuse_depth(where, next(reversed(self.lines), ()))
            reason = ", ".join(part for part in (error.context, error.problem) if part)
            remedy = "check indentation (spaces, not tabs), quotes and brackets on this line and the one before"
            raise failure(where, (), f"not valid YAML: {reason}", remedy) from None

    def _refuse(self, event: yaml.Event, path: KeyPath, problem: str, remedy: str) -> None:
        raise failure(f"{self.name}:{event.start_mark.line + 1}", path, problem, remedy)

    def _refuse_depth(self, where: str, path: KeyPath) -> None:
        raise failure(where, path[:1], f"nested deeper than {MAX_DEPTH} levels", "no recipe key is that deep") from None

    def _value(self, event: yaml.Event, events: Iterator[yaml.Event], path: KeyPath) -> Any:
        self.lines.setdefault(path, event.start_mark.line + 1)
        if isinstance(event, yaml.AliasEvent) or event.anchor is not None:
            self._refuse(event, path, "anchors and aliases (& and *) are not read", "write the value out in full")
        if event.tag is not None:
            tag = event.tag.replace("tag:yaml.org,2002:", "!!")
            self._refuse(event, path, f"the tag {tag!r} is not read", "write a plain value without '!'")
        if len(path) > MAX_DEPTH:
            self._refuse_depth(f"{self.name}:{event.start_mark.line + 1}", path)
        if isinstance(event, yaml.ScalarEvent):
            return _scalar(event.value) if event.implicit[0] else event.value
        if isinstance(event, yaml.SequenceStartEvent):
            items = []
            while not isinstance(event := next(events), yaml.SequenceEndEvent):
                items.append(self._value(event, events, (*path, len(items))))
            return items
        mapping: dict[str, Any] = {}
        while not isinstance(event := next(events), yaml.MappingEndEvent):
            key = self._key(event, path)
            if key in mapping:
                first = self.lines[(*path, key)]
                self._refuse(event, (*path, key), f"duplicate key; line {first} already sets it", "keep one of the two")
            self.lines[(*path, key)] = event.start_mark.line + 1
            mapping[key] = self._value(next(events), events, (*path, key))
        return mapping

    def _key(self, event: yaml.Event, path: KeyPath) -> str:
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None) is not None:
            self._refuse(event, path, "anchors and aliases (& and *) are not read", "write the value out in full")
        if not isinstance(event, yaml.ScalarEvent) or event.tag is not None:
            self._refuse(event, path, "a key must be a plain word", "write 'key: value'")
        return event.value


def _scalar(text: str) -> Any:
    """A plain scalar's value: null, boolean, whole number, number, otherwise the text itself. A number keeps its
    text."""
    lowered = text.lower()
    if lowered in ("", "~", "null"):
        return None
    if lowered in ("true", "false"):
        return lowered == "true"
    if _INT.fullmatch(text):
        number: WrittenInt | WrittenFloat = WrittenInt(text.replace("_", ""))
    elif lowered in _SPECIAL:
        number = WrittenFloat(_SPECIAL[lowered])
    elif _FLOAT.fullmatch(text):
        number = WrittenFloat(text)
    else:
        return text
    number.written = text
    return number


def override(document: Document, setting: str) -> Document:
    """``document`` with one value replaced, as ``phases.0.tokens=1M`` (or ``phases[0].tokens=1M``) says.

    The value is YAML. Mappings on the way are made when absent; list items must exist.

    Raises:
        UsageError: naming the setting.
    """
    key, equals, text = setting.partition("=")
    where = f"--set {setting}"
    parts = re.sub(r"\[(\d+)\]", r".\1", key.strip()).split(".")
    if not equals or not all(parts):
        raise failure(where, (), "is not KEY=VALUE", "write for example --set phases.0.tokens=1M")
    value = parse_document(text, where).value
    path: list[str | int] = []
    made: dict[KeyPath, str] = {}
    root = _copy(document.value)
    node = root
    for depth, part in enumerate(parts):
        last = depth == len(parts) - 1
        if isinstance(node, list):
            if not part.isascii() or not part.isdigit() or int(part) >= len(node):
                remedy = f"{show(tuple(path))} has {len(node)} in all; the first is {show((*path, 0))}"
                raise failure(where, (), f"there is no {show((*path, part))}", remedy)
            index: str | int = int(part)
        elif isinstance(node, dict):
            index = part
            if not last and node.get(part) is None:
                if parts[depth + 1].isdigit():
                    remedy = f"set the list as a whole: --set '{part}=[...]'"
                    raise failure(where, (), f"the recipe has no list {show((*path, part))}", remedy)
                node[part] = {}
                made[(*path, part)] = setting
        else:
            inner = show(tuple(path)) or "the recipe"
            raise failure(where, (), f"{inner} holds a value, not keys", f"set it as a whole: --set {inner}=...")
        path.append(index)
        if last:
            node[index] = value
        else:
            node = node[index]
    target = tuple(path)
    inside = {known: line for known, line in document.lines.items() if known[: len(target)] != target}
    settings = {known: text for known, text in document.overridden.items() if known[: len(target)] != target}
    return Document(document.name, document.text, root, inside, {**settings, **made, target: setting})


def _copy(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _copy(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_copy(item) for item in value]
    return value
