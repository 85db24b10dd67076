"""External interface of SGLang: its metrics page, /server_info, errors, streams and KV events.

Source: SGLang 0.5.23.

- Names and labels: srt/observability/metrics_collector.py.
- Errors and events: srt/entrypoints/openai/serving_base.py, serving_chat.py and sse_utils.py.
- The full queue: srt/managers/scheduler.py.
- `kv_events` of /server_info: srt/runtime_context.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from aiohttp import web

from loadtest.fake_engine.bodies import Refused, json_response
from loadtest.fake_engine.shapes import Chat, Job, Outlook, Shape, encode_json, text_of
from loadtest.fake_engine.zoo.pages import sglang_page
from loadtest.fake_engine.zoo.vllm import CHAT, COMPLETIONS, Face

VERSION, EARLIER = "0.5.23", "0.5.8"
FULL = "The request queue is full."


class SglangFace(Face):
    """External interface of one SGLang replica."""

    owned_by = "sglang"

    def _shapes(self, outlook: Outlook) -> dict[str, Shape]:
        return super()._shapes(outlook) | {CHAT: SglangChat(outlook), COMPLETIONS: SglangCompletion(outlook)}

    def routes(self) -> list[web.RouteDef]:
        """Return the pages that not every engine has."""
        pages = [web.get(path, self._server_info) for path in ("/server_info", "/get_server_info")]
        return [*pages, web.get("/v1/loads", self._loads), web.post("/flush_cache", self._flush_cache)]

    def metrics(self) -> str:
        """Return the `/metrics` page."""
        return sglang_page(self._replica.model, self.model_name, self.member)

    def full(self, streams: bool) -> Refused | None:
        """Return the refusal of a further request if the queue is full (`--max-queued-requests`), else None."""
        limit = self.member.queued_max
        if limit is None or self._replica.model.waiting_n + 1 <= limit:
            return None
        return Refused(503, FULL, "SERVICE_UNAVAILABLE" if streams else "503", in_stream=streams)

    def error(self, path: str, refused: Refused) -> web.Response:
        """Return an error as a response; SGLang's are flat."""
        return json_response(_error(refused), status=refused.status)

    def error_event(self, refused: Refused) -> dict[str, Any]:
        """Return an error as the data of an event."""
        return {"error": _error(refused)}

    @property
    def _version_name(self) -> str:
        return EARLIER if self.member.earlier else VERSION

    async def _server_info(self, _http: web.Request) -> web.Response:
        limits = self._replica.model.limits
        info: dict[str, Any] = {
            "version": self._version_name,
            "served_model_name": self.model_name,
            "page_size": limits.block_tokens,
        }
        info |= {"dp_size": 1, "tp_size": self.member.tp, "pp_size": self.member.pp}
        if not self.member.earlier:
            info["kv_events"] = _kv_events(self._sources, limits.block_tokens)
        return json_response(info)

    async def _loads(self, _http: web.Request) -> web.Response:
        model = self._replica.model
        load = {"dp_rank": 0, "num_running_reqs": model.running_n, "num_waiting_reqs": model.waiting_n}
        return json_response({"version": self._version_name, "loads": [load | {"token_usage": model.kv_usage}]})

    async def _flush_cache(self, _http: web.Request) -> web.Response:
        done = self._replica.model.reset_prefix_cache()
        return web.Response(text="Cache flushed.\n" if done else "Flush cache failed.\n", status=200 if done else 400)


class SglangChat(Chat):
    """Responses to `/v1/chat/completions`. The finish reason has a separate event."""

    prefix = ""
    head_first = False

    def events(self, job: Job, index: int, start: int, end: int, finished: bool) -> list[str]:
        """Return the events of one choice's tokens; before the first, the role. Reasoning that is not streamed is one
        event."""
        hidden = 0 if self.outlook.streams_reasoning else len(job.texts[index]) // 8  # tokens: half of them
        events = [] if start else [self._event(job, index, {"role": "assistant", "content": ""})]
        if start < hidden and (end >= hidden or finished):
            events.append(self._event(job, index, {}, reasoning=text_of(job, index, 0, min(hidden, end))))
        if end > max(start, hidden):
            events.append(self._event(job, index, {"content": text_of(job, index, max(start, hidden), end)}))
        if finished:
            events.append(self._event(job, index, {}, reason=job.reason(index)))
        return events

    def choice(self, job: Job, index: int, text: str) -> dict[str, Any]:
        """Return one choice of a whole response."""
        message = {"role": "assistant", "content": text, "reasoning_content": None, "tool_calls": None}
        ended = {"logprobs": None, "finish_reason": job.reason(index), "matched_stop": None}
        return {"index": index, "message": message, **ended}

    def usage(self, job: Job) -> dict[str, Any]:
        """Return the usage of the whole response, with `--enable-cache-report`."""
        return _usage(job)

    def _event(
        self, job: Job, index: int, delta: dict[str, Any], reason: str | None = None, reasoning: str | None = None
    ) -> str:
        choice = {"index": index, "delta": {"reasoning_content": reasoning, **delta}, "logprobs": None}
        choice |= {"finish_reason": reason, "matched_stop": None}
        return f'{self.head(job)},"choices":[{encode_json(choice)}]}}\n\n'

    def render_continuous_usage(self, job: Job) -> str:
        """Return "": only the last event has usage."""
        return ""


class SglangCompletion(Shape):
    """Responses to `/v1/completions`."""

    prefix = ""
    head_first = False

    def events(self, job: Job, index: int, start: int, end: int, finished: bool) -> list[str]:
        """Return the event of one choice's tokens."""
        choice = {"index": index, "text": text_of(job, index, start, end), "logprobs": None}
        choice |= {"finish_reason": job.reason(index) if finished else None, "matched_stop": None}
        return [f'{self.head(job)},"choices":[{encode_json(choice)}],"usage":null}}\n\n']

    def choice(self, job: Job, index: int, text: str) -> dict[str, Any]:
        """Return one choice of a whole response."""
        ended = {"logprobs": None, "finish_reason": job.reason(index), "matched_stop": None}
        return {"index": index, "text": text, **ended}

    def usage(self, job: Job) -> dict[str, Any]:
        """Return the usage of the whole response, with `--enable-cache-report`."""
        return _usage(job)


def _kv_events(sources: Mapping[str, Any], block_tokens: int) -> dict[str, Any] | None:
    """Return SGLang's description of the publisher that vLLM describes as `sources`."""
    if "0" not in sources:
        return None
    source = sources["0"]
    endpoint, replay = urlsplit(source["endpoint"]), urlsplit(source["replay_endpoint"])
    return {
        "publisher": "zmq",
        "endpoint_host": endpoint.hostname,
        "endpoint_port_base": endpoint.port,
        "topic": source["topic"],
        "block_size": block_tokens,
        "dp_size": 1,
        "replay_endpoint_port_base": replay.port,
    }


def _usage(job: Job) -> dict[str, Any]:
    prompt, cached, output = job.counts()
    usage = {"prompt_tokens": prompt, "total_tokens": prompt + output, "completion_tokens": output}
    details = {"cached_tokens": cached} if cached else None
    return usage | {"prompt_tokens_details": details, "reasoning_tokens": 0, "completion_tokens_details": None}


def _error(refused: Refused) -> dict[str, Any]:
    fields = {"object": "error", "message": str(refused), "type": refused.kind}
    return fields | {"param": refused.param, "code": refused.status}
