"""Libraries of the extra `tokenizers`, imported only when a tokenizer is configured."""

from __future__ import annotations

import importlib
from types import ModuleType


class MissingExtra(RuntimeError):
    """A library is not installed; the message says how to get it."""


def library(name: str) -> ModuleType:
    """Import one of the libraries. Raises MissingExtra."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise MissingExtra(f"{name} is not installed: pip install '.[tokenizers]'") from error
