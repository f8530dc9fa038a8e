"""What a new user gets wrong first, and what each command says then: the place and the remedy, before any work."""

from __future__ import annotations

import errno
import json
import os
import shutil

import pytest
import torch

PHASES = "data: bundled\nphases: [{kind: KIND, steps: 1, context: 16, batch: 16, learning_rate: 1.0e-3}]\n"


@pytest.fixture
def recipe(recipe_for, bases):
    """A recipe for the Mamba2 base with one step of one phase."""
    return recipe_for(bases["mamba2"], more=PHASES.replace("KIND", "next-token"))


# files and directories of another kind ------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["inspect", "eval", "revert", "export"])
def test_a_file_given_as_a_model(command, surgery, bases, recipe, tmp_path):
    output = ["--output", tmp_path / "out"] if command in ("revert", "export") else []
    result = surgery(command, recipe, *output)
    assert result.code == 2 and f"error: {recipe}: a recipe, not a model; give" in result.err, result.err
    config = bases["mamba2"] / "config.json"
    result = surgery(command, config, *output)
    assert result.code == 2 and f"error: {config}: a file of a model; give its directory: {config.parent}" in result.err


def test_a_shipped_recipe_given_as_a_model(surgery):
    surgery("inspect", "demo-bayesian").refused(2, "demo-bayesian: a shipped recipe, not a model", "take recipes")
    surgery("inspect", "demo-bayesan").refused(2, "demo-bayesan: no such directory")


def test_a_baseline_or_control_that_is_not_there_is_named_by_its_option(surgery, bases, recipe, tmp_path):
    surgery("eval", bases["mamba2"], "--baseline", "absent").refused(2, "error: --baseline absent: no such directory")
    swapped = tmp_path / "swapped"
    assert surgery("apply", recipe, "--output", swapped, "--drift", "skip").code == 0
    result = surgery("export", swapped, "--output", tmp_path / "out", "--control", "absent")
    assert result.code == 2 and "error: --control absent: no such directory" in result.err, result.err
    result = surgery("distill", recipe, "--run", tmp_path / "run", "--from", "absent")
    result.refused(2, "error: --from absent: no such directory")
    assert not (tmp_path / "out").exists() and not (tmp_path / "run").exists()


@pytest.mark.parametrize("command", ["validate", "apply", "distill"])
def test_a_directory_given_as_a_recipe(command, surgery, bases, tmp_path):
    more = {"apply": ["--output", tmp_path / "out"], "distill": ["--run", tmp_path / "out"]}.get(command, [])
    model, run, other = bases["mamba2"], tmp_path / "run", tmp_path / "other"
    for directory in (run, other):
        directory.mkdir()
    (run / "run.json").write_text("{}")
    surgery(command, model, *more).refused(2, f"{model}: is a model, not a recipe", f"surgery inspect {model} --recipe")
    surgery(command, run, *more).refused(2, f"{run}: is a run, not a recipe", f"its recipe is {run / 'recipe.yaml'}")
    surgery(command, other, *more).refused(2, f"{other}: is a directory, not a recipe", "YAML file")
    assert not (tmp_path / "out").exists()


def test_a_text_that_is_not_there_is_named_by_its_option_or_line(surgery, bases, recipe_for, tmp_path):
    model, absent = bases["mamba2"], tmp_path / "absent.txt"
    remedy = "no such file; name a text file, 'bundled' or a data set as hub:NAME"
    surgery("eval", model, "--text", absent).refused(2, f"error: --text {absent}: {remedy}")
    surgery("eval", model, "--haystack", absent).refused(2, f"error: --haystack {absent}: {remedy}")
    surgery("inspect", model, "--text", absent).refused(2, f"error: --text {absent}: {remedy}")
    path = recipe_for(model, more=f"data: {absent}\nevaluation: {{text: {absent}}}\n")
    surgery("validate", path).refused(2, f"error: {path}:5: evaluation.text: {absent}: {remedy}")
    path = recipe_for(model, more=PHASES.replace("bundled", str(absent)).replace("KIND", "next-token"))
    surgery("validate", path).refused(2, f"error: {path}:4: data: {absent}: {remedy}")


