"""The recipe's keys, types and defaults.

Every leaf type says in its error what to write instead; what two keys mean together is in
:mod:`surgery.recipe.semantics`.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, PrivateAttr, Tag
from pydantic_core import PydanticCustomError

from surgery.recipe.document import Document, KeyPath
from surgery.recipe.sizes import parse_bytes, parse_count

RULES = ("palimpsa", "bayesian", "host")
KINDS = ("hidden", "logits", "next-token", "instruct")
TRAINABLE = ("swapped", "swapped-memory", "all")
METRICS = ("mean", "log-mean", "median")
BUNDLED_MODELS = "bundled:"


def _checked(check: Callable[[Any], Any], remedy: str) -> BeforeValidator:
    """A validator whose failures carry ``remedy`` beside the reason that ``check`` raised."""

    def validate(value: Any) -> Any:
        try:
            return check(value)
        except ValueError as error:
            raise PydanticCustomError("recipe", "{problem}", {"problem": str(error), "remedy": remedy}) from None

    return BeforeValidator(validate)


def _count(value: Any) -> int:
    number = parse_count(value)
    if number < 1:
        raise ValueError(f"{value!r} is less than 1")
    return number


def _index(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{value!r} is not a whole number")
    if value < 0:
        raise ValueError(f"{value} is negative")
    return value


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise ValueError(f"{value!r} is not a number")
    try:
        number = float(value)
    except ValueError:
        raise ValueError(f"{value!r} is not a number") from None
    if not math.isfinite(number):
        raise ValueError(f"{value} is not a finite number")
    return number


def _positive(value: Any) -> float:
    if (number := _number(value)) <= 0:
        raise ValueError(f"{value} is not above 0")
    return number


def _not_negative(value: Any) -> float:
    if (number := _number(value)) < 0:
        raise ValueError(f"{value} is negative")
    return number


def _unit(value: Any) -> float:
    if not 0 <= (number := _number(value)) <= 1:
        raise ValueError(f"{value} is not between 0 and 1")
    return number


def _fraction(value: Any) -> float:
    if not 0 < (number := _number(value)) <= 1:
        raise ValueError(f"{value} is not above 0 and at most 1")
    return number


def _text(value: Any) -> str:
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"{value!r} is not text")
    return value


def _name(value: Any) -> str:
    if not isinstance(value, str) or not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]{0,39}", value):
        raise ValueError(f"{value!r} cannot name a folder")
    return value


def _switch(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"{value!r} is neither true nor false")
    return value


def choose(value: Any, allowed: tuple[str, ...]) -> str:
    """``value`` if it is one of ``allowed``; otherwise a ValueError with a suggestion."""
    if isinstance(value, str) and value in allowed:
        return value
    raise ValueError(f"{value!r} is not one of {', '.join(allowed)}{suggestion(value, allowed)}")


def suggestion(word: Any, known: tuple[str, ...] | list[str]) -> str:
    """`` (did you mean 'x'?)`` or nothing."""
    near = difflib.get_close_matches(str(word), known, n=1, cutoff=0.6)
    return f" (did you mean {near[0]!r}?)" if near else ""


def _warmup(value: Any) -> int | float:
    number = _number(value)
    if number < 0:
        raise ValueError(f"{value} is negative")
    if number >= 1 and number != int(number):
        raise ValueError(f"{value} is neither whole steps nor a fraction below 1")
    return number if 0 < number < 1 else int(number)


def _trainable(value: Any) -> str | tuple[str, ...]:
    if isinstance(value, list):
        if not value or not all(isinstance(item, str) and item for item in value):
            raise ValueError("the list of name patterns is empty or holds something other than text")
        return tuple(value)
    return choose(value, TRAINABLE)


def _pair(value: Any) -> tuple[float, float]:
    if not isinstance(value, list) or len(value) != 2:
        raise ValueError(f"{value!r} is not a pair of numbers")
    low, high = _number(value[0]), _number(value[1])
    if low > high:
        raise ValueError(f"{low} is above {high}")
    return low, high


def _one_of(*allowed: str) -> BeforeValidator:
    return _checked(lambda value: choose(value, allowed), f"write one of {', '.join(allowed)}")


_SIZE_REMEDY = "write a whole number or a size such as 2k, 300M or 1.5B"
Count = Annotated[int, _checked(_count, _SIZE_REMEDY)]
Index = Annotated[int, _checked(_index, "write a whole number, 0 or more")]
Bytes = Annotated[int, _checked(lambda value: max(parse_bytes(value), 1), "write a size such as 5GB or 500MB")]
_RATE_REMEDY = "write a positive number such as 1.0e-3, or {memory: 1.0e-3, host: 1.0e-4}"
Rate = Annotated[float, _checked(_positive, _RATE_REMEDY)]
Positive = Annotated[float, _checked(_positive, "write a positive number such as 1.0")]
NotNegative = Annotated[float, _checked(_not_negative, "write a number, 0 or more")]
Unit = Annotated[float, _checked(_unit, "write a number from 0 to 1")]
Fraction = Annotated[float, _checked(_fraction, "write a fraction of the phase such as 0.5")]
Text = Annotated[str, _checked(_text, "write a name or a path")]
Name = Annotated[str, _checked(_name, "use up to 40 letters, digits, '-' and '_'")]
Switch = Annotated[bool, _checked(_switch, "write true or false")]
Pair = Annotated[tuple[float, float], _checked(_pair, "write [low, high], such as [0.1, 1.0]")]
Warmup = Annotated[int | float, _checked(_warmup, "write steps such as 200, or a fraction such as 0.1")]
Trainable = Annotated[
    str | tuple[str, ...], _checked(_trainable, f"write one of {', '.join(TRAINABLE)}, or a list of name patterns")
]


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
    by: Annotated[Literal[METRICS], _one_of(*METRICS)] = "mean"
    seed: Index = 0


class Source(Section):
    """One part of a mixture of texts."""

    path: Text
    weight: Positive = 1.0


Layers = Annotated[
    Annotated[tuple[Index, ...], Tag("<list>")] | Annotated[LayerChoice, Tag("<choice>")],
    _union(
        lambda value: {list: "<list>", dict: "<choice>", tuple: "<list>", LayerChoice: "<choice>"}.get(type(value)),
        "write a list such as [5, 11], or {top: 8, by: mean}",
    ),
]


def plain(data: Any) -> Any:
    """A data specification as strings, lists and mappings, as :mod:`surgery.evaluation.text` reads it."""
    if isinstance(data, tuple):
        return [item.model_dump() if isinstance(item, Source) else item for item in data]
    return data


def _data_form(value: Any) -> str | None:
    if isinstance(value, str):
        return "<text>"
    if isinstance(value, (list, tuple)):
        return "<mixture>" if value and all(isinstance(item, (dict, Source)) for item in value) else "<paths>"
    return None


Data = Annotated[
    Annotated[Text, Tag("<text>")]
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

    rule: Annotated[Literal[RULES], _one_of(*RULES)]
    start: Annotated[Literal["exact", "paper"], _one_of("exact", "paper")] = "exact"
    rank: Count | None = None
    b_scale: Pair = (0.1, 1.0)
    learn_prior: Switch = False
    noise: Annotated[Literal["restoring", "constant"], _one_of("restoring", "constant")] = "restoring"
    retention: Unit | None = None
    noise_groups: Count = 1

    @property
    def options(self) -> dict[str, Any]:
        """The options that the recipe sets, as the memory rule's constructor takes them."""
        names = [name for names in OPTIONS_OF.values() for name in names]
        return {name: getattr(self, name) for name in names if name in self.model_fields_set}


