"""Import of another process's state, in small steps, for replicas that still have the same engine process.

A restarted engine has lost its cache, but looks like the one before it. So a replica's part is used only if one of
these criteria confirms that the engine is the same, and none contradicts:

    instance    discovery names the engine itself (in Kubernetes the pod, and its number of container starts)
    start       the engine's metrics publish the start time of its counters or of its process
    events      a replay from the last batch that was applied begins with that very batch (engines/kv_events)
    counters    it had counted more prompt tokens than any engine could have since: another one cannot be that far

If no criterion is available, the part is not used. Blocks from an engine's own events must be confirmed by its event
stream, and are not credited before. All imported state is older than anything learned here, and never replaces it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from router.core.estimators.response_memory import PastAnswer
from router.core.fleet.member import ReplicaState
from router.core.kv_events.event_state_codec import (
    BlockPage,
    CopyPage,
    EngineState,
    StreamState,
    UnreadableState,
    unpack_numbers,
)
from router.core.peer_sync.learned_models import adopt_models, check_finite
from router.core.peer_sync.messages import BadMessage
from router.core.peer_sync.snapshot_format import (
    REPLICAS_MAX,
    VERSION,
    StateEnd,
    StateFits,
    StateHomes,
    StateModels,
    StateOrigin,
    StatePiece,
    StateReplica,
    StateTouches,
)
from router.core.placement.router import Router

STEP_KEYS = 512  # keys that are imported in one step
STEP_HOMES = 512  # answers that are imported in one step
PROMPT_TOKENS_PER_S_MAX = 1e6  # prompt tokens that no engine counts in a second, including cached ones


@dataclass(slots=True)
class StatePart:
    """Imported state of one replica."""

    replica: StateReplica
    stream: StreamState | None = None
    pages: list[BlockPage | CopyPage] = field(default_factory=list)
    touches: list[StateTouches] = field(default_factory=list)
    fits: StateFits | None = None
    homes: list[tuple[int, int, int]] = field(default_factory=list)  # (key, prompt tokens, completion tokens)

    def events(self) -> EngineState | None:
        """Return the state of the replica's events, and drop it here."""
        stream, pages, self.stream, self.pages = self.stream, self.pages, None, []
        return EngineState(stream, pages) if stream is not None else None


class StateParts:
    """Pieces in the order of arrival, assembled by replica."""

    def __init__(self) -> None:
        self.origin: StateOrigin | None = None
        self.parts: dict[str, StatePart] = {}
        self.models: StateModels | None = None
        self.whole = False  # the last piece has arrived
        self._order: list[StatePart] = []
        self._pieces = 0

    def take(self, piece: StatePiece) -> None:
        """Add the next piece. Raises UnreadableState."""
        if self.whole:
            raise UnreadableState("more chunks than announced")
        if isinstance(piece, StateOrigin):
            if self._pieces or piece.version != VERSION:
                raise UnreadableState(f"version {piece.version} instead of {VERSION}")
            _check([piece.at_s])
            self.origin = piece
        elif self.origin is None:
            raise UnreadableState("the origin is not the first chunk")
        elif isinstance(piece, StateEnd):
            if piece.pieces != self._pieces:
                raise UnreadableState(f"{self._pieces} pieces of {piece.pieces}")
            self.whole = True
        elif isinstance(piece, StateReplica):
            if len(self._order) >= REPLICAS_MAX or piece.id in self.parts:
                raise UnreadableState("too many or duplicate replicas")
            part = self.parts[piece.id] = StatePart(piece)
            self._order.append(part)
        elif isinstance(piece, StateHomes):
            self._take_homes(piece)
        elif isinstance(piece, StateModels):
            self.models = piece
        elif not self._order:
            raise UnreadableState("a part of an unknown replica")
        else:
            _take_part(self._order[-1], piece)
        self._pieces += 1

    def _take_homes(self, homes: StateHomes) -> None:
        rows = zip(
            unpack_numbers(homes.end_keys), homes.replicas, homes.prompt_tokens, homes.completion_tokens, strict=False
        )
        for key, place, prompt_tokens, completion_tokens in rows:
            if place >= len(self._order):
                raise UnreadableState("an answer of an unknown replica")
            self._order[place].homes.append((key, prompt_tokens, completion_tokens))


