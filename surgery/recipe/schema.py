"""The recipe's keys, types and defaults.

Leaf types are in :mod:`surgery.recipe.fields`; what two keys mean together is in :mod:`surgery.recipe.semantics`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, PrivateAttr, Tag

from surgery.errors import UsageError
from surgery.recipe.document import Document, KeyPath, WrittenFloat, WrittenInt, show
from surgery.recipe.fields import (
    Bytes,
    Count,
    Factor,
    Fraction,
    Index,
    Name,
    Pair,
    Positive,
    Rate,
    Seed,
    Switch,
    Temperature,
    Text,
    Trainable,
    Unit,
    Warmup,
    named_in,
    one_of,
)
from surgery.recipe.kinds import KINDS

RULES = ("palimpsa", "bayesian", "host")
METRICS = ("mean", "log-mean", "median")
BUNDLED_MODELS = "bundled:"
# what the errors' locations call the members of a union
UNION_TAGS = frozenset(("<list>", "<choice>", "<text>", "<paths>", "<mixture>", "<one>", "<two>"))


def _union(pick: Callable[[Any], str | None], remedy: str) -> Discriminator:
    return Discriminator(
        pick,
        custom_error_type="recipe",
        custom_error_message="{problem}",
        custom_error_context={"problem": "this form is not understood", "remedy": remedy},
    )


class Section(BaseModel):
    """A mapping that knows all its keys."""

    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True)


class LayerChoice(Section):
    """A number of layers picked by their forgetting horizon N_t, or at random as a control."""

    top: Count | None = None
    bottom: Count | None = None
    random: Count | None = None
    by: Annotated[Literal[METRICS], one_of(*METRICS)] = "mean"  # as before recipes and drafts named it
    seed: Seed = 0


class Source(Section):
    """One text, or one part of a mixture of texts; what the options mean is in :mod:`surgery.data.sources`."""

    path: Text
    weight: Positive = 1.0
    column: Text | None = None
    split: Text | None = None
    config: Text | None = None
    revision: Text | None = None


Layers = Annotated[
    Annotated[tuple[Index, ...], Tag("<list>")] | Annotated[LayerChoice, Tag("<choice>")],
    _union(
        lambda value: {list: "<list>", dict: "<choice>", tuple: "<list>", LayerChoice: "<choice>"}.get(type(value)),
        "write a list such as [5, 11], or {top: 8, by: log-mean}",
    ),
]


def plain(data: Any) -> Any:
    """A data specification as strings, lists and mappings, as :mod:`surgery.data.sources` reads it."""
    if isinstance(data, tuple):
        return [plain(item) for item in data]
    return data.model_dump(exclude_none=True) if isinstance(data, Source) else data


def _data_form(value: Any) -> str | None:
    if isinstance(value, (str, WrittenInt, WrittenFloat)):
        return "<text>"
    if isinstance(value, (dict, Source)):
        return "<one>"
    if isinstance(value, (list, tuple)):
        return "<mixture>" if value and all(isinstance(item, (dict, Source)) for item in value) else "<paths>"
    return None


Data = Annotated[
    Annotated[Text, Tag("<text>")]
    | Annotated[Source, Tag("<one>")]
    | Annotated[Annotated[tuple[Text, ...], Field(min_length=1)], Tag("<paths>")]
    | Annotated[tuple[Source, ...], Tag("<mixture>")],
    _union(_data_form, "write bundled, a path, a list of paths, a hub dataset, or [{path: ..., weight: 2}]"),
]


class Rates(Section):
    """Learning rates of what the graft added and of the host's own parameters."""

    memory: Rate
    host: Rate


LearningRate = Annotated[
    Annotated[Rate, Tag("<one>")] | Annotated[Rates, Tag("<two>")],
    Discriminator(lambda value: "<two>" if isinstance(value, (dict, Rates)) else "<one>"),
]


