"""Checks a config.json that a stranger wrote: types of its parts, and keys by which transformers would fetch code."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from surgery.errors import UsageError

PARTS = ("text_config", "vision_config", "ssm_cfg", "attn_cfg", "surgery")
# an attention that transformers computes itself; any other name may be a kernel that it fetches from a hub
OWN_ATTENTION = ("eager", "sdpa", "flex_attention")
OWN_EXPERTS = ("eager", "batched_mm", "grouped_mm")
CHOICES = {
    "attn_implementation": OWN_ATTENTION, "_attn_implementation": OWN_ATTENTION,
    "_attn_implementation_internal": OWN_ATTENTION, "experts_implementation": OWN_EXPERTS,
    "_experts_implementation": OWN_EXPERTS, "_experts_implementation_internal": OWN_EXPERTS,
}  # fmt: skip
FETCHING = {
    "use_kernels": "would fetch kernels from a hub",
    "kernel_config": "would fetch kernels from a hub",
    "allow_all_kernels": "would fetch kernels of anyone from a hub",
    "custom_generate": "would fetch code from a hub",
    "custom_pipelines": "names code of its own",
    "transformers_weights": "names other weights",
}
ADAPTER = "adapter_config.json"
_said: set[tuple[str, str]] = set()


def checked(config: dict[str, Any], path: Path) -> dict[str, Any]:
    """Return a configuration without the keys that make transformers fetch code or kernels.

    ``auto_map`` stays, so that a reverted model has it again; nothing that builds a model is given it. One line on
    stderr names each key that is not heeded.

    Raises:
        UsageError: a part that is a mapping, a text or a list everywhere is something else here.
    """
    if (path.parent / ADAPTER).is_file():
        raise UsageError(
            f"{path.parent / ADAPTER}: describes an adapter, whose base transformers would load in this model's place\n"
            "  merge the adapter into its base, or remove this file"
        )
    for key in PARTS:
        if config.get(key) is not None and not isinstance(config[key], dict):
            raise _wrong(path, key, config[key], "a mapping")
    for place, part in (("", config), ("text_config.", config.get("text_config") or {})):
        for key in ("model_type", "torch_dtype", "dtype"):
            if part.get(key) is not None and not isinstance(part[key], str) and not isinstance(part[key], dict):
                raise _wrong(path, place + key, part[key], "a text")
        if isinstance(part.get("model_type"), dict):
            raise _wrong(path, place + "model_type", part["model_type"], "a text")
        names = part.get("architectures")
        if names is not None and not (isinstance(names, list) and all(isinstance(name, str) for name in names)):
            raise _wrong(path, place + "architectures", names, "a list of names")
    if config.get("auto_map") and not str(config.get("model_type")).startswith("surgery_"):  # not of an export's own
        _say(path, "auto_map", "names code that comes with the model", "it is not run")
    return _without(config, path, "")


def _without(config: Mapping[str, Any], path: Path, place: str) -> dict[str, Any]:
    kept = {}
    for key, value in config.items():
        allowed = CHOICES.get(key)
        if key in FETCHING:
            _say(path, place + key, FETCHING[key], "it is left out")
        elif allowed is not None and value is not None and not _plain(value, allowed):
            _say(path, place + key, f"is {str(value)[:60]!r}, which may be fetched from a hub", "it is left out")
        elif isinstance(value, dict) and key != "surgery":
            kept[key] = _without(value, path, f"{place}{key}.")
        else:
            kept[key] = value
    return kept


def _plain(value: Any, allowed: tuple[str, ...]) -> bool:
    if isinstance(value, dict):  # one for each part of a model
        return all(isinstance(one, str) and one in allowed for one in value.values())
    return isinstance(value, str) and value in allowed


def _wrong(path: Path, key: str, value: Any, due: str) -> UsageError:
    kinds = {
        dict: "a mapping", list: "a list", str: "a text", bool: "true or false", int: "a number", float: "a number",
    }  # fmt: skip
    return UsageError(f"{path}: {key} is {kinds.get(type(value), 'empty')}, not {due}\n  download the checkpoint again")


def _say(path: Path, key: str, why: str, what: str) -> None:
    """Once a file and key in a process, however often the file is read."""
    if (str(path), key) not in _said:
        _said.add((str(path), key))
        logging.getLogger("surgery").warning("%s: %s %s; %s", path, key, why, what)
