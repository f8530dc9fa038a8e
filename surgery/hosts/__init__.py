"""The model families that surgery knows, one adapter each, and how a model's name becomes a model.

    checkpoint = open_model(resolve("bundled:tiny-gdn"))    # its files
    adapter = adapter_for(checkpoint.config)                # what the tools know of the family
    model = load_model(checkpoint.directory)

A new family is a subclass of :class:`HostAdapter` in its own module and a line in :mod:`surgery.hosts.registry`.
"""

from surgery.hosts.base import HostAdapter, decode_floats, encode_floats
from surgery.hosts.registry import (
    ADAPTERS,
    REFUSED,
    adapter_for,
    complete_config,
    load_model,
    open_model,
    quantised,
    read_config,
    recognise,
    supported,
)
from surgery.hosts.resolve import bundled, commit, on_hub, resolve

__all__ = [
    "ADAPTERS",
    "REFUSED",
    "HostAdapter",
    "adapter_for",
    "bundled",
    "commit",
    "complete_config",
    "decode_floats",
    "encode_floats",
    "load_model",
    "on_hub",
    "open_model",
    "quantised",
    "read_config",
    "recognise",
    "resolve",
    "supported",
]
