"""Errors meant for the user: at most five lines that name the file, the place and the remedy."""

from __future__ import annotations

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
