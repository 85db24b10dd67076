"""The two legs of one request: a body that has its prompt prefilled at one engine, and a body that has it decoded at
another one.

What is spliced in stands behind the client's own fields, so it is the last word on what they say (tenancy.py); nothing
else of a body is touched. The fields, by handshake, as read in vLLM 0.32 (distributed/kv_transfer/kv_connector/v1, and
v1/kv_offload/tiering/p2p/manager.py) and SGLang 0.5.23 (srt/entrypoints/openai/protocol.py, srt/managers/io_struct.py,
srt/disaggregation):

- NIXL: the prefill leg's answer has an object at its top level that the decode leg repeats, once its hosts are known to
  be the prefilling engine's own (own_hosts.py). It is null where the prompt fills no block, or the request ended by
  anything but its length or a stop: then nothing can be fetched.
- Mooncake: both legs have one transfer id. The prefill leg must end by its length, or its blocks are freed at once and
  the decoding engine waits for them until a timeout of minutes, so nothing may stop it before.
- Offloading: both legs have one request id, and the decode leg says where the prefilling engine's p2p tier listens.
- SGLang: both legs have one room, and the address of the prefilling engine's bootstrap server. Its prefill answers with
  one token whatever the limit is; on another data-parallel rank than the room's number says it wants to be told which.

vLLM answers more than one choice from blocks that the first one has freed, and asks for prompts' log probabilities
compute the prompt anew, so such requests are not split. SGLang's further samples would meet in rooms already used.
"""

from __future__ import annotations

import re

import msgspec
from msgspec import Raw

from router.core.dialects.tenancy import CHAT, COMPLETIONS, GENERATE, MESSAGES, RESPONSES, spliced
from router.core.facts.legs import Handshake
from router.core.prompts import slices
from router.core.prompts.bodies import ABSENT, UNREADABLE, flag, given, number

VLLM, SGLANG = "vllm", "sglang"  # kinds of engines, as /v1/models says
SPLIT: dict[str, frozenset[str]] = {
    VLLM: frozenset((CHAT, COMPLETIONS, MESSAGES, RESPONSES)),
    SGLANG: frozenset((CHAT, COMPLETIONS, RESPONSES, GENERATE)),
}
"""Paths whose bodies take the fields, by kind of engine."""
HEADERS = (b"x-prefiller-host-port", b"x-encoder-hosts-ports", b"x-data-parallel-host-port")
"""Headers by which llm-d's sidecar is told of other engines (llm-d-router, pkg/common/routing); none may come from a
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
"""Headers that SGLang, where it is told to, heeds before the body (srt/entrypoints/request_headers.py)."""
ENGINE_MARK = "#"  # stands between a Mooncake server's address and its engine's id


class _Wishes(msgspec.Struct):
    """What decides whether a body may be split, and how its prefill leg is told to end."""

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
    """How the answer of a prefill leg ended, as Responses, Messages and the two others say it, and what it transfers.
    Fields of the same names further within, as the status of a message, say something else."""

    kv_transfer_params: Raw = ABSENT
    status: str | None = None
    stop_reason: str | None = None
    choices: list[_Choice] = []


_decode_wishes = msgspec.json.Decoder(_Wishes).decode
_decode_sampling = msgspec.json.Decoder(_Sampling).decode
_decode_tools = msgspec.json.Decoder(list[_Tool]).decode
_decode_answer = msgspec.json.Decoder(_Answer).decode
_BATCH = re.compile(rb"\[\s*[\[\"{]")


def may_split(path: str, body: bytes, kinds: frozenset[str]) -> bool:
    """Whether the prompt of this request may be prefilled at another engine than decodes it, where its model is served
    by these kinds of engines. What cannot be read may not."""
    if not kinds or not all(path in SPLIT.get(kind, ()) for kind in kinds):
        return False
    try:
        wishes = slices.read(_decode_wishes, body)
        if path == RESPONSES and not _is_plain_response(wishes):
            return False
        if path == GENERATE and given(wishes.sampling_params):
            wishes.n = _decode_sampling(wishes.sampling_params).n
        return _is_alone(wishes)
    except UNREADABLE:
        return False


def _is_alone(wishes: _Wishes) -> bool:
    """Whether there is one prompt and one choice, and nothing is asked of the prompt but to be gone on from."""
    one = all(not given(wish) or number(wish) == 1 for wish in (wishes.n, wishes.best_of))
    no = all(not given(wish) or flag(wish) is False for wish in (wishes.echo, wishes.use_beam_search))
    prompts = (wishes.prompt, wishes.text, wishes.input_ids)
    whole = not any(_BATCH.match(memoryview(each)) for each in prompts)
    others = (wishes.prompt_logprobs, wishes.input_embeds, wishes.prompt_embeds, wishes.session_params)
    start = wishes.logprob_start_len
    return one and no and whole and not any(map(given, others)) and (not given(start) or number(start) == -1)


def _is_plain_response(wishes: _Wishes) -> bool:
    """Whether a Responses request is one pass through the model: no tools of the engine's own, no earlier response."""
    if given(wishes.background) and flag(wishes.background) is not False:
        return False
    if given(wishes.previous_response_id):
        return False
    return not given(wishes.tools) or all(tool.type == "function" for tool in _decode_tools(wishes.tools))


