"""Requests that may be continued on another replica, and the body of the next request.

The next request is nearly always a completion of token ids, the prompt's ids and those sent so far, with the sampling
fields of the first. vLLM 0.32 and SGLang 0.5.23 add nothing to a prompt of ids. They take the same sampling defaults on
`/v1/completions` as on their chat (vLLM's generation config), and give the same finish reasons. A field that would make
the second half differ from the unbroken answer is refused. Every unknown field is refused too, since engines learn new
ones.

- Counts over the text so far begin anew: presence and frequency penalties, `bad_words`, `repetition_detection`,
  thinking budgets. vLLM's repetition penalty counts the prompt too, and is carried. The random sequence of a seed
  begins anew too, which shows if the temperature is not 0.
- A grammar begins anew: `response_format`, `structured_outputs`, tools that must be called.
- Tools that must be called are a grammar, too. Tools that may be called are taken out of a chat's text by a parser of
  the engine, which `/v1/completions` does not use: such a chat is continued as a chat (tool_chat.py).
- SGLang returns no ids on a chat that streams, and no engine returns any on `/v1/messages`.
- Media are not in the ids. Several choices, several prompts, beams and `echo` do not make one answer.

Fields read in vLLM 0.32 (entrypoints/openai/{completion,chat_completion}/protocol.py) and SGLang 0.5.23
(srt/entrypoints/openai/protocol.py).
"""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import Raw, Struct

from router.core.dialects.tenant_isolation import CHAT, COMPLETIONS, MESSAGES
from router.core.prompts import sliced_json
from router.core.prompts.json_fields import ABSENT, UNREADABLE, flag_of, is_true, parse_integer, value_is_true

OFF, EXACT = "off", "exact"  # values by which a request selects the failover of its stream
COMPLETION_TOKENS = 16  # max_tokens of a completion that has no such field, or null
STOP_CHARS_MAX = 1_024  # the longest stop string of a stream that may be continued

# Reasons against a failover. The first ones, up to "stop", are known before the request is sent.
REASONS = (
    "body", "engine", "path", "field", "choices", "prompts", "echo", "logprobs", "ids", "media", "tools", "grammar",
    "penalty", "seed", "stop",
    "no_ids", "tool_call", "reasoning", "no_point", "too_long", "spent", "answer", "budget", "replica", "failed",
    "late", "differs", "again",
)  # fmt: skip

