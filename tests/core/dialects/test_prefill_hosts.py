"""Hosts in what a prefilling engine answers, in the fields of real connectors and in others."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.core.disagg.prefill_hosts import ForeignHost, OwnHosts, check_transfer_params, host_problem, hosts_of

OWN = hosts_of("http://vllm-0.vllm:8000#dp1", "10.0.0.7,fd00::7", "10.0.0.7")
NIXL = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_block_ids": [[1, 2, 3], [4]],
    "remote_engine_id": "0f8fad5b-d9cb-469f-a165-70867728950e_dp0",
    "remote_request_id": "cmpl-my.app.example:80-0",
    "remote_host": "10.0.0.7",
    "remote_port": 5600,
    "tp_size": 1,
    "remote_prefill_cached_tokens": 0,
}
FOREIGN = [
    "169.254.169.254", "169.254.169.254:80", "http://169.254.169.254/latest", "metadata.google.internal", "localhost",
    "127.0.0.1", "0.0.0.0", "::1", "[::1]:80", "::ffff:169.254.169.254", "2130706433", "0x7f.1", "127.1", "010.0.0.7",
    "10.0.0.7,169.254.169.254", "10.0.0.7@169.254.169.254", "http://10.0.0.7@169.254.169.254/", "10.0.0.7#.evil.com",
    "10.0.0.7.evil.com", "tcp://evil:5600",
    "\u0661\u0660.0.0.7", "10.0.0.7\u0000.evil.com", "fe80::1%eth0", "vllm-1.vllm", "",
]  # fmt: skip
PLACES = [
    "remote_host", "remoteHost", "remote_hosts", "remote_bootstrap_addr", "receiver_host", "bootstrap_host", "peer_ip",
    "host2", "REMOTE_HOST", "remote_url", "endpoint", "side-channel-host", "source_address",
]  # fmt: skip


def taken(params: Any, listed: tuple[str, ...] = ()) -> Any:
    """What a decode leg is told."""
    return json.loads(check_transfer_params(json.dumps(params).encode(), OWN, OwnHosts(listed)))


@pytest.mark.parametrize(
    "host", ["10.0.0.7", "fd00::7", "FD00:0::7", "[fd00::7]", "::ffff:10.0.0.7", "vllm-0.vllm", "VLLM-0.vllm."]
)
def test_what_names_the_replicas_own_host_is_repeated(host: str) -> None:
    """By its URL, as its answer came, and of its pod, in whichever spelling."""
    assert taken(NIXL | {"remote_host": host}) == NIXL | {"remote_host": host}
    assert taken({"remote_bootstrap_addr": f"http://{OWN[0]}:8998"}) == {
        "remote_bootstrap_addr": f"http://{OWN[0]}:8998"
    }
    assert taken({"disagg_spec": {"receiver_host": host, "receiver_init_port": [1, 2]}})
    with pytest.raises(ForeignHost):
        check_transfer_params(b'{"remote_host":""}', hosts_of("http://10.0.0.7:8000", "", ""), OwnHosts())


@pytest.mark.parametrize("host", FOREIGN)
@pytest.mark.parametrize("place", PLACES)
def test_a_foreign_host_is_found_under_any_name_of_a_host(place: str, host: str) -> None:
    """Of NIXL, Mooncake, LMCache and SGLang, and of connectors to come; at the top, within objects and lists."""
    for params in ({place: host}, {"a": {place: host}}, {"a": [{place: [["10.0.0.7", host]]}]}, {place: {"v": [host]}}):
        with pytest.raises(ForeignHost):
            taken(NIXL | params)


@pytest.mark.parametrize("written", ["169.254.169.254", "evil.example.com", "evil:80", "http://evil/", "[fd00::9]:1"])
def test_what_is_written_as_an_address_is_one_under_any_name(written: str) -> None:
    """But for names of ids, in which clients' own words may be."""
    for params in ({"at": written}, {"x": [[written]]}, {"x": {"y": written}}, {"remote_port": written}):
        with pytest.raises(ForeignHost):
            taken(NIXL | params)
    assert taken(NIXL | {"request_id": written}) == NIXL | {"request_id": written}


@pytest.mark.parametrize("number", [2130706433, 1.5, [2130706433], {"v": {"host": 1}}])
def test_a_number_is_no_host(number: Any) -> None:
    """Resolvers take 2130706433 for 127.0.0.1."""
    with pytest.raises(ForeignHost):
        taken({"remote_host": number})
    assert taken({"remote_host": None, "remote_port": 1, "peer_tp_size": 2}) is not None


def test_of_names_that_occur_twice_only_the_last_is_repeated() -> None:
    """Whatever an engine's parser would have taken."""
    told = b'{"remote_host":"169.254.169.254","a":{"host":"evil","host":"10.0.0.7"},"remote_host":"10.0.0.7"}'
    made = check_transfer_params(told, OWN, OwnHosts())
    assert json.loads(made) == {"remote_host": "10.0.0.7", "a": {"host": "10.0.0.7"}}
    assert b"169" not in made
    assert b"evil" not in made
    with pytest.raises(ForeignHost):
        check_transfer_params(b'{"remote_host":"10.0.0.7","remote\\u005fhost":"169.254.169.254"}', OWN, OwnHosts())


def test_hosts_may_be_listed() -> None:
    """As addresses, CIDRs and names."""
    listed = ("192.168.0.0/16", "10.9.9.9", "fd12::/32", "Vllm-1.vllm")
    for host in ("192.168.4.5", "10.9.9.9", "fd12::5", "vllm-1.vllm", "::ffff:192.168.4.5"):
        assert taken({"remote_host": host}, listed)
        with pytest.raises(ForeignHost):
            taken({"remote_host": host})
    for host in ("192.169.4.5", "10.9.9.8", "fd13::5", "vllm-2.vllm"):
        with pytest.raises(ForeignHost):
            taken({"remote_host": host}, listed)
    assert not any(map(host_problem, listed))
    assert all(map(host_problem, ("", "10.0.0.1:80", "http://a", "*.vllm", "10.0.0.0/33", "a b", "300.1.1.1")))


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**62), 2**62) | st.text("abcxyz_-", max_size=12),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from("abcd"), inner, max_size=4),
    max_leaves=20,
)


@given(st.dictionaries(st.sampled_from("abcd"), VALUES, max_size=4))
def test_other_fields_are_repeated_as_they_are(fields: dict[str, Any]) -> None:
    """Whatever they are."""
    assert taken(NIXL | fields) == NIXL | fields


@given(VALUES, st.sampled_from(PLACES), st.sampled_from(FOREIGN[:8]))
def test_a_foreign_host_is_found_however_deep(fields: Any, place: str, host: str) -> None:
    """Beside whatever else there is."""
    with pytest.raises(ForeignHost):
        taken(NIXL | {"a": [fields, {"b": {place: [host]}}], "c": fields})


def test_there_is_a_bound() -> None:
    """On depth and texts; a long prompt's blocks are no texts, and take no time."""
    for params in ({"a": ["x"] * 5_000}, json.loads('{"a":' + "[" * 20 + '"x"' + "]" * 20 + "}")):
        with pytest.raises(ForeignHost):
            taken(params)
    told = json.dumps(NIXL | {"remote_block_ids": [list(range(200_000))]}).encode()
    begun_s = time.process_time()
    assert len(check_transfer_params(told, OWN, OwnHosts())) > 1_000_000
    assert time.process_time() - begun_s < 0.05
    with pytest.raises(ForeignHost):
        check_transfer_params(b'{"a":' + b"[" * 100_000 + b'"x"', OWN, OwnHosts())
