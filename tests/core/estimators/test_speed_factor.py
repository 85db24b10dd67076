"""The speed of one replica, as a factor of its fleet's."""

from __future__ import annotations

from math import exp, inf, log, nan
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from router.core.estimators.decode_step import StepModel
from router.core.estimators.prefill import PrefillFit, PrefillModel
from router.core.estimators.speed_factor import (
    AVOIDED,
    BAND,
    CLIPPED_FROM,
    FACTOR_MAX,
    FADE_S,
    OUTLIER,
    PRIOR,
    WEIGHT_MAX,
    SpeedFactor,
)
from router.core.fleet.stall_detector import LEARNED
from tests.support.examples import examples

H100 = PrefillModel(floor_ms=12.0, per_token_ms=0.055, per_token_context_ms=1.1e-6)


def taught(times: float, observations: int, *, noise: float = 0.0, seed: int = 1) -> SpeedFactor[PrefillModel]:
    """A factor that saw prompts of many sizes on a replica that takes so many times as long as H100."""
    factor, rng = SpeedFactor[PrefillModel](), Random(seed)
    for n in range(observations):
        expected_ms = H100.ms(rng.randrange(1_000, 30_000), rng.choice([0, rng.randrange(60_000)]))
        factor.observe(times * expected_ms * exp(rng.gauss(0, noise)), expected_ms, float(n))
    return factor


@pytest.mark.parametrize("noise", [0.0, 0.3])
@pytest.mark.parametrize("times", [1 / 16, 1 / 4, 2.0, 4.0, 16.0, 32.0])
def test_a_replica_s_speed_is_learned(times: float, noise: float) -> None:
    """After 100 answers of a replica that takes k times as long the factor is k within 20 %, at sizes that were never
    seen as well."""
    factor = taught(times, 100, noise=noise)
    assert factor.value == pytest.approx(times, rel=0.2)
    assert factor.scale_model(H100).ms(90_000, 0) == pytest.approx(times * H100.ms(90_000, 0), rel=0.2)


@pytest.mark.parametrize("times", [2.0, 8.0])
def test_a_few_answers_say_which_way(times: float) -> None:
    """One answer moves the factor part of the way, and each further one closer."""
    values = [taught(times, answers).value for answers in (1, 3, 10, 50)]
    assert values[0] > 1
    assert values == sorted(values)
    assert values[0] == pytest.approx(times ** (1 / (1 + PRIOR)))
    assert values[2] > times / 1.5


def test_a_replica_whose_speed_changes_is_followed() -> None:
    """Old observations are forgotten: two hundred answers later only the new speed is known."""
    factor = taught(16.0, 300)
    for _ in range(200):
        factor.observe(50.0, 100.0)
    assert factor.value == pytest.approx(0.5, rel=0.1)


@given(st.lists(st.floats(0.81, 1.24), max_size=60), st.sampled_from([H100, StepModel()]))
def test_within_the_band_a_replica_is_as_fast_as_its_fleet(
    ratios: list[float], fleet: PrefillModel | StepModel
) -> None:
    """Whatever is observed within BAND, the factor is exactly 1, and the model is the fleet's own object: replicas that
    are alike have equal prices."""
    factor = SpeedFactor[PrefillModel | StepModel]()
    for ratio in ratios:
        factor.observe(100.0 * ratio, 100.0)
    assert 1 / BAND < 0.81 < 1.24 < BAND
    assert factor.value == 1.0
    assert factor.scale_model(fleet) is fleet
    assert factor.observations == len(ratios)


def test_a_model_is_made_once_for_each_change() -> None:
    """The model is the same object until the factor or the fleet's model changes, and is of these two then."""
    factor = taught(4.0, 10)
    first, other = factor.scale_model(H100), PrefillModel()
    assert factor.scale_model(H100) is first
    assert factor.scale_model(other) == other.times(factor.value)
    assert factor.scale_model(H100) == first == H100.times(factor.value)
    factor.observe(400.0, 100.0)
    assert factor.scale_model(H100) == H100.times(factor.value) != first


