"""Paths of the router's own pages: for clients, on both listeners, and on the admin listener."""

from __future__ import annotations

from deploy.openapi.answers import ANY, of_admins, of_clients, of_either
from deploy.openapi.clients import KEYS
from deploy.openapi.parts import TEXT, Part, answer, asked, in_json, number, text, whole
from router.admin.history.history_pages import LIMIT, LIMIT_MAX, STEPS_S
from router.admin.history.intervals import STEP_S
from router.admin.history.query_filters import REASONS
from router.admin.history.request_history import NUMBER_MAX
from router.admin.query_params import VALUE_CHARS_MAX

MAIN_URL, ADMIN_URL = "http://127.0.0.1:8000", "http://127.0.0.1:8001"
MAIN_SERVER: Part = {"url": MAIN_URL, "description": "main listener"}
ADMIN_SERVER: Part = {"url": ADMIN_URL, "description": "admin listener"}
TOKEN: list[Part] = [{}, {"adminToken": []}]
NOBODY: list[Part] = [{}]  # no key or token is required
_READ = (*ANY, 401, 403, 421)
_STATUS = "^([1-5]([0-9]{2}|[xX]{2}))?$"


def paths() -> Part:
    """Return path -> its methods."""
    return {**_of_clients(), **_of_both(), **_of_admins(), **_files()}


def _operation(tag: str, summary: str, security: list[Part], answers: Part, parameters: list[Part] | None) -> Part:
    made: Part = {"tags": [tag], "summary": summary, "security": security}
    return {**made, **({"parameters": parameters} if parameters else {}), "responses": answers}


def _of_clients() -> Part:
    def got(summary: str, shown: Part, *statuses: int, parameters: list[Part] | None = None) -> Part:
        answers = {"200": shown, **of_clients(*ANY, 401, *statuses)}
        return {"get": _operation("own pages", summary, KEYS, answers, parameters)}

    def ready(*methods: str) -> Part:
        shown = {"200": answer("At least one replica is ready.", TEXT), "503": answer("No replica is ready.", TEXT)}
        what = "Same as `/readyz`, under a name that engines use"
        return {each: _operation("own pages", what, NOBODY, shown | of_clients(*ANY), None) for each in methods}

    model = asked("model", "Name of the model, which may have slashes.", text(), within="path")
    id_ = asked("request_id", "Its `x-warmroute-request-id`.", text(), within="path")
    return {
        "/health": ready("get"),
        "/ping": ready("get", "post"),
        "/version": got("The router's version", answer("Its version.", in_json("Version"))),
        "/v1/models": got("Models of ready replicas", answer("The union of their models.", in_json("Models"))),
        "/v1/models/{model}": got("One model", answer("The model.", in_json("Model")), 404, parameters=[model]),
        "/v1/warmroute/requests/{request_id}": got(
            "Outcome of a request, for its sender",
            answer("The last request of this id.", in_json("OwnRequest")),
            404,
            parameters=[id_],
        ),
    }


def _of_both() -> Part:
    def got(summary: str, security: list[Part], shown: Part) -> Part:
        answers = shown | of_either(*_READ)
        return {
            "servers": [MAIN_SERVER, ADMIN_SERVER],
            "get": _operation("own pages", summary, security, answers, None),
        }

    main_only = answer("Metrics are not on this listener.", in_json("Error"))
    return {
        "/": got("Index of the listener's pages", [*KEYS, TOKEN[1]], {"200": answer("Text for people.", TEXT)}),
        "/healthz": got("Liveness of the process", NOBODY, {"200": answer("The process is alive.", TEXT)}),
        "/readyz": got(
            "Readiness for requests",
            NOBODY,
            {
                "200": answer("At least one replica is ready.", TEXT),
                "503": answer("No replica is ready, or the router stops.", TEXT),
            },
        ),
        "/metrics": got(
            "Prometheus metrics; on the main listener unless `listen.metrics_on_main` is off",
            TOKEN,
            {"200": answer("The page.", TEXT), "404": main_only},
        ),
    }


def _page(summary: str, shown: Part, *statuses: int, parameters: list[Part] | None = None, body: str = "") -> Part:
    """Return an operation of the admin listener; `shown` are its successful answers."""
    made = _operation("admin", summary, TOKEN, {**shown, **of_admins(*_READ, *statuses)}, parameters)
    return {**made, **({"requestBody": {"required": False, "content": in_json(body)}} if body else {})}


