"""A run from the swap to the last phase's model, on tiny random models."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from surgery.adaptation import checkpoints
from surgery.adaptation.continuing import FREE, differences
from surgery.adaptation.monitoring import Listener, read_metrics
from surgery.adaptation.phases import Options
from surgery.adaptation.run import distill
from surgery.errors import JobError, UsageError
from surgery.hosts import load_model, read_config

MIXERS = ("backbone.layers.0.mixer.", "backbone.layers.2.mixer.", "model.layers.0.attn.", "model.layers.2.attn.")


def weights(directory):
    found = {}
    for shard in sorted(directory.glob("*.safetensors")):
        found |= load_file(shard)
    return found


def same(one, other):
    assert one.keys() == other.keys()
    return all(one[name].dtype == other[name].dtype and torch.equal(one[name], other[name]) for name in one)


class Stopped(Exception):
    pass


def stopping(at):
    """Options whose run dies after step ``at`` of whatever phase gets there."""

    def stop(step, steps):
        if step.step == at:
            raise Stopped

    return Options(save_every=2, watchers=lambda title: [Listener(stop)])


@pytest.mark.parametrize(("family", "rule"), [("mamba2", "palimpsa"), ("gated_deltanet", "bayesian")])
def test_a_run_from_the_swap_to_the_last_model(make_base, make_recipe, phase, tmp_path, family, rule):
    base = make_base(family)
    phases = [phase("hidden"), phase("logits", name="distil"), phase("next-token")]
    recipe = make_recipe(base, phases, memory={"rule": rule})
    run = tmp_path / "run"
    result = distill(recipe, run, options=Options(micro_batch=2), evaluate=False)
    assert [p["status"] for p in result["manifest"]["phases"]] == ["finished"] * 3
    applied, final = weights(run / "applied"), weights(run / "phases" / "03-next-token" / "model")
    assert applied.keys() == final.keys()
    for name, tensor in final.items():
        if not name.startswith(MIXERS):
            assert tensor.dtype == applied[name].dtype and torch.equal(tensor, applied[name]), name
        elif name.endswith("dose"):
            assert tensor.item() == 1.0 and applied[name].item() == 0.0
        elif not name.endswith("Ip_log"):  # a buffer
            assert not torch.equal(tensor, applied[name]), f"{name} was never trained"
    for number, name in enumerate(("hidden", "distil", "next-token"), 1):
        folder = run / "phases" / f"{number:02d}-{name}"
        rows = read_metrics(folder / "metrics.jsonl")
        assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
        assert [row["tokens"] for row in rows] == [128 * step for step in range(1, 7)]
        assert list((folder / "tensorboard").glob("events.*")) and not (folder / "checkpoints").exists()
    doses = [row["dose"] for row in read_metrics(run / "phases" / "01-hidden" / "metrics.jsonl")]
    assert doses == pytest.approx([1 / 3, 2 / 3, 1, 1, 1, 1])
    # the base is what it was
    assert same(weights(base), {name: applied[name] for name in weights(base)})


def test_a_bfloat16_base_keeps_its_bytes_and_trained_weights_their_digits(make_base, make_recipe, phase, tmp_path):
    base = make_base("gated_deltanet")
    load_model(base, dtype=torch.bfloat16).save_pretrained(base)
    recipe = make_recipe(base, [phase("next-token", steps=2)], memory={"rule": "bayesian"}, max_drift={"kl": 1.0})
    run = tmp_path / "run"
    result = distill(recipe, run, evaluate=False)
    final, original = weights(run / "phases" / "01-next-token" / "model"), weights(base)
    assert read_config(result["model"])["dtype"] == "float32"
    for name, tensor in final.items():
        assert tensor.dtype == (torch.float32 if name.startswith(MIXERS) else original[name].dtype), name
    model = load_model(result["model"])
    for name, parameter in model.named_parameters():
        assert parameter.dtype == torch.float32 and torch.equal(parameter, final[name].float()), name


@pytest.mark.slow
def test_micro_batches_do_not_change_the_result(make_base, make_recipe, phase, tmp_path, agree):
    kinds = ("hidden", "logits", "next-token")
    recipe = make_recipe(make_base(), [phase(kind, batch=96) for kind in kinds])
    start = None
    for micro in (1, 2, 3):  # 3, 2 and 1 forwards a step; the second's are unequal
        distill(recipe, tmp_path / f"run-{micro}", start=start, options=Options(micro_batch=micro), evaluate=False)
        start = str(tmp_path / "run-1" / "applied")
    for micro in (2, 3):
        agree(tmp_path / "run-1", tmp_path / f"run-{micro}")


# after step 1 no checkpoint is there yet; 5 lies between two; 6 is the last step of the second phase
@pytest.mark.parametrize("at", [(5,), pytest.param((1, 6, 3), marks=pytest.mark.slow)])
def test_an_interrupted_run_ends_with_the_same_bits(make_base, make_recipe, phase, tmp_path, at):
    phases = [phase("hidden", steps=7), phase("logits", steps=6), phase("next-token", steps=4)]
    recipe = make_recipe(make_base(), phases)
    straight, broken = tmp_path / "straight", tmp_path / "broken"
    options = Options(micro_batch=2, save_every=2)
    distill(recipe, straight, options=options, evaluate=False)
    for step in at:
        with pytest.raises(Stopped):
            distill(recipe, broken, options=replace(stopping(step), micro_batch=2), evaluate=False)
    distill(recipe, broken, options=options, evaluate=False)
    for number, name in enumerate(("hidden", "logits", "next-token"), 1):
        one, other = (run / "phases" / f"{number:02d}-{name}" for run in (straight, broken))
        assert same(weights(one / "model"), weights(other / "model"))
        rows = [read_metrics(folder / "metrics.jsonl") for folder in (one, other)]
        for row in (*rows[0], *rows[1]):
            row.pop("tokens_per_second")
        assert rows[0] == rows[1]


def test_finished_phases_are_not_redone(make_base, make_recipe, phase, tmp_path):
    recipe = make_recipe(make_base(), [phase("hidden", steps=3), phase("next-token", steps=3)])
    run = tmp_path / "run"
    with pytest.raises(Stopped):
        calls = iter([None, stopping(2).watchers("x")[0]])
        distill(
            recipe,
            run,
            options=Options(watchers=lambda title: [w for w in [next(calls)] if w]),
            evaluate=False,
        )
    model = run / "phases" / "01-hidden" / "model"
    stamp = {path: path.stat().st_mtime_ns for path in model.iterdir()}
    (run / "phases" / "02-next-token" / "checkpoints" / "checkpoint-99").mkdir()
    result = distill(recipe, run, evaluate=False)
    assert {path: path.stat().st_mtime_ns for path in model.iterdir()} == stamp
    assert [p["status"] for p in result["manifest"]["phases"]] == ["finished"] * 2
    seen = []
    distill(recipe, run, options=Options(watchers=lambda title: seen.append(title) or []), evaluate=False)
    assert not seen


def test_a_killed_write_of_the_model_is_made_good(make_base, make_recipe, phase, tmp_path, monkeypatch):
    recipe = make_recipe(make_base(), [phase("hidden", steps=3)])
    run = tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr("surgery.adaptation.saving.write_json", lambda *_: (_ for _ in ()).throw(Stopped()))
        with pytest.raises(Stopped):
            distill(recipe, run, evaluate=False)
    assert not (run / "phases" / "01-hidden" / "model").exists()
    seen = []
    result = distill(recipe, run, options=Options(watchers=lambda title: seen.append(title) or []), evaluate=False)
    assert not seen and load_model(result["model"])


def test_begun_phases_are_fixed_and_later_ones_are_not(make_base, make_recipe, phase, tmp_path):
    base = make_base()
    run = tmp_path / "run"
    phases = [phase("hidden", steps=3), phase("next-token", steps=3)]
    with pytest.raises(Stopped):
        distill(make_recipe(base, phases), run, options=stopping(3), evaluate=False)

    def again(name, phases, **sections):
        return distill(make_recipe(base, phases, name=name, **sections), run, evaluate=False)

    faster = [phase("hidden", steps=3, learning_rate=0.5), phases[1]]
    with pytest.raises(UsageError, match=r"phases\[0\]\.learning_rate: 0\.003 before, 0\.5 now"):
        again("faster", faster)
    with pytest.raises(UsageError, match="seed: 0 before, 3 now"):
        again("seed", phases, seed=3)
    with pytest.raises(UsageError, match=r"memory\.rule: palimpsa before, host now"):
        again("rule", [phase("next-token", steps=3)], memory={"rule": "host"})
    # a dose in a later phase would take away the first one's default
    with pytest.raises(UsageError, match=r"phases\[0\]\.dose"):
        again("dose", [phases[0], phase("next-token", steps=3, dose={"from": 0, "to": 1})])
    result = again("later", [phases[0], phase("next-token", steps=2), phase("next-token", name="more", steps=2)])
    assert [(p["name"], p["status"], p["steps"]) for p in result["manifest"]["phases"]] == [
        ("hidden", "finished", 3),
        ("next-token", "finished", 2),
        ("more", "finished", 2),
    ]
    assert "more" in (run / "recipe.yaml").read_text()


def test_a_phase_made_from_a_removed_one_is_stale(make_base, make_recipe, phase, tmp_path):
    import shutil

    recipe = make_recipe(make_base(), [phase("hidden", steps=2), phase("next-token", steps=2)])
    run = tmp_path / "run"
    distill(recipe, run, evaluate=False)
    shutil.rmtree(run / "phases" / "01-hidden")
    with pytest.raises(UsageError, match=r"(?s)hidden is not finished.*remove .*02-next-token"):
        distill(recipe, run, evaluate=False)


def test_a_directory_that_is_no_run_is_left_alone(make_base, make_recipe, phase, tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    (run / "thesis.tex").write_text("x")
    with pytest.raises(UsageError, match=r"holds files but no run\.json"):
        distill(make_recipe(make_base(), [phase("hidden")]), run, evaluate=False)


def test_the_control_trains_the_hosts_parameters(make_base, make_recipe, phase, tmp_path):
    base = make_base("gated_deltanet")
    recipe = make_recipe(base, [phase("next-token", steps=3)], memory={"rule": "host"})
    run = tmp_path / "run"
    distill(recipe, run, evaluate=False)
    before, after = weights(base), weights(run / "phases" / "01-next-token" / "model")
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {name for name in before if name.startswith(MIXERS)}
    assert after.keys() - before.keys() == {f"model.layers.{layer}.attn.memory.dose" for layer in (0, 2)}


def test_shared_weights_are_taught_by_a_second_copy(make_base, make_recipe, phase, tmp_path):
    base = make_base()
    said = []
    recipe = make_recipe(base, [phase("logits", steps=3, trainable="all"), phase("hidden", steps=2)])
    distill(recipe, tmp_path / "run", options=Options(say=said.append), evaluate=False)
    assert sum("second copy of the base" in line for line in said) == 2
    before, after = weights(base), weights(tmp_path / "run" / "phases" / "01-logits" / "model")
    assert all(not torch.equal(before[name], after[name]) for name in before)


def test_a_second_copy_that_does_not_fit_is_refused_before_the_first_step(
    make_base, make_recipe, phase, tmp_path, monkeypatch
):
    monkeypatch.setattr("surgery.adaptation.capacity.free_memory", lambda device: 1000)
    recipe = make_recipe(make_base(), [phase("hidden"), phase("logits", trainable="all")])
    with pytest.raises(JobError, match=r"phase logits: .*second copy of the base"):
        distill(recipe, tmp_path / "run", evaluate=False)
    assert not (tmp_path / "run" / "phases").exists()


@pytest.mark.parametrize(
    ("sections", "phases", "message"),
    [
        ({"evaluation": {"text": "nowhere.txt"}}, [{}], "nowhere.txt: no such file"),
        ({"evaluation": {"recall": {"lengths": [128]}}}, [{}], r"lengths\[0\]|needle recall at 128"),
        ({}, [{}, {"data": "nothing.txt", "name": "b"}], "nothing.txt: no such file"),
        ({}, [{}, {"context": 50_000, "batch": 50_000, "name": "b"}], "shorter than one context of 50000"),
        ({}, [{}, {"trainable": ["*.nothing"], "name": "b"}], r"'\*\.nothing' matches no parameter"),
        ({}, [{}, {"trainable": ["*norm_f*"], "kind": "hidden"}], "does not reach backbone.norm_f.weight"),
        ({}, [{}, {"kind": "instruct"}], "a record holds instruction and output"),
    ],
)
def test_the_whole_recipe_is_checked_before_the_first_step(
    make_base, make_recipe, phase, tmp_path, text_file, sections, phases, message
):
    if "evaluation" in sections:
        sections = {"evaluation": {"text": str(text_file), **sections["evaluation"]}}
    made = [phase(**{"kind": "next-token", **keys}) for keys in phases]
    recipe = make_recipe(make_base(), made, **sections)
    with pytest.raises(UsageError, match=message) as refusal:
        distill(recipe, tmp_path / "run")
    text = str(refusal.value)
    assert text.count("\n") < 5 and ("recipe.yaml:" in text or "phase b" in text)
    assert not list((tmp_path / "run" / "phases").glob("*/metrics.jsonl"))


@pytest.mark.parametrize("kind", ["hidden", "logits", "next-token"])
def test_a_number_that_is_not_finite_stops_the_phase(make_base, make_recipe, phase, tmp_path, monkeypatch, kind):
    from surgery.graft.mamba2 import Mamba2Graft

    recipe = make_recipe(make_base(), [phase(kind)])
    run = tmp_path / "run"
    original, calls = Mamba2Graft._emit, []

    def emit(self, o, inputs, rest):
        out = original(self, o, inputs, rest)
        broken = self.layer_idx == 2 and self.memory.rule == "palimpsa" and self.training
        calls.append(broken)
        return out * float("nan") if broken and sum(calls) >= 5 else out

    monkeypatch.setattr(Mamba2Graft, "_emit", emit)
    with pytest.raises(JobError, match=f"(?s)phase {kind}, step 5: the loss is nan.*layer 2.*step 4") as stopped:
        distill(recipe, run, options=Options(save_every=2), evaluate=False)
    assert str(stopped.value).count("\n") < 5
    folder = run / "phases" / f"01-{kind}"
    assert [c.name for c in checkpoints.complete(folder / "checkpoints")] == ["checkpoint-2", "checkpoint-4"]
    assert len(read_metrics(folder / "metrics.jsonl")) == 4
    assert json.loads((run / "run.json").read_text())["phases"][0]["status"] == "running"


def test_a_gradient_that_is_not_finite_names_its_layer(make_base, make_recipe, phase, tmp_path):
    from surgery.adaptation.trainer import PhaseTrainer

    recipe = make_recipe(make_base(), [phase("next-token")])
    original = PhaseTrainer.step

    def step(self, number):
        if number == 2:
            name = "backbone.layers.2.mixer.memory.b_scale"
            self.selection.trained[name].register_hook(lambda grad: grad * float("inf"))
        return original(self, number)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PhaseTrainer, "step", step)
        with pytest.raises(JobError, match=r"step 3: the gradient of layer 2 is not finite \(.*b_scale"):
            distill(recipe, tmp_path / "run", evaluate=False)


def test_training_on_text_needs_no_datasets(make_base, make_recipe, phase, tmp_path):
    recipe = make_recipe(make_base(), [phase("next-token", steps=2)])
    code = (
        "import sys; from pathlib import Path\n"
        "from surgery.adaptation.run import distill\n"
        "from surgery.recipe import load_recipe\n"
        f"distill(load_recipe({str(recipe.path)!r}), Path({str(tmp_path / 'run')!r}))\n"
        "print(sorted({'datasets', 'pyarrow'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False)
    assert done.stdout.strip().splitlines()[-1:] == ["[]"], done.stderr


def test_recomputing_activations_changes_nothing(make_base, make_recipe, phase, tmp_path):
    from surgery.graft import Graft

    recipe = make_recipe(make_base(), [phase("logits", steps=2)])
    calls, finals, start = [], [], None
    original = Graft.forward
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Graft, "forward", lambda self, *a, **k: (calls.append(1), original(self, *a, **k))[1])
        for recompute in (False, True):
            run = tmp_path / f"run-{recompute}"
            calls.append(0)
            distill(recipe, run, start=start, options=Options(recompute=recompute), evaluate=False)
            finals.append(weights(run / "phases" / "01-logits" / "model"))
            start = str(tmp_path / "run-False" / "applied")
    assert same(*finals)
    second = len(calls) - calls.index(0, 1) - 1
    assert second == 2 * (3 + 3 + 3)  # two steps of teacher, student, student again


def test_instruction_data_trains(make_base, make_recipe, phase, tmp_path):
    path = tmp_path / "qa.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"{n} and {n}?", "answer": f" {2 * n}"}) + "\n" for n in range(30)))
    recipe = make_recipe(make_base(), [phase("instruct", data=str(path))])
    distill(recipe, tmp_path / "run", evaluate=False)
    rows = read_metrics(tmp_path / "run" / "phases" / "01-instruct" / "metrics.jsonl")
    assert len(rows) == 6 and rows[-1]["loss"] < rows[0]["loss"] and rows[-1]["passes"] > 0


def test_evaluation_is_kept_before_and_after(make_base, make_recipe, phase, tmp_path):
    recipe = make_recipe(make_base(), [phase("next-token", steps=2)])
    result = distill(recipe, tmp_path / "run")
    before, after = (json.loads(Path(result["evaluation"][name]).read_text()) for name in ("before", "after"))
    assert after["baseline"]["nll"] == before["model"]["nll"] and after["difference"]["paired"]
    assert after["model"]["nll"] != before["model"]["nll"]
    assert after["checkpoint"] == "phases/01-next-token/model" and "checkpoint" not in before
    assert after["command"] == f"surgery distill {recipe.path} --run {tmp_path / 'run'}"


def test_a_recipe_without_phases_is_applied(make_base, make_recipe, tmp_path):
    result = distill(make_recipe(make_base(), []), tmp_path / "run")
    assert result["model"] == str(tmp_path / "run" / "applied") and not result["evaluation"]
    assert load_model(result["model"])


def test_a_swap_that_fails_leaves_no_run(make_base, make_recipe, phase, tmp_path):
    recipe = make_recipe(make_base("gated_deltanet"), [phase("hidden")], max_drift={"kl": 1e-12})
    with pytest.raises(JobError, match="drifts by"):
        distill(recipe, tmp_path / "run", evaluate=False)
    assert not (tmp_path / "run").exists()


def test_starting_elsewhere(make_base, make_recipe, phase, tmp_path):
    base = make_base()
    recipe = make_recipe(base, [phase("hidden", steps=2)])
    first = distill(recipe, tmp_path / "one", evaluate=False)
    again = make_recipe(base, [phase("next-token", steps=2)], name="again")
    for _ in range(2):  # the same command resumes
        second = distill(again, tmp_path / "two", start=str(tmp_path / "one"), evaluate=False)
    assert same(weights(Path(first["model"])), weights(tmp_path / "two" / "applied"))
    # the dose goes on from where it was
    assert read_metrics(tmp_path / "two" / "phases" / "01-next-token" / "metrics.jsonl")[0]["dose"] == 1.0
    assert second["manifest"]["exact"] is False
    with pytest.raises(UsageError, match="no layer of this checkpoint was swapped"):
        distill(again, tmp_path / "three", start=str(base), evaluate=False)


def test_differences_name_their_place():
    old = {"a": 1, "b": [1, {"c": 2}], "d": None}
    new = {"a": 1, "b": [1, {"c": 3}], "d": {"e": 4}}
    assert list(differences(old, new)) == ["b[1].c: 2 before, 3 now", "d: nothing before, {'e': 4} now"]
    assert not list(differences(old, old)) and FREE