@given(st.lists(st.floats(-4, 4), max_size=30), st.lists(st.floats(-4, 4), max_size=30))
def test_what_two_routers_observe_adds_up(here: list[float], there: list[float]) -> None:
    """Both routers have the same factor: the exponential of all logarithms by all weights. Once the other one is gone,
    what was observed here is left."""
    routers = SpeedFactor[PrefillModel](), SpeedFactor[PrefillModel]()
    for router, logs in zip(routers, (here, there), strict=True):
        for each in logs:
            router.observe(100.0 * exp(each), 100.0)
    alone = routers[0].value
    routers[0].share("there", *routers[1].evidence)
    routers[1].share("here", *routers[0].evidence)
    log_sum, weight = (sum(each) for each in zip(routers[0].evidence, routers[1].evidence, strict=True))
    expected = exp(log_sum / (weight + PRIOR))
    for router in routers:
        assert router.value == (pytest.approx(expected) if not 1 / BAND < expected < BAND else 1.0)
        assert router.is_known is bool(here or there)
    routers[0].forget("there")
    assert routers[0].value == alone
    assert routers[0].is_known is bool(here)


@pytest.mark.parametrize("times", [0.25, 3.0, 16.0])
def test_two_routers_learn_as_much_as_one_would(times: float) -> None:
    """Ten answers seen by either router are nearly twenty seen by one, however often they are shared."""
    one, routers = taught(times, 20), [taught(times, 10, seed=seed) for seed in (1, 2)]
    for _ in range(5):
        routers[0].share("there", *routers[1].evidence)
    assert routers[0].value == pytest.approx(one.value, rel=0.05)
    assert routers[0].observations == 10


@pytest.mark.parametrize(
    ("log_sum", "weight"), [(1e308, 1e308), (-1e308, 1e308), (1e308, 0.0), (500.0, 0.1), (5.0, -3.0)]
)
def test_no_router_shares_more_than_it_can_observe(log_sum: float, weight: float) -> None:
    """Evidence that no answers could give is cut to what they could, and counts for no more than one router's; without
    weight it is none."""
    factor, most = SpeedFactor[PrefillModel](), SpeedFactor[PrefillModel]()
    for name in "abc":
        factor.share(name, log_sum, weight)
    real = min(max(weight, 0.0), WEIGHT_MAX)
    for name in "abc":
        most.share(name, real * (log(FACTOR_MAX) if log_sum > 0 else -log(FACTOR_MAX)), real)
    assert factor.value == most.value
    assert 1 / FACTOR_MAX <= factor.value <= FACTOR_MAX
    assert factor.is_known is (weight > 0)
    adopted = SpeedFactor[PrefillModel]()
    adopted.adopt(log_sum, weight, 5, 0.0)
    assert 1 / FACTOR_MAX <= adopted.value <= FACTOR_MAX
    assert adopted.is_known is (weight > 0)


def test_later_evidence_of_a_router_replaces_its_earlier_one() -> None:
    """A router whose evidence has faded shares less, or none."""
    factor = SpeedFactor[PrefillModel]()
    factor.share("there", 10.0, 5.0)
    factor.share("there", 20.0, 10.0)
    assert factor.value == pytest.approx(exp(20 / (10 + PRIOR)))
    factor.share("there", 0.0, 0.0)
    assert (factor.value, factor.is_known) == (1.0, False)


@pytest.mark.parametrize("times", [1.0, 4.0])
def test_a_pause_is_no_work(times: float) -> None:
    """An answer a thousand times too slow, or too fast, counts as OUTLIER times too slow or too fast, once some were
    observed."""
    for beyond in (1_000.0, 1 / 1_000):
        paused, clipped = taught(times, CLIPPED_FROM), taught(times, CLIPPED_FROM)
        known = paused.value
        paused.observe(beyond * times * 100.0, 100.0)
        clipped.observe(known * (OUTLIER if beyond > 1 else 1 / OUTLIER) * 100.0, 100.0)
        assert paused.value == clipped.value != known


def test_a_pause_among_many_answers_is_noise() -> None:
    """A minute's pause in one of fifty answers leaves the factor within BAND, which is 1."""
    factor = taught(1.0, 50, noise=0.1)
    factor.observe(60_000.0, 100.0)
    assert factor.value == 1.0


@pytest.mark.parametrize(
    ("took_ms", "expected_ms"),
    [(nan, 1.0), (1.0, nan), (inf, 1.0), (1.0, inf), (-1.0, 1.0), (1.0, -1.0), (0.0, 1.0), (1.0, 0.0), (-1.0, -1.0)],
)
def test_impossible_times_teach_nothing(took_ms: float, expected_ms: float) -> None:
    """A time before the request is a clock's fault, and nothing takes no time."""
    factor, before = taught(4.0, 5), taught(4.0, 5)
    factor.observe(took_ms, expected_ms, 1e9)
    assert (factor.evidence, factor.observations, factor.value) == (before.evidence, 5, before.value)
    assert factor.fades_s == before.fades_s


