"""Properties of one replica that differ from the rest of a fleet."""

from __future__ import annotations

from dataclasses import dataclass

from loadtest.common.traces import BYTES_PER_TOKEN
from loadtest.fake_engine.calibration import Calibration
from loadtest.fake_engine.step import Limits
from loadtest.fake_engine.zoo.member import DENSE, Member
from loadtest.simulate.engine.workload import MODEL


@dataclass(frozen=True, slots=True, kw_only=True)
class Hop:
    """A proxy in front of one replica's HTTP port. Probes, cancellations and KV events do not pass it."""

    request_s: float = 0.0
    """Delay of every request."""
    reply_s: float = 0.0
    """Delay of every token."""
    gathers: bool = False
    """True if it forwards an answer only when it is complete, as nginx with `proxy_buffering on`."""
    bytes_per_s: float | None = None
    """Speed at which it forwards requests. None: without a delay."""

    def request_delay_s(self, prompt_tokens: int) -> float:
        """Return the delay of a request with a prompt of this length."""
        sent_s = BYTES_PER_TOKEN * prompt_tokens / self.bytes_per_s if self.bytes_per_s is not None else 0.0
        return self.request_s + sent_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """One replica, with its differences from the setting's calibration."""

    kv_factor: float = 1.0
    """KV cache, as a multiple of the setting's value."""
    slowness: float = 1.0
    """Factor of the time of every step, for the whole run."""
    sequences_max: int = Limits().sequences_max
    """Sequences in a batch (vLLM's `--max-num-seqs`)."""
    chunked: bool = True
    """True if prefill is chunked (`Limits`)."""
    prefix_caching: bool = True
    far_s: float = 0.0
    """Time of a request from its router to the engine, and of every token back. Probes and cancellations take none."""
    hop: Hop = Hop()
    model: str = MODEL
    """The only model that it serves."""
    member: Member = DENSE
    """The kind of engine for its scheduler and its metrics page; its KV events are the dense engine's. With context
    parallelism, the setting's blocks are those of the scheduler."""
    page: Member | None = None
    """The kind of engine of its metrics page, if another one than `member`."""

    @property
    def reply_s(self) -> float:
        """Delay of every token on its way to the router."""
        return self.far_s + self.hop.reply_s

    def limits(self, calibration: Calibration, block_tokens: int) -> Limits:
        """Return the limits of its engine's scheduler."""
        return Limits(
            block_tokens=block_tokens,
            sequences_max=self.sequences_max,
            context_tokens_max=calibration.context_tokens_max,
            chunked=self.chunked,
            prefix_caching=self.prefix_caching,
            drops_last_block=self.member.drops_last_block,
        )
