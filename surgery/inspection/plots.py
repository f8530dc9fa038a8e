"""The inspection as a picture: each layer's horizon and its heads."""

from __future__ import annotations

import math
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from surgery.evaluation.plots import new_figure, save_figure
from surgery.inspection.horizon import LayerHorizon

if TYPE_CHECKING:
    from surgery.inspection.probe import Probe

CHOSEN, OTHER = "#c1440e", "#9db4c0"


def plot_horizons(
    figures: list[LayerHorizon],
    metric: str,
    chosen: Collection[int],
    title: str,
    path: str | Path,
    probe: Probe | None = None,
) -> Path:
    """Bars of each layer's figure with its 10th to 90th percentile, beside the heat map of layers and heads.

    Args:
        figures: one a layer; drawn in order of layers.
        chosen: the marked layers.
        title: what was measured, on what.
        path: the suffix (.png, .pdf, .svg) says the format.
        probe: also bars of each swap's drift at dose 1, with the slope of the loss at dose 0 written beside them.

    Of layers whose writes have a gain, its course along the text is drawn as well, beside the host's.
    """
    from matplotlib.colors import LogNorm

    figures = sorted(figures, key=lambda figure: figure.layer)
    rows = len(figures)
    heads = max(len(figure.heads) for figure in figures)
    height = min(16.0, max(3.6, 1.6 + (0.28 if rows <= 24 else 0.19) * rows))
    written = rows * heads <= 160  # each cell has its figure in it
    gained = [figure for figure in figures if figure.gains]
    between = [1] * ((probe is not None) + bool(gained))
    picture = new_figure(min(18.0, 7.0 + 3.5 * len(between) + (0.3 if written else 0.1) * heads), height)
    bars, *more, heat = picture.subplots(1, 2 + len(between), width_ratios=[1, *between, 1.6])
    if gained:
        _draw_gains(more.pop(), gained)
    places = range(rows)
    colours = [CHOSEN if figure.layer in chosen else OTHER for figure in figures]
    values = [figure.figure(metric) for figure in figures]
    bars.barh(places, values, color=colours, height=0.7)
    spread = ([figure.p10 for figure in figures], [figure.p90 for figure in figures])
    bars.hlines(places, *spread, color="black", linewidth=1)
    bars.set_xscale("log")
    bars.set_xlim(left=max(0.8, 0.7 * min(*spread[0], *values)))
    bars.set_ylim(rows - 0.5, -0.5)
    bars.set_xlabel(f"N_t, {metric} (line: p10 to p90)")
    bars.set_ylabel("layer")
    bars.grid(axis="x", alpha=0.25)
    if probe is not None:
        _draw_probe(more[0], probe, figures, colours)

    grid = [figure.heads + [math.nan] * (heads - len(figure.heads)) for figure in figures]
    least = min(min(figure.heads) for figure in figures)
    most = max(max(figure.heads) for figure in figures)
    norm = LogNorm(vmin=least, vmax=max(most, 1.01 * least))
    image = heat.imshow(grid, norm=norm, cmap="magma", aspect="auto", interpolation="nearest")
    heat.set_xlabel("head")
    heat.set_xticks(_ticks(heads, 20))
    picture.colorbar(image, ax=heat, label="N_t in tokens, mean of a head", shrink=min(1.0, 5 / height))
    if written:
        for row, figure in enumerate(figures):
            for column, value in enumerate(figure.heads):
                bright = norm(value) > 0.6
                colour = "black" if bright else "white"
                heat.text(column, row, _short(value), ha="center", va="center", fontsize=7, color=colour)

    step = max(1, math.ceil(rows / 64))
    shown = [row for row in places if row % step == 0 or figures[row].layer in chosen]
    for axis in (bars, *more, heat):
        axis.set_yticks(shown, [str(figures[row].layer) for row in shown], fontsize=8)
        for label, row in zip(axis.get_yticklabels(), shown, strict=True):
            if figures[row].layer in chosen:
                label.set_color(CHOSEN)
                label.set_fontweight("bold")
    picture.suptitle(title, fontsize=10)
    return save_figure(picture, path)


def _draw_probe(axis: Any, probe: Probe, figures: list[LayerHorizon], colours: list[str]) -> None:
    """Drift at dose 1 of each layer that was probed, the slope at its bar's end."""
    found = {one.layer: one for one in probe.layers}
    rows = [(row, found[figure.layer]) for row, figure in enumerate(figures) if figure.layer in found]
    least = min((one.kl for _, one in rows if one.kl > 0), default=1e-6)
    axis.barh([row for row, _ in rows], [max(one.kl, least) for _, one in rows],
              color=[colours[row] for row, _ in rows], height=0.7)  # fmt: skip
    for row, one in rows:
        axis.text(max(one.kl, least), row, f" {one.slope:+.2g}", va="center", fontsize=7)
    axis.set_xscale("log")
    axis.set_xlim(0.5 * least, 8 * max((one.kl for _, one in rows), default=least))
    axis.set_ylim(len(figures) - 0.5, -0.5)
    axis.set_xlabel(f"KL at dose 1 of {probe.rule}, nats a token\n(written: slope of the loss at dose 0)")
    axis.grid(axis="x", alpha=0.25)


def _draw_gains(axis: Any, figures: list[LayerHorizon]) -> None:
    """Mean gain of the heads along the text, dashed the host's where it has one."""
    for number, figure in enumerate(figures):
        gains, colour = figure.gains, f"C{number % 10}"
        axis.plot(gains["tokens"], gains["gain"], marker=".", color=colour, label=f"layer {figure.layer}")
        if any(gains["host_gain"]):
            axis.plot(gains["tokens"], gains["host_gain"], color=colour, linestyle="--", linewidth=1)
    axis.set_ylim(bottom=0)
    axis.set_xlabel("tokens read")
    axis.set_ylabel("gain of a write (dashed: the host's)")
    axis.legend(frameon=False, fontsize=7)
    axis.grid(alpha=0.25)


def _ticks(count: int, most: int) -> list[int]:
    step = next(step for step in (1, 2, 4, 5, 8, 10, 16, 20, 32, 50, 64, 100, 1000) if count / step <= most)
    return list(range(0, count, step))


def _short(value: float) -> str:
    """At most four characters: 7.3, 142, 1.2k, 3.4M."""
    for scale, unit in ((1e6, "M"), (1e3, "k"), (1.0, "")):
        if value >= 0.9995 * scale:
            return f"{value / scale:.1f}{unit}" if value < 9.95 * scale else f"{value / scale:.0f}{unit}"
    return f"{value:.1f}"
