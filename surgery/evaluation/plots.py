"""The evaluation as pictures: loss by position, recall by length, recall by length and depth, tasks."""

from __future__ import annotations

import io
import math
from pathlib import Path
from typing import Any

from surgery.checkpoint.staging import check_file, write_result
from surgery.errors import UsageError
from surgery.evaluation.task_plots import task_panel

MODEL_COLOUR, BASELINE_COLOUR, CONTROL_COLOUR = "#0b6e99", "#9a9a9a", "#c2691d"


def new_figure(width: float, height: float):
    """A figure with its own Agg canvas: no display, no global state."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def save_figure(figure: Any, path: str | Path) -> Path:
    """Write the figure; the suffix says the format.

    Raises:
        UsageError: no such directory, or a suffix that is no picture's.
    """
    path = Path(path)
    check_plot_path(path)
    picture = io.BytesIO()
    figure.savefig(picture, dpi=150, format=path.suffix[1:].lower())
    write_result(path, picture.getvalue())
    return path


def check_plot_path(path: str | Path) -> None:
    """Refuse a place where no picture can be written, before any work.

    Raises:
        UsageError: no file can be written there, or a suffix that is no picture's.
    """
    path = Path(path)
    check_file(path, "--plot")
    if path.suffix.lower() not in (".png", ".pdf", ".svg"):
        raise UsageError(f"--plot {path}: the name must end in .png, .pdf or .svg")


def plot_evaluation(report: dict[str, Any], path: str | Path) -> Path:
    """Draw a report of :func:`surgery.evaluation.report.build_report` to ``path``."""
    entries = [(report["model"], MODEL_COLOUR)]
    if report["baseline"] is not None:
        entries.append((report["baseline"], BASELINE_COLOUR))
    if report.get("control") is not None:
        entries.append((report["control"], CONTROL_COLOUR))
    asked = [(entry, colour) for entry, colour in entries if entry.get("tasks")]
    tasks = list(dict.fromkeys(cell["task"] for entry, _ in asked[:1] for cell in entry["tasks"]["cells"]))
    recalls = [(entry, colour) for entry, colour in entries if entry["recall"] is not None]
    panels = 1 + (1 + len(recalls) if recalls else 0)
    first_task, panels = panels, panels + len(tasks)
    columns = 2 if panels == 4 else min(3, panels)
    rows = -(-panels // columns)
    figure = new_figure(5.6 * columns, 4.2 * rows)
    axes = figure.subplots(rows, columns, squeeze=False).flatten()
    _positions(axes[0], report, entries)
    if recalls:
        _recall_by_length(axes[1], recalls)
        maps = list(axes[2:first_task])
        for axis, (entry, _) in zip(maps, recalls, strict=True):
            image = _recall_map(axis, entry)
        figure.colorbar(image, ax=maps, label="share right", shrink=0.85)
    for axis, task in zip(axes[first_task:panels], tasks, strict=True):
        task_panel(axis, task, asked)
    for axis in axes[panels:]:
        axis.set_axis_off()
    figure.suptitle(f"{report['text']['name']}, {report['text']['tokens']:,} tokens", fontsize=10)
    return save_figure(figure, path)


def _positions(axis: Any, report: dict[str, Any], entries: list[tuple[dict[str, Any], str]]) -> None:
    difference = report["difference"]
    paired = difference is not None and difference["paired"]
    if paired:
        _band(axis, difference["positions"], MODEL_COLOUR, None)
        axis.axhline(0, color=BASELINE_COLOUR, linewidth=1)
        axis.set_ylabel("nats a token, minus the baseline's")
        axis.set_title(f"Loss by position: {report['model']['name']}\nminus {report['baseline']['name']}", fontsize=10)
    else:
        for entry, colour in entries:
            _band(axis, entry["positions"], colour, entry["name"])
        axis.set_ylabel("nats a token")
        axis.set_title("Loss by position", fontsize=10)
        axis.legend(fontsize=8, frameon=False)
    axis.set_xscale("log", base=2)
    axis.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axis.set_xlabel(f"position in a window of {report['context']} tokens (95% interval)")
    axis.grid(alpha=0.25)


def _band(axis: Any, buckets: list[dict[str, Any]], colour: str, label: str | None) -> None:
    middle = [(bucket["from"] * bucket["to"]) ** 0.5 for bucket in buckets]
    mean = [bucket["mean"] for bucket in buckets]
    low = [bucket["mean"] if bucket["low"] is None else bucket["low"] for bucket in buckets]
    high = [bucket["mean"] if bucket["high"] is None else bucket["high"] for bucket in buckets]
    axis.plot(middle, mean, marker="o", markersize=4, color=colour, label=label)
    axis.fill_between(middle, low, high, color=colour, alpha=0.2, linewidth=0)


def _recall_by_length(axis: Any, recalls: list[tuple[dict[str, Any], str]]) -> None:
    for entry, colour in recalls:
        rows = entry["recall"]["lengths"]
        share = [row["fraction"] for row in rows]
        reach = [
            [max(0.0, row["fraction"] - row["interval"][0]) for row in rows],
            [max(0.0, row["interval"][1] - row["fraction"]) for row in rows],
        ]
        lengths = [row["length"] for row in rows]
        style = {"marker": "o", "markersize": 4, "capsize": 3, "color": colour, "label": entry["name"]}
        aside = 1 + 0.015 * (2 * len(axis.containers) - len(recalls) + 1)  # so that equal intervals both show
        axis.errorbar([aside * length for length in lengths], share, yerr=reach, **style)
    recall = recalls[0][0]["recall"]
    axis.axhline(recall["chance"], color="black", linestyle=":", linewidth=1, label="chance")
    axis.set_xscale("log", base=2)
    axis.set_xticks(lengths, [str(length) for length in lengths])
    axis.minorticks_off()
    axis.set_ylim(-0.03, 1.03)
    axis.set_xlabel(f"tokens (each {rows[0]['total']} prompts, Wilson's 95% interval)")
    axis.set_ylabel(f"right value first of {recall['candidates']}")
    axis.set_title("Needle recall by length (RULER-style)", fontsize=10)
    axis.legend(fontsize=8, frameon=False)
    axis.grid(alpha=0.25)


def _recall_map(axis: Any, entry: dict[str, Any]) -> Any:
    cells = entry["recall"]["cells"]
    lengths = sorted({cell["length"] for cell in cells})
    depths = sorted({cell["depth"] for cell in cells})
    share = {(cell["length"], cell["depth"]): cell for cell in cells}
    grid = [[share.get((length, depth), {"fraction": math.nan})["fraction"] for length in lengths] for depth in depths]
    image = axis.imshow(grid, vmin=0, vmax=1, cmap="viridis", aspect="auto")
    for row, depth in enumerate(depths):
        for column, length in enumerate(lengths):
            cell = share.get((length, depth))
            if cell is None:  # no needle reached that depth
                continue
            dark = cell["fraction"] < 0.6
            text = f"{cell['right']}/{cell['total']}"
            axis.text(column, row, text, ha="center", va="center", fontsize=8, color="white" if dark else "black")
    axis.set_xticks(range(len(lengths)), [str(length) for length in lengths])
    axis.set_yticks(range(len(depths)), [f"{depth:.0%}" for depth in depths])
    axis.set_xlabel("tokens")
    axis.set_ylabel("depth of the needle")
    axis.set_title(f"Recall by length and depth:\n{entry['name']}", fontsize=10)
    return image
