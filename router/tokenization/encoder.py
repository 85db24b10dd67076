"""Turns requests into token ids, as the engine would: chat template and tokenizer, in threads of this process.

KV events name blocks by token ids, so a prompt must become the same ids here as in the engine. It does if the model's
own files are available here. Otherwise the router asks a replica, which costs a round trip. This module never fails a
request: a prompt without ids in time gets None, and is placed by estimate. Late work is still finished and remembered,
so that the conversation's next turn finds it.

At start `verify` compares the ids with a replica's own /tokenize. This detects differences that no file shows: another
template given to the engine by a flag, other special tokens, another version's behaviour.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import msgspec
from xxhash import xxh3_128_digest

from router.config.schema import Settings
from router.config.url_maps import template_kwargs, tokenizers
from router.core.prompts.template_chat import UnsupportedForTemplate, pack_ids
from router.core.types.requests import TemplateInput
from router.engines import http_client
from router.tokenization.chat_templates import SGLANG, ChatTemplate
from router.tokenization.engine_tokenize import ask_body
from router.tokenization.incremental import PartialEncoding, make_incremental_encoder
from router.tokenization.optional_tokenizers import MissingExtra
from router.tokenization.probes import PROMPTS, difference
from router.tokenization.sandbox import CannotRender
from router.tokenization.tokenizers import CannotLoad, Encoder, ModelFolder, SegmentCache, download, load

log = logging.getLogger(__name__)
_T = TypeVar("_T")

# (path, body) -> the replica's answer, including that of a 4xx; raises if the replica does not answer.
AskReplica = Callable[[str, dict[str, Any]], Awaitable[dict[str, Any]]]

# Maximum of messages for rendering a template on the event loop; more take over a millisecond.
INLINE_MESSAGES_MAX = 128
JOBS_MAX = 32  # prompts that wait for a thread; a further one counts as late at once
REASONS_MAX = 1000  # reasons remembered, so that each is logged once


@dataclass(slots=True)
class RenderedPrompt:
    """Prompt as text, with the way to encode it."""

    begun: PartialEncoding
    special: bool  # True if the tokenizer adds its own tokens around it
    suffix: str = ""  # text that is encoded separately and appended


class Model:
    """Template and tokenizer of one model. Loading takes a second. Safe in any thread."""

    def __init__(self, source: str, cache_bytes_max: int) -> None:
        """`source` is a folder, a tokenizer.json or a name at the model hub. Raises CannotLoad, CannotRender,
        MissingExtra."""
        folder = ModelFolder(download(source))
        whole: Encoder = load(folder.tokenizer_json, cache_bytes_max // 2)
        own_renderer = folder.explain_template_unused()
        templates = {} if own_renderer else folder.templates()
        self._template = ChatTemplate(templates, folder.special()) if templates else None
        self.chatless = "" if templates else own_renderer or "the model has no chat template"
        """Reason that no chat can be rendered here; "" if chats can be rendered."""
        self.encoder = make_incremental_encoder(whole, folder.tokenizer_json, templates.values(), cache_bytes_max)

    def ids(self, given: TemplateInput, engine: str, defaults: Mapping[str, Any]) -> bytes:
        """Return token ids as uint32 little-endian. Raises CannotRender and UnsupportedForTemplate."""
        return self.encode_prompt(self.render_prompt(given, engine, defaults))

    def render_prompt(self, given: TemplateInput, engine: str, defaults: Mapping[str, Any]) -> RenderedPrompt:
        """Return the prompt's text, with the known part of its ids. Raises CannotRender and UnsupportedForTemplate."""
        if given.text is not None:
            return self._begin_prompt(given.text, given.add_special_tokens)
        if self._template is None:
            raise UnsupportedForTemplate(self.chatless)
        fitted = self._template.fit(given, engine, defaults)
        special = given.add_special_tokens and engine != SGLANG  # SGLang has no such field for chats
        return self._begin_prompt(self._template.render(fitted), special, fitted.suffix)

    def _begin_prompt(self, text: str, special: bool, suffix: str = "") -> RenderedPrompt:
        return RenderedPrompt(PartialEncoding(text, [], []) if special else self.encoder.begin(text), special, suffix)

    def encode_prompt(self, rendered: RenderedPrompt) -> bytes:
        """Return token ids of a text as uint32 little-endian. Raises UnsupportedForTemplate."""
        begun = rendered.begun
        ids = self.encoder.encode(begun.text, special=True) if rendered.special else self.encoder.finish(begun)
        return ids + self._suffix(rendered.suffix) if rendered.suffix else ids

    def _suffix(self, text: str) -> bytes:
        """Return ids of a message to be continued, as SGLang makes them: encoded separately, without the BOS in
        front."""
        plain, special = self.encoder.encode(text, special=False), self.encoder.encode(text, special=True)
        if special != plain and special[4:] != plain:
            raise UnsupportedForTemplate("the tokenizer adds more than BOS to a text")
        return plain


