"""Errors of each listener by status, headers of receipts, and hints that a request may carry."""

from __future__ import annotations

from deploy.openapi.parts import JSON, TEXT, Part, answer, asked, in_json, one_of, ref, text, whole

GRADES = ("exact", "catching-up", "estimated", "unseen")
MAIN = {
    400: "The request is invalid.",
    401: "The API key is missing or unknown.",
    403: "The key does not allow this model.",
    404: "The model, response or path does not exist.",
    405: "CONNECT.",
    408: "The request arrived too slowly.",
    409: "The conversation's history has changed (`history_policy`).",
    413: "The body is too large.",
    414: "Path and query are too long.",
    415: "The body is compressed.",
    429: "The fleet is full, or the tenant's rate limit is reached.",
    431: "The head is too large.",
    500: "A bug of the router.",
    501: "The body has an unknown transfer coding.",
    502: "The replica failed before it answered.",
    503: "No replica is ready, or the router is shutting down.",
    504: "The replica did not answer in time.",
    505: "Unsupported version of HTTP.",
}
ADMIN = {
    400: "The request or a parameter is invalid.",
    401: "The admin token is missing or wrong.",
    403: "The request comes from a web page, or is not allowed.",
    404: "No resource has this name.",
    405: "The path takes another method.",
    408: "The request came too slowly.",
    409: "The operation is not possible now.",
    413: "The body is too long.",
    414: "Path and query are too long.",
    415: "The body is not JSON.",
    421: "The Host header names another server.",
    431: "The head is too large.",
    500: "The page failed; see the router's log.",
    501: "The body has an unknown transfer coding.",
    505: "Unsupported version of HTTP.",
}
ANY = (400, 408, 413, 414, 431, 500, 501, 505)  # statuses with which a server may answer any request
_LATER: Part = {"Retry-After": {"description": "Seconds to wait.", "schema": {"type": "integer"}}}
_SCHEME: Part = {"WWW-Authenticate": {"description": "`Bearer`.", "schema": {"type": "string"}}}
_ALLOW: Part = {"Allow": {"description": "Methods of the path.", "schema": {"type": "string"}}}


def of_clients(*statuses: int) -> Part:
    """Return errors of the main listener."""
    return {str(status): {"$ref": f"#/components/responses/Main{status}"} for status in statuses}


def of_admins(*statuses: int) -> Part:
    """Return errors of the admin listener."""
    return {str(status): {"$ref": f"#/components/responses/Admin{status}"} for status in statuses}


def of_either(*statuses: int) -> Part:
    """Return errors of a page that both listeners have."""
    return {str(status): {"$ref": f"#/components/responses/Either{status}"} for status in statuses}


def responses() -> Part:
    """Return all errors, by the names that paths refer to."""
    found: Part = {}
    for status, why in MAIN.items():
        headers = _LATER if status in (429, 503) else _SCHEME if status == 401 else None
        found[f"Main{status}"] = answer(why, _either("Error", "AnthropicError", "SglangError"), headers)
    for status, why in ADMIN.items():
        headers = _SCHEME if status == 401 else _ALLOW if status == 405 else None
        body = in_json("AdminError") | (TEXT if status in (404, 405) else {})
        found[f"Admin{status}"] = answer(why, body, headers)
        found[f"Either{status}"] = answer(why, _either("Error", "AdminError"), headers)
    return found


def _either(*names: str) -> Part:
    return {JSON: {"schema": {"anyOf": [ref(name) for name in names]}}}


RECEIPTS: dict[str, Part] = {
    "x-warmroute-request-id": {
        "description": "The request's id: the client's own `x-request-id`, or a new one.",
        "schema": text(),
    },
    "x-warmroute-replica": {"description": "The replica that answered.", "schema": text()},
    "x-warmroute-reason": {
        "description": "Reason of the placement.",
        "schema": one_of("warm", "spill", "cold", "tie", "only", "policy", "retry", "pull", "split"),
    },
    "x-warmroute-grade": {"description": "Confidence of the prediction.", "schema": one_of(*GRADES)},
    "x-warmroute-predicted-cached-tokens": {
        "description": "Prompt tokens that were predicted to be in the replica's cache.",
        "schema": whole(),
    },
    "x-warmroute-predicted-ttft-ms": {
        "description": "Of streams: predicted milliseconds from the placement to the first token (the median).",
        "schema": whole(),
    },
    "x-warmroute-predicted-ttft-p90-ms": {
        "description": "The same at the 90th percentile.",
        "schema": whole(),
    },
    "x-warmroute-miss": {"description": "Other prompt tokens by reason: `new=210,evicted=512`.", "schema": text()},
    "x-warmroute-waited-ms": {"description": "Milliseconds in the router's queue.", "schema": whole()},
    "x-warmroute-stream-failover-refused": {
        "description": "Reason that excludes stream failover for a request that asked for it.",
        "schema": text(),
    },
    "x-warmroute-warning": {
        "description": "Position at which a conversation's history has changed (`history_policy: warn`).",
        "schema": text(),
    },
}
HINTS: dict[str, Part] = {
    "session": asked(
        "x-session-id",
        "Name of a conversation, which stays on one replica if prices are equal.",
        text(),
        within="header",
    ),
    "id": asked("x-request-id", "The client's own id of the request.", text(), within="header"),
    "tenant": asked(
        "x-warmroute-tenant",
        "Tenant of the request, if no keys are set.",
        text(pattern="^[A-Za-z0-9][A-Za-z0-9_.@:-]{0,63}$"),
        within="header",
    ),
    "continue": asked(
        "x-warmroute-stream-failover",
        "Mode of stream failover, if the stream breaks.",
        one_of("exact", "off"),
        within="header",
    ),
    "priority": asked(
        "x-warmroute-priority", "Priority of the request.", one_of("high", "normal", "low"), within="header"
    ),
}
