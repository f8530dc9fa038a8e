"""Errors meant for the user: at most five lines that name the file, the place and the remedy."""

from __future__ import annotations

import re
from collections.abc import Iterable

MOST = 20  # errors that are shown at once


class UserError(Exception):
    """A failure that the user can mend. The command line prints its message and exits with ``exit_code``."""

    exit_code = 1


class UsageError(UserError):
    """Wrong usage or a wrong recipe, found before any work: exit code 2."""

    exit_code = 2


class JobError(UserError):
    """The job itself failed: exit code 1."""

    exit_code = 1


def together(errors: Iterable[str | UserError], count: int | None = None) -> UsageError:
    """Return one error that says all of ``errors``, each once and in its own lines, and the number beyond ``MOST``.

    Args:
        count: how many there are, where ``errors`` are only the first.
    """
    texts = list(dict.fromkeys(map(str, errors)))
    more = (count if count is not None else len(texts)) - len(texts[:MOST])
    counted = f"\n  ({more:,} more after these)" if more > 0 else ""
    return UsageError("\nerror: ".join(texts[:MOST]) + counted)


def plain_reason(error: BaseException, most: int = 200) -> str:
    """Return a library's error as one line of text for a message, without the names of Python's types.

    A KeyError's text is the bare key, and an AttributeError speaks of classes: these are put into words.
    """
    if isinstance(error, KeyError):
        return f"there is no {str(error)[:60]}"
    if isinstance(error, (AttributeError, TypeError, RecursionError)):
        return "a value is of another type than the one due"
    if isinstance(error, (ZeroDivisionError, OverflowError, IndexError)):
        return "a number is too large, too small or 0"
    text = " ".join(str(error).split())
    text = re.sub(r"\b(?:TypeError|ValueError|KeyError|AttributeError)\b:? ?", "", text)
    text = re.sub(r"<class '([\w.]+)'>", r"\1", text).replace("NoneType", "null")
    return text[:most].rstrip(": ") or "no reason was given"
