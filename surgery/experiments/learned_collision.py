"""The collision learned: models trained on short floods of nearly equal addresses, tested on long ones and nearer keys.

A sequence writes m pairs in some order, each value at its own unit address; two of the addresses, A and B, overlap, the
others are orthonormal to both. Then A is written ``flood`` times more, and every address is asked for. Values are dealt
anew in every sequence. The figures are of B's query: the share that is right, and the margin, the probability of B's
value less that of A's.

Source: "Memory by Design: Probabilistic Sequence Layers", Fig. 3 and Appendix E.5: trained at n_f <= 8 and overlap 0.60
to 0.80 with 8 pairs in 16 dimensions, 2500 steps, tested to n_f = 256 and overlap 0.95. Sequences a step and learning
rates are this project's choice. The paper prints no figures of it that are read here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from surgery.adaptation.losses import IGNORED
from surgery.errors import UsageError
from surgery.evaluation.plots import new_figure, save_figure
from surgery.experiments.addressed import LABELS, AddressedModel, Sequences, probabilities, train
from surgery.experiments.collision import A, B
from surgery.experiments.jobs import Result, Steps
from surgery.experiments.recall_training import LAYERS, TEST, VALIDATION
from surgery.experiments.trained import Experiment, Job, at_least, draw_curve, row


@dataclass(frozen=True)
class Flood:
    """Sequences whose overlap and number of further writes of A are drawn evenly from closed ranges."""

    pairs: int
    dim: int
    floods: tuple[int, int]
    overlaps: tuple[float, float]

    @property
    def answers(self) -> int:
        """Answers of a sequence."""
        return self.pairs

    def draw(self, count: int, generator: torch.Generator) -> tuple[Tensor, ...]:
        """Draw sequences on the generator's device; see :class:`Sequences`. Padding comes first."""
        device, pairs = generator.device, self.pairs

        def uniform(*shape: int) -> Tensor:
            return torch.rand(*shape, generator=generator, device=device)

        low, high = self.overlaps
        overlap = low + (high - low) * uniform(count)
        keys = torch.eye(pairs, self.dim, device=device).repeat(count, 1, 1)
        keys[:, B, A], keys[:, B, B] = overlap, (1 - overlap**2).sqrt()
        values = uniform(count, pairs).argsort(1)
        order = uniform(count, pairs).argsort(1)
        least, most = self.floods
        floods = least + (uniform(count) * (most - least + 1)).long().clamp(max=most - least)
        place = torch.arange(most + pairs, device=device) - (most - floods)[:, None]  # below 0 on padding
        index = torch.where(place < pairs, order.gather(1, place.clamp(0, pairs - 1)), A)
        asked = torch.arange(pairs, device=device).expand(count, -1)
        index = torch.cat((index, asked), dim=1)
        written = torch.cat((place >= 0, torch.zeros_like(asked, dtype=torch.bool)), dim=1)
        told = values.gather(1, index)
        query = torch.zeros_like(written)
        query[:, -pairs:] = True
        addresses = keys.gather(1, index[..., None].expand(-1, -1, self.dim)) * (written | query)[..., None]
        targets = told.masked_fill(~query, IGNORED)
        return Sequences(addresses, told.masked_fill(~written, pairs), written, targets).tensors()


