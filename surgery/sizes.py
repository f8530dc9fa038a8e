"""Sizes as people write them: ``300M`` tokens, ``64k``, ``5GB``."""

from __future__ import annotations

import re
from fractions import Fraction

COUNT_UNITS = {"": 1, "k": 10**3, "K": 10**3, "M": 10**6, "B": 10**9}
BYTE_UNITS = {"": 1, "B": 1, "KB": 10**3, "kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
LARGEST = 10**18

_SIZE = re.compile(r"([-+]?)([0-9][0-9_]{0,18})(?:\.([0-9]{1,18}))? ?([A-Za-z]*)")


def _parse(value: object, units: dict[str, int], what: str) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise ValueError(f"{value!r} is not {what}")
    match = _SIZE.fullmatch(str(value).strip())
    if match is None or match[4] not in units:
        raise ValueError(f"{value!r} is not {what}")
    sign, whole, decimals, unit = match.groups()
    number = Fraction(f"{whole.replace('_', '')}.{decimals or 0}") * units[unit]
    if number.denominator != 1:
        raise ValueError(f"{value!r} is not whole")
    if sign == "-":
        raise ValueError(f"{value!r} is negative")
    if number > LARGEST:
        raise ValueError(f"{value!r} is larger than 10^18")
    return int(number)


def parse_count(value: object) -> int:
    """A whole number from ``2048``, ``2k`` (2 000), ``300M`` or ``1.5B``; units are powers of ten.

    Raises:
        ValueError: not a size, negative, not whole, or absurdly large.
    """
    return _parse(value, COUNT_UNITS, "a size")


def parse_bytes(value: object) -> int:
    """Bytes from ``5GB``, ``500MB`` or a plain number; units are powers of ten.

    Raises:
        ValueError: as :func:`parse_count`.
    """
    return _parse(value, BYTE_UNITS, "a size in bytes")


def format_count(number: int) -> str:
    """``300M`` for 300 000 000, with at most two decimals; :func:`parse_count` reads it back to the same number."""
    for unit in ("B", "M", "k"):
        hundredths, rest = divmod(number * 100, COUNT_UNITS[unit])
        if hundredths >= 100 and not rest:
            whole, decimals = divmod(hundredths, 100)
            return f"{whole}.{decimals:02d}".rstrip("0").rstrip(".") + unit
    return str(number)


def format_bytes(number: int) -> str:
    """``4.7 GB``: for people; rounded."""
    for unit in ("TB", "GB", "MB", "kB"):
        scale = BYTE_UNITS[unit]
        if number >= scale:
            return f"{number / scale:.1f} {unit}"
    return f"{number} B"
