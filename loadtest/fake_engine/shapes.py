"""Responses of a simulated engine, in the formats of one API: vLLM 0.32's chat completions and completions.

A shape turns the tokens of a job into the pieces of a stream, or into a whole response. The shapes of other APIs and of
SGLang are in `zoo/`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import msgspec

from loadtest.fake_engine import tokens
from loadtest.fake_engine.disagg_http import DecodeRole, PrefillRole
from loadtest.fake_engine.replica import Choices
from loadtest.fake_engine.request import EngineRequest

DONE = "data: [DONE]\n\n"
EVENTS = "text/event-stream; charset=utf-8"


@dataclass(frozen=True, slots=True)
class Outlook:
    """Common properties of all responses of one engine."""

    model_name: str
    block_tokens: int
    tell_ttft: bool = False
    forces_usage: bool = False
    """True if streams report usage even if the request does not ask for it."""
    streams_reasoning: bool = True


@dataclass(frozen=True, slots=True)
class Job:
    """One accepted HTTP request: the texts of its choices are known in full, only the times of their tokens are not."""

    response_id: str
    shape: Shape
    include_usage: bool
    ids: list[int]
    texts: list[str]
    answer: Choices
    prompt_tokens: list[int]
    created: int
    prompts: list[bytes] | None  # the prompts of the choices, if the request asks for their ids
    requests: list[EngineRequest]
    leg: PrefillRole | DecodeRole | None  # None unless it is a prefill or a decode request
    finish_reason: str
    numbers: Iterator[int]
    """Numbers of the stream's events, for APIs that number them."""

    def reason(self, index: int) -> str:
        """Return the finish reason of a finished choice."""
        return "abort" if self.answer.choices[index].aborted else self.finish_reason

    def text(self, index: int) -> str:
        """Return the text of a finished choice."""
        return text_of(self, index, 0, self.answer.choices[index].ready)

    def counts(self) -> tuple[int, int, int]:
        """Return the tokens so far: of all prompts, of their cached part, of all answers."""
        cached = sum(choice.cached_tokens for choice in self.answer.choices)
        if self.leg is not None and self.leg.found_tokens is not None:
            cached = self.leg.found_tokens
        return sum(self.prompt_tokens), cached, sum(choice.ready for choice in self.answer.choices)


class Shape:
    """vLLM's responses to `/v1/completions`, and the common parts of all shapes."""

    stream_kind = EVENTS
    whole_kind = "application/json"
    head_first = True
    """True if status and headers of a stream are sent before its prompt is computed."""
    prefix, kind, whole_object = "cmpl", "text_completion", "text_completion"

    def __init__(self, outlook: Outlook) -> None:
        self.outlook = outlook

    def render_opening(self, job: Job) -> str:
        """Return the pieces that are sent before the prompt is computed."""
        return ""

    def events(self, job: Job, index: int, start: int, end: int, finished: bool) -> list[str]:
        """Return the events of one choice's tokens from `start` to `end`."""
        head, text = f'{self.head(job)},"choices":[{{"index":{index}', text_of(job, index, start, end)
        ids = prompt_ids = "null"
        if job.prompts is not None:
            ids, prompt_ids = format_token_ids(text), "null" if start else format_token_ids(job.prompts[index])
        rest = f'"logprobs":null,"finish_reason":{_reason(job, index, finished)},"prompt_token_ids":{prompt_ids}'
        return [f'{head},"text":"{text}",{rest},"token_ids":{ids}}}]{self.render_continuous_usage(job)}}}\n\n']

    def render_closing(self, job: Job) -> str:
        """Return the part of the stream after the last token."""
        usage = (
            f'{self.head(job)},"choices":[],"usage":{encode_json(drop_nulls(self.usage(job)))}}}\n\n'
            if self.reports(job)
            else ""
        )
        return usage + DONE

    def render_response(self, job: Job, more: dict[str, Any]) -> bytes:
        """Return the response to a request that does not stream; `more`: additional top-level fields."""
        choices = [self.choice(job, index, job.text(index)) for index in range(len(job.texts))]
        whole = {"id": job.response_id, "object": self.whole_object, "created": job.created}
        whole["model"] = self.outlook.model_name
        return msgspec.json.encode(whole | more | {"choices": choices, "usage": self.usage(job)})

    def choice(self, job: Job, index: int, text: str) -> dict[str, Any]:
        """Return one choice of a whole response."""
        ended = {"logprobs": None, "finish_reason": job.reason(index), "stop_reason": None}
        choice: dict[str, Any] = {"index": index, "text": text, **ended}
        if job.prompts is not None:
            choice["token_ids"] = tokens.ids(text.encode())
            choice["prompt_token_ids"] = tokens.ids(job.prompts[index])
        return choice

    def reports(self, job: Job) -> bool:
        """True if a stream ends with its usage."""
        return job.include_usage or self.outlook.forces_usage

    def usage(self, job: Job) -> dict[str, Any]:
        """Return the usage of the whole response."""
        prompt, cached, output = job.counts()
        own = {"ttft_s": max(choice.ttft_s for choice in job.answer.choices)} if self.outlook.tell_ttft else {}
        details = {"cached_tokens": cached, "created_cache_tokens": self.count_cache_created(prompt, cached)}
        return {
            **own,
            "prompt_tokens": prompt,
            "total_tokens": prompt + output,
            "completion_tokens": output,
            "prompt_tokens_details": {**details, "multimodal_tokens": None},
            "completion_tokens_details": None,
        }

    def count_cache_created(self, prompt: int, cached: int) -> int | None:
        """Return the prompt tokens in blocks that are new in the cache; None if this API does not report it."""
        return None

    def head(self, job: Job) -> str:
        """Return the first fields of an event, without its end."""
        outlook = self.outlook
        return (
            f'data: {{"id":"{job.response_id}","object":"{self.kind}","created":{job.created},'
            f'"model":"{outlook.model_name}"'
        )

    def render_continuous_usage(self, job: Job) -> str:
        """Return the usage in each event with `--enable-force-include-usage` (vLLM's continuous usage)."""
        if not self.outlook.forces_usage:
            return ""
        prompt, _, output = job.counts()
        return f',"usage":{{"prompt_tokens":{prompt},"total_tokens":{prompt + output},"completion_tokens":{output}}}'


