"""Responses of APIs other than OpenAI's completions, with the fields that clients and routers read.

Sources: vLLM 0.32.0, entrypoints/anthropic/serving.py (message_stream_converter), entrypoints/openai/responses
(streaming_events.py), entrypoints/speech_to_text/base/serving.py. Speech is not in vLLM itself. Its sources are
vLLM-Omni's docs/serving/speech_api.md and OpenAI's `stream_format`. The audio samples are the bytes of the answer's
text.
"""

from __future__ import annotations

from base64 import b64encode
from typing import Any

import msgspec

from loadtest.fake_engine.shapes import DONE, Job, Shape, encode_json, text_of

STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "abort": None}
AUDIO_RATE_HZ = 24_000


def format_event(kind: str, fields: dict[str, Any]) -> str:
    """Return a named server-sent event; its data repeats the name as `type`."""
    return f"event: {kind}\ndata: {encode_json({'type': kind} | fields)}\n\n"


class Messages(Shape):
    """Responses to `/v1/messages`."""

    prefix = "chatcmpl"

    def events(self, job: Job, index: int, start: int, end: int, finished: bool) -> list[str]:
        """Return text deltas, after the start of the message and of its single block."""
        delta = {"type": "text_delta", "text": text_of(job, index, start, end)}
        events = [format_event("content_block_delta", {"delta": delta, "index": 0})]
        if not start:
            usage = {"input_tokens": self._usage(job)["input_tokens"], "output_tokens": 0}
            started = self._message(job, []) | {"stop_reason": None, "stop_sequence": None, "usage": usage}
            block = {"content_block": {"type": "text", "text": ""}, "index": 0}
            events[:0] = [
                format_event("message_start", {"message": started}),
                format_event("content_block_start", block),
            ]
        return events

    def render_closing(self, job: Job) -> str:
        """Return the ends of the block and of the message; no `[DONE]`."""
        delta = {"stop_reason": STOP_REASONS[job.reason(0)], "stop_sequence": None}
        return (
            format_event("content_block_stop", {"index": 0})
            + format_event("message_delta", {"delta": delta, "usage": self._usage(job)})
            + format_event("message_stop", {})
        )

    def render_response(self, job: Job, more: dict[str, Any]) -> bytes:
        """Return the whole message."""
        message = self._message(job, [{"type": "text", "text": job.text(0)}])
        ended = {"stop_reason": STOP_REASONS[job.reason(0)], "usage": self._usage(job)}
        return msgspec.json.encode(message | ended | more)

    def _message(self, job: Job, content: list[dict[str, Any]]) -> dict[str, Any]:
        fields = {"id": job.response_id, "type": "message", "role": "assistant", "content": content}
        return fields | {"model": self.outlook.model_name}

    def _usage(self, job: Job) -> dict[str, Any]:
        prompt, cached, output = job.counts()
        size = self.outlook.block_tokens
        created = max(0, prompt // size * size - cached)
        usage = {"input_tokens": prompt - cached - created, "output_tokens": output}
        return usage | {"cache_creation_input_tokens": created, "cache_read_input_tokens": cached}


class Responses(Shape):
    """Responses to `/v1/responses`. The first two events are sent before the prompt is computed."""

    prefix = "resp"

    def render_opening(self, job: Job) -> str:
        """Return the events of the response's start."""
        begun = self._response(job, "in_progress", [])
        kinds = ("response.created", "response.in_progress")
        return "".join(_format_numbered_event(job, kind, {"response": begun}) for kind in kinds)

    def events(self, job: Job, index: int, start: int, end: int, finished: bool) -> list[str]:
        """Return text deltas, after the start of the item and of its single part."""
        delta = self._make_position(job) | {"delta": text_of(job, index, start, end), "logprobs": []}
        events = [("response.output_text.delta", delta)]
        if not start:
            item = {"output_index": 0, "item": self._item(job, [], "in_progress")}
            part = self._make_position(job) | {"part": self._part("")}
            events[:0] = [("response.output_item.added", item), ("response.content_part.added", part)]
        return [_format_numbered_event(job, kind, fields) for kind, fields in events]

    def render_closing(self, job: Job) -> str:
        """Return the ends of the part, the item and the response; no `[DONE]`."""
        text = job.text(0)
        item = self._item(job, [self._part(text)], "completed")
        done = [
            ("response.output_text.done", self._make_position(job) | {"text": text, "logprobs": []}),
            ("response.content_part.done", self._make_position(job) | {"part": self._part(text)}),
            ("response.output_item.done", {"output_index": 0, "item": item}),
            (
                "response.completed",
                {"response": self._make_final_response(job)},
            ),  # also for an answer that reached its token limit
        ]
        return "".join(_format_numbered_event(job, kind, fields) for kind, fields in done)

    def render_response(self, job: Job, more: dict[str, Any]) -> bytes:
        """Return the whole response."""
        return msgspec.json.encode(self._make_final_response(job) | more)

    def _make_final_response(self, job: Job) -> dict[str, Any]:
        prompt, cached, output = job.counts()
        usage = {"input_tokens": prompt, "input_tokens_details": {"cached_tokens": cached}, "output_tokens": output}
        usage |= {"output_tokens_details": {"reasoning_tokens": 0}, "total_tokens": prompt + output}
        item = self._item(job, [self._part(job.text(0))], "completed")
        return self._response(job, self._status(job), [item]) | {"usage": usage}

    def _response(self, job: Job, status: str, output: list[dict[str, Any]]) -> dict[str, Any]:
        reason = {"reason": "max_output_tokens"} if status == "incomplete" else None
        fields = {"id": job.response_id, "created_at": job.created, "incomplete_details": reason}
        fields |= {"model": self.outlook.model_name, "object": "response", "output": output, "status": status}
        return fields | {"parallel_tool_calls": True, "tool_choice": "auto", "tools": [], "usage": None}

    def _status(self, job: Job) -> str:
        return "completed" if job.reason(0) == "stop" else "incomplete"

    def _make_position(self, job: Job) -> dict[str, Any]:
        return {"item_id": f"msg_{job.created}", "output_index": 0, "content_index": 0}

    def _item(self, job: Job, content: list[dict[str, Any]], status: str) -> dict[str, Any]:
        item = {"id": f"msg_{job.created}", "content": content, "role": "assistant"}
        return item | {"status": status, "type": "message"}

    def _part(self, text: str) -> dict[str, Any]:
        return {"annotations": [], "text": text, "type": "output_text", "logprobs": None}


class Transcription(Shape):
    """Responses to `/v1/audio/transcriptions`, a form with a file; an event for each piece of the text."""

    prefix, kind = "transcribe", "transcription.chunk"

    def events(self, job: Job, index: int, start: int, end: int, finished: bool) -> list[str]:
        """Return an event with a piece of the text."""
        reason = f',"finish_reason":"{job.reason(index)}","stop_reason":null' if finished else ""
        delta = f'"delta":{{"content":"{text_of(job, index, start, end)}"}}{reason}'
        return [f'{self.head(job)},"choices":[{{{delta}}}]}}\n\n']

    def render_response(self, job: Job, more: dict[str, Any]) -> bytes:
        """Return the whole text."""
        return msgspec.json.encode({"text": job.text(0), "usage": {"type": "duration", "seconds": 1}})


class Speech(Shape):
    """Responses to `/v1/audio/speech` with `stream`: audio bytes as they are generated, without a length."""

    prefix, stream_kind, whole_kind = "speech", "audio/pcm", "audio/wav"

    def events(self, job: Job, index: int, start: int, end: int, finished: bool) -> list[str]:
        """Return samples."""
        return [text_of(job, index, start, end)]

    def render_closing(self, job: Job) -> str:
        """Return no events: the last sample ends the stream."""
        return ""

    def render_response(self, job: Job, more: dict[str, Any]) -> bytes:
        """Return a WAV file: one channel of 16 bits."""
        samples = job.text(0).encode()
        rate, size = AUDIO_RATE_HZ, len(samples)
        head = [b"RIFF", _le(36 + size), b"WAVEfmt ", _le(16), _le(1, 2), _le(1, 2), _le(rate), _le(2 * rate)]
        return b"".join([*head, _le(2, 2), _le(16, 2), b"data", _le(size), samples])


class SpeechEvents(Speech):
    """Responses to `/v1/audio/speech` with `stream_format: sse`: the samples in server-sent events."""

    stream_kind = Shape.stream_kind

    def events(self, job: Job, index: int, start: int, end: int, finished: bool) -> list[str]:
        """Return an event with samples in Base64."""
        audio = b64encode(text_of(job, index, start, end).encode()).decode()
        return [f"data: {encode_json({'type': 'speech.audio.delta', 'audio': audio})}\n\n"]

    def render_closing(self, job: Job) -> str:
        """Return the usage event."""
        prompt, _, output = job.counts()
        usage = {"input_tokens": prompt, "output_tokens": output, "total_tokens": prompt + output}
        return f"data: {encode_json({'type': 'speech.audio.done', 'usage': usage})}\n\n" + DONE


def _format_numbered_event(job: Job, kind: str, fields: dict[str, Any]) -> str:
    return format_event(kind, {"sequence_number": next(job.numbers)} | fields)


def _le(number: int, size: int = 4) -> bytes:
    return number.to_bytes(size, "little")
