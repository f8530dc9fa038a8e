"""Forgetting, importance and loss over the training of Palimpsa-D on associative recall.

While the model of :mod:`surgery.experiments.mqar` learns, fixed sequences of the longest length tell now and then how
long its layers remember, the mean of log N_t over tokens, heads and layers, and how far importance has spread,
r = (I_max - I_min) / I_min over a head's memory after the sequence, mean over sequences, heads and layers.

Source: the Palimpsa paper, Sec. 3.2 and Fig. 3: longer retention, then stronger differentiation (r about 40 late in the
training), then lower loss. Of how r is averaged, and of the length it is read at, the paper says nothing that is read
here; both are this project's choice.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev
from typing import Any, ClassVar

import torch

from surgery.adaptation.teaching import Body
from surgery.evaluation.plots import new_figure, save_figure
from surgery.experiments import mqar
from surgery.experiments.device_loop import BLOCK
from surgery.experiments.jobs import Result, Steps
from surgery.experiments.recall_training import VALIDATION, sequences
from surgery.experiments.trained import Job, at_least, row
from surgery.inspection.horizon import horizon

PRINTED = {"spread": 40.0}  # late in the training, an approximate reading
FIGURES = {"log_horizon": "mean log N_t", "spread": "importance spread r", "loss": "loss"}


@dataclass(frozen=True)
class Importance(mqar.Mqar):
    """The settings: those of associative recall, and

    Attributes:
        records: how often the figures are read over the training. probed: sequences they are read on.
    """

    kind: ClassVar[str] = "importance"
    labels: ClassVar[Mapping[str, str]] = {"palimpsa": "Palimpsa-D"}

    rules: tuple[str, ...] = ("palimpsa",)
    records: int = 60
    probed: int = 16

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(1, records=self.records, probed=self.probed)

    def training(self, job: Job, device: str) -> Steps:
        found: list[dict[str, float]] = []
        probe, _ = sequences(self.recall(max(self.lengths)), VALIDATION, self.probed, device)

        def record(body: Body, step: int) -> None:
            found.append({"step": step, **measure(body, probe)})

        result = yield from mqar.train(self, job, device, record, self.records)
        losses = result["losses"]
        for one in found:  # the loss of the block of steps that ends there; before the first step, of the first
            one["loss"] = losses[min(max(0, -(-one["step"] // BLOCK) - 1), len(losses) - 1)]
        return {**result, "records": found}

    def rows(self, best: Mapping[str, list[Result]]) -> list[dict[str, Any]]:
        (results,) = best.values()
        rows = []
        for figure, title in FIGURES.items():
            for when, place in (("at the start", 0), ("at the end", -1)):
                values = [_figure(result["records"][place], figure) for result in results]
                paper = PRINTED.get(figure) if place else None
                rows.append(row("palimpsa", f"{title} {when}", values, paper))
        values = [result["test"][str(max(self.lengths))] for result in results]
        return [*rows, row("palimpsa", f"answers right at L = {max(self.lengths)}", values)]

    def notes(self) -> list[str]:
        return [
            f"N_t and r on {self.probed} sequences of L = {max(self.lengths)}, mean over tokens, heads and layers; "
            f"loss in nats, mean of {BLOCK} steps. Paper: r about 40 late in the training."
        ]

    def plot(self, result: Result, path: Path) -> None:
        figure = new_figure(7, 4)
        left = figure.add_subplot()
        right, third = left.twinx(), left.twinx()
        (results,) = result["results"].values()
        count = min(len(one["records"]) for one in results)  # fewer where a training was not finite
        steps = [record["step"] for record in results[0]["records"][:count]]
        lines = []
        for axes, name, colour in ((left, "log_horizon", "C0"), (right, "spread", "C1"), (third, "loss", "C6")):
            at = [[_figure(one["records"][place], name) for one in results] for place in range(count)]
            middle = [mean(values) for values in at]
            reach = [stdev(values) if len(values) > 1 else 0.0 for values in at]
            lines += axes.plot(steps, middle, color=colour, label=FIGURES[name])
            low, high = ([m + sign * r for m, r in zip(middle, reach, strict=True)] for sign in (-1, 1))
            axes.fill_between(steps, low, high, color=colour, alpha=0.2, linewidth=0)
        left.set(xlabel="step", ylabel=FIGURES["log_horizon"])
        right.set_ylabel(FIGURES["spread"])
        third.set_yticks([])
        for _, until in self.stages()[:-1]:
            left.axvline(until, color="0.85", linewidth=0.8, zorder=0)
        left.legend(lines, [line.get_label() for line in lines], frameon=False, fontsize="small")
        left.set_title(f"shaded: one standard deviation of {len(self.seeds)} seeds", fontsize="medium")
        save_figure(figure, path)


@torch.no_grad()
def measure(body: Body, ids: torch.Tensor) -> dict[str, float]:
    """Return ``log_horizon`` and ``spread`` of a model on sequences [B, T]."""
    logs, spreads = [], []

    def watch(memory: Any, args: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
        logs.append(horizon(args[0].log_decay).log().mean().item())
        spreads.append(memory.diagnostics(output[1])["importance_spread"].mean().item())

    handles = [memory.register_forward_hook(watch) for memory in mqar.memories(body)]
    training = body.model.training
    body.model.eval()
    try:
        body.run(ids)
    finally:
        for handle in handles:
            handle.remove()
        body.model.train(training)
    return {"log_horizon": mean(logs), "spread": mean(spreads)}


def _figure(record: Mapping[str, float | None], name: str) -> float:
    """A figure of a record that may have been read back from JSON, which has null for one that is not finite."""
    value = record[name]
    return math.nan if value is None else value


QUICK: dict[str, Any] = {**mqar.QUICK, "steps": 600, "records": 12}
