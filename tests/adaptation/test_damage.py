"""A run goes on from the bytes that were written, or says which are not those."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from surgery.adaptation import checkpoints
from surgery.adaptation.monitoring import Listener, read_metrics
from surgery.adaptation.phases import Options
from surgery.adaptation.run import distill
from surgery.checkpoint.checksums import COMPLETE
from surgery.errors import UsageError

FOLDER = Path("phases") / "01-next-token"


class Stopped(Exception):
    pass


def stopping(at):
    def stop(step, steps):
        if step.step == at:
            raise Stopped

    return Options(save_every=2, watchers=lambda title: [Listener(stop)])


def flip(path, at=-3):
    data = bytearray(path.read_bytes())
    data[at] ^= 0x10
    path.write_bytes(data)


def weights(run):
    found = {}
    for shard in sorted((run / FOLDER / "model").glob("*.safetensors")):
        found |= load_file(shard)
    return found


MADE = {}  # once for this file: training takes longer than all that follows


@pytest.fixture
def begun(make_base, make_recipe, phase, tmp_path):
    """A recipe, the run of it that nothing disturbed, and one that died after step 5 with checkpoints of 2 and 4."""
    if not MADE:
        recipe = make_recipe(make_base(), [phase("next-token")])
        made = tmp_path / "made"
        distill(recipe, made / "straight", options=Options(save_every=2), evaluate=False)
        with pytest.raises(Stopped):
            distill(recipe, made / "broken", options=stopping(5), evaluate=False)
        MADE.update(recipe=recipe, made=made)
    recipe = MADE["recipe"]
    read = [Path(recipe.data), *Path(recipe.model).iterdir()]
    before = {path: path.read_bytes() for path in read}
    runs = tmp_path / "runs"
    shutil.copytree(MADE["made"], runs)
    yield recipe, runs / "straight", runs / "broken"
    for path, content in before.items():
        path.write_bytes(content)


def resume(recipe, run):
    said = []
    distill(recipe, run, options=Options(save_every=2, say=said.append), evaluate=False)
    return said


def same(one, other):
    one, other = weights(one), weights(other)
    assert one
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_a_changed_byte_of_any_file_of_a_checkpoint_is_named(begun, tmp_path):
    folder = begun[2] / FOLDER / "checkpoints"
    names = sorted(path.name for path in (folder / "checkpoint-4").iterdir())
    assert {"model.safetensors", "optimizer.pt", "random-0.pt"} < {*names}
    assert {"metrics.jsonl", COMPLETE} < {*names}
    for name in names:
        for way in (flip, lambda path: path.write_bytes(path.read_bytes()[:-1]), Path.unlink):
            copy = tmp_path / "copy"
            shutil.copytree(folder, copy)
            way(copy / "checkpoint-4" / name)
            said = []
            last = checkpoints.last_whole(copy, said.append)
            if name == COMPLETE and last == copy / "checkpoint-4":  # the last brace's line end: it says the same
                assert not said
            else:
                assert last == copy / "checkpoint-2" and len(said) == 1
                assert name in said[0] and "checkpoint-4" in said[0]
                assert not (copy / "checkpoint-4").exists()
            shutil.rmtree(copy)


def test_a_file_that_the_checkpoint_did_not_have_is_damage_too(begun):
    folder = begun[2] / FOLDER / "checkpoints"
    (folder / "checkpoint-4" / "scaler.pt").write_bytes(b"a trainer would load it")
    said = []
    assert checkpoints.last_whole(folder, said.append) == folder / "checkpoint-2"
    assert "scaler.pt was not there when it was written" in said[0]


def test_the_checkpoint_before_a_damaged_one_gives_the_same_bits(begun):
    recipe, straight, broken = begun
    flip(broken / FOLDER / "checkpoints" / "checkpoint-4" / "optimizer.pt", 1000)
    said = resume(recipe, broken)
    assert any("checkpoint-4: optimizer.pt is not what was written" in line for line in said)
    assert any("resuming after step 2 of 6" in line for line in said)
    assert same(straight, broken)
    assert [row["step"] for row in read_metrics(broken / FOLDER / "metrics.jsonl")] == [1, 2, 3, 4, 5, 6]


def test_tensorboard_shows_each_step_once(begun):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    recipe, _, broken = begun
    for step in (2, 4):
        shutil.rmtree(broken / FOLDER / "checkpoints" / f"checkpoint-{step}")
    resume(recipe, broken)  # from the beginning, where five steps have been written before
    events = EventAccumulator(str(broken / FOLDER / "tensorboard"))
    events.Reload()
    assert [event.step for event in events.Scalars("loss")] == [1, 2, 3, 4, 5, 6]


def test_a_phase_without_a_whole_checkpoint_starts_over(begun):
    recipe, straight, broken = begun
    for step in (2, 4):
        flip(broken / FOLDER / "checkpoints" / f"checkpoint-{step}" / "model.safetensors")
    said = resume(recipe, broken)
    assert any("no whole checkpoint is left" in line for line in said)
    assert same(straight, broken)
    assert [row["step"] for row in read_metrics(broken / FOLDER / "metrics.jsonl")] == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize(
    ("name", "harm"),
    [
        ("flipped", lambda path: flip(path, 40)),
        ("cut", lambda path: path.write_bytes(path.read_bytes()[:100])),
        ("doubled", lambda path: path.write_bytes(path.read_bytes() * 2)),
        ("lost", Path.unlink),
        ("noise", lambda path: path.write_bytes(b"\xff\x00" * 50)),
    ],
)
def test_metrics_are_restored_from_the_checkpoint(begun, name, harm):
    recipe, straight, broken = begun
    harm(broken / FOLDER / "metrics.jsonl")
    said = resume(recipe, broken)
    rows = [read_metrics(run / FOLDER / "metrics.jsonl") for run in (straight, broken)]
    for row in (*rows[0], *rows[1]):
        row.pop("tokens_per_second")
    assert rows[0] == rows[1]
    told = any("metrics.jsonl: is not what was written; restored up to step 4" in line for line in said)
    assert told or name == "doubled"  # what follows the checkpoint's steps is dropped as later steps are


@pytest.mark.parametrize("ending", ["uint16", "starts.npy", "json", "deep", "elsewhere"])
def test_damaged_tokens_are_made_again(begun, ending):
    recipe, straight, broken = begun
    described = ending in ("json", "deep", "elsewhere")
    (file,) = (broken / "data").glob("*.json" if described else f"*.{ending}")
    if ending == "deep":
        file.write_text("[" * 100_000)
    elif ending == "elsewhere":  # where bytes never end
        about = json.loads(file.read_text())
        about["files"] = {key: {"bytes": 0, "sha256": ""} for key in ("/dev/zero", "../data/x")}
        file.write_text(json.dumps(about))
    else:
        flip(file, 14 if ending == "json" else -3)
    said = resume(recipe, broken)
    assert any("the tokens kept of" in line and "damaged" in line for line in said)
    assert same(straight, broken)


def test_other_tokens_than_before_are_refused(begun, monkeypatch):
    from surgery.adaptation import data

    recipe, _, broken = begun
    shutil.rmtree(broken / "data")
    original = data.tokenise
    monkeypatch.setattr(data, "tokenise", lambda *a: ([*ids[:-1], 7] for ids in original(*a)))
    before = sorted((broken / FOLDER).rglob("*"))
    with pytest.raises(UsageError, match=r"(?s)its data gives other tokens.*remove .*01-next-token"):
        resume(recipe, broken)
    assert sorted((broken / FOLDER).rglob("*")) == before


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json"])
def test_a_damaged_start_is_refused_with_the_remedy(begun, name):
    recipe, straight, broken = begun
    file = broken / "applied" / name
    if name == "model.safetensors":
        file = sorted((broken / "applied").glob("*.safetensors"))[0]
    flip(file)
    with pytest.raises(UsageError, match=rf"(?s)applied: damaged: {file.name} is not what was written.*remove "):
        resume(recipe, broken)
    shutil.rmtree(broken / "applied")  # as the message says
    resume(recipe, broken)
    assert same(straight, broken)


def test_another_start_than_the_checkpoints_is_refused(begun, monkeypatch):
    recipe, _, broken = begun
    file = sorted((broken / "applied").glob("*.safetensors"))[0]
    flip(file)
    (broken / "applied" / COMPLETE).unlink()
    from surgery.checkpoint.checksums import write_checksums

    write_checksums(broken / "applied")  # as if it had been applied with another library
    with pytest.raises(UsageError, match=r"(?s)begun from another model than .*applied is now.*remove "):
        resume(recipe, broken)


def test_a_damaged_phase_is_named_by_every_command_that_reads_it(begun, tmp_path):
    from surgery.evaluation.loading import check_loadable, locate
    from surgery.export.run import export
    from surgery.opening import open_base
    from surgery.revert import revert

    recipe, straight, _ = begun
    model = straight / FOLDER / "model"
    shard = sorted(model.glob("*.safetensors"))[0]
    flip(shard)
    words = f"model: damaged: {shard.name} is not what was written"
    with pytest.raises(UsageError, match=rf"(?s){words}.*remove .*01-next-token and run again"):
        resume(recipe, straight)
    for job in (export, revert):
        with pytest.raises(UsageError, match=words):
            job(str(straight), tmp_path / "out")
        assert not (tmp_path / "out").exists()
    with pytest.raises(UsageError, match=words):
        check_loadable(locate(str(straight)))
    with pytest.raises(UsageError, match=f"--from .*{words}"):
        distill(recipe, tmp_path / "out", start=str(straight), evaluate=False)
    with pytest.raises(UsageError, match=words):
        open_base(recipe.model_copy(update={"model": str(model)}))


def test_what_another_process_holds_is_left_alone(begun, tmp_path):
    from concurrent.futures import ThreadPoolExecutor

    from surgery.checkpoint.staging import claimed, claimed_run
    from surgery.export.run import export
    from surgery.operation import apply
    from surgery.revert import revert

    recipe, straight, broken = begun
    out = tmp_path / "out"
    jobs = (
        lambda: resume(recipe, broken),
        lambda: apply(recipe, out, drift="skip"),
        lambda: export(str(straight), out),
        lambda: revert(str(straight), out),
    )
    with claimed_run(broken), claimed(out), ThreadPoolExecutor(1) as other:  # a lock knows threads as it does processes
        before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
        for job in jobs:
            with pytest.raises(UsageError, match=rf"another process holds it \(pid {os.getpid()} on .* since "):
                other.submit(job).result()
        assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before


def test_damage_that_nothing_is_made_from_is_told(begun):
    recipe, straight, _ = begun
    file = sorted((straight / "applied").glob("*.safetensors"))[0]
    flip(file)
    flip(straight / FOLDER / "metrics.jsonl")
    said = resume(recipe, straight)
    assert any(f"applied: damaged: {file.name}" in line for line in said)
    assert any("metrics.jsonl: is not what was written" in line for line in said)


def test_a_start_that_is_no_longer_needed_may_be_damaged_in_any_file(begun):
    recipe, straight, _ = begun
    config = straight / "applied" / "config.json"
    config.write_text(config.read_text().replace('"surgery"', '"surgerz"'))
    assert any("applied: damaged: config.json" in line for line in resume(recipe, straight))


def test_a_lost_config_does_not_make_a_finished_phase_unfinished(begun):
    recipe, straight, _ = begun
    (straight / FOLDER / "model" / "config.json").unlink()
    with pytest.raises(UsageError, match=r"config\.json is missing"):
        resume(recipe, straight)


def test_edited_data_is_refused_as_an_edited_recipe_is(begun):
    recipe, straight, broken = begun
    text_file = Path(recipe.data)
    text = text_file.read_bytes()
    text_file.write_bytes(text)  # another time, the same content
    resume(recipe, straight)
    text_file.write_bytes(text[:-2] + b"!\n")
    for run in (straight, broken):
        before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
        with pytest.raises(UsageError, match=r"(?s)was begun with other settings or inputs.*text\.txt holds other"):
            resume(recipe, run)
        assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before
    text_file.unlink()
    resume(recipe, straight)  # a finished phase does without it
    text_file.write_bytes(text)
    resume(recipe, broken)
    assert same(straight, broken)


def test_an_edited_base_is_refused(begun):
    recipe, _, broken = begun
    flip(Path(recipe.model) / "model.safetensors")
    with pytest.raises(UsageError, match=r"(?s)other settings or inputs.*model\.safetensors holds other content"):
        resume(recipe, broken)


def test_data_of_a_phase_that_has_not_begun_may_change(make_base, make_recipe, phase, tmp_path, text_file):
    recipe = make_recipe(make_base(), [phase("next-token")])
    run, fresh = tmp_path / "run", tmp_path / "fresh"
    with pytest.raises(Stopped):
        distill(recipe, run, options=stopping(1), evaluate=False)  # before the first checkpoint
    assert list((run / "data").glob("*.uint16"))
    text_file.write_bytes(text_file.read_bytes()[::-1])
    resume(recipe, run)
    resume(recipe, fresh)
    assert same(run, fresh)  # not with the tokens kept of the former text


def age(run):
    """Make of a run what the version before would have left."""
    for listed in run.rglob(COMPLETE):
        if listed.parent.name.startswith("checkpoint-"):
            files = json.loads(listed.read_text())["files"]
            (listed.parent / "metrics.jsonl").unlink()
            files.pop("metrics.jsonl")
            listed.write_text(json.dumps({name: row["bytes"] for name, row in files.items()}))
        else:
            listed.unlink()
    for listed in (run / "data").glob("*.json"):
        listed.unlink()
    manifest = json.loads((run / "run.json").read_text())
    manifest["schema"] = 1
    manifest.pop("inputs")
    manifest.pop("in_force")
    for record in manifest["phases"]:
        record.pop("data")
    (run / "run.json").write_text(json.dumps(manifest))


def test_a_run_of_the_version_before_goes_on(begun):
    recipe, straight, broken = begun
    age(broken)
    age(straight)
    said = resume(recipe, broken)
    assert sum("an earlier version" in line and "checksums" in line for line in said) == 2  # the run, its checkpoint
    assert any("resuming after step 4 of 6" in line for line in said)
    assert same(straight, broken)
    assert [row["step"] for row in read_metrics(broken / FOLDER / "metrics.jsonl")] == [1, 2, 3, 4, 5, 6]
    assert sum("an earlier version" in line for line in resume(recipe, straight)) == 1
    assert not resume(recipe, straight)  # said once, and described from now on
    flip(sorted((straight / FOLDER / "model").glob("*.safetensors"))[0])
    with pytest.raises(UsageError, match="damaged"):
        resume(recipe, straight)


def killed_at(moment, recipe, run):
    """Run in a child that kills itself at its ``moment``-th rename; returns whether it came so far."""
    child = os.fork()
    if child == 0:
        left = [moment]

        def dying(original):
            def call(*arguments, **keys):
                if left[0] == 0:
                    os.kill(os.getpid(), signal.SIGKILL)
                left[0] -= 1
                return original(*arguments, **keys)

            return call

        os.rename, os.replace = dying(os.rename), dying(os.replace)
        code = 1
        try:
            distill(recipe, run, options=Options(save_every=3), evaluate=False)
            code = 0
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0
    return os.WIFSIGNALED(status)


def whole(recipe, straight, run):
    assert same(straight, run)
    assert [row["step"] for row in read_metrics(run / FOLDER / "metrics.jsonl")] == [1, 2, 3, 4, 5, 6]
    assert json.loads((run / "run.json").read_text())["phases"][0]["figures"]["steps"] == 6
    assert not [path for path in run.rglob("*") if ".partial" in path.name]


def test_killed_again_and_again_a_run_ends_with_the_same_bits(begun, tmp_path):
    """Every rename is a moment at which a process may be killed: each call gets one further than the one before."""
    recipe, straight, _ = begun
    moments = 0
    while killed_at(moments, recipe, tmp_path / "again"):
        moments += 1
    assert moments > 5
    whole(recipe, straight, tmp_path / "again")


@pytest.mark.slow
def test_killed_at_any_write_a_run_loses_nothing(begun, tmp_path):
    recipe, straight, _ = begun
    moment = 0
    while killed_at(moment, recipe, tmp_path / f"run-{moment}"):
        resume(recipe, tmp_path / f"run-{moment}")
        whole(recipe, straight, tmp_path / f"run-{moment}")
        moment += 1
    assert moment > 12
