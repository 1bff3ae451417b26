"""A ramp of the batch, as Megatron has it."""

import pytest

from megatron_lite.config.phase_plan import ramp_sizes
from megatron_lite.config.sections import RampConfig


def sizes(size, start, by, samples):
    return list(ramp_sizes(size, RampConfig(start=start, by=by, samples=samples)))


@pytest.mark.parametrize(
    ("size", "start", "by", "samples"),
    [(4224, 192, 24, 5_493_164), (64, 16, 16, 1000), (64, 8, 8, 20), (12, 4, 4, 7)],
)
def test_a_ramp_is_megatrons_rule_in_whole_steps(size, start, by, samples):
    """Megatron-DeepSpeed's calculator (microbatches.py) asks before each step; a short ramp leaves sizes out."""
    consumed, growths = 0, (size - start) // by
    for steps, batch_size in sizes(size, start, by, samples):
        for _ in range(steps):
            assert batch_size == start + consumed * growths // samples * by < size
            consumed += batch_size
    assert consumed >= samples
