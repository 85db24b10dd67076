"""What agents' clients say of their conversations, where their requests come by several routers."""

from __future__ import annotations

import pytest

from router.core.fleet.lease import Lease
from router.core.placement.placement_request import PlacementRequest
from router.core.types.placements import EndReason, Outcome, Usage
from router.core.types.requests import ConversationRef, RequestSpec
from tests.core.peer_sync.several import MODEL, TOKENS_A_BLOCK, Several, keys

MAIN, CHILD = 11, 12
SHARED = 4  # blocks of a system prompt that every replica holds
PROMPT = 64 * TOKENS_A_BLOCK


def _ended(routers: Several, name: str, lease: Lease, now_s: float) -> Lease:
    """Its answer is over, and everybody has heard of it."""
    routers.tell_all(now_s)
    routers.router(name).first_token(lease, now_s + 0.1)
    usage = Usage(lease.prompt_tokens, 10, 0)
    routers.router(name).finish(lease, Outcome(EndReason.OK, usage), now_s + 0.2)
    routers.tell_all(now_s + 0.3)
    return lease


def _served(routers: Several, name: str, now_s: float, *, group: int, kin: ConversationRef | None) -> Lease:
    """A short prompt behind the system prompt, served."""
    tokens = (SHARED + 2) * TOKENS_A_BLOCK
    lease = routers.place(name, prompt_tokens=tokens, now_s=now_s, group=group, shared_blocks=SHARED, kin=kin)
    return _ended(routers, name, lease, now_s)


def _unread(routers: Several, name: str, kin: ConversationRef, ring_key: str, now_s: float) -> Lease:
    """A request whose body does not come by the router."""
    wanted = PlacementRequest(RequestSpec(MODEL), MODEL, None, ring_key, body_tokens=100, conversation=kin)
    return routers.router(name).route(wanted, now_s)


def _together(*, told: bool) -> int:
    """Of 20 sub-agents whose parents came by another router, those that begin where their parents are."""
    there = 0
    for session in range(20):
        routers, now_s = Several("a", "b", replicas=6), 1.0
        for id_ in routers.ids:
            system = routers.place("a", prompt_tokens=SHARED * TOKENS_A_BLOCK, now_s=now_s, group=0, only=id_)
            _ended(routers, "a", system, now_s)
            now_s += 1.0
        parent = _served(routers, "a", now_s, group=100 + session, kin=ConversationRef(MAIN) if told else None)
        kin = ConversationRef(CHILD, MAIN) if told else None
        child = _served(routers, "b", now_s + 1.0, group=200 + session, kin=kin)
        there += child.replica == parent.replica
    return there


def test_a_sub_agent_of_another_router_begins_where_its_parent_is() -> None:
    """Every replica holds as much of its prompt: who was told whose it is knows, and who was not does not."""
    assert _together(told=True) == 20
    assert _together(told=False) < 16


def test_unread_requests_stay_where_another_router_sent_their_conversation() -> None:
    """Without a prompt to go by the name is all there is, and it is told though there are no blocks to tell of."""
    for session in range(10):
        routers = Several("a", "b", replicas=6)
        first = _ended(routers, "a", _unread(routers, "a", ConversationRef(MAIN), f"r{session}", 1.0), 1.0)
        again, child = (
            _unread(routers, "b", kin, "elsewhere", 1.4)
            for kin in (ConversationRef(MAIN), ConversationRef(CHILD, MAIN))
        )
        assert {again.replica, child.replica} == {first.replica}


@pytest.mark.inside
@pytest.mark.parametrize("by", ["a", "b"])
def test_a_conversation_that_is_over_is_expected_back_by_nobody(by: str) -> None:
    """Whichever router the last request came by: no mark of it waits anywhere, and evicting what was its alone costs
    nothing, while what it shared with others is expected as before."""
    routers = Several("a", "b", replicas=1)
    _served(routers, "a", 1.0, group=1, kin=None)
    first = routers.place(
        "a", prompt_tokens=PROMPT, now_s=2.0, group=2, shared_blocks=SHARED, kin=ConversationRef(MAIN)
    )
    _ended(routers, "a", first, 2.0)
    marks = {name: len(routers.router(name).reuse) for name in ("a", "b")}
    assert {len(routers.router(name).conversations) for name in marks} == {1}
    last = routers.place("a" if by == "a" else "b", prompt_tokens=PROMPT + 2 * TOKENS_A_BLOCK, now_s=3.0, group=2,
                         shared_blocks=SHARED, kin=ConversationRef(MAIN, 0, True))  # fmt: skip
    _ended(routers, by, last, 3.0)
    for name, before in marks.items():
        router = routers.router(name)
        assert len(router.reuse) == before - 1
        assert not len(router.conversations)
        out = router.index.holders[routers.ids[0]].next_out(100)
        over = sum(blocks for blocks, at_s in out if at_s == float("-inf"))
        assert 66 - SHARED <= over <= 68 - SHARED
        assert sum(blocks for blocks, _ in out) == over + SHARED + 2
        assert router.index.depth(routers.ids[0], [*keys(0, SHARED), *keys(2, 66 - SHARED)]) == 66