# -- the prefill leg ---------------------------------------------------------------------------------------------------


def prefill_body(path: str, body: bytes, handshake: Handshake, id_: str, address: str, rank: int | None) -> bytes:
    """The body of the prefill leg: the prompt, and one token that does not stream. `id_` names the legs, as a room of
    SGLang's in digits; `address` and `rank` are those of the prefilling engine (`PrefillLeg.address`)."""
    fields = [b'"stream":false']
    try:
        wishes = slices.read(_decode_wishes, body)
    except UNREADABLE:  # was read before it was placed
        wishes = _Wishes()
    if given(wishes.stream_options):
        fields.append(b'"stream_options":null')
    if given(wishes.return_token_ids):
        fields.append(b'"return_token_ids":false')
    if handshake is Handshake.SGLANG:
        fields.append(_bootstrap(id_, address, rank))
        return spliced(body, b",".join(fields))
    fields += _one_token(path, wishes)
    if handshake is Handshake.MOONCAKE:
        fields += _unstopped(path, wishes)
    fields.append(b'"kv_transfer_params":' + msgspec.json.encode(_prefill_params(path, handshake, id_)))
    return spliced(body, b",".join(fields))


def _one_token(path: str, wishes: _Wishes) -> list[bytes]:
    """A limit of one token in the spelling that the body has: vLLM takes both of chat's, and heeds the newer one."""
    if path == RESPONSES:
        return [b'"max_output_tokens":1']
    newer = path == CHAT and given(wishes.max_completion_tokens)
    fields = [b'"max_completion_tokens":1'] if newer else []
    if not newer or given(wishes.max_tokens):
        fields.append(b'"max_tokens":1')
    if given(wishes.min_tokens):
        fields.append(b'"min_tokens":0')
    return fields


def _unstopped(path: str, wishes: _Wishes) -> list[bytes]:
    """Fields with which one token is answered whatever it is."""
    fields = [] if path == MESSAGES else [b'"ignore_eos":true']
    for name in ("stop", "stop_sequences", "stop_token_ids"):
        if given(getattr(wishes, name)):
            fields.append(b'"%b":null' % name.encode())
    return fields


def _prefill_params(path: str, handshake: Handshake, id_: str) -> dict[str, object]:
    if handshake is Handshake.OFFLOADING:
        told: dict[str, object] = {"remote_decoder": {"kv_request_id": id_}}
        if path == MESSAGES:  # thinking may then be longer than the answer (vLLM, anthropic/protocol.py)
            told["do_remote_decode"] = True
        return told
    legs: dict[str, object] = {"do_remote_decode": True, "do_remote_prefill": False}
    if handshake is Handshake.MOONCAKE:
        return {**legs, "transfer_id": id_}
    return {
        **legs,
        **dict.fromkeys(("remote_engine_id", "remote_block_ids", "remote_host", "remote_port")),
    }


def transferred(handshake: Handshake, answer: bytes) -> bytes | None:
    """What the decode leg needs of the prefill leg's whole answer: for NIXL the object that it repeats, as it is; b""
    where it needs nothing. None where nothing can be fetched, or the answer cannot be read."""
    if handshake is not Handshake.NIXL and handshake is not Handshake.MOONCAKE:
        return b""
    try:
        said = _decode_answer(answer)
    except UNREADABLE:
        return None
    if handshake is Handshake.MOONCAKE:
        return None if _stopped(said) else b""
    told = bytes(said.kv_transfer_params)
    return told if told.startswith(b"{") and told != b"{}" else None


def _stopped(said: _Answer) -> bool:
    """Whether the model itself came to an end, and not the limit of one token."""
    if said.status == "completed" or said.stop_reason in ("end_turn", "stop_sequence"):
        return True
    return any(choice.finish_reason == "stop" for choice in said.choices)


# -- the decode leg ----------------------------------------------------------------------------------------------------


def decode_body(body: bytes, handshake: Handshake, id_: str, address: str, rank: int | None, params: bytes) -> bytes:
    """The body of the decode leg: what the client asked for, and where the prompt's blocks come from. `params` is what
    `transferred` found; the others are those of the prefill leg."""
    if handshake is Handshake.SGLANG:
        return spliced(body, _bootstrap(id_, address, rank))
    if handshake is not Handshake.NIXL:
        params = msgspec.json.encode(_decode_params(handshake, id_, address))
    return spliced(body, b'"kv_transfer_params":' + params)


def _decode_params(handshake: Handshake, id_: str, address: str) -> dict[str, object]:
    if handshake is Handshake.MOONCAKE:
        server, _, engine = address.partition(ENGINE_MARK)
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
    """What both legs are told, and null for what a client may have said besides."""
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
