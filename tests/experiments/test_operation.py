"""The study of the operation: its jobs take the product's path, are run once, and are compared fairly."""

from __future__ import annotations

import json
import math
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from safetensors.torch import load_file

from surgery.adaptation.distiller import Distiller
from surgery.adaptation.objectives.tokens import NextToken
from surgery.adaptation.parameters import optimizer, select
from surgery.adaptation.schedules import batch_shape, learning_rate_factor
from surgery.adaptation.teaching import body_of
from surgery.adaptation.trainer import PhaseTrainer, Settings
from surgery.errors import UsageError
from surgery.experiments import operation, operation_results, recall_training
from surgery.experiments.device_loop import DeviceLoop
from surgery.experiments.jobs import claim, only_one
from surgery.experiments.operation import run, work
from surgery.experiments.study import HOSTS, Arm, Job, Study, read
from surgery.hosts import adapter_for, load_model

ARM = Arm("bayesian", {"rule": "bayesian", "noise": "constant"}, over=0.25, rate=2e-3, memory_rate=4e-3)
SIZES = {"pairs": 2, "vocabulary": 16, "steps": 8, "adapt": 4, "batch": 4, "tested": 8}


@pytest.fixture(scope="module", params=HOSTS)
def hosted(request, tmp_path_factory):
    """A study with a host that was trained for a few steps, and their folder."""
    folder = tmp_path_factory.mktemp(request.param)
    study = Study(host=request.param, seeds=(0,), arms=(ARM,), control_rates=(1e-3,), every_host=True, **SIZES)
    claim(folder, study.fixed())
    work(study, Job(0), str(folder), "cpu")
    return study, folder


def trained_by(monkeypatch, study: Study, folder, job: Job) -> dict:
    """What a job hands to the trainer."""
    caught = {}

    def catch(study, job, model, config, phase, dose, device):
        caught.update(model=model, config=config, phase=phase, dose=dose)
        yield
        return {}

    monkeypatch.setattr(recall_training, "_train", catch)
    list(recall_training.training(study, job, folder, "cpu"))
    return caught


def test_an_adaptation_starts_from_the_host_with_the_arms_memory(hosted, monkeypatch):
    study, folder = hosted
    weights = load_file(folder / "seed0-host" / "model.safetensors")
    host = load_model(folder / "seed0-host", dtype=torch.float32)
    ids, _ = study.recall().draw(3, torch.Generator().manual_seed(0))
    for arm in (ARM, *study.controls()):
        got = trained_by(monkeypatch, study, folder, Job(0, arm, 4))
        state = got["model"].state_dict()
        assert all(state[name].equal(tensor) for name, tensor in weights.items())
        mixers = adapter_for(got["config"]).mixers(got["model"])
        assert {mixer.memory.rule for mixer in mixers.values()} == {arm.memory["rule"]} and len(mixers) == 2
        with torch.no_grad():  # at dose 0 both compute what the host does
            assert torch.allclose(got["model"](ids).logits, host(ids).logits, atol=1e-5)
        assert all(getattr(mixer.memory, "noise", "constant") == "constant" for mixer in mixers.values())


def test_both_get_the_same_phase_but_for_dose_and_rates(hosted, monkeypatch):
    study, folder = hosted
    control = trained_by(monkeypatch, study, folder, Job(0, study.controls()[0], 40))
    arm = trained_by(monkeypatch, study, folder, Job(0, ARM, 40))
    for got in (control, arm):
        phase = got["phase"]
        assert (phase.kind, phase.trainable, phase.total_steps, phase.sequences) == ("next-token", "all", 40, 4)
        assert phase.context == study.recall().tokens
    assert (control["dose"].start, control["dose"].stop) == (0, 0)
    assert (arm["dose"].start, arm["dose"].stop, arm["dose"].steps) == (0, 1, 10)
    assert (arm["phase"].rates.memory, arm["phase"].rates.host) == (4e-3, 2e-3)
    assert (control["phase"].rates.memory, control["phase"].rates.host) == (1e-3, 1e-3)


