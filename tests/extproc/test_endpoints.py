"""Which replicas a gateway is told of."""

from __future__ import annotations

from router.core.types.disagg_types import KvConnector, PrefillStage
from router.core.types.placements import Candidate, Confidence, ExternalKv, PlacementReason, Receipt
from router.extproc.endpoints import destinations

PREFILL, DECODE, OTHER = (f"http://10.0.0.{n}:8000" for n in (1, 2, 3))


def _receipt(leg: PrefillStage | None) -> Receipt:
    receipt = Receipt(DECODE, "m", PlacementReason.SPLIT, Confidence.EXACT, 9, 0)
    receipt.candidates = tuple(
        Candidate(id_, 0, 9, 0.0, 1.0, 0.0, 0.0, 0, price_ms=price_ms)
        for id_, price_ms in ((PREFILL, 1.0), (DECODE, 2.0), (OTHER, 3.0))
    )
    if leg is not None:
        receipt.brought = ExternalKv(leg=leg)
    return receipt


def test_whoever_prefills_is_no_fallback() -> None:
    """The gateway goes on to another replica with the same order to have the prompt prefilled there: no replica, and no
    other rank of its server, does that for itself."""
    assert destinations(_receipt(None), DECODE, 2) == ["10.0.0.2:8000", "10.0.0.1:8000", "10.0.0.3:8000"]
    for prefill in (PREFILL, PREFILL + "#dp3"):
        leg = PrefillStage(prefill, KvConnector.NIXL, "", 0, 0.0, 0.0, 0.0)
        assert destinations(_receipt(leg), DECODE, 2) == ["10.0.0.2:8000", "10.0.0.3:8000"]
