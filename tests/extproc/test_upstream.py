"""What the upstream's own tests of pickers want of one, restated here; each says which one it is.

They are of kubernetes-sigs/gateway-api-inference-extension: pkg/lwepp/handlers (request_test, response_test,
server_test) and conformance/tests. Pods are engines here, and the whole picker answers, over gRPC. Those of its
datastore and its controllers are in tests/engines/discovery; EppUnAvailableFailOpen needs a gateway (tests/envoy), and
conditions of routes and pools are the gateway's.
"""

from __future__ import annotations

from typing import Any

import pytest

from router.core.types.replicas import matches_address
from router.extproc import extproc_pb2 as pb
from router.extproc.metadata import CONFORMANCE_SERVED, SUBSET, SUBSET_HINT, subset_of
from router.extproc.request_headers import request_of
from tests.extproc.asking import asking, chat, destinations, endpoint, nobody, picking, removed, set_headers
from tests.support.fakes import FakeEngine

DP_PATH = "/primary-gateway-dp-test"
TWO, THREE = "10.0.0.2:8080", "10.0.0.3:8080"
PROMPT = b'{"model": "conformance-fake-model", "prompt": "Write as if you were a critic: San Francisco"}'


def hinted(value: Any, *, key: str = SUBSET, header: str = "") -> frozenset[str] | None:
    """What a subset hint of this value, a list or a text, means; with the conformance header as well if it is given."""
    message = pb.ProcessingRequest()
    field = message.metadata_context.filter_metadata[SUBSET_HINT].fields[key]
    if isinstance(value, str):
        field.string_value = value
    else:
        field.list_value.SetInParent()
        for each in value:
            field.list_value.values.add(string_value=each)
    headers = [pb.HeaderValue(key="test-epp-endpoint-selection", raw_value=header.encode())] if header else []
    return subset_of(message, request_of(headers, nobody()), conformance=True)


@pytest.mark.parametrize(
    ("value", "meant"),
    [
        pytest.param([THREE], {THREE}, id="FilteringViaFilterMetadata"),
        pytest.param(f"{TWO},{THREE}", {TWO, THREE}, id="FilteringViaFilterMetadata_StringValue"),
        pytest.param(f"  {TWO} ,  ,  {THREE}  ", {TWO, THREE}, id="StringMetadataMalformedWhitespaceTrimming"),
        pytest.param([f"{TWO}, {THREE}"], {TWO, THREE}, id="MixedArrayAndCommaStringElements"),
        pytest.param([], set(), id="SubsetFilterEmptyReturnsNoPods"),
    ],
)
def test_forms_of_a_subset_hint(value: Any, meant: set[str]) -> None:
    """lwepp TestHandleRequestHeaders_*: a list, a text with commas, and both at once; an empty one means nobody."""
    assert hinted(value) == meant


def test_no_hint_means_all() -> None:
    """lwepp TestHandleRequestHeaders_NoSubsetMetadataReturnsAllPods, _MetadataNamespaceEmptyReturnsAllPods."""
    assert hinted("val", key="some-other-unrelated-key") is None
    assert subset_of(pb.ProcessingRequest(), request_of([], nobody()), conformance=True) is None


def test_the_suites_header_goes_before_the_gateways_hint() -> None:
    """lwepp TestHandleRequestHeaders_HeaderTakesPrecedenceOverMetadata."""
    assert hinted([TWO, THREE], header="10.0.0.2") == {"10.0.0.2"}


def test_headers_that_come_twice_are_kept() -> None:
    """lwepp TestHandleRequestHeaders_DuplicateHeadersArePreserved."""
    pairs = [("x-forwarded-for", "1.1.1.1"), ("x-forwarded-for", "2.2.2.2"), ("cookie", "a=b"), ("cookie", "c=d")]
    headers = [pb.HeaderValue(key=key, value=value) for key, value in pairs]
    request = request_of(headers, nobody())
    assert [(low.decode(), value.decode()) for low, _, value in request.lines] == pairs


def test_ports_of_a_filter() -> None:
    """lwepp TestHandleRequestHeaders_PortAwareFiltering: an address with a port means that port, one without all ports
    of the host, both may be mixed, and one that is there at another port is not meant."""
    pods = [f"10.0.0.1:{port}" for port in (8000, 8001)] + [f"10.0.0.2:{port}" for port in (8000, 8001)]
    for said, meant in (
        ("10.0.0.1:8000", {pods[0]}),
        ("10.0.0.1", {pods[0], pods[1]}),
        ("10.0.0.1:8001,10.0.0.2", {pods[1], pods[2], pods[3]}),
        ("10.0.0.1:9999", set()),
    ):
        among = hinted([], header=said)
        assert among is not None
        assert {pod for pod in pods if matches_address(f"http://{pod}", among)} == meant


