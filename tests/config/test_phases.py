"""Phases of a run: which settings hold at which step, and what is refused."""

from pathlib import Path

import pytest
from support.project import small_run

from data_utils.common.errors import ConfigError
from data_utils.common.settings import build, merge, to_tree
from megatron_lite.config.learning_rates import learning_rate
from megatron_lite.config.tree import Config

TRAIN = [{"prefix": "x/web"}, {"prefix": "x/b", "name": "books"}]
MIXED = {"objectives": {"blank_infilling": 1, "masked_lm": 1}, "model": {"max_position": 66}}


def config_of(phases, steps=9, **settings):
    tree = {"phases": phases, "training": {"steps": steps}, "data": {"train": TRAIN}}
    return build(Config, merge(small_run(Path("corpus"), Path("run")), merge(tree, settings)))


LINEAR = {"kind": "linear", "steps": 2, "start": 0, "end": 1}


def in_parts(*parts):
    return {"schedule": {"warmup_steps": 0, "parts": list(parts)}}


def weights(config):
    return [corpus.weight for corpus in config.data.train]


def test_a_phase_overrides_the_run_for_its_steps():
    phases = [
        {"steps": 2, "weights": {"web": 1}},
        {"samples": 17, "batch": {"global_batch_size": 16}, "embedding_gradient_shrink": 0.5},
        {"objectives": {"masked_lm": 2}, "masked_lm": {"masked_ratio": 0.3}},
    ]
    config = config_of(phases, **MIXED)
    phase_plan = config.phase_plan
    assert phase_plan.first_steps == [0, 2, 4, 9] and phase_plan.first_samples == [0, 16, 48]
    assert [phase_plan.number(step) for step in range(11)] == [0, 0, 1, 1, 2, 2, 2, 2, 2, 2, 2]
    assert [phase_plan.batch_size(step) for step in range(6)] == [8, 8, 16, 16, 8, 8]
    assert [weights(each) for each in phase_plan.configs] == [[1, 0], [1, 1], [1, 1]]
    assert [each.model.embedding_gradient_shrink for each in phase_plan.configs] == [1, 0.5, 1]
    assert [len(each.objective_choices) for each in phase_plan.configs] == [2, 2, 1]
    ratios = [each.objective_sections["masked_lm"].masked_ratio for each in phase_plan.configs]
    assert ratios == [0.15, 0.15, 0.3]
    assert build(Config, to_tree(config)) == config


def test_lengths_are_rounded_up_to_whole_steps():
    phases = [{"samples": 9}, {"tokens": 64 * 8 + 1}, {"tokens": 64 * 8}, {}]
    assert config_of(phases).phase_plan.first_steps == [0, 2, 4, 5, 9]


def test_rows_follow_the_length_of_a_phase():
    data = {"train": TRAIN, "row_length": 120}
    config = config_of([{"steps": 3}, {"steps": 3, "sequence_length": 32}, {"row_length": 128}], data=data)
    assert [each.row_length for each in config.phase_plan.configs] == [120, 40, 128]
    assert [each.data.sequence_length for each in config.phase_plan.configs] == [64, 32, 64]


def test_a_ramp_is_part_of_its_phase():
    ramp = {"start": 2, "by": 2, "samples": 12}
    phases = [{"steps": 1}, {"samples": 30, "batch": {"ramp": ramp}}, {}]
    phase_plan = config_of(phases, steps=12).phase_plan
    assert [phase_plan.batch_size(step) for step in range(9)] == [8, 2, 2, 4, 6, 8, 8, 8, 8]
    assert phase_plan.first_steps == [0, 1, 7, 12] and phase_plan.first_samples == [0, 8, 38]
    alone = config_of([], steps=9, batch={"ramp": ramp}).phase_plan
    assert [alone.batch_size(step) for step in range(6)] == [2, 2, 4, 6, 8, 8]


def test_what_is_skipped_counts_to_the_phase_that_skips_it():
    phase_plan = config_of([{"steps": 2}, {"steps": 3, "skip_samples": 84}, {"lr": 1e-5}]).phase_plan
    assert phase_plan.first_samples == [0, 16, 124]
    assert [phase_plan.first_sample(step) for step in range(6)] == [0, 8, 100, 108, 116, 124]
    assert [phase_plan.consumed(step) for step in range(6)] == [0, 8, 16, 108, 116, 124]


def test_a_phase_has_its_own_peak():
    plan, plain = config_of([{"steps": 5}, {"lr": 1e-5}]).phase_plan, config_of([])
    expected = [plain.phase_plan.learning_rate(step) for step in range(1, 10)]
    factors = [1e-5 / plain.optimizer.lr if step >= 5 else 1 for step in range(9)]
    assert [plan.learning_rate(step) for step in range(1, 10)] == pytest.approx(
        [rate * factor for rate, factor in zip(expected, factors, strict=True)]
    )


