"""The tasks of an evaluation as pictures: lists by number of pairs, the others by length."""

from __future__ import annotations

from typing import Any

STYLES = ("-", "--", "-.", ":")
WORDS = {"written": "written", "chosen": "chosen among candidates"}


def task_panel(axis: Any, task: str, entries: list[tuple[dict[str, Any], str]]) -> None:
    """Draw one task of several models, each with its colour: of lists the share of all keys that is right, by number of
    pairs with a line for each length, of others the written answer and the choice among candidates, by length."""
    first = entries[0][0]["tasks"]
    listing = bool(_cells(entries[0][0], task)[0]["pairs"])
    x = "pairs" if listing else "length"
    lines: list[tuple[str, Any]] = []  # what a style stands for, and which cells and score it draws
    if listing:
        name = "forced" if "forced" in first["scores"] else next(iter(first["scores"]))
        for length in dict.fromkeys(cell["length"] for cell in _cells(entries[0][0], task)):
            lines.append((f"{length} tokens" if length else "the list alone", (length, name)))
    else:
        lines = [(WORDS[name], (None, name)) for name in WORDS if name in first["scores"]]
    drawn = 0
    for entry, colour in entries:
        axis.plot([], [], color=colour, label=entry["name"])
        for index, (_, (length, name)) in enumerate(lines):
            rows = [cell for cell in _cells(entry, task) if not listing or cell["length"] == length]
            aside = 1 + 0.008 * drawn  # so that equal intervals both show
            _line(axis, [aside * cell[x] for cell in rows], [cell["scores"][name] for cell in rows], colour, index)
            drawn += 1
    for index, (words, _) in enumerate(lines):
        axis.plot([], [], color="black", linestyle=STYLES[index % len(STYLES)], label=words)
    for chance in {cell["scores"]["chosen"]["chance"] for cell in _cells(entries[0][0], task)} if not listing else ():
        axis.axhline(chance, color="gray", linestyle=":", linewidth=1, label="chance of the choice")
    values = sorted({cell[x] for entry, _ in entries for cell in _cells(entry, task)})
    axis.set_xscale("log", base=2)
    axis.set_xticks(values, [str(value) for value in values])
    axis.minorticks_off()
    axis.set_xlabel(f"{'pairs' if listing else 'tokens'} (95% interval by document)")
    axis.set_ylabel("share of keys right" if listing else "share right")
    axis.set_ylim(-0.03, 1.03)
    axis.set_title(f"{task}: {first['tasks'][task]}", fontsize=8, wrap=True)
    axis.legend(fontsize=7, frameon=False)
    axis.grid(alpha=0.25)


def _cells(entry: dict[str, Any], task: str) -> list[dict[str, Any]]:
    return [cell for cell in entry["tasks"]["cells"] if cell["task"] == task]


def _line(axis: Any, x: list[float], scores: list[dict[str, Any]], colour: str, index: int) -> None:
    mean = [score["mean"] for score in scores]
    low, high = ([score["mean"] if score[end] is None else score[end] for score in scores] for end in ("low", "high"))
    reach = [
        [max(0.0, middle - bound) for middle, bound in zip(mean, low, strict=True)],
        [max(0.0, bound - middle) for middle, bound in zip(mean, high, strict=True)],
    ]
    style = {"linestyle": STYLES[index % len(STYLES)], "color": colour, "marker": "o", "markersize": 3}
    axis.errorbar(x, mean, yerr=reach, capsize=2, elinewidth=0.7, **style)
