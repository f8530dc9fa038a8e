"""What must hold of a recipe before any work: the same code for ``validate``, ``apply`` and ``distill``.

    ready = preflight(load_recipe("demo-bayesian"), VALIDATE)
    ready.checks, ready.opened

Everything that is wrong is said at once, each with its line. A job asks for the parts that it will do. It accepts what
:data:`VALIDATE` has passed, which asks for all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from surgery.checkpoint.reading import Checkpoint
from surgery.checkpoint.ties import own_head
from surgery.errors import UsageError, UserError, together
from surgery.layers import ranges, resolve_layers
from surgery.opening import base_tokenizer, open_base, swappable
from surgery.plan import Plan, bind
from surgery.recipe import LayerChoice, Recipe
from surgery.recipe.document import KeyPath
from surgery.recipe.kinds import objective
from surgery.recipe.schema import METRICS

if TYPE_CHECKING:
    from surgery.data.checking import Content
    from surgery.hosts import HostAdapter

Progress = Callable[[str, int, int], Any]  # stage, bytes done, bytes in all


@dataclass(frozen=True)
class Job:
    """The parts of a recipe that a job uses.

    Attributes:
        drift: the swap is measured on the evaluation's text.
        trains: the phases run.
        evaluates: the result of the phases is measured on the evaluation's text.
        asks_hub: models and data sets of a hub may be asked for; otherwise what is not on this machine is not checked.
        devices: that share a step.
    """

    drift: bool = True
    trains: bool = True
    evaluates: bool = True
    asks_hub: bool = True
    devices: int = 1


VALIDATE = Job(asks_hub=False)


@dataclass
class Preflight:
    """What was found.

    Attributes:
        checks: {what, checked, detail}; not ``checked`` is what is not on this machine.
        opened: the base and its family's adapter, None where it is not on this machine.
    """

    recipe: Recipe
    job: Job
    checks: list[dict[str, Any]] = field(default_factory=list)
    opened: tuple[Checkpoint, HostAdapter] | None = None
    _errors: list[tuple[int, UserError]] = field(default_factory=list)

    @contextmanager
    def at(self, path: KeyPath) -> Iterator[None]:
        """Keep an error about what a key names, with the key's line, and go on after the block."""
        try:
            with self.recipe.at(path):
                yield
        except UsageError as error:
            self._errors.append((self.recipe.line(path), error))

    def note(self, what: str, detail: str, checked: bool = True) -> None:
        self.checks.append({"what": what, "checked": checked, "detail": detail})

    def raise_errors(self) -> None:
        if self._errors:
            raise together(error for _, error in sorted(self._errors, key=lambda found: found[0]))


def preflight(
    recipe: Recipe,
    job: Job,
    *,
    offline: bool | None = None,
    base: Path | None = None,
    progress: Progress | None = None,
) -> Preflight:
    """Check a recipe that has been read against its base, its texts and its phases.

    Args:
        offline: never ask a hub for the base.
        base: the base's directory, where it is known.
        progress: called while data are read.

    Raises:
        UsageError: everything that does not fit, each with its line.
        JobError: a data set of a hub that cannot be read.
    """
    found = Preflight(recipe, job)
    found.note("recipe", f"{recipe.path}: {_many(len(recipe.phases), 'phase')}")
    _model(found, offline, base)
    tokenizer = None
    if found.opened is not None and (job.drift or job.trains or _is_measured(recipe)):
        with found.at(("model",)):
            tokenizer = base_tokenizer(recipe, found.opened[0].directory)
    if _is_measured(recipe):
        _inspection(found, tokenizer)
    if job.trains:
        _training(found, tokenizer, progress)
    if job.drift or (job.evaluates and recipe.phases):
        _evaluation(found, tokenizer, progress)
    found.raise_errors()
    return found


def _many(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count or 'no'} {what}s"


def _is_measured(recipe: Recipe) -> bool:
    """Whether the layers are chosen by N_t, which is measured when the job runs."""
    return isinstance(recipe.layers, LayerChoice) and recipe.layers.random is None