@pytest.mark.parametrize(
    ("phases", "settings", "words"),
    [
        ([{"steps": 0}], {}, ["phases[0].steps is 0", "at least 1"]),
        ([{"steps": 9, "tokens": 5}], {}, ["steps 9 and tokens 5"]),
        ([{"steps": 2}, {"steps": 3}], {}, ["phases have 5 steps", "training.steps is 9", "set it to 5"]),
        ([{"steps": 9}, {}], {}, ["phases[1]", "training.steps (9)"]),
        ([{}, {"steps": 3}], {}, ["phases[0] has no length"]),
        ([{"weights": {"wiki": 1}}], {}, ["phases[0].weights contains 'wiki'", "one of web, books"]),
        ([{"weights": {"web": -1}}], {}, ["phases[0]: data.train[0].weight is -1"]),
        ([{"batch": {"size": 4}}], {}, ["phases[0]: unknown setting batch.size"]),
        ([{"batch": {"global_batch_size": 7}}], {}, ["phases[0]: batch.global_batch_size (7)", "multiple"]),
        ([{"sequence_lenght": 32}], {}, ["unknown setting phases[0].sequence_lenght"]),
        ([{"objectives": {"causal": 1}}], {}, ["phases[0].objectives contains 'causal'", "blank_infilling"]),
        ([{"masked_lm": {"masked_ratio": 0.3}}], {}, ["phases[0] sets masked_lm"]),
        ([{"loss_weights": {"token": 1}}], {}, ["phases[0]: training.loss_weights is set"]),
        (
            [],
            {"schedule": {"parts": [LINEAR, {"kind": "constant", "tokens": 64 * 8 * 8}]}},
            ["warmup_steps 2", "schedule={} before schedule.parts"],
        ),
        ([], in_parts(LINEAR, {"kind": "constant", "steps": 8}), ["10 steps", "training.steps is 9"]),
        ([], in_parts(LINEAR, {"kind": "constant", "tokens": 64 * 8 * 7 + 1}), ["10 steps"]),
        ([], in_parts({**LINEAR, "start": -1}), ["schedule.parts[0].start is -1", "at least 0"]),
        ([], in_parts({**LINEAR, "start": None}), ["first of schedule.parts is linear with start None"]),
        ([], in_parts({**LINEAR, "kind": "inverse_sqrt"}), ["is inverse_sqrt with start 0.0"]),
        ([], in_parts({**LINEAR, "end": None}), ["a linear part of schedule.parts has end None"]),
        ([], in_parts(LINEAR, {"kind": "constant"}), ["a constant part", "steps None and tokens None"]),
        (
            [{}],
            {"batch": {"ramp": {"start": 2, "by": 2, "samples": 9}}},
            ["batch.ramp is set", "in the batch of a phase"],
        ),
        ([], {"batch": {"ramp": {"start": 4, "by": 3, "samples": 9}}}, ["start 4 and by 3", "(2)", "(8)"]),
        (
            [],
            {"batch": {"ramp": {"start": 2, "by": 2, "samples": 900}}},
            ["a phase ends at batch size 2", "reaches 8"],
        ),
        (
            [{"steps": 4}, {"sequence_length": 65}],
            {},
            ["phases[1]: data.sequence_length (65)", "max_position"],
        ),
        ([{"steps": 4}, {"sequence_length": 31}], {}, ["samples of 31 tokens", "at least 32"]),
        ([], {"data": {"train": TRAIN, "region": 63}}, ["data.region (63)", "sequence_length (64)"]),
        (
            [{"steps": 4}, {"rotary_base": 1e5}],
            {},
            ["phases[1].rotary_base is 100000.0", "no rotary positions"],
        ),
    ],
)
def test_contradictions_are_refused_in_one_line(phases, settings, words):
    with pytest.raises(ConfigError) as error:
        config_of(phases, **settings)
    assert "\n" not in str(error.value) and all(word in str(error.value) for word in words), error.value