def test_a_study_is_run_once_and_goes_on_from_its_files(hosted, monkeypatch):
    study, folder = hosted
    if study.host == "gdn":
        pytest.skip("the command's own test runs this host's jobs")
    lines = []
    first = run(study, folder, progress=lambda done, total, line: lines.append((done, total)))
    assert lines == [(done, 5) for done in range(1, 6)]
    (row,) = first["rows"]
    for reading in row["readings"].values():
        paired = reading["every"]
        assert paired["seeds"] == [0] and paired["not_finite"] == [] and paired["control_rates"] == [1e-3]
        assert paired["difference"]["mean"] == pytest.approx(paired["operated"] - paired["control"])
    monkeypatch.setattr(operation, "training", None)  # nothing is left to run
    assert run(study, folder) == first
    with pytest.raises(UsageError, match="with pairs 2, not 3"):
        run(Study(**{**vars(study), "pairs": 3}), folder)
    other = Arm("bayesian", {"rule": "bayesian"}, rate=2e-3, memory_rate=4e-3)
    with pytest.raises(UsageError, match="holds another arm of that name"):
        run(Study(**{**vars(study), "arms": (other,)}), folder)


@pytest.mark.slow
def test_worker_processes_find_what_one_process_finds(tmp_path):
    study = Study(seeds=(0, 1), arms=(ARM,), control_rates=(1e-3,), every_host=True, **SIZES)
    alone, together = (run(study, tmp_path / str(jobs), jobs=jobs) for jobs in (1, 2))
    for one, two in zip(alone["rows"], together["rows"], strict=True):
        assert one == two
    assert not list((tmp_path / "2").glob(".*"))


@pytest.mark.gpu
def test_jobs_share_a_gpu_on_streams(tmp_path):
    lines = []
    study = Study(seeds=(0, 1), arms=(ARM,), control_rates=(1e-3,), every_host=True, **SIZES | {"steps": 120})
    run(study, tmp_path, device="cuda", jobs=3, progress=lambda done, total, line: lines.append((done, total)))
    assert lines == [(done, 10) for done in range(1, 11)]
    assert all("not_finite" not in path.read_text() for path in tmp_path.glob("seed*.json"))


def test_a_job_that_is_not_finite_has_answered_nothing(hosted, monkeypatch):
    study, folder = hosted
    loss = DeviceLoop._loss
    monkeypatch.setattr(DeviceLoop, "_loss", lambda self, *rest: loss(self, *rest) * (1 if self.step < 2 else math.nan))
    steps = recall_training.training(study, Job(0, ARM, 6), folder, "cpu")
    with pytest.raises(StopIteration) as end:
        while True:
            next(steps)
    result = end.value.value
    assert result["not_finite"] == 2
    assert (result["validation"], result["test"], result["harder"]) == (0, 0, 0)


def finished(job_of):
    """The training of a job whose result ``job_of`` gives."""

    def training(*arguments):
        yield
        return job_of(*arguments)

    return training


def test_a_job_that_another_process_holds_is_left_to_it(tmp_path, monkeypatch):
    study, job = Study(seeds=(0,), arms=(), **SIZES), Job(0)
    result = {"job": "x", "validation": 0.9, "test": 0.8, "harder": 0.7}
    monkeypatch.setattr(operation, "training", finished(lambda *_: result))
    with only_one(tmp_path / f".{job.name}.lock") as mine:
        with ThreadPoolExecutor(1) as other:  # to a lock, another thread is as another process
            assert mine and other.submit(work, study, job, str(tmp_path), "cpu").result() is None
        assert read(tmp_path, job) is None
    assert work(study, job, str(tmp_path), "cpu")["test"] == 0.8
    assert [path.name for path in tmp_path.iterdir()] == ["seed0-host.json"]


def fake_jobs(monkeypatch, hosts: dict[int, tuple[float, float]], figures: dict) -> list[str]:
    """Let every job have the figures given: hosts their validation and that at three quarters, adaptations by seed,
    arm, rate and steps; returns the names of the jobs that run."""
    ran = []

    def job_of(study, job, place, device):
        ran.append(job.name)
        if job.arm is None:
            validation, before = hosts[job.seed]
            return {"job": job.name, "validation": validation, "three_quarters": before, "test": 0.5, "harder": 0.4}
        validation, test = figures.get((job.seed, job.arm.name, job.arm.rate, job.steps), (0.1, 0.1))
        return {"job": job.name, "validation": validation, "test": test, "harder": test / 2}

    monkeypatch.setattr(operation, "training", finished(job_of))
    return ran


