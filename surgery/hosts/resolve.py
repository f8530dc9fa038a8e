"""From the name of a model to a directory: ``bundled:NAME``, a directory, or a hub id."""

from __future__ import annotations

import re
from pathlib import Path

from surgery.errors import UsageError

FILES = ("*.json", "*.safetensors", "*.txt", "*.model", "*.jinja")  # weights, configurations, tokenizers
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


def bundled() -> dict[str, Path]:
    """Name -> directory of the models that the package carries."""
    import surgery.bundled

    root = Path(surgery.bundled.__file__).parent
    return {entry.name: entry for entry in sorted(root.iterdir()) if (entry / "config.json").is_file()}


def resolve(model: str, revision: str | None = None, offline: bool | None = None) -> Path:
    """The directory of ``model``, downloaded first if it is a hub id.

    Args:
        model: ``bundled:NAME``, a directory, or a hub id ``owner/name``; an existing directory wins over the hub.
        revision: of the hub, a branch, tag or commit.
        offline: True to look in the local cache only; None leaves it to HF_HUB_OFFLINE.

    Raises:
        UsageError: there is no such model, or it is not in the cache and the hub cannot be reached.
    """
    if model.startswith("bundled:"):
        name = model.removeprefix("bundled:")
        known = bundled()
        if name not in known:
            listed = ", ".join(f"bundled:{one}" for one in known) or "none"
            raise UsageError(f"{model}: no such bundled model; there are: {listed}")
        return known[name]
    path = Path(model).expanduser()
    if path.is_dir():
        return path
    if path.exists():
        raise UsageError(f"{model}: a file; give the checkpoint's directory")
    if not HUB_ID.fullmatch(model):
        raise UsageError(f"{model}: no such directory, and no hub id (owner/name) or bundled:NAME either")
    return _download(model, revision, offline)


def _download(model: str, revision: str | None, offline: bool | None) -> Path:
    import huggingface_hub
    from huggingface_hub import errors

    try:
        return Path(
            huggingface_hub.snapshot_download(
                model, revision=revision, allow_patterns=list(FILES), local_files_only=bool(offline)
            )
        )
    except errors.RevisionNotFoundError:
        raise UsageError(f"{model}: the hub has no revision {revision!r} of it") from None
    except errors.GatedRepoError:
        raise UsageError(f"{model}: access is restricted; accept its terms on the hub and log in") from None
    except errors.RepositoryNotFoundError:
        raise UsageError(f"{model}: no such directory, and no such model on the hub (or it is private)") from None
    except Exception as error:  # no network shows as any of several libraries' errors
        name = type(error).__name__
        raise UsageError(
            f"{model}: not in the local cache, and the hub cannot be reached ({name}); give a directory instead"
        ) from None
