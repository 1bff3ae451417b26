"""First samples and batch sizes in closed form are those that a run meets step by step."""

import random

import pytest

from megatron_lite.config.events import EventsConfig, SkippedSamples
from megatron_lite.config.timetable import Stage, Timetable, ramp_stages


def by_stepping(stages, events, steps):
    """(samples used or skipped before, first sample, batch size) of each of `steps` steps."""
    sizes = [size for count, size in stages[:-1] for _ in range(count)]
    consumed = 0
    for size in (sizes + [stages[-1].batch_size] * steps)[:steps]:
        first = events.next_sample(consumed, size)
        yield consumed, first, size
        consumed = first + size


def test_a_step_has_the_samples_that_stepping_gives():
    """1,000 random cases: stages without steps, skips that overlap or adjoin, and skips beyond the end of a stage."""
    draw = random.Random(3)
    for case in range(1000):
        stages = [Stage(draw.randint(0, 12), draw.choice((4, 6, 8, 10))) for _ in range(draw.randint(0, 5))]
        stages.append(Stage(draw.randint(1, 9), draw.choice((4, 8, 12))))
        firsts = [draw.randint(0, 400) for _ in range(draw.randint(0, 4))]
        skips = tuple(SkippedSamples(first=first, end=first + draw.randint(1, 60)) for first in firsts)
        events = EventsConfig(skip_samples=skips)
        timetable = Timetable(stages, events)
        expected = list(by_stepping(stages, events, 80))
        found = [
            (timetable.consumed(step), timetable.first_sample(step), timetable.batch_size(step))
            for step in range(80)
        ]
        assert found == expected, (case, stages, skips)


def test_a_step_far_away_is_found_without_stepping():
    timetable = Timetable([Stage(10**12, 8), Stage(1, 16)], EventsConfig())
    assert timetable.first_sample(10**12 + 10**15) == 8 * 10**12 + 16 * 10**15


@pytest.mark.parametrize(
    ("size", "start", "by", "samples"),
    [(4224, 192, 24, 5_493_164), (64, 16, 16, 1000), (64, 8, 8, 20), (12, 4, 4, 7)],
)
def test_a_ramp_is_megatrons_rule_in_whole_steps(size, start, by, samples):
    """Megatron-DeepSpeed's calculator (microbatches.py) asks before each step; a short ramp leaves sizes out."""
    stages = list(ramp_stages(size, start, by, samples))
    consumed, growths = 0, (size - start) // by
    for steps, batch_size in stages[:-1]:
        for _ in range(steps):
            assert batch_size == start + consumed * growths // samples * by
            consumed += batch_size
    assert consumed >= samples and stages[-1].batch_size == size


def test_the_ramp_of_glm_130b():
    stages = list(ramp_stages(4224, 192, 24, 5_493_164))[:-1]
    assert stages[:3] == [(171, 192), (151, 216), (137, 240)]
    assert len(stages) == 168 and sum(stage.steps for stage in stages) == 4296
    assert sum(stage.steps * stage.batch_size for stage in stages) == 5_494_584
