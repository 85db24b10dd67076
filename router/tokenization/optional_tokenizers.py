"""Libraries of the extra `tokenizers`, imported only when a tokenizer is configured."""

from __future__ import annotations

import importlib
from types import ModuleType


class MissingExtra(RuntimeError):
    """Raised if a library is not installed; the message describes how to install it."""


def library(name: str) -> ModuleType:
    """Import one of the libraries. Raises MissingExtra."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise MissingExtra(f"{name} is not installed: pip install '.[tokenizers]'") from error
