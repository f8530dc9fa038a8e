"""The rows by name: a group, a measure and its arguments."""

from __future__ import annotations

from typing import Any, NamedTuple


class Row(NamedTuple):
    """What is measured, by the name of a function in :mod:`surgery.benchmark.measures`, and its arguments."""

    group: str
    measure: str
    arguments: dict[str, Any]


def _rows() -> dict[str, Row]:
    rows: dict[str, Row] = {}
    for shape, batch, tokens in (
        ("mamba2-2.7b", 4, 2048),
        ("mamba2-2.7b", 1, 32768),
        ("gdn-340m", 4, 2048),
        ("gdn-340m", 16, 2048),
        ("gdn-340m", 32, 2048),
        ("gdn-340m", 1, 32768),
        ("gdn-340m-v512", 4, 2048),
    ):
        arguments = {"shape": shape, "batch": batch, "tokens": tokens, "count": 5}
        rows[f"mixer {shape} {batch}x{tokens}"] = Row("mixer", "mixer", arguments)
    for shape in ("mamba2-2.7b", "gdn-340m"):
        arguments = {"shape": shape, "batch": 4, "tokens": 2048, "count": 5, "eager": True}
        rows[f"mixer {shape} 4x2048 not compiled"] = Row("mixer", "mixer", arguments)
    for batch, tokens in ((4, 2048), (1, 32768)):
        for rule in ("host", "palimpsa"):
            arguments = {
                "shape": "mamba2-2.7b", "rule": rule, "kind": "next-token", "batch": batch, "tokens": tokens,
                "count": 6 if tokens < 10000 else 3, "trainable": "all", "recompute": tokens > 10000,
            }
            rows[f"train mamba2-2.7b {batch}x{tokens} {rule}"] = Row("mamba2", "training", arguments)
    for phase, kind in (("control", "next-token"), ("phase A", "hidden"), ("phase B", "logits")):
        for rule in ("host",) if kind == "next-token" else ("host", "palimpsa", "bayesian"):
            arguments = {
                "shape": "gdn-340m", "rule": rule, "kind": kind, "batch": 4, "tokens": 2048, "count": 6,
                "trainable": "swapped",
            }
            rows[f"train gdn-340m 4x2048 {phase} {rule}"] = Row("gdn", "training", arguments)
    for shape, rules in (("mamba2-2.7b", ("host", "palimpsa")), ("gdn-340m", ("host", "palimpsa", "bayesian"))):
        for batch in (1, 64):
            for rule in rules:
                arguments = {"shape": shape, "rule": rule, "batch": batch, "count": 20}
                rows[f"decode {shape} batch {batch} {rule}"] = Row("decode", "decoding", arguments)
    return rows


ROWS = _rows()
GROUPS = tuple(dict.fromkeys(row.group for row in ROWS.values()))
