"""Options that are lists of numbers, as people write them."""

from __future__ import annotations


def whole_list(text: str, option: str, example: str = "0-4 or 100,101") -> tuple[int, ...]:
    """Read whole numbers between commas, and ranges of them: ``0-4``.

    Raises:
        UsageError: naming the option, with ``example``.
    """
    from surgery.errors import UsageError

    found: list[int] = []
    try:
        for part in text.split(","):
            first, dash, last = part.partition("-")
            found += range(int(first), int(last if dash else first) + 1)
    except ValueError:
        raise UsageError(f"{option} {text}: write for example {example}") from None
    return tuple(found)


def number_list(text: str, option: str, example: str) -> tuple[float, ...]:
    """Read numbers between commas.

    Raises:
        UsageError: naming the option, with ``example``.
    """
    from surgery.errors import UsageError

    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise UsageError(f"{option} {text}: write for example {example}") from None
