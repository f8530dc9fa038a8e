"""From a name or a path to a checked :class:`Recipe`, with errors that point at the line."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from importlib import resources
from pathlib import Path
from types import UnionType
from typing import Any, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError

from surgery.errors import MOST, UsageError, together
from surgery.places import near, on_machine
from surgery.recipe.document import Document, KeyPath, failure, override, read_document
from surgery.recipe.fields import suggestion
from surgery.recipe.schema import UNION_TAGS, Recipe
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
    if text and on_machine(text) is not None:
        return path.expanduser()
    if text and (path.suffix in (".yaml", ".yml") or len(path.parts) > 1):
        raise failure(text, (), f"no such file{near(text)}", "see the shipped ones with: surgery recipes")
    problem = f"is neither a shipped recipe nor a file{suggestion(text, list(known)) or near(text)}"
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
    refused = []
    for setting in overrides:
        try:
            document = override(document, setting)
        except UsageError as error:
            refused.append(error)
    if refused:
        raise together(refused)
    try:
        recipe = Recipe.model_validate(document.value)
    except ValidationError as error:
        raise _explain(error, document) from None
    contradictions = list(problems(recipe))
    if contradictions:
        contradictions.sort(key=lambda problem: document.line(problem[0]))
        raise together((document.error(*problem) for problem in contradictions[:MOST]), len(contradictions))
    recipe._document = document
    recipe._name = path.stem
    return recipe


def _explain(error: ValidationError, document: Document) -> UsageError:
    """Every problem with its line, in order; only those that are shown are put into words."""
    found = error.errors(include_url=False)
    # a list whose items are wrong counts as empty to pydantic
    found = [item for item in found if item["type"] != "too_short" or not item["input"]]
    # a misspelt key also makes the right one look missing: show the misspelling first, then by line
    found.sort(key=lambda item: (item["type"] == "missing", document.line(_path(item["loc"]))))
    return together((document.error(*_translate(item)) for item in found[:MOST]), len(found))


def _translate(item: Any) -> tuple[KeyPath, str, str]:
    kind = item["type"]
    path = _path(item["loc"])
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


def _path(location: tuple[Any, ...]) -> KeyPath:
    """The location without the tags of unions, which look like ``<list>``."""
    return tuple(part for part in location if part not in UNION_TAGS)


def _kind(value: Any) -> str:
    if value is None:
        return "empty"
    names = {dict: "a mapping", list: "a list", str: "text", bool: "true or false", int: "a number", float: "a number"}
    return next((name for kind, name in names.items() if isinstance(value, kind)), type(value).__name__)


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
