"""A prefilling engine that names another host than its own, before real servers."""

from __future__ import annotations

import asyncio
import logging
import time

import pytest

from loadtest.fake_engine.disagg_http import Moment
from router.config.schema import DisaggSettings
from router.core.disagg.prefill_hosts import ForeignHost
from router.core.types.disagg_types import KvConnector, PrefillStage, Role
from router.core.types.placements import EndReason
from router.core.types.replicas import Replica
from router.engines.disagg_probes.kv_connectors import KvConnectorProber
from router.proxy.disagg_calls.host_check import ForeignHosts
from tests.support.splitting import Fleet, ask, fleet, hub_fleet, warm_pairs
from tests.support.waiting import until

METADATA = "169.254.169.254"


def _legs(it: Fleet) -> list[Role]:
    """Legs as engines get them, from now on."""
    came: list[Role] = []

    async def trip(role: Role, moment: Moment) -> None:
        if moment is Moment.ARRIVED:
            came.append(role)

    for link in it.engines.links:
        link.trip = trip
    return came


@pytest.mark.finding("2026-11-28/15")
@pytest.mark.promise("A prefilling engine sends no other engine to a foreign host.", "engines")
@pytest.mark.parametrize("stream", [False, True])
async def test_a_decode_leg_goes_to_no_foreign_host(stream: bool, caplog: pytest.LogCaptureFixture) -> None:
    """The request is answered by the decoding replica alone, the prefilling one has failed, and the log says it once a
    minute."""
    async with fleet(KvConnector.NIXL, 1, 2) as it:
        it.engines.links[0].host = METADATA
        came = _legs(it)
        with caplog.at_level(logging.WARNING):
            said = await asyncio.gather(*(ask(it.http.url, stream=stream) for _ in range(3)))
        assert [status for status, _ in said] == [200] * 3
        assert not any('"error"' in body for _, body in said)
        assert set(came) == {Role.PREFILL}
        await it.idle()
        assert it.fetched() == 0
        assert it.placer.failures == [(it.prefill[0], "prefill_foreign_host")] * 3
        assert [prefill for prefill, _ in it.placer.broken] == it.prefill * 3
        assert {outcome.ending for _, outcome in it.placer.ended} == {EndReason.FAILED}
        lines = [record for record in caplog.records if getattr(record, "event", "") == "foreign_host"]
        assert len(lines) == 1
        assert METADATA in str(getattr(lines[0], "fields", ""))


async def test_a_host_that_is_listed_is_none() -> None:
    """A replica behind a proxy names its own address."""
    async with fleet(KvConnector.NIXL, disagg__hosts=("10.0.0.0/8", METADATA)) as it:
        it.engines.links[0].host = METADATA
        came = _legs(it)
        assert (await ask(it.http.url))[0] == 200
        await it.idle()
        assert (came, it.fetched(), it.placer.failures) == ([Role.PREFILL, Role.DECODE], 1, [])


async def test_a_pods_addresses_are_its_own() -> None:
    """Discovery's word on them comes to whoever looks at answers."""
    said: list[tuple[str, KvConnector | None, str]] = []
    prober = KvConnectorProber(lambda *told: said.append(told), DisaggSettings("nixl"))
    await prober.watch(Replica("http://10.0.0.1:8000", hosts=("10.0.0.1", "fd00::1")))
    await prober.close()
    assert said == [("http://10.0.0.1:8000", KvConnector.NIXL, "10.0.0.1,fd00::1")]
    leg = PrefillStage(said[0][0], KvConnector.NIXL, said[0][2], 0, 0.0, 0.0, 0.0)
    hosts = ForeignHosts(time.monotonic, ())
    assert hosts.check_transfer_params(leg, b'{"remote_host":"fd00::1"}', "10.0.0.1") == b'{"remote_host":"fd00::1"}'
    with pytest.raises(ForeignHost):
        hosts.check_transfer_params(leg, b'{"remote_host":"fd00::2"}', "10.0.0.1")


async def test_a_pair_is_not_warmed_by_a_foreign_host(caplog: pytest.LogCaptureFixture) -> None:
    """The router's own first request is not repeated either, and no other one is split."""
    with caplog.at_level(logging.WARNING):
        async with hub_fleet(KvConnector.NIXL, 1) as (engines, app):
            await until(lambda: warm_pairs(app) == 1)
            engines.links[0].host = METADATA
            app.router.disaggregator.pairs.on_engine_restarted(engines.urls[0])
            await until(lambda: any(getattr(each, "event", "") == "disagg_pair_failed" for each in caplog.records))
            assert warm_pairs(app) == 0
            fetched = sum(link.legs.fetched for link in engines.links)
            assert fetched == 1
    failed = [each for each in caplog.records if getattr(each, "event", "") == "disagg_pair_failed"]
    assert METADATA in str(getattr(failed[-1], "fields", ""))
