"""The OpenAPI document: rendered from its description, of exactly the routes that there are, and served."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import product
from typing import Any, cast

import schemathesis
from aiohttp import ClientSession

from deploy.openapi.__main__ import DOCUMENT, PAGE, document, page, rendered
from router.admin import dashboard, openapi
from router.config.api_keys import PING, UNAUTHENTICATED_PATHS
from router.config.schema import Settings
from router.core.dialects import PATHS
from router.http.request import Connection, Request
from router.ingress.auth import METRICS
from router.ingress.paths import METHODS, RESPONSE_ACTIONS, about_response
from router.ingress.proxied_request import RESPONSES
from router.placement_api import MODELS, REQUESTS
from tests.house.test_docs_errors import called_with_code
from tests.support.fakes import FakeEngine, running
from tests.support.keyring import ADMIN, bearer

SAID: dict[str, Any] = json.loads(DOCUMENT.read_text(encoding="utf-8"))
ADMIN_URL = "http://127.0.0.1:8001"


def operations() -> Iterator[tuple[str, str, dict[str, Any], set[str]]]:
    """Method, path, description and listeners of each operation."""
    for path, item in SAID["paths"].items():
        servers = {server["url"] for server in item.get("servers", SAID["servers"])}
        for method, operation in item.items():
            if method not in ("servers", "parameters"):
                yield method.upper(), path, operation, servers


def test_it_is_rendered() -> None:
    """`python -m deploy.openapi` was run after the last change: the file and its page are what it writes."""
    made = document()
    assert DOCUMENT.read_text(encoding="utf-8") == rendered(made) + "\n", "run python -m deploy.openapi"
    assert PAGE.read_text(encoding="utf-8") == page(made), "run python -m deploy.openapi"
    assert made == SAID


def test_it_is_openapi() -> None:
    """The document is what the specification of OpenAPI 3.1 says a document is, by its JSON Schema."""
    schemathesis.openapi.from_dict(SAID).validate()


def test_what_it_refers_to_is_there() -> None:
    """Every reference leads to a component, and every component but the schemes is referred to."""

    def references(part: Any) -> Iterator[str]:
        if isinstance(part, dict):
            for name, value in part.items():
                if name == "$ref":
                    yield value
                else:
                    yield from references(value)
        elif isinstance(part, list):
            for each in part:
                yield from references(each)

    there = {
        f"#/components/{kind}/{name}"
        for kind, parts in SAID["components"].items()
        if kind != "securitySchemes"
        for name in parts
    }
    used = set(references(SAID))
    assert used <= there
    unused = {name for name in there - used if "/responses/" not in name}
    assert not unused


async def test_it_has_the_admin_listeners_routes_and_no_others(engine: FakeEngine) -> None:
    """Each method and path that the admin listener serves is in the document with the parameters that it takes, and
    whatever the document says of the admin listener is served."""
    async with running(engine) as app:
        routes = {(route.method, route.path): set(route.takes) for route in app.control.admin.table.routes}
    file = f"{dashboard.PAGE}/{{file}}"
    files = {path for path in dashboard.PATHS if path.startswith(f"{dashboard.PAGE}/") and path != dashboard.SLASHED}
    for path in files:
        assert routes.pop(("GET", path)) == set()
    routes["GET", file] = set()
    described = {
        (method, path): {each["name"] for each in operation.get("parameters", ()) if each["in"] == "query"}
        for method, path, operation, servers in operations()
        if ADMIN_URL in servers
    }
    assert described == routes


def test_it_has_the_main_listeners_routes_and_no_others() -> None:
    """Each method and path that the main listener serves is in the document, and nothing else is."""
    served = {("POST", path) for path in (*PATHS, *Settings().api.passthrough)}
    served |= {("POST", PING)}
    served |= {
        ("GET", path) for path in ("/", "/version", *UNAUTHENTICATED_PATHS, METRICS, MODELS, f"{MODELS}/{{model}}")
    }
    served.add(("GET", f"{REQUESTS}{{request_id}}"))
    stored = {"": "", **{f"/{action}": "/{action}" for action in RESPONSE_ACTIONS}}
    for method, (action, said) in product((*METHODS, "PUT", "PATCH"), stored.items()):
        request = Request(cast("Connection", None))  # of nobody
        request.method, request.path = method, f"{RESPONSES}/resp_1{action}"
        if about_response(request):
            served.add((method, f"{RESPONSES}/{{response_id}}{said}"))
    described = {(method, path) for method, path, _, servers in operations() if SAID["servers"][0]["url"] in servers}
    assert described == served


def test_every_error_has_its_status() -> None:
    """Each status of an error that the code makes is a response of its listener, and every operation that leads to
    engines has all of the main listener's."""
    components = SAID["components"]["responses"]
    made = {status for name in ("Refusal", "BadBody", "Shed") for status, _ in called_with_code(name)}
    assert {f"Main{status}" for status in made} == {name for name in components if name.startswith("Main")}
    own = {status for name in ("refused", "admin_refusal") for status, _ in called_with_code(name)}
    assert {f"Admin{status}" for status in own} <= components.keys()
    for _, path, operation, _ in operations():
        if operation["tags"][0] in ("inference", "stored responses"):
            assert {str(status) for status in made - {405}} <= operation["responses"].keys(), path


async def test_it_is_served(client: ClientSession, engine: FakeEngine) -> None:
    """Whoever has the admin token gets the document as it is in the package, and `/` names it; nobody else does."""
    async with running(engine, admin__token=ADMIN) as app:
        async with client.get(app.admin_url + openapi.PATH, headers=bearer(ADMIN)) as response:
            assert (response.status, response.content_type) == (200, "application/json")
            assert await response.read() == DOCUMENT.read_bytes()
        async with client.get(app.admin_url + "/", headers=bearer(ADMIN)) as response:
            assert openapi.PATH in await response.text()
        async with client.get(app.admin_url + openapi.PATH) as response:
            assert response.status == 401
