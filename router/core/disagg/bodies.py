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
"""

from __future__ import annotations

import msgspec
from msgspec import Raw

from router.core.dialects.tenant_isolation import CHAT, MESSAGES, RESPONSES, with_fields
from router.core.disagg.splittable_requests import DisaggFields, read_fields
from router.core.prompts.json_fields import ABSENT, UNREADABLE, has_value
from router.core.types.disagg_types import KvConnector

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


class ConnectorBodies:
    """Fields of both stages for one KV connector, and the data that passes from one stage to the other.

    - `id_`: names the two stages; digits if the connector has `integer_ids`.
    - `address`, `rank`: those of the prefilling engine (`PrefillStage.address`).
    """

    def prefill_fields(self, path: str, asked: DisaggFields, id_: str, address: str, rank: int | None) -> list[bytes]:
        """Return the fields of the prefill stage: its limit of one token, and the transfer."""
        raise NotImplementedError

    def transfer_params(self, answer: bytes) -> bytes | None:
        """Return the data that the decode stage needs from the whole answer of the prefill stage; None if no blocks can
        be fetched. Raises UNREADABLE."""
        return b""

    def decode_fields(self, id_: str, address: str, rank: int | None, params: bytes) -> bytes:
        """Return the fields of the decode stage. `params` is the result of `transfer_params`."""
        raise NotImplementedError

    def proven_address(self, page: bytes, address: str, rank: int | None) -> str:
        """Return the address for decode stages, after the server at `address` answered a probe with `page`; "" if the
        engine is not ready. Raises UNREADABLE."""
        return address


class _Nixl(ConnectorBodies):
    def prefill_fields(self, path: str, asked: DisaggFields, id_: str, address: str, rank: int | None) -> list[bytes]:
        unknown = dict.fromkeys(("remote_engine_id", "remote_block_ids", "remote_host", "remote_port"))
        return [*_one_token(path, asked), _params({**_SENDS, **unknown})]

    def transfer_params(self, answer: bytes) -> bytes | None:
        """Return the object that the decode stage repeats, unchanged."""
        params = bytes(_decode_answer(answer).kv_transfer_params)
        return params if params.startswith(b"{") and params != b"{}" else None

    def decode_fields(self, id_: str, address: str, rank: int | None, params: bytes) -> bytes:
        return b'"kv_transfer_params":' + params


class _Mooncake(ConnectorBodies):
    def prefill_fields(self, path: str, asked: DisaggFields, id_: str, address: str, rank: int | None) -> list[bytes]:
        return [*_one_token(path, asked), *_no_stop(path, asked), _params({**_SENDS, "transfer_id": id_})]

    def transfer_params(self, answer: bytes) -> bytes | None:
        return None if _has_model_stopped(_decode_answer(answer)) else b""

    def decode_fields(self, id_: str, address: str, rank: int | None, params: bytes) -> bytes:
        server, _, engine = address.partition(ENGINE_ID_SEPARATOR)
        source = {"transfer_id": id_, "remote_bootstrap_addr": f"http://{server}", "remote_engine_id": engine}
        return _params({"do_remote_prefill": True, "do_remote_decode": False, **source})

    def proven_address(self, page: bytes, address: str, rank: int | None) -> str:
        """Return the address with the id of the rank's engine, which is different for each process."""
        found = _decode_ranks(page).get(str(rank or 0))
        return f"{address}{ENGINE_ID_SEPARATOR}{found.engine_id}" if found is not None and found.engine_id else ""


class _Offloading(ConnectorBodies):
    def prefill_fields(self, path: str, asked: DisaggFields, id_: str, address: str, rank: int | None) -> list[bytes]:
        params: dict[str, object] = {"remote_decoder": {"kv_request_id": id_}}
        if path == MESSAGES:  # thinking may then be longer than the answer (vLLM, anthropic/protocol.py)
            params["do_remote_decode"] = True
        return [*_one_token(path, asked), _params(params)]

    def decode_fields(self, id_: str, address: str, rank: int | None, params: bytes) -> bytes:
        host, port = _host_port(address)
        return _params({"remote_prefiller": {"kv_request_id": id_, "remote_host": host, "remote_port": port}})


class _Sglang(ConnectorBodies):
    def prefill_fields(self, path: str, asked: DisaggFields, id_: str, address: str, rank: int | None) -> list[bytes]:
        return [self.decode_fields(id_, address, rank, b"")]

    def decode_fields(self, id_: str, address: str, rank: int | None, params: bytes) -> bytes:
        """Return the fields of both stages, and null for fields that a client may have set."""
        host, port = _host_port(address)
        return b'"bootstrap_host":%b,"bootstrap_port":%d,"bootstrap_room":%b,"disagg_prefill_dp_rank":%b,%b' % (
            msgspec.json.encode(host),
            port,
            id_.encode(),
            b"null" if rank is None else b"%d" % rank,
            b'"bootstrap_pair_key":null,"decode_tp_size":null',
        )


