"""Makes transformers' Auto classes know the ``surgery_*`` model types, in either import order.

``import surgery`` must not import transformers, so the registration waits, where transformers is not loaded yet, for
the one module of it that holds the table of configurations. Model classes follow with a configuration's first
instance: see :mod:`surgery.models.registry`.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from types import ModuleType

TABLE = "transformers.models.auto.configuration_auto"
AUTOLOAD = "SURGERY_AUTOLOAD"  # 0 in the environment: see autoload


def register() -> None:
    """Register the model types: now if transformers' table is loaded, otherwise as soon as it is."""
    table = sys.modules.get(TABLE)
    if table is not None:
        _fill(table)
    elif not any(isinstance(finder, _AfterTable) for finder in sys.meta_path):
        sys.meta_path.insert(0, _AfterTable())


def _fill(table: ModuleType) -> None:
    from surgery.models.registry import configurations

    for configuration in configurations():
        table.AutoConfig.register(configuration.model_type, configuration, exist_ok=True)


class _AfterTable(importlib.abc.MetaPathFinder):
    """Finds the table's module as the other finders do, and fills the table once its code has run."""

    def find_spec(self, fullname, path=None, target=None):
        if fullname != TABLE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _ThenFill(spec.loader)
        return spec


class _ThenFill(importlib.abc.Loader):
    def __init__(self, loader: importlib.abc.Loader) -> None:
        self.loader = loader

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        # what inspects a module's loader later must see the real one
        module.__spec__.loader = module.__loader__ = self.loader
        self.loader.exec_module(module)
        _fill(module)
