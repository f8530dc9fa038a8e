"""Run an experiment's jobs: one after another, in processes of a CPU, or on streams of a GPU.

A job is anything with a ``name``; it is worked on by a generator that yields whenever another may queue its work on the
device, and that returns the job's result. Each result is a file of its own, so that several processes can share a
folder and an experiment that was stopped can go on.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from surgery.checkpoint.locking import hold
from surgery.checkpoint.staging import write_atomic
from surgery.errors import JobError, UsageError
from surgery.results import json_text, strict

SETTINGS = "study.json"  # what the results of a folder have in common
Result = dict[str, Any]
Steps = Generator[None, None, Result | None]
Working = Callable[[Any, str], Steps]  # of a job and a device; picklable
Following = Callable[[], Any]  # the next job, None if there is none now
Finish = Callable[[Any, Result | None], None]
Progress = Callable[[int, int, str], Any]  # jobs done, all jobs, the last one's line


def run_jobs(working: Working, following: Following, finish: Finish, *, device: str, jobs: int) -> None:
    """Run jobs until ``following`` has none and all are finished.

    Args:
        jobs: how many run at once: in processes on a CPU, on streams of this process on a GPU.

    Raises:
        JobError: a job failed; what was finished stays.
    """
    if device == "cuda":
        _on_streams(working, following, finish, jobs)
    elif jobs > 1:
        _in_processes(working, following, finish, jobs)
    else:
        while (job := following()) is not None:
            finish(job, ended(working(job, device)))


def run_list(
    listed: Iterable[Any],
    working: Working,
    folder: Path,
    line: Callable[[Result], str],
    *,
    device: str,
    jobs: int,
    progress: Progress | None = None,
) -> None:
    """Run those of the jobs listed that ``folder`` holds no result of.

    Args:
        line: a result's line, for ``progress``.

    Raises:
        UsageError, JobError: as :func:`read_result`, :func:`run_jobs`.
    """
    ready = deque(listed)
    done, total = 0, len(ready)

    def finish(job: Any, result: Result | None) -> None:
        nonlocal done
        if result is None:  # another process is at it
            ready.append(job)
            time.sleep(1.0)
            return
        done += 1
        if progress is not None:
            progress(done, total, f"{job.name}: {line(result)}")

    def following() -> Any:
        while ready:
            job = ready.popleft()
            known = read_result(folder / f"{job.name}.json")
            if known is None:
                return job
            finish(job, known)
        return None

    run_jobs(working, following, finish, device=device, jobs=jobs)


def ended(steps: Steps) -> Result | None:
    """Run a job to its end."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return end.value


def kept(path: Path, read: Callable[[], Result | None], steps: Callable[[], Steps]) -> Steps:
    """Work on a job whose result belongs to ``path``, complete or not at all; None where another process is at it.

    Args:
        read: the result there is, None if there is none yet. steps: the work, where it has to be done.
    """
    with only_one(path.with_name(f".{path.stem}.lock")) as mine:
        if not mine:
            return None
        result = read()
        if result is None:
            result = strict((yield from steps()))
            write_atomic(path, json_text(result) + "\n")
        return result


def read_result(path: Path, keys: Iterable[str] = ()) -> Result | None:
    """Return a job's result, None if there is none yet.

    Raises:
        UsageError: the file is no result, or lacks one of ``keys``.
    """
    if not path.is_file():
        return None
    try:
        result = json.loads(path.read_text(encoding="utf-8"))
        whole = {"job", *keys} <= result.keys()
    except (ValueError, AttributeError, RecursionError):
        whole = False
    if not whole:
        raise UsageError(f"{path}: is no result of this command; remove it, and its job runs again")
    return result


def claim(folder: Path, fixed: Result) -> None:
    """Make ``folder`` that of the settings ``fixed``, or refuse one that is another's.

    Raises:
        UsageError: naming the setting that differs, or a folder that holds other files.
    """
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"--output {folder}: is a file; name a folder")
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / SETTINGS
    fixed = strict(fixed)
    if not path.exists():
        if any(entry.name[0] != "." for entry in folder.iterdir()):
            raise UsageError(f"--output {folder}: holds files but no {SETTINGS}; name a new or empty folder")
        write_atomic(path, json_text(fixed) + "\n")
    try:
        known = dict(json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, TypeError, RecursionError):
        raise UsageError(f"{path}: does not say what the results beside it are of; name a new --output") from None
    for key, value in fixed.items():
        if known.get(key) != value:
            raise UsageError(f"--output {folder}: holds results with {key} {known.get(key)}, not {value}; name another")


@contextlib.contextmanager
def only_one(path: Path) -> Iterator[bool]:
    """Hold the lock ``path`` if no other process does; whether it is held. A process that ends lets go of it."""
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(hold(path, path.name))
        except UsageError:
            yield False
            return
        yield True


def _in_processes(working: Working, following: Following, finish: Finish, jobs: int) -> None:
    """Run jobs in processes of a CPU."""
    waiting: dict[Future, Any] = {}
    threads = max(1, (os.cpu_count() or 1) // jobs)
    pool = ProcessPoolExecutor(jobs, get_context("spawn"), _start_worker, (threads,))
    try:
        while True:
            while len(waiting) < jobs and (job := following()) is not None:
                waiting[pool.submit(_work, working, job)] = job
            if not waiting:
                return
            for future in wait(waiting, return_when=FIRST_COMPLETED).done:
                finish(waiting.pop(future), future.result())
    except BrokenProcessPool:
        raise JobError(
            "a worker process ended without a word, for want of memory perhaps\n"
            "  run the same command again, with fewer --jobs: finished jobs are kept"
        ) from None
    finally:
        pool.shutdown(cancel_futures=True)


def _work(working: Working, job: Any) -> Result | None:
    return ended(working(job, "cpu"))


def _start_worker(threads: int) -> None:
    import torch

    torch.set_num_threads(threads)


def _on_streams(working: Working, following: Following, finish: Finish, jobs: int) -> None:
    """Run jobs on streams of one process: small kernels of several then run at once, which processes would not."""
    import torch

    running: list[tuple[Any, Steps, torch.cuda.Stream]] = []
    while True:
        while len(running) < jobs and (job := following()) is not None:
            running.append((job, working(job, "cuda"), torch.cuda.Stream()))
        if not running:
            return
        for one in list(running):
            job, steps, stream = one
            try:
                with torch.cuda.stream(stream):
                    next(steps)
            except StopIteration as end:
                running.remove(one)
                finish(job, end.value)
