"""Whose a stored response is, in a memory that tenants share."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.control.response_owners import ResponseOwners
from router.placement_api import UnknownResponse

pytestmark = pytest.mark.promise("A stored response is its tenant's alone.", "tenants")

IDS, TENANTS = st.sampled_from(["r1", "r2", "r3", "r4"]), st.sampled_from(["", "a", "b"])


@given(st.lists(st.tuples(st.booleans(), IDS, TENANTS)), st.booleans())
def test_owners_of_responses(steps: list[tuple[bool, str, str]], private: bool) -> None:
    """A model of who gets where: three ids are remembered. Where they are private, each stays its first tenant's,
    everything else is unknown to everybody, and who has most of them loses the oldest one; otherwise the oldest of all
    is forgotten."""
    owners, model = ResponseOwners(3, private=private), dict[str, tuple[str, str]]()
    for n, (learns, id_, tenant) in enumerate(steps):
        if learns:
            owners.learn(id_, f"replica {n}", tenant)
            if not private or model.get(id_, ("", tenant))[1] == tenant:
                model[id_] = (f"replica {n}", tenant)
            if len(model) > 3:
                counts = Counter(whose for _, whose in model.values())
                gone = set(model) - set(owners.ids())
                assert [counts[model[each][1]] for each in gone] == [max(counts.values())] or not private
                oldest = next(each for each in model if not private or model[each][1] in {model[g][1] for g in gone})
                assert gone == {oldest}
                del model[oldest]
        elif private and model.get(id_, ("", None))[1] != tenant:
            with pytest.raises(UnknownResponse):
                owners.owner(id_, tenant)
        else:
            assert owners.owner(id_, tenant) == model.get(id_, (None,))[0]
        assert owners.owner(None, tenant) is owners.owner("", tenant) is None
        assert set(owners.ids()) == set(model)


@given(st.lists(st.tuples(st.sampled_from(["learn", "report"]), IDS, TENANTS)), st.booleans())
def test_no_report_takes_what_was_learned_here(steps: list[tuple[str, str, str]], private: bool) -> None:
    """Whatever others report, in any order and number: owners are the same, for ids that were learned here, as if
    nothing had been reported; and no more reports are kept than may be."""
    owners, alone = (ResponseOwners(3, private=private) for _ in range(2))
    for n, (what, id_, tenant) in enumerate(steps):
        if what == "learn":
            owners.learn(id_, f"replica {n}", tenant)
            alone.learn(id_, f"replica {n}", tenant)
        else:
            owners.report(id_, f"replica {n}", tenant)
        assert {id_: owners.owner_entry(id_) for id_ in alone.ids()} == {
            id_: alone.owner_entry(id_) for id_ in alone.ids()
        }
        assert len(set(owners.ids()) - set(alone.ids())) <= 3
        assert len(owners.ids()) == len(set(owners.ids()))


@pytest.mark.promise("Reports of other routers replace no owner of a response that was learned here.", "store")
@pytest.mark.finding("2026-11-28/5")
def test_reports_in_a_tenants_name_do_not_make_its_responses_unknown() -> None:
    """However many: its own stay its own, and what is not known is nobody's, even by a report of somebody else."""
    owners = ResponseOwners(100, private=True)
    owners.learn("resp_1", "http://a", "acme")
    for n in range(10_000):
        owners.report(f"forged_{n}", "http://a", "acme")
    owners.report("resp_1", "http://evil", "evil")
    assert owners.owner("resp_1", "acme") == "http://a"
    with pytest.raises(UnknownResponse):
        owners.owner("resp_1", "evil")
    for tenant in ("acme", "evil"):
        with pytest.raises(UnknownResponse):
            owners.owner("forged_0", tenant)


def test_who_stores_very_many_makes_no_others_unknown() -> None:
    """One tenant's responses, however many, push out its own: another's few, made before, stay its own."""
    owners = ResponseOwners(1_000, private=True)
    for n in range(100):
        owners.learn(f"resp_few_{n}", "http://a", "few")
    for n in range(100_000):
        owners.learn(f"resp_{n}", "http://b", "acme")
    assert [owners.owner(f"resp_few_{n}", "few") for n in range(100)] == ["http://a"] * 100
    assert len(owners.ids()) == 1_000
    assert owners.owner("resp_99999", "acme") == "http://b"
