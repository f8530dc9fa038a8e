"""What ``surgery validate`` says of a recipe: what was checked, and what each phase comes to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from surgery.preflight import VALIDATE, preflight
from surgery.recipe import Recipe
from surgery.sizes import format_count


def validate_recipe(recipe: Recipe, progress: Callable[[str, int, int], Any] | None = None) -> dict[str, Any]:
    """Check a recipe that has been read against its base and its texts; nothing is downloaded.

    Args:
        progress: called with (stage, done, total) while the data are read.

    Returns:
        ``checks``: a list of {what, checked, detail}; not ``checked`` is what is not on this machine. ``phases``: what
        each phase comes to.

    Raises:
        UsageError: whatever does not fit, as :func:`surgery.preflight.preflight` says it.
    """
    checks = preflight(recipe, VALIDATE, progress=progress).checks
    return {"recipe": recipe.name, "overrides": list(recipe.overrides), "checks": checks, "phases": phase_table(recipe)}


def phase_table(recipe: Recipe) -> list[dict[str, Any]]:
    """Each phase's budget and settings, in words."""
    table = []
    for phase, (start, stop, over) in zip(recipe.phases, recipe.doses(), strict=True):
        rates = phase.rates
        rate = f"{rates.memory:g}" if rates.memory == rates.host else f"{rates.memory:g}, host {rates.host:g}"
        moves = f"{start:g} to {stop:g} over {over:.0%}" if start != stop else f"{start:g}"
        table.append(
            {
                "phase": phase.label,
                "kind": phase.kind,
                "tokens": format_count(phase.tokens or phase.total_tokens),
                "steps": phase.total_steps,
                "context": phase.context,
                "learning rate": rate,
                "dose": moves if recipe.memory.rule != "host" else "none",
            }
        )
    return table
