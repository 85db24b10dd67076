"""The way of a request to its replica's engine, as over HTTP on one machine: real time that the simulation otherwise
leaves out.

Nearly all of it lies behind the router, where the simulated engine reads a body, renders it and hashes it in blocks of
a few tokens; a router does little beside that. So requests are placed in the order in which they are sent, and reach
their engines later: by a fixed time and one by the size of the prompt, about half each, with some chance in it.
"""

from __future__ import annotations

import random


class Wire:
    """Delays whose mean is `mean_s`, where prompts have `mean_tokens` on average."""

    def __init__(self, mean_s: float, mean_tokens: float, seed: int) -> None:
        self._mean_s, self._mean_tokens = mean_s, mean_tokens
        self._random = random.Random(seed)

    def delay_s(self, prompt_tokens: int) -> float:
        """Seconds that a request of so many prompt tokens spends on the way."""
        return self._mean_s * (1 + prompt_tokens / self._mean_tokens) / 2 * self._random.uniform(0.5, 1.5)
