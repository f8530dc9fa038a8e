"""What earlier versions wrote opens, computes the same, and goes on. ``tests/fixtures/make.py`` writes it."""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from surgery.adaptation.monitoring import read_metrics
from surgery.adaptation.phases import Options
from surgery.adaptation.run import distill
from surgery.recipe import load_recipe

FIXTURES = Path(__file__).parents[1] / "fixtures"
_spec = importlib.util.spec_from_file_location("make", FIXTURES / "make.py")
make = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(make)
VERSIONS = sorted(path for path in FIXTURES.iterdir() if (path / "recipes").is_dir())
assert VERSIONS


@pytest.fixture(
    params=[(version, pair) for version in VERSIONS for pair in make.PAIRS], ids=lambda at: f"{at[0].name}-{at[1]}"
)
def written(request, tmp_path, monkeypatch):
    """A copy of what a version wrote, as the current directory; the logits that it gave."""
    version, pair = request.param
    shutil.copytree(version / pair, tmp_path / "copy")
    monkeypatch.chdir(tmp_path / "copy")
    return load_file("logits.safetensors")


def test_bases_and_swaps_compute_what_they_did(written):
    for place, key in (("base", "base"), ("run/applied", "run")):
        assert (make.logits(place) - written[key]).norm() < 1e-5 * written[key].norm()


def test_a_run_goes_on_where_it_was_stopped(written):
    said = []
    result = distill(load_recipe("recipe.yaml"), Path("run"), options=Options(say=said.append), evaluate=False)
    assert any("resuming after step 2 of 4" in line for line in said)
    assert any("an earlier version wrote it without checksums" in line for line in said)
    assert [row["step"] for row in read_metrics(Path("run/phases/01-next-token/metrics.jsonl"))] == [1, 2, 3, 4]
    found, expected, before = make.logits(result["model"]), written["whole"], written["run"]
    assert (found - expected).norm() < 1e-3 * (expected - before).norm()


@pytest.mark.parametrize("version", VERSIONS, ids=lambda version: version.name)
def test_recipes_are_read(version):
    recipes = sorted((version / "recipes").glob("*.yaml"))
    assert len(recipes) >= 12
    for recipe in recipes:
        assert load_recipe(recipe).phases
    assert torch.isfinite(load_file(version / "gdn-bayesian" / "logits.safetensors")["whole"]).all()
