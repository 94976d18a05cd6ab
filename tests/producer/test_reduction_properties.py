"""Properties of the reductions: what holds for all samples and totals, not only for the examples of test_pure."""

import math
from fractions import Fraction

from hypothesis import given
from hypothesis import strategies as st

from producer.partition import balanced
from producer.reduction import adjacent_upper_median

from drift import AGREEING_PAIRS, RELATIVE_CHANGE, drift

SECONDS = st.floats(min_value=1e-6, max_value=1e3)
SAMPLES = st.lists(SECONDS, min_size=2, max_size=30)


@given(SAMPLES)
def test_the_kept_value_is_the_upper_middle_sample_and_none_that_was_never_measured(walls: list[float]):
    """By counting, without sorting: of n samples at most n // 2 are smaller, and at most (n - 1) // 2 are larger."""
    kept, indices = adjacent_upper_median(walls)
    rest = walls[1:]
    assert kept in rest
    assert sum(wall < kept for wall in rest) <= len(rest) // 2
    assert sum(wall > kept for wall in rest) <= (len(rest) - 1) // 2
    assert indices == [index for index in range(len(walls)) if index]


@given(st.lists(SECONDS, min_size=9, max_size=9, unique=True), SECONDS)
def test_of_ten_samples_four_of_the_last_nine_are_smaller_and_four_are_larger(walls: list[float], first: float):
    kept, _ = adjacent_upper_median([first, *walls])
    assert [sum(wall < kept for wall in walls), sum(wall > kept for wall in walls)] == [4, 4]


@given(SAMPLES, SECONDS)
def test_the_first_sample_never_matters(walls: list[float], other: float):
    assert adjacent_upper_median([other, *walls[1:]]) == adjacent_upper_median(walls)


@given(SAMPLES.flatmap(lambda walls: st.tuples(st.just(walls), st.permutations(walls[1:]))))
def test_the_order_of_the_other_samples_never_matters(orders: tuple[list[float], list[float]]):
    walls, permuted = orders
    assert adjacent_upper_median([walls[0], *permuted])[0] == adjacent_upper_median(walls)[0]


@given(SAMPLES, st.integers(min_value=-20, max_value=20))
def test_in_another_unit_the_same_sample_is_kept(walls: list[float], exponent: int):
    """By powers of two, which no rounding touches."""
    scale = 2.0**exponent
    assert adjacent_upper_median([wall * scale for wall in walls])[0] == adjacent_upper_median(walls)[0] * scale


@given(SAMPLES, st.data())
def test_a_slower_sample_never_makes_the_kept_value_smaller(walls: list[float], data: st.DataObject):
    index = data.draw(st.integers(min_value=0, max_value=len(walls) - 1))
    slower = [*walls[:index], walls[index] + data.draw(SECONDS), *walls[index + 1 :]]
    assert adjacent_upper_median(slower)[0] >= adjacent_upper_median(walls)[0]


@given(
    count=st.integers(min_value=1, max_value=64),
    unit=st.integers(min_value=1, max_value=256),
    min_units=st.integers(min_value=0, max_value=4),
    more=st.integers(min_value=0, max_value=5000),
)
def test_a_balanced_split_adds_up_and_differs_by_one_unit_at_most(count: int, unit: int, min_units: int, more: int):
    total = (count * min_units + more) * unit
    split = balanced(total, count, unit, min_units)
    assert len(split) == count
    assert sum(split) == total
    assert all(part % unit == 0 for part in split)
    assert min(split) >= min_units * unit
    assert max(split) - min(split) in (0, unit)
    assert split == sorted(split, reverse=True), "the first requests are the longer ones"


@given(st.lists(SECONDS, min_size=2, max_size=20))
def test_drift_read_backwards_is_the_same_drift_with_the_other_sign(walls: list[float]):
    forwards, backwards = drift(walls), drift(walls[::-1])
    if forwards is None:
        assert backwards is None
        return
    assert backwards is not None
    assert backwards.last - backwards.first == -(forwards.last - forwards.first)
    assert (backwards.first, backwards.last) == (forwards.last, forwards.first)
    assert (backwards.agreeing, backwards.pairs) == (forwards.agreeing, forwards.pairs)


@given(st.lists(SECONDS, min_size=2, max_size=20))
def test_what_drifts_is_what_its_two_limits_say(walls: list[float]):
    """Counted in exact fractions: 9 of 10 pairs go the way from the first sample to the last, which is 5 % or more."""
    count, middle = len(walls), sorted(walls)[len(walls) // 2]
    pairs = [(walls[i], walls[j]) for i in range(count) for j in range(i + 1, count)]
    way = 1 if walls[-1] > walls[0] else -1
    agreeing = sum((b - a) * way > 0 for a, b in pairs)
    change = abs(Fraction(walls[-1]) - Fraction(walls[0])) / Fraction(middle)
    if math.isclose(change, RELATIVE_CHANGE, rel_tol=1e-9):
        return  # floats round one way or the other here
    drifts = agreeing >= Fraction(9, 10) * len(pairs) and change > Fraction(5, 100)
    assert (drift(walls) is not None) == drifts
    assert (AGREEING_PAIRS, RELATIVE_CHANGE) == (0.9, 0.05)
