import math

import pytest

from megatron_lite.config.learning_rates import learning_rate

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


def test_inverse_square_root_is_noams_schedule():
    """Noam's: factor / sqrt(width) * min(1 / sqrt(step), step / warmup^1.5)."""
    factor, width, warmup = 2.0, 512, 4000
    peak = factor / math.sqrt(width * warmup)
    for step in (1, 100, 4000, 4001, 16000, 10**6):
        noam = factor / math.sqrt(width) * min(step**-0.5, step * warmup**-1.5)
        ours = learning_rate(
            step, peak=peak, kind="inverse_sqrt", warmup_steps=warmup, decay_steps=1, min_lr_ratio=0.0
        )
        assert ours == pytest.approx(noam)
    started = {"peak": 2.0, "kind": "inverse_sqrt", "warmup_steps": 0, "decay_steps": 1, "min_lr_ratio": 0.0}
    assert [learning_rate(step, **started) for step in (1, 4)] == [
        2.0,
        1.0,
    ]  # without warmup as after one step of it
    floor = {"peak": 1.0, "kind": "inverse_sqrt", "warmup_steps": 10, "decay_steps": 1, "min_lr_ratio": 0.1}
    assert learning_rate(10**6, **floor) == 0.1


def test_slanted_is_ulmfits_triangle():
    """The paper's formula with cut_frac 0.1 and ratio 32."""
    steps, peak, ratio = 200, 0.01, 32
    cut = int(steps * 0.1)
    for step in range(1, steps + 1):
        p = step / cut if step < cut else 1 - (step - cut) / (cut * (1 / 0.1 - 1))
        ours = learning_rate(
            step, peak=peak, kind="slanted", warmup_steps=cut, decay_steps=steps, min_lr_ratio=1 / ratio
        )
        assert ours == pytest.approx(peak * (1 + p * (ratio - 1)) / ratio)
