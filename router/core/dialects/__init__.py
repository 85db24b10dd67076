"""Dialects by the paths they speak on. To add one: a file here, a line in PATHS (see CONTRIBUTING.md)."""

from __future__ import annotations

from router.core.dialects.base import BadBody, Dialect
from router.core.dialects.openai import OpenAI

OPENAI = OpenAI()

PATHS: dict[str, Dialect] = {
    "/v1/chat/completions": OPENAI,
    "/v1/completions": OPENAI,
    "/v1/embeddings": OPENAI,
}

__all__ = ["OPENAI", "PATHS", "BadBody", "Dialect"]
