"""Through Envoy and the picker a fleet's caches are found as well as through the proxy."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from loadtest.replay.demo import WORKLOADS, DemoWorkload
from loadtest.replay.frontends import FACES, LOSS_MAX, RATIO_MAX, goals, run_face
from tests.envoy import install
from tests.support.figures import figure

PATIENCE_S = 120.0  # wall seconds that a client waits, since a busy machine is no failure

# Share of the proxy's hits that there must be on a machine that is busy with other things, of a workload most of whose
# tokens can be found: of one with a tenth, the same part of a run has twice as many hits at one time as at another.
FOUND_MIN, FOUND_OF = 0.7, 0.5


@pytest.mark.figures
@pytest.mark.parametrize("workload", WORKLOADS[:2], ids=lambda workload: workload.replay.workload)
async def test_hits_are_those_of_the_edge(workload: DemoWorkload) -> None:
    """The demo's workloads, a part of each: caches are found through Envoy, though no answer is seen but a sample. How
    many hits are lost beside the proxy, and the ninetieth percentile of first tokens, depend on what else the machine
    does: evidence judges them, of the whole by `python -m loadtest faces`, and the suite exactly, in virtual time
    (tests/loadtest/simulate/test_unseen.py)."""
    part = workload.replace_replay(requests_max=160, output_tokens_max=64, time_scale=20.0, timeout_s=PATIENCE_S * 20.0)
    rows = [await run_face(install.program(), part, face, Console(file=io.StringIO())) for face in FACES]
    assert [row.failed for row in rows] == [0, 0]
    hits, first_tokens, at_engines = goals(rows)
    assert hits.got is not None
    assert hits.got > FOUND_MIN or (rows[0].token_hit_rate or 0.0) < FOUND_OF
    figure(f"gateway_hits_lost_of_edge_{part.replay.workload}", LOSS_MAX, 1 - hits.got)
    assert first_tokens.got is not None
    figure(f"gateway_ttft_p90_of_edge_{part.replay.workload}", RATIO_MAX, first_tokens.got)
    assert at_engines.got is not None
    figure(f"gateway_ttft_p90_at_engines_{part.replay.workload}", RATIO_MAX, at_engines.got)
