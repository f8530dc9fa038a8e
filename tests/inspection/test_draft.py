"""The recipe that inspect writes, and the picture it draws."""

from __future__ import annotations

import pytest
import torch

from surgery.errors import UsageError
from surgery.inspection.draft import draft_recipe, write_recipe
from surgery.inspection.horizon import HorizonMeter, static_horizons
from surgery.inspection.measure import inspect_static
from surgery.inspection.plots import plot_horizons
from surgery.recipe import load_recipe


@pytest.mark.parametrize("family", ["mamba2", "gated_deltanet"])
@pytest.mark.parametrize("memory", ["palimpsa", "bayesian"])
def test_draft_is_a_recipe(make_checkpoint, tmp_path, family, memory):
    inspection = inspect_static(make_checkpoint(family, name="my model: v2 #1"))
    text = tmp_path / "training text.txt"
    text.write_text("words " * 10_000)
    path = tmp_path / "mine.yaml"
    write_recipe(path, draft_recipe(inspection, "log-mean", 2, memory, str(text)))
    recipe = load_recipe(path)
    assert recipe.model == str(inspection.path)
    assert list(recipe.layers) == inspection.as_dict("log-mean", 2)["chosen"]
    assert recipe.memory.rule == memory
    assert recipe.data == str(text)
    assert recipe.phases and all(phase.tokens for phase in recipe.phases)
    # without an exact start there is a drift, and the draft sets no limit that apply would fail
    assert (recipe.max_drift is None) == (memory == "palimpsa" and family == "gated_deltanet")


def test_draft_never_overwrites(make_checkpoint, tmp_path):
    text = draft_recipe(inspect_static(make_checkpoint()), "mean", 1, "palimpsa", "bundled")
    path = tmp_path / "mine.yaml"
    path.write_text("precious")
    with pytest.raises(UsageError, match="exists already"):
        write_recipe(path, text)
    assert path.read_text() == "precious"
    with pytest.raises(UsageError, match="does not exist"):
        write_recipe(tmp_path / "nowhere" / "mine.yaml", text)
    with pytest.raises(UsageError, match=r"must end in \.yaml"):
        write_recipe(tmp_path / "mine.txt", text)


def test_draft_that_is_no_recipe_leaves_nothing(tmp_path):
    path = tmp_path / "mine.yaml"
    with pytest.raises(UsageError):
        write_recipe(path, "model: x\nlayres: [1]\n")
    assert not path.exists()


@pytest.mark.parametrize(("layers", "heads"), [(1, 1), (8, 8), (64, 80)])
def test_picture(tmp_path, layers, heads):
    figures = []
    for layer in range(layers):
        meter = HorizonMeter(heads)
        meter.add(-torch.exp(2 * torch.randn(50, heads) - 5))
        figures.append(meter.result(layer))
    path = plot_horizons(figures, "mean", {0}, "a title", tmp_path / "plot.png")
    assert path.read_bytes().startswith(b"\x89PNG")


def test_picture_of_equal_heads(tmp_path):
    """One value everywhere leaves a colour scale without a range."""
    figures = static_horizons({0: torch.full((4,), -0.1), 1: torch.full((2,), -0.1)})
    plot_horizons(figures, "median", {1}, "a title", tmp_path / "plot.svg")
