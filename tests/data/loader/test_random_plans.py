"""Random plans of phases, in one go and with stops on other numbers of ranks (support/random_plans.py): 10 always.

`-m slow` has 1,000; `python tests/support/random_plans.py --first NUMBER --count 1` repeats a failure.
"""

import pytest
from support.random_plans import check_plans


def test_random_plans_are_exact_over_stops_and_ranks(tmp_path):
    changes, ended = check_plans(0, 10, tmp_path)
    assert changes > 3 and ended > 10


@pytest.mark.slow
@pytest.mark.parametrize("first", range(10, 1010, 100))
def test_a_thousand_random_plans_are_exact_over_stops_and_ranks(tmp_path, first):
    check_plans(first, 100, tmp_path)