async def test_requests_without_a_body_are_spread(engine: FakeEngine, other: FakeEngine) -> None:
    """lwepp TestHandleRequestHeaders_RoundRobin: requests of which nothing is known go to all pods, not to one."""
    async with picking(engine, other, extproc__conformance=True) as app:
        seen = set()
        for n in range(16):
            async with asking(app) as it:
                await it.head(f"/any/{n}", method="GET", end=True)
                told = await it.hear()
                assert told is not None
                seen.add(destinations(told)[0])
                await it.finish()
    assert seen == {endpoint(engine), endpoint(other)}


async def test_no_pods_are_503(engine: FakeEngine) -> None:
    """lwepp TestHandleRequestHeaders_NoPods, _StringMetadataNoMatchesReturnsNoPods: an error, never a guess."""
    async with picking(engine) as app, asking(app) as it:
        told = await it.pick(subset=["192.168.1.1:8080"])
        assert told.immediate_response.status.code == 503


async def test_heads_of_answers_are_forwarded(engine: FakeEngine) -> None:
    """lwepp TestHandleResponseHeaders_ForwardsOriginalHeaders: what the backend says is with the client: none of it is
    set anew, and none is removed."""
    async with picking(engine) as app, asking(app) as it:
        await it.pick()
        await it.answer(headers={"x-custom": "value", "server": "vllm"})
        told = await it.hear()
        assert told is not None
        assert not removed(told)
        assert not {"x-custom", "server", "content-type"} & set(set_headers(told))


async def test_nothing_is_said_before_the_body_is_here(engine: FakeEngine) -> None:
    """lwepp TestProcess_DeferredHeaderMutationOnStreamingBody: with a streamed body the head is answered when all of it
    is here, with the destination; the body's answer has no mutation of headers."""
    async with picking(engine) as app, asking(app, "duplex") as it:
        await it.head(headers={"test-epp-endpoint-selection": "127.0.0.1"})
        await it.body(chat())
        first, second = await it.hear(), await it.hear()
        assert first is not None
        assert second is not None
        assert destinations(first) == [endpoint(engine)]
        assert second.HasField("request_body")
        assert not second.request_body.response.HasField("header_mutation")


async def test_the_served_endpoint_is_the_gateways_word(engine: FakeEngine, other: FakeEngine) -> None:
    """conformance GatewayDestinationEndpointServed, lwepp TestHandleResponseHeaders_UsesServedEndpointFromMetadata,
    _MissingEnvoyLBMetadata, _MissingDestinationEndpointServedKey: it is told back, once; where the gateway says
    nothing, nothing is made up. A backend's own header of that name does not stand in for it."""
    async with picking(engine, other, extproc__conformance=True) as app:
        for served in (endpoint(engine), endpoint(other), ""):
            async with asking(app) as it:
                await it.pick(PROMPT, path="/destination-endpoint-served-test")
                await it.answer(served=served, headers={CONFORMANCE_SERVED: "10.0.0.9:3000"})
                told = await it.hear()
                assert told is not None
                assert set_headers(told).get(CONFORMANCE_SERVED, "") == served
                assert (CONFORMANCE_SERVED in removed(told)) is not bool(served)
                await it.finish()


async def test_each_rank_is_an_endpoint(engine: FakeEngine, other: FakeEngine) -> None:
    """conformance GatewayFollowingEPPRoutingWithDataParallelism: ports of one pod are endpoints of their own; a host
    means any of them, and a host with a port that one."""
    async with picking(engine, other, extproc__conformance=True) as app:
        for header, allowed in (
            ("127.0.0.1", {endpoint(engine), endpoint(other)}),
            (endpoint(other), {endpoint(other)}),
            (f"127.0.0.2,{endpoint(engine)}", {endpoint(engine)}),
        ):
            for _ in range(4):
                async with asking(app) as it:
                    told = await it.pick(PROMPT, path=DP_PATH, headers={"test-epp-endpoint-selection": header})
                    assert set(destinations(told)) <= allowed
                    await it.finish()


async def test_each_pool_has_its_own(engine: FakeEngine, other: FakeEngine) -> None:
    """conformance GatewayWeightedAcrossTwoInferencePools: the pickers of two pools are both shown the endpoints of
    both, and each takes only those of its own."""
    header = f"{endpoint(engine)},{endpoint(other)}"
    for mine in (engine, other):
        async with picking(mine, extproc__conformance=True) as app, asking(app) as it:
            told = await it.pick(PROMPT, path=DP_PATH, headers={"test-epp-endpoint-selection": header})
            assert destinations(told) == [endpoint(mine)]


async def test_traffic_reaches_only_those_selected(engine: FakeEngine, other: FakeEngine) -> None:
    """conformance GatewayFollowingEPPRouting: one designated pod, then both, whatever the model and the path."""
    async with picking(engine, other, extproc__conformance=True) as app:
        for chosen in ([engine], [other], [engine, other]):
            header = ",".join(endpoint(each) for each in chosen)
            for _ in range(6):
                async with asking(app) as it:
                    headers = {"test-epp-endpoint-selection": header}
                    told = await it.pick(PROMPT, path="/primary-gateway-test", headers=headers)
                    assert set(destinations(told)) <= {endpoint(each) for each in chosen}
                    await it.finish()