def _model(found: Preflight, offline: bool | None, base: Path | None) -> None:
    """The base, its layers, the memory's options, and what each phase trains."""
    from surgery.hosts import on_hub, resolve

    recipe = found.recipe
    if base is None and not found.job.asks_hub and on_hub(recipe.model):
        try:
            base = resolve(recipe.model, recipe.revision, offline=True)
        except UsageError as error:
            reason = f"{str(error).splitlines()[0]}; layers and shapes stay unchecked"
            found.note("model", reason, checked=False)
            return
    with found.at(("model",)):
        found.opened = open_base(recipe, offline=True if not found.job.asks_hub else offline, base=base)
    if found.opened is None:
        return
    checkpoint, adapter = found.opened
    available = swappable(checkpoint, adapter)
    # a choice by N_t is made when the model runs; whether it can be made is known now
    figures = {metric: dict.fromkeys(available, 0.0) for metric in METRICS}
    layers: tuple[int, ...] = ()
    with found.at(("layers",)):
        layers, _ = resolve_layers(recipe, available, checkpoint, measure=lambda *_: figures)
    chosen = recipe.layers_text if _is_measured(recipe) else ranges(layers)
    parameters = f"{sum(entry.numel for entry in checkpoint.tensors.values()):,}"
    about = f"{checkpoint.directory}: {adapter.name}, {parameters} parameters, layers {ranges(available)}"
    own = own_head(checkpoint, adapter.ties(checkpoint.config))
    found.note("model", f"{about}; swaps {chosen}" + (f"; {own}" if own else ""))
    if not available:
        return
    if _is_measured(recipe) or not layers:
        layers = tuple(available)  # those that will be chosen are not known yet
    plan = None
    with found.at(("memory",)):
        plan = bind(recipe, checkpoint, adapter, layers)
    if found.job.trains and recipe.phases:
        if plan is None:  # what the phases train does not hang on the options that are wrong
            plain = recipe.memory.model_copy(update={"rank": None, "noise_groups": 1, "rotations": False})
            plan = bind(recipe.model_copy(update={"memory": plain}), checkpoint, adapter, layers)
        _selections(found, plan)


def _selections(found: Preflight, plan: Plan) -> None:
    """What each phase trains: read off the swapped model's names, none of its weights being there."""
    import torch

    from surgery.adaptation.phases import choose, dose_schedule
    from surgery.adaptation.saving import astray
    from surgery.adaptation.schedules import batch_shape
    from surgery.adaptation.teaching import body_of

    recipe, adapter = found.recipe, plan.adapter
    config = adapter.surgery_config(plan.base.config, plan.surgery())
    with torch.device("meta"):
        model = adapter.build(config, device="meta")
    # transformers keeps beside a model what it renamed and stacked on loading it, and needs that for the disk's names
    loaded = adapter.load(plan.base.directory, placement={"device_map": "meta"})
    model._weight_conversions = getattr(loaded, "_weight_conversions", None)
    body = body_of(model, config, list(plan.layers))
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    stored = {entry.name: entry.shape for entry in (*plan.base.tensors.values(), *plan.added)}
    config = adapter.completed(config, stored)
    dose = plan.dose
    for index, phase in enumerate(recipe.phases):
        schedule = dose_schedule(recipe, index, dose)
        dose = schedule.stop
        with found.at(("phases", index, "trainable")):
            selection = choose(recipe, index, body, schedule)
            names = [
                name
                for parameter, tensor in selection.trained.items()
                for name in adapter.disk_tensors(config, model, parameter, tensor.detach())
            ]
            if missing := astray(stored, names):
                raise UsageError(f"{missing[0]}: the base holds no tensor of that name, so it cannot be written back")
        for parameter in trainable:
            parameter.requires_grad_(True)
        with found.at(("phases", index, "batch")):
            batch_shape(phase.sequences, phase.context, found.job.devices, 1)


