"""More random keys than dimensions: what a memory of D dimensions still tells of n > D pairs.

A sequence writes n pairs of a random unit key and a value, then asks for every key. Keys and values are drawn anew in
every sequence, and the keys are the memory's addresses themselves. The figure is the cross-entropy of the queries, in
nats, at occupancies n/D that no training has seen.

Source: "Memory by Design: Probabilistic Sequence Layers", Fig. 7 and Appendix E.5.4: D = 16, tested at n/D = 6, 8, 12
and 16. The occupancy that is trained, the number of values, steps, sequences a step and learning rates are this
project's choice. The paper prints no figures of it that are read here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from surgery.adaptation.losses import IGNORED
from surgery.errors import UsageError
from surgery.evaluation.plots import new_figure, save_figure
from surgery.experiments.addressed import LABELS, AddressedModel, Sequences, probabilities, train
from surgery.experiments.jobs import Result, Steps
from surgery.experiments.recall_training import LAYERS, TEST, VALIDATION
from surgery.experiments.trained import Experiment, Job, at_least, draw_curve, row


@dataclass(frozen=True)
class Crowd:
    """Sequences of ``pairs`` random keys in ``dim`` dimensions, each with one of ``values`` values."""

    pairs: int
    dim: int
    values: int

    @property
    def answers(self) -> int:
        """Answers of a sequence."""
        return self.pairs

    def draw(self, count: int, generator: torch.Generator) -> tuple[Tensor, ...]:
        """Draw sequences on the generator's device; see :class:`Sequences`."""
        options = {"generator": generator, "device": generator.device}
        keys = F.normalize(torch.randn(count, self.pairs, self.dim, **options), dim=-1)
        told = torch.randint(self.values, (count, self.pairs), **options)
        written = torch.ones_like(told, dtype=torch.bool)
        return Sequences(
            torch.cat((keys, keys), dim=1),
            torch.cat((told, torch.full_like(told, self.values)), dim=1),
            torch.cat((written, ~written), dim=1),
            torch.cat((torch.full_like(told, IGNORED), told), dim=1),
        ).tensors()


@dataclass(frozen=True)
class Crowding(Experiment):
    """The settings.

    Attributes:
        dim: D. values: how many a pair has to choose from. width: of the model.
        trained: the occupancy n/D of the training. occupancies: of the tests.
        steps: of each training. batch: sequences a step. tested: sequences of a test.
    """

    kind: ClassVar[str] = "crowding"
    labels: ClassVar[Mapping[str, str]] = LABELS

    rules: tuple[str, ...] = tuple(LABELS)
    rates: tuple[float, ...] = (1e-3, 3e-3)
    dim: int = 16
    values: int = 16
    width: int = 64
    trained: int = 4
    occupancies: tuple[int, ...] = (6, 8, 12, 16)
    steps: int = 2500
    batch: int = 64
    tested: int = 256

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(1, dim=self.dim, width=self.width, trained=self.trained, steps=self.steps, batch=self.batch)
        at_least(2, values=self.values, tested=self.tested)
        if not self.occupancies or min(self.occupancies) < 1:
            shown = ",".join(map(str, self.occupancies))
            raise UsageError(f"--occupancies {shown}: pairs for each dimension, from 1 on")

    def crowd(self, occupancy: int) -> Crowd:
        """Return the task at n/D."""
        return Crowd(occupancy * self.dim, self.dim, self.values)

    def sizes(self) -> str:
        return (
            f"{self.dim} dimensions, {self.values} values; {LAYERS} layers, width {self.width}; {self.steps} steps of "
            f"{self.batch} sequences of {self.trained * self.dim} pairs (n/D = {self.trained})"
        )

    def training(self, job: Job, device: str) -> Steps:
        result = yield from train(
            job, self.crowd(self.trained), width=self.width, dim=self.dim, values=self.values, steps=self.steps,
            batch=self.batch, device=device,
        )  # fmt: skip
        model = result.pop("model")
        finite, chance = "not_finite" not in result, math.log(self.values)

        def loss(occupancy: int, seed: int) -> float:
            return _cross_entropy(model, self.crowd(occupancy), seed, self.tested, device) if finite else chance

        result["validation"] = -loss(self.trained, VALIDATION)
        tested = (self.trained, *self.occupancies)
        result["cross_entropy"] = {str(occupancy): loss(occupancy, TEST) for occupancy in tested}
        return result

    def rows(self, best: Mapping[str, list[Result]]) -> list[dict[str, Any]]:
        return [
            row(rule, f"n/D = {occupancy}", [result["cross_entropy"][str(occupancy)] for result in results])
            for rule, results in best.items()
            for occupancy in dict.fromkeys((self.trained, *self.occupancies))
        ]

    def notes(self) -> list[str]:
        return [
            f"Cross-entropy of the queries in nats, lower is better; without memory it is {math.log(self.values):.3f}. "
            "The paper prints curves alone: the Bayesian Layer's is lowest, and no memory escapes the crowd."
        ]

    def plot(self, result: Result, path: Path) -> None:
        figure = new_figure(6, 4)
        axes = figure.add_subplot()
        places = sorted({self.trained, *self.occupancies})
        for number, (rule, results) in enumerate(result["results"].items()):
            line = [[one["cross_entropy"][str(place)] for one in results] for place in places]
            draw_curve(axes, places, line, f"C{number}", self.labels[rule])
        axes.axhline(math.log(self.values), color="0.6", linestyle=":", label="no memory")
        axes.axvline(self.trained, color="0.8", linewidth=0.8, zorder=0)
        axes.set(xlabel=f"n/D (trained at {self.trained})", ylabel="cross-entropy of the queries, nats")
        axes.legend(frameon=False, fontsize="small")
        save_figure(figure, path)


def _cross_entropy(model: AddressedModel, task: Crowd, seed: int, count: int, device: str) -> float:
    sequences = Sequences(*task.draw(count, torch.Generator(device).manual_seed(seed)))
    values = sequences.targets[:, -task.pairs :]
    return F.nll_loss(probabilities(model, sequences).flatten(0, 1), values.flatten()).item()


QUICK: dict[str, Any] = {"dim": 8, "steps": 200, "batch": 32, "rates": (3e-3,), "tested": 64}
