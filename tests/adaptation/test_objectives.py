"""A kind of phase is one class and one line, also from outside the package."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from surgery.adaptation.monitoring import read_metrics
from surgery.adaptation.objectives import Objective
from surgery.adaptation.objectives.tokens import NextToken
from surgery.adaptation.run import distill
from surgery.errors import UsageError
from surgery.preflight import VALIDATE, preflight
from surgery.recipe import load_recipe
from surgery.recipe.kinds import KINDS, objective


class EveryOther(NextToken):
    """Learns every second token of a text."""

    kind = "every-other"

    def counted(self, targets, mask):
        return super().counted(targets[:, ::2], mask)

    def parts(self, distiller, batch, targets, *, count, **_):
        targets = targets.clone()
        targets[:, 1::2] = -100
        return super().parts(distiller, batch, targets, count=count)


@pytest.fixture
def added(monkeypatch):
    monkeypatch.setitem(KINDS, EveryOther.kind, f"{__name__}:EveryOther")


def test_a_kind_from_outside_is_checked_run_and_reported(added, make_base, make_recipe, phase, tmp_path):
    recipe = make_recipe(make_base(), [phase("every-other", steps=2)])
    assert preflight(recipe, VALIDATE).checks
    distill(recipe, tmp_path / "run", evaluate=False)
    rows = read_metrics(tmp_path / "run" / "phases" / "01-every-other" / "metrics.jsonl")
    assert [list(row["terms"]) for row in rows] == [["cross_entropy"]] * 2
    assert 3 < rows[0]["loss"] < 12  # nats of a random model over 260 tokens
    record = json.loads((tmp_path / "run" / "run.json").read_text())["phases"][0]
    assert (record["kind"], record["status"]) == ("every-other", "finished")


def test_an_unknown_kind_is_refused_with_those_that_there_are(added, make_base, make_recipe, phase):
    with pytest.raises(UsageError, match=r"'next' is not one of .*hidden, logits, next-token, instruct, every-other"):
        make_recipe(make_base(), [phase("next")])


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_says_what_it_is(kind):
    found = objective(kind)
    assert issubclass(found, Objective) and found.kind == kind and found.__doc__
    assert found().terms([1, 3])
    with pytest.raises(TypeError, match=f"{kind} takes no colour"):
        found(colour=1)


def test_recipes_are_read_without_torch():
    code = (
        "import sys; from surgery.recipe import load_recipe, shipped\n"
        "[load_recipe(name) for name in shipped()]\n"
        "print(sorted({'torch', 'transformers'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
    assert load_recipe("demo-bayesian").phases