class PromptEncoder:
    """Token ids of requests, by model: None rather than a late or wrong answer, or an exception."""

    def __init__(
        self,
        sources: Mapping[str, str],
        *,
        deadline_s: float = 0.02,
        cache_bytes_max: int = 256 << 20,
        offload_bytes_min: int = 64 << 10,
        asks_max: int = 8,
        threads: int = 2,
        template_kwargs: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        """`sources`: maps a model name to a local folder or model hub name; "" stands for every model.
        `cache_bytes_max`: limit for each source, and for replicas' answers. `template_kwargs`: engines'
        --default-chat-template-kwargs, by model."""
        self._sources = dict(sources)
        self._deadline_s = deadline_s
        self._cache_bytes_max = cache_bytes_max
        self._offload_bytes_min = offload_bytes_min
        self._asks_max = asks_max
        self._template_kwargs = dict(template_kwargs or {})
        self._models: dict[str, asyncio.Future[Model | None]] = {}
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="prompts")
        self._jobs = 0
        self._answers = SegmentCache(cache_bytes_max)
        self._asking: dict[bytes, asyncio.Task[bytes | None]] = {}
        self._counts: Counter[str] = Counter()
        self._logged: set[tuple[str, str]] = set()

    async def encode(
        self,
        given: TemplateInput,
        model: str,
        engine: str,
        ask: AskReplica | None = None,
        *,
        new_bytes: int | None = None,
    ) -> bytes | None:
        """Return ids of the prompt as uint32 little-endian; None if they are unknown, or not known within the deadline.

        `engine`: "vllm" or "sglang".
        `model`: the base model, also for a request to an adapter.
        `ask`: used if the model has no tokenizer here, and for chats if it has no chat template here.
        `new_bytes`: bytes of the request after the longest part that an earlier one began with, if known. A prompt with
        few new bytes is encoded here, any longer one in a thread.
        """
        if given.ids is not None:
            return given.ids
        if engine == SGLANG and given.text is not None:
            given = replace(given, add_special_tokens=True)  # SGLang has no such field for texts
        if not self.has_tokenizer(model):
            if ask is not None:
                return await self._ask(given, model, engine, ask)
            self._counts["unknown"] += 1
            return None
        loaded = await self._get_model(model, self._deadline_s)
        if loaded is None:
            return None
        if given.text is None and loaded.chatless and ask is not None:
            return await self._ask(given, model, engine, ask)
        defaults = self._template_kwargs.get(model, {})
        work: Callable[[], bytes] = partial(loaded.ids, given, engine, defaults)
        if not self._long(given, new_bytes):
            rendered = self._run_reporting_errors(model, partial(loaded.render_prompt, given, engine, defaults))
            if rendered is None:
                return None
            work = partial(loaded.encode_prompt, rendered)
            if rendered.begun.unread <= self._offload_bytes_min:
                return self._compute_ids(model, work)
        if self._jobs >= JOBS_MAX:
            self._counts["late"] += 1
            return None
        job = asyncio.get_running_loop().run_in_executor(self._threads, self._compute_ids, model, work)
        self._jobs += 1
        job.add_done_callback(self._job_done)
        done, _ = await asyncio.wait((job,), timeout=self._deadline_s)
        if not done:
            self._counts["late"] += 1
            return None
        return job.result()

    async def prepare(self, model: str) -> bool:
        """Load the model's files, however long it takes. Returns True if they can be used. Call it before serving: the
        `tokenizers` library holds the GIL for half a second for a large vocabulary."""
        return await self._get_model(model, None) is not None

    async def prepare_all(self) -> None:
        """Load the files of every source."""
        for model in self._sources:
            await self.prepare(model)

    async def verify(self, model: str, engine: str, ask: AskReplica) -> str | None:
        """Compare with a replica's /tokenize on probing prompts; if no chat can be rendered here, on texts alone.
        Returns None if equal. Otherwise returns a line that names the first difference, or states that the replica does
        not answer. Never raises."""
        loaded = await self._get_model(model, None)
        if loaded is None:
            return "its tokenizer cannot be used"
        bodies: dict[str, dict[str, Any]] = {}
        for name, given in PROMPTS.items():
            if given.text is None and loaded.chatless:
                continue
            with suppress(UnsupportedForTemplate):
                bodies[name] = ask_body(given, model, engine)
        asked = (ask("/tokenize", body) for body in bodies.values())  # all at once, since a busy engine answers late
        answers = await asyncio.gather(*asked, return_exceptions=True)
        compared = 0
        for name, answer in zip(bodies, answers, strict=True):
            if isinstance(answer, BaseException):
                return f"the replica does not answer /tokenize: {http_client.describe_error(answer)}"
            defaults = self._template_kwargs.get(model, {})
            ours = self._run_reporting_errors(model, partial(loaded.ids, PROMPTS[name], engine, defaults), quiet=True)
            if line := difference(name, ours, _tokens(answer)):
                return line
            compared += ours is not None
        return None if compared else "no probe prompt could be compared"

    def has_tokenizer(self, model: str) -> bool:
        """True if a tokenizer is configured for this model and is not known to be unusable, so that no replica needs to
        be asked."""
        source = self._sources.get(model) or self._sources.get("")
        loading = self._models.get(source) if source else None
        return bool(source) and not (loading is not None and loading.done() and loading.result() is None)

    async def chatless(self, model: str) -> str:
        """Return the reason that no chat of this model can be rendered here, though it has a tokenizer; "" if chats can
        be rendered."""
        loaded = await self._get_model(model, None)
        return loaded.chatless if loaded is not None else ""

    def counts(self) -> Mapping[str, int]:
        """Return numbers of prompts by outcome. Outcomes are encoded, asked, remembered, late, failed and unknown."""
        return self._counts

    def close(self) -> None:
        """Stop the threads and the requests to replicas; the object cannot be used afterwards."""
        for task in self._asking.values():
            task.cancel()
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _get_model(self, model: str, timeout_s: float | None) -> Model | None:
        """Return the model's files. The first call reads them."""
        source = self._sources.get(model) or self._sources.get("", "")
        loading = self._models.get(source)
        if loading is None:
            loading = self._models[source] = _in_daemon(partial(self._load, source))
        if not loading.done():
            await asyncio.wait((loading,), timeout=timeout_s)
            if not loading.done():
                self._counts["late"] += 1
                return None
        loaded = loading.result()
        if loaded is None:
            self._counts["failed"] += 1
        return loaded

    def _load(self, source: str) -> Model | None:
        try:
            made = Model(source, self._cache_bytes_max)
        except (CannotLoad, CannotRender, MissingExtra, OSError) as error:
            self._warn(source, f"tokenizer cannot be used: {error}")
            return None
        except Exception:
            log.exception("bug: loading of a tokenizer failed", extra={"event": "bug", "fields": {"source": source}})
            return None
        log.info(
            "tokenizer loaded",
            extra={"event": "tokenizer_loaded", "fields": {"source": source, "by": made.encoder.name}},
        )
        return made

    def _long(self, given: TemplateInput, new_bytes: int | None) -> bool:
        """True if encoding a prompt takes too long for the event loop."""
        if new_bytes is None:
            return _longer(given, self._offload_bytes_min)
        return new_bytes > self._offload_bytes_min or len(given.messages or ()) > INLINE_MESSAGES_MAX

    def _compute_ids(self, model: str, work: Callable[[], bytes]) -> bytes | None:
        """Compute ids; safe in any thread. Two threads that count at once may lose a count, which does not matter."""
        ids = self._run_reporting_errors(model, work)
        self._counts["encoded"] += ids is not None
        return ids

    def _run_reporting_errors(self, model: str, work: Callable[[], _T], *, quiet: bool = False) -> _T | None:
        """Return the result of a model's work; None if it fails, which is counted and logged unless `quiet`."""
        try:
            return work()
        except (CannotRender, UnsupportedForTemplate, UnicodeError) as error:
            reason = type(error).__name__ if isinstance(error, UnicodeError) else str(error)
        except Exception as error:  # a library's failure: its text may quote the prompt, so only the type is logged
            reason = f"bug: {type(error).__name__}"
        if not quiet:
            self._report_failure(model, reason)
        return None

    async def _ask(self, given: TemplateInput, model: str, engine: str, ask: AskReplica) -> bytes | None:
        try:
            body = ask_body(given, model, engine)
        except UnsupportedForTemplate as error:
            self._report_failure(model, str(error))
            return None
        key = xxh3_128_digest(msgspec.json.encode(body))
        known = self._answers.get(key)
        if known is not None:
            self._counts["remembered"] += 1
            return known
        task = self._asking.get(key)
        if task is None:
            if len(self._asking) >= self._asks_max:
                self._counts["late"] += 1
                return None
            task = self._asking[key] = asyncio.create_task(self._fetch_ids(key, model, body, ask))
        done, _ = await asyncio.wait((task,), timeout=self._deadline_s)
        if not done:
            self._counts["late"] += 1
            return None
        return task.result()

    async def _fetch_ids(self, key: bytes, model: str, body: dict[str, Any], ask: AskReplica) -> bytes | None:
        try:
            ids = _tokens(await ask("/tokenize", body))
        except Exception as error:  # any error of the transport
            self._report_failure(model, f"/tokenize: {http_client.describe_error(error)}")
            return None
        finally:
            del self._asking[key]
        if ids is None:
            self._report_failure(model, "/tokenize was refused")
            return None
        self._counts["asked"] += 1
        self._answers.put(key, ids)
        return ids

    def _job_done(self, _job: asyncio.Future[bytes | None]) -> None:
        self._jobs -= 1

    def _report_failure(self, model: str, reason: str) -> None:
        self._warn(model, f"a prompt cannot be tokenized: {reason}")
        self._counts["failed"] += 1

    def _warn(self, what: str, reason: str) -> None:
        """Log a reason once per model, because it may come with every request."""
        if (what, reason) not in self._logged and len(self._logged) < REASONS_MAX:
            self._logged.add((what, reason))
            log.warning(
                "placed by estimate: %s", reason, extra={"event": "placed_by_estimate", "fields": {"model": what}}
            )


