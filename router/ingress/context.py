"""Shared request handling of a process. It has the callers, the reader, the observer and the tracer, and reports each
request at its end.

All frontends of one process share it. So a conversation is recognized across frontends, and the memory for prompts
exists once.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Iterable
from contextlib import AsyncExitStack
from types import TracebackType
from typing import Self

from router.config.api_keys import Keys
from router.config.runtime import RuntimeConfig
from router.core.types.cache_misses import Template
from router.eventloop import close_on_error
from router.ingress.auth import Authenticator
from router.ingress.parser import RequestParser
from router.ingress.prompt_observer import PromptObserver
from router.ingress.usage import UsageAsking
from router.placement_api import PlacementService
from router.telemetry import logs
from router.telemetry.process_totals import SPANS_DROPPED, UNEXPLAINED
from router.telemetry.request_record import RequestRecord
from router.telemetry.tracing import Tracer
from router.tokenization.encoder import PromptEncoder, messages_bytes_max
from router.tokenization.request_tokens import EngineTokenizer, RequestTokenizer


class IngressContext:
    """Shared request-handling parts of one process, an asynchronous context manager."""

    def __init__(
        self,
        config: RuntimeConfig,
        placer: PlacementService,
        prompts: PromptEncoder | None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        """`prompts` belong to the control plane; None if events are off. `tls`: for requests of token ids from
        replicas."""
        self._config = config
        settings = config.settings
        self._placer = placer
        self._prompts = prompts
        self._observer = PromptObserver(settings.insights) if settings.insights.enabled else None
        self._tls = tls
        self._stack = AsyncExitStack()
        self._ended: list[RequestRecord] = []
        self.usage = UsageAsking()
        self.tracer: Tracer | None = None  # None: tracing is off

    async def __aenter__(self) -> Self:
        async with close_on_error(self._stack):
            self._build()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.aclose()

    def _build(self) -> None:
        config, s = self._config, self._config.settings
        self._loop = asyncio.get_running_loop()
        if s.tracing.endpoint:
            self.tracer = Tracer(s.tracing, scheme="https" if s.listen.tls_certificate else "http")
            self._stack.push_async_callback(self.tracer.close)  # closed last: answers that are cut have spans, too
        self.reader = RequestParser(
            self._placer,
            self._tokens(self._prompts) if self._prompts is not None else None,
            s.limits,
            api=s.api,
            insights=s.insights,
            upstream=s.upstream,
            disagg=s.disagg,
            secret=config.tenant_secret,
            messages_bytes_max=messages_bytes_max(s) if s.events.enabled else 0,
            observer=self._observer,
        )
        self._stack.callback(self.reader.close)
        self.callers = Authenticator(config.keys, "")
        self._apply_credentials(config)

    def _tokens(self, prompts: PromptEncoder) -> RequestTokenizer:
        s = self._config.settings
        asker = None
        if s.tokens.ask_replicas:
            asker = EngineTokenizer(api_key=s.probe.api_key, timeout_s=s.probe.timeout_s, tls=self._tls)
            self._stack.push_async_callback(asker.close)
        return RequestTokenizer(prompts, asker, offload_bytes_min=s.limits.offload_bytes_min)

    def apply(self, config: RuntimeConfig) -> None:
        """Apply settings that may change at run time, and the contents of their files."""
        self.callers.keys = config.keys
        self._apply_credentials(config)
        s = config.settings
        self.reader.configure(s.limits, s.api, s.insights, s.upstream)

    @property
    def keys(self) -> Keys | None:
        """Table of keys; None if no caller needs a key. It is replaced as one object, for later requests."""
        return self.callers.keys

    def _apply_credentials(self, config: RuntimeConfig) -> None:
        """Replace the token that metrics require and the API key that is sent to replicas."""
        self.callers.admin_token = config.admin_token
        self.reader.forwarding.credentials(passed_on=config.keys is None, api_key=config.upstream_key)

    def templates(self) -> Iterable[Template]:
        """Return prefixes that conversations of this process's clients share, new or changed since the last call."""
        return self._observer.templates() if self._observer is not None else ()

    def counters(self) -> dict[str, int]:
        """Return totals for metrics."""
        return {
            SPANS_DROPPED: self.tracer.dropped if self.tracer is not None else 0,
            UNEXPLAINED: self._observer.unexplained if self._observer is not None else 0,
        }

    def record_request(self, record: RequestRecord) -> None:
        """Report a request that has ended, at the end of this iteration of the event loop. One report of all records of
        an iteration takes half the time."""
        if not self._ended:
            self._loop.call_soon(self._report)
        self._ended.append(record)

    def _report(self) -> None:
        ended, self._ended = self._ended, []
        for record in ended:
            self._placer.record_request(record)
        logs.log_requests(ended)