class Memory(Section):
    """The rule that takes the host's place, how it starts, and the rule's own options."""

    rule: Annotated[Literal[RULES], one_of(*RULES)]
    start: Annotated[Literal["exact", "paper"], one_of("exact", "paper")] = "exact"
    rank: Count | None = None
    b_scale: Pair = (0.1, 1.0)
    learn_prior: Switch = False
    noise: Annotated[Literal["restoring", "constant"], one_of("restoring", "constant")] = "restoring"
    noise_from: Annotated[Literal["head", "token"], one_of("head", "token")] = "head"
    retention: Unit = 1.0
    noise_groups: Count = 1
    rotations: Switch = False

    @property
    def options(self) -> dict[str, Any]:
        """The options that the recipe sets, as the memory rule's constructor takes them: plain JSON values."""
        given = {name: getattr(self, name) for name in OPTIONS_OF[self.rule] if name in self.model_fields_set}
        return {name: list(value) if isinstance(value, tuple) else value for name, value in given.items()}


# which rule each option belongs to
OPTIONS_OF: dict[str, tuple[str, ...]] = {
    "palimpsa": ("rank", "b_scale", "learn_prior"),
    "bayesian": ("noise", "noise_from", "retention", "noise_groups", "rotations"),
    "host": (),
}


class Inspection(Section):
    """The text that measures N_t for ``layers: {top: K}``."""

    data: Data = None  # absent
    tokens: Count = 256_000


class MaxDrift(Section):
    """What `apply` tolerates, in nats of KL per token."""

    kl: Positive


class Dose(Section):
    """The way from the host's rule (0) to the full rule (1) within a phase."""

    start: Unit | None = Field(default=None, alias="from")
    to: Unit = 1.0
    over: Fraction = 0.5


