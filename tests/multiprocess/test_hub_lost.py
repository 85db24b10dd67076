"""Workers and a hub in one process, over a real unix socket: who has which lease, whoever dies."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import pytest

from router.core.fleet.models import NoReplicaReady, UnknownModel
from router.core.placement.placement_request import PlacementRequest
from router.core.prompts.token_keys import TokenPrompt
from router.core.types.placements import Confidence, EndReason, Outcome, PlacementReason, Usage
from router.core.types.replicas import ServedModel
from router.core.types.requests import RequestSpec
from router.multiprocess import protocol
from router.multiprocess.remote_placement import RemotePlacementService
from router.multiprocess.replica_view import CachedReplicaView
from router.placement_api import TokenizationSpec
from router.telemetry.process_totals import CONNECTIONS, HUB_LOST
from router.telemetry.record import RequestRecord
from tests.multiprocess.stubs import StubEdge, StubHub, serving, until, worker

OK, NOBODY = Outcome(EndReason.OK, Usage(10, 2, 4)), frozenset[str]()


def want(key: str = "k", model: str | None = "m", response_id: str | None = None) -> PlacementRequest:
    """A small request."""
    tokens = TokenPrompt(bytes(400), "", b"")
    return PlacementRequest(RequestSpec(model), model, None, key, tokens, response_id=response_id)


def test_the_ring_leaves_a_failed_server() -> None:
    """Without a hub too another rank of a server that failed comes last."""
    known = CachedReplicaView()
    ids = ("http://a#dp0", "http://a#dp1", "http://b")
    known.take(protocol.ReplicaView([(id_, ("m",)) for id_ in ids], (), "m", {}, ids=False, engines={}))
    for number in range(20):
        assert known.pick_by_ring(want(str(number)), frozenset({"http://a#dp0"}), None).replica == "http://b"
    assert known.pick_by_ring(want(), frozenset({"http://a#dp0", "http://b"}), None).replica == "http://a#dp1"


def test_the_ring_sends_whole_requests_to_whoever_takes_them() -> None:
    """Without a hub nothing goes in two legs: replicas that only prefill are the last resort, those that take no whole
    requests are none, and whoever alone can answer is asked in any case."""
    known, a, b, c = CachedReplicaView(), "http://a", "http://b", "http://c"
    view = protocol.ReplicaView([(id_, ("m",)) for id_ in (a, b, c)], (), "m", {}, ids=False)
    view.prefills, view.disagg_only = (a,), (b,)
    known.take(view)
    for number in range(20):
        assert known.pick_by_ring(want(str(number)), NOBODY, None).replica == c
        assert known.pick_by_ring(want(str(number)), frozenset({c}), None).replica == a
    with pytest.raises(NoReplicaReady):
        known.pick_by_ring(want(), frozenset({a, c}), None)
    assert [known.pick_by_ring(want(), NOBODY, owner).replica for owner in (a, b)] == [a, b]


async def test_two_workers_place_as_one(path: Path) -> None:
    """What one worker has open counts when the hub places for the other: load spreads over both."""
    hub = StubHub("http://a", "http://b", policy="least_loaded")
    async with serving(hub, path), worker(path) as one, worker(path, 1) as two:
        await until(lambda: one.placing and two.placing)
        leases = [await placer.place(want(), NOBODY) for placer in (one, two, one, two)]
        assert sorted(lease.replica for lease in leases) == ["http://a", "http://a", "http://b", "http://b"]
        assert all(lease.receipt.policy == "least_loaded" for lease in leases)


async def test_a_lease_lives_from_placement_to_finish(path: Path) -> None:
    """First token, end, usage and record of a request reach the hub, once each, with the whole receipt."""
    hub = StubHub("http://a", "http://b")
    async with serving(hub, path) as server, worker(path) as placer:
        await until(lambda: placer.placing)
        lease = await placer.place(want(), NOBODY)
        (open_,) = [each for m in hub.router.fleet.members.values() for each in m.leases.values()]
        placer.first_token(lease, 5.0)
        await until(lambda: open_.first_token_s)
        assert open_.first_token_s == lease.first_token_s == 5.0
        placer.finish(lease, OK, 6.0)
        placer.finish(lease, OK, 7.0)
        placer.record_request(RequestRecord("r", "/v1/completions", status=200, receipt=lease.receipt, usage=OK.usage))
        await until(lambda: hub.records)
        assert hub.open == 0
        (record,) = hub.records
        assert record.usage == OK.usage
        assert record.receipt is not None
        assert len(record.receipt.candidates) == 2
        assert server.in_flight == 0


async def test_a_stored_response_is_known_to_whoever_is_asked_next(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker tells of it before its client can ask another worker; the hub may hear of both at once, in any order."""
    hub, heard = StubHub("http://a", "http://b", private=True), list[protocol.FromHub]()
    async with serving(hub, path) as server, worker(path) as one, worker(path, 1) as two:
        await until(lambda: one.placing and two.placing)
        first, second = sorted(server.links, key=lambda link: link.worker)
        monkeypatch.setattr(second, "send", heard.append)
        asks = protocol.WantLease(7, None, "k", False, None, 0, "resp_1", (), None, None, None, tenant="t")
        second.data_received(protocol.frame(protocol.WorkerFrame(0, [asks])))
        first.data_received(protocol.frame(protocol.WorkerFrame(0, [protocol.ResponseMade("resp_1", "http://b", "t")])))
        await until(lambda: heard)
        assert isinstance(heard[0], protocol.LeaseOpened), heard
        monkeypatch.undo()
        one.register_response_owner("resp_2", "http://a", "t")
        wanted = want(response_id="resp_2")
        wanted.tenant = "t"
        assert (await two.place(wanted, NOBODY)).replica == "http://a"


