"""The table and the picture of :mod:`surgery.experiments.operation`, from a folder's result files alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import mean
from typing import Any

import torch

from surgery.evaluation.intervals import mean_interval
from surgery.evaluation.plots import new_figure, save_figure
from surgery.experiments.study import BEYOND, LONGER, Arm, Job, Study, counts, read

# title -> times the adaptation's steps, and the figure
READINGS = {
    "as trained": (1, "test"),
    f"{BEYOND:g} x pairs": (1, "harder"),
    f"{LONGER} x steps": (LONGER, "test"),
    "both": (LONGER, "harder"),
}


def summarise(study: Study, folder: Path) -> dict[str, Any]:
    """Return each arm beside the control's best, with the t interval of the paired difference.

    ``counted``: over the hosts that count; ``every``: over all hosts, where ``every_host`` asks for it.
    """
    found = {seed: host for seed in study.seeds if (host := read(folder, Job(seed))) is not None}
    counted = [seed for seed, host in found.items() if counts(host)]
    rows = []
    for arm in study.arms:
        readings = {}
        for title, (times, figure) in READINGS.items():
            paired = {"counted": _paired(study, folder, counted, arm, times * study.adapt, figure)}
            if study.every_host:
                paired["every"] = _paired(study, folder, list(found), arm, times * study.adapt, figure)
            readings[title] = paired
        rows.append({"arm": asdict(arm), "readings": readings})
    return {
        "schema": 1,
        "kind": "operation",
        "study": {
            **study.fixed(), "seeds": study.seeds, "control_rates": study.control_rates, "every_host": study.every_host
        },
        "tokens": study.recall().tokens,
        "hosts": {str(seed): {**host, "counts": seed in counted} for seed, host in found.items()},
        "counted": counted,
        "not_counted": [seed for seed in found if seed not in counted],
        "rows": rows,
    }


def best_control(study: Study, folder: Path, seed: int, steps: int) -> dict[str, Any] | None:
    """Return the result of the control whose learning rate is best by validation."""
    results = [read(folder, Job(seed, arm, steps)) for arm in study.controls()]
    return max((result for result in results if result), key=lambda result: result["validation"], default=None)


def _paired(
    study: Study, folder: Path, seeds: Sequence[int], arm: Arm, steps: int, figure: str
) -> dict[str, Any] | None:
    pairs = []
    for seed in seeds:
        control, operated = best_control(study, folder, seed, steps), read(folder, Job(seed, arm, steps))
        if control is not None and operated is not None:
            pairs.append((seed, control, operated))
    if not pairs:
        return None
    read_of = [(_figure(control, figure), _figure(operated, figure)) for _, control, operated in pairs]
    differences = torch.tensor([operated - control for control, operated in read_of])
    interval = mean_interval(differences.double(), torch.arange(len(pairs)))
    return {
        "control": mean(control for control, _ in read_of),
        "operated": mean(operated for _, operated in read_of),
        "difference": interval.as_dict(),
        "seeds": [seed for seed, _, _ in pairs],
        "each": differences.tolist(),
        "control_rates": [control["arm"]["rate"] for _, control, _ in pairs],
        "not_finite": [seed for seed, _, operated in pairs if "not_finite" in operated],
    }


def _figure(result: dict[str, Any], figure: str) -> float:
    """Return a figure of a result; a model whose numbers were not finite answers nothing."""
    return 0.0 if "not_finite" in result else result[figure]


def plot(result: dict[str, Any], path: Path) -> None:
    """Draw each arm's difference to its control: every seed, and the mean with its interval."""
    study, group = result["study"], "every" if result["study"]["every_host"] else "counted"
    figure = new_figure(2.2 + 1.6 * max(2, len(result["rows"])), 3.6)
    axes = figure.add_subplot()
    axes.axhline(0, color="0.8", linewidth=0.8, zorder=0)
    width = 0.8 / len(READINGS)
    for number, title in enumerate(READINGS):
        label, colour = title, f"C{number}"
        for place, row in enumerate(result["rows"]):
            paired = row["readings"][title].get(group)
            if paired is None:
                continue
            x = place + (number - (len(READINGS) - 1) / 2) * width
            axes.scatter([x] * len(paired["each"]), [100 * d for d in paired["each"]], s=12, color=colour, alpha=0.5)
            average, low, high = (paired["difference"][key] for key in ("mean", "low", "high"))
            reach = None if low is None else [[100 * (average - low)], [100 * (high - average)]]
            axes.errorbar([x], [100 * average], reach, fmt="_", color=colour, capsize=3, label=label)
            label = None
    axes.set_xticks(range(len(result["rows"])), [row["arm"]["name"] for row in result["rows"]])
    axes.set(ylabel="points above the control")
    axes.set_title(f"{study['host']}, {study['task']}, {study['pairs']} pairs", fontsize="medium")
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False, fontsize="small")
    save_figure(figure, path)
