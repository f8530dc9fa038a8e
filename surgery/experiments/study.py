"""What a study of :mod:`surgery.experiments.operation` consists of: its settings, arms and jobs, and their results."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from surgery.errors import UsageError
from surgery.experiments.associative_recall import TASKS, AssociativeRecall
from surgery.experiments.jobs import read_result
from surgery.experiments.recall_training import recipe_text
from surgery.results import strict

HOSTS = ("gdn", "mamba2")
REACHED, STILL = 0.7, 0.01  # a host counts from this accuracy on, and below this gain in its last quarter
BEYOND = 1.5  # pairs of the harder test, times the trained ones
LONGER = 2  # steps of the longer adaptation, times the others
CONTROL = "control"
# pairs by host and task: as many as leave a trained host errors to mend
PAIRS = {
    ("gdn", "base"): 64, ("gdn", "update"): 48, ("gdn", "block"): 48,
    ("mamba2", "base"): 32, ("mamba2", "update"): 32, ("mamba2", "block"): 32,
}  # fmt: skip


@dataclass(frozen=True)
class Arm:
    """One operation: a name, the recipe's ``memory`` section, the dose's way to 1 and the learning rates.

    Attributes:
        memory: the recipe's keys; ``{rule: host}`` is the control.
        over: share of the steps over which the dose goes to 1.
        rate: learning rate of the host's parameters. memory_rate: of what the operation added; None for the same.
    """

    name: str
    memory: Mapping[str, Any] = field(default_factory=lambda: {"rule": "host"})
    over: float = 0.5
    rate: float = 1e-3
    memory_rate: float | None = None

    @classmethod
    def parse(cls, text: str) -> Arm:
        """Read ``NAME:key=value,...``: recipe keys of ``memory``, and over, rate, memory_rate.

        Raises:
            UsageError: another form, or a key or value that the recipe refuses.
        """
        from surgery.recipe.document import parse_document, plain_numbers

        name, _, rest = text.partition(":")
        pairs = [part.partition("=") for part in re.split(r",(?![^\[]*\])", rest)]
        if not re.fullmatch(r"[A-Za-z0-9_-]+", name) or not all(key and equals for key, equals, _ in pairs):
            raise UsageError(f"--arm {text}: write for example bayesian:rule=bayesian,noise=constant,over=0.5")
        if name == CONTROL:
            raise UsageError(f"--arm {text}: {CONTROL} is the host itself, which always runs; choose another name")
        parsed = {key.strip(): parse_document(value, f"--arm {text}").value for key, _, value in pairs}
        given = plain_numbers(parsed)
        if given.get("rule") == "host":
            raise UsageError(f"--arm {text}: rule host is the control, which always runs; choose another rule")
        own = {key: given.pop(key) for key in ("over", "rate", "memory_rate") if key in given}
        arm = cls(name, given, **own)
        arm.check(f"--arm {text}")
        return arm

    def check(self, source: str) -> None:
        """Refuse what a recipe refuses.

        Raises:
            UsageError: naming ``source``, the recipe's key and the remedy.
        """
        from surgery.recipe import load_recipe

        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "recipe.yaml"
            file.write_text(recipe_text(Study(), self, 100, "host", 0), encoding="utf-8")
            try:
                load_recipe(file)
            except UsageError as error:
                first = str(error).split("\nerror: ")[0]  # a rate stands in two places
                message = re.sub(rf"^{re.escape(str(file))}(:\d+)?: ", "", first)
                message = re.sub(r"phases\[0\]\.(dose\.)?", "", message)
                raise UsageError(f"{source}: {message}") from None


# the Bayesian arms' rate was the best of 1e-3, 3e-3 and 1e-2 on gdn, update, seeds 100 and 101; Palimpsa's is the same
ARMS = (
    Arm("bayesian", {"rule": "bayesian"}, rate=1e-2),
    Arm(
        "bayesian-token",
        {"rule": "bayesian", "start": "paper", "noise": "constant", "noise_from": "token"},
        rate=1e-2,
    ),
    Arm("palimpsa", {"rule": "palimpsa"}, rate=1e-2),
)


@dataclass(frozen=True)
class Study:
    """Everything that fixes the figures.

    Attributes:
        task, pairs, vocabulary, length, updated: see :class:`AssociativeRecall`; no pairs: those of ``PAIRS``.
        steps: of the host. adapt: of each adaptation. batch: sequences a step.
        host_rate: the host's learning rate. control_rates: those of the control, of which the best counts.
        tested: sequences of a test, twice as many as of a validation.
        every_host: adapt hosts that do not count as well, and show the difference over all.
        seeds: one host each.
        arms: the operations.

    Raises:
        UsageError: values that do not fit each other.
    """

    host: str = "gdn"
    task: str = "update"
    pairs: int | None = None
    vocabulary: int = 1024
    length: int | None = None
    updated: float = 0.5
    steps: int = 10000
    adapt: int = 1500
    batch: int = 64
    host_rate: float = 1e-3
    control_rates: tuple[float, ...] = (1e-3, 3e-3, 1e-2, 3e-2)
    tested: int = 2048
    every_host: bool = False
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)
    arms: tuple[Arm, ...] = ARMS

    def __post_init__(self) -> None:
        if self.host not in HOSTS:
            raise UsageError(f"--host {self.host}: choose one of {', '.join(HOSTS)}")
        if self.task not in TASKS:
            raise UsageError(f"--task {self.task}: choose one of {', '.join(TASKS)}")
        if self.pairs is None:
            object.__setattr__(self, "pairs", PAIRS[self.host, self.task])
        for name, least in (("steps", 4), ("adapt", 2), ("batch", 1), ("tested", 2)):
            if getattr(self, name) < least:
                raise UsageError(f"--{name} {getattr(self, name)}: use {least} or more")
        for option, rates in (("--host-rate", [self.host_rate]), ("--control-rates", self.control_rates)):
            if not rates or not all(0 < rate < 1 for rate in rates):
                raise UsageError(f"{option} {', '.join(map(str, rates))}: a learning rate lies between 0 and 1")
        if not self.seeds or min(self.seeds) < 0 or len(set(self.seeds)) < len(self.seeds):
            raise UsageError(f"--seeds {', '.join(map(str, self.seeds))}: name each seed once, from 0 on")
        if len({arm.name for arm in self.arms}) < len(self.arms):
            raise UsageError("--arm: two arms have the same name")
        self.recall()
        try:
            self.harder()
        except UsageError as error:
            raise UsageError(f"{error} (the harder test has {BEYOND:g} times the pairs)") from None

    def recall(self) -> AssociativeRecall:
        """Return the task that is trained and tested."""
        return AssociativeRecall(self.task, self.pairs, self.vocabulary, self.length, self.updated)

    def harder(self) -> AssociativeRecall:
        """Return the task at ``BEYOND`` times the pairs."""
        length = None if self.length is None else round(BEYOND * self.length)
        return AssociativeRecall(self.task, round(BEYOND * self.pairs), self.vocabulary, length, self.updated)

    def fixed(self) -> dict[str, Any]:
        """Return what a directory's results have in common; seeds, arms and rates may be added later."""
        free = ("seeds", "arms", "control_rates", "every_host")
        return {key: value for key, value in asdict(self).items() if key not in free}

    def controls(self) -> list[Arm]:
        """Return the control at each of its learning rates."""
        return [Arm(CONTROL, rate=rate) for rate in self.control_rates]

    def adaptations(self, seed: int) -> list[Job]:
        """Return what is done with a host, the longest first."""
        return [
            Job(seed, arm, times * self.adapt) for times in (LONGER, 1) for arm in (*self.controls(), *self.arms)
        ]


