"""How the observatory does on the corpus: each prompt through the path that a request takes, judged by kind.

Where DESIGN leaves open how deep a path goes (which tool is out of order, which object's keys, which message is gone),
any path counts that names the same tool, object or message. Where a text changed, the path must be that of the text.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from router.core.dialects import PATHS
from router.core.insights.difference.compare import compare
from router.core.insights.prompt_memory.diff_candidate import DiffCandidate
from router.core.insights.prompt_memory.prompt_tracker import PromptTracker
from router.core.prompts.block_keys import chain_of
from router.core.types.cache_misses import Difference, DifferenceKind, PromptAnalysis
from tests.core.insights.conversations import path_of
from tests.core.insights.released import NAME
from tests.core.insights.truth import Request, Truth

TOKEN_BYTES = 4
KINDS = (*DifferenceKind, NAME)  # rows of scores: changes that were always there, and those that came with a release
_TOOLS = (DifferenceKind.TOOL_ORDER, DifferenceKind.TOOL_ADDED, DifferenceKind.TOOL_REMOVED)


@dataclass(slots=True)
class Score:
    """Of one kind; `false` is of clean requests."""

    turns: int = 0
    right: int = 0
    false: int = 0
    repeated: list[float] = field(default_factory=list)  # bytes said / true
    wrong: list[str] = field(default_factory=list)
    twice: int = 0  # turns of which more is said to be known or repeated than there is

    @property
    def share(self) -> float:
        """Of damaged turns, those with the right class and position."""
        return self.right / max(1, self.turns)


Scores = dict[str, Score]


def watch(requests: Iterable[Request]) -> Iterable[tuple[Request, PromptAnalysis]]:
    """What the observatory says of each, in their order."""
    watcher = PromptTracker(256 << 20, 4 << 20, 4096, excerpts=True, seed=7)
    for request in requests:
        path = request.style.path
        ask = PATHS[path].parse(path, request.body)
        chain = chain_of(ask, "m")
        if chain is None:
            raise AssertionError(f"{request.session}/{request.turn}: not understood")
        assert ask.prompt is not None
        assert ask.prompt.text == request.text, f"{_name(request)}: canonical bytes differ from the corpus's"
        look = watcher.classify(ask, chain, session=request.hint, path=path, body=request.body, sure=True)
        if isinstance(look, DiffCandidate):
            look.read()
            compared = compare(
                look.before, look.after, from_bytes=look.from_bytes, body=request.body, path=path, excerpts=True
            )
            watcher.record_diff(look, compared)
        yield request, look.sighting if isinstance(look, DiffCandidate) else look


def scored(requests: Iterable[Request], scores: Scores | None = None) -> Scores:
    """The requests' scores, added to those that are given."""
    scores = scores if scores is not None else defaultdict(Score)
    for request, sighting in watch(requests):
        if not request.judged:
            continue
        if not request.truths:
            score = scores["clean"]
            score.turns += 1
            if sighting.difference is not None:
                score.false += 1
                score.wrong.append(f"{_name(request)}: {sighting.difference}")
            continue
        kind = NAME if f": {NAME}: " in request.damage else request.truths[0].change
        _judge(scores[kind], request, sighting)
    return scores


def _judge(score: Score, request: Request, sighting: PromptAnalysis) -> None:
    said = sighting.difference
    score.turns += 1
    score.twice += sighting.known_bytes + sighting.repeated_bytes > len(request.text)
    placed = [truth for truth in request.truths if said is not None and is_placed(said, truth, request)]
    classed = said is not None and said.change == request.truths[0].change
    score.right += bool(placed) and classed
    if placed and classed:
        score.repeated.append(sighting.repeated_bytes / max(1, placed[0].repeated_bytes))
    else:
        truth = request.truths[0]
        told = f"{truth.change} message {truth.place.message} {truth.path} @{truth.offset_bytes} ({truth.at_bytes})"
        told += f", {truth.repeated_bytes} of {len(request.text)} repeated, hint {request.hint or request.style.key!r}"
        score.wrong.append(f"{_name(request)}: true {told}; said {said}")


def is_placed(said: Difference, truth: Truth, request: Request) -> bool:
    """Message, path, and offsets to a token."""
    if said.message != truth.place.message or abs(said.offset_bytes - truth.offset_bytes) > TOKEN_BYTES:
        return False
    if not _same_path(said.path, truth, request):
        return False
    exact = truth.at_bytes is not None and truth.change != DifferenceKind.TRUNCATED_HISTORY
    return not exact or abs(said.at_bytes - (truth.at_bytes or 0)) <= TOKEN_BYTES


def _same_path(said: str, truth: Truth, request: Request) -> bool:
    place = truth.place
    if truth.change in _TOOLS:
        return _below(said, truth.path) or (said == "tools" and not request.talk.tools)
    if truth.change == DifferenceKind.KEY_ORDER:
        least = replace(place, keys=place.keys[:1] if place.kind == "tool" else ())
        above = _below(truth.path, said) and _below(said, path_of(least, request.talk, request.style))
        return above or _below(said, truth.path)
    if truth.change == DifferenceKind.TRUNCATED_HISTORY or place.kind == "message":
        return _below(said, path_of(replace(place, kind="message"), request.talk, request.style))
    return said == truth.path


def _below(path: str, base: str) -> bool:
    return path == base or (path.startswith(base) and path[len(base)] in ".[")


def _name(request: Request) -> str:
    return f"{request.session} turn {request.turn} ({request.damage}, {request.style.path})"
