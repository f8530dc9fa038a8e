"""The operation: a recipe's swap, from the plan to a checked checkpoint directory.

    report = apply(load_recipe("demo-bayesian"), Path("swapped"))
    report.drift["kl"]
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from surgery.checkpoint.files import How, same_file_system
from surgery.checkpoint.staging import check_output, claimed, existing_parent, staged_directory
from surgery.checkpoint.ties import own_head
from surgery.checkpoint.writing import write_checkpoint
from surgery.errors import JobError
from surgery.layers import Measure, inspection_measure
from surgery.opening import base_tokenizer
from surgery.places import is_hub_id
from surgery.plan import Plan, make_plan
from surgery.preflight import Job, Preflight, preflight
from surgery.recipe import Recipe

RECIPE_FILE = "surgery_recipe.yaml"
CARD_FILE = "README.md"
LAYER_LIMIT = 1.0e-4  # relative error of a mixer's outputs, where the swap is exact

DriftKind = Literal["full", "layerwise", "skip"]


class Events:
    """What a caller may watch; every method may be overridden, none needs to be."""

    def planned(self, plan: Plan) -> None:
        """The plan stands; nothing is written yet."""

    def stage(self, text: str) -> None:
        """A stage starts."""

    def inspected(self, done: int, total: int) -> None:
        """So many of the tokens that N_t is measured on are read."""

    def copied(self, nbytes: int) -> None:
        """So many more bytes of the base's weights are written."""

    def note(self, text: str) -> None:
        """Something turned out otherwise than was asked for, or was decided on the way."""


@dataclass(frozen=True)
class ApplyReport:
    """What was done: the plan, where it was written (None: nowhere), the measured drift (None: not measured), and how
    the base's weight files came there (None: not written)."""

    plan: Plan
    output: Path | None
    drift: dict[str, Any] | None
    limit: float | None
    weights: How | None = None

    def as_dict(self) -> dict[str, Any]:
        return {
            **self.plan.as_dict(),
            "output": str(self.output) if self.output else None,
            "drift": self.drift,
            "max_drift": self.limit,
            "weights": self.weights,
        }


def apply(
    recipe: Recipe,
    output: Path | None,
    *,
    drift: DriftKind = "full",
    dry_run: bool = False,
    link: bool = False,
    device: str = "cpu",
    offline: bool | None = None,
    measure: Measure | None = None,
    events: Events | None = None,
    ready: Preflight | None = None,
) -> ApplyReport:
    """Swap the memories that a recipe names and write the checkpoint.

    Args:
        output: the directory to write, absent or empty; may be None for a dry run.
        drift: ``full`` compares next-token distributions, ``layerwise`` each swapped mixer, ``skip`` nothing.
        dry_run: plan only; nothing is written.
        link: let the weight files share the base's bytes on the disk where that is possible, by a reflink or a hard
            link, and copy them otherwise.
        measure: see :func:`surgery.plan.make_plan`.
        ready: what :func:`surgery.preflight.preflight` found, where that was asked before.

    Returns:
        The report; ``drift`` as :class:`surgery.drift.Drift` or ``LayerDrift`` in plain values.

    Raises:
        UsageError: the recipe, its base, or the output directory do not allow it.
        JobError: the disk is full, or the drift is above the limit. Nothing is left behind.
    """
    events = events or Events()
    if output is None and not dry_run:
        raise ValueError("an output directory is needed unless dry_run")
    if measure is None:
        measure = inspection_measure(device, events.inspected, events.note)
    if dry_run:
        if output is not None:
            check_output(output)
        plan = _plan(recipe, ready, drift, measure, offline, events)
        return ApplyReport(plan, None, None, recipe.drift_limit(plan.exact))
    with claimed(output) as final:
        plan = _plan(recipe, ready, drift, measure, offline, events)
        return _write(plan, final, drift, link, device, events)


def _plan(
    recipe: Recipe, ready: Preflight | None, drift: DriftKind, measure: Measure, offline: bool | None, events: Events
) -> Plan:
    events.stage("planning")
    ready = ready or preflight(recipe, Job(drift=drift != "skip", trains=False, evaluates=False), offline=offline)
    plan = make_plan(recipe, measure=measure, opened=ready.opened)
    events.planned(plan)
    own = own_head(plan.base, plan.adapter.ties(plan.base.config))
    if own is not None:
        events.note(own)
    return plan