def _inspection(found: Preflight, tokenizer: Any) -> None:
    from surgery.data.texts import describe
    from surgery.inspection.measure import inspected_text, inspected_tokens

    recipe = found.recipe
    spec, tokens = recipe.inspection_data, recipe.inspection.tokens
    with found.at(("inspection", "data") if recipe.inspection.data else ("data",)):
        if _unread(found, "inspection", describe(spec, "train"), spec, tokenizer):
            return
        read = inspected_tokens(tokenizer, inspected_text(spec, tokens, recipe.path.parent), tokens)
        found.note("inspection", f"{describe(spec, 'train')}: {len(read):,} tokens measure N_t")


def _training(found: Preflight, tokenizer: Any, progress: Progress | None) -> None:
    """Each phase's data, every record of it. Of phases that read the same, the one that asks most is checked."""
    from surgery.adaptation import data
    from surgery.data.texts import describe

    recipe = found.recipe
    asking: dict[tuple[str, bool], int] = {}
    for index, phase in enumerate(recipe.phases):
        answers = objective(phase.kind).content == "instruct"
        key = (str(recipe.data_for(phase)), answers)
        other = asking.setdefault(key, index)
        # a text must fill a context, an example must fit into one
        if (phase.context < recipe.phases[other].context) == answers:
            asking[key] = index
    for index in sorted(asking.values()):
        phase = recipe.phases[index]
        spec = recipe.data_for(phase)
        name = describe(spec, "train")
        with found.at(("phases", index, "data") if phase.data else ("data",)):
            content = objective(phase.kind).content
            if _unread(found, "text", name, spec, tokenizer, (content, progress)):
                continue
            count = sum(one.records for one in data.check(recipe, index, tokenizer, progress))
            said = "the shortest fits" if content == "instruct" else "fills"
            found.note("text", f"{name}: {_records(count, content)}, {said} a context of {phase.context}")


def _evaluation(found: Preflight, tokenizer: Any, progress: Progress | None) -> None:
    from surgery.adaptation import measuring
    from surgery.data.texts import describe
    from surgery.drift import text_windows

    recipe, job = found.recipe, found.job
    spec = recipe.evaluation_text
    name = describe(spec, "heldout")
    with found.at(("evaluation", "text")):
        if _unread(found, "text", name, spec, tokenizer, ("text", progress)):
            return
        if job.drift:
            count, width = text_windows(tokenizer, spec, recipe.path.parent)[1].shape
            found.note("text", f"{name}: fills {_many(count, 'window')} of {width} tokens for the drift")
        if job.evaluates and recipe.phases:
            measuring.check(recipe, tokenizer, progress)
            lengths = ", ".join(map(str, recipe.evaluation.recall.lengths))
            found.note("recall", f"the evaluation's text holds needle prompts of {lengths} tokens")


def _unread(
    found: Preflight,
    what: str,
    name: str,
    spec: Any,
    tokenizer: Any,
    whole: tuple[Content, Progress | None] | None = None,
) -> bool:
    """Whether a text that is there cannot be tokenised yet; says why.

    Args:
        whole: without a tokenizer read every record all the same, as this content.

    Raises:
        UsageError: it is not there, or holds a record that is not as it should be.
    """
    from surgery.data import checking
    from surgery.data.sources import sources

    places = sources(spec, found.recipe.path.parent)
    if not found.job.asks_hub and _any_of_hub(places):
        found.note(what, f"{name}: a data set of the hub", checked=False)
        return True
    if tokenizer is None:
        said = "found"
        if whole is not None:
            content, progress = whole
            said = _records(sum(one.records for one in checking.check(places, content, progress=progress)), content)
        found.note(what, f"{name}: {said}; its length in tokens needs the model's tokenizer", checked=False)
        return True
    return False


def _records(count: int, content: Content) -> str:
    return _many(count, "document" if content == "text" else "conversation")


def _any_of_hub(places: Iterable[Any]) -> bool:
    return any(source.kind == "hub" for source in places)
