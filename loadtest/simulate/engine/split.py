"""A world with disaggregated prefill: one replica may prefill and another one decode, by the router's receipt.

The prefill stage is a separate request, of one token. With NIXL the decode stage is sent when that has ended. With
other KV connectors both are sent at once, and the decode engine waits. The blocks are fetched by the rules of
`loadtest.fake_engine.prefill_export`, over a link of each prefill engine. A decode engine that receives no blocks
computes the prompt. The prefill stage reports the cached tokens of a request.
"""

from __future__ import annotations

from loadtest.fake_engine.request import EngineRequest, RequestRefused
from loadtest.fake_engine.step import Outcome
from loadtest.simulate.engine.replicas import VirtualReplica
from loadtest.simulate.engine.world import SimulatedRequest, Simulation
from router.core.types.disagg_types import KvConnector
from router.core.types.placements import EndReason

PREFILL = 1 << 40
"""First number of prefill requests, which are numbered by their requests from here."""


class DisaggSimulation(Simulation):
    """A world of replicas with `ClusterSpec.legs`. Requests without a leg in their receipt run as in `Simulation`."""

    splits = 0  # requests that were first placed as two stages

    @property
    def sent_tokens(self) -> int:
        """Tokens that prefill stages sent to decode stages."""
        return sum(each.legs.fetched_tokens for each in self.replicas.values() if each.legs is not None)

    @property
    def lacked(self) -> int:
        """Decode stages that received no blocks."""
        models = (each.model.arriving for each in self.replicas.values())
        return sum(arriving.lacked for arriving in models if arriving is not None)

    def _submit(self, number: int, sent: SimulatedRequest, replica: VirtualReplica) -> None:
        leg = sent.lease.receipt.leg if sent.lease is not None else None
        if leg is None:
            super()._submit(number, sent, replica)
            return
        first = self.replicas[leg.replica]
        if not first.up or first.legs is None:
            self._leg_failed(number, sent, leg.replica)
            return
        self.splits += not sent.tried and sent.tries == 1
        turn, handshake = sent.turn, self.setting.handshake
        request = EngineRequest(PREFILL + number, turn.prompt_tokens, 1, turn.engine_keys, turn, hold=True)
        first.legs.begin_prefill(handshake, self._id(number, sent), turn.prompt_tokens, self.now_s)
        try:
            first.submit(request, self.now_s)
        except RequestRefused:
            first.legs.drop(self._id(number, sent))
            super()._submit(number, sent, replica)
            return
        if handshake is not KvConnector.NIXL:
            self._submit_decode(number, sent, replica, first)

    def _submit_decode(
        self, number: int, sent: SimulatedRequest, replica: VirtualReplica, first: VirtualReplica
    ) -> None:
        request, id_ = self._request(number, sent.turn), self._id(number, sent)
        if first.legs is not None:
            first.legs.connect(self.setting.handshake, id_, self.now_s)
            handover = first.legs, id_
            tokens, outputs = request.prompt_tokens, request.output_tokens
            request = EngineRequest(number, tokens, outputs, request.keys, request.tag, handover=handover)
        try:
            replica.submit(request, self.now_s)
        except RequestRefused:
            self._drop(number, sent)
            placer, lease = self.placers[sent.router], sent.lease
            if lease is not None:
                placer.finish(sent.turn, lease, EndReason.REFUSED_BY_ENGINE, None, self.now_s)
            self._end(number, sent, "refused")

    def _id(self, number: int, sent: SimulatedRequest) -> str:
        return f"{number}.{sent.tries}.{len(sent.tried)}"

    def _deliver(self, outcome: Outcome, now_s: float) -> None:
        for id_, cached_tokens in outcome.first:
            if id_ >= PREFILL and (sent := self._open.get(id_ - PREFILL)) is not None:
                sent.prefill_cached_tokens = cached_tokens
        for id_ in outcome.finished:
            if id_ >= PREFILL and (sent := self._open.get(id_ - PREFILL)) is not None:
                self._on_prefill_done(id_ - PREFILL, sent, now_s)
        first = [(id_, self._get_cached_tokens(id_, cached)) for id_, cached in outcome.first if id_ < PREFILL]
        for id_, _ in first:
            self._release_prefill(id_)
        finished = [id_ for id_ in outcome.finished if id_ < PREFILL]
        super()._deliver(Outcome([], first, finished, []), now_s)

    def _get_cached_tokens(self, number: int, cached_tokens: int) -> int:
        """Return the prompt tokens that were found cached, from the engine that computed the prompt."""
        sent = self._open[number]
        split = sent.lease is not None and sent.lease.receipt.leg is not None and sent.prefill_cached_tokens >= 0
        return sent.prefill_cached_tokens if split else cached_tokens

    def _on_prefill_done(self, number: int, sent: SimulatedRequest, now_s: float) -> None:
        lease = sent.lease
        leg = lease.receipt.leg if lease is not None else None
        if lease is None or leg is None:
            return
        first, replica = self.replicas[leg.replica], self.replicas[lease.replica]
        if first.legs is not None:
            first.legs.finish_prefill(self._id(number, sent), now_s)
        placer = self.placers[sent.router]
        placer.finish_prefill(sent.turn, lease, EndReason.OK, sent.prefill_cached_tokens, now_s)
        if self.setting.handshake is not KvConnector.NIXL:
            replica.computed_elsewhere(number, now_s)
        elif replica.up:
            self._submit_decode(number, sent, replica, first)
        elif self._retry(sent, EndReason.UNREACHED):
            first.model.release(PREFILL + number)
            self._place(number, sent)
        else:
            self._end(number, sent, "unreached")

    def _release_prefill(self, number: int) -> None:
        """Release the blocks of a prefill stage, if there is one, because they have been fetched."""
        lease = self._open[number].lease
        if lease is not None and lease.receipt.leg is not None:
            self.replicas[lease.receipt.leg.replica].model.release(PREFILL + number)

    def _give_up(self, what: tuple[int, int]) -> None:
        sent = self._open.get(what[0])
        if sent is not None and sent.tries == what[1]:
            self._drop(what[0], sent)
        super()._give_up(what)

    def _drop(self, number: int, sent: SimulatedRequest) -> None:
        """Cancel the prefill stage, which is no longer needed."""
        leg = sent.lease.receipt.leg if sent.lease is not None else None
        if leg is not None:
            first = self.replicas[leg.replica]
            first.cancel(PREFILL + number)
            first.model.release(PREFILL + number)
            if first.legs is not None:
                first.legs.drop(self._id(number, sent))

    def _leg_failed(self, number: int, sent: SimulatedRequest, name: str) -> None:
        """Place both stages anew after the replica of the prefill stage is gone; the failure is attributed to that
        replica."""
        lease, placer = sent.lease, self.placers[sent.router]
        if lease is None:
            return
        self.replicas[lease.replica].cancel(number)
        placer.finish_prefill(sent.turn, lease, EndReason.FAILED, None, self.now_s)
        placer.finish(sent.turn, lease, EndReason.CLIENT_LEFT, None, self.now_s)
        sent.tried, sent.lease = (*sent.tried, name), None
        if len(sent.tried) < 2 and sent.ttft_s is None:
            self._place(number, sent)
        else:
            self._end(number, sent, "broken")

    def _on_replica_lost(self, name: str) -> None:
        for number, sent in list(self._open.items()):
            lease = sent.lease
            if lease is None or lease.receipt.leg is None or sent.ttft_s is not None:
                continue
            if lease.receipt.leg.replica == name and not lease.effective_start_s:
                self._leg_failed(number, sent, name)
            elif lease.replica == name:
                self._drop(number, sent)
        super()._on_replica_lost(name)