def _of_admins() -> Part:
    def got(summary: str, schema: str, parameters: list[Part] | None = None) -> Part:
        return {"get": _page(summary, {"200": answer("The page.", in_json(schema))}, parameters=parameters)}

    replica = in_json("ReplicaUrl")
    url = asked("url", "Its URL.", text(maxLength=VALUE_CHARS_MAX))
    document: Part = {"application/json": {"schema": {"type": "object"}}}
    found: Part = {
        "/admin/replicas": {
            **got("All replicas, and the age of each source's list", "Replicas"),
            "post": _page(
                "Adds a replica",
                {
                    "200": answer("The replica exists already.", replica),
                    "201": answer("The replica was added.", replica),
                },
                409,
                415,
                body="ReplicaUrl",
            ),
            "delete": _page(
                "Removes a replica that was added",
                {"200": answer("The replica was removed.", replica)},
                404,
                409,
                415,
                parameters=[url],
            ),
        },
        "/admin/replicas/drain": {
            "post": _page(
                "Drains a replica and migrates its streams",
                {"200": answer("The replica is draining.", replica)},
                404,
                415,
                body="ReplicaUrl",
            ),
            "delete": _page(
                "Cancels the drain of a replica",
                {"200": answer("The replica receives requests again.", replica)},
                404,
                415,
                parameters=[url],
            ),
        },
        "/admin/decisions": got("Past requests and the reasons of their placements", "Decisions", _decisions()),
        "/admin/series": got("Time series", "Series", _series()),
        "/admin/index": got("Size of the prefix index", "Index"),
        "/admin/observatory": got("Data of the dashboard, except time series and searches", "Observatory"),
        "/admin/templates": got("Prefixes shared by conversations", "Templates"),
        "/admin/advice": got("Advice against misses, the most costly first", "Advice"),
        "/admin/prewarm": {
            **got("State and results of prewarming", "WarmState"),
            "post": _page(
                "Starts prewarming of replicas",
                {
                    "200": answer("With `wait`: the requests that were sent.", in_json("WarmDone")),
                    "202": answer("The requests that will be sent.", in_json("WarmAsked")),
                },
                409,
                415,
                body="WarmCall",
            ),
        },
        "/admin/openapi.json": {"get": _page("This document", {"200": answer("OpenAPI 3.1.", document)})},
    }
    return {path: {"servers": [ADMIN_SERVER], **methods} for path, methods in found.items()}


def _decisions() -> list[Part]:
    named = text(maxLength=VALUE_CHARS_MAX)
    return [
        asked("id", "Request id, or an engine's id of the answer.", named),
        asked("session", "Name of a session, or `session` or `conversation` of a row.", named),
        asked("model", "Name of the model.", named),
        asked("reason", "Reason of the placement, or of a miss.", {"type": "string", "enum": ["", *REASONS]}),
        asked("tenant", "Name of the tenant.", named),
        asked("replica", "URL of the replica.", named),
        asked("status", "A status such as 503, or a class such as 5xx.", text(pattern=_STATUS)),
        *_span("Requests that arrived at or after this time.", "Requests that arrived before this time."),
        asked("before", "Requests with a lower `number`.", whole(minimum=1, maximum=NUMBER_MAX)),
        asked("limit", "Maximum number of requests.", whole(minimum=1, maximum=LIMIT_MAX, default=LIMIT)),
    ]


def _series() -> list[Part]:
    step = whole(minimum=STEP_S, maximum=STEPS_S[-1])
    return [
        *_span("Default: ten minutes before `to_s`.", "Default: now."),
        asked("step_s", "Seconds of a step: a multiple of 5; above 60, of 60.", step),
    ]


def _span(from_: str, to: str) -> list[Part]:
    seconds = number(minimum=0, exclusiveMaximum=100_000_000_000)
    return [asked("from_s", f"Unix seconds. {from_}", seconds), asked("to_s", f"Unix seconds. {to}", seconds)]


def _files() -> Part:
    def file(summary: str, answers: Part, *statuses: int, parameters: list[Part] | None = None) -> Part:
        shown = {**answers, **of_admins(*ANY, *statuses)}
        return {"servers": [ADMIN_SERVER], "get": _operation("files", summary, NOBODY, shown, parameters)}

    def of(*kinds: str) -> Part:
        return {kind: {"schema": {"type": "string"}} for kind in kinds}

    kept: Part = {"304": answer("The browser has the current version.")}
    where: Part = {"Location": {"description": "`../dashboard`.", "schema": text()}}
    name = asked("file", "Its name.", text(), within="path")
    page = answer("A page.", of("text/html"))
    return {
        "/dashboard": file("The dashboard", {"200": page, **kept}),
        "/dashboard/": file("Redirect to the dashboard", {"308": answer("Without the slash.", None, where)}),
        "/dashboard/{file}": file(
            "A file of the dashboard",
            {"200": answer("A script or style.", of("text/javascript", "text/css")), **kept},
            404,
            401,
            parameters=[name],
        ),
        "/runbook": file("The runbook", {"200": page}),
        "/runbook.css": file("Stylesheet of the runbook", {"200": answer("A style.", of("text/css"))}),
    }
