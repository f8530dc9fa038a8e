"""From the name of a model to a directory: ``bundled:NAME``, a directory, or a hub id.

A hub's files are kept in huggingface_hub's own cache (HF_HOME); its token is HF_TOKEN's, or that of ``hf auth login``;
HF_HUB_OFFLINE, or ``offline``, keeps to the cache. No model code of a repository is ever run (see
:func:`surgery.hosts.adapter_for`); a tokenizer's only where it is trusted (:mod:`surgery.checkpoint.remote_code`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from surgery.checkpoint.jsonfile import read_object
from surgery.checkpoint.layout import CONFIG
from surgery.checkpoint.pickles import origin, pickles_are_allowed, unpickled
from surgery.checkpoint.remote_code import trusted
from surgery.errors import UsageError
from surgery.hosts.registry import adapter_for
from surgery.places import is_hub_id, near, on_machine

# weights, tokenizers, and what else is copied from a base
FILES = (
    "*.json", "*.safetensors", "*.txt", "*.model", "*.model.v*", "*.tiktoken", "*.jinja", "LICENSE*", "LICENCE*",
    "NOTICE*", "COPYING*",
)  # fmt: skip
TWICE = ("consolidated*",)  # Mistral's repositories hold the weights once more, in one file of another layout
PICKLES = ("pytorch_model*.bin",)

# the tokenizer of mamba_ssm's own checkpoints, which hold none: their authors name it where they use them
NEOX = "EleutherAI/gpt-neox-20b"
NEOX_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")
NEOX_VOCABULARY = range(50277, 50289)


def bundled() -> dict[str, Path]:
    """Name -> directory of the models that the package carries."""
    import surgery.bundled

    root = Path(surgery.bundled.__file__).parent
    return {entry.name: entry for entry in sorted(root.iterdir()) if (entry / "config.json").is_file()}


def resolve(model: str, revision: str | None = None, offline: bool | None = None) -> Path:
    """The directory of ``model``, downloaded first if it is a hub id, and converted if its weights are pickled.

    Args:
        model: ``bundled:NAME``, a directory, or a hub id ``owner/name``; an existing directory wins over the hub.
        revision: of the hub, a branch, tag or commit.
        offline: True to look in the local cache only; None leaves it to HF_HUB_OFFLINE.

    Raises:
        UsageError: there is no such model, it is not in the cache and the hub cannot be reached, or its weights are
            pickled and that was not allowed (:func:`surgery.checkpoint.pickles.pickles_allowed`).
    """
    if model.startswith("bundled:"):
        name = model.removeprefix("bundled:")
        known = bundled()
        if name not in known:
            listed = ", ".join(f"bundled:{one}" for one in known) or "none"
            raise UsageError(f"{model}: no such bundled model; there are: {listed}")
        return known[name]
    path = on_machine(model)
    if path is not None and path.is_dir():
        return unpickled(path, model, _ties)
    if path is not None and path.exists():
        if path.suffix in (".yaml", ".yml"):
            raise UsageError(f"{model}: a recipe, not a model; give the directory or hub id that its model: names")
        if (path.parent / CONFIG).is_file():
            raise UsageError(f"{model}: a file of a model; give its directory: {path.parent}")
        raise UsageError(f"{model}: a file; give the checkpoint's directory")
    if not is_hub_id(model):
        raise UsageError(f"{model}: no such directory, and no hub id (owner/name) or bundled:NAME either{near(model)}")
    files = (*FILES, *(("*.py",) if trusted() else ()))
    found = _download(model, revision, offline, files)
    if not any(found.glob("*.safetensors")):
        if not pickles_are_allowed() and not any(found.glob("pytorch_model*.bin")):
            raise UsageError(
                f"{model}: holds no safetensors; if its weights are pickled (pytorch_model.bin) and you trust them, "
                "add --allow-pickle"
            )
        if pickles_are_allowed():
            found = _download(model, revision, offline, (*files, *PICKLES))
    usable = unpickled(found, model, _ties)
    if usable != found:
        _add_tokenizer(usable, offline)
    return usable


def _ties(config: Mapping[str, Any]) -> Mapping[str, str]:
    return adapter_for(config).ties(config)


def on_hub(model: str) -> bool:
    """Whether :func:`resolve` takes the name for a hub id."""
    return is_hub_id(model)


def commit(directory: Path) -> str | None:
    """The commit of a directory that came from a hub, None of any other."""
    source = Path(origin(directory).get("from") or directory)
    return source.name if source.parent.name == "snapshots" else None


def takes_neox(config: Mapping[str, Any]) -> bool:
    """Whether a configuration is one of mamba_ssm's own models that were trained with NEOX's tokenizer."""
    return "ssm_cfg" in config and config.get("vocab_size") in NEOX_VOCABULARY


def _download(model: str, revision: str | None, offline: bool | None, patterns: tuple[str, ...]) -> Path:
    import huggingface_hub
    from huggingface_hub import constants, errors

    def ask(local: bool) -> Path:
        found = huggingface_hub.snapshot_download(
            model,
            revision=revision,
            allow_patterns=list(patterns),
            ignore_patterns=list(TWICE),
            local_files_only=local,
        )
        return Path(found)

    of = f" (revision {revision!r})" if revision else ""
    local = bool(offline) or constants.HF_HUB_OFFLINE
    try:
        return ask(local)
    except errors.RevisionNotFoundError:
        raise UsageError(f"{model}: the hub has no revision {revision!r} of it") from None
    except errors.GatedRepoError:
        raise UsageError(
            f"{model}: access is restricted: accept its terms at https://huggingface.co/{model}, then log in with "
            "`hf auth login` or set HF_TOKEN"
        ) from None
    except errors.RepositoryNotFoundError:
        raise UsageError(
            f"{model}: no such directory, and no such model on the hub; if it is private, log in with `hf auth login` "
            "or set HF_TOKEN"
        ) from None
    except Exception as error:  # no network shows as any of several libraries' errors
        if not local:
            with contextlib.suppress(Exception):  # some releases ask for a list of files first, even of a cached commit
                return ask(True)
        reason = "offline" if local else type(error).__name__
        raise UsageError(
            f"{model}{of}: not in the local cache, and the hub cannot be reached ({reason}); give a directory instead"
        ) from None


def _add_tokenizer(directory: Path, offline: bool | None) -> None:
    """Give a converted checkpoint of mamba_ssm's own its tokenizer, where it can be had."""
    from surgery.checkpoint.files import copy_file

    config = read_object(directory / CONFIG)
    if (directory / "tokenizer.json").is_file() or not takes_neox(config):
        return
    try:
        source = _download(NEOX, None, offline, NEOX_FILES)
    except UsageError:
        return  # whoever needs a tokenizer says that there is none
    for name in NEOX_FILES:
        if (source / name).is_file() and not (directory / name).is_file():
            copy_file(source / name, directory / name)
