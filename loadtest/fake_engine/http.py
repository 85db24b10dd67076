"""HTTP interface of the simulated replica: paths, bodies and errors of vLLM 0.32 that a router uses, or those of a
member of the zoo.

The formats were compared with recorded responses of a real vLLM. The following is the same as in vLLM:

- Status and headers are sent before the prefill starts.
- The role and the first text arrive with the first token.
- Unknown fields are ignored, and a missing `model` is accepted.
- `return_token_ids` and prompts of token ids are supported, so that a stream can be continued.

The following is different:

- If a request has `min_tokens`, the answer has exactly that length: the end of sequence comes as early as allowed.
- Otherwise an answer has `max_tokens` tokens (default 128), as with `ignore_eos`.
- A request is refused if its answer is too long for the context, not if only its limit is.
- `n`, `stop`, `logprobs` and sampling parameters have no effect.
"""

from __future__ import annotations

import itertools
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from typing import Any

import msgspec
from aiohttp import web
from xxhash import xxh3_64_hexdigest

from loadtest.common import answers
from loadtest.fake_engine import tokens
from loadtest.fake_engine.bodies import (
    BODY,
    Body,
    Refused,
    conversation,
    json_response,
    prompts_of,
    render_prompt,
    source_of,
)
from loadtest.fake_engine.disagg_http import DecodeRole, LegRefused, Link, Moment, PrefillRole
from loadtest.fake_engine.replica import Choices, SimulatedReplica
from loadtest.fake_engine.request import EngineRequest, RequestRefused
from loadtest.fake_engine.shapes import DONE, Job, Shape, encode_json
from loadtest.fake_engine.zoo.faces import face_of
from loadtest.fake_engine.zoo.member import DENSE, Member
from loadtest.fake_engine.zoo.vllm import CHAT, COMPLETIONS, MESSAGES, RESPONSES, SPEECH, TRANSCRIPTIONS
from router.core.types.disagg_types import KvConnector, Role