class Chat(Shape):
    """vLLM's responses to `/v1/chat/completions`."""

    prefix, kind, whole_object = "chatcmpl", "chat.completion.chunk", "chat.completion"

    def events(self, job: Job, index: int, start: int, end: int, finished: bool) -> list[str]:
        """Return the events of one choice's tokens; before the first token, the role."""
        head, so_far = f'{self.head(job)},"choices":[{{"index":{index}', self.render_continuous_usage(job)
        text = text_of(job, index, start, end)
        ids = format_token_ids(text) if job.prompts is not None else "null"
        rest = f'"logprobs":null,"finish_reason":{_reason(job, index, finished)},"token_ids":{ids}'
        events = [f'{head},"delta":{{"content":"{text}"}},{rest}}}]{so_far}}}\n\n']
        if not start:
            prompt_ids = format_token_ids(job.prompts[index]) if job.prompts is not None else "null"
            role = f'{head},"delta":{{"role":"assistant","content":""}},"logprobs":null,"finish_reason":null}}]'
            events.insert(0, f'{role},"prompt_token_ids":{prompt_ids}{so_far}}}\n\n')
        return events

    def render_response(self, job: Job, more: dict[str, Any]) -> bytes:
        """Return the response, with the ids of the prompt if the request asks for them."""
        ids = {"prompt_token_ids": tokens.ids(job.prompts[0])} if job.prompts is not None else {}
        return super().render_response(job, ids | more)

    def choice(self, job: Job, index: int, text: str) -> dict[str, Any]:
        """Return one choice of a whole response."""
        choice: dict[str, Any] = {"index": index, "message": {"role": "assistant", "content": text, "refusal": None}}
        choice |= {"logprobs": None, "finish_reason": job.reason(index), "stop_reason": None}
        return choice | ({"token_ids": tokens.ids(text.encode())} if job.prompts is not None else {})

    def count_cache_created(self, prompt: int, cached: int) -> int | None:
        """Return the tokens of full blocks that were computed."""
        return max(0, prompt // self.outlook.block_tokens * self.outlook.block_tokens - cached)


def text_of(job: Job, index: int, start: int, end: int) -> str:
    """Return the text of one choice's tokens."""
    return job.texts[index][start * tokens.BYTES_PER_TOKEN : end * tokens.BYTES_PER_TOKEN]


def drop_nulls(fields: dict[str, Any]) -> dict[str, Any]:
    """Return the fields that have a value, at each level: vLLM's streams omit the others from the usage."""
    return {
        name: drop_nulls(value) if isinstance(value, dict) else value
        for name, value in fields.items()
        if value is not None
    }


def encode_json(fields: dict[str, Any]) -> str:
    """Return JSON without white space."""
    return msgspec.json.encode(fields).decode()


def format_token_ids(text: str | bytes) -> str:
    """Return the token ids of a text as JSON."""
    ids = tokens.ids(text.encode() if isinstance(text, str) else text)
    return f"[{','.join(map(str, ids))}]"


def _reason(job: Job, index: int, finished: bool) -> str:
    return f'"{job.reason(index)}","stop_reason":null' if finished else "null"
