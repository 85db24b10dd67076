"""Replicas of a run, their discovery by routers, and their faults.

Routers detect a dead engine by a refused connection or a failed probe. They detect a new process at the same address by
its counters or its events. The world handles the effect of faults on requests: it is notified of each replica that lost
its requests.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence

from loadtest.fake_engine.peers import Peers
from loadtest.fake_engine.step import Outcome
from loadtest.simulate.engine.cluster_spec import ClusterSpec, Fault, SettingError
from loadtest.simulate.engine.kv_events import Publisher, VirtualClock
from loadtest.simulate.engine.placer import Placer
from loadtest.simulate.engine.replicas import VirtualReplica
from router.core.types.disagg_types import Role

Deliver = Callable[[VirtualReplica, Outcome, float], None]
"""(replica, outcome of a step, time)"""


class VirtualCluster:
    """Replicas in virtual time, behind `placers`. `lost(name)` is called for every process that dies. Raises
    SettingError."""

    def __init__(
        self,
        setting: ClusterSpec,
        block_tokens: int,
        clock: VirtualClock,
        placers: Sequence[Placer],
        deliver: Deliver,
        lost: Callable[[str], None],
    ) -> None:
        self._setting, self._clock, self._placers = setting, clock, placers
        self._deliver, self._lost = deliver, lost
        self._publishers: dict[str, Publisher] = {}
        self.replicas: dict[str, VirtualReplica] = {}
        self.peers = Peers(setting.peers) if setting.peers is not None else None
        for number, (machine, calibration, kv_tokens) in enumerate(setting.fleet()):
            name = setting.name(number)
            if kv_tokens < block_tokens:
                raise SettingError(f"a KV cache of {kv_tokens} tokens holds not even one block of {block_tokens}")
            self.replicas[name] = VirtualReplica(
                name,
                calibration,
                kv_tokens,
                machine.limits(calibration, block_tokens),
                clock.call_at,
                self._on_step,
                record_events=setting.grade == "exact",
                tier=setting.tier,
                peers=self.peers,
                legs=setting.legs,
                machine=machine,
            )
            if setting.grade == "exact":
                self._publishers[name] = self._publisher(name, block_tokens, machine.far_s)
        late = {setting.name(fault.replica) for fault in setting.faults if fault.kind == "join"}
        self._fleet = [name for name in self.replicas if name not in late]

    def begin(self) -> None:
        """Start at time 0: routers know the fleet, and no request has come."""
        for fault in self._setting.faults:
            self._clock.call_at(fault.at_s, self._strike, fault)
        for placer in self._placers:
            placer.join(self._fleet, self._roles(), self._models())
            self._follow(placer, self._fleet)
            self._prove(placer, self._fleet)
        self._probe(None)
        self._pair()

    def _publisher(self, name: str, block_tokens: int, far_s: float) -> Publisher:
        setting = self._setting
        delay_s = setting.event_delay_s + far_s
        rng = random.Random(f"{setting.seed}/{name}")
        return Publisher(name, block_tokens, self._clock, delay_s=delay_s, loss=setting.event_loss, rng=rng)

    def _follow(self, placer: Placer, names: Iterable[str]) -> None:
        for name in names:
            if name in self._publishers:
                placer.follow(self._publishers[name])

    def _prove(self, placer: Placer, names: Iterable[str]) -> None:
        """Report to a router the addresses at which these replicas serve P2P KV transfers."""
        if self.peers is not None and self._setting.pulls_told:
            for name in names:
                placer.router.set_p2p_address(name, name)

    def _roles(self) -> dict[str, Role]:
        return {self._setting.name(number): role for number, role in enumerate(self._setting.roles)}

    def _models(self) -> dict[str, str]:
        return {name: replica.machine.model for name, replica in self.replicas.items()}

    def _pair(self) -> None:
        """Report the replicas' KV connector to the routers, and all pairs as warm."""
        setting = self._setting
        if setting.legs is not None and setting.split_told:
            for placer in self._placers:
                placer.pair(self._fleet, setting.handshake, self._clock.now_s)

    def _on_step(self, replica: VirtualReplica, outcome: Outcome, now_s: float) -> None:
        if outcome.events:
            self._publishers[replica.name].publish(outcome.events)
        self._deliver(replica, outcome, now_s)

    def _probe(self, _: None) -> None:
        now_s = self._clock.now_s
        for name in self._fleet:
            replica = self.replicas[name]
            load = replica.load() if replica.up else None
            for placer in self._placers:
                placer.probe(name, load, now_s)
        for placer in self._placers:
            placer.router.observations.check(now_s)
        self._clock.call_at(now_s + self._setting.probe_interval_s, self._probe)

    def _strike(self, fault: Fault) -> None:
        name, now_s = self._setting.name(fault.replica), self._clock.now_s
        replica = self.replicas[name]
        if fault.kind == "slow":
            replica.slow_until_s = now_s + fault.lasts_s
            replica.slow(fault.factor, now_s)
            self._clock.call_at(replica.slow_until_s, self._speed_up, replica)
        elif fault.kind == "join":
            self._fleet = [each for each in self.replicas if each in self._fleet or each == name]
            for placer in self._placers:
                placer.join(self._fleet, self._roles(), self._models())
                self._follow(placer, [name])
                self._prove(placer, [name])
                placer.probe(name, replica.load(), now_s)
            self._pair()
        else:
            self._restart(replica, fault.lasts_s)

    def _restart(self, replica: VirtualReplica, down_s: float) -> None:
        """Kill the process with all requests that it had; a new one starts after `down_s`."""
        up_s = self._clock.now_s + down_s
        replica.stop()
        replica.down_until_s = max(replica.down_until_s, up_s)
        self._clock.call_at(up_s, self._come_back, replica)
        if replica.name in self._publishers:
            self._publishers[replica.name].stop()
        self._lost(replica.name)

    def _come_back(self, replica: VirtualReplica) -> None:
        if self._clock.now_s >= replica.down_until_s:
            replica.start()
            if replica.name in self._publishers:
                self._publishers[replica.name].start()

    def _speed_up(self, replica: VirtualReplica) -> None:
        if self._clock.now_s >= replica.slow_until_s:
            replica.slow(1.0, self._clock.now_s)
