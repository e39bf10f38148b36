"""Inert modules in place of packages that an engine imports at the top and its memory code never uses.

Model loaders, image and audio readers, grammar back ends: installing them would cost gigabytes. `install` makes
`import NAME`, with any submodule, succeed; nothing is fetched.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Iterable, Sequence
from unittest.mock import MagicMock


class _InertMeta(type):
    """A class whose every public attribute exists."""

    def __getattr__(cls, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        value = MagicMock(name=name)
        setattr(cls, name, value)
        return value


class _Inert:
    """Base of stand-in classes: may be subclassed with any keyword and used as a pydantic field type."""

    def __init_subclass__(cls, **_: object) -> None:
        pass

    @classmethod
    def __get_pydantic_core_schema__(cls, *_: object) -> object:
        return importlib.import_module("pydantic_core.core_schema").any_schema()


class _InertModule(types.ModuleType):
    """A module whose every public attribute exists: a class when it is spelled like one, else a mock."""

    __path__: list[str] = []  # noqa: RUF012 - the import system reads it as a plain attribute

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        value: object = _InertMeta(name, (_Inert,), {}) if name[:1].isupper() else MagicMock(name=name)
        setattr(self, name, value)
        return value


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Last on `sys.meta_path`: a package that is really installed wins."""

    def __init__(self, names: Iterable[str]) -> None:
        self._names = frozenset(names)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname.partition(".")[0] in self._names:
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _InertModule(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def install(names: Iterable[str], *, after: Iterable[str] = ()) -> None:
    """Stand in for the packages `names`; `after` are modules that must first see which packages are really absent."""
    for module in after:
        importlib.import_module(module)
    sys.meta_path.append(_Finder(names))