def test_validate_knows_that_a_recall_length_is_longer_than_the_text(surgery, bases, recipe_for, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("A sentence of some words. " * 30)  # as many tokens as bytes: 780
    more = PHASES.replace("KIND", "next-token") + f"evaluation: {{text: {text}, recall: {{lengths: [300, LONG]}}}}\n"
    path = recipe_for(bases["mamba2"], more=more.replace("LONG", "900"))
    result = surgery("validate", path)
    result.refused(2, f"error: {path}:6: evaluation.recall.lengths[1]: needle recall at 900 tokens", "only 780")
    path = recipe_for(bases["mamba2"], more=more.replace("LONG", "700"))
    result = surgery("validate", path)
    assert result.code == 0 and "300, 700 tokens" in result.out, result.err


@pytest.mark.parametrize("command", ["validate", "apply", "distill"])
def test_a_model_that_is_not_there_is_named_by_its_line(command, surgery, recipe_for, tmp_path):
    path = recipe_for("./absent", more=PHASES.replace("KIND", "next-token"))
    more = {"apply": ["--output", tmp_path / "out"], "distill": ["--run", tmp_path / "out"]}.get(command, [])
    surgery(command, path, *more).refused(2, f"error: {path}:1: model: ./absent: no such directory")
    assert not (tmp_path / "out").exists()


# runs ---------------------------------------------------------------------------------------------------------------


def test_a_run_directory_that_is_a_file(surgery, recipe, tmp_path):
    file = tmp_path / "file"
    file.write_text("")
    for run in (file, file / "inside"):
        surgery("distill", recipe, "--run", run).refused(2, f"error: --run {run}: {file} is a file")


def test_a_run_without_its_recipe(surgery, recipe, tmp_path):
    run = tmp_path / "run"
    assert surgery("distill", recipe, "--run", run, "--no-evaluation").code == 0
    (run / "recipe.yaml").unlink()
    result = surgery("distill", recipe, "--run", run)
    result.refused(2, f"error: {run / 'recipe.yaml'}: is missing", "put it back, or name a new --run")


def test_a_start_that_does_not_fit_leaves_no_run(surgery, bases, recipe, tmp_path):
    run, swapped = tmp_path / "run", tmp_path / "swapped"
    asked = ("distill", recipe, "--run", run, "--from")
    surgery(*asked, bases["mamba2"]).refused(2, f"{bases['mamba2']}: no layer of this checkpoint was swapped")
    assert surgery("apply", recipe, "--output", swapped, "--drift", "skip").code == 0
    surgery(*asked, swapped, "--set", "memory.rule=bayesian").refused(2, f"{swapped} holds palimpsa memories")
    assert not run.exists()


@pytest.mark.parametrize(("kind", "refused"), [("hidden", True), ("logits", True), ("next-token", False)])
def test_a_teacher_with_another_tokenizer(kind, refused, surgery, bases, recipe_for, tmp_path):
    other, swapped = tmp_path / "other", tmp_path / "swapped"
    shutil.copytree(bases["mamba2"], other)
    document = json.loads((other / "tokenizer.json").read_text())
    vocabulary = document["model"]["vocab"]
    document["model"]["vocab"] = dict(zip(vocabulary, reversed(vocabulary.values()), strict=True))
    (other / "tokenizer.json").write_text(json.dumps(document))
    mine = recipe_for(bases["mamba2"])
    assert surgery("apply", mine, "--output", swapped, "--drift", "skip").code == 0
    path = recipe_for(other, more=PHASES.replace("KIND", kind))
    result = surgery("distill", path, "--run", tmp_path / "run", "--from", swapped, "--no-evaluation")
    if not refused:
        assert result.code == 0, result.err
        return
    assert result.code == 2 and f"error: {path}:1: model: {other} has another tokenizer" in result.err, result.err
    assert "name the base that the checkpoint was made from" in result.err


# a full disk --------------------------------------------------------------------------------------------------------


@pytest.fixture
def full(monkeypatch):
    """From now on no file can be synced to the disk: it is full."""

    def refuse(handle):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))  # as the system says it: without a name

    return lambda: monkeypatch.setattr("surgery.checkpoint.staging.os.fsync", refuse)


@pytest.mark.parametrize(
    ("command", "option", "suffix"),
    [
        (("inspect", "MODEL", "--static"), "--json", ".json"),
        (("inspect", "MODEL", "--static"), "--plot", ".png"),
        (("inspect", "MODEL", "--static"), "--recipe", ".yaml"),
        (("eval", "MODEL", "--tokens", "300", "--recall-lengths", "none"), "--plot", ".pdf"),
        (("reproduce", "collision"), "--plot", ".svg"),
        (("hosts",), "--json", ".json"),
    ],
)
def test_a_full_disk_is_named_and_keeps_what_was_there(command, option, suffix, surgery, bases, full, tmp_path):
    target = tmp_path / f"result{suffix}"
    before = None
    if option != "--recipe":  # which overwrites nothing
        before = b"an earlier result"
        target.write_bytes(before)
    full()
    result = surgery(*(str(bases["mamba2"]) if word == "MODEL" else word for word in command), option, target)
    assert result.code == 1, result.err
    first, remedy = result.err.strip().splitlines()[-2:]
    assert first == f"error: {target}: no space left on the disk" and "free some" in remedy
    assert list(tmp_path.iterdir()) == [target] * (before is not None)
    assert before is None or target.read_bytes() == before


def test_a_device_is_written_through(surgery, tmp_path):
    """Neither replaced by a file, nor its error nameless."""
    link = tmp_path / "link.json"
    link.symlink_to("/dev/full")
    surgery("hosts", "--json", link).refused(1, f"error: {link}: no space left on the disk")
    assert link.is_symlink() and link.is_char_device()


def test_a_link_stays_one(surgery, tmp_path):
    link, file = tmp_path / "link.json", tmp_path / "file.json"
    link.symlink_to(file)
    assert surgery("hosts", "--json", link).code == 0
    assert link.is_symlink() and json.loads(file.read_text())


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)),
        OSError(errno.EDQUOT, os.strerror(errno.EDQUOT)),
        RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 35520 vs 35408"),
    ],
)
def test_a_full_disk_in_training(error, surgery, recipe, tmp_path, monkeypatch):
    """Of a checkpoint: what the system says, and what torch.save says on a full disk."""

    def refuse(*_, **__):
        raise error

    monkeypatch.setattr(torch, "save", refuse)
    run = tmp_path / "run"
    result = surgery("distill", recipe, "--run", run, "--no-evaluation")
    assert result.code == 1, result.err
    assert f"error: {run / 'phases' / '01-next-token'}: no space left on the disk" in result.err
