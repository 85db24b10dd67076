"""Lets SGLang be imported where its CUDA kernels cannot be: laid into `.venv-sglang` and loaded at every start of it.

Theory: SGLang 0.5.23 imports `sgl_kernel` whatever the device, and PyPI has it with CUDA libraries only; its
`torchvision` is needed for images only, and IPython for notebooks. A finder behind all others answers for these three
with modules in which every name is there and nothing works: a call raises and names what was missing. With
`--device cpu --attention-backend torch_native` a Llama calls none of it.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Sequence
from typing import NoReturn

ABSENT = frozenset(("sgl_kernel", "torchvision", "IPython"))


class Absent:
    """A name that can be imported, passed on, and used as a base class or in an annotation, but not called."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self, *_: object, **__: object) -> NoReturn:
        """Say what was missing."""
        raise NotImplementedError(f"{self._name} is not on this machine")

    def __getattr__(self, name: str) -> Absent:
        return _inside(self._name, name)

    def __mro_entries__(self, bases: tuple[object, ...]) -> tuple[type, ...]:
        return (object,)


class AbsentModule(types.ModuleType):
    """A module of such names."""

    __version__ = "0.0.0"

    def __getattr__(self, name: str) -> Absent:
        return _inside(self.__name__, name)


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Asked last: a package that is really there goes before."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """A spec for the absent packages and all that would be in them."""
        if fullname.partition(".")[0] not in ABSENT:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        """An empty module."""
        return AbsentModule(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """Nothing is in it."""


def _inside(owner: str, name: str) -> Absent:
    # Protocols that Python looks for by name (copying, pickling, iteration) must be seen to be missing.
    if name.startswith("__"):
        raise AttributeError(name)
    return Absent(f"{owner}.{name}")


sys.meta_path.append(Finder())
