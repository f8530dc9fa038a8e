"""Several seeds' reports as one: the mean over models of different seeds, with what seeds and documents leave open."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from surgery.errors import UsageError
from surgery.evaluation.intervals import seeds_interval

# what a combined figure is of: the model's own score, or its difference to another model of the same report
FIGURES = {"model": None, "minus baseline": "baseline", "minus control": "control"}


def combine_seeds(
    reports: Sequence[dict[str, Any]], keep: Callable[[dict[str, Any]], bool] | None = None
) -> dict[str, Any]:
    """Combine the tasks of reports of :func:`surgery.evaluation.report.build_report`, one for each seed of training.

    Args:
        reports: of the same tasks, lengths, pairs and numbers of documents.
        keep: which cells count in ``overall``, given the first report's model's cell; all by default.

    Returns:
        ``cells``, and ``overall`` for the mean of the cells kept: figure (:data:`FIGURES`) -> score -> mean and 95%
        interval (:func:`surgery.evaluation.intervals.seeds_interval`). A figure that some report does not have, or
        whose two models have read different documents, is left out.

    Raises:
        UsageError: reports without tasks, of different cells, or with documents that only some of them share.
    """
    for number, report in enumerate(reports, 1):
        if not report["model"].get("tasks"):
            raise UsageError(f"report {number} holds no tasks; measure with surgery eval --tasks")
    by_cell = [{_key(cell): cell for cell in report["model"]["tasks"]["cells"]} for report in reports]
    keys = list(by_cell[0])
    for number, cells in enumerate(by_cell, 1):
        if list(cells) != keys:
            raise UsageError(f"report {number} is of other tasks, lengths or pairs than the first; measure all alike")
    same = _same_documents([[cells[key]["digest"] for key in keys] for cells in by_cell])
    cells = []
    overall: dict[tuple[str, str], list[Tensor]] = {}
    for key in keys:
        first = by_cell[0][key]
        figures: dict[str, dict[str, Any]] = {}
        for figure, role in FIGURES.items():
            for score in first["scores"]:
                values = _values(reports, key, score, role)
                if values is None:
                    continue
                figures.setdefault(figure, {})[score] = seeds_interval(values, same).as_dict()
                if keep is None or keep(first):
                    overall.setdefault((figure, score), []).append(values)
        cells.append({name: first[name] for name in ("task", "length", "pairs", "documents")} | {"figures": figures})
    found: dict[str, dict[str, Any]] = {}
    for (figure, score), tables in overall.items():
        found.setdefault(figure, {})[score] = _mean_of_cells(tables, same) | {"cells": len(tables)}
    return {"seeds": len(reports), "same_documents": same, "cells": cells, "overall": found}


def _mean_of_cells(tables: list[Tensor], same: bool) -> dict[str, float | None]:
    """The mean of cells [S, G] each, every cell weighing the same: cells are chosen, only seeds and documents vary."""
    size = min(table.shape[1] for table in tables)
    if any(table.shape[1] != size for table in tables):
        raise UsageError("cells of different numbers of documents have no common mean; measure all with one --samples")
    mean = sum(table.mean().item() for table in tables) / len(tables)
    apart = torch.cat([table - table.mean() for table in tables], dim=1)
    return seeds_interval(apart + mean, same).as_dict()


def _values(reports: Sequence[dict[str, Any]], key: tuple[Any, ...], score: str, role: str | None) -> Tensor | None:
    """[S, G] scores, or differences to the model of ``role``; None where a report does not have them."""
    rows = []
    for report in reports:
        cell = _cell(report["model"], key)
        row = torch.tensor(cell["scores"][score]["values"], dtype=torch.float64)
        if role is not None:
            twin = _cell(report.get(role), key)
            if twin is None or twin["digest"] != cell["digest"] or score not in twin["scores"]:
                return None
            row = row - torch.tensor(twin["scores"][score]["values"], dtype=torch.float64)
        rows.append(row)
    if len({row.numel() for row in rows}) > 1:
        raise UsageError(f"{key[0]}: the reports have different numbers of documents; measure all with one --samples")
    return torch.stack(rows)


def _cell(entry: dict[str, Any] | None, key: tuple[Any, ...]) -> dict[str, Any] | None:
    cells = (entry or {}).get("tasks") or {"cells": []}
    return next((cell for cell in cells["cells"] if _key(cell) == key), None)


def _key(cell: dict[str, Any]) -> tuple[Any, ...]:
    return cell["task"], cell["length"], cell["pairs"]


def _same_documents(digests: list[list[str]]) -> bool:
    """Whether all reports asked the same documents (True) or each its own (False).

    Raises:
        UsageError: some documents are shared and some are not.
    """
    if all(row == digests[0] for row in digests):
        return True
    if all(len(set(column)) == len(column) for column in zip(*digests, strict=True)):
        return False
    raise UsageError(
        "some reports asked the same documents and some others; measure all with one --seed, or each its own"
    )
