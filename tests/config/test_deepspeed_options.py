"""A user's DeepSpeed file: what becomes a setting, what DeepSpeed gets, what is said, and what is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest
import yaml
from support.configs import TINY, tiny, with_json

from data_utils.common.errors import ConfigError
from data_utils.common.settings import merge, to_tree
from megatron_lite.config.deepspeed_options import DEFAULTS
from megatron_lite.config.deepspeed_table import Policy, table
from megatron_lite.config.tree import Config, load_config
from megatron_lite.finetune.setup import load_tree


def read(tmp_path, given: Any, *overrides: str, yaml_tree: Any = None, processes: int = 1):
    """The configuration of a file on top of the smallest one, and what is said of it."""
    base, path, said = tmp_path / "base.yaml", tmp_path / "ds.json", list[str]()
    base.write_text(yaml.safe_dump({**TINY, **(yaml_tree or {})}))
    path.write_text(given if isinstance(given, str) else json.dumps(given))
    return load_config([base], overrides, path, processes, said.append), said


KEYS = table().options

# What becomes a setting

BECOMES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "fp16": ({"fp16": {"enabled": True}}, {"training.precision": "fp16"}),
    "bf16 by its former name": ({"bfloat16": {"enabled": True}}, {"training.precision": "bf16"}),
    "no half precision": ({"bf16": {"enabled": False}}, {"training.precision": "fp32"}),
    "a type that is not used anyway": ({"fp16": {"enabled": False}}, {"training.precision": "bf16"}),
    "clipping": ({"gradient_clipping": 0.3}, {"optimizer.clip_grad_norm": 0.3}),
    "clipping as a parameter of Adam": (
        {"optimizer": {"type": "Adam", "params": {"max_grad_norm": 0.3}}},
        {"optimizer.clip_grad_norm": 0.3},
    ),
    "stage": ({"zero_optimization": {"stage": 2}}, {"parallel.zero_stage": 2}),
    "stage 0": ({"zero_optimization": {"stage": 0}}, {"parallel.zero_stage": 1}),
    "ZeRO in its first form": ({"zero_optimization": True}, {"parallel.zero_stage": 1}),
    "offload": (
        {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu", "pin_memory": True}}},
        {"parallel.offload_optimizer": True, "parallel.zero_stage": 3},
    ),
    "offload by its former name": (
        {"zero_optimization": {"stage": 2, "cpu_offload": True}},
        {"parallel.offload_optimizer": True},
    ),
    "no offload": (
        {"zero_optimization": {"offload_optimizer": {"device": "none", "pin_memory": False}}},
        {"parallel.offload_optimizer": False},
    ),
    "AdamW with DeepSpeed's defaults": (
        {"optimizer": {"type": "AdamW", "params": {}}},
        {
            "optimizer.lr": 1e-3, "optimizer.beta1": 0.9, "optimizer.beta2": 0.999, "optimizer.eps": 1e-8,
            "optimizer.weight_decay": 0.0,
        },
    ),
    "Adam, which decouples decay": (
        {"optimizer": {"type": "Adam", "params": {"lr": 2e-4, "betas": [0.8, 0.95], "weight_decay": 0.2}}},
        {"optimizer.lr": 2e-4, "optimizer.beta1": 0.8, "optimizer.beta2": 0.95, "optimizer.weight_decay": 0.2},
    ),
    "all left to us": (
        {"optimizer": {"type": "AdamW", "params": dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto")}},
        {"optimizer.lr": 1e-4, "optimizer.beta2": 0.98, "optimizer.eps": 1e-6, "optimizer.weight_decay": 0.1},
    ),
    "a rate below the scheduler's": (
        {
            "optimizer": {"type": "Adam", "params": {"lr": 1e-5}},
            "scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": 1e-4, "warmup_max_lr": 1e-3}},
        },
        {
            "optimizer.lr": 1e-3, "schedule.kind": "deepspeed_constant", "schedule.warmup_steps": 1000,
            "schedule.warmup_start_ratio": 0.1, "schedule.warmup_kind": "log",
        },
    ),
    "cosine": (
        {
            "scheduler": {
                "type": "WarmupCosineLR",
                "params": {"total_num_steps": 5000, "warmup_num_steps": 10, "warmup_type": "linear"},
            }
        },
        {
            "schedule.kind": "deepspeed_cosine", "schedule.decay_steps": 5000, "schedule.warmup_steps": 10,
            "schedule.min_lr_ratio": 1e-4, "schedule.warmup_kind": "linear", "optimizer.lr": 1e-4,
        },
    ),
    "a schedule that is left to us": (
        {
            "scheduler": {
                "type": "WarmupDecayLR",
                "params": dict.fromkeys(
                    ("total_num_steps", "warmup_min_lr", "warmup_max_lr", "warmup_num_steps"), "auto"
                ),
            }
        },
        {
            "schedule.kind": "deepspeed_linear", "schedule.decay_steps": None, "schedule.warmup_steps": 0,
            "schedule.min_lr_ratio": 0.0, "optimizer.lr": 1e-4,
        },
    ),
}  # fmt: skip


def value(config: Config, key: str) -> Any:
    section, name = key.split(".")
    return getattr(getattr(config, section), name)


@pytest.mark.parametrize("case", BECOMES)
def test_an_option_becomes_a_setting(tmp_path, case):
    given, settings = BECOMES[case]
    config, _ = read(tmp_path, given)
    assert {key: value(config, key) for key in settings} == settings
    again, _ = read(tmp_path, {}, yaml_tree=to_tree(config))  # what a run records opens as it was
    assert again == config


def test_processes_split_layers_and_sequences(tmp_path):
    tensor, _ = read(tmp_path, {"tensor_parallel": {"autotp_size": 2}}, processes=2)
    assert tensor.parallel.tensor_parallel_size == 2 and not tensor.parallel.sequence_parallel
    sequence, _ = read(tmp_path, {"sequence_parallel_size": 2, "train_batch_size": 8}, processes=4)
    assert sequence.parallel.tensor_parallel_size == 2 and sequence.parallel.sequence_parallel
    assert sequence.batch.micro_batch_size == 4, "two ranks have samples of their own"


BATCHES = [  # what the file says, processes -> batch, micro-batch; DeepSpeed derives the same below
    ({"train_batch_size": 64, "train_micro_batch_size_per_gpu": 4}, 2, (64, 4)),
    ({"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 3}, 2, (24, 4)),
    ({"train_batch_size": 64, "gradient_accumulation_steps": 4}, 2, (64, 8)),
    ({"train_batch_size": 64}, 2, (64, 32)),
    ({"train_micro_batch_size_per_gpu": 5}, 2, (10, 5)),
    ({"train_batch_size": 64, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 8}, 2, (64, 4)),
]  # fmt: skip


@pytest.mark.parametrize(("given", "processes", "expected"), BATCHES)
def test_two_of_three_give_the_batch_as_in_deepspeed(tmp_path, monkeypatch, given, processes, expected):
    from deepspeed.runtime import config as theirs

    config, _ = read(tmp_path, given, processes=processes)
    assert (config.batch.global_batch_size, config.batch.micro_batch_size) == expected
    monkeypatch.setattr(theirs.dist, "get_rank", lambda: 0)
    monkeypatch.setattr(theirs.dist, "get_world_size", lambda: processes)
    deepspeeds = theirs.DeepSpeedConfig(dict(given))
    assert (deepspeeds.train_batch_size, deepspeeds.train_micro_batch_size_per_gpu) == expected
    options = config.deepspeed_options(processes)
    assert options["gradient_accumulation_steps"] == deepspeeds.gradient_accumulation_steps


def test_what_a_file_leaves_out_of_the_batch_stays_where_it_fits(tmp_path):
    here = {"batch": {"global_batch_size": 24, "micro_batch_size": 6}}
    batch = read(tmp_path, {"train_batch_size": 48}, yaml_tree=here, processes=2)[0].batch
    assert (batch.global_batch_size, batch.micro_batch_size) == (48, 6)
    batch = read(tmp_path, {"train_micro_batch_size_per_gpu": 3}, yaml_tree=here, processes=2)[0].batch
    assert (batch.global_batch_size, batch.micro_batch_size) == (24, 3)
    given = {"train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto"}
    config, said = read(tmp_path, {**given, "gradient_accumulation_steps": 5}, yaml_tree=here)
    assert (
        config.batch.global_batch_size == 24
        and "gradient_accumulation_steps (derived from global batch 24" in said[0]
    )


def test_a_file_stands_between_yaml_and_the_command_line(tmp_path):
    here = {"optimizer": {"kind": "lamb", "lr": 1e-3, "bias_correction": True, "weight_decay": 0.3}}
    given = {
        "optimizer": {"type": "AdamW", "params": {"lr": 2e-3}},
        "bf16": {"enabled": True},
        "dump_state": True,
    }
    config, said = read(tmp_path, given, "optimizer.eps=1e-7", yaml_tree=here)
    settings = config.optimizer
    assert (settings.kind, settings.lr, settings.weight_decay, settings.eps) == ("adamw", 2e-3, 0.3, 1e-7)
    assert len(said) == 1 and "optimizer.lr=0.002 (was 0.001; " in said[0]
    assert "precision" not in said[0], "it is what it was"
    same, _ = read(tmp_path, given, "optimizer.lr=2e-3", "deepspeed.dump_state=false")
    assert same.optimizer.lr == 2e-3 and same.deepspeed == {"dump_state": False}
    with pytest.raises(ConfigError) as error:
        read(tmp_path, given, "optimizer.lr=1e-3", "training.precision=fp16")
    for name in ("optimizer.lr", "training.precision"):
        assert name in str(error.value)


# What DeepSpeed gets

AGREEING = {
    "train_batch_size": 16,
    "train_micro_batch_size_per_gpu": 8,
    "gradient_clipping": 1.0,
    "zero_optimization": {"stage": 1, "reduce_bucket_size": 12345},
    "zero_allow_untested_optimizer": True,
    "data_types": {"grad_accum_dtype": "fp32"},
    "bf16": {"enabled": True},
    "fp16": {"enabled": False},
}


def test_options_of_deepspeeds_own_pass_through(tmp_path):
    config, said = read(tmp_path, {**AGREEING, "wall_clock_breakdown": True})
    options = config.deepspeed_options(dp_size=2)
    assert options["zero_optimization"] == {"stage": 1, "reduce_bucket_size": 12345}
    assert options["wall_clock_breakdown"] is True and len(said) == 1 and "zero_allow" in said[0]
    assert config.deepspeed == {
        "wall_clock_breakdown": True,
        "zero_optimization": {"reduce_bucket_size": 12345},
    }


def test_auto_leaves_every_value_to_the_configuration(tmp_path):
    given: dict[str, Any] = {}
    for key in KEYS:
        place, parts = given, key.split(".")
        for part in parts[:-1]:
            place = place.setdefault(part, {})
        place[parts[-1]] = "auto"
    config, said = read(tmp_path, given)
    assert said == [] and config.deepspeed_options(1) == tiny().deepspeed_options(1)


def test_loss_scaling_may_be_tuned_and_defaults_to_the_reference():
    options = tiny("training.precision=fp16", "deepspeed.fp16.initial_scale_power=12").deepspeed_options(1)
    assert options["fp16"] == {**DEFAULTS["fp16"], "initial_scale_power": 12, "enabled": True}
    assert options["bf16"] == {"enabled": False}


def test_offloading_takes_our_optimizer_to_the_cpu():
    options = tiny("parallel.offload_optimizer=true", "parallel.zero_stage=2").deepspeed_options(1)
    assert options["zero_optimization"] == {
        "stage": 2,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
    }
    assert options["zero_force_ds_cpu_optimizer"] is False  # DeepSpeed's own would be compiled at the start


def test_numbers_are_read_as_ours_and_null_says_nothing():
    config = tiny(
        "deepspeed.zero_optimization={reduce_bucket_size: 5e8, overlap_comm: null}", "deepspeed.fp16=null"
    )
    assert config.deepspeed_options(1)["zero_optimization"] == {"stage": 1, "reduce_bucket_size": 500_000_000}
    assert config.deepspeed_options(1)["fp16"] == tiny().deepspeed_options(1)["fp16"]


def leaves(tree: dict[str, Any], path: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in tree.items():
        found |= leaves(value, f"{path}{key}.") if isinstance(value, dict) else {f"{path}{key}": value}
    return found


DERIVED = sorted(
    key for key in leaves(tiny().deepspeed_options(1)) if key in KEYS and KEYS[key].policy is Policy.SETTING
)


@pytest.mark.parametrize("key", DERIVED)
def test_a_recorded_section_may_not_contradict_its_settings(key):
    value = leaves(tiny().deepspeed_options(1))[key]
    wrong = {bool: not value, int: value + 1, float: value + 1}[type(value)]
    with pytest.raises(ConfigError, match=f"deepspeed.{key} is {wrong!r}, but .* makes it {value!r}"):
        tiny(f"deepspeed.{key}={wrong}").deepspeed_options(1)
    tiny(f"deepspeed.{key}={value}").deepspeed_options(1)


def test_accumulation_steps_depend_on_the_number_of_ranks():
    config = tiny("deepspeed.gradient_accumulation_steps=2")  # not wrong as such: right for one rank
    assert config.deepspeed_options(1)["gradient_accumulation_steps"] == 2
    with pytest.raises(ConfigError, match="is 2, but the section batch on 2 data-parallel ranks makes it 1"):
        config.deepspeed_options(2)


# What is said to have no effect

OFF = {
    "prescale_gradients": False,
    "zero_allow_untested_optimizer": False,
    "amp": {"enabled": False, "opt_level": "O2"},
    "elasticity": {"enabled": False, "max_train_batch_size": 4},
    "torch_autocast": {"enabled": False, "dtype": "bfloat16"},
    "compression_training": {
        "layer_reduction": {"enabled": False, "keep_number_layer": 5},
        "weight_quantization": {
            "shared_parameters": {"enabled": False},
            "different_groups": {"w": {"modules": ["all"]}},
        },
    },
    "curriculum_learning": {"enabled": False, "min_difficulty": 8},
    "tensorboard": {"enabled": False, "output_path": "x", "unknown": 1},
    "comms_logger": {"enabled": False},
    "activation_checkpointing": {"partition_activations": False, "number_checkpoints": None},
    "zero_optimization": {
        "offload_param": {"device": "none", "buffer_count": 9},
        "offload_optimizer": {"device": "none"},
        "overlap_comm": False,
        "round_robin_gradients": False,
        "stage3_prefetch_bucket_size": "auto",
        "cpu_offload": False,
    },
    "_comment": "written by hand",
    "bf16": {"enabled": "auto"},
    "data_types": {"grad_accum_dtype": None},
}


def test_values_that_set_nothing_are_fine_at_every_stage(tmp_path):
    for stage in (1, 2, 3):
        config, said = read(tmp_path, OFF, f"parallel.zero_stage={stage}")
        assert said == []
        ours = tiny(f"parallel.zero_stage={stage}").deepspeed_options(1)
        if stage == 3:  # the same as DeepSpeed's default, or handed on as it is
            ours["zero_optimization"] |= {"overlap_comm": False}
        assert config.deepspeed_options(1) == ours


def test_all_that_has_no_effect_is_said_in_one_line(tmp_path):
    given = {
        "steps_per_print": 5,
        "prescale_gradients": True,
        "aio": {"block_size": 1},
        "zero_optimization": {
            "stage": 0,
            "stage3_max_live_parameters": 7,
            "round_robin_gradients": True,
            "overlap_comm": True,
        },
        "activation_checkpointing": {"partition_activations": True},
        "autotuning": {"enabled": True},
    }
    _, said = read(tmp_path, given)
    (line,) = said
    for name in (
        "steps_per_print", "prescale_gradients", "aio", "stage3_max_live_parameters", "round_robin_gradients",
        "overlap_comm", "activation_checkpointing", "autotuning",
    ):  # fmt: skip
        assert name in line
    of_three = {"stage": 3, "max_live_parameters": 7, "allgather_bucket_size": 9}
    at_three, said = read(tmp_path, {"zero_optimization": of_three})
    assert at_three.deepspeed["zero_optimization"] == {"stage3_max_live_parameters": 7}
    assert "max_live" not in " ".join(said)


# What is refused


def nested(key: str, value: Any) -> dict[str, Any]:
    for part in reversed(key.split(".")):
        value = {part: value}
    return value


REFUSED = [key for key, row in KEYS.items() if row.policy is Policy.REFUSED]
VALUES = ("sum", {"mode": "fixed"}, {"enabled": True}, {"a": {"enabled": True}, "b": {"enabled": False}})


@pytest.mark.parametrize("value", VALUES, ids=str)
def test_what_would_change_training_is_refused_with_a_remedy(tmp_path, value):
    given = {}
    for key in REFUSED:
        given = merge(given, nested(key, value))
    with pytest.raises(ConfigError) as error:
        read(tmp_path, given)
    for key in REFUSED:
        assert f"deepspeed.{key} is " in str(error.value) and KEYS[key].reason in str(error.value)


OTHER_TRAINING = {
    "another optimizer": (
        {"optimizer": {"type": "OneBitAdam", "params": {"freeze_step": 2}}},
        "optimizer.kind",
    ),
    "coupled decay": (
        {"optimizer": {"type": "Adam", "params": {"adam_w_mode": False, "weight_decay": 0.1}}},
        "weight_decay to 0",
    ),
    "moments as they are": (
        {"optimizer": {"type": "AdamW", "params": {"bias_correction": False}}},
        "bias_correction is False",
    ),
    "two clippings": (
        {"gradient_clipping": 1.0, "optimizer": {"type": "Adam", "params": {"max_grad_norm": 2.0}}},
        "gradient_clipping is 1.0",
    ),
    "another schedule": ({"scheduler": {"type": "OneCycle", "params": {}}}, "WarmupDecayLR"),
    "a schedule without an end": ({"scheduler": {"type": "WarmupDecayLR", "params": {}}}, "total_num_steps"),
    "both half precisions": ({"fp16": {"enabled": True}, "bf16": {"enabled": True}}, "keep one"),
}


@pytest.mark.parametrize("case", OTHER_TRAINING)
def test_an_optimizer_or_schedule_with_other_numbers_is_refused(tmp_path, case):
    given, remedy = OTHER_TRAINING[case]
    with pytest.raises(ConfigError, match=remedy):
        read(tmp_path, given)


def test_coupled_decay_of_nothing_is_adamw(tmp_path):
    params = {"adam_w_mode": False, "weight_decay": 0.0}
    assert read(tmp_path, {"optimizer": {"type": "Adam", "params": params}})[0].optimizer.weight_decay == 0


def test_unknown_keys_are_not_hidden_in_lists_of_all_keys(tmp_path):
    with pytest.raises(ConfigError) as error:
        read(tmp_path, {"general": {"seed": 1}, "hooks": ["gemini"], "deepspeed": {"stage": 2}})
    message = str(error.value)
    for name in ("deepspeed.general", "deepspeed.hooks", "deepspeed.deepspeed"):
        assert f"unknown setting {name}" in message
    assert "nearest valid key" in message and len(message) < 1000


MEANS_SOMETHING = {
    "a typing error": ({"gradient_cliping": 1.0}, "deepspeed.gradient_clipping"),
    "another section's key": ({"loss_scale": 0}, "deepspeed.fp16.loss_scale"),
    "a section inside another": (
        {"offload_optimizer": {"device": "cpu"}},
        "deepspeed.zero_optimization.offload_optimizer",
    ),
    "a parameter of the optimizer": ({"optimizer": {"type": "Adam", "eps": 1e-6}}, "others are in params"),
    "a parameter of the schedule": (
        {"scheduler": {"type": "WarmupLR", "warmup_num_steps": 5}},
        "others are in params",
    ),
    "another program's option": ({"num-layers": 4}, "unknown setting deepspeed.num-layers"),
    "a feature of a changed DeepSpeed": ({"own_feature": {"enabled": True}}, "deepspeed.own_feature"),
}


@pytest.mark.parametrize("case", MEANS_SOMETHING)
def test_an_unknown_key_that_may_mean_something_is_refused_with_where_it_belongs(tmp_path, case):
    given, remedy = MEANS_SOMETHING[case]
    with pytest.raises(ConfigError, match=remedy):
        read(tmp_path, given)


def test_all_that_must_change_is_reported_at_once(tmp_path):
    given = {
        "zero_optimisation": {},
        "train_batch_size": 7,
        "train_micro_batch_size_per_gpu": 4,
        "wall_clock_breakdown": "often",
        "amp": {"enabled": True},
        "optimizer": {"type": "Lamb"},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_steps": 5}},
        "zero_optimization": {"stage": 4, "zenflow": {"topk_ratio": 0.1}},
        "gradient_clipping": 1.0,
    }
    with pytest.raises(ConfigError) as error:
        read(tmp_path, given, "optimizer.clip_grad_norm=2")
    message = str(error.value)
    assert "\n" not in message and "9 DeepSpeed options must change" in message
    for name in (
        "zero_optimisation", "deepspeed.train_batch_size", "wall_clock_breakdown", "deepspeed.amp", "Lamb",
        "params.warmup_num_steps", "stage is 4", "zenflow", "optimizer.clip_grad_norm=2",
    ):  # fmt: skip
        assert name in message


WRONG_OPTIONS = {
    "deepspeed.zero_optimisation={}": "unknown setting deepspeed.zero_optimisation; the nearest valid key is "
    "deepspeed.zero_optimization.",
    "deepspeed.zero_optimization.reduce_bucket_sise=5": "the nearest valid key is "
    "deepspeed.zero_optimization.reduce_bucket_size.",
    "deepspeed.reduce_bucket_size=5": "the nearest valid key is deepspeed.zero_optimization.reduce_bucket_size.",
    "deepspeed.zero_optimization.reduce_bucket_sise=auto": "nearest valid key",
    "deepspeed.1=2": "unknown setting deepspeed.1;",
    "deepspeed.zero_optimization.reduce_bucket_size=0": "reduce_bucket_size is 0; it must be at least 1",
    "deepspeed.zero_optimization.overlap_comm=1": "overlap_comm is 1; it must be true or false",
    "deepspeed.zero_optimization=[1]": "deepspeed.zero_optimization is [1]; it must be a section",
    "deepspeed.flops_profiler=true": "deepspeed.flops_profiler is True; it must be a section",
    "deepspeed.wall_clock_breakdown='often'": "wall_clock_breakdown is 'often'; it must be true or false",
    "deepspeed.communication_data_type=fp8": "is 'fp8'; it must be one of fp32, fp16, bf16",
    "deepspeed.gradient_clipping=[1]": "deepspeed.gradient_clipping is [1]; it must be a valid number",
    "deepspeed.optimizer={type: AdamW}": "deepspeed.optimizer corresponds to the section optimizer",
}


@pytest.mark.parametrize("option", WRONG_OPTIONS)
def test_an_unknown_or_ill_typed_deepspeed_option_is_one_line(option):
    with pytest.raises(ConfigError) as error:
        tiny(option)
    assert WRONG_OPTIONS[option] in str(error.value) and "\n" not in str(error.value)


# The file

HJSON = """{
  # DeepSpeed reads its files as Hjson
  "train_batch_size": 32,  // comments
  gradient_clipping: 0.5,
  "bf16": {"enabled": true,},
}"""


def test_a_file_with_comments_and_commas_is_read_as_deepspeed_does(tmp_path):
    import hjson

    assert hjson.loads(HJSON)["train_batch_size"] == 32
    config, _ = read(tmp_path, HJSON)
    assert (config.batch.global_batch_size, config.optimizer.clip_grad_norm) == (32, 0.5)


@pytest.mark.parametrize("text", ["{'''", '{"a": [1, 2'])
def test_a_file_that_is_cut_off_is_one_line(tmp_path, text):
    with pytest.raises(ConfigError, match="not valid JSON"):
        with_json(tmp_path, text)


OTHER_FORMS = {"type": [{}, ["Adam"], 5], "params": [[1], "x", 3, {"lr": [1]}, {"betas": 1}, {1: 2}]}


@pytest.mark.parametrize(
    ("key", "value"), [(key, value) for key, values in OTHER_FORMS.items() for value in values]
)
@pytest.mark.parametrize("section", ["optimizer", "scheduler"])
def test_a_block_of_another_form_is_one_line(tmp_path, section, key, value):
    block = {"type": {"optimizer": "AdamW", "scheduler": "WarmupLR"}[section], key: value}
    with pytest.raises(ConfigError, match=f"deepspeed.{section}.(type|params)"):
        read(tmp_path, {section: block})


@pytest.mark.parametrize("text", ['{"a": 1, "a": 1}', "{a: 1\n a: 2}"])
def test_a_key_given_twice_is_refused(tmp_path, text):
    with pytest.raises(ConfigError, match="is not valid JSON"):
        with_json(tmp_path, text)


def test_the_section_of_a_yaml_file_has_the_same_policy(tmp_path):
    base, said = tmp_path / "base.yaml", list[str]()
    options = {"train_batch_size": 48, "steps_per_print": 3, "optimizer": {"type": "AdamW"}}
    base.write_text(yaml.safe_dump({**TINY, "deepspeed": options}))
    config = load_config([base], [], say=said.append)
    assert config.batch.global_batch_size == 48 and config.deepspeed == {}
    assert len(said) == 2 and "steps_per_print" in said[1]


def test_fine_tuning_reads_the_same_file(tmp_path):
    base, task, path, said = tmp_path / "base.yaml", tmp_path / "task.yaml", tmp_path / "ds.json", list[str]()
    base.write_text(yaml.safe_dump(TINY))
    task.write_text(yaml.safe_dump({"task": {"name": "own"}, "optimizer": {"lr": 5e-5, "weight_decay": 0.3}}))
    scheduler = {
        "type": "WarmupDecayLR",
        "params": dict.fromkeys(("total_num_steps", "warmup_num_steps"), "auto"),
    }
    given = {"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2, "scheduler": scheduler}
    path.write_text(json.dumps({**given, "optimizer": {"type": "Adam", "params": {"torch_adam": True}}}))
    tree = load_tree(
        [str(base)], str(task), [], deepspeed_config=path, processes=3, say=said.append
    )  # fmt: skip
    assert tree["batch"] == {"global_batch_size": 24, "micro_batch_size": 4}
    assert (tree["optimizer"]["weight_decay"], tree["optimizer"]["eps"]) == (0.3, 1e-8)
    assert tree["optimizer"]["lr"] == 1e-3, "the scheduler's default is DeepSpeed's"
    assert "warmup_steps" not in tree["schedule"], "the epochs decide it"
    assert len(said) == 2 and "optimizer.params.torch_adam" in said[1]


def test_three_options_of_the_batch_that_no_number_of_ranks_makes_are_refused(tmp_path):
    given = {"train_batch_size": 32, "train_micro_batch_size_per_gpu": 16, "gradient_accumulation_steps": 4}
    with pytest.raises(
        ConfigError, match=r"train_batch_size \(32\) must be a multiple of .*\(16\) x .*\(4\)"
    ):
        read(tmp_path, given)
    config, _ = read(tmp_path, {**given, "gradient_accumulation_steps": 2})
    assert (config.batch.global_batch_size, config.batch.micro_batch_size) == (32, 16)