class Phase(Section):
    """One stage of adaptation."""

    name: Name | None = None
    kind: Annotated[str, named_in(KINDS)]
    tokens: Count | None = None
    steps: Count | None = None
    context: Count = 2048
    batch: Count = 64_000
    learning_rate: LearningRate = 1.0e-3
    schedule: Annotated[Literal["cosine", "constant", "wsd"], one_of("cosine", "constant", "wsd")] = "cosine"
    warmup: Warmup = 200
    trainable: Trainable = "swapped"
    dose: Dose | None = None
    temperature: Temperature = 1.0  # T of both softmaxes of a logits phase, whose KL is multiplied by T^2
    boundary_weight: Factor = 1.0
    data: Data = None  # absent

    @property
    def label(self) -> str:
        """The phase's name, by default its kind."""
        return self.name or self.kind

    @property
    def sequences(self) -> int:
        """Sequences a step, over all devices: the number nearest to ``batch`` tokens."""
        return max(round(self.batch / self.context), 1)

    @property
    def total_steps(self) -> int:
        """Optimiser steps: as given, or enough to see ``tokens``."""
        return self.steps or -(-self.tokens // (self.sequences * self.context))

    @property
    def total_tokens(self) -> int:
        """Tokens that the steps read."""
        return self.total_steps * self.sequences * self.context

    @property
    def warmup_steps(self) -> int:
        """Steps of warm-up. The default is cut to a tenth of a phase too short for it."""
        if isinstance(self.warmup, float):
            return math.ceil(self.warmup * self.total_steps)
        return self.warmup if "warmup" in self.model_fields_set else min(self.warmup, self.total_steps // 10)

    @property
    def rates(self) -> Rates:
        """The learning rates of added and of host parameters."""
        one = self.learning_rate
        return one if isinstance(one, Rates) else Rates(memory=one, host=one)


class Recall(Section):
    lengths: Annotated[tuple[Count, ...], Field(min_length=1)] = (512, 1024, 2048)


class Evaluation(Section):
    """What `eval` reads."""

    text: Data = "bundled"
    recall: Recall = Recall()


class Export(Section):
    """What `export` writes."""

    dtype: Annotated[Literal["float32", "bfloat16", "float16"], one_of("float32", "bfloat16", "float16")] = "bfloat16"
    shard_size: Bytes = 5_000_000_000


class Recipe(Section):
    """A whole recipe, checked. ``text`` is the file as it was read; ``overrides`` the --set options on top of it."""

    model: Text
    revision: Text = "main"
    trust_remote_code: Switch = False
    layers: Layers
    memory: Memory
    inspection: Inspection = Inspection()
    max_drift: MaxDrift | None = None
    seed: Seed = 0
    data: Data = None  # absent
    phases: tuple[Phase, ...] = ()
    evaluation: Evaluation = Evaluation()
    export: Export = Export()

    _document: Document = PrivateAttr()
    _name: str = PrivateAttr()

    @property
    def name(self) -> str:
        return self._name

    @property
    def path(self) -> Path:
        return Path(self._document.name)

    @property
    def text(self) -> str:
        return self._document.text

    @property
    def overrides(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(self._document.overridden.values()))

    @property
    def bundled(self) -> bool:
        """Whether the base is one that ships with the package."""
        return self.model.startswith(BUNDLED_MODELS)

    @property
    def evaluation_text(self) -> Any:
        """The text to measure on, which training never reads where it is the bundled one."""
        return plain(self.evaluation.text)

    @property
    def layers_text(self) -> str:
        """The choice of layers in a few words: ``top 8 by mean``, ``5, 11, 17, 23``."""
        choice = self.layers
        if not isinstance(choice, LayerChoice):
            return ", ".join(map(str, choice))
        if choice.random is not None:
            return f"random {choice.random}, seed {choice.seed}"
        key = "top" if choice.top is not None else "bottom"
        return f"{key} {getattr(choice, key)} by {choice.by}"

    def where(self, path: KeyPath) -> str:
        """``file:line`` of a key, or the override that set it."""
        return self._document.where(path)

    def line(self, path: KeyPath) -> int:
        """The line of a key, 0 where the file has none."""
        return self._document.line(path)

    def error(self, path: KeyPath, problem: str, remedy: str) -> Exception:
        """A UsageError that points at ``path`` in the recipe, for checks that need more than the recipe."""
        return self._document.error(path, problem, remedy)

    @contextmanager
    def at(self, path: KeyPath) -> Iterator[None]:
        """Put the recipe's line in front of an error about what that line names."""
        try:
            yield
        except UsageError as error:
            text = str(error)
            if text.startswith(f"{self.path}:") or text.startswith("--set "):
                raise
            raise UsageError(f"{self.where(path)}: {show(path)}: {text}") from None

    def data_for(self, phase: Phase) -> Any:
        """The text a phase trains on: its own, the recipe's, or the bundled text for a bundled base."""
        return plain(phase.data or self.data or ("bundled" if self.bundled else None))

    @property
    def inspection_data(self) -> Any:
        """The text that measures N_t."""
        return plain(self.inspection.data or self.data or ("bundled" if self.bundled else None))

    def drift_limit(self, exact: bool) -> float | None:
        """Nats of KL per token that `apply` tolerates; ``exact`` says that the swap computes the host's function."""
        if self.max_drift is not None:
            return self.max_drift.kl
        return 1.0e-6 if exact else None

    def doses(self) -> tuple[tuple[float, float, float], ...]:
        """(from, to, over) of each phase; a phase that keeps its dose has from == to.

        Where the start is exact, no phase names a dose and the rule is not the host's own, the first phase goes from
        0 to 1 over its first half.
        """
        spans = []
        dose = 1.0 if self.memory.start == "paper" else 0.0
        named = any(phase.dose for phase in self.phases)
        ramp = self.memory.rule != "host" and self.memory.start == "exact" and not named
        for index, phase in enumerate(self.phases):
            schedule = phase.dose or (Dose(start=0.0, to=1.0, over=0.5) if ramp and index == 0 else None)
            if schedule is None:
                spans.append((dose, dose, 1.0))
                continue
            spans.append((dose if schedule.start is None else schedule.start, schedule.to, schedule.over))
            dose = schedule.to
        return tuple(spans)
