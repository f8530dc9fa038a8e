"""Makes transformers' Auto classes know the ``surgery_*`` model types, in either import order.

``import surgery`` must not import transformers, so the registration waits, where transformers is not loaded yet, for
the one module of it that holds the table of configurations. Model classes follow with a configuration's first
instance: see :mod:`surgery.models.registry`. Finders and loaders are plain classes, since importlib.abc takes longer to
import than all of this.
"""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from importlib.abc import Loader
    from importlib.machinery import ModuleSpec

TABLE = "transformers.models.auto.configuration_auto"


def register() -> None:
    """Register the model types: now if transformers' table is loaded, otherwise as soon as it is."""
    table = sys.modules.get(TABLE)
    if table is not None and _loaded(table):
        _fill(table)
    elif table is not None:
        table.__class__ = _FillOnUse
    elif not any(isinstance(finder, _AfterTable) for finder in sys.meta_path):
        sys.meta_path.insert(0, _AfterTable())


def _loaded(table: ModuleType) -> bool:
    # not hasattr: transformers' own modules look a missing name up in the whole package
    return "AutoConfig" in vars(table) and not getattr(table.__spec__, "_initializing", False)


def _fill(table: ModuleType) -> None:
    from surgery.models.registry import configurations

    for configuration in configurations():
        table.AutoConfig.register(configuration.model_type, configuration, exist_ok=True)


class _AfterTable:
    """Finds the table's module as the other finders do, and fills the table once its code has run."""

    def find_spec(self, fullname, path=None, target=None):
        if fullname != TABLE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _ThenFill(spec.loader)
        return spec


class _FillOnUse(ModuleType):
    """The class of a table whose code is running when surgery is imported: the table is filled when it is first used
    afterwards. So it is where that code imports torch, and torch this package; see ``surgery_autoload.py``."""

    def __getattribute__(self, name):
        if not name.startswith("__") and _loaded(self):
            self.__class__ = ModuleType
            _fill(self)
        return ModuleType.__getattribute__(self, name)  # no super(): it may be of this class no more


class _ThenFill:
    def __init__(self, loader: Loader) -> None:
        self.loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        # what inspects a module's loader later must see the real one
        module.__spec__.loader = module.__loader__ = self.loader
        self.loader.exec_module(module)
        _fill(module)
