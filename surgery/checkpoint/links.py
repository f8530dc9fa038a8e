"""Refuses symbolic links that lead out of a base: what they point at would be read, and copied into what is written."""

from __future__ import annotations

from pathlib import Path

from surgery.errors import UsageError

FOLDERS = ("additional_chat_templates",)  # what is read of a base lies beside its config.json, or in these


def inside(directory: Path) -> list[Path]:
    """The places where the files of a downloaded directory may lie: itself, and of a snapshot in a hub's cache the
    ``blobs`` of the same repository."""
    resolved = directory.resolve()
    blobs = [resolved.parent.parent / "blobs"] if resolved.parent.name == "snapshots" else []
    return [resolved, *blobs]


def check_links(directory: Path) -> None:
    """Check every file of a checkpoint directory: that it is one, and where it leads if it is a link.

    A link may lead to another file of the directory, and in a hub's cache from ``snapshots/REVISION/FILE`` to
    ``blobs/HASH`` of the same repository. The directory itself may be a link: the user named it.

    Raises:
        UsageError: a link leads elsewhere, or a pipe or a device lies there.
    """
    allowed = inside(directory)
    folders = [directory, *(directory / name for name in FOLDERS if (directory / name).is_dir())]
    for path in (path for folder in folders for path in folder.iterdir()):
        if not path.is_symlink():
            if not path.is_file() and not path.is_dir():  # reading a pipe or a device may never end
                raise UsageError(f"{path}: is neither a file nor a directory\n  remove it")
            continue
        try:
            target = path.resolve()
        except (OSError, RuntimeError):  # a circle
            raise UsageError(f"{path}: is a link in a circle\n  remove it") from None
        if not any(target.is_relative_to(place) for place in allowed):
            raise UsageError(
                f"{path}: is a link that leads out of the checkpoint, to {target}\n"
                "  if you trust it, put a copy of that file in the link's place"
            )
