"""A request's token ids and their keys, for replicas whose events are followed; and whether our ids can be trusted.

Ids come from prompts.py (chat template and tokenizer, or a replica's own `/tokenize`). Keys of what is known are
looked up; a long new part is hashed off the event loop. For every model a replica follows, our ids are compared with
its own at first and every so often: a model for which they differ is placed by estimate, and the log names the first
token that differs.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any

import msgspec

from router import pages
from router.core.dialects import Dialect
from router.core.facts import Ask, Replica
from router.core.keys import KeyCache, TokenPrompt, rest
from router.core.routing import Router
from router.prompts import Ask as AskReplica
from router.prompts import Prompts

log = logging.getLogger(__name__)

RUNS_MAX = 16_384  # runs of keys remembered: some million blocks, 40 MB
HASH_TOKENS_MAX = 16_384  # hashed on the event loop; more takes over a millisecond
ANSWER_BYTES_MAX = 16 << 20  # a million tokens and more
AGAIN_S = 10.0  # until a model that failed is looked at again
RESPONSES = "/v1/responses"
LISTEN_S = 0.001
LOOK_S = 0.1  # for models that are followed now
UNKNOWN = "no tokenizer, and its replicas may not be asked"


class Tokens:
    """Token ids of requests, by model. Owns the threads of `prompts` and one HTTP session, ended by `close`."""

    def __init__(
        self,
        router: Router,
        prompts: Prompts,
        *,
        ask_replicas: bool,
        verify: bool,
        verify_interval_s: float,
        offload_bytes_min: int,
        timeout_s: float,
        event_wait_s: float,
        api_key: str,
    ) -> None:
        self._router = router
        self.prompts = prompts
        self._ask_replicas = ask_replicas
        self._verify = verify
        self._verify_interval_s = verify_interval_s
        self._offload_bytes_min = offload_bytes_min
        self._event_wait_s = event_wait_s
        self._keys = KeyCache(RUNS_MAX)
        self._session = pages.session(api_key, timeout_s)

    async def close(self) -> None:
        """Stop the threads and close all connections."""
        await self._session.close()
        self.prompts.close()

    async def of(self, dialect: Dialect, path: str, body: bytes, ask: Ask, model: str) -> TokenPrompt | None:
        """The prompt's ids and keys; None where they cannot be known, or not in time."""
        loop = asyncio.get_running_loop()
        if len(body) >= self._offload_bytes_min and ask.decoded is None:  # else there is little left to do
            given = await loop.run_in_executor(None, dialect.template_input, path, body, ask.decoded)
        else:
            given = dialect.template_input(path, body, ask.decoded)
        base, engine, replica = self._router.models.engine(model)
        if given is None or (path == RESPONSES and Replica(replica).rank is not None):
            return None  # vLLM 0.32 does not heed the header that names a rank on /v1/responses
        asked = self._asker(replica, model) if self._ask_replicas and replica else None
        ids = await self.prompts.encode(given, base, engine, asked)
        if not ids:
            return None
        prompt = TokenPrompt(ids, self._router.models.adapter(model), ask.salt)
        for size in self._router.knowledge.block_sizes():
            await self._hash(prompt, size)
        await self._heard(prompt)
        return prompt

    async def _heard(self, prompt: TokenPrompt) -> None:
        """An answer may be here before the event of its last block, and the next request right behind it: wait for
        the event, but not for long."""
        until_s = time.monotonic() + self._event_wait_s
        while self._router.knowledge.behind(prompt, now_s := time.monotonic()) and now_s < until_s:  # noqa: ASYNC110 - rare, short
            await asyncio.sleep(LISTEN_S)

    async def _hash(self, prompt: TokenPrompt, block_tokens: int) -> None:
        keys = self._keys.known(prompt, block_tokens)
        known = len(keys)
        if prompt.tokens - known * block_tokens <= HASH_TOKENS_MAX:
            keys += rest(prompt, block_tokens, keys)
        else:
            keys += await asyncio.get_running_loop().run_in_executor(None, rest, prompt, block_tokens, tuple(keys))
        self._keys.learn(prompt, block_tokens, keys, known)

    # -- trust ---------------------------------------------------------------------------------------------------

    async def watch(self) -> None:
        """Compare our ids with the replicas', model by model, until cancelled."""
        due_s: dict[str, float] = {}
        clock = asyncio.get_running_loop().time
        while True:
            for model in self._router.models.followed():
                if clock() >= due_s.get(model, 0.0):
                    again_s = self._verify_interval_s
                    if not await self._compare(model):
                        again_s = min(AGAIN_S, again_s)
                    due_s[model] = clock() + again_s
            await asyncio.sleep(LOOK_S)

    async def _compare(self, model: str) -> bool:
        """Whether the model's prompts can be turned into tokens; if not, it is looked at again soon."""
        base, engine, replica = self._router.models.engine(model)
        if not self.prompts.knows(base):
            why = await self._refused(replica, model) if self._ask_replicas else UNKNOWN
        elif not await self.prompts.prepare(base):
            return await self._compare(model)  # which is known now: a replica is asked instead
        elif not self._verify or not replica:
            why = ""
        else:
            why = await self.prompts.verify(base, engine, self._asker(replica, model)) or ""
        self._tell(model, why)
        return not why

    async def _refused(self, replica: str, model: str) -> str:
        """Why the replica's own /tokenize is of no use; "" if it is."""
        try:
            answer = await self._asker(replica, model)("/tokenize", {"prompt": "warm"})
        except Exception as error:  # whatever the transport raises, or the answer is
            return f"no tokenizer here, and /tokenize is not answered: {type(error).__name__}"
        return "" if isinstance(answer.get("tokens"), list) else "no tokenizer here, and /tokenize is refused"

    def _tell(self, model: str, why: str) -> None:
        if self._router.models.observe_tokens(model, why) and why:
            fields = {"model": model, "why": why}
            log.warning("prompts of this model are placed by estimate", extra={"fields": fields})

    def _asker(self, replica: str, model: str) -> AskReplica:
        async def ask(path: str, body: dict[str, Any]) -> dict[str, Any]:
            url = f"{Replica(replica).url}{path}"
            async with self._session.post(url, json=body | {"model": model}, allow_redirects=False) as response:
                answer = await pages.read(response, ANSWER_BYTES_MAX)
                if response.status >= 500:
                    raise ConnectionError(f"{path}: status {response.status}")
            decoded: dict[str, Any] = msgspec.json.decode(answer, type=dict[str, Any])
            return decoded

        return ask
