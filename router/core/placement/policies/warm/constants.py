"""Constants of the price and of its tie breakers, each with its unit and its reason.

docs/architecture/price.md has them as a table. Any other constant behind a price is of a learned model, in the module
that learns it. `python -m loadtest simulate --sweep` shows the effect of other values.
"""

from __future__ import annotations

from typing import NamedTuple

DECODING = 0.5
WEIGHT_LEAST = 0.3
BUSY_UNITS = 3.0
DEFER_RATIO = 2.0
ELSEWHERE_MIN = 0.02
LAST_REPLICA_SLACK = 1
SPREAD = 2
RING_CHOICES = 2
PREFILL_QUEUE_SLOPE = 1.0
DISAGG_CANDIDATES = 4


class PriceConstant(NamedTuple):
    """A constant as the documentation shows it."""

    name: str
    value: float
    unit: str
    reason: str


PRICE_CONSTANTS = (
    PriceConstant(
        "DECODING",
        DECODING,
        "share of an answer's imbalance that counts",
        "The imbalance shrinks steadily to nothing during the answer.",
    ),
    PriceConstant(
        "WEIGHT_LEAST",
        WEIGHT_LEAST,
        "ms per ms after the first token",
        "Requests that are bound to a cache do not balance load, however many there are.",
    ),
    PriceConstant(
        "BUSY_UNITS",
        BUSY_UNITS,
        "units of prefill that wait at the mean replica",
        "In a busier fleet requests may be deferred: no request starts soon anyway.",
    ),
    PriceConstant(
        "DEFER_RATIO",
        DEFER_RATIO,
        "multiples of the prompt's own work",
        "A prompt that makes others repeat more work than this is thrashing.",
    ),
    PriceConstant(
        "ELSEWHERE_MIN",
        ELSEWHERE_MIN,
        "probability",
        "A smaller probability means no other router: counters are late by as much.",
    ),
    PriceConstant(
        "LAST_REPLICA_SLACK",
        LAST_REPLICA_SLACK,
        "open requests",
        "A replica with so few requests has room for a tie, regardless of the load bound.",
    ),
    PriceConstant(
        "SPREAD",
        SPREAD,
        "open requests",
        "A router's own replicas may exceed others by so many if they hold the same prefix and wait as long.",
    ),
    PriceConstant(
        "RING_CHOICES",
        RING_CHOICES,
        "places on the hash ring",
        "The less loaded of two is much better than one place, and more places add little (Mitzenmacher 2001).",
    ),
    PriceConstant(
        "PREFILL_QUEUE_SLOPE",
        PREFILL_QUEUE_SLOPE,
        "per unit of waiting prefill",
        "A queue at the prefill replicas delays all later requests, so decoding counts less.",
    ),
    PriceConstant(
        "DISAGG_CANDIDATES",
        DISAGG_CANDIDATES,
        "replicas for each stage",
        "The cheapest pair is among the cheapest few of each stage, unless these form no pair.",
    ),
)
