"""Data sets of the Hugging Face hub, read as a stream that its commit fixes."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Any

from surgery.data.tables import reason_of
from surgery.errors import JobError


def hub_commit(name: str, revision: str | None = None) -> str:
    """The commit that a data set's revision stands at; asked once in a process, so that all that it reads is of one.

    Raises:
        JobError: the hub does not answer, or has no such data set.
    """
    try:
        return _commit(name, revision)
    except Exception as error:
        raise _failure(name, error) from None


def hub_rows(name: str, options: dict[str, str]) -> Iterator[dict[str, Any]]:
    """The records of one split.

    Args:
        options: config, split and revision, each where it was named.

    Raises:
        JobError: the data set cannot be read.
    """
    split = options.get("split", "train")
    commit = hub_commit(name, options.get("revision"))
    try:
        from datasets import load_dataset

        yield from load_dataset(name, options.get("config"), split=split, revision=commit, streaming=True)
    except Exception as error:  # the library raises its own, the hub's, the network's and the parsers' errors here
        raise _failure(f"{name} (split {split})", error) from None


@lru_cache(maxsize=64)
def _commit(name: str, revision: str | None) -> str:
    from huggingface_hub import HfApi

    # it fails at once where loading would retry for half a minute
    return HfApi().dataset_info(name, revision=revision, timeout=20).sha


def _failure(what: str, error: Exception) -> JobError:
    return JobError(
        f"data set {what} cannot be read from the hub: {reason_of(error)}\n"
        "  offline, give a text file instead, or a directory that holds the data set's files"
    )