def test_hosts_that_have_not_learnt_or_still_learn_do_not_count(tmp_path, monkeypatch):
    hosts = {0: (0.9, 0.895), 1: (0.9, 0.88), 2: (0.69, 0.69), 3: (0.7, 0.7)}
    ran = fake_jobs(monkeypatch, hosts, {})
    study = Study(seeds=(0, 1, 2, 3), arms=(ARM,), control_rates=(1e-3,), **SIZES)
    result = run(study, tmp_path / "some")
    assert result["counted"] == [0, 3] and result["not_counted"] == [1, 2]
    assert {name.split("-")[0] for name in ran if "host" not in name} == {"seed0", "seed3"}
    ran.clear()
    result = run(Study(**{**vars(study), "every_host": True}), tmp_path / "all")
    assert {name.split("-")[0] for name in ran if "host" not in name} == {"seed0", "seed1", "seed2", "seed3"}
    reading = result["rows"][0]["readings"]["as trained"]
    assert reading["counted"]["seeds"] == [0, 3] and reading["every"]["seeds"] == [0, 1, 2, 3]


def test_the_controls_best_rate_is_chosen_by_validation(tmp_path, monkeypatch):
    figures = {
        (0, "control", 1e-3, 4): (0.80, 0.70), (0, "control", 3e-3, 4): (0.79, 0.99),
        (1, "control", 1e-3, 4): (0.60, 0.99), (1, "control", 3e-3, 4): (0.61, 0.60),
        (0, "control", 1e-3, 8): (0.10, 0.20), (0, "control", 3e-3, 8): (0.90, 0.90),
        (0, "bayesian", 2e-3, 4): (0.5, 0.74), (1, "bayesian", 2e-3, 4): (0.5, 0.66),
    }  # fmt: skip
    fake_jobs(monkeypatch, {0: (0.9, 0.9), 1: (0.9, 0.9)}, figures)
    study = Study(seeds=(0, 1), arms=(ARM,), control_rates=(1e-3, 3e-3), **SIZES)
    readings = run(study, tmp_path)["rows"][0]["readings"]
    trained = readings["as trained"]["counted"]
    assert trained["control_rates"] == [1e-3, 3e-3]
    assert trained["each"] == pytest.approx([0.04, 0.06], abs=1e-6)
    # two hosts: half their distance times the quantile of Student's t at one degree of freedom
    assert trained["difference"]["mean"] == pytest.approx(0.05, abs=1e-6)
    assert trained["difference"]["low"] == pytest.approx(0.05 - 12.7062 * 0.01, abs=1e-5)
    assert readings["1.5 x pairs"]["counted"]["each"] == pytest.approx([0.02, 0.03], abs=1e-6)
    assert readings["2 x steps"]["counted"]["control_rates"][0] == 3e-3


