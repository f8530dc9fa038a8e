"""The operation where memory is what limits: a small host trained to recall, operated on, adapted beside its control.

A two-layer host learns associative recall (:mod:`surgery.experiments.associative_recall`). Then all of its layers take
another memory, as a recipe says, and a ``next-token`` phase trains all of it; the control is the same host with its own
rule, the same sequences, steps and trained parameters. Every host and every adaptation is a job with a result file of
its own, so that several processes can share a study, and a study that was stopped can go on.

What keeps the comparison fair: the control runs at several learning rates and the best by validation counts, an arm
runs at the one rate that it names; every seed has training, validation and test sequences of its own; a host counts if
it reached 0.7 and gained less than 0.01 in its last quarter, and the others are counted; every arm is also
read at 1.5 times the pairs, and adapted for twice the steps.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from surgery.checkpoint.locking import hold
from surgery.checkpoint.staging import write_atomic
from surgery.errors import JobError, UsageError
from surgery.experiments.operation_results import summarise
from surgery.experiments.recall_training import training
from surgery.experiments.study import Job, Study, counts, read
from surgery.results import json_text, strict

STUDY = "study.json"  # what the results of a folder have in common
Following = Callable[[], Job | None]
Finish = Callable[[Job, dict[str, Any] | None], None]


def run(
    study: Study,
    folder: Path,
    *,
    device: str = "cpu",
    jobs: int = 1,
    summary: bool = False,
    progress: Callable[[int, int, str], Any] | None = None,
) -> dict[str, Any]:
    """Run what ``folder`` does not hold yet, and summarise. Several processes may run on the same folder at once.

    Args:
        jobs: how many run at once: in processes on a CPU, on streams of this process on a GPU.
        summary: run nothing, and summarise what is there.
        progress: called with jobs done, all jobs, and the last one's line.

    Returns:
        :func:`surgery.experiments.operation_results.summarise`.

    Raises:
        UsageError: the folder holds results of other settings.
        JobError: a job failed; what was finished stays.
    """
    if summary and not (folder / STUDY).is_file():
        raise UsageError(f"--output {folder}: holds no {STUDY}, so no results of this command")
    _claim(study, folder)
    if summary:
        return summarise(study, folder)
    ready = deque(Job(seed) for seed in study.seeds)
    done, total = 0, len(study.seeds) * (1 + len(study.adaptations(0)))

    def finish(job: Job, result: dict[str, Any] | None) -> None:
        nonlocal done, total
        if result is None:  # another process is at it
            ready.append(job)
            time.sleep(1.0)
            return
        done += 1
        line = f"{job.name}: {result['test']:.4f}"
        if job.arm is None:
            if study.every_host or counts(result):
                ready.extend(study.adaptations(job.seed))
            else:
                total -= len(study.adaptations(job.seed))
                line += ", does not count"
        if progress is not None:
            progress(done, total, line + (", not finite" if "not_finite" in result else ""))

    def following() -> Job | None:
        """The next job that has no result yet."""
        while ready:
            job = ready.popleft()
            known = read(folder, job)
            if known is None:
                return job
            finish(job, known)
        return None

    if device == "cuda":
        _on_streams(study, folder, following, finish, jobs)
    elif jobs > 1:
        _in_processes(study, folder, following, finish, jobs)
    else:
        while (job := following()) is not None:
            finish(job, work(study, job, str(folder), device))
    return summarise(study, folder)


def _in_processes(study: Study, folder: Path, following: Following, finish: Finish, jobs: int) -> None:
    """Run jobs in processes of a CPU."""
    waiting: dict[Future, Job] = {}
    threads = max(1, (os.cpu_count() or 1) // jobs)
    pool = ProcessPoolExecutor(jobs, get_context("spawn"), _start_worker, (threads,))
    try:
        while True:
            while len(waiting) < jobs and (job := following()) is not None:
                waiting[pool.submit(work, study, job, str(folder), "cpu")] = job
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


def _on_streams(study: Study, folder: Path, following: Following, finish: Finish, jobs: int) -> None:
    """Run jobs on streams of one process: small kernels of several then run at once, which processes would not."""
    import torch

    running: list[tuple[Job, Any, torch.cuda.Stream]] = []
    while True:
        while len(running) < jobs and (job := following()) is not None:
            running.append((job, working(study, job, folder, "cuda"), torch.cuda.Stream()))
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


def work(study: Study, job: Job, folder: str, device: str) -> dict[str, Any] | None:
    """Run one job to its end; see :func:`working`."""
    steps = working(study, job, Path(folder), device)
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return end.value


def working(study: Study, job: Job, place: Path, device: str) -> Generator[None, None, dict[str, Any] | None]:
    """Run one job and write its result, complete or not at all; None where another process is at it. Yields as
    :func:`surgery.experiments.recall_training.training` does."""
    with _only_one(place / f".{job.name}.lock") as mine:
        if not mine:
            return None
        result = read(place, job)
        if result is None:
            result = strict((yield from training(study, job, place, device)))
            if job.arm is not None:
                result["arm"] = strict(asdict(job.arm))
            write_atomic(place / f"{job.name}.json", json_text(result) + "\n")
        return result


def _claim(study: Study, folder: Path) -> None:
    """Make ``folder`` the study's, or refuse one that is another's."""
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"--output {folder}: is a file; name a folder")
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / STUDY
    fixed = strict(study.fixed())
    if not path.exists():
        if any(entry.name[0] != "." for entry in folder.iterdir()):
            raise UsageError(f"--output {folder}: holds files but no {STUDY}; name a new or empty folder")
        write_atomic(path, json_text(fixed) + "\n")
    try:
        known = dict(json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, TypeError, RecursionError):
        raise UsageError(f"{path}: does not say what the results beside it are of; name a new --output") from None
    for key, value in fixed.items():
        if known.get(key) != value:
            raise UsageError(f"--output {folder}: holds results with {key} {known.get(key)}, not {value}; name another")


def _start_worker(threads: int) -> None:
    import torch

    torch.set_num_threads(threads)


@contextlib.contextmanager
def _only_one(path: Path) -> Iterator[bool]:
    """Hold the lock ``path`` if no other process does; whether it is held. A process that ends lets go of it."""
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(hold(path, path.name))
        except UsageError:
            yield False
            return
        yield True
