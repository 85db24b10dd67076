"""Which answers say that an engine does not serve a model."""

from __future__ import annotations

import json
from typing import Any

import pytest

from router.core.dialects.model_not_found import missing_model


def error(message: Any, **fields: Any) -> bytes:
    """An error in a nest, as vLLM and SGLang's `/generate` write it."""
    return json.dumps({"error": {"message": message, **fields}}).encode()


def flat(message: str) -> bytes:
    """As SGLang's other paths write it."""
    return json.dumps({"object": "error", "message": message, "code": 400}).encode()


GONE = "The following requested LoRA adapters are not loaded: ad\nLoaded adapters: odict_keys([])."
NEVER = "Got LoRA adapter that has never been loaded: ad\nAll loaded adapters: dict_keys([])."
SAID = {
    "vLLM": (404, error("The model `ad` does not exist.", param="model", code=404)),
    "vLLM, aliases": (404, error("The model `ad` does not exist. Valid aliases: m.")),
    "Messages": (
        404,
        b'{"type":"error","error":{"type":"not_found_error","message":"The model `ad` does not exist."}}',
    ),
    "SGLang": (400, flat(GONE)),
    "SGLang, evicted": (400, error(NEVER)),
    "SGLang's event": (200, b"data: " + error(NEVER) + b"\n\n"),
}
OTHER = {
    "another": (404, error("The model `ads` does not exist.")),
    "a response": (404, error("Response with id 'The model `ad` does not exist.' not found.")),
    "no path": (404, b'{"detail":"Not Found"}'),
    "another status": (400, error("The model `ad` does not exist.")),
    "a good event": (200, b'data: {"choices":[{"delta":{"content":"The model `ad` does not exist"}}]}\n\n'),
    "long": (404, error("The model `ad` does not exist." + " " * 20_000)),
    "odd": (404, error(["The model `ad` does not exist."])),
    "no JSON": (404, b"The model `ad` does not exist."),
    "nothing": (404, b""),
}


@pytest.mark.parametrize(("status", "body"), SAID.values(), ids=SAID)
def test_what_says_so(status: int, body: bytes) -> None:
    """In the words of both engines."""
    assert missing_model(status, body, ["", "m", "ad"]) == "ad"
    assert missing_model(status, body, ["m"]) == ""


@pytest.mark.parametrize(("status", "body"), OTHER.values(), ids=OTHER)
def test_what_does_not(status: int, body: bytes) -> None:
    """Other errors, which may quote a client's words."""
    assert missing_model(status, body, ["ad"]) == ""