@pytest.mark.parametrize("arm", (Arm("control"), ARM, Arm("p", {"rule": "palimpsa"}, rate=3e-3)))
def test_the_loop_does_the_steps_of_a_phase(hosted, tmp_path, arm, monkeypatch):
    """The same batches through ``distill``'s own trainer leave the same weights and the same losses."""
    study, folder = hosted
    steps, seen = 7, []
    models = [trained_by(monkeypatch, study, folder, Job(0, arm, steps)) for _ in range(2)]
    bodies = [body_of(got["model"], got["config"], [0, 1]) for got in models]
    memories = [
        {layer: mixer.memory for layer, mixer in adapter_for(got["config"]).mixers(got["model"]).items()}
        for got in models
    ]
    phase, dose, task = models[0]["phase"], models[0]["dose"], study.recall()
    for got in models:
        got["model"].train()
    loop = recall_training.device_loop(bodies[0], list(memories[0].values()), phase, dose, "cpu", "loop")
    list(loop.run(task, study.batch, torch.Generator().manual_seed(3), steps))

    class Items(torch.utils.data.Dataset):
        ids, targets = task.draw(steps * study.batch, torch.Generator().manual_seed(3))

        def __getitem__(self, index):
            return {"input_ids": self.ids[index], "targets": self.targets[index]}

        def passes(self, items):
            return [0]

    class Losses:
        def step(self, step):
            seen.append(step.loss)

    shape = batch_shape(study.batch, task.tokens, 1, study.batch)
    settings = Settings(tmp_path / "checkpoints", steps, save_every=steps, seed=0, device="cpu")
    selection = select(models[1]["model"], bodies[1].mixers, "all", phase="trainer")
    adam = optimizer(selection, phase.rates.memory, phase.rates.host)

    def factor(step):
        return learning_rate_factor(step, steps, phase.warmup_steps, phase.schedule)

    trainer = PhaseTrainer(
        Distiller(bodies[1], NextToken()), settings, phase="trainer", selection=selection, data=Items(),
        optimizer=adam, factor=factor, dose=dose, memories=memories[1], shape=shape, layer_of=str, watcher=Losses(),
    )  # fmt: skip
    trainer.train()
    assert loop.losses == pytest.approx([sum(seen) / steps], rel=1e-5)
    state, other = (got["model"].state_dict() for got in models)
    moved = load_file(folder / "seed0-host" / "model.safetensors")
    assert state.keys() == other.keys()
    for name, tensor in state.items():
        assert torch.allclose(tensor, other[name], atol=1e-6), name
        assert name not in moved or not tensor.equal(moved[name]), name
    assert all(memory.dose == 1 or arm.name == "control" for memory in memories[0].values())


def test_a_host_begins_with_fewer_pairs():
    stages = recall_training._stages(Study(pairs=48, steps=1000, length=400).recall(), 1000)
    assert [(task.pairs, stop) for task, stop in stages] == [(6, 100), (12, 200), (24, 350), (48, 1000)]
    assert stages[-1][0].tokens == 400


@pytest.mark.parametrize(
    ("text", "says"),
    (
        ("bayesian", "write for example"),
        ("a b:rule=bayesian", "write for example"),
        ("x:rule", "write for example"),
        ("control:rule=bayesian", "choose another name"),
        ("x:rule=host", "rule host is the control"),
        ("x:rule=bayes", "memory.rule"),
        ("x:rule=bayesian,nois=constant", "memory.nois"),
        ("x:rule=palimpsa,noise=constant", "memory.noise"),
        ("x:noise=constant", "rule"),
        ("x:rule=bayesian,over=2", "over"),
        ("x:rule=bayesian,rate=fast", "learning_rate"),
    ),
)
def test_arms_that_no_recipe_takes_are_refused(text, says):
    with pytest.raises(UsageError, match=says) as caught:
        Arm.parse(text)
    assert str(caught.value).startswith(f"--arm {text}: ") and "/tmp" not in str(caught.value)


def test_an_arm_is_read_as_a_recipe_is():
    arm = Arm.parse("p:rule=palimpsa,b_scale=[0.2, 0.5],rank=4,over=0.3,rate=3e-4,memory_rate=1e-2")
    assert arm == Arm("p", {"rule": "palimpsa", "b_scale": [0.2, 0.5], "rank": 4}, 0.3, 3e-4, 1e-2)


def test_a_file_that_is_no_result_is_named(tmp_path):
    (tmp_path / "seed0-host.json").write_text(json.dumps([1]))
    with pytest.raises(UsageError, match=r"seed0-host\.json: is no result"):
        read(tmp_path, Job(0))


def test_the_picture_shows_every_arm(tmp_path, monkeypatch):
    fake_jobs(monkeypatch, {0: (0.9, 0.9), 1: (0.9, 0.9)}, {})
    result = run(Study(seeds=(0, 1), arms=(ARM,), control_rates=(1e-3,), **SIZES), tmp_path / "study")
    operation_results.plot(result, tmp_path / "picture.svg")
    assert "<svg" in (tmp_path / "picture.svg").read_text()
