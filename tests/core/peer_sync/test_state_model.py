"""What a router knows, told and taken over, against the router that knew it (core/peer_sync/snapshot_import.py)."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from router.core.fleet.lease import Lease
from router.core.placement.router import Router
from router.core.types.placements import EndReason, Outcome, Usage
from router.core.types.replicas import Load
from tests.core.peer_sync.several import Several, keys
from tests.core.peer_sync.stated import restored, told

GROUPS, BLOCKS = 6, 40
Steps = list[tuple[str, int, int]]
steps = st.lists(
    st.tuples(
        st.sampled_from(["place", "place", "finish", "fail", "restart", "drop"]),
        st.integers(0, GROUPS - 1),
        st.integers(1, BLOCKS),
    ),
    max_size=40,
)


def lived(several: Several, name: str, steps: Steps, now_s: float) -> list[Lease]:
    """Do all of it with one router; returns leases that are open still."""
    router, leases = several.router(name), list[Lease]()
    for what, group, size in steps:
        now_s += 0.5
        if what == "place":
            leases.append(several.place(name, prompt_tokens=size * 128, group=group, now_s=now_s))
        elif what == "restart":
            router.observations.forget(several.ids[group % len(several.ids)])
        elif what == "drop":
            router.index.drop(several.ids[group % len(several.ids)], keys(group, size)[size // 2 :])
        elif leases:
            lease = leases.pop(size % len(leases))
            ending = EndReason.OK if what == "finish" else EndReason.FAILED
            router.finish(
                lease, Outcome(ending, Usage(lease.prompt_tokens, 20, None) if what == "finish" else None), now_s
            )
    return leases


def begun(router: Router, ids: list[str], started_s: float = 5.0) -> None:
    """Each engine says since when it runs, and how much it has counted."""
    for id_ in ids:
        router.observations.observe_load(id_, Load(prompt_tokens_total=1e9, started_s=started_s))


@given(steps)
def test_every_prompt_matches_as_before(done: Steps) -> None:
    """Of every prompt, whole or in part, each replica is believed to hold what the router before believed, but for what
    only requests under way vouched for; and who answered whom is known."""
    several = Several("before", "after")
    before, after = several.router("before"), several.router("after")
    begun(before, several.ids)
    begun(after, several.ids)
    for lease in lived(several, "before", done, 100.0):
        before.finish(lease, Outcome(EndReason.FAILED), 200.0)
    assert not restored(after, told(before, 200.0), 7.0)
    for group in range(GROUPS):
        for size in (1, 7, BLOCKS // 2, BLOCKS):
            prompt = keys(group, size)
            assert after.index.match(prompt) == before.index.match(prompt)
    assert {m.id: after.index.blocks(m.id) for m in after.members} == {
        m.id: before.index.blocks(m.id) for m in before.members
    }
    assert homes(after) == homes(before)


def homes(router: Router) -> dict[int, tuple[str, int, int]]:
    """Who answered which prompt, of caches that are still there."""
    lives = {member.id: member.cache_epoch for member in router.members}
    answers = router.answers.newest(0, 1_000)
    return {key: (a.replica, a.prompt_tokens, a.completion_tokens) for key, a in answers if lives[a.replica] == a.life}


@given(steps)
def test_blocks_go_in_the_same_order(done: Steps) -> None:
    """What was used least recently before is what is evicted first after."""
    several = Several("before", "after", replicas=1)
    before, after = several.router("before"), several.router("after")
    for router in (before, after):
        begun(router, several.ids)
    for lease in lived(several, "before", done, 100.0):
        before.finish(lease, Outcome(EndReason.OK), 200.0)
    restored(after, told(before, 200.0), 300.0)
    (id_,) = several.ids
    for room in range(before.index.blocks(id_), 0, -7):
        for router in (before, after):
            router.index.resize(id_, room)
        for group in range(GROUPS):
            assert after.index.match(keys(group, BLOCKS)) == before.index.match(keys(group, BLOCKS))


@given(steps, steps)
def test_the_older_never_replaces_the_newer(old: Steps, new: Steps) -> None:
    """A router that has seen something itself believes all of it still when it has taken over what is older, and more
    only of what the router before believed; and what it has seen goes last."""
    several = Several("before", "after")
    before, after = several.router("before"), several.router("after")
    for router in (before, after):
        begun(router, several.ids)
    for lease in lived(several, "before", old, 100.0):
        before.finish(lease, Outcome(EndReason.OK), 200.0)
    pieces = told(before, 200.0)
    open_ = lived(several, "after", new, 300.0)
    own = dict(after.answers.newest(0, 1_000))
    prompts = [keys(group, BLOCKS) for group in range(GROUPS)]
    own_depths = [after.index.match(prompt) for prompt in prompts]
    own_blocks = {id_: set(after.index.holders[id_].owner) for id_ in several.ids}
    assert not restored(after, pieces, 400.0)
    for prompt, was in zip(prompts, own_depths, strict=True):
        now, older = after.index.match(prompt), before.index.match(prompt)
        for id_ in several.ids:
            assert was.get(id_, 0) <= now.get(id_, 0)
            held = own_blocks[id_] | set(before.index.holders[id_].owner)
            assert all(key in held for key in prompt[: now.get(id_, 0)])
            assert now.get(id_, 0) >= older.get(id_, 0)
    assert {key: after.answers.get(key) for key in own} == own
    for id_ in several.ids:
        after.index.resize(id_, max(1, len(own_blocks[id_])))
        assert set(after.index.holders[id_].owner) == own_blocks[id_] or not own_blocks[id_]
    for lease in open_:
        after.finish(lease, Outcome(EndReason.OK), 500.0)
