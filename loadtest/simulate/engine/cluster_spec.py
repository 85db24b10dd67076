"""Parameters of a run: a cluster with routers in front of it, and faults of its replicas."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from loadtest.common.answer_limits import COMMON, AnswerLimits
from loadtest.fake_engine.calibration import CALIBRATION, CALIBRATIONS, Calibration
from loadtest.fake_engine.host_tier import TierLimits
from loadtest.fake_engine.peers import PeerLimits
from loadtest.simulate.engine.machine import Machine
from router.core.types.disagg_types import KvConnector, Role

REPLICAS_MAX = 256


class SettingError(ValueError):
    """An impossible cluster; the message is one line."""


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault of one replica. `kind` is one of three:

    - `restart`: down for `lasts_s`, then empty
    - `slow`: steps take `factor` times as long for `lasts_s`
    - `join`: the replica is not there before `at_s`
    """

    kind: str
    at_s: float
    replica: int = 0
    lasts_s: float = 30.0
    factor: float = 4.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSpec:
    """A cluster, and the routers in front of it. Seconds are simulated. Raises SettingError."""

    replicas: int = 8
    names: tuple[str, ...] = ()
    """Names of the replicas, which rings hash; empty: made up."""
    calibration: Calibration = CALIBRATIONS[CALIBRATION]
    others: tuple[Calibration, ...] = ()
    """Calibrations of the first replicas, if they differ."""
    machines: tuple[Machine, ...] = ()
    """Differences of the first replicas; the others are as their calibration has them."""
    kv_tokens: int | None = None
    """KV tokens of a replica. None: the calibration's."""
    tier: TierLimits | None = None
    """CPU memory behind each replica's GPU. None: no such memory."""
    tier_told: bool = True
    """True if routers use the contents of tiers (the setting `tiers.enabled`)."""
    peers: PeerLimits | None = None
    """The link between the CPU memories of two replicas. None: no P2P KV transfer."""
    legs: PeerLimits | None = None
    """The link between the GPUs of a prefill replica and a decode replica. None: no disaggregated prefill."""
    handshake: KvConnector = KvConnector.NIXL
    """Their KV connector."""
    roles: tuple[Role, ...] = ()
    """Roles of the first replicas; those of the others are `both`."""
    split_told: bool = True
    """True if routers may split requests."""
    pulls_told: bool = True
    """True if routers may order P2P KV transfers."""
    routers: int = 1
    share_delay_s: float | None = None
    """Delay of messages between routers. None: routers share no state."""
    share_partition: tuple[float, float] | None = None
    """(begin, duration): a time in which the first router neither sends nor receives messages."""
    probe_interval_s: float = 1.0
    grade: Literal["exact", "estimated", "none"] = "estimated"
    """Source of the routers' cache index: KV events, their own requests, or no source."""
    unseen: bool = False
    """True if answers bypass the routers, as with the picker of a gateway, except for the sample that it requests."""
    event_delay_s: float = 0.005
    """Delay of events from the end of a step to each router, and of a replay each way."""
    event_loss: float = 0.0
    """Chance of each batch to miss a router."""
    answer_limits: AnswerLimits = COMMON
    """Values of `max_tokens` that clients send, in equal parts."""
    foreknowledge: bool = False
    """True if routers get each answer's length before it begins, which no client can know: a bound."""
    faults: tuple[Fault, ...] = ()
    timeout_s: float = 300.0
    """Time after which a client gives up a try that has not ended."""
    patience_s: float | None = None
    """Time after which clients close a try without a token, as by a read timeout. None: they wait."""
    retries: int = 0
    """Tries after the first: a client retries at once after a try that it gave up without a token."""
    wire_s: float = 0.0
    """Mean time of a request from the router to its engine (network.py)."""
    wire_seed: int = 1
    seed: int = 1

    def __post_init__(self) -> None:
        if self.legs is not None and self.tier is not None:
            raise SettingError("legs and tiers: only one of them")
        for fault in self.faults:
            if fault.replica >= self.replicas:
                raise SettingError(
                    f"{fault.kind} at {fault.at_s:g} s: there is no replica {fault.replica} of {self.replicas}, "
                    "they count from 0"
                )

    @property
    def longest_s(self) -> float:
        """The longest time of a request, with all its tries."""
        each_s = self.timeout_s if self.patience_s is None else min(self.patience_s, self.timeout_s)
        return self.retries * each_s + self.timeout_s

    def calibrations(self) -> list[Calibration]:
        """Return the calibrations of the replicas, in their order."""
        others = self.others[: self.replicas]
        return [*others, *[self.calibration] * (self.replicas - len(others))]

    def kv_tokens_of(self, calibration: Calibration) -> int:
        """Return the tokens that the KV cache of a replica of that kind holds."""
        return self.kv_tokens or calibration.kv_tokens

    def machine(self, number: int) -> Machine:
        """Return the differences of a replica; numbers begin at 0."""
        return self.machines[number] if number < len(self.machines) else Machine()

    def fleet(self) -> list[tuple[Machine, Calibration, int]]:
        """Return each replica in order, with its calibration and the tokens that its KV cache holds."""
        numbered = enumerate(self.calibrations())
        machines = [(self.machine(number), calibration) for number, calibration in numbered]
        return [(each, kind, int(each.kv_factor * self.kv_tokens_of(kind))) for each, kind in machines]

    def role(self, number: int) -> Role:
        """Return the role of a replica; numbers begin at 0."""
        return self.roles[number] if number < len(self.roles) else Role.BOTH

    def name(self, number: int) -> str:
        """Return the name of a replica; numbers begin at 0."""
        return self.names[number] if self.names else f"http://replica-{number}"