# Fields that the next request has as the first one had them.
_CARRIED = frozenset(
    (
        "model", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "logit_bias", "allowed_token_ids",
        "stop", "stop_token_ids", "include_stop_str_in_output", "no_stop_trim", "ignore_eos", "skip_special_tokens",
        "spaces_between_special_tokens", "cache_salt", "extra_key", "priority", "session_id", "user", "stream",
        "stream_options", "stream_interval", "seed", "presence_penalty", "frequency_penalty", "lora_path", "watermark",
        "watermarking", "custom_labels", "routing_key",
    )
)  # fmt: skip
# Fields that only define the prompt, or its conversion to ids, or have no effect in the engine: the ids are known.
_LEFT_OUT = frozenset(
    (
        "messages", "prompt", "tools", "tool_choice", "parallel_tool_calls", "add_generation_prompt",
        "continue_final_message", "add_special_tokens", "chat_template", "chat_template_kwargs", "documents",
        "reasoning_effort", "include_reasoning", "separate_reasoning", "stream_reasoning", "truncate_prompt_tokens",
        "truncation_side", "request_id", "rid", "metadata", "store", "prompt_cache_key", "prompt_cache_retention",
        "safety_identifier", "service_tier", "verbosity", "max_tokens", "max_completion_tokens", "min_tokens",
        "length_penalty", "return_token_ids", "return_tokens_as_token_ids", "session_params", "media_io_kwargs",
        "mm_processor_kwargs", "mm_payload", "routed_experts_prompt_start",
    )
)  # fmt: skip
# Fields that must be without effect: name -> (reason against a failover, values without effect in addition to null,
# false, 0 and empty values).
_NOTHING: dict[str, tuple[str, tuple[object, ...]]] = {
    "n": ("choices", (1,)),
    "best_of": ("choices", (1,)),
    "use_beam_search": ("choices", ()),
    "echo": ("echo", ()),
    "suffix": ("echo", ()),
    "logprobs": ("logprobs", ()),
    "top_logprobs": ("logprobs", ()),
    "prompt_logprobs": ("logprobs", ()),
    "logprob_token_ids": ("logprobs", ()),
    "return_hidden_states": ("logprobs", ()),
    "response_format": ("grammar", ({"type": "text"},)),
    "structured_outputs": ("grammar", ()),
    "guided_json": ("grammar", ()),
    "guided_regex": ("grammar", ()),
    "guided_choice": ("grammar", ()),
    "guided_grammar": ("grammar", ()),
    "regex": ("grammar", ()),
    "ebnf": ("grammar", ()),
    "json_schema": ("grammar", ()),
    "bad_words": ("penalty", ()),
    "repetition_detection": ("penalty", ()),
    "thinking_token_budget": ("penalty", (-1,)),
    "functions": ("tools", ()),
    "function_call": ("tools", ("none",)),
    "prompt_embeds": ("media", ()),
    "modalities": ("media", (["text"],)),
    "audio": ("media", ()),
    "stop_regex": ("stop", ()),
    "kv_transfer_params": ("field", ()),
    "ec_transfer_params": ("field", ()),
    "vllm_xargs": ("field", ()),
    "logits_processors": ("field", ()),
    "custom_logit_processor": ("field", ()),
    "custom_params": ("field", ()),
    "return_prompt_text": ("field", ()),
    "bootstrap_host": ("field", ()),
    "bootstrap_port": ("field", ()),
    "bootstrap_room": ("field", ()),
}
_COUNTS = frozenset(("n", "best_of"))
_FLAGS = frozenset(("use_beam_search", "echo", "return_hidden_states", "return_prompt_text"))
_EMPTY: tuple[object, ...] = (None, False, 0, "", [], {})

_decode_fields = msgspec.json.Decoder(dict[str, Raw]).decode
_encode = msgspec.json.encode


