"""Verification of the router's token ids. For every model with KV events they are compared with a replica's, at first
and at intervals. Prompts of a model with a difference are placed by estimate, and the log names the first token that
differs."""

from __future__ import annotations

import asyncio
import logging

from router.config.schema import TokenSettings
from router.core.fleet.models import MODELS_MAX, Models
from router.engines import http_client
from router.tokenization.encoder import PromptEncoder
from router.tokenization.request_tokens import EngineTokenizer

log = logging.getLogger(__name__)

AGAIN_S = 10.0  # pause before a model that failed is compared again
LOOK_S = 0.1  # pause between two checks for models with new KV events
UNKNOWN = "no tokenizer, and /tokenize of its replicas is turned off"


class TokenizerVerifier:
    """Reports to the Router, for every model, if its prompts can be turned into token ids."""

    def __init__(self, models: Models, prompts: PromptEncoder, asker: EngineTokenizer, settings: TokenSettings) -> None:
        self._models = models
        self._prompts = prompts
        self._asker = asker
        self._settings = settings
        self._chatless = set[str]()  # models without a chat template that the log has named

    async def watch(self) -> None:
        """Compare ids with those of replicas, model by model, until cancelled."""
        due_s: dict[str, float] = {}
        clock = asyncio.get_running_loop().time
        while True:
            for model in self._models.list_event_models():
                if clock() >= due_s.get(model, 0.0):
                    again_s = self._settings.verify_interval_s
                    if not await self._compare(model):
                        again_s = min(AGAIN_S, again_s)
                    due_s[model] = clock() + again_s
            await asyncio.sleep(LOOK_S)

    async def _compare(self, model: str) -> bool:
        """True if the model's prompts can be turned into token ids; otherwise it is compared again soon."""
        base, engine, replica = self._models.engine(model)
        if not self._prompts.has_tokenizer(base):
            why = (
                await self._probe_tokenize(replica, model, "no local tokenizer")
                if self._settings.ask_replicas
                else UNKNOWN
            )
        elif not await self._prompts.prepare(base):
            return await self._compare(model)  # the tokenizer is now known to be unusable: a replica is asked instead
        else:
            why = await self._chats_refused(base, replica, model)
            if not why and self._settings.verify and replica:
                why = await self._prompts.verify(base, engine, self._asker.make_requester(replica, model)) or ""
        self._tell(model, why)
        return not why

    async def _chats_refused(self, base: str, replica: str, model: str) -> str:
        """Return the reason that a replica cannot turn chats of a model without a chat template into token ids; "" if
        it can, or if the model has a template."""
        chatless = await self._prompts.chatless(base)
        if not chatless:
            return ""
        if not self._settings.ask_replicas:
            return f"{chatless}, and /tokenize of its replicas is turned off"
        why = await self._probe_tokenize(replica, model, chatless) if replica else ""
        if not why and model not in self._chatless and len(self._chatless) < MODELS_MAX:
            self._chatless.add(model)
            fields = {"model": model, "why": chatless}
            log.warning(
                "chats of this model are tokenized by its replicas", extra={"event": "chats_asked", "fields": fields}
            )
        return why

    async def _probe_tokenize(self, replica: str, model: str, reason: str) -> str:
        """Return the reason that the replica's own /tokenize cannot be used; "" if it can. `reason`: why the replica is
        asked."""
        try:
            answer = await self._asker.make_requester(replica, model)("/tokenize", {"prompt": "warm"})
        except Exception as error:  # any error, from the transport or a bad answer
            return f"{reason}, and /tokenize does not answer: {http_client.describe_error(error)}"
        return "" if isinstance(answer.get("tokens"), list) else f"{reason}, and /tokenize rejects requests"

    def _tell(self, model: str, why: str) -> None:
        if self._models.observe_tokens(model, why) and why:
            fields = {"model": model, "why": why}
            log.warning(
                "prompts of this model are placed by estimate", extra={"event": "placed_by_estimate", "fields": fields}
            )
