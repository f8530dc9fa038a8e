"""Training recall bases: rows, kinds and their weights, memories that start anew, several at once, going on later."""

from __future__ import annotations

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from surgery.errors import JobError, UsageError
from surgery.graft import compiling
from surgery.hosts import load_model
from surgery.pretraining import __main__ as command
from surgery.pretraining import bases
from surgery.pretraining import train as training_run
from surgery.pretraining.bases import base_names, create, grafted_config, horizons_of, initialise, parts_of
from surgery.pretraining.curriculum import tokens_and_kinds
from surgery.pretraining.drawing import ANSWER, RANDOM, TEXT
from surgery.pretraining.export import export_base, round_to_stored
from surgery.pretraining.list_recall import Cell, list_recall
from surgery.pretraining.loop import Settings, Training, device_data
from surgery.pretraining.optimisation import optimisers, rate, set_rate
from surgery.pretraining.rows import Plan, read_rows, write_rows
from surgery.pretraining.stream import StreamModel
from surgery.pretraining.train import run, train

RECALL_BASES = [name for name in base_names() if name.startswith("recall-")]
PLAN = Plan(tokens=8 * 2 * 64, context=64, batch=2, recall=(0.6, 0.5), code=0.0)
SETTINGS = Settings(tokens=PLAN.tokens, context=PLAN.context, batch=PLAN.batch, log_every=3, muon_lr=0.03, adam_lr=0.02)


@pytest.fixture(scope="module")
def stream(corpus, tokenizer_path, tmp_path_factory):
    path = tmp_path_factory.mktemp("rows") / "rows.npy"
    write_rows(corpus, tokenizer_path, path, PLAN, workers=1)
    return path


def small(name):
    config = grafted_config(bases.base_config(name), parts_of(name)[1])
    model = create(config)
    initialise(model, horizons_of(name), 0)
    return model.eval(), config


