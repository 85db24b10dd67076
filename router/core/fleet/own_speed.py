"""Speed of one replica, relative to the speeds that all replicas with the same models share (ModelSpeeds)."""

from __future__ import annotations

from dataclasses import dataclass, field

from router.core.estimators.decode_step import StepModel
from router.core.estimators.first_token_delay import FirstTokenDelay
from router.core.estimators.prefill import PrefillModel
from router.core.estimators.speed_factor import SpeedFactor


@dataclass(slots=True)
class OwnSpeed:
    """Factors on the shared models, the limit within which they are known, and the delay of first tokens."""

    prefill_factor: SpeedFactor[PrefillModel] = field(default_factory=SpeedFactor)
    step_factor: SpeedFactor[StepModel] = field(default_factory=SpeedFactor)
    delay: FirstTokenDelay = field(default_factory=FirstTokenDelay)
    longest_tokens: int = 0  # largest number of uncached tokens of a prompt from which the speed was learned

    def reset(self) -> None:
        """Forget the factors and the delay."""
        self.prefill_factor.reset()
        self.step_factor.reset()
        self.delay.reset()

    def forget_peer(self, peer: str) -> None:
        """Drop the observations of another router that is no longer there."""
        self.prefill_factor.forget(peer)
        self.step_factor.forget(peer)

    def fade(self, now_s: float) -> None:
        """Let a measured slowness fade while the replica gets no requests."""
        self.prefill_factor.fade(now_s)
        self.step_factor.fade(now_s)
        self.delay.fade(now_s)
