"""LiteLLM's real proxy in front of the router, with the example's configuration, and real vLLM behind it."""

from __future__ import annotations

import os
import secrets
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import httpx
import openai
import pytest
import yaml

from loadtest.common.processes import free_port
from tests.real.install import REPO
from tests.real.install_litellm import program
from tests.real.processes import Server
from tests.real.router_process import Router
from tests.real.vllm_server import MODEL, STREAM_TOKENS, get

EXAMPLE = REPO / "examples" / "litellm" / "litellm.yaml"
READY_TIMEOUT_S = 300.0
CALL_TIMEOUT_S = 120.0
GRACE_S = 20.0
RULES = " ".join(f"Rule {number}: answer from the manual, and say so when it does not know." for number in range(30))


class Proxy:
    """A running `litellm --config`, which stands before the router and asks for one key."""

    def __init__(self, router: Router, folder: Path) -> None:
        config = yaml.safe_load(EXAMPLE.read_text(encoding="utf-8"))
        config["model_list"][0]["litellm_params"]["model"] = f"hosted_vllm/{MODEL}"
        path = folder / "litellm.yaml"
        path.write_text(yaml.safe_dump(config), encoding="utf-8")
        port = free_port()  # LiteLLM takes no port 0
        self.url, self.key = f"http://127.0.0.1:{port}", f"sk-{secrets.token_hex(24)}"
        environment = os.environ | {
            "WARMROUTE_URL": f"{router.url}/v1",
            "WARMROUTE_KEY": "none",
            "LITELLM_MASTER_KEY": self.key,
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # prices of models come with the package, nothing is fetched
            "NO_PROXY": "*",
        }
        command = [str(program()), "--config", str(path), "--host", "127.0.0.1", "--port", str(port)]
        self.server = Server("litellm", command, folder / "litellm.log", environment, folder)

    def wait_ready(self) -> None:
        """Wait until it serves; NotServing with the end of its log otherwise."""
        self.server.wait_ready(lambda: get(f"{self.url}/health/readiness")[0] == 200, READY_TIMEOUT_S)


@pytest.fixture(scope="module")
def proxy(module_router: Router, folder: Path) -> Iterator[Proxy]:
    """LiteLLM's proxy, ready; stopped with its children at the end."""
    made = Proxy(module_router, folder)
    try:
        made.wait_ready()
        yield made
    finally:
        made.server.stop(GRACE_S)


@pytest.fixture
async def client(proxy: Proxy) -> AsyncIterator[openai.AsyncOpenAI]:
    """The official client with LiteLLM's address and key."""
    async with openai.AsyncOpenAI(
        base_url=f"{proxy.url}/v1", api_key=proxy.key, max_retries=0, timeout=CALL_TIMEOUT_S
    ) as made:
        yield made


async def test_a_conversation_is_found_through_litellm(client: openai.AsyncOpenAI) -> None:
    """The second turn of a conversation goes to the replica of the first, whose engine finds it cached, and the
    receipts come back under LiteLLM's own names."""
    messages = [{"role": "system", "content": RULES}, {"role": "user", "content": "How do I change the filter?"}]
    receipts = []
    for question in ("And how often?", "And the pump?"):
        raw = await client.chat.completions.with_raw_response.create(
            model="my-model",
            messages=messages,  # type: ignore[arg-type]  # a list that grows, rather than one of each kind of message
            max_tokens=8,
        )
        answer = raw.parse()
        receipts.append(
            (raw.headers["llm_provider-x-warmroute-replica"], raw.headers["llm_provider-x-warmroute-reason"])
        )
        messages += [
            {"role": "assistant", "content": answer.choices[0].message.content or ""},
            {"role": "user", "content": question},
        ]
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    assert (answer.usage.prompt_tokens_details.cached_tokens or 0) > answer.usage.prompt_tokens // 2
    (first, _), (second, reason) = receipts
    assert (second, reason) == (first, "warm")


async def test_a_stream_through_litellm_is_whole(client: openai.AsyncOpenAI) -> None:
    """A stream comes in pieces through both, and ends with its reason."""
    stream = await client.chat.completions.create(
        model="my-model",
        messages=[{"role": "user", "content": "Say something longer."}],
        max_tokens=STREAM_TOKENS,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    chunks = [chunk async for chunk in stream]
    assert len(chunks) > 10
    assert [choice.finish_reason for chunk in chunks for choice in chunk.choices][-1] == "length"


async def test_anthropics_api_through_litellm(proxy: Proxy, router: Router) -> None:
    """A client of Anthropic's API is served: LiteLLM translates to chat completions, and its prefix is found."""
    body = {"model": "my-model", "max_tokens": 8, "system": RULES, "messages": [{"role": "user", "content": "Hello."}]}
    async with httpx.AsyncClient(timeout=CALL_TIMEOUT_S) as client:
        for _ in range(2):
            answer = await client.post(
                f"{proxy.url}/v1/messages", json=body, headers={"authorization": f"Bearer {proxy.key}"}
            )
            assert answer.status_code == 200, answer.text
            assert answer.json()["type"] == "message"
        decisions = (await client.get(f"{router.admin_url}/admin/decisions")).json()["decisions"]
    assert {decisions[0]["status"], decisions[0]["reason"]} == {200, "warm"}
