"""The weight of the divergence over the steps: its value at every boundary of the cycles."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_lite.models.optimus.annealing import beta


def schedule(steps, cycles, peak=1.0, zero_share=0.5, rise_share=0.25, until=None):
    return [
        beta(step, steps, peak=peak, cycles=cycles, zero_share=zero_share, rise_share=rise_share)
        for step in range(until or steps)
    ]


def test_ten_cycles_of_ten_steps():
    """Steps 0 to 4 at 0, a rise over 2.5 steps, then the peak; ten times."""
    cycle = [0, 0, 0, 0, 0, 0, 0.4, 0.8, 1, 1]
    assert schedule(100, 10) == pytest.approx(cycle * 10, abs=1e-12)
    assert schedule(100, 10, peak=0.5) == pytest.approx([weight / 2 for weight in cycle] * 10, abs=1e-12)


def test_one_cycle_and_what_comes_after_it():
    weights = schedule(8, 1, until=20)
    assert weights == pytest.approx([0, 0, 0, 0, 0, 0.5, 1, 1] + [1] * 12)


def test_periods_that_are_no_whole_number():
    """10 steps in 4 cycles of 2.5: step 5 begins the third, step 3 is 0.2 into the second."""
    weights = schedule(10, 4, zero_share=0.1, rise_share=0.8)
    phases = [0, 0.4, 0.8, 0.2, 0.6] * 2
    assert weights == pytest.approx([max(0.0, (phase - 0.1) / 0.8) for phase in phases])


def test_no_cycle_begins_late():
    """30 cycles of 100 / 30 steps: step 10 begins the fourth, though it is below 3 periods rounded to a float."""
    assert 10 % (100 / 30) > 3
    assert schedule(100, 30, zero_share=0.05, rise_share=0) == [0, 1, 1, 1, 1, 1, 1, 1, 1, 1] * 10


def test_shares_at_their_limits():
    assert schedule(6, 2, zero_share=0, rise_share=0) == [1] * 6
    assert schedule(6, 2, zero_share=1, rise_share=0, until=8) == [0] * 6 + [1] * 2
    assert schedule(6, 2, zero_share=0, rise_share=1) == pytest.approx([0, 1 / 3, 2 / 3] * 2)
    assert schedule(6, 3, peak=0.0) == [0] * 6
    assert schedule(4, 1, zero_share=0.5, rise_share=0) == [0, 0, 1, 1]


PEAKS = st.floats(0, 10, allow_subnormal=False)


@given(st.integers(1, 500), st.integers(1, 20), st.floats(0, 1), st.floats(0, 1), PEAKS, st.data())
def test_it_is_never_negative_nor_above_the_peak_and_rises_within_a_cycle(
    steps, cycles, zero, rise, peak, data
):
    cycles, rise = min(cycles, steps), min(rise, 1 - zero)
    weights = schedule(steps, cycles, peak, zero, rise, until=steps + 3)
    assert all(0 <= weight <= peak for weight in weights) and weights[steps:] == [peak] * 3
    step = data.draw(st.integers(0, steps - 1))
    if step * cycles // steps == (step + 1) * cycles // steps:
        assert weights[step] <= weights[step + 1]
