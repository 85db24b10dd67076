"""The slice of a trace that `loadtest replay` sends over HTTP, in the simulation.

Every request is made from exactly the body that the client would send. The router's own dialect parses and hashes it.
The simulated engine's chat template renders it, and the result is hashed into the engine's blocks. So both sides see
the same keys and the same token counts, and a difference between them is one of time, not of input. The row is computed
by the code of `replay`.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from itertools import count

import msgspec

from loadtest.common.client import PATHS, Answer, body_of
from loadtest.common.traces import Request, Trace
from loadtest.fake_engine import tokens
from loadtest.fake_engine.calibration import Calibration
from loadtest.fake_engine.step import Limits
from loadtest.replay.run import ReplaySettings, Sent, row_of
from loadtest.sim_vs_http.report import AgreeRun
from loadtest.simulate.engine.cluster_spec import ClusterSpec
from loadtest.simulate.engine.workload import MODEL, SimRequest, Workload
from loadtest.simulate.engine.world import SimulatedRequest, Simulation
from router.core.dialects import OPENAI
from router.core.placement.policies import Policy
from router.core.prompts.block_keys import chain_of


class _Chat(msgspec.Struct):
    messages: list[tokens.Message]


@dataclass(frozen=True, slots=True)
class Cluster:
    """Parameters that both sides share, apart from the requests."""

    calibration: Calibration
    kv_tokens: int
    names: tuple[str, ...]
    """Names of the replicas, as the router over HTTP knew them: rings hash names."""
    probe_interval_s: float
    """Simulated seconds between two probes of a replica."""
    wire_s: float
    """Simulated seconds that a request spends outside of the engines, on average."""


def workload_of(trace: Trace, settings: ReplaySettings) -> Workload:
    """Return the requests that a replay with these settings may send."""
    size, numbers, longest = Limits().block_tokens, count(), settings.longest_answer_tokens(trace)
    sessions: list[tuple[SimRequest, ...]] = []
    for session in trace.sessions:
        if len(sessions) >= settings.requests_max or _enough(list(map(len, sessions)), settings):
            break
        requests = session.requests[: settings.requests_max]
        bodies = [_body(session.name, each, settings, longest) for each in requests]
        pairs = zip(requests, bodies, strict=True)
        sessions.append(tuple(_turn(next(numbers), session.name, *pair, settings, size) for pair in pairs))
    return Workload(
        settings.workload or trace.name,
        tuple(sessions),
        trace.kind == "open",
        size,
        active=settings.sessions_active,
        ramp_s=settings.ramp_s,
        think_max_s=settings.think_max_s,
        requests_max=settings.requests_max,
        warm_up=settings.warm_up,
        answer_tokens_max=longest,
    )


def _enough(lengths: list[int], settings: ReplaySettings) -> bool:
    """Return True if a closed loop cannot get past these sessions.

    Another session would start only after all but the active ones have ended. These alone, even the shortest, use up
    the requests.
    """
    ended = max(0, len(lengths) - settings.sessions_active + 1)
    return sum(sorted(lengths)[:ended]) >= settings.requests_max


def _body(session: str, request: Request, settings: ReplaySettings, longest_tokens: int) -> bytes:
    limit = settings.limit_of(session, request, longest_tokens)
    return body_of(request, MODEL, settings.endpoint, settings.answer_tokens(request), limit)


def _turn(
    number: int, session: str, request: Request, body: bytes, settings: ReplaySettings, block_tokens: int
) -> SimRequest:
    ask = OPENAI.parse(PATHS[settings.endpoint], body)
    chain = chain_of(ask, MODEL)
    if chain is None or ask.prompt is None:
        raise ValueError("a request of a trace has a prompt")
    if settings.endpoint == "chat":
        text = tokens.render_chat(msgspec.json.decode(body, type=_Chat).messages, None)
    else:
        text = request.text().encode()
    return SimRequest(
        number,
        session,
        request.at_s / settings.speed,
        request.think_s,
        tokens.count(text),
        settings.answer_tokens(request),
        request,
        ask.prompt.first_user_end,
        array("Q", chain.keys),
        chain.root,
        chain.end_key,
        chain.first_user_key,
        array("Q", tokens.chain(text, block_tokens)),
    )


def setting_of(settings: ReplaySettings, cluster: Cluster, wire_seed: int) -> ClusterSpec:
    """Return the cluster's setting, with clients that send the same `max_tokens` as those of a replay."""
    return ClusterSpec(
        replicas=len(cluster.names),
        **{each.name: getattr(cluster, each.name) for each in fields(cluster)},
        wire_seed=wire_seed,
        timeout_s=settings.timeout_s,
        seed=settings.seed,
        answer_limits=settings.answer_limits,
        foreknowledge=settings.foreknowledge or settings.ignore_eos,
    )


def simulate_slice(
    workload: Workload, settings: ReplaySettings, cluster: Cluster, policy: Callable[[], Policy], wire_seed: int
) -> AgreeRun:
    """Simulate the slice under a policy. `wire_seed` decides the order of requests that are sent at the same moment."""
    world = Simulation(workload, setting_of(settings, cluster, wire_seed), policy)
    result = world.run()
    counters = [replica.model.counters for replica in world.replicas.values()]
    first = settings.warm_up
    sent = [_to_sent(each, counts=number >= first) for number, each in enumerate(result.sent)]
    begun_s = result.sent[first].due_s if 0 < first < len(sent) else 0.0
    counted = [(float(each.queried_tokens), float(each.hit_tokens)) for each in counters]
    chosen = replace(settings, time_scale=1.0, replicas=cluster.names)
    return AgreeRun(row_of(workload.name, chosen, sent, result.duration_s - begun_s, counted), sent, counted)


def _to_sent(sent: SimulatedRequest, *, counts: bool) -> Sent:
    turn = sent.turn
    answer = Answer(
        ttft_s=None if sent.failure else sent.ttft_s,
        e2e_s=sent.e2e_s or 0.0,
        failure=sent.failure,
        rejected=sent.failure == "rejected",
        prompt_tokens=turn.prompt_tokens,
        cached_tokens=None if sent.failure else sent.cached_tokens,
        completion_tokens=0 if sent.failure else turn.output_tokens,
        replica=sent.lease.replica if sent.lease else None,
    )
    return Sent(turn.session, turn.request, answer, sent.replay, counts)
