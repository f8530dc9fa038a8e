"""Directories that hold no model, given as one: what each is, and which directory to give instead."""

from __future__ import annotations

import os
import shutil

import pytest

PHASES = """\
phases:
  - {name: align, kind: hidden, tokens: 64, context: 16, batch: 32, learning_rate: 1.0e-3}
  - {name: adapt, kind: next-token, tokens: 64, context: 16, batch: 32, learning_rate: 1.0e-3}
"""


@pytest.fixture(scope="module")
def workplace(bases, tmp_path_factory):
    """A directory with a base, a recipe, and a finished run of it."""
    from surgery.adaptation.phases import Options
    from surgery.adaptation.run import distill
    from surgery.recipe import load_recipe

    root = tmp_path_factory.mktemp("workplace")
    shutil.copytree(bases["mamba2"], root / "base")
    recipe = root / "mine.yaml"
    recipe.write_text(f"model: {root / 'base'}\nlayers: [1]\nmemory: {{rule: palimpsa}}\ndata: bundled\n{PHASES}")
    distill(load_recipe(recipe), root / "run", options=Options(), evaluate=False)
    (root / "run" / "evaluation").mkdir()
    (root / "run" / "phases" / "02-adapt" / "checkpoints" / "checkpoint-2").mkdir(parents=True)
    (root / "run" / "phases" / "03-later").mkdir()
    return root


@pytest.fixture
def inside(workplace, monkeypatch):
    """The same as the current directory, so that paths are short."""
    monkeypatch.chdir(workplace)
    return workplace


COMMANDS = {
    "inspect": lambda path: ("inspect", path),
    "inspect static": lambda path: ("inspect", path, "--static"),
    "eval": lambda path: ("eval", path),
    "eval baseline": lambda path: ("eval", "base", "--baseline", path),
    "revert": lambda path: ("revert", path, "--output", "new"),
    "export": lambda path: ("export", path, "--output", "new"),
    "distill from": lambda path: ("distill", "mine.yaml", "--run", "new", "--from", path),
    "validate": lambda path: ("validate", "mine.yaml", "--set", f"model={path}"),
    "apply": lambda path: ("apply", "mine.yaml", "--output", "new", "--set", f"model={path}"),
    "distill": lambda path: ("distill", "mine.yaml", "--run", "new", "--set", f"model={path}"),
}
LATEST = "run/phases/02-adapt/model"
# what is given -> what it is, what to give instead
PARTS = {
    "run/phases": ("a part of the run run", LATEST),
    "run/phases/01-align": ("a phase of the run run", "run/phases/01-align/model"),
    "run/phases/03-later": ("a phase of the run run", LATEST),  # has no model: what it would start from
    "run/phases/01-align/tensorboard": ("training curves", "run/phases/01-align/model"),
    "run/phases/02-adapt/checkpoints": ("training checkpoints", LATEST),
    "run/phases/02-adapt/checkpoints/checkpoint-2": ("training checkpoints", LATEST),
    "run/evaluation": ("evaluation reports", LATEST),
    ".": ("holds models", f"base or {LATEST}"),
}


def refused(result, given, what, instead):
    assert result.code == 2, result.err
    line = result.err.strip().splitlines()[-1]
    assert f"{given}: " in line and what in line and line.endswith(f"give {instead}"), result.err
    assert "Traceback" not in result.err and not os.path.exists("new")


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_says_it(command, surgery, inside):
    refused(surgery(*COMMANDS[command]("run/phases/01-align")), "run/phases/01-align", *PARTS["run/phases/01-align"])
    refused(surgery(*COMMANDS[command](".")), ".", *PARTS["."])


@pytest.mark.parametrize("given", PARTS)
def test_every_directory_is_known(given, surgery, inside):
    what, instead = PARTS[given]
    refused(surgery("inspect", given, "--static"), given, what, instead)
    assert all(os.path.isfile(f"{model}/config.json") for model in instead.split(" or "))


@pytest.mark.parametrize("command", ["validate", "apply", "distill"])
def test_a_run_is_no_base(command, surgery, inside):
    refused(surgery(*COMMANDS[command]("run")), "run", "a run of surgery distill", LATEST)


def test_from_within_a_run(surgery, inside, monkeypatch):
    monkeypatch.chdir(inside / "run" / "phases")
    model = inside / "run" / "phases" / "01-align" / "model"
    refused(surgery("inspect", "01-align"), "01-align", f"the run {inside / 'run'}", model)


def test_a_run_without_a_model_yet(surgery, inside, tmp_path):
    young = tmp_path / "young"
    (young / "phases" / "01-align").mkdir(parents=True)
    shutil.copy(inside / "run" / "run.json", young)
    result = surgery("inspect", young / "phases" / "01-align")
    result.refused(2, "a phase of the run", "none in the run yet", "surgery distill")


def test_a_control_is_a_whole_run(surgery, inside):
    result = surgery("export", "run", "--output", "new", "--control", "run/evaluation")
    assert result.code == 2 and "--control run/evaluation: is a part of the run run; give that run" in result.err


def test_validate_knows_that_a_path_is_no_hub_id(surgery, inside):
    surgery("validate", "mine.yaml", "--set", "model=./absent").refused(2, "./absent: no such directory")
    assert surgery("validate", "mine.yaml", "--set", "model=owner/absent").code == 0  # it may be on the hub
