"""Associative recall from scratch: models that differ in their memory alone, a curriculum, a test at every length."""

from __future__ import annotations

import math

import pytest
import torch

from surgery.errors import UsageError
from surgery.experiments.device_loop import DeviceLoop
from surgery.experiments.jobs import ended
from surgery.experiments.mqar import QUICK, Mqar, build, memories
from surgery.experiments.trained import Job
from surgery.kernels import dispatch

TINY = {
    "lengths": (8, 16), "vocabulary": 32, "width": 16, "heads": 2, "key_dim": 4, "value_dim": 8, "steps": 6,
    "tokens": 64, "rates": (1e-3,), "tested": 4,
}  # fmt: skip


def test_the_defaults_are_the_papers():
    settings = Mqar()
    assert settings.lengths == (128, 256, 512, 1024)
    assert (settings.vocabulary, settings.width, settings.heads) == (8192, 128, 8)
    assert [settings.recall(length).pairs for length in settings.lengths] == [32, 64, 128, 256]
    assert [settings.recall(length).tokens for length in settings.lengths] == list(settings.lengths)
    assert Mqar(task="update").recall(1024).tokens == 1280


def test_length_grows_and_the_longest_is_trained_for_longest():
    assert Mqar(**TINY | {"lengths": (8, 12, 16), "steps": 100}).stages() == [(8, 25), (12, 50), (16, 100)]


def test_models_differ_in_their_memory_alone():
    settings = Mqar(**TINY)
    bodies = {rule: build(settings, Job(rule, 1e-3, 3), "cpu") for rule in settings.rules}
    found = {rule: {(m.rule, m.geometry.style, float(m.dose)) for m in memories(body)} for rule, body in bodies.items()}
    assert found == {
        "additive": {("host", "additive", 0.0)}, "plain": {("palimpsa", "delta", 0.0)},
        "palimpsa": {("palimpsa", "delta", 1.0)}, "delta": {("host", "delta", 0.0)},
        "bayesian": {("bayesian", "delta", 1.0)},
    }  # fmt: skip
    assert all(memory.options["noise_from"] == "token" for memory in memories(bodies["bayesian"]))
    states = {
        rule: {name: x for name, x in body.model.state_dict().items() if ".memory." not in name}
        for rule, body in bodies.items()
        if rule != "additive"
    }
    for state in states.values():
        assert state.keys() == states["delta"].keys()
        assert all(tensor.equal(states["delta"][name]) for name, tensor in state.items())
    # of one shape of state: as many numbers for Mamba2 as for the delta layer
    shapes = {math.prod(memories(bodies[rule])[0].state_shape(1)) for rule in ("additive", "delta")}
    assert len(shapes) == 1


def test_without_metaplasticity_the_layer_is_additive():
    settings = Mqar(**TINY)
    body, (ids, _) = build(settings, Job("plain", 1e-3, 0), "cpu"), settings.recall(16).draw(2, torch.Generator())
    memory, caught = memories(body)[0], []
    memory.register_forward_hook(lambda module, args, output: caught.append((args[0], output[0])))
    body.run(ids)
    ((given, o),) = caught
    expected, _ = dispatch.additive(given.q, given.k, given.v, given.log_decay, write=given.write)
    torch.testing.assert_close(o, expected)


def test_block_trains_its_delta_layers_without_convolution():
    def convolved(task, rule):
        body = build(Mqar(**TINY | {"task": task}), Job(rule, 1e-3, 0), "cpu")
        return any("conv1d" in name for name, _ in body.model.named_parameters())

    assert [convolved(task, "bayesian") for task in ("base", "update", "block")] == [True, True, False]
    assert convolved("block", "additive")


@pytest.mark.parametrize("rule", Mqar.labels)
def test_a_training_moves_the_model_and_tests_every_length(rule, monkeypatch):
    settings, seen = Mqar(**TINY), []
    run = DeviceLoop.run
    monkeypatch.setattr(
        DeviceLoop, "run", lambda self, task, *rest: seen.append((self, task.pairs)) or run(self, task, *rest)
    )
    result = ended(settings.training(Job(rule, 1e-3, 0), "cpu"))
    assert [pairs for _, pairs in seen] == [2, 4]
    assert result["test"].keys() == {"8", "16"} and len(result["losses"]) == 2
    assert all(0 <= figure <= 1 for figure in (result["validation"], *result["test"].values()))
    body = seen[0][0].distiller.student
    before = build(settings, Job(rule, 1e-3, 0), "cpu").model.state_dict()
    moved = {name for name, tensor in body.model.state_dict().items() if not tensor.equal(before[name])}
    assert any("q_proj" in name or "in_proj" in name for name in moved)
    learned = any(".memory." in name for name in moved)
    assert learned == (rule in ("palimpsa", "bayesian"))


def test_a_model_that_is_not_finite_has_answered_nothing(monkeypatch):
    loss = DeviceLoop._loss
    monkeypatch.setattr(DeviceLoop, "_loss", lambda self, *rest: loss(self, *rest) * math.nan)
    result = ended(Mqar(**TINY).training(Job("delta", 1e-3, 0), "cpu"))
    assert result["not_finite"] == 0 and result["validation"] == 0 and set(result["test"].values()) == {0.0}


def test_rows_stand_beside_what_is_printed():
    results = [{"test": {"128": 0.9, "1024": x}} for x in (0.6, 0.8)]
    settings = Mqar(lengths=(128, 1024), rules=("palimpsa",))
    short, long = settings.rows({"palimpsa": results})
    assert short["paper"] is None and long["paper"] == 0.69 and long["mean"] == pytest.approx(0.7)
    updated = Mqar(lengths=(128, 1024), task="update").rows({"bayesian": results, "palimpsa": results})
    assert [one["paper"] for one in updated] == [None, 0.88, None, None]


def test_quick_is_named_and_small():
    settings = Mqar(**QUICK)
    assert len(settings.seeds) == 3 and settings.rules == tuple(Mqar.labels)
    assert "4, 8 pairs, vocabulary 32" in settings.sizes() and f"{settings.steps} steps" in settings.sizes()


@pytest.mark.parametrize(
    ("given", "says"),
    (
        ({"task": "swap"}, "--task swap"),
        ({"lengths": ()}, "--lengths"),
        ({"lengths": (4,)}, "--lengths 4"),
        ({"lengths": (16, 8)}, "--lengths 16,8"),
        ({"steps": 3}, "--steps 3"),
        ({"tokens": 16}, "--tokens 16"),
        ({"vocabulary": 8}, "--vocabulary 8"),
        ({"heads": 0}, "--heads 0"),
        ({"tested": 1}, "--tested 1"),
        ({"rules": ("gla",)}, "--rules gla"),
        ({"width": 24}, "--width 24"),
    ),
)
def test_bad_settings_are_usage_errors(given, says):
    with pytest.raises(UsageError) as caught:
        Mqar(**TINY | given)
    assert says in str(caught.value) and len(str(caught.value).splitlines()) == 1