@dataclass(frozen=True)
class Job:
    """A host (``arm`` None) or an adaptation of it."""

    seed: int
    arm: Arm | None = None
    steps: int = 0

    @property
    def host(self) -> Job:
        """The job that trains this one's host."""
        return Job(self.seed)

    @property
    def name(self) -> str:
        """The name of its files."""
        if self.arm is None:
            return f"seed{self.seed}-host"
        rate = f"{self.arm.rate:g}" + (f"-{self.arm.memory_rate:g}" if self.arm.memory_rate else "")
        return f"seed{self.seed}-{self.arm.name}-{rate}-{self.steps}"


def counts(host: Mapping[str, Any]) -> bool:
    """Whether a host's result says that it has learnt the task, and has stopped learning it."""
    return host["validation"] >= REACHED and host["validation"] - host["three_quarters"] < STILL


def read(folder: Path, job: Job) -> dict[str, Any] | None:
    """Return a job's result, None if it has none yet.

    Raises:
        UsageError: the result is that of another arm of the same name, or is no result.
    """
    path = folder / f"{job.name}.json"
    result = read_result(path, ("validation", "test", "harder"))
    if result is not None and job.arm is not None and result["arm"] != strict(asdict(job.arm)):
        raise UsageError(f"{path}: holds another arm of that name, {result['arm']}; name this one otherwise")
    return result
