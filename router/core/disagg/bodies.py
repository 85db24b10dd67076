"""Bodies of the two stages of a request with disaggregated prefill: one engine prefills its prompt, another decodes.

Spliced fields follow the client's own fields, so they override them (tenant_isolation.py). The rest of the body is not
touched. The fields depend on the KV connector. They were read in vLLM 0.32 (distributed/kv_transfer/kv_connector/v1,
and v1/kv_offload/tiering/p2p/manager.py) and SGLang 0.5.23 (srt/entrypoints/openai/protocol.py,
srt/managers/io_struct.py, srt/disaggregation):

- NIXL: the answer of the prefill stage has an object at its top level. The decode stage repeats it, once its hosts are
  known to be the prefilling engine's own (prefill_hosts.py). It is null if the prompt fills no block, or if the request
  ended by anything except its length or a stop. Then no blocks can be fetched.
- Mooncake: both stages have one transfer id. The prefill stage must end by its length. Otherwise its blocks are freed
  at once, and the decoding engine waits for them until a timeout of minutes. So no stop condition may apply.
- Offloading: both stages have one request id, and the decode stage names the address of the prefilling engine's p2p
  tier.
- SGLang: both stages have one `bootstrap_room`, and the address of the prefilling engine's bootstrap server. Its
  prefill answers with one token for any limit. If its data-parallel rank is not the one that the number of the
  `bootstrap_room` implies, the rank must be sent.

vLLM answers a second choice from blocks that the first one has freed. A request for the log probabilities of its prompt
makes vLLM compute the prompt anew. Neither kind of request is split. SGLang's further samples would use the same
`bootstrap_room` again.
"""

from __future__ import annotations

import re

import msgspec
from msgspec import Raw

from router.core.dialects.tenant_isolation import CHAT, COMPLETIONS, GENERATE, MESSAGES, RESPONSES, with_fields
from router.core.prompts import sliced_json
from router.core.prompts.json_fields import ABSENT, UNREADABLE, flag, has_value, number
from router.core.types.disagg_types import KvConnector

VLLM, SGLANG = "vllm", "sglang"  # kinds of engines, as in /v1/models
SPLIT: dict[str, frozenset[str]] = {
    VLLM: frozenset((CHAT, COMPLETIONS, MESSAGES, RESPONSES)),
    SGLANG: frozenset((CHAT, COMPLETIONS, RESPONSES, GENERATE)),
}
"""Paths whose bodies take the fields, by kind of engine."""
HEADERS = (b"x-prefiller-host-port", b"x-encoder-hosts-ports", b"x-data-parallel-host-port")
"""Headers that name other engines to llm-d's sidecar (llm-d-router, pkg/common/routing). None may come from a
client."""
PREFILLER_HEADER = HEADERS[0]
OVERRIDES = (
    b"x-override-bootstrap-host",
    b"x-override-bootstrap-port",
    b"x-override-bootstrap-room",
    b"x-override-routed-dp-rank",
    b"x-override-disagg-prefill-dp-rank",
    b"x-override-rid",
)
"""Headers that SGLang, if configured so, reads in preference to the body (srt/entrypoints/request_headers.py)."""
ENGINE_ID_SEPARATOR = "#"  # stands between a Mooncake server's address and its engine's id


class _DisaggFields(msgspec.Struct):
    """Fields that decide if a body may be split, and how its prefill stage is made to end."""

    prompt: Raw = ABSENT
    text: Raw = ABSENT
    input_ids: Raw = ABSENT
    input_embeds: Raw = ABSENT
    prompt_embeds: Raw = ABSENT
    n: Raw = ABSENT
    best_of: Raw = ABSENT
    use_beam_search: Raw = ABSENT
    echo: Raw = ABSENT
    prompt_logprobs: Raw = ABSENT
    logprob_start_len: Raw = ABSENT
    sampling_params: Raw = ABSENT
    session_params: Raw = ABSENT
    background: Raw = ABSENT
    previous_response_id: Raw = ABSENT
    tools: Raw = ABSENT
    max_tokens: Raw = ABSENT
    max_completion_tokens: Raw = ABSENT
    min_tokens: Raw = ABSENT
    stream_options: Raw = ABSENT
    return_token_ids: Raw = ABSENT
    stop: Raw = ABSENT
    stop_sequences: Raw = ABSENT
    stop_token_ids: Raw = ABSENT


