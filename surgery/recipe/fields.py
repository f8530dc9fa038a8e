"""A recipe's leaf values: each type reads what people write, and says in its error what to write instead."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Callable, Collection
from typing import Annotated, Any

from pydantic import BeforeValidator
from pydantic_core import PydanticCustomError

from surgery.recipe.document import WrittenFloat, WrittenInt
from surgery.sizes import parse_bytes, parse_count

SEEDS = 2**63  # torch's generators take no more
LARGEST, SMALLEST = 3.4028234663852886e38, 1.1754943508222875e-38  # of float32, in which everything is trained
GREATEST = 1.0e6  # of options, rates and factors: no trained weight reaches it, and its square is a plain number
TRAINABLE = ("swapped", "swapped-memory", "all")


def checked(check: Callable[[Any], Any], remedy: str | Callable[[], str]) -> BeforeValidator:
    """A validator whose failures carry ``remedy`` beside the reason that ``check`` raised."""

    def validate(value: Any) -> Any:
        problem = "has no value"
        if value is not None:
            try:
                return check(value)
            except ValueError as error:
                problem = str(error)
        words = remedy if isinstance(remedy, str) else remedy()
        raise PydanticCustomError("recipe", "{problem}", {"problem": problem, "remedy": words})

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
    return int(value)


def _seed(value: Any) -> int:
    if isinstance(value, str) and re.fullmatch(r"-?[0-9][0-9_]*", value):
        raise ValueError(f"{value} is out of range")  # longer than any number of a recipe
    if (number := _index(value)) >= SEEDS:
        raise ValueError(f"{value} is not below 2^63")
    return number


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise ValueError(f"{value!r} is not a number")
    try:
        number = float(value)
    except ValueError:
        raise ValueError(f"{value!r} is not a number") from None
    if not math.isfinite(number):
        raise ValueError(f"{value} is not a finite number")
    if abs(number) > LARGEST:
        raise ValueError(f"{value} is infinite in float32, whose largest number is {LARGEST:.2g}")
    if 0 < abs(number) < SMALLEST:
        raise ValueError(f"{value} is zero in float32, whose smallest number is {SMALLEST:.2g}")
    return number


def _positive(value: Any) -> float:
    if (number := _number(value)) <= 0:
        raise ValueError(f"{value} is not above 0")
    return number


def _moderate(value: Any) -> float:
    number = _number(value)
    if abs(number) > GREATEST:
        raise ValueError(f"{value} is beyond {GREATEST:,.0f}, where nothing is left to train")
    return number


def _rate(value: Any) -> float:
    _moderate(value)
    return _positive(value)


def _temperature(value: Any) -> float:
    if (number := _rate(value)) < 1 / GREATEST:
        raise ValueError(f"{value} is below {1 / GREATEST:g}, where logits divided by it overflow")
    return number


def _factor(value: Any) -> float:
    _moderate(value)
    return _not_negative(value)


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


def as_written(value: Any) -> Any:
    """``value``, or the text of the file where YAML reads a number and a key takes text.

    Raises:
        ValueError: true or false, whose text is not kept.
    """
    if isinstance(value, bool):
        raise ValueError(f"{str(value).lower()} is true or false to YAML; write it in quotes to make it text")
    return value.written if isinstance(value, (WrittenInt, WrittenFloat)) else value


def _text(value: Any) -> str:
    value = as_written(value)
    if "\0" in str(value):
        raise ValueError("it holds the character of code 0, which no name has")
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"{value!r} is not text")
    return value


def _name(value: Any) -> str:
    value = as_written(value)
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
        value = [as_written(item) for item in value]
        if not value or not all(isinstance(item, str) and item for item in value):
            raise ValueError("the list of name patterns is empty or holds something other than text")
        return tuple(value)
    return choose(value, TRAINABLE)


def _pair(value: Any) -> tuple[float, float]:
    if not isinstance(value, list) or len(value) != 2:
        raise ValueError(f"{value!r} is not a pair of numbers")
    low, high = _moderate(value[0]), _moderate(value[1])
    if low > high:
        raise ValueError(f"{low} is above {high}")
    return low, high


def one_of(*allowed: str) -> BeforeValidator:
    return named_in(allowed)


def named_in(names: Collection[str]) -> BeforeValidator:
    """One of a collection that may grow."""
    return checked(lambda value: choose(value, names), lambda: f"write one of {', '.join(names)}")


_SIZE_REMEDY = "write a whole number or a size such as 2k, 300M or 1.5B"
Count = Annotated[int, checked(_count, _SIZE_REMEDY)]
Index = Annotated[int, checked(_index, "write a whole number, 0 or more")]
Seed = Annotated[int, checked(_seed, f"write a whole number from 0 to {SEEDS - 1:,} (2^63 - 1)".replace(",", " "))]
Bytes = Annotated[int, checked(lambda value: max(parse_bytes(value), 1), "write a size such as 5GB or 500MB")]
_RATE_REMEDY = "write a positive number such as 1.0e-3, or {memory: 1.0e-3, host: 1.0e-4}"
Rate = Annotated[float, checked(_rate, _RATE_REMEDY)]
Temperature = Annotated[float, checked(_temperature, "write a positive number such as 1.0")]
Positive = Annotated[float, checked(_positive, "write a positive number such as 1.0")]
Factor = Annotated[float, checked(_factor, "write a number, 0 or more, such as 1.0")]
Unit = Annotated[float, checked(_unit, "write a number from 0 to 1")]
Fraction = Annotated[float, checked(_fraction, "write a fraction of the phase such as 0.5")]
Text = Annotated[str, checked(_text, "write a name or a path")]
Name = Annotated[str, checked(_name, "use up to 40 letters, digits, '-' and '_'")]
Switch = Annotated[bool, checked(_switch, "write true or false")]
Pair = Annotated[tuple[float, float], checked(_pair, "write [low, high], such as [0.1, 1.0]")]
Warmup = Annotated[int | float, checked(_warmup, "write steps such as 200, or a fraction such as 0.1")]
Trainable = Annotated[
    str | tuple[str, ...], checked(_trainable, f"write one of {', '.join(TRAINABLE)}, or a list of name patterns")
]
