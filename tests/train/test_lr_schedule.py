import math

import pytest

from megatron_lite.train.lr_schedule import learning_rate

ARGS = dict(peak=2.0, warmup_steps=10, decay_steps=110, min_lr_ratio=0.1)


@pytest.mark.parametrize("kind", ["cosine", "linear", "constant"])
def test_warmup_is_linear_and_reaches_the_peak(kind):
    assert [learning_rate(step, kind=kind, **ARGS) for step in (1, 5, 10)] == pytest.approx([0.2, 1.0, 2.0])


def test_cosine_and_linear_pass_their_midpoint_and_stay_on_the_floor():
    middle = {kind: learning_rate(60, kind=kind, **ARGS) for kind in ("cosine", "linear", "constant")}
    assert middle == pytest.approx({"cosine": 1.1, "linear": 1.1, "constant": 2.0})
    quarter = learning_rate(35, kind="cosine", **ARGS)
    assert quarter == pytest.approx(2.0 * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi / 4))))
    for kind in ("cosine", "linear"):
        assert [learning_rate(step, kind=kind, **ARGS) for step in (110, 111, 10**6)] == pytest.approx(
            [0.2] * 3
        )


def test_no_warmup_starts_just_below_the_peak():
    assert learning_rate(
        1, kind="linear", peak=1.0, warmup_steps=0, decay_steps=10, min_lr_ratio=0.0
    ) == pytest.approx(0.9)
