"""What the papers' trained experiments share: a job per rule, rate and seed, and a table of measured beside printed.

An experiment is a frozen dataclass of its settings. Seeds, rules and rates may be added to a folder's results later;
everything else is the same for all of them. Each rule's learning rate is the one of the best mean validation over the
seeds, and the figures are of other sequences than those.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import mean, stdev
from typing import Any, ClassVar

from surgery.errors import UsageError
from surgery.experiments.jobs import Progress, Result, Steps, claim, kept, read_result, run_list


@dataclass(frozen=True)
class Job:
    """One training."""

    rule: str
    rate: float
    seed: int

    @property
    def name(self) -> str:
        """The name of its file."""
        return f"{self.rule}-{self.rate:g}-seed{self.seed}"


@dataclass(frozen=True)
class Experiment:
    """A trained experiment's settings; each has its own beside these.

    Attributes:
        rules: the memories compared, by name. rates: learning rates, of which each rule's best counts.
        seeds: of parameters and of training sequences.

    Raises:
        UsageError: values that do not fit each other.
    """

    kind: ClassVar[str]  # the command's name
    labels: ClassVar[Mapping[str, str]]  # every rule, and what a table calls it

    rules: tuple[str, ...]
    rates: tuple[float, ...]
    seeds: tuple[int, ...] = (0, 1, 2)

    def __post_init__(self) -> None:
        if not self.rules or len(set(self.rules)) < len(self.rules):
            raise UsageError(f"--rules {','.join(self.rules)}: name each rule once")
        for rule in self.rules:
            if rule not in self.labels:
                raise UsageError(f"--rules {rule}: choose of {', '.join(self.labels)}")
        if not self.rates or not all(0 < rate < 1 for rate in self.rates) or len(set(self.rates)) < len(self.rates):
            raise UsageError(f"--rates {','.join(f'{rate:g}' for rate in self.rates)}: distinct rates between 0 and 1")
        if not self.seeds or min(self.seeds) < 0 or len(set(self.seeds)) < len(self.seeds):
            raise UsageError(f"--seeds {','.join(map(str, self.seeds))}: name each seed once, from 0 on")

    def sizes(self) -> str:
        """Return the sizes in words, which a table names."""
        raise NotImplementedError

    def training(self, job: Job, device: str) -> Steps:
        """Train and measure; a result has ``validation``, the higher the better."""
        raise NotImplementedError

    def rows(self, best: Mapping[str, list[Result]]) -> list[dict[str, Any]]:
        """Return the table's rows from each rule's results at its best rate; see :func:`row`."""
        raise NotImplementedError

    def notes(self) -> list[str]:
        """Return what a reader of the table must know."""
        return []

    def plot(self, result: Result, path: Path) -> None:
        """Draw the paper's figure from what :func:`run` returned."""
        raise NotImplementedError

    def fixed(self) -> Result:
        """Return what a folder's results have in common."""
        free = ("rules", "rates", "seeds")
        return {"kind": self.kind, **{key: value for key, value in asdict(self).items() if key not in free}}

    def jobs(self) -> list[Job]:
        """Return every job."""
        return [Job(rule, rate, seed) for rule in self.rules for rate in self.rates for seed in self.seeds]


def at_least(least: int, **values: int) -> None:
    """Refuse counts below ``least``.

    Raises:
        UsageError: naming the option.
    """
    for name, value in values.items():
        if value < least:
            raise UsageError(f"--{name.replace('_', '-')} {value}: use {least} or more")


def run(
    experiment: Experiment, folder: Path, *, device: str = "cpu", jobs: int = 1, progress: Progress | None = None
) -> Result:
    """Train what ``folder`` holds no result of yet. Several processes may run on the same folder at once.

    Returns:
        ``rows`` of the table, ``sizes``, ``notes``, each rule's best ``rates`` and the ``results`` at them.

    Raises:
        UsageError: the folder holds results of other settings.
        JobError: a job failed; what was finished stays.
    """
    claim(folder, experiment.fixed())
    working = partial(_working, experiment, folder)
    listed = experiment.jobs()
    run_list(listed, working, folder, _line, device=device, jobs=jobs, progress=progress)
    found = {job: read_result(folder / f"{job.name}.json") for job in listed}
    best, rates = {}, {}
    for rule in experiment.rules:
        at = {rate: [found[Job(rule, rate, seed)] for seed in experiment.seeds] for rate in experiment.rates}
        rates[rule] = max(at, key=lambda rate: mean(one["validation"] for one in at[rate]))
        best[rule] = at[rates[rule]]
    notes = list(experiment.notes())
    if failed := [rule for rule, results in best.items() if any("not_finite" in result for result in results)]:
        notes.append(f"Not finite in some seed, which has answered nothing: {', '.join(failed)}.")
    ends = sorted({rates[rule] for rule in rates} & {min(experiment.rates), max(experiment.rates)})
    if len(experiment.rates) > 1 and ends:
        shown = " and ".join(f"{rate:g}" for rate in ends)
        notes.append(f"Some rule's best learning rate lies at an end of those tried ({shown}): try further --rates.")
    return {
        "schema": 1,
        "kind": experiment.kind,
        "settings": asdict(experiment),
        "sizes": experiment.sizes(),
        "rates": rates,
        "rows": experiment.rows(best),
        "notes": notes,
        "results": best,
    }


def row(
    rule: str, reading: str, values: Sequence[float], paper: float | None = None, *, digits: int = 3
) -> dict[str, Any]:
    """Return one row: a figure of a rule over the seeds.

    Args:
        reading: what the figure is of. paper: as it is printed, None if it is not. digits: after the point.
    """
    deviation = stdev(values) if len(values) > 1 else None
    return {
        "rule": rule, "reading": reading, "mean": mean(values), "deviation": deviation, "each": list(values),
        "paper": paper, "digits": digits,
    }  # fmt: skip


def draw_curve(
    axes: Any, places: Sequence[float], line: Sequence[Sequence[float]], colour: str, label: str, style: str = "-"
) -> None:
    """Draw the mean over the seeds at every place, with bars of one standard deviation.

    Args:
        line: the seeds' figures at each of ``places``.
    """
    means, reach = [mean(values) for values in line], [stdev(values) if len(values) > 1 else 0.0 for values in line]
    marks = {"marker": "o", "markersize": 4, "capsize": 3}
    axes.errorbar(places, means, reach, color=colour, linestyle=style, label=label, **marks)


def _working(experiment: Experiment, folder: Path, job: Job, device: str) -> Steps:
    path = folder / f"{job.name}.json"

    def steps() -> Steps:
        result = yield from experiment.training(job, device)
        return {"job": job.name, **asdict(job), **result}

    return kept(path, lambda: read_result(path), steps)


def _line(result: Result) -> str:
    return f"{result['validation']:.4f}" + (", not finite" if "not_finite" in result else "")


