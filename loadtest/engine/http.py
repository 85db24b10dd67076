"""The simulated replica's HTTP surface: vLLM 0.32's paths, bodies and errors, as far as a router meets them.

The shapes were compared with recorded answers of a real vLLM. As there, status and headers leave before the
prefill starts, the role and the first text come with the first token, unknown fields are ignored, and a
missing `model` is accepted. `return_token_ids` and prompts of ids are as there, so that a stream can be continued.
Unlike there, an answer has exactly `min_tokens` tokens, where a request has this field: the end of sequence comes as
soon as it may. Without it an answer has `max_tokens` tokens (default 128), as with `ignore_eos`. A request is refused
if its answer is too long for the context, and not if only its limit is. `n`, `stop`, `logprobs` and sampling parameters
change nothing."""

from __future__ import annotations

import itertools
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import msgspec
from aiohttp import web

from loadtest.common import answers
from loadtest.engine import tokens
from loadtest.engine.bodies import BODY, Body, Refused, prompts_of, rendered, source_of
from loadtest.engine.metrics import render
from loadtest.engine.pairs import DecodeSide, LegRefused, Link, Moment, PrefillSide
from loadtest.engine.replica import Choices, SimulatedReplica
from loadtest.engine.request import EngineRequest, RequestRefused
from router.core.facts.legs import Handshake, Role

BODY_BYTES_MAX = 64 << 20
WAITING_MAX = 10_000
"""Requests queued at a replica before it answers 503 (vLLM: --max-num-queued-reqs)."""
VERSION = "0.32.0"

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass(frozen=True, slots=True)
class Job:
    """One accepted HTTP request: its choices' answers are known in full, only their tokens' times are not."""

    response_id: str
    chat: bool
    include_usage: bool
    ids: list[int]
    texts: list[str]
    answer: Choices
    prompt_tokens: list[int]
    created: int
    prompts: list[bytes] | None  # the prompts of the choices, where their ids are to be told
    requests: list[EngineRequest]
    leg: PrefillSide | DecodeSide | None  # None for a request that is whole
    finish_reason: str


