"""Write beside, then rename: an output directory is either absent or complete."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import shutil
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from surgery.checkpoint.locking import LOCK, hold, is_locked, neighbour, refuse_if_held
from surgery.errors import JobError, UsageError

STAGING = ".partial-"
ABANDONED = 86_400.0  # seconds without a change after which another machine's staging directory is taken for abandoned
NAME_BYTES = 255  # of one file's name, on every common file system
TORCH_SAVE_FAILED = ("PytorchStreamWriter failed writing", "unexpected pos", "iostream error")


def check_output(directory: Path) -> Path:
    """The resolved output directory, which is free to be written.

    Raises:
        UsageError: it exists and is not an empty directory, or cannot be made.
    """
    check_name(Path(directory), "--output")
    directory = Path(directory).expanduser().resolve()
    if directory.exists() and not directory.is_dir():
        raise UsageError(f"--output {directory}: is a file\n  name a directory that does not exist yet")
    if directory.is_dir() and any(directory.iterdir()):
        raise UsageError(
            f"--output {directory}: is not empty, and nothing is overwritten\n  name a new directory, or empty this one"
        )
    parent = existing_parent(directory)
    if not parent.is_dir():
        raise UsageError(f"--output {directory}: {parent} is a file\n  name another directory")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise UsageError(f"--output {directory}: {parent} cannot be written\n  name another directory")
    return directory


def check_file(path: Path, option: str) -> None:
    """Refuse a place where no file can be written, before any work.

    Args:
        option: the command line's that named it, for the message.

    Raises:
        UsageError: its directory is not there or cannot be written, or it is a directory itself.
    """
    path = Path(path)
    check_name(path, option)
    if not path.parent.is_dir():
        raise UsageError(f"{option} {path}: the directory {path.parent} does not exist; create it first")
    if path.is_dir():
        raise UsageError(f"{option} {path}: is a directory; name a file")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise UsageError(f"{option} {path}: cannot be written; name another place")


def check_name(path: Path, option: str) -> None:
    """Refuse a name that no file system takes.

    Raises:
        UsageError: naming the option.
    """
    longest = max((len(os.fsencode(part)) for part in path.parts), default=0)
    if longest > NAME_BYTES:
        shown = f"{str(path)[:40]}..."
        raise UsageError(f"{option} {shown}: a name of {longest} bytes; the longest that a disk takes is {NAME_BYTES}")


def check_space(directory: Path, needed: int) -> None:
    """Refuse to start a write of ``needed`` bytes that the disk cannot take.

    Raises:
        JobError: with what is needed and what is free.
    """
    free = shutil.disk_usage(existing_parent(directory)).free
    if free < needed:
        raise no_space(directory, needed, free)


def no_space(directory: Path, needed: int | None = None, free: int | None = None) -> JobError:
    """The error for a full disk."""
    from surgery.sizes import format_bytes

    figures = f": {format_bytes(needed)} needed, {format_bytes(free or 0)} free" if needed is not None else ""
    return JobError(f"{directory}: no space left on the disk{figures}\n  free some, or name a directory elsewhere")


def existing_parent(directory: Path) -> Path:
    """The nearest directory above that is there."""
    parent = directory.parent
    while not parent.exists():
        parent = parent.parent
    return parent


@contextlib.contextmanager
def claimed(output: Path, *, wait: bool = False) -> Iterator[Path]:
    """Hold an output directory for this process, from before the work until it is written.

    Args:
        output: absent or empty; see :func:`check_output`.
        wait: wait for a process that writes it now, instead of refusing.

    Yields:
        The resolved directory.

    Raises:
        UsageError: it is not free, or another process is about to write it.
    """
    final = check_output(output)
    with _parents(final), _terminate_as_exception(), hold(neighbour(final, LOCK), f"--output {final}", wait=wait):
        yield check_output(final)  # whoever held it until now may have written it


@contextlib.contextmanager
def claimed_run(run: Path) -> Iterator[None]:
    """Hold a run directory for this process; makes it where it is not there, and removes it again if it stays empty.

    The lock lies inside, because the directory above need not be this user's.

    Raises:
        UsageError: another process holds it or writes a checkpoint of that name, or its place is a file.
    """
    resolved = Path(run).expanduser().resolve()
    parent = resolved if resolved.exists() else existing_parent(resolved)
    if not parent.is_dir():
        raise UsageError(f"--run {run}: {parent} is a file; name a directory")
    refuse_if_held(neighbour(resolved, LOCK), f"--run {run}")
    with _parents(resolved / LOCK), hold(resolved / LOCK, f"--run {run}"):
        yield


@contextlib.contextmanager
def _parents(path: Path) -> Iterator[None]:
    """The directories above ``path`` are there within the block; those that were made and stay empty go again."""
    made = _make_parents(path.parent)
    try:
        yield
    finally:
        for directory in reversed(made):
            with contextlib.suppress(OSError):
                directory.rmdir()


@contextlib.contextmanager
def staged_directory(final: Path, needed: int = 0, *, wait: bool = False) -> Iterator[Path]:
    """A new directory beside ``final``, renamed to it when the block ends well and removed otherwise.

    Interrupts and SIGTERM count as failures. A directory that a killed process left behind is removed by the next call
    with the same ``final``. The output is held meanwhile (:func:`claimed`).

    Args:
        final: absent or empty; see :func:`check_output`.
        needed: bytes about to be written, checked against the free space first.
        wait: wait for a process that writes it now, instead of refusing.

    Raises:
        UsageError: ``final`` is not free.
        JobError: the disk is full, or refuses a file.
    """
    check_space(check_output(final), needed)
    with claimed(final, wait=wait) as final:
        _remove_abandoned(final)
        with _staging(final) as staging:
            yield staging


@contextlib.contextmanager
def _staging(final: Path) -> Iterator[Path]:
    staging = Path(tempfile.mkdtemp(prefix=neighbour(final, f"{STAGING}{_machine()}-").name, dir=final.parent))
    staging.chmod(0o777 & ~_umask())
    try:
        yield staging
        _sync_tree(staging)
        check_output(final)  # somebody may have filled it meanwhile
        os.rename(staging, final)
        _sync_directory(final.parent)
    except BaseException as error:
        shutil.rmtree(staging, ignore_errors=True)
        if is_full(error):
            raise no_space(final) from error
        if isinstance(error, OSError) and error.filename is None:  # of an open file: a quota, a broken disk
            raise JobError(f"{final}: cannot be written or what it is made of read: {error.strerror}") from error
        raise


def write_atomic(path: Path, data: str | bytes) -> None:
    """Replace one file in a single step: readers see the old or the new content, never a part.

    Raises:
        JobError: the disk is full.
    """
    payload = data.encode("utf-8", "backslashreplace") if isinstance(data, str) else data
    handle, name = tempfile.mkstemp(prefix=neighbour(path, STAGING).name, dir=path.parent)
    temporary = Path(name)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(payload)
            file.flush()
            os.fsync(file.fileno())
        temporary.chmod(0o666 & ~_umask())
        os.replace(temporary, path)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        if is_full(error):
            raise no_space(path) from error
        raise
    _sync_directory(path.parent)


def write_result(path: Path, data: str | bytes) -> None:
    """Write a file that the user named: in one step where it is an ordinary one, and through where it is a pipe or a
    device.

    Raises:
        JobError: the disk is full. What was there before is then still there.
    """
    path = Path(path)
    target = path.resolve()  # through a symbolic link, which stays
    ordinary = not target.exists() or target.is_file()
    if ordinary and not str(path).startswith(("/dev/", "/proc/")) and os.access(target.parent, os.W_OK):
        write_atomic(target, data)
        return
    with disk_errors_at(path):
        path.write_bytes(data.encode("utf-8", "backslashreplace") if isinstance(data, str) else data)


@contextlib.contextmanager
def disk_errors_at(place: Path) -> Iterator[None]:
    """Name the place in a full disk's error, which the system does not do for a file that is open.

    Raises:
        JobError: the disk is full.
    """
    try:
        yield
    except Exception as error:
        if is_full(error):
            raise no_space(place) from error
        raise


def is_full(error: BaseException) -> bool:
    """Whether an error says that the disk or a quota is full."""
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return True
    # safetensors reports the system's error as text; torch.save only that its file came out too short
    text = str(error)
    if type(error).__name__ == "SafetensorError":
        return "os error 28" in text or "os error 122" in text
    return isinstance(error, RuntimeError) and any(words in text for words in TORCH_SAVE_FAILED)


def _make_parents(directory: Path) -> list[Path]:
    made = []
    for parent in [*reversed(directory.parents), directory]:
        if not parent.exists():
            parent.mkdir()
            made.append(parent)
    return made


def _umask() -> int:
    current = os.umask(0o077)
    os.umask(current)
    return current


def _remove_abandoned(final: Path) -> None:
    """Remove what killed processes left of the same output, which this process holds alone.

    Another machine's goes a day after its last change, since some file systems keep locks on each machine alone; where
    there are no locks at all, nothing is removed.
    """
    if not is_locked(neighbour(final, LOCK)):
        return
    any_machine, mine = neighbour(final, STAGING).name, neighbour(final, f"{STAGING}{_machine()}-").name
    for staging in [path for path in final.parent.iterdir() if path.name.startswith(any_machine)]:
        if staging.name.startswith(mine) or time.time() - _last_change(staging) > ABANDONED:
            shutil.rmtree(staging, ignore_errors=True)


def _machine() -> str:
    return hashlib.sha256(socket.gethostname().encode()).hexdigest()[:8]


def _last_change(directory: Path) -> float:
    try:
        return max(path.stat().st_mtime for path in (directory, *directory.rglob("*")))
    except OSError:
        return time.time()


@contextlib.contextmanager
def _terminate_as_exception() -> Iterator[None]:
    """Let SIGTERM unwind the stack, so that the staging directory goes too."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(signum: int, frame: object) -> None:
        raise SystemExit(128 + signum)

    previous = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def _sync_tree(directory: Path) -> None:
    for path in directory.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
    _sync_directory(directory)


def _sync_directory(directory: Path) -> None:
    with contextlib.suppress(OSError):  # some file systems refuse to sync a directory
        handle = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