# which rule each option belongs to
OPTIONS_OF: dict[str, tuple[str, ...]] = {
    "palimpsa": ("rank", "b_scale", "learn_prior"),
    "bayesian": ("noise", "retention", "noise_groups"),
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
    kind: Annotated[Literal[KINDS], _one_of(*KINDS)]
    tokens: Count | None = None
    steps: Count | None = None
    context: Count = 2048
    batch: Count = 64_000
    learning_rate: LearningRate = 1.0e-3
    schedule: Annotated[Literal["cosine", "constant", "wsd"], _one_of("cosine", "constant", "wsd")] = "cosine"
    warmup: Warmup = 200
    trainable: Trainable = "swapped"
    dose: Dose | None = None
    temperature: Positive = 1.0
    boundary_weight: NotNegative = 1.0
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

    dtype: Annotated[Literal["float32", "bfloat16", "float16"], _one_of("float32", "bfloat16", "float16")] = "bfloat16"
    shard_size: Bytes = 5_000_000_000


class Recipe(Section):
    """A whole recipe, checked. ``text`` is the file as it was read; ``overrides`` the --set options on top of it."""

    model: Text
    revision: Text = "main"
    layers: Layers
    memory: Memory
    inspection: Inspection = Inspection()
    max_drift: MaxDrift | None = None
    seed: Index = 0
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
        return tuple(self._document.overridden.values())

    @property
    def bundled(self) -> bool:
        """Whether the base is one that ships with the package."""
        return self.model.startswith(BUNDLED_MODELS)

    def error(self, path: KeyPath, problem: str, remedy: str) -> Exception:
        """A UsageError that points at ``path`` in the recipe, for checks that need more than the recipe."""
        return self._document.error(path, problem, remedy)

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
