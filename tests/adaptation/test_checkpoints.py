"""Checkpoints and metrics survive a kill: complete or absent, each step once."""

from __future__ import annotations

import json

from surgery.adaptation import checkpoints
from surgery.adaptation.monitoring import MetricsFile, Step, read_metrics, truncate


def make(folder, step):
    partial = checkpoints.staging(folder) / f"checkpoint-{step}"
    partial.mkdir(parents=True)
    (partial / "weights").write_bytes(b"x" * step)
    checkpoints.publish(partial, folder / f"checkpoint-{step}")


def test_the_last_two_are_kept_in_order_of_step(tmp_path):
    for step in (9, 10, 100):
        make(tmp_path, step)
        checkpoints.prune(tmp_path)
    assert [checkpoints.step_of(found) for found in checkpoints.complete(tmp_path)] == [10, 100]


def test_unfinished_directories_are_ignored_and_removed(tmp_path):
    make(tmp_path, 5)
    make(tmp_path, 7)
    (tmp_path / "checkpoint-7" / "weights").write_bytes(b"xxx")  # cut off
    bare = tmp_path / "checkpoint-9"  # written in place and killed
    bare.mkdir()
    (bare / "weights").write_bytes(b"x" * 9)
    staged = checkpoints.staging(tmp_path) / "checkpoint-11"
    staged.mkdir(parents=True)
    (tmp_path / "checkpoint-12").mkdir()
    (tmp_path / "checkpoint-12" / checkpoints.COMPLETE).write_text("{")
    other = tmp_path / "notes"
    other.mkdir()
    assert [found.name for found in checkpoints.complete(tmp_path)] == ["checkpoint-5"]
    checkpoints.discard_unfinished(tmp_path)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["checkpoint-5", "notes"]


def test_publishing_replaces_a_former_one(tmp_path):
    make(tmp_path, 3)
    partial = checkpoints.staging(tmp_path) / "checkpoint-3"
    partial.mkdir(parents=True)
    (partial / "other").write_bytes(b"new")
    checkpoints.publish(partial, tmp_path / "checkpoint-3")
    assert checkpoints.is_complete(tmp_path / "checkpoint-3")
    assert not (tmp_path / "checkpoint-3" / "weights").exists()


def step(number):
    return Step(number, 10 * number, float("inf") if number == 2 else 1.0, {"kl": 1.0}, {"host": 0.1}, 0.5, 1.0, 9.0)


def test_metrics_hold_each_step_once_after_a_resume(tmp_path):
    path = tmp_path / "metrics.jsonl"
    metrics = MetricsFile(path)
    metrics.begin(0, 6)
    for number in range(1, 6):
        metrics.step(step(number))
    metrics.end()
    with path.open("a") as stream:
        stream.write('{"step": 6, "los')  # killed while writing
    metrics.begin(3, 6)
    for number in range(4, 7):
        metrics.step(step(number))
    metrics.end()
    assert [row["step"] for row in read_metrics(path)] == [1, 2, 3, 4, 5, 6]
    assert read_metrics(path)[1]["loss"] is None
    for line in path.read_text().splitlines():
        json.loads(line, parse_constant=lambda name: (_ for _ in ()).throw(ValueError(name)))


def test_truncating_what_is_not_there_makes_nothing(tmp_path):
    truncate(tmp_path / "metrics.jsonl", 3)
    assert not list(tmp_path.iterdir())
