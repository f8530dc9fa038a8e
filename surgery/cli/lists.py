"""Options that are lists of numbers, as people write them."""

from __future__ import annotations


def seed_list(text: str, option: str = "--seeds") -> tuple[int, ...]:
    """Read ``0-4`` or ``100,101``.

    Raises:
        UsageError: naming the option.
    """
    from surgery.errors import UsageError

    found: list[int] = []
    try:
        for part in text.split(","):
            first, dash, last = part.partition("-")
            found += range(int(first), int(last if dash else first) + 1)
    except ValueError:
        raise UsageError(f"{option} {text}: write for example 0-4 or 100,101") from None
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
