"""Answers of engines that do not serve the model, or the adapter, that a request names.

vLLM 0.32 answers 404 (serve/engine/serving.py), SGLang 0.5.23 400, or an error event (lora/lora_registry.py,
srt/managers/tokenizer_manager.py). Only messages that begin with these words count: others may quote a request.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
from msgspec import Raw

from router.core.dialects import sse
from router.core.prompts import json_fields
from router.core.prompts.json_fields import ABSENT

BODY_BYTES_MAX = 16 << 10  # a longer answer is not such an error
_Quote = tuple[str, str]  # words before the name, and after it
_VLLM: tuple[_Quote, ...] = (("The model `", "` does not exist"), ("The model '", "' does not exist"))
_SGLANG: tuple[_Quote, ...] = (
    ("The following requested LoRA adapters are not loaded: ", "\n"),
    ("Got LoRA adapter that has never been loaded: ", "\n"),
)
_QUOTES = {404: _VLLM, 400: _SGLANG, 200: _SGLANG}
_EVENT = b'data: {"error"'


class _Told(msgspec.Struct):
    """An error: flat, or nested."""

    error: Raw = ABSENT
    message: Raw = ABSENT


_decode = msgspec.json.Decoder(_Told).decode


def missing_model(status: int, body: bytes, names: Iterable[str]) -> str:
    """Return the one of these names that the engine does not serve, from its answer or its first event. "" if the
    answer is not such an error."""
    if status not in _QUOTES or len(body) > BODY_BYTES_MAX or (status == 200 and not body.startswith(_EVENT)):
        return ""
    told = json_fields.decode_or_none(_decode, sse.first_payload(body) if body.startswith(b"data:") else body)
    if told is None:
        return ""
    nested = json_fields.decode_as(_Told, told.error)
    message = json_fields.decode_as(str, nested.message if nested is not None else told.message)
    if not message:
        return ""
    return next((name for name in names if name and message.startswith(_beginnings(status, name))), "")


def _beginnings(status: int, name: str) -> tuple[str, ...]:
    return tuple([before + name + behind for before, behind in _QUOTES.get(status, ())])