class FailoverRefused(Exception):
    """A stream that cannot be continued as the unbroken answer. `reason` is one of REASONS."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class FailoverPlan(Struct):
    """Conditions and fields for continuing the stream of one request."""

    path: str  # CHAT or COMPLETIONS
    engine: str  # kind of engine, "vllm" or "sglang"
    kept: bytes  # fields of the next request that are unchanged: a JSON object without its last brace
    tokens_max: int | None  # tokens that the answer may have; None: limited by the model's context only
    tokens_min: int
    # Characters at the end of the engine's output in which a stop string may have begun. held_chars: the engine holds
    # them back. open_chars: it sends them, because stop strings are part of the answer.
    held_chars: int
    open_chars: int
    wants_usage: bool  # the stream must end with its usage
    context_tokens: int  # context length of the model, for prompt and answer
    calls_tools: bool  # tools may be called: the next request is the chat again, and its body must be kept
    limit: bytes  # the name of the chat's token limit
    added: bytes = b""  # fields that the router adds to its client's, each after a comma

    def ask_usage(self) -> None:
        """Request usage at the end of the stream, which the client did not request."""
        self.wants_usage = True
        self.added = b',"stream_options":{"include_usage":true}'

    def most(self, prompt_tokens: int) -> int:
        """Return the number of tokens that the answer to a prompt of this length may have."""
        return self.tokens_max if self.tokens_max is not None else self.context_tokens - prompt_tokens

    def next_body(self, prompt: bytes, prompt_tokens: int, said_tokens: int) -> bytes:
        """Return the next request, for `/v1/completions`. It must have a limit: a completion without one, or with null,
        has COMPLETION_TOKENS.

        - `prompt`: a JSON array of ids: the prompt's, and those of the tokens sent so far.
        - `said_tokens`: number of tokens sent so far, less than the limit.
        """
        fields = [self.kept, self.added, b',"max_tokens":%d' % (self.most(prompt_tokens) - said_tokens)]
        if self.tokens_min > said_tokens:
            fields.append(b',"min_tokens":%d' % (self.tokens_min - said_tokens))
        fields += [b',"return_token_ids":true,"prompt":', prompt, b"}"]
        return b"".join(fields)

    def next_chat(self, body: bytes, text: str, said_tokens: int) -> bytes:
        """Return the chat of this body again, with a text of this number of tokens as its last message, left open. If
        no text was sent it is the same chat."""
        fields = self.added + b',"return_token_ids":true'
        if self.tokens_max is not None:
            fields += b',"%b":%d' % (self.limit, self.tokens_max - said_tokens)
        if self.tokens_min:
            fields += b',"min_tokens":%d' % max(0, self.tokens_min - said_tokens)
        return _chat_body(body, text, fields)


def plan_of(path: str, body: bytes, engines: frozenset[str], *, media: bool, context_tokens: int) -> FailoverPlan:
    """Return the plan of a streaming request on a model of these kinds of engines. Raises FailoverRefused.

    - `media`: its prompt has parts that are no text, or cannot be interpreted.
    - `context_tokens`: the context length of the model.
    """
    if path not in (CHAT, COMPLETIONS):
        raise FailoverRefused("no_ids" if path == MESSAGES else "path")
    engine = next(iter(engines)) if len(engines) == 1 else ""
    if engine != "vllm" and (engine != "sglang" or path == CHAT):
        raise FailoverRefused("engine")
    if media and path == CHAT:
        raise FailoverRefused("media")
    try:
        fields = sliced_json.read(_decode_fields, body)
        _check_fields(fields)
        calls_tools = path == CHAT and _may_call(fields)
        tokens_max, tokens_min = _limits(path, fields)
        held, opened = _stop_chars(fields, engine)
        wants_usage = _wants_usage(fields)
    except UNREADABLE as error:
        raise FailoverRefused("body") from error
    if path == COMPLETIONS and bytes(fields.get("prompt", b"")).lstrip()[:1] == b"[":
        _one_prompt(bytes(fields["prompt"]))
    if calls_tools and opened:
        raise FailoverRefused("stop")  # a stop string may have begun in the text so far
    return FailoverPlan(
        path=path,
        engine=engine,
        kept=_encode({name: raw for name, raw in fields.items() if name in _CARRIED})[:-1],
        tokens_max=tokens_max,
        tokens_min=tokens_min,
        held_chars=held,
        open_chars=opened,
        wants_usage=wants_usage,
        context_tokens=context_tokens,
        calls_tools=calls_tools,
        limit=b"max_completion_tokens" if "max_completion_tokens" in fields else b"max_tokens",
    )


def with_ids(body: bytes) -> bytes:
    """Return the same request with token ids requested. A last duplicate key wins in the JSON parsers of vLLM and
    SGLang."""
    end = body.rindex(b"}")
    return b"".join((memoryview(body)[:end], b',"return_token_ids":true', memoryview(body)[end:]))


def _check_fields(fields: dict[str, Raw]) -> None:
    """Raise FailoverRefused if a field would make the continuation another answer."""
    for name, raw in fields.items():
        if name in _NOTHING:
            reason, nothing = _NOTHING[name]
            value = sliced_json.value(raw)
            if value in _EMPTY or value in nothing or (name in _FLAGS and flag_of(value) is False):
                continue
            if name not in _COUNTS or parse_integer(value) != 1:
                raise FailoverRefused(reason)
        elif name not in _CARRIED and name not in _LEFT_OUT and bytes(raw) != b"null":
            raise FailoverRefused("field")
    # A client that relies on ids would get those of pieces that may be generated again.
    if _is_true(fields, "return_token_ids") or _is_true(fields, "return_tokens_as_token_ids"):
        raise FailoverRefused("ids")
    if _value(fields, "tools") and _value(fields, "tool_choice") not in (None, "auto", "none"):
        raise FailoverRefused("tools")  # a call that must be made is made by a grammar
    if _value(fields, "presence_penalty") or _value(fields, "frequency_penalty"):
        raise FailoverRefused("penalty")
    if _value(fields, "seed") is not None and _value(fields, "temperature") not in (0, 0.0):
        raise FailoverRefused("seed")


def _may_call(fields: dict[str, Raw]) -> bool:
    """True if the answer may call tools."""
    return bool(_value(fields, "tools")) and _value(fields, "tool_choice") != "none"


def _value(fields: dict[str, Raw], name: str) -> Any:  # noqa: ANN401 - any JSON
    raw = fields.get(name)
    return None if raw is None else sliced_json.value(raw)


def _is_true(fields: dict[str, Raw], name: str) -> bool:
    return is_true(fields.get(name, ABSENT))


def _limits(path: str, fields: dict[str, Raw]) -> tuple[int | None, int]:
    """Return the maximum and minimum number of tokens of the answer. Raises FailoverRefused."""
    most = _number(fields, "max_tokens")
    if path == CHAT:
        given = _number(fields, "max_completion_tokens")
        most = given if given is not None else most
    elif most is None:
        most = COMPLETION_TOKENS
    return most, _number(fields, "min_tokens") or 0


def _number(fields: dict[str, Raw], name: str) -> int | None:
    """Return a token count as engines read it. None if it is absent. Raises FailoverRefused for a value that they
    refuse."""
    value = _value(fields, name)
    number = parse_integer(value)
    if number is None and value is not None:
        raise FailoverRefused("field")
    return number


def _stop_chars(fields: dict[str, Raw], engine: str) -> tuple[int, int]:
    """Return `held_chars` and `open_chars`: vLLM's are the longest stop string less one. Raises FailoverRefused for
    stop strings of SGLang, which searches for them in text that it has already sent."""
    stop = _value(fields, "stop")
    listed = [stop] if isinstance(stop, str) else stop if isinstance(stop, list) else []
    longest = max((len(each) for each in listed if isinstance(each, str)), default=0)
    if longest > STOP_CHARS_MAX or (longest > 1 and engine != "vllm"):
        raise FailoverRefused("stop")
    before = max(0, longest - 1)
    return (0, before) if _is_true(fields, "include_stop_str_in_output") else (before, 0)


def _wants_usage(fields: dict[str, Raw]) -> bool:
    options = _value(fields, "stream_options")
    return isinstance(options, dict) and value_is_true(options.get("include_usage"))


def _one_prompt(prompt: bytes) -> None:
    """Raise FailoverRefused for a list of several prompts, of texts or of ids."""
    inside = prompt.lstrip()[1:].lstrip()[:1]
    if inside in (b"[", b'"') and not sliced_json.is_single(prompt):
        raise FailoverRefused("prompts")


def _chat_body(body: bytes, text: str, fields: bytes) -> bytes:
    """Return the same chat with this text as its last message, and with these fields. They override the same fields of
    the body: of two equal names the engines' parsers take the last."""
    end = body.rindex(b"}")
    parts = [memoryview(body)[:end]]
    if text:
        messages = bytes(sliced_json.read(_decode_fields, body)["messages"]).rstrip()[:-1].rstrip()
        comma = b"" if messages.endswith(b"[") else b","
        last = _encode({"role": "assistant", "content": text})
        parts.append(memoryview(b',"messages":%b%b%b]' % (messages, comma, last)))
        parts.append(memoryview(b',"continue_final_message":true,"add_generation_prompt":false'))
    parts += [memoryview(fields), memoryview(body)[end:]]
    return b"".join(parts)
