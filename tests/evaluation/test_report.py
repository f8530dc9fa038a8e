"""A measurement beside its baseline, as data and as a picture."""

from __future__ import annotations

import json
import math

import pytest

from surgery.data.texts import Text, load_text
from surgery.errors import UsageError
from surgery.evaluation.plots import plot_evaluation
from surgery.evaluation.report import RecallPlan, build_report, default_context, measure
from surgery.evaluation.tasks import chosen_tasks
from surgery.evaluation.tasks.measuring import TaskPlan

PLAN = RecallPlan(lengths=[256, 320], depths=[0.0, 1.0], samples=2)


@pytest.fixture(scope="module")
def text():
    return Text("a text", load_text("bundled").text[:12_000])


def test_report_beside_a_baseline(make_model, tokenizer, text, tmp_path):
    stages = {}
    measured, baseline = (
        measure(
            make_model(),
            tokenizer,
            text,
            name=name,
            limit=3000,
            recall=PLAN,
            progress=lambda stage, done, total: stages.__setitem__(stage, (done, total)),
        )
        for name in ("new", "old")
    )
    report = build_report(measured, baseline)
    assert report["text"]["tokens"] == 3000 and report["context"] == 256
    assert all(done == total for done, total in stages.values()) and len(stages) == 6
    ratio = report["difference"]["perplexity_ratio"]
    assert ratio["mean"] == pytest.approx(report["model"]["perplexity"] / report["baseline"]["perplexity"])
    assert ratio["low"] < ratio["mean"] < ratio["high"]
    assert math.log(ratio["low"]) == pytest.approx(report["difference"]["nll"]["low"])
    bits = report["model"]["bits_per_byte"] - report["baseline"]["bits_per_byte"]
    assert report["difference"]["bits_per_byte"] == pytest.approx(bits)
    assert [row["length"] for row in report["model"]["recall"]["lengths"]] == [256, 320]
    assert report["model"]["recall"]["haystack"] == "a text"
    json.dumps(report, allow_nan=False)

    picture = plot_evaluation(report, tmp_path / "report.png")
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_tasks_beside_a_baseline_and_a_control(make_model, tokenizer, text, tmp_path):
    plan = TaskPlan(chosen_tasks(["list_recall", "single_2", "multivalue"]), [None, 700], [4, 8], samples=3)
    models = (make_model(), make_model(), make_model())
    options = {"limit": 1000, "tasks": plan}
    one, two, three = (measure(m, tokenizer, text, name=n, **options) for m, n in zip(models, "abc", strict=True))
    report = build_report(one, two, three)
    json.dumps(report, allow_nan=False)
    assert [report[role]["name"] for role in ("model", "baseline", "control")] == ["a", "b", "c"]
    for role, key in (("baseline", "difference"), ("control", "control_difference")):
        found = report[key]["tasks"]
        assert [(row["task"], row["length"], row["pairs"]) for row in found] == [
            ("list_recall", None, 4), ("list_recall", None, 8), ("list_recall", 700, 4), ("list_recall", 700, 8),
            ("single_2", 700, None), ("multivalue", 700, None),
        ]  # fmt: skip
        for row, mine, theirs in zip(
            found, report["model"]["tasks"]["cells"], report[role]["tasks"]["cells"], strict=True
        ):
            expected = mine["scores"]["chosen"]["mean"] - theirs["scores"]["chosen"]["mean"]
            assert row["scores"]["chosen"]["mean"] == pytest.approx(expected)
    assert plot_evaluation(report, tmp_path / "tasks.png").read_bytes().startswith(b"\x89PNG")


def test_model_against_itself_differs_by_nothing(make_model, tokenizer, text):
    model = make_model()
    one, two = (measure(model, tokenizer, text, name=name, limit=1000) for name in "ab")
    report = build_report(one, two)
    assert report["difference"]["nll"] == {"mean": 0.0, "low": 0.0, "high": 0.0}
    assert {bucket["mean"] for bucket in report["difference"]["positions"]} == {0.0}


def test_other_tokenizer_is_compared_by_bytes_alone(make_model, make_tokenizer, tokenizer, text, tmp_path):
    one = measure(make_model(), tokenizer, text, name="a")
    two = measure(make_model(400), make_tokenizer(400, text.text), text, name="b")
    report = build_report(one, two)
    assert report["difference"].keys() == {"paired", "bits_per_byte"} and not report["difference"]["paired"]
    plot_evaluation(report, tmp_path / "report.svg")


def test_text_shorter_than_the_context(make_model, tokenizer):
    with pytest.raises(UsageError, match="shorter than one context of 512"):
        measure(make_model(), tokenizer, Text("note.txt", "too short"), name="m", context=512)


def test_plot_needs_a_directory_and_a_format(make_model, tokenizer, text, tmp_path):
    report = build_report(measure(make_model(), tokenizer, text, name="a", limit=300))
    with pytest.raises(UsageError, match="does not exist"):
        plot_evaluation(report, tmp_path / "nowhere" / "plot.png")
    with pytest.raises(UsageError, match="must end in"):
        plot_evaluation(report, tmp_path / "plot.gif")


@pytest.mark.parametrize("tokens", [2, 15, 16, 100, 1000, 25_000, 10**7])
def test_default_context_leaves_windows(tokens):
    context = default_context(tokens)
    assert 2 <= context <= 2048
    assert context == 2 or tokens // context >= 8
