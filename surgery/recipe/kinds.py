"""The kinds of phases: one line each names the class that does it, loaded when a phase asks for it.

A kind from outside is one more line: ``KINDS["my-kind"] = "my_package.my_module:MyObjective"``.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

# kind -> a class of the form of surgery.adaptation.objectives.Objective
KINDS: dict[str, str] = {
    "hidden": "surgery.adaptation.objectives.hidden:Hidden",
    "logits": "surgery.adaptation.objectives.logits:Logits",
    "next-token": "surgery.adaptation.objectives.tokens:NextToken",
    "instruct": "surgery.adaptation.objectives.tokens:Instruct",
}


def objective(kind: str) -> Any:
    """The class of a kind of phase; to load it loads no heavy library."""
    module, _, name = KINDS[kind].partition(":")
    return getattr(import_module(module), name)


def kinds_with(option: str) -> list[str]:
    """The kinds whose phases take ``option``."""
    return [kind for kind in KINDS if option in objective(kind).options]


def phase_options() -> list[str]:
    """Every option that only some kinds take."""
    return list(dict.fromkeys(option for kind in KINDS for option in objective(kind).options))
