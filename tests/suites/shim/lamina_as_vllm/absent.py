"""Names that have nothing to stand for: a test that uses one is skipped, and says which."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any

import pytest

CAUSE = "vLLM's internals: "


class _Absent(type):
    """A class, so that it can stand in isinstance, in annotations and as a base."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return make_absent(f"{cls.__name__}.{name}")

    def __call__(cls, *args: Any, **keywords: Any) -> Any:
        if "PYTEST_CURRENT_TEST" in os.environ:
            pytest.skip(CAUSE + cls.__name__)
        return make_absent(f"{cls.__name__}()")

    def __iter__(cls) -> Iterator[Any]:
        return iter(())

    def __or__(cls, other: Any) -> Any:
        return other

    __ror__ = __or__

    def __getitem__(cls, item: Any) -> Any:
        return cls


def make_absent(name: str) -> Any:
    """A stand-in for ``name``: while tests are collected it lets all be, and while one runs its use is a skip."""
    return _Absent(name, (), {})


def absent_of(module: str, known: Mapping[str, Any]) -> Callable[[str], Any]:
    """``__getattr__`` of a module that has ``known`` and stand-ins for all else."""

    def get(name: str) -> Any:
        if name in known:
            return known[name]
        if name.startswith("__"):
            raise AttributeError(name)
        return make_absent(f"{module}.{name}")

    return get


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Any module below ``root``: with the names of ``table``, by module, and stand-ins."""

    def __init__(self, root: str, table: Mapping[str, Mapping[str, Any]]) -> None:
        self._root = root + "."
        self._table = table

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if not fullname.startswith(self._root):
            return None
        return importlib.util.spec_from_loader(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        module.__getattr__ = absent_of(module.__name__, self._table.get(module.__name__, {}))  # type: ignore[method-assign]
