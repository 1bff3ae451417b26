"""Arguments of other programs: each is answered with a setting that exists, and means the same wherever it is known."""

from __future__ import annotations

import re

import pytest
from support.configs import tiny

from data_utils.common.errors import ConfigError
from data_utils.common.settings import setting_names
from megatron_lite.config.coming_from import SOURCES
from megatron_lite.config.deepspeed_keys import KEYS
from megatron_lite.config.foreign_options import explain_options, with_deepspeed_file
from megatron_lite.config.tree import Config

ROWS = [(source, row) for source, rows in SOURCES.items() for row in rows]


def test_every_setting_of_the_tables_exists():
    names = {*setting_names(Config), *(f"deepspeed.{key}" for key in KEYS)}
    sections = {name.rsplit(".", depth)[0] for name in names for depth in (1, 2)}
    assert [row for _, row in ROWS if row.setting and row.key not in names | sections] == []
    assert [row for _, row in ROWS if not row.setting and not row.note] == []


# What `{}` is replaced by, where 1 is none of the setting's values
VALUES = {
    "recompute_granularity": "full", "lr_decay_style": "linear", "lr_scheduler_type": "cosine",
    "hidden_dropout": "0.5", "attention_dropout": "0.5", "adam_beta1": "0.9", "adam_beta2": "0.9",
    "rotary_base": "500", "global_batch_size": "16", "seq_length": "64",
    **dict.fromkeys(("lora_dropout", "dropout"), "0.5"),
    "max_seq_length": "64", "zero_stage": "2", "label_smoothing_factor": "0.1",
    **dict.fromkeys(("save", "load", "output_dir", "experiment_name", "run_name", "wandb_exp_name"), "x"),
    **dict.fromkeys(("tokenizer_model", "wandb_project", "data_path", "valid_data_path"), "x"),
    **dict.fromkeys(("tokenizer_name_or_path", "wandb_entity", "pretrained_checkpoint"), "x"),
}  # fmt: skip


OVERRIDES = [row for _, row in ROWS if "=" in row.setting]


@pytest.mark.parametrize("row", OVERRIDES, ids=lambda row: row.names[0])
def test_an_answer_is_an_override_that_is_taken(row):
    setting = row.setting.format(VALUES.get(row.names[0], "1"))
    try:
        tiny(setting)
    except ConfigError as error:  # another setting must fit it, or be given too
        assert not re.search(r"unknown|must be (a whole|a finite|true|text|one of|in |at )", str(error))


@pytest.mark.parametrize("source", SOURCES)
def test_a_name_means_one_thing_in_a_program(source):
    names = [name for row in SOURCES[source] for name in row.names]
    assert len(names) == len(set(names))


def test_options_are_answered_all_at_once():
    line = [
        "--num-layers", "12", "--micro-batch-size=4", "--learning_rate", "1e-4", "--fp16", "--config", "x",
        "--max-position-embeddings", "1024", "--warmup", "-1", "--hidden-sise", "3", "--training.steps", "7",
        "--data-path", "a", "b", "optimizer.beta1=0.5", "--nothing-like-it",
    ]  # fmt: skip
    answer = explain_options(line, [word for word in line if word.startswith("--") and word != "--config"])
    for part in (
        "--num-layers 12 is model.num_layers=12;", "--micro-batch-size 4 is batch.micro_batch_size=4;",
        "--learning_rate 1e-4 is optimizer.lr=1e-4;", "--fp16 is training.precision=fp16;",
        "--max-position-embeddings 1024 is model.max_position=1023;", "schedule.warmup_steps (in steps",
        "model.hidden_size", "--training.steps 7 is training.steps=7", "--nothing-like-it is not known",
    ):  # fmt: skip
        assert part in answer
    assert "\n" not in answer and "--config" not in answer and "beta1" not in answer


def test_options_of_lora_are_answered():
    """As TRL takes them: what is a setting, and what is not implemented."""
    line = [
        "--use_peft",
        "--lora_r",
        "8",
        "--lora_target_modules",
        "q_proj",
        "v_proj",
        "--use_rslora",
        "--use_dora",
    ]
    answer = explain_options(line, [word for word in line if word.startswith("--")])
    for part in ("--lora_r 8 is model.lora.rank=8;", "model.lora.targets (", "rank_stabilized=true;"):
        assert part in answer
    assert re.search(r"--use_dora: .* not implemented", answer)


MIXTURES = {
    ("0.7", "a", "0.3", "b"): "[{prefix: a, weight: 0.7}, {prefix: b, weight: 0.3}]",
    ("a", "b"): "[{prefix: a}, {prefix: b}]",
    ("a",): "[{prefix: a}]",
}


@pytest.mark.parametrize("values", MIXTURES)
def test_a_blend_of_datasets_is_answered_with_a_mixture_that_is_taken(values):
    answer = explain_options(["--data-path", *values], ["--data-path"])
    found = re.search(r"data\.train=\[.*\](?= )", answer)
    assert found and tiny(found[0]).data.train == tiny(f"data.train={MIXTURES[values]}").data.train


def test_a_value_of_another_name_is_answered_with_its_name_here():
    assert "WSD is schedule.parts" in explain_options(["--lr-decay-style", "WSD"], ["--lr-decay-style"])


# What a script of Megatron-LM passes besides sizes: https://github.com/NVIDIA/Megatron-LM, its arguments by purpose
UNLIKE_OURS = [
    "--moe-router-topk", "8", "--moe-any-new-option", "--no-gradient-accumulation-fusion",
    "--log-memory-to-tensorboard", "--transformer-impl", "local", "--lr-warmup-samples", "5",
    "--exit-duration-in-mins", "1190", "--data-impl", "mmap",
    "--deepspeed", "--merge-file", "m.txt", "--no-load-rng", "--reset-position-ids", "--attention-softmax-in-fp32",
    "--fp8-format", "hybrid",
]  # fmt: skip


def test_options_of_megatron_are_known_by_name_or_by_their_beginning():
    names = [word for word in UNLIKE_OURS if word.startswith("--")]
    answer = explain_options(UNLIKE_OURS, names)
    assert "not known" not in answer and all(name in answer for name in names)


def test_a_flag_that_is_off_is_left_out():
    assert "--bf16 False: leave it out" in explain_options(["--bf16", "False"], ["--bf16"])


def test_the_trainers_form_of_a_deepspeed_file():
    assert with_deepspeed_file(["--deepspeed", "ds.json", "a.b=1"]) == [
        "--deepspeed_config",
        "ds.json",
        "a.b=1",
    ]
    assert with_deepspeed_file(["--deepspeed=ds.json"]) == ["--deepspeed_config=ds.json"]
    for untouched in (["--deepspeed", "a.b=1"], ["--deepspeed", "--config", "x"], ["--deepspeed"]):
        assert with_deepspeed_file(untouched) == untouched


@pytest.mark.parametrize(
    "second", [["--deepspeed_config=b.json"], ["--deepspeed", "b.json"], ["--deepspeed=b.json"]]
)
def test_a_second_deepspeed_file_is_refused(second):
    with pytest.raises(ConfigError, match="given twice"):
        with_deepspeed_file(["--deepspeed_config", "a.json", *second])
