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

import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from surgery.errors import UsageError
from surgery.experiments.jobs import SETTINGS, Steps, claim, ended, kept, run_jobs
from surgery.experiments.operation_results import summarise
from surgery.experiments.recall_training import training
from surgery.experiments.study import Job, Study, counts, read
from surgery.results import strict


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
    if summary and not (folder / SETTINGS).is_file():
        raise UsageError(f"--output {folder}: holds no {SETTINGS}, so no results of this command")
    claim(folder, study.fixed())
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

    run_jobs(partial(working, study, folder), following, finish, device=device, jobs=jobs)
    return summarise(study, folder)


def work(study: Study, job: Job, folder: str, device: str) -> dict[str, Any] | None:
    """Run one job to its end; see :func:`working`."""
    return ended(working(study, Path(folder), job, device))


def working(study: Study, place: Path, job: Job, device: str) -> Steps:
    """Run one job and write its result, complete or not at all; None where another process is at it. Yields as
    :func:`surgery.experiments.recall_training.training` does."""

    def steps() -> Steps:
        result = yield from training(study, job, place, device)
        return result if job.arm is None else {**result, "arm": strict(asdict(job.arm))}

    return kept(place / f"{job.name}.json", lambda: read(place, job), steps)
