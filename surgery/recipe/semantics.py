"""What keys mean together: checks that no single key can make."""

from __future__ import annotations

from collections.abc import Iterator

from surgery.recipe.document import KeyPath
from surgery.recipe.kinds import kinds_with, objective, phase_options
from surgery.recipe.schema import OPTIONS_OF, LayerChoice, Memory, Phase, Recipe
from surgery.sizes import format_count

Problem = tuple[KeyPath, str, str]

MIN_RECALL_LENGTH = 128
MAX_CONTEXT = 2**24  # tokens of one sequence, which has to fit into memory
MAX_BATCH = 2**30  # tokens a step
MAX_TOKENS = 10**15  # of a phase


def problems(recipe: Recipe) -> Iterator[Problem]:
    """Every contradiction in the recipe: YAML path, problem, remedy."""
    yield from _layers(recipe)
    yield from _memory(recipe.memory)
    taught = False  # an earlier phase moves the student away from its teacher
    for index, phase in enumerate(recipe.phases):
        for path, problem, remedy in _phase(recipe, phase, taught):
            yield ("phases", index, *path), problem, remedy
        taught = taught or not objective(phase.kind).teaches
    yield from _names(recipe)
    yield from _data(recipe)
    asked: set[int] = set()
    for index, length in enumerate(recipe.evaluation.recall.lengths):
        path = ("evaluation", "recall", "lengths", index)
        if length < MIN_RECALL_LENGTH:
            yield path, f"{length} tokens hold no needle and its question", f"use {MIN_RECALL_LENGTH} or more"
        elif length in asked:
            yield path, f"{length} is named twice", "keep it once"
        asked.add(length)


def _layers(recipe: Recipe) -> Iterator[Problem]:
    layers = recipe.layers
    if isinstance(layers, LayerChoice):
        given = [name for name in ("top", "bottom", "random") if getattr(layers, name) is not None]
        if len(given) != 1:
            found = " and ".join(given) or "none of them"
            problem = f"give one of top, bottom, random; found {found}"
            yield ("layers",), problem, "write for example {top: 8, by: log-mean}"
        for key, owners in (("by", ("top", "bottom")), ("seed", ("random",))):
            if key in layers.model_fields_set and given and given[0] not in owners:
                yield ("layers", key), f"{key!r} means nothing with {given[0]!r}", f"remove it, or use {owners[0]}"
        return
    if not layers:
        yield ("layers",), "no layer is named", "write a list such as [5, 11], or {top: 8, by: log-mean}"
    seen: set[int] = set()
    for index, layer in enumerate(layers):
        if layer in seen:
            yield ("layers", index), f"layer {layer} is named twice", "keep it once"
        seen.add(layer)


def _memory(memory: Memory) -> Iterator[Problem]:
    for rule, options in OPTIONS_OF.items():
        for option in options:
            if rule != memory.rule and option in memory.model_fields_set:
                known = ", ".join(OPTIONS_OF[memory.rule]) or "none"
                remedy = f"remove it; options of {memory.rule}: {known}"
                yield ("memory", option), f"is an option of rule {rule}, and the rule here is {memory.rule}", remedy
    if memory.rule == "host" and memory.start == "paper":
        yield ("memory", "start"), "the host's own rule has nothing to start", "remove it, or choose another rule"


def _phase(recipe: Recipe, phase: Phase, taught: bool) -> Iterator[Problem]:
    host = recipe.memory.rule == "host"
    if phase.tokens is None and phase.steps is None:
        yield (), "neither tokens nor steps is given", "add for example tokens: 100M"
        return
    if phase.tokens is not None and phase.steps is not None:
        yield ("steps",), "tokens and steps are both given", "keep one of the two"
    if phase.context < 2:
        yield ("context",), f"{phase.context} token has no next token to predict", "use 2 or more"
    elif phase.context > MAX_CONTEXT:
        problem = f"{phase.context} tokens are more than one sequence may have, {MAX_CONTEXT}"
        yield ("context",), problem, "use a shorter context"
    if max(phase.total_tokens, phase.total_steps) > MAX_TOKENS:
        key = "tokens" if phase.tokens is not None else "steps"
        problem = f"the phase would read {phase.total_tokens} tokens, and no run reads more than {MAX_TOKENS}"
        yield (key,), problem, "ask for fewer steps or tokens, or a smaller batch"
    if phase.batch > MAX_BATCH:
        yield ("batch",), f"{phase.batch} tokens are more than one step may read, {MAX_BATCH}", "use a smaller batch"
    elif phase.batch < phase.context:
        problem = f"{format_count(phase.batch)} tokens a step hold no sequence of {phase.context} tokens"
        yield ("batch",), problem, f"use {phase.context} or more, or a shorter context"
    if phase.tokens is not None and phase.tokens < phase.context:
        problem = f"{phase.tokens} tokens are less than one context of {phase.context}"
        yield ("tokens",), problem, "give more tokens, or a shorter context"
    elif phase.warmup_steps >= phase.total_steps and phase.warmup_steps > 0:
        problem = f"{phase.warmup_steps} steps of warm-up do not fit in a phase of {phase.total_steps} steps"
        yield ("warmup",), problem, "use fewer, or a fraction such as 0.1"
    kind = objective(phase.kind)
    for option in phase_options():
        if option not in kind.options and option in phase.model_fields_set:
            remedy = f"remove it, or use kind: {' or '.join(kinds_with(option))}"
            yield (option,), f"means nothing in a phase of kind {phase.kind}", remedy
    if kind.mixers_only and phase.trainable == "all":
        problem = f"the loss of a {phase.kind} phase reaches the swapped mixers only"
        yield ("trainable",), problem, "use swapped or swapped-memory"
    if host and phase.trainable == "swapped-memory":
        problem = "rule host adds no parameters, so nothing would be trained"
        yield ("trainable",), problem, "use trainable: swapped"
    if host and phase.dose is not None:
        yield ("dose",), "rule host has no dose: it is the host's rule already", "remove it"
    if host and (kind.mixers_only or (kind.teaches and not taught)):
        problem = f"with rule host the student computes what its teacher does, so {phase.kind} has nothing to teach"
        yield ("kind",), problem, "use next-token"


def _names(recipe: Recipe) -> Iterator[Problem]:
    seen: dict[str, int] = {}
    for index, phase in enumerate(recipe.phases):
        if phase.name is not None and phase.label in seen:
            problem = f"phases[{seen[phase.label]}] is called {phase.label!r} too"
            yield ("phases", index, "name"), problem, "give each phase its own name"
        seen.setdefault(phase.label, index)


def _data(recipe: Recipe) -> Iterator[Problem]:
    if not recipe.bundled and not isinstance(recipe.layers, tuple):
        measured = recipe.layers.random is None
        if measured and recipe.inspection_data is None:
            problem = "choosing layers by N_t needs text, and the recipe names none"
            yield ("layers",), problem, "add inspection: {data: PATH} or data: PATH, or list the layers"
    for index, phase in enumerate(recipe.phases):
        source = recipe.data_for(phase)
        if source is None:
            problem = f"no data: {recipe.model} is not bundled, so its text must be named"
            yield ("phases", index), problem, "add data: PATH here, or once at the top for every phase"
        elif objective(phase.kind).content == "instruct" and source == "bundled":
            at = ("phases", index, "data") if phase.data else ("phases", index)
            yield at, "the bundled text holds no questions and answers", "add data: with an instruction dataset"
