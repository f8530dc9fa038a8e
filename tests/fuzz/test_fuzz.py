"""A few hundred broken inputs of a fixed seed, as ``make fuzz`` gives thousands, and what the fuzzer itself can see."""

from __future__ import annotations

import pytest
from fuzz import CHECKPOINTS, Fuzzer, Outcome, mixed, run

RECIPES, OTHERS = 100, 100


def test_broken_inputs_are_refused_in_words():
    faults: list[str] = []
    outcomes = run([*mixed(RECIPES, ("recipe",)), *mixed(OTHERS, CHECKPOINTS)], seed=12, say=faults.append)
    assert len(outcomes) == RECIPES + OTHERS
    assert not faults, "\n".join(faults)
    refused = sum(bool(one.message) for one in outcomes)
    assert refused > len(outcomes) // 2  # otherwise the inputs are not broken


@pytest.mark.parametrize(
    ("raised", "fault"),
    [(KeyError("x"), "not a message"), (None, "accepted, though"), ("got NoneType", "names a type: NoneType")],
)
def test_the_fuzzer_sees_faults(raised, fault, tmp_path, monkeypatch):
    from surgery.errors import UsageError

    def call():
        if raised is not None:
            raise UsageError(raised) if isinstance(raised, str) else raised

    fuzzer = object.__new__(Fuzzer)
    fuzzer.folder, fuzzer.seed = tmp_path, 0
    monkeypatch.setattr(Fuzzer, "_recipe", lambda *_: (call, "it is nonsense"))
    outcome = fuzzer.case("recipe", 0)
    assert isinstance(outcome, Outcome) and outcome.fault.startswith(fault)
