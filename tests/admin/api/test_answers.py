"""What routers answer is what the OpenAPI document says: schemathesis makes requests of the document, right and wrong
ones, for a real router before simulated engines.

`WARMROUTE_API_EXAMPLES` is the number of requests of each kind for each operation. Objects of the document are closed
here: a field that it does not name is a failure, though clients must expect new ones.
"""

from __future__ import annotations

import asyncio
import json
import os
import urllib.request
from collections.abc import Iterator
from contextlib import AsyncExitStack
from unittest.mock import patch

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis.checks import CHECKS, load_all_checks
from schemathesis.generation import GenerationMode

from loadtest.common.processes import engines, router
from tests.admin.api.closed import closed
from tests.admin.api.test_document import ADMIN_URL, SAID
from tests.support.examples import examples

NUMBER = "WARMROUTE_API_EXAMPLES"
EXAMPLES = examples(int(os.environ.get(NUMBER, "4")))
CONFORMS = ("status_code", "content_type", "response_headers", "response_schema")


SCHEMA = schemathesis.openapi.from_dict(closed(SAID))
OPERATIONS = {operation.label: operation for operation in (found.ok() for found in SCHEMA.get_all_operations())}
load_all_checks()
CHECKED = [CHECKS.get_one(f"{name}_conformance") for name in CONFORMS]


@pytest.fixture(scope="module")
def urls() -> Iterator[dict[str, str]]:
    """The main and admin URLs of a router that has served some requests, by those in the document."""
    given_ = ("log.level=error", "log.requests=false", "admin.replicas_allowed=http://127.0.0.0/8:1")
    with asyncio.Runner() as runner:
        stack = AsyncExitStack()
        stack.enter_context(patch.dict(os.environ))
        os.environ.pop(NUMBER, None)  # the router would take it for a setting that it does not know
        try:
            replicas = runner.run(stack.enter_async_context(engines(2, "sim", "llama-3.1-8b-a100", 100_000, 1_000.0)))
            started = router(replicas, policy="warm", settings=given_)
            url, admin_url = runner.run(stack.enter_async_context(started))
            for n in range(12):
                _chat(url, n)
            yield {SAID["servers"][0]["url"]: url, ADMIN_URL: admin_url}
        finally:
            runner.run(stack.aclose())


def _chat(url: str, n: int) -> None:
    tools = [{"type": "function", "function": {"name": f"tool{i}", "parameters": {}}} for i in range(4)]
    messages = [
        {"role": "system", "content": "You are an agent. " * 300},
        {"role": "user", "content": f"{n % 3} " * 400},
    ]
    body = {"model": "sim", "messages": messages, "tools": tools[n % 2 :], "stream": n % 2 == 0, "max_tokens": 4}
    head = {"content-type": "application/json", "x-request-id": f"request-{n}", "x-session-id": f"s{n % 3}"}
    request = urllib.request.Request(f"{url}/v1/chat/completions", json.dumps(body).encode(), head)
    with urllib.request.urlopen(request, timeout=60) as answer:
        answer.read()


QUICK = settings(
    max_examples=EXAMPLES,
    deadline=None,
    phases=(Phase.generate,),
    suppress_health_check=list(HealthCheck),
    derandomize=NUMBER not in os.environ,
    database=None,
)


def _modes(label: str) -> list[GenerationMode]:
    """Rightly; and wrongly, where an operation takes something that can be wrong."""
    method, path = label.split(" ")
    operation = SAID["paths"][path][method.lower()]
    can_be_wrong = "requestBody" in operation or any(
        each.get("in") != "path" for each in operation.get("parameters", ())
    )
    return [GenerationMode.POSITIVE, *([GenerationMode.NEGATIVE] if can_be_wrong else [])]


@pytest.mark.parametrize(
    ("label", "mode"),
    [(label, mode) for label in sorted(OPERATIONS) for mode in _modes(label)],
    ids=lambda value: value if isinstance(value, str) else value.value,
)
def test_answers_are_as_described(label: str, mode: GenerationMode, urls: dict[str, str]) -> None:
    """Whatever is asked, rightly or wrongly, of an operation: status, headers, type and body of the answer are in the
    document, and nothing is a bug's 500. What an engine answers is the engine's."""
    operation = OPERATIONS[label]
    servers = SAID["paths"][operation.path].get("servers", SAID["servers"])
    asked = 0

    @QUICK
    @given(case=operation.as_strategy(generation_mode=mode))
    def conforms(case: schemathesis.Case) -> None:
        nonlocal asked
        for server in servers:
            response = case.call(base_url=urls[server["url"]], allow_redirects=False, timeout=60)
            asked += 1
            engines_own = "x-warmroute-replica" in response.headers
            assert response.status_code != 500 or engines_own, response.text
            case.validate_response(response, checks=CHECKED[:1] if engines_own else CHECKED)

    conforms()
    assert asked
