"""How a configuration is put together from defaults, files and overrides, and what follows from it."""

from __future__ import annotations

import pytest
import yaml
from support.configs import TINY, tiny

from data_utils.common.errors import ConfigError
from data_utils.common.settings import build
from megatron_lite.config.model import padded_vocab_size
from megatron_lite.config.tree import (
    Config,
    load_config,
)


def test_objectives_are_chosen_and_mixed():
    assert [choice.name for choice in tiny().objective_choices] == ["blank_infilling"]
    config = tiny("objectives={causal: 2, t5: 1, mass: 0}", "t5.noise_ratio=0.2")
    causal, t5 = config.objective_choices
    assert (causal.name, causal.weight, causal.section) == (
        "causal",
        2.0,
        config.objective_sections["causal"],
    )
    assert (t5.name, t5.weight, t5.section.noise_ratio) == ("t5", 1.0, 0.2)


@pytest.mark.parametrize(
    ("vocab", "tp", "padded"), [(1, 1, 128), (128, 1, 128), (129, 1, 256), (30527, 8, 30720)]
)
def test_the_vocabulary_is_padded_to_128_rows_per_shard(vocab, tp, padded):
    assert padded_vocab_size(vocab, tp) == padded


# How files and overrides combine


def test_later_files_win_and_overrides_come_last(tmp_path):
    first, second = tmp_path / "first.yaml", tmp_path / "second.yaml"
    first.write_text(yaml.safe_dump({**TINY, "optimizer": {"lr": 1e-3, "beta2": 0.9}}))
    second.write_text("optimizer: {lr: 2e-3}\ntraining: {steps: 50}\n")
    config = load_config([first, second], ["training.steps=60", "training.steps=70"])
    assert (config.optimizer.lr, config.optimizer.beta2, config.training.steps) == (2e-3, 0.9, 70)
    assert load_config([second, first]).optimizer.lr == 1e-3


def test_values_that_follow_from_others():
    config = tiny()
    assert (config.model.head_size, config.decay_steps) == (16, 100)
    assert tiny("schedule.decay_steps=80").decay_steps == 80
    assert tiny("model.vocab_size=null").with_vocab_size(301).model.vocab_size == 301
    assert config.with_vocab_size(300) == config


def test_the_defaults_are_complete_but_for_what_only_the_user_knows():
    config = build(
        Config,
        {"model": {"num_layers": 1, "hidden_size": 8, "num_attention_heads": 1}, "training": {"steps": 1}},
    )
    assert config.data.train == () and config.tokenizer is None and config.deepspeed == {}


@pytest.mark.parametrize(
    "override, form",
    [
        ("data.train=data/corpus_train", r"\[\{prefix: \.\.\.\}\]"),
        ("data.train=[data/corpus_train]", r"\{prefix: \.\.\.\}"),
    ],
)
def test_a_corpus_without_its_key_is_told_the_form(override, form):
    with pytest.raises(ConfigError, match=rf"data\.train.*'data/corpus_train'; .*write {form}"):
        tiny(override)


def test_all_unknown_settings_are_named_at_once():
    overrides = ["model.num_layer=3", "trainning.steps=10", "batch.microbatch_size=2"]
    with pytest.raises(ConfigError) as error:
        tiny(*overrides)
    nearest = ["model.num_layers", "training", "batch.micro_batch_size"]
    assert (
        all(name in str(error.value) for name in nearest) and str(error.value).count("unknown setting") == 3
    )


def test_wrong_settings_of_files_are_named_with_file_and_line(tmp_path):
    base, more, options = tmp_path / "base.yaml", tmp_path / "more.yaml", tmp_path / "options.json"
    base.write_text(yaml.safe_dump(TINY) + "lr: 0.1\n")
    line = len(base.read_text().splitlines())
    more.write_text("training:\n  seed: many\n  steps: few\noptimizer.lr: 0.1\noptimizer: {eps: x}\n")
    options.write_text(
        '{"gradient_clipping": "x", "fp16": {"hysteresis": "y"}, "zero_optimization": {"stage": 9}}'
    )
    for deepspeed in (None, options):
        with pytest.raises(ConfigError) as error:
            load_config([base, more], ["training.steps=some"], deepspeed)
        message = str(error.value)
        assert f"{base}:{line}: unknown setting lr; the nearest valid key is optimizer.lr." in message
        assert f"{more}:2: training.seed is 'many'; it must be " in message
        assert f"{more}:4: unknown setting optimizer.lr: in a file write optimizer: {{lr: 0.1}}." in message
        assert f"{more}:5: optimizer.eps is 'x'; it must be " in message
        assert "training.steps is 'some'; it must be " in message and f"{more}:3" not in message
        assert "\n" not in message
    for key in ("gradient_clipping is 'x'", "fp16.hysteresis is 'y'", "zero_optimization.stage is 9"):
        assert f"deepspeed.{key}" in message
