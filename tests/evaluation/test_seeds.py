"""Reports of several seeds as one."""

from __future__ import annotations

import pytest
import torch

from surgery.errors import UsageError
from surgery.evaluation.intervals import seeds_interval
from surgery.evaluation.seeds import combine_seeds


def entry(values, digest="d", lengths=(512,)):
    """A model's part of a report: list_recall of 4 pairs, the same values at every length."""
    cells = [
        {
            "task": "list_recall",
            "length": length,
            "pairs": 4,
            "documents": len(values),
            "digest": f"{digest}{length}",
            "scores": {"forced": {"values": [value + shift for value in values]}},
        }
        for shift, length in enumerate(lengths)
    ]
    return {"tasks": {"cells": cells}}


def report(values, baseline=None, control=None, **options):
    made = {"model": entry(values, **options), "baseline": None}
    return made | {k: entry(v, **options) for k, v in (("baseline", baseline), ("control", control)) if v is not None}


def test_figures_are_those_of_seeds_and_documents():
    scores, base = torch.rand(3, 6).tolist(), torch.rand(6).tolist()
    found = combine_seeds([report(row, base) for row in scores])
    assert found["seeds"] == 3 and found["same_documents"]
    (cell,) = found["cells"]
    table = torch.tensor(scores, dtype=torch.float64)
    assert cell["figures"]["model"]["forced"] == seeds_interval(table, True).as_dict()
    expected = seeds_interval(table - torch.tensor(base, dtype=torch.float64), True).as_dict()
    assert cell["figures"]["minus baseline"]["forced"] == pytest.approx(expected)
    assert cell["figures"].keys() == {"model", "minus baseline"}
    apart = combine_seeds([report(row, digest=str(seed)) for seed, row in enumerate(scores)])
    assert not apart["same_documents"]
    assert apart["cells"][0]["figures"]["model"]["forced"] == seeds_interval(table, False).as_dict()


def test_overall_is_the_mean_of_the_cells_kept():
    reports = [report(torch.rand(5).tolist(), lengths=(512, 1024)) for _ in range(4)]
    means = [cell["figures"]["model"]["forced"]["mean"] for cell in combine_seeds(reports)["cells"]]
    both = combine_seeds(reports)["overall"]["model"]["forced"]
    assert both["mean"] == pytest.approx(sum(means) / 2) and both["cells"] == 2
    # the cells' distance of 1 is no spread of seeds or documents
    assert both["high"] - both["low"] < 1
    one = combine_seeds(reports, keep=lambda cell: cell["length"] == 512)
    assert one["overall"]["model"]["forced"] == pytest.approx(
        one["cells"][0]["figures"]["model"]["forced"] | {"cells": 1}
    )


@pytest.mark.parametrize("same", [True, False])
def test_the_mean_of_cells_covers(same):
    """Four seeds that vary, three cells of different difficulty with 20 documents each; 600 trials."""
    covered = 0
    for _ in range(600):
        seeds = 0.04 * torch.randn(4, 1, dtype=torch.float64)
        reports = []
        documents = 0.3 * torch.randn(4, 3, 20, dtype=torch.float64)
        noise = 0.1 * torch.randn(4, 3, 20, dtype=torch.float64)
        for seed in range(4):
            values = 0.5 + seeds[seed] + documents[0 if same else seed] + noise[seed]
            made = report([0.0] * 20, digest="d" if same else str(seed), lengths=(1, 2, 3))
            for cell, row, level in zip(made["model"]["tasks"]["cells"], values, (-0.3, 0.0, 0.3), strict=True):
                cell["scores"]["forced"]["values"] = (row + level).tolist()
            reports.append(made)
        found = combine_seeds(reports)["overall"]["model"]["forced"]
        covered += found["low"] <= 0.5 <= found["high"]
    assert covered / 600 > 0.95 - 0.02 - 3 * (0.95 * 0.05 / 600) ** 0.5


def test_a_control_that_one_report_lacks_or_that_read_other_documents_is_left_out():
    rows = torch.rand(2, 4).tolist()
    found = combine_seeds([report(rows[0], control=rows[1]), report(rows[1])])
    assert found["cells"][0]["figures"].keys() == {"model"}
    other = report(rows[0], control=rows[1])
    other["control"]["tasks"]["cells"][0]["digest"] = "another"
    assert combine_seeds([other, report(rows[1], control=rows[0])])["cells"][0]["figures"].keys() == {"model"}


def test_what_cannot_be_combined_is_refused():
    row = [0.0, 1.0]
    with pytest.raises(UsageError, match="report 2 holds no tasks"):
        combine_seeds([report(row), {"model": {"tasks": None}}])
    with pytest.raises(UsageError, match="report 2 is of other tasks"):
        combine_seeds([report(row), report(row, lengths=(256,))])
    with pytest.raises(UsageError, match="some reports asked the same documents and some others"):
        combine_seeds([report(row), report(row), report(row, digest="e")])
    with pytest.raises(UsageError, match="different numbers of documents"):
        combine_seeds([report(row), report([*row, 0.5])])
