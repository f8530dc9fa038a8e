"""From a name or a path to a checked :class:`Recipe`, with errors that point at the line."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from importlib import resources
from pathlib import Path
from types import UnionType
from typing import Any, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError

from surgery.errors import UsageError
from surgery.recipe.document import Document, KeyPath, failure, override, read_document
from surgery.recipe.fields import suggestion
from surgery.recipe.schema import Recipe
from surgery.recipe.semantics import problems

# what a section looks like, for the remedy when it is something else or absent
EXAMPLES = {
    "model": "model: bundled:tiny-gdn",
    "layers": "layers: [5, 11], or layers: {top: 8}",
    "memory": "memory: {rule: palimpsa}",
    "rule": "rule: palimpsa",
    "kind": "kind: next-token",
    "phases": "phases: [{kind: next-token, tokens: 1M}]",
    "path": "path: text.txt",
    "kl": "kl: 1.0e-6",
    "host": "host: 1.0e-4",
    "lengths": "lengths: [512, 1024]",
}


def shipped() -> dict[str, Path]:
    """The recipes inside the installed package, by name."""
    folder = resources.files("surgery.recipes")
    found = {Path(entry.name).stem: Path(str(entry)) for entry in folder.iterdir() if entry.name.endswith(".yaml")}
    return dict(sorted(found.items()))


def locate(name_or_path: str | Path) -> Path:
    """A shipped recipe's file, or the path itself.

    Raises:
        UsageError: neither a shipped name nor something that looks like a path.
    """
    text = str(name_or_path)
    known = shipped()
    if text in known:
        return known[text]
    path = Path(text)
    if text and (path.suffix in (".yaml", ".yml") or len(path.parts) > 1 or path.exists()):
        return path
    problem = f"is neither a shipped recipe nor a file{suggestion(text, list(known))}"
    raise failure(text or "''", (), problem, f"shipped: {', '.join(known)}; or give a path to a .yaml file")


def load_recipe(name_or_path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read and check a recipe, from a shipped name or a path, with ``overrides`` such as ``phases.0.tokens=1M``.

    Raises:
        UsageError: at most five lines that name file and line, YAML path, problem and remedy.
    """
    path = locate(name_or_path)
    document = read_document(path)
    if not isinstance(document.value, dict):
        found = "is empty" if document.value is None else f"holds {_kind(document.value)}, not keys and values"
        remedy = "a recipe needs at least model, layers and memory; see: surgery recipes show demo-bayesian"
        raise failure(document.where(()), (), found, remedy)
    for setting in overrides:
        document = override(document, setting)
    try:
        recipe = Recipe.model_validate(document.value)
    except ValidationError as error:
        raise _explain(error, document) from None
    contradictions = list(problems(recipe))
    if contradictions:
        raise _report(document, contradictions)
    recipe._document = document
    recipe._name = path.stem
    return recipe


def _report(document: Document, found: list[tuple[KeyPath, str, str]]) -> UsageError:
    """The first problem in full and the number of others."""
    path, problem, remedy = found[0]
    error = document.error(path, problem, remedy)
    if len(found) > 1:
        return UsageError(f"{error}\n  ({len(found) - 1} more after this one)")
    return error


def _explain(error: ValidationError, document: Document) -> UsageError:
    found = [_translate(item, document.value) for item in error.errors(include_url=False)]
    # a misspelt key also makes the right one look missing: show the misspelling first, then by line
    missing = {id(item) for item, raw in zip(found, error.errors(), strict=True) if raw["type"] == "missing"}
    found.sort(key=lambda item: (id(item) in missing, _line(document, item[0])))
    return _report(document, found)


def _line(document: Document, path: KeyPath) -> int:
    for length in range(len(path), -1, -1):
        if path[:length] in document.lines:
            return document.lines[path[:length]]
    return 0


def _translate(item: Any, value: Any) -> tuple[KeyPath, str, str]:
    kind = item["type"]
    path = _path(item["loc"], value, absent=kind == "missing")
    if kind == "recipe":
        return path, item["ctx"]["problem"], item["ctx"]["remedy"]
    leaf = str(path[-1]) if path else ""
    if kind == "extra_forbidden":
        known = _keys_at(path[:-1])
        return path, f"unknown key {leaf!r}{suggestion(leaf, known)}", f"known keys here: {', '.join(known)}"
    if kind == "missing":
        return path, f"the required key {leaf!r} is missing", f"add for example {EXAMPLES.get(leaf, leaf + ': ...')}"
    found = _kind(item["input"])
    if kind in ("model_type", "model_attributes_type", "dict_type"):
        known = _keys_at(path)
        return path, f"is {found}, not a mapping of keys", f"write keys such as {{{known[0] if known else 'key'}: ...}}"
    if kind in ("list_type", "tuple_type"):
        return path, f"is {found}, not a list", f"write a list, for example {EXAMPLES.get(leaf, leaf + ': [...]')}"
    if kind == "too_short":
        return path, "the list is empty", "name at least one"
    return path, str(item["msg"]), "see the recipe keys with: surgery recipes show demo-bayesian"


def _path(location: tuple[Any, ...], value: Any, absent: bool) -> KeyPath:
    """The location without the tags of unions, which look like ``<list>``."""
    parts = [part for part in location if not (isinstance(part, str) and part.startswith("<") and part.endswith(">"))]
    return tuple(parts)


def _kind(value: Any) -> str:
    if value is None:
        return "empty"
    names = {dict: "a mapping", list: "a list", str: "text", bool: "true or false", int: "a number", float: "a number"}
    return names.get(type(value), type(value).__name__)


@lru_cache(maxsize=64)
def _keys_at(path: KeyPath) -> list[str]:
    """The keys that the schema has at a YAML path."""
    models: list[type[BaseModel]] = [Recipe]
    for part in path:
        if isinstance(part, int):
            continue
        inner: list[type[BaseModel]] = []
        for model in models:
            for name, info in model.model_fields.items():
                if (info.alias or name) == part:
                    inner += _models(info.annotation)
        models = inner
    return [info.alias or name for model in models for name, info in model.model_fields.items()]


def _models(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    if get_origin(annotation) in (Union, UnionType, tuple, list) or get_args(annotation):
        return [model for inner in get_args(annotation) for model in _models(inner)]
    return []