BODY_BYTES_MAX = 64 << 20
TRUE = ("true", "1", "True", "on", "yes")
"""Values of a form field that mean true."""

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class FakeEngineApp:
    """The routes of one replica."""

    def __init__(
        self,
        replica: SimulatedReplica,
        model_name: str,
        event_sources: Mapping[str, Any],
        *,
        tell_ttft: bool = False,
        link: Link | None = None,
        member: Member = DENSE,
    ) -> None:
        """Create the routes. `link` None: no disaggregated prefill."""
        self.face = face_of(member, model_name, replica, event_sources, tell_ttft=tell_ttft)
        self._replica = replica
        self._link = link
        self._model_name = model_name
        self._ids = itertools.count(1)
        self._started = int(time.time())

    def application(self) -> web.Application:
        """Return the application. Run it with `handler_cancellation`, so that a client disconnect cancels its
        request."""
        app = web.Application(client_max_size=BODY_BYTES_MAX, middlewares=[self._errors])
        app.router.add_post(CHAT, self._chat)
        app.router.add_post(COMPLETIONS, self._completion)
        app.router.add_post(MESSAGES, self._chat)
        app.router.add_post(RESPONSES, self._chat)
        app.router.add_post(TRANSCRIPTIONS, self._transcription)
        app.router.add_post(SPEECH, self._speech)
        app.router.add_post("/v1/embeddings", self._embeddings)
        app.router.add_post("/tokenize", self._tokenize)
        app.router.add_post("/detokenize", self._detokenize)
        app.router.add_post("/reset_prefix_cache", self._reset_prefix_cache)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/health", self._health)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_get("/load", self._load)
        app.router.add_routes(self.face.routes())
        return app

    # --- generation

    async def _chat(self, http: web.Request) -> web.StreamResponse:
        body = await self._body(http)
        if body.messages is None and http.path != RESPONSES:
            raise Refused(400, "Field required: messages", "Bad Request", "messages")
        return await self._generate(http, body, [render_prompt(body, conversation(body))], self.face.shapes[http.path])

    async def _completion(self, http: web.Request) -> web.StreamResponse:
        body = await self._body(http)
        return await self._generate(http, body, prompts_of(body.prompt), self.face.shapes[COMPLETIONS])

    async def _transcription(self, http: web.Request) -> web.StreamResponse:
        """Transcribe the file of a form; the text depends only on the file's bytes."""
        form = await http.post()
        file = form.get("file")
        if not isinstance(file, web.FileField):
            raise Refused(400, "Field required: file", "Bad Request", "file")
        prompt = b"<|audio|>" + xxh3_64_hexdigest(file.file.read()).encode()
        body = Body(stream=str(form.get("stream", "")) in TRUE, max_tokens=int(str(form.get("max_tokens", 16))))
        self._check_model(str(form.get("model", "")) or None)
        return await self._generate(http, body, [prompt], self.face.shapes[TRANSCRIPTIONS])

    async def _speech(self, http: web.Request) -> web.StreamResponse:
        body = await self._body(http)
        in_events = body.stream_format == "sse"
        body.stream = body.stream or in_events
        shape = self.face.shapes[f"{SPEECH}:sse" if in_events else SPEECH]
        return await self._generate(http, body, prompts_of(body.input), shape)

    async def _generate(self, http: web.Request, body: Body, prompts: list[bytes], shape: Shape) -> web.StreamResponse:
        if (full := self.face.full(bool(body.stream))) is not None:
            if full.in_stream:
                return await self._refused_in_stream(http, shape, full)
            raise full
        job = self._job(http, body, prompts, shape)
        try:
            if body.stream:
                return await self._stream(http, job)
            await self._begin(job)
            while not job.answer.finished:
                await job.answer.more()
            cached = sum(choice.cached_tokens for choice in job.answer.choices)
            more = await job.leg.complete(cached) if job.leg is not None else {}
            return web.Response(body=shape.render_response(job, more), content_type=shape.whole_kind)
        except LegRefused as refused:
            raise _leg_refused(refused) from None
        finally:
            for request_id in job.ids:
                self._replica.cancel(request_id)
            if job.leg is not None:
                job.leg.close()

    async def _begin(self, job: Job) -> None:
        """Queue the requests after the connector permits it (disaggregated prefill). Raises `LegRefused`."""
        await self.face.awake()
        handover = await job.leg.prepare() if job.leg is not None else None
        for index, request in enumerate(job.requests):
            self._replica.submit(replace(request, handover=handover), job.answer, index)

    def _job(self, http: web.Request, body: Body, prompts: list[bytes], shape: Shape) -> Job:
        """Return the job of a request. Every prompt is checked before the first one is queued: all or none."""
        output_n, model = body.answer_tokens(), self._replica.model
        ended = "stop" if body.min_tokens and output_n != body.tokens_max else "length"
        if self._link is not None and (self._link.handshake, self._link.role) == (KvConnector.SGLANG, Role.PREFILL):
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
        id_ = f"{shape.prefix}-{name}" if shape.prefix else name
        leg, now_s = self._leg(body, sum(counts)), int(time.time())
        job = Job(id_, shape, usage, [], texts, answer, counts, now_s, told, [], leg, ended, itertools.count())
        for index, prompt in enumerate(prompts):
            text = tokens.Text(prompt + texts[index].encode(), body.cache_salt or "")
            keys = tokens.chain(text.data, model.limits.block_tokens, text.salt)
            job.ids.append(next(self._ids))
            job.requests.append(EngineRequest(job.ids[-1], counts[index], output_n, keys, text, source_of(body)))
        return job

    def _leg(self, body: Body, prompt_tokens: int) -> PrefillRole | DecodeRole | None:
        if self._link is None:
            return None
        try:
            return self._link.leg_of(body, prompt_tokens, self._replica.model.limits.block_tokens)
        except LegRefused as refused:
            raise _leg_refused(refused) from None

    async def _stream(self, http: web.Request, job: Job) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": job.shape.stream_kind})
        if job.shape.head_first:
            await response.prepare(http)
        if opening := job.shape.render_opening(job):
            await response.write(opening.encode())
        try:
            await self._begin(job)
        except LegRefused as refused:
            if not response.prepared:
                raise
            await response.write(self._event(_leg_refused(refused)))
            return response
        sent = [0] * len(job.texts)
        parts: list[str] = []
        finished = False
        while not finished:
            await job.answer.more()
            finished = job.answer.finished
            for index, choice in enumerate(job.answer.choices):
                if choice.ready > sent[index] or (choice.aborted and finished):
                    parts += job.shape.events(job, index, sent[index], choice.ready, choice.finished)
                    sent[index] = choice.ready
            if finished:
                parts.append(job.shape.render_closing(job))
            try:
                if not response.prepared:
                    await response.prepare(http)
                await response.write("".join(parts).encode())
            except ConnectionResetError:
                return response
            parts.clear()
            if job.leg is not None and self._link is not None and not finished:
                await self._link.inject_fault(job.leg.role, Moment.ANSWERED)
        return response

    async def _refused_in_stream(self, http: web.Request, shape: Shape, refused: Refused) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": shape.stream_kind})
        await response.prepare(http)
        await response.write(self._event(refused))
        return response

    def _event(self, refused: Refused) -> bytes:
        return f"data: {encode_json(self.face.error_event(refused))}\n\n{DONE}".encode()

    # --- other routes

    async def _body(self, http: web.Request) -> Body:
        try:
            body = BODY.decode(await http.read())
        except msgspec.DecodeError as error:  # includes ValidationError
            raise Refused(400, str(error), "Bad Request") from None
        self._check_model(body.model)
        if body.cache_salt == "":
            raise Refused(400, "Parameter 'cache_salt' must be a non-empty string if provided.", "Bad Request")
        return body

    def _check_model(self, name: str | None) -> None:
        if name is not None and name != self._model_name:
            raise Refused(404, f"The model `{name}` does not exist.", "NotFoundError", "model")

    async def _embeddings(self, http: web.Request) -> web.Response:
        await self._body(http)
        raise Refused(400, "The model does not support Embeddings API")

    async def _tokenize(self, http: web.Request) -> web.Response:
        body = await self._body(http)
        messages = body.messages
        data = render_prompt(body, messages) if messages is not None else prompts_of(body.prompt)[0]
        ids = tokens.ids(data)
        longest = self._replica.model.context_tokens_max
        return json_response({"count": len(ids), "max_model_len": longest, "tokens": ids})

    async def _detokenize(self, http: web.Request) -> web.Response:
        try:
            ids = msgspec.json.decode(await http.read(), type=dict[str, Any])["tokens"]
            return json_response({"prompt": tokens.from_ids(ids).decode(errors="replace")})
        except (msgspec.DecodeError, KeyError, TypeError, ValueError):
            raise Refused(400, "Field required: tokens, a list of token ids", "Bad Request", "tokens") from None

    async def _reset_prefix_cache(self, _http: web.Request) -> web.Response:
        return json_response({"success": self._replica.model.reset_prefix_cache()})

    async def _models(self, _http: web.Request) -> web.Response:
        return json_response(self.face.models(self._started))

    async def _health(self, _http: web.Request) -> web.Response:
        return web.Response()

    async def _load(self, _http: web.Request) -> web.Response:
        model = self._replica.model
        return json_response({"server_load": model.running_n + model.waiting_n})

    async def _metrics(self, _http: web.Request) -> web.Response:
        return web.Response(body=self.face.metrics().encode(), headers={"Content-Type": answers.METRICS_KIND})

    @web.middleware
    async def _errors(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            return await handler(request)
        except Refused as refused:
            return self.face.error(request.path, refused)
        except web.HTTPRequestEntityTooLarge:
            too_large = Refused(413, "Request body is too large", "Request Entity Too Large")
            return self.face.error(request.path, too_large)
        except web.HTTPNotFound:
            return json_response({"detail": "Not Found"}, status=404)


def _leg_refused(refused: LegRefused) -> Refused:
    kind = "BadRequestError" if refused.status < 500 else "InternalServerError"
    return Refused(refused.status, str(refused), kind)