def test_a_plan_is_reported_in_lines():
    ramp = {"start": 2, "by": 2, "samples": 12}
    phases = [{"steps": 8, "batch": {"ramp": ramp}}, {"sequence_length": 32, "weights": {"web": 1}}]
    phase_plan = config_of(phases, steps=12).phase_plan
    assert phase_plan.lines() == [
        "phase 1: steps 1 to 8, batches of 2 to 8: batch {'ramp': {'start': 2, 'by': 2, 'samples': 12}}",
        "phase 2: steps 9 to 12, batches of 8: sequence_length 32, weights {'web': 1}",
    ]
    tokens = [config_of([]).row_length * 8] * 4 + [40 * 8] * 4
    left = [phase_plan.steps_left(step) * tokens[step - 5] for step in range(5, 13)]
    assert left == pytest.approx([sum(tokens[step - 4 :]) for step in range(5, 13)])
    alone = phase_plan.alone()
    assert [each.training.steps for each in alone] == [8, 4] and alone[0].batch.ramp is None
    assert config_of([]).phase_plan.lines() == []


def test_every_batch_of_the_run_must_fit_the_ranks():
    config = config_of([{"steps": 8}, {"batch": {"global_batch_size": 12}}])
    config.deepspeed_options(2)
    with pytest.raises(
        ConfigError, match=r"global_batch_size \(12\) after step 8 must be a multiple of .* = 8;"
    ):
        config.deepspeed_options(4)


def rates(config, steps):
    plan = config.phase_plan
    return [plan.learning_rate(step) / config.optimizer.lr for step in range(1, steps + 1)]


@pytest.mark.parametrize("kind", ["linear", "cosine", "constant", "inverse_sqrt"])
def test_a_schedule_of_today_is_two_parts(kind):
    decay = {"kind": kind, "steps": 900} | ({} if kind == "constant" else {"end": 0.1})
    up = {"kind": "linear", "steps": 100, "start": 0, "end": 1}
    config = config_of([], steps=1300, **in_parts(up, decay))
    same = {"kind": kind, "warmup_steps": 100, "decay_steps": 1000, "min_lr_ratio": 0.1}
    expected = [learning_rate(step, peak=1.0, **same) for step in range(1, 1400)]
    assert rates(config, 1399) == pytest.approx(expected, abs=4e-16, rel=0)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("linear", [0.995, 0.75, 0.5, 0.25]),
        ("1-sqrt", [0.929289, 0.5, 0.292893, 0.133975]),
        ("cosine", [0.999938, 0.853553, 0.5, 0.146447]),
        ("exponential", [0.993081, 0.681793, 0.414214, 0.189207]),
    ],
)
def test_decays_of_wsd(kind, expected):
    """Megatron-LM's styles (core/optimizer_param_scheduler.py) at 0.005, 0.25, 0.5 and 0.75 of the way to 0."""
    decay = {"kind": kind, "steps": 200, "end": 0}
    config = config_of([], steps=210, **in_parts(LINEAR, {"kind": "constant", "steps": 8}, decay))
    found = rates(config, 210)
    assert found[:10] == [0.5, *[1.0] * 9] and found[-1] == pytest.approx(0, abs=1e-16)
    assert [found[10 + step - 1] for step in (1, 50, 100, 150)] == pytest.approx(expected, abs=1e-6)


def test_parts_in_tokens_follow_the_batches_of_the_phases():
    phases = [{"steps": 4}, {"batch": {"global_batch_size": 16}}]
    parts = [{**LINEAR, "tokens": 64 * 8 * 5, "steps": None}, {"kind": "1-sqrt", "tokens": 64 * 16, "end": 0}]
    assert rates(config_of(phases, **in_parts(*parts)), 7) == [0.2, 0.4, 0.6, 0.8, 1.0, 0.0, 0.0]


def test_parts_in_tokens_end_where_phases_in_tokens_do():
    """Within a ramp too, and though each phase is rounded up to whole batches: here they have 792 tokens more."""
    ramp = {"start": 2, "by": 2, "samples": 12}
    phases = [
        {"tokens": 3000, "batch": {"ramp": ramp}},
        {"tokens": 2100, "sequence_length": 33},
        {"tokens": 700, "batch": {"global_batch_size": 16}},
    ]
    parts = [
        {**LINEAR, "tokens": 900, "steps": None},
        {"kind": "constant", "tokens": 2100},
        {"kind": "1-sqrt", "tokens": 2100, "end": 0.5},
        {"kind": "linear", "tokens": 700, "end": 0},
    ]
    phase_plan = config_of(phases, steps=18, **in_parts(*parts)).phase_plan
    assert [phase_plan.batch_size(step) for step in (0, 1, 2, 3, 4, 9, 17)] == [2, 2, 4, 6, 8, 8, 16]
    assert phase_plan.first_steps == [0, 9, 17, 18]
    assert [part.end for part in phase_plan._rate_parts] == [5, 9, 17, 18]
    with pytest.raises(ConfigError, match="at least 19 steps"):
        config_of(phases, steps=18, **in_parts(*parts, {"kind": "constant", "tokens": 1}))