def test_what_is_not_observed_again_fades() -> None:
    """What was observed of a slow replica is kept while it is observed; half of it is forgotten after each FADE_S
    without another observation, and the last of it whole, so that the replica is like a new one."""
    factor, now_s = SpeedFactor[PrefillModel](), 0.0
    for _ in range(4):
        factor.observe(2_000.0, 100.0, now_s)
        now_s += FADE_S / 2
        factor.fade(now_s)
    assert factor.observations == 4
    found = [factor.value]
    for left in (2, 1, 0, 0):
        now_s += FADE_S
        factor.fade(now_s)
        factor.fade(now_s + FADE_S / 2)
        assert factor.observations == left
        found.append(factor.value)
    assert found[0] > found[1] > found[2] > found[3] == found[4] == 1.0
    assert (factor.evidence, factor.is_known, factor.fades_s) == ((0.0, 0.0), False, inf)
    fresh = SpeedFactor[PrefillModel]()
    for each in (factor, fresh):
        each.observe(500.0, 100.0, now_s)
    assert (factor.value, factor.evidence, factor.fades_s) == (fresh.value, fresh.evidence, fresh.fades_s)


@pytest.mark.parametrize("times", [3.0, 16.0, 64.0])
def test_what_is_known_of_a_slow_replica_stays_true_while_it_fades(times: float) -> None:
    """However much was observed, a replica is asked again within minutes; and where LEARNED observations are left they
    still say how slow it is, within a factor of 6."""
    factor, now_s = taught(times, 300), 300.0
    while factor.value > AVOIDED:
        if factor.observations >= LEARNED:
            assert factor.value > times / 6
        now_s += FADE_S
        factor.fade(now_s)
    assert now_s - 300.0 <= 240.0


@pytest.mark.parametrize("times", [0.05, 1.0, 1.8])
def test_a_replica_that_gets_requests_is_known_while_it_is_idle(times: float) -> None:
    """A replica that is fast, as fast as others, or half as fast, is known for as long as it is idle."""
    factor = taught(times, 20)
    before = factor.value, factor.evidence
    factor.fade(1e9)
    assert (factor.value, factor.evidence, factor.observations) == (*before, 20)


def test_where_other_routers_saw_it_slower_nothing_fades_here() -> None:
    """Observations of a replica that are less slow than those of other routers speak for it: without them, the replica
    would seem slower. The slower ones fade."""
    here, there = taught(1.5, 20), taught(16.0, 40)
    here.share("there", *there.evidence)
    there.share("here", *here.evidence)
    assert here.value == there.value > AVOIDED
    before = here.value
    here.fade(1e9)
    assert here.value == before
    there.fade(1e9)
    assert there.value < before


def test_evidence_from_before_is_adopted_where_there_is_none() -> None:
    """A factor begins with saved evidence, which fades as if observed now; one of which anything was observed stays as
    it is."""
    before, after = taught(8.0, 30), SpeedFactor[PrefillModel]()
    after.adopt(*before.evidence, before.observations, 1_000.0)
    assert (after.value, after.evidence, after.observations) == (before.value, before.evidence, 30)
    after.fade(1_000.0 + FADE_S / 2)
    assert after.value == before.value
    after.fade(1_000.0 + FADE_S)
    assert after.value < before.value
    own = taught(2.0, 1)
    known = own.value
    own.adopt(*before.evidence, before.observations, 1_000.0)
    assert (own.value, own.observations) == (known, 1)
    for log_sum, weight, observations in ((5.0, 2.0, 0), (5.0, 2.0, -1), (5.0, 0.0, 3)):
        none = SpeedFactor[PrefillModel]()
        none.adopt(log_sum, weight, observations, 0.0)
        assert (none.value, none.is_known) == (1.0, False)


@pytest.mark.parametrize("times", [6.0, 9.0, 30.0])
@pytest.mark.parametrize("tokens", [3_000, 6_000])
def test_a_faster_newcomer_is_not_taken_for_a_slow_one(times: float, tokens: int) -> None:
    """A replica of several times the fleet's speed is believed to be faster after its first answer, and within a factor
    of 2 after a dozen, though they teach the fleet as well, and however little it has seen of prompts of that size."""
    slow, fleet, own = PrefillModel(20.0, 0.4, 2e-6), PrefillFit(), SpeedFactor[PrefillModel]()
    for _ in range(60):
        fleet.observe(6_000, 0, slow.ms(6_000, 0))
    took_ms = slow.ms(tokens, 0) / times
    for answers in range(12):
        fleet.observe(tokens, 0, took_ms)
        own.observe(took_ms, fleet.model.ms(tokens, 0), float(answers))
        if not answers:
            assert own.scale_model(fleet.model).ms(tokens, 0) < slow.ms(tokens, 0) * 0.8
    assert own.scale_model(fleet.model).ms(tokens, 0) < 2 * took_ms


