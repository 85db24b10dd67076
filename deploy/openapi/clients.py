"""Paths of the main listener that lead to engines: inference, passthrough, stored responses."""

from __future__ import annotations

from deploy.openapi.answers import HINTS, MAIN, RECEIPTS, of_clients
from deploy.openapi.parts import JSON, Part, answer, asked, in_json, one_of, ref, text
from router.config.schema import Settings
from router.core.dialects import PATHS
from router.ingress.paths import METHODS, RESPONSE_ACTIONS, RESPONSE_METHODS

KEYS: list[Part] = [{}, {"key": []}, {"anthropicKey": []}]
SUMMARIES = {
    "/v1/chat/completions": "A chat, in OpenAI's form",
    "/v1/completions": "A completion, in OpenAI's form",
    "/v1/embeddings": "Embeddings, in OpenAI's form",
    "/generate": "A completion, in SGLang's form",
    "/v1/messages": "A chat, in Anthropic's form",
    "/v1/responses": "A response, in OpenAI's form",
}
PASSED_ON = "Forwarded by load; the prompt is not parsed (`api.passthrough`)"
DONE = {"get": "Gets a stored response from the replica that created it", "delete": "Deletes a stored response"}
_HEADERS: Part = {name: {"$ref": f"#/components/headers/{name}"} for name in RECEIPTS}
_FORM: Part = {
    "multipart/form-data": {
        "schema": {"type": "object", "description": "A form with the field `model`, such as for an audio file."}
    }
}


def paths() -> Part:
    """Return path -> its methods. Raises KeyError for a dialect's path without a summary."""
    found: Part = {path: {"post": _engine("inference", SUMMARIES[path], in_json("EngineBody"))} for path in PATHS}
    for path in Settings().api.passthrough:
        body = in_json("EngineBody") | (_FORM if "/audio/" in path else {})
        found[path] = {"post": _engine("inference", PASSED_ON, body)}
    stored = asked("response_id", "Id of a stored response.", text(), within="path")
    found["/v1/responses/{response_id}"] = {
        "parameters": [stored],
        **{method.lower(): _engine("stored responses", DONE[method.lower()]) for method in RESPONSE_METHODS},
    }
    said = "Action of the engine; engines support POST of `cancel` and GET of `input_items`."
    action = asked("action", said, one_of(*RESPONSE_ACTIONS), within="path")
    found["/v1/responses/{response_id}/{action}"] = {
        "parameters": [stored, action],
        **{
            method.lower(): _engine("stored responses", f"{method} of an action on a stored response")
            for method in METHODS
        },
    }
    return found


def _engine(tag: str, summary: str, body: Part | None = None) -> Part:
    """Return an operation with an engine's answer, or an error of the router."""
    passed: Part = {JSON: {"schema": ref("EngineAnswer")}, "text/event-stream": {"schema": ref("EngineAnswer")}}
    return {
        "tags": [tag],
        "summary": summary,
        "security": KEYS,
        "parameters": [{"$ref": f"#/components/parameters/{name}"} for name in HINTS],
        **({"requestBody": {"required": True, "content": body}} if body else {}),
        "responses": {
            "200": answer("The engine's response; with `stream` as it arrives.", passed, _HEADERS),
            **of_clients(*(status for status in MAIN if status != 405)),
            "default": answer("The engine's response, with any status.", {"*/*": {}}, _HEADERS),
        },
    }