@pytest.mark.parametrize("name", RECALL_BASES)
def test_windows_are_one_text_whose_documents_start_anew(small_bases, name):
    model, _ = small(name)
    runner = StreamModel(model, compiled=False, autocast=False)
    ids = torch.randint(1, 900, (2, 97))
    ids[:, 0] = ids[0, 20] = ids[1, 60] = 0
    reset = ids[:, :-1] == 0
    with torch.no_grad():
        logits = model(ids[:, :-1], reset=reset, use_cache=False).logits
        expected = torch.nn.functional.cross_entropy(logits.mT, ids[:, 1:], reduction="none")
        carries, found = runner.start(2), []
        for at in range(0, 96, 48):
            here = slice(at, at + 48)
            losses, carries = runner.losses(ids[:, :-1][:, here], ids[:, 1:][:, here], carries, reset[:, here])
            found.append(losses)
        alone = model(ids[:1, 20:-1], use_cache=False).logits
    torch.testing.assert_close(torch.cat(found, 1), expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(logits[:1, 20:], alone, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", [pytest.param("recall-gdn", marks=pytest.mark.slow), "recall-mamba2"])
def test_compiled_blocks_take_carries_and_new_documents(small_bases, name, monkeypatch):
    model, _ = small(name)
    ids = torch.randint(1, 900, (2, 40))
    ids[:, 0] = ids[1, 7] = 0
    compiled = []

    def compile_(function):
        compiled.append(torch.compile(function, backend="aot_eager", fullgraph=True, dynamic=False))
        return compiled[-1]

    monkeypatch.setattr(compiling, "compiled", compile_)
    runner = StreamModel(model, compiled=True, autocast=False)
    assert runner.settle(ids[:, :-1], ids[:, 1:], ids[:, :-1] == 0) is None
    assert [runner.block, runner.head_losses] == compiled

    monkeypatch.setattr(compiling, "compiled", lambda function: lambda *given: 1.5 * function(*given))
    runner = StreamModel(model, compiled=False, autocast=False)
    runner.head_losses = compiling.compiled(runner.head_losses)
    assert "compiled gradients are 5.0e-01 off" in runner.settle(ids[:, :-1], ids[:, 1:], ids[:, :-1] == 0)
    assert (runner.block, runner.head_losses) == runner.written

    def fail(*_):
        raise RuntimeError("no\ncompiler")

    runner.block = fail
    assert "runs uncompiled, because compiling failed: RuntimeError: no compiler" in runner.settle(
        ids[:, :-1], ids[:, 1:], None
    )
    assert (runner.block, runner.head_losses) == runner.written


@pytest.mark.parametrize("name", RECALL_BASES)
def test_hosts_start_alike_whatever_the_memory(small_bases, name):
    model, host = (dict(small(one)[0].named_parameters()) for one in (name, parts_of(name)[0]))
    assert all(torch.equal(model[key], parameter) for key, parameter in host.items())
    doses = [x for key, x in small(name)[0].named_buffers() if key.endswith("dose")]
    assert parts_of(name)[1] is None or all(dose == 1 for dose in doses)
    assert all(x == 0.25 for key, x in create(small(name)[1], 0.25).named_buffers() if key.endswith("dose")) or (
        parts_of(name)[1] is None
    )


@pytest.mark.parametrize("name", RECALL_BASES)
def test_every_parameter_learns(small_bases, stream, name):
    start = dict(small(name)[0].named_parameters())
    model, report = train(name, read_rows(stream)[0], SETTINGS, "cpu")
    assert [key for key, parameter in model.named_parameters() if torch.equal(parameter, start[key])] == []
    told = set().union(*report["history"])  # the last steps of so few may hold no recall document
    assert told == {"step", "loss", "tokens_per_second", "text", "random", "answer"}
    assert report["steps"] == PLAN.steps and report["tokens"] == PLAN.tokens


def test_the_base_has_its_size():
    for name in RECALL_BASES:
        config = grafted_config(bases.base_config(name), parts_of(name)[1])
        count = sum(parameter.numel() for parameter in create(config).parameters())
        assert 10_000_000 <= count <= 12_000_000, f"{name}: {count}"


def test_random_tokens_weigh_what_the_settings_say(small_bases, stream):
    rows, _ = read_rows(stream)
    _, kinds = tokens_and_kinds(np.array(rows))
    assert {*np.unique(kinds)} == {TEXT, RANDOM, ANSWER}

    def gradient(**weights):
        settings = Settings(**{**vars(SETTINGS), **weights})
        training = Training("recall-gdn", device_data(rows, 2, "cpu"), settings, "cpu", documents=True)
        tokens, targets, reset, kinds = training._window(0)
        losses, _ = training.runner.losses(tokens, targets, training.carries, reset)
        (expected,) = torch.autograd.grad(
            sum((losses * weight * (kinds == kind)).sum() for kind, weight in
                ((TEXT, 1), (RANDOM, settings.random_weight), (ANSWER, settings.answer_weight))) / losses.numel(),
            [training.runner.weight],
        )  # fmt: skip
        training.settings = Settings(**{**vars(settings), "clip": 1e9})
        for optimiser in training.optimisers:
            optimiser.step = lambda: None
        training._one()
        torch.testing.assert_close(training.runner.weight.grad, expected)
        assert training.sums[:, 1].tolist() == [(kinds == kind).sum().item() for kind in range(3)]
        return expected

    assert not torch.equal(gradient(random_weight=0.0), gradient(random_weight=1.0))
    assert not torch.equal(gradient(answer_weight=1.0), gradient(answer_weight=5.0))


def test_trainings_at_once_are_those_one_by_one_and_stopped_ones_go_on(small_bases, stream, tmp_path):
    rows, _ = read_rows(stream)
    names = ("recall-gdn-bayesian", "recall-mamba2-palimpsa")

    def trainings(**options):
        data = device_data(rows, 2, "cpu")
        return [
            Training(name, data, SETTINGS, "cpu", documents=True, checkpoint=tmp_path / f"{name}.pt", **options)
            for name in names
        ]

    expected = [train(name, rows, SETTINGS, "cpu")[0].state_dict() for name in names]
    assert not run(trainings(), checkpoint_every=100, until=0.0)
    again = trainings()
    assert run(again)
    for training, weights in zip(again, expected, strict=True):
        assert all(torch.equal(x, weights[key]) for key, x in training.model.state_dict().items())


def test_trainings_are_shortened_to_the_time_there_is(small_bases, stream, monkeypatch):
    data = device_data(read_rows(stream)[0], 2, "cpu")
    first, second = (Training(name, data, SETTINGS, "cpu", documents=True) for name in ("recall-gdn", "recall-mamba2"))
    clock = iter(range(1000))
    monkeypatch.setattr(training_run, "PACED", (1, 3))
    monkeypatch.setattr(training_run, "MARGIN", 1.0)
    # a second for each look at the clock: two rounds from 0 to 3, each of which looks once
    monkeypatch.setattr(training_run, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    assert run([first, second], until=9.0, fit=True)
    assert first.done == second.done == 2 + int(2 / 3 * (9 - 4)) < PLAN.steps
    assert first.factors[3].item() == pytest.approx(rate(3, first.steps))
    assert first.report()["steps"] == first.done

    other = Training("recall-gdn", data, SETTINGS, "cpu", documents=True)
    other.shorten(100)
    assert other.steps == PLAN.steps
    other.shorten(0)
    assert other.steps == 1


def test_a_training_that_fails_leaves_the_others_to_go_on(small_bases, stream, capsys):
    data = device_data(read_rows(stream)[0], 2, "cpu")
    names = ("recall-gdn", "recall-mamba2")
    broken, sound = (Training(name, data, SETTINGS, "cpu", documents=True) for name in names)
    with torch.no_grad():
        broken.model.get_input_embeddings().weight.fill_(float("nan"))
    assert not run([broken, sound])
    assert "step 0: the loss or its gradient is not finite" in broken.failed and broken.report()["failed"]
    assert sound.finished and not sound.failed and "failed" not in sound.report()
    assert f"recall-gdn: {broken.failed}" in capsys.readouterr().err
    with pytest.raises(JobError, match="not finite"):
        broken.failed = None
        run([broken])


def test_a_base_goes_on_from_what_was_exported(small_bases, stream, tokenizer_path, tmp_path, capsys):
    data = device_data(read_rows(stream)[0], 2, "cpu")
    first = Training("recall-gdn-bayesian", data, SETTINGS, "cpu", documents=True)
    for _ in range(3):
        first.advance()
    round_to_stored(first.model)
    export_base(first.model, first.config, tokenizer_path, tmp_path)
    (tmp_path / "training.json").write_text(json.dumps(first.report()), encoding="utf-8")
    second = Training("recall-gdn-bayesian", data, SETTINGS, "cpu", documents=True, start=tmp_path)
    assert second.done == 3 and "continues at step 3" in capsys.readouterr().err
    for name, x in first.model.state_dict().items():
        assert torch.equal(x, second.model.state_dict()[name]), name
    assert second.factors[3] < first.factors[3]  # the learning rate rises again
    run([second])
    with pytest.raises(UsageError, match=r"not recall-gdn$"):
        Training("recall-gdn", data, SETTINGS, "cpu", documents=True, start=tmp_path)
    with pytest.raises(UsageError, match="no exported base"):
        Training("recall-gdn", data, SETTINGS, "cpu", documents=True, start=tmp_path / "nothing")


def test_rates_on_the_device_are_the_same_rates(small_bases):
    models = [small("recall-gdn")[0] for _ in range(2)]
    for model, numbers in zip(models, (True, False), strict=True):
        found = optimisers(model, 0.03, 0.02, 0.1)[:1]
        for group in found[0].param_groups:
            group["lr"] = group["lr"] if numbers else torch.tensor(group["lr"])
        torch.manual_seed(1)
        for factor in (0.5, 1.0):
            for parameter in model.parameters():
                parameter.grad = torch.randn_like(parameter)
            set_rate(found, factor if numbers else torch.tensor(factor))
            found[0].step()
    for one, other in zip(*(model.parameters() for model in models), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("name", RECALL_BASES)
def test_what_is_stored_is_what_was_measured(small_bases, tokenizer_path, tmp_path, name):
    model, config = small(name)
    round_to_stored(model)
    export_base(model, config, tokenizer_path, tmp_path)
    ids = torch.randint(1, 900, (2, 70))
    with torch.no_grad():
        expected = model(ids, use_cache=False).logits
        assert torch.equal(load_model(tmp_path, dtype=torch.float32)(ids, use_cache=False).logits, expected)


def test_memories_take_options_that_they_have(small_bases, stream):
    data = device_data(read_rows(stream)[0], 2, "cpu")
    options = command.memory_options(["noise=constant", "rank=3"], ["recall-gdn-bayesian", "recall-gdn-palimpsa"])
    for name, expected in (("bayesian", {"noise": "constant"}), ("palimpsa", {"rank": 3})):
        training = Training(f"recall-gdn-{name}", data, SETTINGS, "cpu", documents=True, memory=options)
        assert expected.items() <= training.report()["memory"].items() and "dose" not in training.report()["memory"]
        training.advance()
    with pytest.raises(UsageError, match="cannot be read"):
        command.memory_options(["noise=["], ["recall-gdn-bayesian"])
    with pytest.raises(UsageError, match="neither restoring nor constant"):
        Training("recall-gdn-bayesian", data, SETTINGS, "cpu", documents=True, memory={"noise": "loud"})


def test_a_swapped_memory_needs_documents(small_bases):
    with pytest.raises(UsageError, match="rows of documents"):
        Training("recall-gdn-bayesian", device_data(np.ones(999, np.uint16), 2, "cpu"), SETTINGS, "cpu")


def test_rows_depend_on_the_plan_alone(corpus, tokenizer_path, stream, tmp_path):
    rows, plan = read_rows(stream)
    assert plan == PLAN and rows.shape == (2, 8 * 64 + 1) and rows.dtype == np.uint16
    write_rows(corpus, tokenizer_path, tmp_path / "again.npy", PLAN, workers=2)
    assert (np.load(tmp_path / "again.npy") == rows).all()
    assert {path.name for path in tmp_path.iterdir()} == {"again.npy", "again.json"}
    ids, _ = tokens_and_kinds(np.array(rows))
    assert (ids[:, 0] == 0).all() and ids.max() < 900

    (tmp_path / "again.json").write_text(json.dumps({**json.loads((tmp_path / "again.json").read_text()), "batch": 3}))
    with pytest.raises(UsageError, match=r"again\.json: not the plan"):
        read_rows(tmp_path / "again.npy")
    (tmp_path / "again.json").unlink()
    with pytest.raises(UsageError, match="no plan of rows"):
        read_rows(tmp_path / "again.npy")
    with pytest.raises(UsageError, match="ask for more"):
        write_rows(corpus, tokenizer_path, tmp_path / "less.npy", Plan(tokens=5))
    with pytest.raises(UsageError, match="tokens of books"):
        write_rows(corpus, tokenizer_path, tmp_path / "less.npy", Plan(tokens=10**8, code=0.0), workers=1)


def test_the_command_trains_two_bases_measures_them_and_goes_on(
    small_bases, stream, tokenizer_path, tmp_path, haystack, monkeypatch, capsys
):
    from surgery.pretraining import evaluate

    measure = evaluate.evaluate_recall
    monkeypatch.setattr(
        evaluate, "evaluate_recall", lambda *given, **options: measure(*given, documents=2, cells=[Cell(4), Cell(8)],
                                                                       limit=300, **options)
    )  # fmt: skip
    (tmp_path / "text.txt").write_text(haystack[:4000], encoding="utf-8")
    given = ["train", "--base", "recall-gdn", "recall-mamba2-bayesian", "--stream", str(stream), "--tokenizer",
             str(tokenizer_path), "--output", str(tmp_path / "out"), "--checkpoint", str(tmp_path / "checkpoints"),
             "--device", "cpu", "--text", str(tmp_path / "text.txt")]  # fmt: skip
    command.main([*given, "--minutes", "0.00001"])
    told = json.loads((tmp_path / "out/recall-gdn/training.json").read_text(encoding="utf-8"))
    assert told["steps"] == 1 and not (tmp_path / "out/recall-gdn/evaluation.json").exists()
    command.main(given)
    assert "recall-gdn: continues at step 1" in capsys.readouterr().err
    for name in ("recall-gdn", "recall-mamba2-bayesian"):
        measured = json.loads((tmp_path / "out" / name / "evaluation.json").read_text(encoding="utf-8"))
        assert set(measured["bars"]) == {"bits_per_byte", "8 pairs within 512", "limited within 2048"}
        assert {item["pairs"] for item in measured["lists"]} == {4, 8}
        load_model(tmp_path / "out" / name)
    with pytest.raises(SystemExit):
        command.main([*given, "--memory", "rank=3"])
    assert "--memory rank=3: write key=value, key one of noise, noise_from" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        command.main([*given, "--context", "32"])
    assert "--context 32: rows.npy was written for 64" in capsys.readouterr().err


def test_exact_recall_counts_whole_values(small_bases, tokenizer, haystack):
    """A model that continues with what follows the last time it saw these two tokens."""

    class Copier(torch.nn.Module):
        def __init__(self, wrong=0):
            super().__init__()
            self.lm_head = torch.nn.Linear(1024, 1024, bias=False)
            self.lm_head.weight.data.copy_(torch.eye(1024))
            self.wrong = wrong

        def backbone_module(self, tokens, use_cache):
            out = torch.zeros(*tokens.shape, 1024)
            for row, ids in enumerate(tokens.tolist()):
                for at in range(2, len(ids)):
                    # the longest match before, up to twelve tokens
                    best = max(range(1, at), key=lambda end: (self.matched(ids, end, at), end))
                    out[row, at, ids[best]] = 1
                    if self.wrong and at % self.wrong == 0:
                        out[row, at] = torch.nn.functional.one_hot(torch.tensor(7), 1024).float()
            return type("Out", (), {"last_hidden_state": out})

        @staticmethod
        def matched(ids, end, at):
            length = 0
            while length < 12 and length < end and ids[end - 1 - length] == ids[at - length]:
                length += 1
            return length

    cells = {"cells": [Cell(3)], "documents": 3, "forms": ("new",)}
    (perfect,) = list_recall(Copier(), tokenizer, haystack, **cells)
    assert perfect["exact"] == 1.0 and perfect["questions"] == 9 and perfect["documents"] == 3
    (broken,) = list_recall(Copier(wrong=2), tokenizer, haystack, **cells)
    assert broken["exact"] == 0.0  # of three digits, one at least is wrong
    with pytest.raises(UsageError, match="form 'old'"):
        list_recall(Copier(), tokenizer, haystack, forms=("old",))


def losses_of(names, rows, **options):
    """The losses of trainings at once on a GPU, by base."""
    data = device_data(rows, 2, "cuda")
    settings = Settings(**{**vars(SETTINGS), "log_every": 1})
    trainings = [Training(name, data, settings, "cuda", documents=True, **options) for name in names]
    yield trainings
    assert run(trainings)
    yield {training.name: [item["loss"] for item in training.history] for training in trainings}


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("name", RECALL_BASES)
def test_recorded_steps_are_those_of_python(small_bases, stream, name, compiled):
    rows, _ = read_rows(stream)
    found = []
    for recorded in (False, True):
        run_ = losses_of([name], rows, compiled=compiled)
        (training,) = next(run_)
        if not recorded:
            training.eager = -1
        found.append(next(run_)[name])
        assert (training.graph is not None) == recorded
    # bfloat16 products, and sums in another order
    assert found[0] == pytest.approx(found[1], rel=2e-3)
    assert found[1][-1] < found[1][0]


@pytest.mark.gpu
def test_trainings_at_once_on_a_gpu_are_those_one_by_one(small_bases, stream):
    rows, _ = read_rows(stream)

    def losses(names):
        run_ = losses_of(names, rows, compiled=False)
        next(run_)
        return next(run_)

    together = losses(RECALL_BASES)
    for name in RECALL_BASES:
        assert together[name] == pytest.approx(losses([name])[name], rel=2e-3)