def _write(plan: Plan, final: Path, drift: DriftKind, link: bool, device: str, events: Events) -> ApplyReport:
    recipe = plan.recipe
    limit = recipe.drift_limit(plan.exact)
    text = None
    if drift != "skip":  # found before anything is written: no tokenizer, no text, a text that is too short
        from surgery.drift import windows

        base_tokenizer(recipe, plan.base.directory)
        with recipe.at(("evaluation", "text")):
            text = windows(plan.base.directory, recipe.evaluation_text, recipe.path.parent)
    shared = link and same_file_system(plan.base.directory, existing_parent(final))
    if link and not shared:
        events.note(f"--link: {plan.base.directory} lies on another file system than {final}; the weights are copied")
    with staged_directory(final, plan.bytes_written - shared * plan.base.weight_bytes) as staging:
        events.stage("writing")
        config = plan.adapter.surgery_config(plan.base.config, plan.surgery())
        files = {RECIPE_FILE: recipe.text}
        how = write_checkpoint(staging, plan.base, config, plan.added_tensors(), files, events.copied, shared)
        if shared and how == "copy":
            events.note("--link: this file system shares no bytes between files; the weights were copied")
        measured = None
        if text is not None:
            events.stage("loading it back")
            measured = _measure(plan, staging, drift, text, device, events)
            _judge(plan, measured, limit)
        # a directory's name may hold bytes that are no text
        (staging / CARD_FILE).write_text(card(plan, final.name, measured), encoding="utf-8", errors="replace")
    return ApplyReport(plan, final, measured, limit, how)


def _measure(plan: Plan, staging: Path, kind: DriftKind, text: Any, device: str, events: Events) -> dict[str, Any]:
    import torch

    from surgery.checkpoint.fitting import placement
    from surgery.drift import measure_drift, measure_layers

    base, say = plan.base.directory, events.stage
    if kind == "layerwise":
        return measure_layers(plan.adapter, base, staging, plan.layers, text, device=device, progress=say).as_dict()
    where, why = placement(plan.base, device, torch.float32, text[1].shape[1])
    if where != "whole":
        events.note(why)
    streamed = where != "whole"
    return measure_drift(
        plan.adapter, base, staging, text, device=device, streamed=streamed, progress=say
    ).as_dict()


def _judge(plan: Plan, measured: dict[str, Any], limit: float | None) -> None:
    """Refuse a checkpoint that drifted too far."""
    remedy = "nothing was written; raise max_drift in the recipe if this is what you want"
    if measured["kind"] == "full" and limit is not None and not measured["kl"] <= limit:
        why = f"\n  {plan.reason}" if plan.reason else ""
        raise JobError(
            f"{plan.recipe.where(('max_drift', 'kl'))}: the swapped model drifts by {measured['kl']:.3g} nats a token, "
            f"above the limit of {limit:.3g}{why}\n  {remedy}"
        )
    if measured["kind"] == "layerwise" and plan.exact:
        layer, worst = max(measured["relative_error"].items(), key=lambda item: item[1])
        if not worst <= LAYER_LIMIT:
            raise JobError(
                f"layer {layer}: the swapped mixer differs from the base's by {worst:.3g} of its output, above "
                f"{LAYER_LIMIT:g}, where the swap is exact\n  nothing was written; the base's weights may be damaged"
            )


def card(plan: Plan, name: str, measured: dict[str, Any] | None) -> str:
    """The model card: what was swapped, what it changed, how to load it."""
    recipe = plan.recipe
    rule = recipe.memory.rule
    layers = ", ".join(map(str, plan.layers))
    base = f"`{recipe.model}`{at_commit(plan.surgery())}"
    hub = f"base_model: {recipe.model}\n" if is_hub_id(recipe.model) else ""
    overrides = f"\nChanged on the command line: {', '.join(f'`{item}`' for item in recipe.overrides)}\n"
    start = (
        "It computes what its base computes."
        if plan.exact
        else f"It does not compute what its base computes: {plan.reason}."
    )
    return f"""---
{hub}library_name: transformers
tags: [model-surgery, {rule}]
---
# {name}

{base} with the memory of layers {layers} swapped for the rule `{rule}`, at dose {plan.dose:g}.

**This is the swap alone. Nothing was trained after it.** {start}

{_drift_text(measured)}

The recipe is in `{RECIPE_FILE}`, word for word.
{overrides if recipe.overrides else ""}
## Loading it

```python
import surgery  # pip install model-surgery
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained("{name}")
```
"""


def at_commit(swap: dict[str, Any]) -> str:
    """`` (commit ...)`` of a base that came from a hub, from ``config.surgery``."""
    return f" (commit {swap['revision']})" if swap.get("revision") else ""


def _drift_text(measured: dict[str, Any] | None) -> str:
    if measured is None:
        return "The drift from the base was not measured."
    where = f"on {measured['tokens']} tokens of {measured['text']}, windows of {measured['context']}, float32"
    if measured["kind"] == "layerwise":
        rows = "\n".join(f"| {layer} | {error:.3g} |" for layer, error in measured["relative_error"].items())
        return f"Each swapped mixer against the base's, {where}:\n\n| layer | relative error |\n|---|---|\n{rows}"
    over = not math.isfinite(measured["perplexity"]) or not math.isfinite(measured["base_perplexity"])
    word = "\n\nA perplexity of inf is more than a float holds." if over else ""
    return f"""Drift from the base, {where}:

| figure | value |
|---|---|
| KL, nats a token | {measured["kl"]:.3g} |
| largest KL at one token | {measured["kl_max"]:.3g} |
| largest logit difference | {measured["max_logit_difference"]:.3g} |
| perplexity | {measured["perplexity"]:.4f} |
| the base's perplexity | {measured["base_perplexity"]:.4f} |
| ratio | {measured["perplexity_ratio"]:.6f} |{word}"""
