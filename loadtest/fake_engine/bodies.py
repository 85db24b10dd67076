"""Request bodies of a simulated engine, limited to the fields that it uses, and errors in vLLM's format."""

from __future__ import annotations

from typing import Any

import msgspec
from aiohttp import web

from loadtest.fake_engine import tokens
from loadtest.fake_engine.disagg_http import DisaggFields

PROMPTS_MAX = 256
OUTPUT_TOKENS_DEFAULT = 128


class StreamOptions(msgspec.Struct):
    """OpenAI's `stream_options`, limited to the implemented field."""

    include_usage: bool | None = None


class Body(DisaggFields):
    """The request fields that the engine uses; all others are ignored."""

    model: str | None = None
    messages: list[tokens.Message] | None = None
    prompt: str | list[Any] | None = None
    tools: list[Any] | None = None
    input: str | list[Any] | None = None
    """Only in Responses and speech."""
    system: str | list[dict[str, Any]] | None = None
    """Only in Messages."""
    instructions: str | None = None
    """Only in Responses."""
    stream: bool | None = None
    stream_format: str | None = None
    """Only in speech."""
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    max_output_tokens: int | None = None
    """Only in Responses."""
    min_tokens: int | None = None
    cache_salt: str | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    return_token_ids: bool | None = None

    @property
    def tokens_max(self) -> int | None:
        """The limit of the answer's length; None: no limit."""
        limits = (self.max_completion_tokens, self.max_output_tokens, self.max_tokens)
        return next((limit for limit in limits if limit is not None), None)

    def answer_tokens(self) -> int:
        """Return the length of the answer. The end-of-sequence token comes as soon as `min_tokens` allows it.

        Raises `Refused` for the same values as vLLM.
        """
        most, least = self.tokens_max, self.min_tokens or 0
        if most is not None and most < 1:
            raise Refused(400, f"max_tokens must be at least 1, got {most}.", param="max_tokens")
        if least < 0:
            raise Refused(400, f"min_tokens must be greater than or equal to 0, got {least}.")
        if most is not None and least > most:
            raise Refused(400, f"min_tokens must be less than or equal to max_tokens={most}, got {least}.")
        return least or (OUTPUT_TOKENS_DEFAULT if most is None else most)


BODY = msgspec.json.Decoder(Body)


class Refused(Exception):
    """A request refused with an error body in vLLM's format. `in_stream`: sent as an event, with status 200."""

    def __init__(
        self,
        status: int,
        message: str,
        kind: str = "BadRequestError",
        param: str | None = None,
        *,
        in_stream: bool = False,
    ) -> None:
        super().__init__(message)
        self.status, self.kind, self.param, self.in_stream = status, kind, param, in_stream

    def response(self) -> web.Response:
        """Return the error as vLLM's response."""
        error = {"message": str(self), "type": self.kind, "param": self.param, "code": self.status}
        return json_response({"error": error}, status=self.status)


def source_of(body: Body) -> str:
    """Return the address from which the engine must fetch KV by P2P transfer, or "" if the request names none."""
    params = body.kv_transfer_params
    source = params.remote_kv_source if params is not None else None
    return source.address if source is not None else ""


def render_prompt(body: Body, messages: list[tokens.Message]) -> bytes:
    """Return the prompt of a chat. Raises `Refused`, as vLLM does, for a last message that must be both continued and
    closed."""
    opened = body.continue_final_message
    if opened and body.add_generation_prompt:
        raise Refused(400, "Cannot set both `continue_final_message` and `add_generation_prompt` to True.")
    return tokens.render_chat(messages, body.tools, generate=body.add_generation_prompt, opened=opened)


def conversation(body: Body) -> list[tokens.Message]:
    """Return the chat of a request to `/v1/messages` or `/v1/responses`."""
    system = body.system if body.system is not None else body.instructions
    messages = [tokens.Message("system", system)] if system else []
    if body.messages is not None:
        return messages + body.messages
    if isinstance(body.input, str):
        return [*messages, tokens.Message("user", body.input)]
    try:
        return messages + msgspec.convert(body.input or [], list[tokens.Message])
    except msgspec.ValidationError as error:
        raise Refused(400, str(error), param="input") from None


def prompts_of(prompt: str | list[Any] | None) -> list[bytes]:
    """Return the prompts in the forms that `/v1/completions` accepts: text, token ids, or a list of either."""
    many = prompt if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int) else [prompt]
    prompts: list[bytes] = []
    for one in many[: PROMPTS_MAX + 1]:
        if isinstance(one, str):
            prompts.append(one.encode("utf-8", "surrogatepass"))
        elif isinstance(one, list) and all(type(token) is int for token in one):
            try:
                prompts.append(tokens.from_ids(one))
            except ValueError as error:
                raise Refused(400, str(error), param="prompt") from None
        else:
            raise Refused(400, "prompt: text, token ids, or a list of either", "Bad Request", "prompt")
    if len(prompts) > PROMPTS_MAX:
        raise Refused(400, f"at most {PROMPTS_MAX} prompts in one request", param="prompt")
    if not all(prompts):
        raise Refused(400, "The decoder prompt cannot be empty", param="prompt")
    return prompts


def json_response(data: Any, *, status: int = 200) -> web.Response:  # noqa: ANN401 - whatever JSON can say
    """Return a JSON response. Its content type has no charset, because engines send none."""
    return web.Response(body=msgspec.json.encode(data), status=status, content_type="application/json")