class _Sampling(msgspec.Struct):
    n: Raw = ABSENT


class _Tool(msgspec.Struct):
    type: str = "function"


class _Choice(msgspec.Struct):
    finish_reason: str | None = None


class _Answer(msgspec.Struct):
    """Finish reason of a prefill stage's answer, as in Responses, Messages and the two other APIs, and its transfer
    object. Fields of the same names at deeper levels, such as the status of a message, have another meaning."""

    kv_transfer_params: Raw = ABSENT
    status: str | None = None
    stop_reason: str | None = None
    choices: list[_Choice] = []


_decode_wishes = msgspec.json.Decoder(_DisaggFields).decode
_decode_sampling = msgspec.json.Decoder(_Sampling).decode
_decode_tools = msgspec.json.Decoder(list[_Tool]).decode
_decode_answer = msgspec.json.Decoder(_Answer).decode
_BATCH = re.compile(rb"\[\s*[\[\"{]")


def can_disaggregate(path: str, body: bytes, kinds: frozenset[str]) -> bool:
    """True if one engine may prefill the prompt of this request and another may decode it, given the kinds of engines
    that serve its model. False if the body cannot be read."""
    if not kinds or not all(path in SPLIT.get(kind, ()) for kind in kinds):
        return False
    try:
        wishes = sliced_json.read(_decode_wishes, body)
        if path == RESPONSES and not _is_plain_response(wishes):
            return False
        if path == GENERATE and has_value(wishes.sampling_params):
            wishes.n = _decode_sampling(wishes.sampling_params).n
        return _is_alone(wishes)
    except UNREADABLE:
        return False


def _is_alone(wishes: _DisaggFields) -> bool:
    """True if the request has one prompt and one choice, and needs the prompt for its continuation only."""
    one = all(not has_value(wish) or number(wish) == 1 for wish in (wishes.n, wishes.best_of))
    no = all(not has_value(wish) or flag(wish) is False for wish in (wishes.echo, wishes.use_beam_search))
    prompts = (wishes.prompt, wishes.text, wishes.input_ids)
    whole = not any(_BATCH.match(memoryview(each)) for each in prompts)
    others = (wishes.prompt_logprobs, wishes.input_embeds, wishes.prompt_embeds, wishes.session_params)
    start = wishes.logprob_start_len
    return one and no and whole and not any(map(has_value, others)) and (not has_value(start) or number(start) == -1)


def _is_plain_response(wishes: _DisaggFields) -> bool:
    """True if a Responses request is one pass through the model: no tools of the engine's own, no earlier response."""
    if has_value(wishes.background) and flag(wishes.background) is not False:
        return False
    if has_value(wishes.previous_response_id):
        return False
    return not has_value(wishes.tools) or all(tool.type == "function" for tool in _decode_tools(wishes.tools))


# -- prefill stage -----------------------------------------------------------------------------------------------------


def prefill_body(path: str, body: bytes, handshake: KvConnector, id_: str, address: str, rank: int | None) -> bytes:
    """Return the body of the prefill stage: the prompt, and one token that does not stream.

    - `id_`: names the two stages; for SGLang a `bootstrap_room` in digits.
    - `address`, `rank`: those of the prefilling engine (`PrefillStage.address`).
    """
    fields = [b'"stream":false']
    try:
        wishes = sliced_json.read(_decode_wishes, body)
    except UNREADABLE:  # it was read before placement
        wishes = _DisaggFields()
    if has_value(wishes.stream_options):
        fields.append(b'"stream_options":null')
    if has_value(wishes.return_token_ids):
        fields.append(b'"return_token_ids":false')
    if handshake is KvConnector.SGLANG:
        fields.append(_bootstrap(id_, address, rank))
        return with_fields(body, b",".join(fields))
    fields += _one_token(path, wishes)
    if handshake is KvConnector.MOONCAKE:
        fields += _build_no_stop_fields(path, wishes)
    fields.append(b'"kv_transfer_params":' + msgspec.json.encode(_prefill_params(path, handshake, id_)))
    return with_fields(body, b",".join(fields))