_BODIES: dict[KvConnector, ConnectorBodies] = {
    KvConnector.NIXL: _Nixl(),
    KvConnector.MOONCAKE: _Mooncake(),
    KvConnector.OFFLOADING: _Offloading(),
    KvConnector.SGLANG: _Sglang(),
}


def prefill_body(path: str, body: bytes, connector: KvConnector, id_: str, address: str, rank: int | None) -> bytes:
    """Return the body of the prefill stage: the prompt, and one token that does not stream."""
    asked = read_fields(body)
    fields = [b'"stream":false']
    if has_value(asked.stream_options):
        fields.append(b'"stream_options":null')
    if has_value(asked.return_token_ids):
        fields.append(b'"return_token_ids":false')
    fields += _BODIES[connector].prefill_fields(path, asked, id_, address, rank)
    return with_fields(body, b",".join(fields))


def kv_transfer_params(connector: KvConnector, answer: bytes) -> bytes | None:
    """Return the data that the decode stage needs from the whole answer of the prefill stage; b"" if it needs none.
    None if no blocks can be fetched, or the answer cannot be read."""
    try:
        return _BODIES[connector].transfer_params(answer)
    except UNREADABLE:
        return None


def decode_body(body: bytes, connector: KvConnector, id_: str, address: str, rank: int | None, params: bytes) -> bytes:
    """Return the body of the decode stage: the client's request, and the source of the prompt's blocks. `params` is the
    result of `kv_transfer_params`; the other parameters are those of the prefill stage."""
    return with_fields(body, _BODIES[connector].decode_fields(id_, address, rank, params))


def proven_address(connector: KvConnector, page: bytes, address: str, rank: int | None) -> str:
    """Return the address for decode stages, after the server at `address` answered a probe with `page`; "" if the
    engine is not ready, or the page cannot be read."""
    try:
        return _BODIES[connector].proven_address(page, address, rank)
    except UNREADABLE:
        return ""


# -- fields and answers ------------------------------------------------------------------------------------------------

_SENDS: dict[str, object] = {"do_remote_decode": True, "do_remote_prefill": False}  # vLLM's prefill stage


class _Rank(msgspec.Struct):
    engine_id: str = ""


class _Choice(msgspec.Struct):
    finish_reason: str | None = None


class _Answer(msgspec.Struct):
    """Finish reason of a prefill stage's answer, as in Responses, Messages and the two other APIs, and its transfer
    object. Fields of the same names at deeper levels, such as the status of a message, have another meaning."""

    kv_transfer_params: Raw = ABSENT
    status: str | None = None
    stop_reason: str | None = None
    choices: list[_Choice] = []


_decode_answer = msgspec.json.Decoder(_Answer).decode
_decode_ranks = msgspec.json.Decoder(dict[str, _Rank]).decode


def _params(params: dict[str, object]) -> bytes:
    return b'"kv_transfer_params":' + msgspec.json.encode(params)


def _one_token(path: str, asked: DisaggFields) -> list[bytes]:
    """Return a limit of one token in the spelling that the body has. vLLM takes both of chat's, and gives priority to
    the newer one."""
    if path == RESPONSES:
        return [b'"max_output_tokens":1']
    newer = path == CHAT and has_value(asked.max_completion_tokens)
    fields = [b'"max_completion_tokens":1'] if newer else []
    if not newer or has_value(asked.max_tokens):
        fields.append(b'"max_tokens":1')
    if has_value(asked.min_tokens):
        fields.append(b'"min_tokens":0')
    return fields


def _no_stop(path: str, asked: DisaggFields) -> list[bytes]:
    """Return fields that let the engine answer with one token, whichever token it is."""
    fields = [] if path == MESSAGES else [b'"ignore_eos":true']
    for name in ("stop", "stop_sequences", "stop_token_ids"):
        if has_value(getattr(asked, name)):
            fields.append(b'"%b":null' % name.encode())
    return fields


def _has_model_stopped(said: _Answer) -> bool:
    """True if the model itself ended the answer, not the limit of one token."""
    if said.status == "completed" or said.stop_reason in ("end_turn", "stop_sequence"):
        return True
    return any(choice.finish_reason == "stop" for choice in said.choices)


def _host_port(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)
