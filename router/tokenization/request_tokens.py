"""Token ids of a request and their keys, for replicas with KV events.

Ids come from encoder.py (chat template and tokenizer, or a replica's own `/tokenize`). Keys of known prefixes are
looked up; a long new part is hashed in a thread. verifier.py decides if the ids can be trusted.
"""

from __future__ import annotations

import asyncio
import ssl
from typing import Any

import msgspec

from router.core.dialects import Dialect
from router.core.prompts.token_keys import KeyCache, TokenPrompt, rest
from router.core.types.replicas import Replica
from router.core.types.requests import RequestSpec
from router.engines import http_client
from router.placement_api import TokenizationSpec
from router.tokenization.encoder import AskReplica, PromptEncoder

RUNS_MAX = 8_192  # runs of keys remembered: about a million blocks, 40 MB
HASH_TOKENS_MAX = 16_384  # tokens hashed on the event loop; more take over a millisecond
ANSWER_BYTES_MAX = 16 << 20  # over a million tokens
RESPONSES = "/v1/responses"


class EngineTokenizer:
    """Client of replicas' `/tokenize`, over one HTTP session."""

    def __init__(self, *, api_key: str, timeout_s: float, tls: ssl.SSLContext | None = None) -> None:
        self._session = http_client.session(api_key, timeout_s, tls)

    async def close(self) -> None:
        """Close all connections."""
        await self._session.close()

    def make_requester(self, replica: str, model: str) -> AskReplica:
        """Return a function that sends requests about this model to this replica. It raises the transport's errors, and
        for a bad answer."""

        async def ask(path: str, body: dict[str, Any]) -> dict[str, Any]:
            url = f"{Replica(replica).url}{path}"
            async with self._session.post(url, json=body | {"model": model}, allow_redirects=False) as response:
                answer = await http_client.read_body(response, ANSWER_BYTES_MAX)
                if response.status >= 500:
                    raise ConnectionError(f"{path}: status {response.status}")
            decoded: dict[str, Any] = msgspec.json.decode(answer, type=dict[str, Any])
            return decoded

        return ask


class RequestTokenizer:
    """Token ids of requests, by model."""

    def __init__(self, prompts: PromptEncoder, asker: EngineTokenizer | None, *, offload_bytes_min: int) -> None:
        """Without an `asker`, prompts of models without a tokenizer in `prompts` get no ids."""
        self._prompts = prompts
        self._asker = asker
        self._offload_bytes_min = offload_bytes_min
        self._keys = KeyCache(RUNS_MAX)

    async def tokenize_request(
        self, dialect: Dialect, path: str, body: bytes, ask: RequestSpec, model: str, view: TokenizationSpec
    ) -> TokenPrompt | None:
        """Return the prompt's ids and keys; None if they are not known in time."""
        loop = asyncio.get_running_loop()
        if len(body) >= self._offload_bytes_min and ask.decoded is None:  # otherwise little work is left
            given = await loop.run_in_executor(None, dialect.template_input, path, body, ask.decoded)
        else:
            given = dialect.template_input(path, body, ask.decoded)
        if given is None or (path == RESPONSES and Replica(view.replica).rank is not None):
            return None  # vLLM 0.32 ignores the header that names a rank on /v1/responses
        asked = self._asker.make_requester(view.replica, model) if self._asker is not None and view.replica else None
        new_bytes = ask.new_bytes or len(body)
        ids = await self._prompts.encode(given, view.base, view.engine, asked, new_bytes=new_bytes)
        if not ids:
            return None
        prompt = TokenPrompt(ids, view.adapter, ask.salt)
        for size in view.block_tokens:
            await self._hash(prompt, size)
        return prompt

    async def _hash(self, prompt: TokenPrompt, block_tokens: int) -> None:
        keys = self._keys.find_leading_keys(prompt, block_tokens)
        known = len(keys)
        if prompt.tokens - known * block_tokens <= HASH_TOKENS_MAX:
            keys += rest(prompt, block_tokens, keys)
        else:
            keys += await asyncio.get_running_loop().run_in_executor(None, rest, prompt, block_tokens, tuple(keys))
        self._keys.learn(prompt, block_tokens, keys, known)