class Surface:
    """The routes of one replica."""

    def __init__(
        self,
        replica: SimulatedReplica,
        model_name: str,
        event_sources: Mapping[str, Any],
        *,
        tell_ttft: bool = False,
        link: Link | None = None,
    ) -> None:
        """`link` None: no request is a leg of one."""
        self._replica = replica
        self._tell_ttft = tell_ttft
        self._link = link
        self._model_name = model_name
        self._event_sources = event_sources
        self._ids = itertools.count(1)
        self._started = int(time.time())

    def application(self) -> web.Application:
        """The application; run it with `handler_cancellation`, so that a client that leaves ends its work."""
        app = web.Application(client_max_size=BODY_BYTES_MAX, middlewares=[_errors])
        app.router.add_post("/v1/chat/completions", self._chat)
        app.router.add_post("/v1/completions", self._completion)
        app.router.add_post("/v1/embeddings", self._embeddings)
        app.router.add_post("/tokenize", self._tokenize)
        app.router.add_post("/detokenize", self._detokenize)
        app.router.add_post("/reset_prefix_cache", self._reset_prefix_cache)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/health", self._health)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_get("/load", self._load)
        app.router.add_get("/version", self._version)
        app.router.add_get("/kv_event_sources", self._kv_event_sources)
        return app

    # --- generating

    async def _chat(self, http: web.Request) -> web.StreamResponse:
        body = await self._body(http)
        if body.messages is None:
            raise Refused(400, "Field required: messages", "Bad Request", "messages")
        return await self._generate(http, body, [rendered(body, body.messages)], chat=True)

    async def _completion(self, http: web.Request) -> web.StreamResponse:
        body = await self._body(http)
        return await self._generate(http, body, prompts_of(body.prompt), chat=False)

    async def _generate(self, http: web.Request, body: Body, prompts: list[bytes], *, chat: bool) -> web.StreamResponse:
        if self._replica.model.waiting_n >= WAITING_MAX:
            raise Refused(503, "The queue is full (max_num_queued_reqs).", "ServiceUnavailableError")
        job = self._job(http, body, prompts, chat)
        try:
            if body.stream:
                return await self._stream(http, job)
            await self._begin(job)
            while not job.answer.finished:
                await job.answer.more()
            cached = sum(choice.cached_tokens for choice in job.answer.choices)
            more = await job.leg.after(cached) if job.leg is not None else {}
            return web.Response(body=self._whole(job, more), content_type="application/json")
        except LegRefused as refused:
            raise _leg_refused(refused) from None
        finally:
            for request_id in job.ids:
                self._replica.cancel(request_id)
            if job.leg is not None:
                job.leg.close()

    async def _begin(self, job: Job) -> None:
        """Queue the requests, once the leg that they are may go on. Raises LegRefused."""
        handover = await job.leg.before() if job.leg is not None else None
        for index, request in enumerate(job.requests):
            self._replica.submit(replace(request, handover=handover), job.answer, index)

    def _job(self, http: web.Request, body: Body, prompts: list[bytes], chat: bool) -> Job:
        """All or nothing: every prompt is checked before the first is queued."""
        output_n, model = body.answer_tokens(), self._replica.model
        ended = "stop" if body.min_tokens and output_n != body.tokens_max else "length"
        if self._link is not None and (self._link.handshake, self._link.role) == (Handshake.SGLANG, Role.PREFILL):
            output_n = 1
        counts = [tokens.count(prompt) for prompt in prompts]
        try:
            for count in counts:
                model.check(count, output_n)
        except RequestRefused as refusal:
            raise Refused(400, str(refusal), param="input_tokens") from None
        answer = Choices(len(prompts))
        texts = [tokens.answer(prompt, output_n) for prompt in prompts]
        name = http.headers.get("X-Request-Id") or uuid.uuid4().hex[:16]
        usage = body.stream_options is not None and bool(body.stream_options.include_usage)
        told = prompts if body.return_token_ids else None
        id_ = f"{'chatcmpl' if chat else 'cmpl'}-{name}"
        leg = self._leg(body, sum(counts))
        job = Job(id_, chat, usage, [], texts, answer, counts, int(time.time()), told, [], leg, ended)
        for index, prompt in enumerate(prompts):
            text = tokens.Text(prompt + texts[index].encode(), body.cache_salt or "")
            keys = tokens.chain(text.data, model.limits.block_tokens, text.salt)
            job.ids.append(next(self._ids))
            job.requests.append(EngineRequest(job.ids[-1], counts[index], output_n, keys, text, source_of(body)))
        return job

    def _leg(self, body: Body, prompt_tokens: int) -> PrefillSide | DecodeSide | None:
        if self._link is None:
            return None
        try:
            return self._link.leg_of(body, prompt_tokens, self._replica.model.limits.block_tokens)
        except LegRefused as refused:
            raise _leg_refused(refused) from None

    async def _stream(self, http: web.Request, job: Job) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await response.prepare(http)
        try:
            await self._begin(job)
        except LegRefused as refused:  # status and headers have left
            error = {"error": {"message": str(refused), "type": "InternalServerError", "code": refused.status}}
            await response.write(b"data: %b\n\ndata: [DONE]\n\n" % msgspec.json.encode(error))
            return response
        sent = [0] * len(job.texts)
        parts: list[str] = []
        finished = False
        while not finished:
            await job.answer.more()
            finished = job.answer.finished
            for index, choice in enumerate(job.answer.choices):
                if choice.ready > sent[index]:
                    parts += self._events(job, index, sent[index], choice.ready, choice.finished)
                    sent[index] = choice.ready
            if finished:
                if job.include_usage:
                    parts.append(f'{self._head(job)},"choices":[],"usage":{self._usage(job)}}}\n\n')
                parts.append("data: [DONE]\n\n")
            try:
                await response.write("".join(parts).encode())
            except ConnectionResetError:
                return response
            parts.clear()
            if job.leg is not None and self._link is not None and not finished:
                await self._link.at(job.leg.role, Moment.ANSWERED)
        return response

    def _head(self, job: Job) -> str:
        kind = "chat.completion.chunk" if job.chat else "text_completion"
        return (
            f'data: {{"id":"{job.response_id}","object":"{kind}","created":{job.created},"model":"{self._model_name}"'
        )

    def _events(self, job: Job, index: int, start: int, end: int, finished: bool) -> list[str]:
        """One choice's tokens as server-sent events; before the first, the role."""
        head = f'{self._head(job)},"choices":[{{"index":{index}'
        text = job.texts[index][start * tokens.BYTES_PER_TOKEN : end * tokens.BYTES_PER_TOKEN]
        reason = f'"{job.finish_reason}","stop_reason":null' if finished else "null"
        ids = prompt_ids = "null"
        if job.prompts is not None:
            ids = _listed(tokens.ids(text.encode()))
            prompt_ids = "null" if start else _listed(tokens.ids(job.prompts[index]))
        rest = f'"logprobs":null,"finish_reason":{reason}'
        if not job.chat:
            ids = f'"prompt_token_ids":{prompt_ids},"token_ids":{ids}'
            return [f'{head},"text":"{text}",{rest},{ids}}}]}}\n\n']
        events = [f'{head},"delta":{{"content":"{text}"}},{rest},"token_ids":{ids}}}]}}\n\n']
        if not start:
            role = f'{head},"delta":{{"role":"assistant","content":""}},"logprobs":null,"finish_reason":null}}]'
            events.insert(0, f'{role},"prompt_token_ids":{prompt_ids}}}\n\n')
        return events

    def _usage(self, job: Job) -> str:
        size = self._replica.model.limits.block_tokens
        prompt, output = sum(job.prompt_tokens), sum(choice.ready for choice in job.answer.choices)
        cached = sum(choice.cached_tokens for choice in job.answer.choices)
        if job.leg is not None and job.leg.found_tokens is not None:
            cached = job.leg.found_tokens
        created = max(0, prompt // size * size - cached) if job.chat else None
        own = {"ttft_s": max(choice.ttft_s for choice in job.answer.choices)} if self._tell_ttft else {}
        return msgspec.json.encode(
            {
                **own,
                "prompt_tokens": prompt,
                "total_tokens": prompt + output,
                "completion_tokens": output,
                "prompt_tokens_details": {
                    "cached_tokens": cached,
                    "created_cache_tokens": created,
                    "multimodal_tokens": None,
                },
                "completion_tokens_details": None,
            }
        ).decode()

    def _whole(self, job: Job, more: dict[str, Any]) -> bytes:
        choices: list[dict[str, Any]] = []
        for index, text in enumerate(job.texts):
            choice: dict[str, Any] = {"index": index}
            if job.chat:
                choice["message"] = {"role": "assistant", "content": text, "refusal": None}
            else:
                choice["text"] = text
            choice |= {"logprobs": None, "finish_reason": job.finish_reason, "stop_reason": None}
            if job.prompts is not None:
                choice["token_ids"] = tokens.ids(text.encode())
                if not job.chat:
                    choice["prompt_token_ids"] = tokens.ids(job.prompts[index])
            choices.append(choice)
        kind = "chat.completion" if job.chat else "text_completion"
        whole = {"id": job.response_id, "object": kind, "created": job.created, "model": self._model_name}
        if job.chat and job.prompts is not None:
            whole["prompt_token_ids"] = tokens.ids(job.prompts[0])
        whole |= more
        return msgspec.json.encode(whole | {"choices": choices, "usage": msgspec.Raw(self._usage(job).encode())})

    # --- all the rest

    async def _body(self, http: web.Request) -> Body:
        try:
            body = BODY.decode(await http.read())
        except msgspec.DecodeError as error:  # ValidationError included
            raise Refused(400, str(error), "Bad Request") from None
        if body.model is not None and body.model != self._model_name:
            raise Refused(404, f"The model `{body.model}` does not exist.", "NotFoundError", "model")
        if body.cache_salt == "":
            raise Refused(400, "Parameter 'cache_salt' must be a non-empty string if provided.", "Bad Request")
        return body

    async def _embeddings(self, http: web.Request) -> web.Response:
        await self._body(http)
        raise Refused(400, "The model does not support Embeddings API")

    async def _tokenize(self, http: web.Request) -> web.Response:
        body = await self._body(http)
        messages = body.messages
        data = rendered(body, messages) if messages is not None else prompts_of(body.prompt)[0]
        ids = tokens.ids(data)
        longest = self._replica.model.context_tokens_max
        return web.json_response({"count": len(ids), "max_model_len": longest, "tokens": ids})

    async def _detokenize(self, http: web.Request) -> web.Response:
        try:
            ids = msgspec.json.decode(await http.read(), type=dict[str, Any])["tokens"]
            return web.json_response({"prompt": tokens.from_ids(ids).decode(errors="replace")})
        except (msgspec.DecodeError, KeyError, TypeError, ValueError):
            raise Refused(400, "Field required: tokens, a list of token ids", "Bad Request", "tokens") from None

    async def _reset_prefix_cache(self, _http: web.Request) -> web.Response:
        return web.json_response({"success": self._replica.model.reset_prefix_cache()})

    async def _models(self, _http: web.Request) -> web.Response:
        longest = self._replica.model.context_tokens_max
        return web.json_response(answers.models(self._model_name, created=self._started, context_tokens=longest))

    async def _health(self, _http: web.Request) -> web.Response:
        return web.Response()

    async def _load(self, _http: web.Request) -> web.Response:
        model = self._replica.model
        return web.json_response({"server_load": model.running_n + model.waiting_n})

    async def _version(self, _http: web.Request) -> web.Response:
        return web.json_response({"version": VERSION})

    async def _kv_event_sources(self, _http: web.Request) -> web.Response:
        return web.json_response(dict(self._event_sources))

    async def _metrics(self, _http: web.Request) -> web.Response:
        replica = self._replica
        page = render(replica.model, self._model_name, replica.ttft, replica.e2e, replica.lag_max_s, replica.started_s)
        return web.Response(body=page.encode(), headers={"Content-Type": answers.METRICS_KIND})


def _leg_refused(refused: LegRefused) -> Refused:
    kind = "BadRequestError" if refused.status < 500 else "InternalServerError"
    return Refused(refused.status, str(refused), kind)


def _listed(ids: list[int]) -> str:
    return f"[{','.join(map(str, ids))}]"


@web.middleware
async def _errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except Refused as refused:
        return refused.response()
    except web.HTTPRequestEntityTooLarge:
        return Refused(413, "Request body is too large", "Request Entity Too Large").response()
    except web.HTTPNotFound:
        return web.json_response({"detail": "Not Found"}, status=404)
