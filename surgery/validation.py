"""Everything that can be known about a recipe before any work: its base and its texts, where they are at hand."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from surgery.checkpoint.reading import Checkpoint
from surgery.checkpoint.ties import own_head
from surgery.errors import UsageError
from surgery.layers import ranges, resolve_layers
from surgery.opening import base_tokenizer, open_base, swappable
from surgery.plan import plan_memory
from surgery.recipe import LayerChoice, Recipe, format_count
from surgery.recipe.document import KeyPath
from surgery.recipe.schema import METRICS


def validate_recipe(recipe: Recipe, progress: Callable[[str, int, int], Any] | None = None) -> dict[str, Any]:
    """Check a recipe that has been read against its base and its texts; nothing is downloaded.

    Args:
        progress: called with (stage, done, total) while the data are read.

    Returns:
        ``checks``: a list of {what, checked, detail}; not ``checked`` is what is not on this machine. ``phases``: what
        each phase comes to.

    Raises:
        UsageError: something at hand does not fit.
    """
    checks = [_check("recipe", f"{recipe.path}: {_many(len(recipe.phases), 'phase')}")]
    checkpoint, model = _model(recipe)
    checks.append(model)
    checks += _texts(recipe, checkpoint, progress)
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


def _check(what: str, detail: str, checked: bool = True) -> dict[str, Any]:
    return {"what": what, "checked": checked, "detail": detail}


def _many(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count or 'no'} {what}s"


def _model(recipe: Recipe) -> tuple[Checkpoint | None, dict[str, Any]]:
    from surgery.hosts import on_hub, resolve

    try:
        directory = resolve(recipe.model, recipe.revision, offline=True)
    except UsageError as error:
        if not on_hub(recipe.model):
            with recipe.at(("model",)):
                raise
        return None, _check("model", f"{str(error).splitlines()[0]}; layers and shapes stay unchecked", checked=False)
    checkpoint, adapter = open_base(recipe, base=directory)
    available = swappable(checkpoint, adapter)
    choice = recipe.layers
    measured = isinstance(choice, LayerChoice) and choice.random is None
    # a choice by N_t is made when the model runs; whether it can be made is known now
    figures = {metric: dict.fromkeys(available, 0.0) for metric in METRICS}
    layers, _ = resolve_layers(recipe, available, checkpoint, measure=lambda *_: figures)
    plan_memory(recipe, checkpoint, adapter, layers)
    parameters = f"{sum(entry.numel for entry in checkpoint.tensors.values()):,}"
    chosen = recipe.layers_text if measured else ranges(layers)
    detail = f"{directory}: {adapter.name}, {parameters} parameters, layers {ranges(available)}; swaps {chosen}"
    own = own_head(checkpoint, adapter.ties(checkpoint.config))
    return checkpoint, _check("model", detail if own is None else f"{detail}; {own}")


def _texts(
    recipe: Recipe, checkpoint: Checkpoint | None, progress: Callable[[str, int, int], Any] | None
) -> list[dict[str, Any]]:
    """One line a text: is every record of it sound, and does it fill a context."""
    wanted: dict[str, tuple[KeyPath, Any, int, str]] = {}

    def want(path: KeyPath, spec: Any, context: int, part: str) -> None:
        known = wanted.get(f"{spec} {part}")
        if known is None or known[2] < context:
            wanted[f"{spec} {part}"] = (path, spec, context, part)

    for index, phase in enumerate(recipe.phases):
        path = ("phases", index, "data") if phase.data else ("data",)
        want(path, recipe.data_for(phase), 1 if phase.kind == "instruct" else phase.context, "train")
    want(("evaluation", "text"), recipe.evaluation_text, 2, "heldout")
    found = [_text(recipe, checkpoint, *item, progress) for item in wanted.values()]
    if checkpoint is not None and recipe.phases and not _of_hub(recipe.evaluation_text, recipe.path.parent):
        from surgery.adaptation import measuring

        measuring.check(recipe, base_tokenizer(recipe, checkpoint.directory))
        lengths = ", ".join(map(str, recipe.evaluation.recall.lengths))
        found.append(_check("recall", f"the evaluation's text holds needle prompts of {lengths} tokens"))
    return found


def _of_hub(spec: Any, root: Path) -> bool:
    from surgery.data.sources import sources

    return any(source.kind == "hub" for source in sources(spec, root))


def _text(
    recipe: Recipe,
    checkpoint: Checkpoint | None,
    path: KeyPath,
    spec: Any,
    context: int,
    part: str,
    progress: Callable[[str, int, int], Any] | None,
) -> dict[str, Any]:
    from surgery.data import checking
    from surgery.data.sources import sources
    from surgery.data.texts import describe, load_text
    from surgery.data.tokens import encode, require_context

    root = recipe.path.parent
    with recipe.at(path):
        name = describe(spec, part)
        if _of_hub(spec, root):
            return _check("text", f"{name}: a data set of the hub", checked=False)
        tokenizer = None if checkpoint is None else base_tokenizer(recipe, checkpoint.directory)
        if context == 1:
            read = checking.check(sources(spec, root), "instruct", tokenizer, progress=progress)
            return _check("text", f"{name}: {_many(sum(one.records for one in read), 'conversation')}")
        read = checking.check(sources(spec, root), "text", progress=progress)
        found = _many(sum(one.records for one in read), "document")
        if tokenizer is None:
            detail = f"{name}: {found}; its length in tokens needs the model's tokenizer"
            return _check("text", detail, checked=False)
        text = load_text(spec, part, root, limit=16 * context)
        require_context(encode(tokenizer, text, context), context)
    return _check("text", f"{name}: {found}, fills a context of {context}")