class Factors(RuleBasedStateMachine):
    """Three routers that observe one replica, and share what they see, against plain sums of what each has observed."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0
        self.factors = {name: SpeedFactor[PrefillModel]() for name in "abc"}
        self.shared: dict[tuple[str, str], tuple[float, float]] = {}  # (to, from) -> evidence

    @initialize(log_sum=st.floats(-300, 300), weight=st.floats(0, 60), observations=st.integers(0, 200))
    def begin(self, log_sum: float, weight: float, observations: int) -> None:
        """One of them begins with a saved state."""
        self.factors["a"].adopt(log_sum, weight, observations, self.now_s)
        assert self.factors["a"].observations == (observations if weight > 0 else 0)

    @rule(
        name=st.sampled_from("abc"),
        took_ms=st.floats(allow_nan=True, allow_infinity=True),
        expected_ms=st.sampled_from([0.0, 1e-3, 10.0, 1e6, inf, nan]),
        count=st.integers(1, 4),
    )
    def observe(self, name: str, took_ms: float, expected_ms: float, count: int) -> None:
        """An answer of some, or of no, possible time, several times."""
        factor = self.factors[name]
        before = factor.evidence, factor.observations, factor.value
        for _ in range(count):
            factor.observe(took_ms, expected_ms, self.now_s)
        if 0 < took_ms < inf and 0 < expected_ms < inf:
            assert factor.observations == before[1] + count
            assert factor.fades_s == self.now_s + FADE_S
        else:
            assert (factor.evidence, factor.observations, factor.value) == before

    @rule(past_s=st.sampled_from([1.0, FADE_S / 2, FADE_S, 10 * FADE_S]))
    def fade(self, past_s: float) -> None:
        """Time goes by."""
        self.now_s += past_s
        for factor in self.factors.values():
            value, observations = factor.value, factor.observations
            factor.fade(self.now_s)
            assert factor.value <= value * (1 + 1e-9), "a replica does not get slower by being idle"
            if value <= AVOIDED:
                assert (factor.value, factor.observations) == (value, observations)
            assert factor.observations <= observations

    @rule(to=st.sampled_from("abc"), name=st.sampled_from("abc"))
    def share(self, to: str, name: str) -> None:
        """One router receives another one's evidence."""
        if to != name:
            self.shared[to, name] = self.factors[name].evidence
            self.factors[to].share(name, *self.factors[name].evidence)

    @rule(to=st.sampled_from("abc"), name=st.sampled_from("abc"))
    def forget(self, to: str, name: str) -> None:
        """Another router is gone."""
        self.shared.pop((to, name), None)
        self.factors[to].forget(name)

    @invariant()
    def adds_up(self) -> None:
        """Every factor is of all evidence that its router has, and in its limits."""
        for name, factor in self.factors.items():
            known = [factor.evidence, *(each for (to, _), each in self.shared.items() if to == name)]
            log_sum, weight = (sum(each) for each in zip(*known, strict=True))
            assert weight <= len(known) * WEIGHT_MAX * (1 + 1e-9)
            expected = exp(log_sum / (weight + PRIOR))
            assert 1 / FACTOR_MAX <= factor.value <= FACTOR_MAX
            if not 1 / BAND < expected < BAND:
                assert factor.value == pytest.approx(expected)
                assert factor.scale_model(H100) == H100.times(factor.value)
            elif 1 / BAND * 1.001 < expected < BAND * 0.999:
                assert factor.scale_model(H100) is H100
            assert factor.is_known is (factor.observations > 0 or weight > factor.evidence[1])


TestFactors = Factors.TestCase
TestFactors.settings = settings(deadline=None, max_examples=examples(60))


def test_a_reset_factor_is_unknown_and_was_known() -> None:
    """A reset forgets all evidence, and remembers that there was some: other routers still hold it."""
    factor: SpeedFactor[StepModel] = SpeedFactor()
    assert not factor.had_evidence
    for _ in range(5):
        factor.observe(80.0, 10.0, 0.0)
    factor.share("other", 3.0, 2.0)
    assert factor.value > 2
    factor.reset()
    assert (factor.value, factor.evidence, factor.is_known, factor.had_evidence) == (1.0, (0.0, 0.0), False, True)
