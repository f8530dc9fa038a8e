"""The modelling code that goes with an exported checkpoint: transformers alone loads it, without this package.

    code_of("surgery_mamba2")  # {"surgery_models_mamba2.py": text, ...}

Each file is a module that the package itself runs, with its imports rewritten and a header that names its source and
the source's SHA-256. transformers (``dynamic_module_utils``) sets the form: it copies the file that ``auto_map`` names
and, from file to file, what a line ``from .name import`` names, all in one folder. Files and not one text, because
Triton reads a kernel's source from its file, and because each can be held against its source.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import surgery
from surgery.models.registry import MODELS
from surgery.models.stand_ins import HYBRIDS

# what a checkpoint needs to run; a module of another part of the package is a tool, and does not travel
RUNTIME = ("errors", "kernels", "memory", "graft", "models")
LICENCE = "Apache-2.0"
PREFIX = "surgery_"
HEADER = """\
# SPDX-License-Identifier: {licence}
# {name} of model-surgery {version}, with its imports rewritten.
# transformers runs it under trust_remote_code, where the package is not imported; `surgery verify` checks it.
# SHA-256 of the module it was made from: {digest}
"""
FOOTER = """

from .{serving} import show  # noqa: E402

show({model})
"""
SERVING = "surgery.models.serving"
_FROM = re.compile(r"from\s+[.\w]+\s+import\b")


def classes_of(model_type: str) -> tuple[str, str, str]:
    """The module of an upgraded model type's classes (of both: its configuration is imported there), the name of the
    configuration class, and the model's.

    Raises:
        KeyError: no such model type.
    """
    if model_type in HYBRIDS:
        module, name = HYBRIDS[model_type]
        return f"surgery.models.{module}", f"Surgery{name}Config", f"Surgery{name}ForCausalLM"
    for config_module, config, module, model in MODELS:
        parsed = ast.parse(source_of(f"surgery.models.{config_module}"))
        if _model_type(parsed, config) == model_type:
            return f"surgery.models.{module}", config, model
    raise KeyError(model_type)


def auto_map(model_type: str) -> dict[str, str]:
    """What ``config.json`` says of the code, under ``auto_map``."""
    module, config, model = classes_of(model_type)
    file = flat_name(module)
    return {"AutoConfig": f"{file}.{config}", "AutoModelForCausalLM": f"{file}.{model}"}


def code_of(model_type: str) -> dict[str, str]:
    """The files that load a checkpoint of ``model_type``: name -> text.

    Raises:
        KeyError: no such model type.
        ValueError: a module needs one that is no part of the runtime, or imports in a form that cannot be rewritten.
    """
    entry, _, model = classes_of(model_type)
    texts: dict[str, str] = {}
    wanted = [entry, SERVING]
    while wanted:
        name = wanted.pop()
        if name not in texts:
            texts[name], needed = _rewritten(name)
            wanted += needed
    texts[entry] += FOOTER.format(serving=flat_name(SERVING), model=model)
    files = {f"{flat_name(name)}.py": text for name, text in sorted(texts.items())}
    if len(files) < len(texts):
        raise ValueError(f"{model_type}: two of its modules have one name in a checkpoint")
    return files


def digest_of(files: Mapping[str, str]) -> str:
    """One SHA-256 of all files, by name and text."""
    whole = hashlib.sha256()
    for name, text in sorted(files.items()):
        whole.update(f"{name} {hashlib.sha256(text.encode()).hexdigest()}\n".encode())
    return whole.hexdigest()


def flat_name(module: str) -> str:
    """``surgery.kernels.chunks`` -> ``surgery_kernels_chunks``."""
    return PREFIX + module.removeprefix("surgery.").replace(".", "_")


@cache
def source_of(module: str) -> str:
    """The text of a module of this package."""
    return _place(module).read_text(encoding="utf-8")


def _place(module: str) -> Path:
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None:
        raise ValueError(f"{module}: no such module")
    return Path(spec.origin)


def _is_module(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # what should hold it is no package
        return False


@cache
def _rewritten(module: str) -> tuple[str, tuple[str, ...]]:
    """A module's text as it stands in a checkpoint, and the modules of this package that it needs."""
    if module.split(".")[1:2] and module.split(".")[1] not in RUNTIME:
        raise ValueError(f"{module}: is a tool, and a checkpoint's code must do without")
    source = source_of(module)
    lines = source.splitlines(keepends=True)
    package = module if _place(module).name == "__init__.py" else module.rpartition(".")[0]
    needed: dict[str, None] = {}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            tops = {alias.name.partition(".")[0] for alias in node.names}
            if "surgery" in tops:
                raise ValueError(f"{module}, line {node.lineno}: write `from {node.names[0].name} import ...`")
            if "triton" in tops:
                _guard(lines, node)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            origin = ".".join([*above, *([node.module] if node.module else [])])
            if origin == "triton" or origin.startswith("triton."):
                _guard(lines, node)
            elif origin == "surgery" or origin.startswith("surgery."):
                needed |= dict.fromkeys(_rewrite(module, lines, node, origin))
    digest = hashlib.sha256(source.encode()).hexdigest()
    header = HEADER.format(licence=LICENCE, version=surgery.__version__, name=module, digest=digest)
    return header + "".join(lines), tuple(needed)


def _rewrite(module: str, lines: list[str], node: ast.ImportFrom, origin: str) -> list[str]:
    """Rewrite one ``from ... import`` of this package in place; returns the modules that it needs."""
    modules = [alias for alias in node.names if _is_module(f"{origin}.{alias.name}")]
    first = node.lineno - 1
    indent = lines[first][: node.col_offset]
    if indent.strip() or any(alias.name == "*" for alias in node.names):
        raise ValueError(f"{module}, line {node.lineno}: write one import on a line of its own, without *")
    if not modules:
        lines[first] = indent + _FROM.sub(f"from .{flat_name(origin)} import", lines[first][node.col_offset :], count=1)
        return [origin]
    if len(modules) < len(node.names):
        raise ValueError(f"{module}, line {node.lineno}: import modules and what is in them by two statements")
    needed = [f"{origin}.{alias.name}" for alias in modules]
    written = []
    for alias, name in zip(modules, needed, strict=True):
        # the first line is the form that transformers looks for; the second binds the module
        written.append(f"{indent}from .{flat_name(name)} import __name__ as _\n")
        written.append(f"{indent}from . import {flat_name(name)} as {alias.asname or alias.name}\n")
    _replace(lines, node, written)
    return needed


def _guard(lines: list[str], node: ast.stmt) -> None:
    """Put an import of Triton where transformers does not count it among what a checkpoint cannot do without: files of
    kernels are imported on a GPU alone."""
    indent = lines[node.lineno - 1][: node.col_offset]
    held = ["    " + line for line in lines[node.lineno - 1 : node.end_lineno]]
    _replace(lines, node, [f"{indent}try:\n", *held, f"{indent}finally:\n", f"{indent}    pass\n"])


def _replace(lines: list[str], node: ast.stmt, written: list[str]) -> None:
    """Put ``written`` in the place of a statement, and leave the numbers of the lines after it as they are."""
    lines[node.lineno - 1 : node.end_lineno] = ["".join(written), *[""] * (node.end_lineno - node.lineno)]


def _model_type(parsed: ast.Module, name: str) -> str | None:
    for node in parsed.body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            for one in node.body:
                if isinstance(one, ast.Assign) and getattr(one.targets[0], "id", None) == "model_type":
                    return ast.literal_eval(one.value)
    return None
