"""Delay from the router to its replica's engine, as over HTTP on one machine: real time that the simulation otherwise
leaves out.

Nearly all of it is spent after the router: the simulated engine reads a body, renders it and hashes it in blocks of a
few tokens. A router does little beside that. So requests are placed in the order in which they are sent, and reach
their engines later. The delay has a fixed part and one by the size of the prompt, about half each, and a random factor.
"""

from __future__ import annotations

import random


class NetworkDelay:
    """Delays with a mean of `mean_s`, if prompts have `mean_tokens` on average."""

    def __init__(self, mean_s: float, mean_tokens: float, seed: int) -> None:
        self._mean_s, self._mean_tokens = mean_s, mean_tokens
        self._random = random.Random(seed)

    def delay_s(self, prompt_tokens: int) -> float:
        """Return the delay in seconds of a request with this number of prompt tokens."""
        return self._mean_s * (1 + prompt_tokens / self._mean_tokens) / 2 * self._random.uniform(0.5, 1.5)
