"""Lets ``transformers serve`` find a model class."""

from __future__ import annotations

from types import ModuleType

import transformers


def show(model: type) -> None:
    """Make a model class an attribute of transformers, where ``transformers serve`` looks the class up that a
    checkpoint names, whether it was registered or came with the checkpoint.

    transformers imports itself a second time (in ``processing_utils``), and whoever imported it before has the first
    module; so it is set on the class of both.
    """
    kind = type(transformers)
    if kind is not ModuleType:  # transformers' own kind of lazy module
        setattr(kind, model.__name__, model)