def _take_part(part: StatePart, piece: StreamState | BlockPage | CopyPage | StateTouches | StateFits) -> None:
    if isinstance(piece, StreamState):
        part.stream = piece
    elif isinstance(piece, StateTouches):
        if sum(piece.lengths) * 8 != len(piece.keys) or len(piece.lengths) != len(piece.idle_s):
            raise UnreadableState("uses of an invalid length")
        _check(piece.idle_s)
        part.touches.append(piece)
    elif isinstance(piece, StateFits):
        part.fits = piece
    else:
        part.pages.append(piece)


def same_engine(replica: StateReplica, member: ReplicaState, age_s: float) -> tuple[bool | None, str]:
    """Return (True if the engine is the same as `age_s` seconds ago, None if no criterion is available; reason)."""
    then, now, load = replica.instance, member.replica.instance, member.load
    began_s, begins_s = replica.started_s, load.started_s
    counted, counts = replica.prompt_tokens, load.prompt_tokens_total
    named = bool(then and now)
    if named and then != now:
        return False, "a different engine has this address"
    timed = began_s is not None and begins_s is not None and began_s == begins_s
    if began_s is not None and begins_s is not None and not timed:
        return False, "the engine was restarted"
    if counted is not None and counts is not None:
        if counts < counted:
            return False, "the engine's counters decreased"
        timed = timed or counted >= PROMPT_TOKENS_PER_S_MAX * age_s
    return (True, "") if named or timed else (None, "the engine could not be verified as the same")


def import_replica(router: Router, member: ReplicaState, part: StatePart, idle_s: float, now_s: float) -> Iterator[int]:
    """Import a replica's part, which was exported `idle_s` seconds ago; its engine must be the same. Yield after each
    step the number of blocks that are new by our own estimate. Stops early if the cache is cleared in the meantime.
    Raises UnreadableState."""
    life, fits = member.cache_epoch, part.fits
    if fits is not None:
        prefill, steps = fits.prefill, fits.steps
        _check([prefill.log_sum, prefill.weight, steps.log_sum, steps.weight])
        member.own_speed.prefill_factor.adopt(prefill.log_sum, prefill.weight, prefill.observations, now_s)
        member.own_speed.step_factor.adopt(steps.log_sum, steps.weight, steps.observations, now_s)
    for touches in part.touches:
        for keys, ago_s in _few(touches):
            if router.fleet.member(member.id) is not member or member.cache_epoch != life:
                return
            yield router.index.restore(member.id, keys, now_s - idle_s - ago_s)
    for start in range(0, len(part.homes), STEP_HOMES):
        if router.fleet.member(member.id) is not member or member.cache_epoch != life:
            return
        for key, prompt_tokens, completion_tokens in part.homes[start : start + STEP_HOMES]:
            router.answers.restore(key, PastAnswer(member.id, prompt_tokens, completion_tokens, life))
        yield 0


def take_models(router: Router, told: StateModels) -> None:
    """Start with the imported values for kinds of replicas and models' tokens, if none were learned here. Raises
    UnreadableState."""
    try:
        if told.models is not None:
            adopt_models(router, told.models)
    except BadMessage as error:
        raise UnreadableState(str(error)) from error
    for name, counts in told.tokens:
        _check(counts)
        router.models.tokens(name).adopt(counts)


def _few(touches: StateTouches) -> Iterator[tuple[list[int], float]]:
    """Yield (keys, seconds since their use) in small groups, the latest use first. The beginning of a long prompt comes
    first, because it is evicted last."""
    keys, start = unpack_numbers(touches.keys), 0
    for length, ago_s in zip(touches.lengths, touches.idle_s, strict=True):
        for begin in range(start, start + length, STEP_KEYS):
            yield keys[begin : min(begin + STEP_KEYS, start + length)], ago_s
        start += length


def _check(numbers: list[float]) -> None:
    try:
        check_finite(numbers)
    except BadMessage as error:
        raise UnreadableState(str(error)) from error