async def test_a_dead_workers_leases_come_back(path: Path) -> None:
    """A worker that is gone holds nothing: its leases end as if its clients had left. The other's stay."""
    hub = StubHub("http://a", "http://b")
    async with serving(hub, path) as server, worker(path) as one, worker(path, 1) as two:
        await until(lambda: one.placing and two.placing)
        for _ in range(3):
            await one.place(want(), NOBODY)
        kept = await two.place(want(), NOBODY)
        assert hub.open == 4
        first = next(link for link in server.links if link.worker == 0)
        first.transport.abort()
        await until(lambda: hub.open == 1)
        two.finish(kept, OK, 1.0)
        await until(lambda: hub.open == 0)


async def test_without_the_hub_the_ring_places_and_says_so(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Requests go on by the ring over what was ready; receipt, log and, once it is back, the hub's metric say so.
    Open leases are told to the new hub, and end there."""
    caplog.set_level(logging.INFO)
    async with worker(path) as placer:
        async with serving(StubHub("http://a", "http://b"), path):
            await until(lambda: placer.placing)
            before = await placer.place(want(), NOBODY)
        await until(lambda: not placer.placing)
        leases = [await placer.place(want(f"k{i}"), NOBODY) for i in range(10)]
        assert {lease.receipt.policy for lease in leases} == {"ring"}
        assert {lease.receipt.reason for lease in leases} == {PlacementReason.POLICY}
        assert {lease.receipt.grade for lease in leases} == {Confidence.ESTIMATED}
        assert {lease.replica for lease in leases} == {"http://a", "http://b"}
        assert (await placer.page("/metrics")).status == 503  # type: ignore[union-attr]
        placer.finish(leases[0], OK, 1.0)
        placer.record_request(RequestRecord("alone", "/v1/completions", status=200, receipt=leases[0].receipt))
        assert sum("the hub is lost" in record.message for record in caplog.records) == 1
        hub = StubHub("http://a", "http://b")
        async with serving(hub, path):
            await until(lambda: placer.placing and hub.counts[HUB_LOST])
            assert hub.counts[HUB_LOST] == 10
            assert [record.id for record in hub.records] == ["alone"]
            assert hub.records[0].receipt is not None
            assert hub.records[0].receipt.policy == "ring"
            await until(lambda: hub.open == 10)  # nine and the one before
            for lease in (*leases, before):
                placer.finish(lease, OK, 2.0)
            await until(lambda: hub.open == 0)


async def test_the_ring_keeps_a_conversation_together_and_skips_who_refused(path: Path) -> None:
    """Without the hub one key goes to one replica, to another when that is excluded or refuses, and nowhere in the
    end: NoReplicaReady."""
    edge = StubEdge()
    async with worker(path, edge=edge) as placer:
        async with serving(StubHub("http://a", "http://b"), path):
            await until(lambda: placer.placing)
        await until(lambda: not placer.placing)
        replicas = set()
        for _ in range(5):
            lease = await placer.place(want(), NOBODY)
            placer.finish(lease, OK, 0.0)
            replicas.add(lease.replica)
        (home,) = replicas
        retried = await placer.place(want(), frozenset([home]))
        assert retried.replica != home
        assert retried.receipt.reason is PlacementReason.RETRY
        placer.report_connection_refused(home)
        assert edge.heard == [("lost", home)]
        assert (await placer.place(want(), NOBODY)).replica == retried.replica
        assert not placer.has_other_ready(frozenset([retried.replica]))
        with pytest.raises(NoReplicaReady):
            await placer.place(want(), frozenset([retried.replica]))


@pytest.mark.inside
async def test_a_hub_that_is_silent_is_not_waited_for(path: Path) -> None:
    """A placement that the hub owes for too long is made by the ring, and its late lease given back; what the hub
    says next makes it the hub again."""
    hub = StubHub("http://a", "http://b")
    hub.stub.slow = True
    async with serving(hub, path), worker(path, timeout_s=0.01) as placer:
        await until(lambda: placer.placing)
        lease = await placer.place(want(), NOBODY)
        assert lease.receipt.policy == "ring"
        hub.stub.slow = False
        await until(lambda: placer.placing)
        await until(lambda: hub.open == 1)  # the ring's own, which was told; the late one is back
        placer.finish(lease, OK, 1.0)
        await until(lambda: hub.open == 0 and hub.counts[HUB_LOST] == 1)


@pytest.mark.inside
async def test_a_client_that_leaves_while_placing_leaves_no_lease(path: Path) -> None:
    """Cancelled before, while or after the hub answers: nothing stays open."""
    hub = StubHub("http://a", "http://b")
    async with serving(hub, path), worker(path) as placer:
        await until(lambda: placer.placing)
        for turns in range(6):
            task = asyncio.create_task(placer.place(want(), NOBODY))
            for _ in range(turns):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            if not task.cancelled():
                placer.finish(task.result(), OK, 0.0)
        hub.stub.slow = True
        task = asyncio.create_task(placer.place(want(), NOBODY))
        await asyncio.sleep(0.005)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert task.cancelled()
        hub.stub.slow = False
        last = await placer.place(want(), NOBODY)
        placer.finish(last, OK, 1.0)
        await until(lambda: hub.open == 0)


@pytest.mark.inside
async def test_workers_answer_for_models_as_the_hub_does(path: Path) -> None:
    """Unknown, unready and unnamed models are told apart from the last view, which follows the hub's."""
    hub = StubHub("http://a", "http://b", models=("m",))
    view = TokenizationSpec("m", "vllm", "http://a", "", (16,))
    hub.stub.tokenization_spec = lambda model: view if model == "m" else None  # type: ignore[method-assign]
    async with serving(hub, path), worker(path) as placer:
        with pytest.raises(NoReplicaReady):
            placer.resolve("m")  # nothing is known yet
        await until(lambda: placer.placing)
        assert placer.resolve("m") == placer.resolve(None) == "m"
        assert placer.tokenization_spec("m") == view
        with pytest.raises(UnknownModel) as unknown:
            placer.resolve("x")
        assert unknown.value.known == ["m"]
        placer.report_connection_refused("http://a")
        await until(lambda: not placer.has_other_ready(frozenset(["http://b"])))
        placer.report_connection_refused("http://b")
        await until(lambda: not placer.has_other_ready(NOBODY))
        with pytest.raises(NoReplicaReady):
            placer.resolve("m")
        with pytest.raises(NoReplicaReady):
            await placer.place(want(), NOBODY)
        hub.ready("http://b")
        await until(lambda: placer.has_other_ready(NOBODY))
        assert placer.resolve(None) == "m"
        hub.router.models.expected.on_replica_removed(
            [ServedModel("s", owned_by="sglang"), ServedModel("lora", parent="s")], "m"
        )
        hub.ready("http://b")
        await until(lambda: placer.find_expected_base("s"))
        assert [placer.find_expected_base(name) for name in ("lora", "s:any", "m", "x")] == ["s", "s", "", ""]
        with pytest.raises(NoReplicaReady):
            placer.resolve("lora")


async def test_all_workers_hear_of_a_lost_replica(path: Path) -> None:
    """One lost replica, told by the hub, ends silent requests in every worker; one that left is told as well."""
    first, second = StubEdge(), StubEdge()
    hub = StubHub("http://a", "http://b")
    async with serving(hub, path) as server, worker(path, edge=first) as one:
        async with worker(path, 1, edge=second) as two:
            await until(lambda: one.placing and two.placing)
            server.on_replica_unreachable("http://a")
            await until(lambda: first.heard == second.heard == [("lost", "http://a")])
            server.on_replica_removed("http://b")
            await until(lambda: first.heard == second.heard == [("lost", "http://a"), ("left", "http://b")])


async def test_a_stored_response_is_found_through_any_worker(path: Path) -> None:
    """One worker made it, the other asks for it: the hub knows whose it is; and so does the maker, alone."""
    hub = StubHub("http://a", "http://b")
    async with worker(path) as one:
        async with serving(hub, path), worker(path, 1) as two:
            await until(lambda: one.placing and two.placing)
            for id_, replica in (("resp_1", "http://a"), ("resp_2", "http://b")):
                one.register_response_owner(id_, replica, "")
                await until(lambda id_=id_: hub.placer.owners.owner(id_, ""))
                assert (await two.place(want(response_id=id_), NOBODY)).replica == replica
        await until(lambda: not one.placing)
        for id_, replica in (("resp_1", "http://a"), ("resp_2", "http://b")):
            assert (await one.place(want(response_id=id_), NOBODY)).replica == replica


async def test_pages_come_from_the_hub(path: Path) -> None:
    """A worker serves the hub's pages, in the format that is asked for; one that does not exist is None."""
    async with serving(StubHub("http://a"), path), worker(path) as placer:
        await until(lambda: placer.placing)
        page = await placer.page("/readyz")
        assert page is not None
        assert (page.status, page.body) == (200, b"/readyz")
        asked = await placer.page("/readyz", accept="application/openmetrics-text")
        assert asked is not None
        assert (page.content_type, asked.content_type) == ("text/plain", "application/openmetrics-text")
        assert await placer.page("/x") is None


async def test_a_worker_alone_is_ready_as_long_as_it_places(path: Path) -> None:
    """By the hub's last view: not before there was any, nor where all replicas of that refuse. Other pages are the
    hub's."""

    async def statuses(placer: RemotePlacementService) -> list[int]:
        pages = [await placer.page(path) for path in ("/readyz", "/metrics")]
        return [page.status for page in pages if page is not None]

    async with worker(path) as placer:
        assert await statuses(placer) == [503, 503]
        async with serving(StubHub("http://a"), path):
            await until(lambda: placer.placing)
        await until(lambda: not placer.placing)
        assert await statuses(placer) == [200, 503]
        placer.report_connection_refused("http://a")
        assert await statuses(placer) == [503, 503]


@pytest.mark.parametrize(
    "garbage",
    [
        b"GET / HTTP/1.1\r\n\r\n" * 20,
        (protocol.FRAME_BYTES_MAX + 1).to_bytes(4, "little"),
        (3).to_bytes(4, "little") + b"\xc1\xc1\xc1",
        protocol.frame(
            protocol.WorkerFrame(
                0, [protocol.WantLease(1, "m", "k", False, None, 0, None, (), None, (b"odd", 0, 0, (), 0), None)]
            )
        ),
    ],
)
async def test_garbage_closes_the_connection_and_nothing_else(path: Path, garbage: bytes) -> None:
    """What is not a worker's is cut off; workers beside it notice nothing."""
    hub = StubHub("http://a", "http://b")
    async with serving(hub, path), worker(path) as placer:
        await until(lambda: placer.placing)
        lease = await placer.place(want(), NOBODY)
        reader, writer = await asyncio.open_unix_connection(str(path))
        writer.write(garbage)
        while await reader.read(1 << 16):  # the view, and then the end
            pass
        writer.close()
        placer.finish(lease, OK, 1.0)
        await until(lambda: hub.open == 0)
        assert (await placer.place(want(), NOBODY)).receipt.policy == "warm"


async def test_a_hub_that_does_not_read_is_given_up(path: Path) -> None:
    """What waits to be sent is bounded: beyond it the connection is dropped, and made anew."""
    hub = StubHub("http://a", "http://b")
    async with serving(hub, path) as server, worker(path, queue_bytes_max=1 << 16) as placer:
        await until(lambda: placer.placing)
        (link,) = server.links
        link.transport.pause_reading()
        for _ in range(200):
            for number in range(100):
                placer.count_attempt_failure("http://a", f"{number:0100}")
            await asyncio.sleep(0.002)
            if link not in server.links or not placer.placing:
                break
        else:
            pytest.fail("an unbounded queue")
        link.transport.resume_reading()
        await until(lambda: placer.placing)
        assert (await placer.place(want(), NOBODY)).receipt.policy == "warm"


async def test_what_workers_count_adds_up_in_the_hub(path: Path) -> None:
    """Totals of a process are told as differences, so that a worker or a hub that comes anew counts nothing twice."""
    figures = {"lines_dropped": 2}
    hub = StubHub("http://a")
    async with worker(path, figures=lambda: dict(figures)) as placer:
        async with serving(hub, path):
            await until(lambda: hub.counts["lines_dropped"] == 2)
            figures["lines_dropped"] = 5
            await until(lambda: hub.counts["lines_dropped"] == 5)
        await until(lambda: not placer.placing)
        figures["lines_dropped"] = 6
        again = StubHub("http://a")
        async with serving(again, path):
            await until(lambda: again.counts["lines_dropped"] == 1)


async def test_connections_of_workers_add_up_in_the_hub(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """What is open is told anew to a hub that comes anew, and is gone from its sum with the worker."""
    figures = {CONNECTIONS: 3}
    hub, again = StubHub("http://a"), StubHub("http://a")
    async with worker(path, figures=lambda: dict(figures)):
        async with serving(hub, path) as server:
            await until(lambda: hub.counts[CONNECTIONS] == 3)
            figures[CONNECTIONS] = 1
            await until(lambda: hub.counts[CONNECTIONS] == 1)
            assert len(server.links) == 1
            assert "not understood" not in caplog.text
        async with serving(again, path):
            await until(lambda: again.counts[CONNECTIONS] == 1)
            async with worker(path, number=1, figures=lambda: {CONNECTIONS: 4}):
                await until(lambda: again.counts[CONNECTIONS] == 5)
            await until(lambda: again.counts[CONNECTIONS] == 1)
