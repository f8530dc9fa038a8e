"""Hold a directory for one process: an advisory lock of the operating system, which ends with its process.

The lock is ``flock`` on a small hidden file that says who holds it. However a process ends, the system frees its lock,
so a file that stands there alone holds nothing up. Children that a process forks do not keep it.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import logging
import os
import shlex
import socket
import sys
import threading
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from surgery.errors import UsageError

try:
    import fcntl
except ImportError:  # not on Windows
    fcntl = None

LOCK = ".lock"
LONGEST = 180  # bytes of a directory's name that its hidden neighbours keep, of the 255 that a name may have
_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL, errno.EBADF}
_held: dict[tuple[Path, int], tuple[int, bool]] = {}  # lock file and thread -> open file, and whether it is locked
_state = {"told": False, "forks": False}


def neighbour(directory: Path, ending: str) -> Path:
    """The hidden place beside ``directory`` that ends in ``ending``; a long name is cut and marked by its hash."""
    name, raw = directory.name, os.fsencode(directory.name)
    if len(raw) > LONGEST:
        name = f"{raw[:LONGEST].decode('utf-8', 'ignore')}-{hashlib.sha256(raw).hexdigest()[:12]}"
    return directory.parent / f".{name}{ending}"


@contextlib.contextmanager
def hold(file: Path, what: str, *, wait: bool = False) -> Iterator[None]:
    """Hold the lock ``file`` for this process, and remove the file at the end.

    A thread that holds it already may hold it again. Where the file system has no locks, a warning says so once and
    nothing is held.

    Args:
        file: the lock file; its directory is there.
        what: how the message calls what is held, as in ``--output DIR``.
        wait: wait for another holder instead of refusing.

    Raises:
        UsageError: another process holds it; the message says which.
    """
    key = (file, threading.get_ident())
    if key in _held:
        yield
        return
    handle, locked = _take(file, what, wait)
    _held[key] = (handle, locked)
    try:
        yield
    finally:
        if _held.pop(key, None) is not None:  # a forked child has let go of it
            with contextlib.suppress(OSError):  # while it is locked: whoever comes next makes a new file
                file.unlink()
            os.close(handle)


def refuse_if_held(file: Path, what: str) -> None:
    """Raise where another process holds the lock ``file``, without taking it.

    Raises:
        UsageError: as :func:`hold`.
    """
    if fcntl is None:
        return
    try:
        handle = os.open(file, os.O_RDWR)
    except OSError:
        return
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        raise _refusal(handle, what) from None
    except OSError:
        return
    finally:
        os.close(handle)


def is_locked(file: Path) -> bool:
    """Whether this thread holds the lock ``file``, and the file system keeps others from it."""
    return _held.get((file, threading.get_ident()), (0, False))[1]


def _take(file: Path, what: str, wait: bool) -> tuple[int, bool]:
    if not _state["forks"] and hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=_let_go)
        _state["forks"] = True
    while True:
        handle = os.open(file, os.O_CREAT | os.O_RDWR, 0o666)
        try:
            locked = _lock(handle, file, what, wait)
            if not locked:
                break
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(handle), os.stat(file)):
                    break
        except BaseException:
            os.close(handle)
            raise
        os.close(handle)  # the former holder removed the file between the two calls
    os.ftruncate(handle, 0)
    os.pwrite(handle, (json.dumps(owner()) + "\n").encode(), 0)
    return handle, locked


def _lock(handle: int, file: Path, what: str, wait: bool) -> bool:
    """Lock an open file; False where the file system has no locks."""
    try:
        if fcntl is None:
            raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
        fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        raise _refusal(handle, what) from None
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        if not _state["told"]:
            _state["told"] = True
            logging.getLogger("surgery").warning(
                "%s: this file system has no locks (%s), so nothing keeps two processes apart: start one at a time",
                file.parent,
                error.strerror,
            )
        return False
    return True


def owner() -> dict[str, Any]:
    """Who this process is, as it stands in a lock file."""
    name = Path(sys.argv[0]).name if sys.argv and sys.argv[0] else "python"
    return {
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "since": datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S UTC"),
        "command": shlex.join([name, *sys.argv[1:]])[:300],
    }


def _refusal(handle: int, what: str) -> UsageError:
    who = read_owner(handle)
    if who:
        shown = f"pid {who.get('pid')} on {who.get('host')} since {who.get('since')}: {who.get('command')}"
    else:
        shown = "it has only just begun"
    return UsageError(
        f"{what}: another process holds it ({shown})\n"
        "  nothing was changed: wait until it has ended, end it, or name another directory"
    )


def read_owner(handle: int) -> dict[str, Any]:
    """The owner that an open lock file names; empty where it names none (yet)."""
    try:
        found = json.loads(os.pread(handle, 4096, 0))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _let_go() -> None:
    """In a forked child: close the files, so that the parent's end frees its locks."""
    for handle, _ in _held.values():
        with contextlib.suppress(OSError):
            os.close(handle)
    _held.clear()
