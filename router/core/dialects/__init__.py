"""Dialects by request path. To add one: a file here, a line in PATHS (docs/extend/dialect.md)."""

from __future__ import annotations

from router.core.dialects.anthropic import Anthropic
from router.core.dialects.dialect import Dialect
from router.core.dialects.openai import OpenAI
from router.core.dialects.responses_api import Responses
from router.core.dialects.sglang import SGLang
from router.core.prompts.json_fields import InvalidBody

OPENAI = OpenAI()
ANTHROPIC = Anthropic()
RESPONSES = Responses()
SGLANG = SGLang()

PATHS: dict[str, Dialect] = {
    "/v1/chat/completions": OPENAI,
    "/v1/completions": OPENAI,
    "/v1/embeddings": OPENAI,
    "/v1/messages": ANTHROPIC,
    "/v1/responses": RESPONSES,
    "/generate": SGLANG,
}


def dialect_of(path: str) -> Dialect:
    """Return the dialect of a path, or of a path below it (/v1/messages/count_tokens). Any other path has OpenAI's."""
    return next((dialect for base, dialect in PATHS.items() if f"{path}/".startswith(f"{base}/")), OPENAI)


__all__ = ["ANTHROPIC", "OPENAI", "PATHS", "RESPONSES", "SGLANG", "Dialect", "InvalidBody", "dialect_of"]