@dataclass(frozen=True)
class LearnedCollision(Experiment):
    """The settings.

    Attributes:
        pairs: m. dim: D. width: of the model. steps: of each training. batch: sequences a step.
        trained_flood: most writes of A in training. trained_overlaps: lowest and highest there.
        floods, overlaps: of the tests; floods at the highest overlap of training and tests, overlaps at the most writes
            of both.
        tested: sequences of a test.
    """

    kind: ClassVar[str] = "learned-collision"
    labels: ClassVar[Mapping[str, str]] = LABELS

    rules: tuple[str, ...] = tuple(LABELS)
    rates: tuple[float, ...] = (1e-3, 3e-3)
    pairs: int = 8
    dim: int = 16
    width: int = 64
    steps: int = 2500
    batch: int = 64
    trained_flood: int = 8
    trained_overlaps: tuple[float, float] = (0.6, 0.8)
    floods: tuple[int, ...] = (0, 8, 16, 32, 64, 256)
    overlaps: tuple[float, ...] = (0.6, 0.7, 0.8, 0.85, 0.9, 0.95)
    tested: int = 1024

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(1, width=self.width, steps=self.steps, batch=self.batch)
        at_least(2, tested=self.tested, pairs=self.pairs)
        at_least(0, trained_flood=self.trained_flood)
        if self.dim < self.pairs:
            raise UsageError(f"--dim {self.dim}: {self.pairs} independent keys need at least {self.pairs} dimensions")
        if not self.floods or min(self.floods) < 0:
            raise UsageError(f"--floods {','.join(map(str, self.floods))}: numbers of writes, from 0 on")
        low, high = self.trained_overlaps
        if not -1 < low <= high < 1:
            raise UsageError(f"--trained-overlaps {low:g},{high:g}: lowest and highest, between -1 and 1")
        if not self.overlaps or not all(-1 < overlap < 1 for overlap in self.overlaps):
            raise UsageError(f"--overlaps {','.join(map(str, self.overlaps))}: between -1 and 1")

    def task(self) -> Flood:
        """Return what is trained on."""
        return Flood(self.pairs, self.dim, (0, self.trained_flood), self.trained_overlaps)

    def test(self, flood: int, overlap: float) -> Flood:
        """Return a test."""
        return Flood(self.pairs, self.dim, (flood, flood), (overlap, overlap))

    def tests(self) -> list[tuple[int, float]]:
        """Return the tests, flood and overlap: the figure's two panels."""
        ends = (self.trained_overlaps[1], max(self.overlaps))
        panels = [(flood, overlap) for overlap in ends for flood in (*self.floods, self.trained_flood)]
        panels += [(flood, overlap) for flood in self.longest() for overlap in self.overlaps]
        return list(dict.fromkeys(panels))

    def longest(self) -> tuple[int, int]:
        """Return the most writes of A of the training and of the tests."""
        return self.trained_flood, max(self.floods)

    def sizes(self) -> str:
        low, high = self.trained_overlaps
        return (
            f"{self.pairs} pairs in {self.dim} dimensions; {LAYERS} layers, width {self.width}; {self.steps} steps of "
            f"{self.batch} sequences, trained at up to {self.trained_flood} writes of A and overlap {low:g} to {high:g}"
        )

    def training(self, job: Job, device: str) -> Steps:
        result = yield from train(
            job, self.task(), width=self.width, dim=self.dim, values=self.pairs, steps=self.steps, batch=self.batch,
            device=device,
        )  # fmt: skip
        model = result.pop("model")
        finite = "not_finite" not in result
        result["validation"] = _figures(model, self.task(), VALIDATION, self.tested, device)[2] if finite else 0.0
        result["accuracy"], result["margin"] = {}, {}
        for flood, overlap in self.tests():
            test = self.test(flood, overlap)
            right, margin, _ = _figures(model, test, TEST, self.tested, device) if finite else (0.0, 0.0, 0.0)
            result["accuracy"][_place(flood, overlap)], result["margin"][_place(flood, overlap)] = right, margin
        return result

    def rows(self, best: Mapping[str, list[Result]]) -> list[dict[str, Any]]:
        shown = [(self.trained_flood, self.trained_overlaps[1]), (max(self.floods), self.trained_overlaps[1])]
        shown += [(self.trained_flood, max(self.overlaps)), (max(self.floods), max(self.overlaps))]
        rows = []
        for rule, results in best.items():
            for flood, overlap in dict.fromkeys(shown):
                for figure in ("accuracy", "margin"):
                    values = [result[figure][_place(flood, overlap)] for result in results]
                    rows.append(row(rule, f"{figure}, {flood} of A at {overlap:g}", values))
        return rows

    def notes(self) -> list[str]:
        return [
            "Of B's query: accuracy, and the probability of B's value less that of A's. The paper prints curves alone: "
            "the Bayesian Layer keeps its advantage, reset and delta rule fail at high overlap."
        ]

    def plot(self, result: Result, path: Path) -> None:
        figure = new_figure(10, 4)
        floods, overlaps = figure.subplots(1, 2)
        for number, (rule, results) in enumerate(result["results"].items()):
            for style, end in (("-", self.trained_overlaps[1]), (":", max(self.overlaps))):
                line = [[one["accuracy"][_place(flood, end)] for one in results] for flood in self.floods]
                label = f"{self.labels[rule]}, overlap {end:g}"
                draw_curve(floods, [max(flood, 1) for flood in self.floods], line, f"C{number}", label, style)
            for style, flood in (("-", self.trained_flood), (":", max(self.floods))):
                line = [[one["margin"][_place(flood, overlap)] for one in results] for overlap in self.overlaps]
                draw_curve(overlaps, self.overlaps, line, f"C{number}", f"{self.labels[rule]}, {flood} of A", style)
        floods.set_xscale("log", base=2)
        floods.set_xticks([max(flood, 1) for flood in self.floods], [str(flood) for flood in self.floods])
        floods.minorticks_off()
        floods.set(xlabel="writes of A", ylabel="B's query: right", ylim=(-0.03, 1.03))
        floods.axvline(max(1, self.trained_flood), color="0.8", linewidth=0.8, zorder=0)
        overlaps.set(xlabel="overlap of A and B", ylabel="B's query: margin of B over A", ylim=(-1.05, 1.05))
        overlaps.axvspan(*self.trained_overlaps, color="0.95", zorder=0)
        for axes in (floods, overlaps):
            axes.legend(frameon=False, fontsize="x-small")
        save_figure(figure, path)


def _place(flood: int, overlap: float) -> str:
    return f"{flood} at {overlap:g}"


def _figures(model: AddressedModel, task: Flood, seed: int, count: int, device: str) -> tuple[float, float, float]:
    """Accuracy and margin of B's query, and the accuracy of all queries."""
    sequences = Sequences(*task.draw(count, torch.Generator(device).manual_seed(seed)))
    chances = probabilities(model, sequences)
    values = sequences.targets[:, -task.pairs :]
    right = (chances.argmax(-1) == values).float()
    margin = chances[:, B].exp().gather(1, values[:, [B, A]]).diff(dim=1).neg()
    return right[:, B].mean().item(), margin.mean().item(), right.mean().item()


QUICK: dict[str, Any] = {"steps": 200, "batch": 32, "rates": (3e-3,), "floods": (0, 8, 64), "tested": 256}