def _one_token(path: str, wishes: _DisaggFields) -> list[bytes]:
    """Return a limit of one token in the spelling that the body has. vLLM takes both of chat's, and gives priority to
    the newer one."""
    if path == RESPONSES:
        return [b'"max_output_tokens":1']
    newer = path == CHAT and has_value(wishes.max_completion_tokens)
    fields = [b'"max_completion_tokens":1'] if newer else []
    if not newer or has_value(wishes.max_tokens):
        fields.append(b'"max_tokens":1')
    if has_value(wishes.min_tokens):
        fields.append(b'"min_tokens":0')
    return fields


def _build_no_stop_fields(path: str, wishes: _DisaggFields) -> list[bytes]:
    """Return fields that let the engine answer with one token, whichever token it is."""
    fields = [] if path == MESSAGES else [b'"ignore_eos":true']
    for name in ("stop", "stop_sequences", "stop_token_ids"):
        if has_value(getattr(wishes, name)):
            fields.append(b'"%b":null' % name.encode())
    return fields


def _prefill_params(path: str, handshake: KvConnector, id_: str) -> dict[str, object]:
    if handshake is KvConnector.OFFLOADING:
        told: dict[str, object] = {"remote_decoder": {"kv_request_id": id_}}
        if path == MESSAGES:  # thinking may then be longer than the answer (vLLM, anthropic/protocol.py)
            told["do_remote_decode"] = True
        return told
    legs: dict[str, object] = {"do_remote_decode": True, "do_remote_prefill": False}
    if handshake is KvConnector.MOONCAKE:
        return {**legs, "transfer_id": id_}
    return {
        **legs,
        **dict.fromkeys(("remote_engine_id", "remote_block_ids", "remote_host", "remote_port")),
    }


def kv_transfer_params(handshake: KvConnector, answer: bytes) -> bytes | None:
    """Return the data that the decode stage needs from the whole answer of the prefill stage. For NIXL it is the object
    to be repeated, unchanged; b"" if none is needed. None if no blocks can be fetched, or the answer cannot be read."""
    if handshake is not KvConnector.NIXL and handshake is not KvConnector.MOONCAKE:
        return b""
    try:
        said = _decode_answer(answer)
    except UNREADABLE:
        return None
    if handshake is KvConnector.MOONCAKE:
        return None if _has_model_stopped(said) else b""
    told = bytes(said.kv_transfer_params)
    return told if told.startswith(b"{") and told != b"{}" else None


def _has_model_stopped(said: _Answer) -> bool:
    """True if the model itself ended the answer, not the limit of one token."""
    if said.status == "completed" or said.stop_reason in ("end_turn", "stop_sequence"):
        return True
    return any(choice.finish_reason == "stop" for choice in said.choices)


# -- decode stage ------------------------------------------------------------------------------------------------------


def decode_body(body: bytes, handshake: KvConnector, id_: str, address: str, rank: int | None, params: bytes) -> bytes:
    """Return the body of the decode stage: the client's request, and the source of the prompt's blocks. `params` is the
    result of `kv_transfer_params`; the other parameters are those of the prefill stage."""
    if handshake is KvConnector.SGLANG:
        return with_fields(body, _bootstrap(id_, address, rank))
    if handshake is not KvConnector.NIXL:
        params = msgspec.json.encode(_decode_params(handshake, id_, address))
    return with_fields(body, b'"kv_transfer_params":' + params)


def _decode_params(handshake: KvConnector, id_: str, address: str) -> dict[str, object]:
    if handshake is KvConnector.MOONCAKE:
        server, _, engine = address.partition(ENGINE_ID_SEPARATOR)
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "transfer_id": id_,
            "remote_bootstrap_addr": f"http://{server}",
            "remote_engine_id": engine,
        }
    host, port = _host_port(address)
    return {"remote_prefiller": {"kv_request_id": id_, "remote_host": host, "remote_port": port}}


def _bootstrap(room: str, address: str, rank: int | None) -> bytes:
    """Return the fields of both stages, and null for fields that a client may have set."""
    host, port = _host_port(address)
    return b'"bootstrap_host":%b,"bootstrap_port":%d,"bootstrap_room":%b,"disagg_prefill_dp_rank":%b,%b' % (
        msgspec.json.encode(host),
        port,
        room.encode(),
        b"null" if rank is None else b"%d" % rank,
        b'"bootstrap_pair_key":null,"decode_tp_size":null',
    )


def _host_port(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)