def _in_daemon(work: Callable[[], Model | None]) -> asyncio.Future[Model | None]:
    """Run in a daemon thread. The exit of the process does not wait for such a thread: a model hub may block it for
    minutes."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Model | None] = loop.create_future()

    def told(made: Model | None) -> None:
        if not future.done():
            future.set_result(made)

    def run() -> None:
        made = work()
        with suppress(RuntimeError):  # the event loop is closed, and the result not needed
            loop.call_soon_threadsafe(told, made)

    threading.Thread(target=run, name="tokenizer", daemon=True).start()
    return future


def _tokens(answer: Mapping[str, Any]) -> bytes | None:
    tokens = answer.get("tokens")
    try:
        return pack_ids(tokens) if isinstance(tokens, list) else None
    except UnsupportedForTemplate:
        return None


def _longer(given: TemplateInput, bytes_max: int) -> bool:
    """True if the text will be longer, roughly: enough to decide if a thread should encode it. Arguments of tool calls
    and reasoning count as text; any other value counts as one byte."""
    size, left = 0, list[Any]([given.text, given.messages, given.tools, given.documents])
    while left and size <= bytes_max:
        value = left.pop()
        size += len(value) if isinstance(value, str) else 1
        if isinstance(value, dict):
            left += value.values()
        elif isinstance(value, list):
            left += value
    return size > bytes_max


def messages_bytes_max(settings: Settings) -> int:
    """Return the part of `tokens.cache_bytes_max` for decoded messages, from which templates are rendered: about as
    many bytes as a conversation's ids take. 0 if no template is rendered here."""
    return settings.tokens.cache_bytes_max * 3 // 8 if settings.tokens.sources else 0


def make_prompts(settings: Settings) -> PromptEncoder:
    """Return the encoder of the templates and tokenizers that the settings name."""
    s = settings.tokens
    return PromptEncoder(
        tokenizers(s.sources),
        deadline_s=s.deadline_s,
        cache_bytes_max=s.cache_bytes_max - messages_bytes_max(settings),
        template_kwargs=template_kwargs(s.template_kwargs),
    )
