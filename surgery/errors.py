"""Errors meant for the user: at most five lines that name the file, the place and the remedy."""

from __future__ import annotations


class UserError(Exception):
    """A failure that the user can mend. The command line prints its message and exits with ``exit_code``."""

    exit_code = 1


class UsageError(UserError):
    """Wrong usage or a wrong recipe, found before any work: exit code 2."""

    exit_code = 2


class JobError(UserError):
    """The job itself failed: exit code 1."""

    exit_code = 1
