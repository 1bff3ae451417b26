"""Our table of DeepSpeed options against the installed DeepSpeed: names, types, ranges, and what it makes of them."""

from __future__ import annotations

import dataclasses
import typing
from typing import Any

import pytest
from support.configs import tiny, with_json

from data_utils.base.errors import ConfigError
from data_utils.base.settings import setting_names
from megatron_lite.config import deepspeed_options as ours
from megatron_lite.config.deepspeed_options import DEFAULTS, REFUSED, Options


def deepspeed_models():
    """Our section -> DeepSpeed's pydantic model."""
    from deepspeed.comm.config import CommsLoggerConfig
    from deepspeed.monitor.config import CSVConfig, TensorBoardConfig, WandbConfig
    from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    return {
        "bf16": DeepSpeedBF16Config,
        "fp16": DeepSpeedFP16Config,
        "zero_optimization": DeepSpeedZeroConfig,
        "comms_logger": CommsLoggerConfig,
        "tensorboard": TensorBoardConfig,
        "csv_monitor": CSVConfig,
        "wandb": WandbConfig,
    }


HINTS = typing.get_type_hints(Options)
SECTIONS = [name for name, hint in HINTS.items() if dataclasses.is_dataclass(hint)]
NOT_PYDANTIC = ("flops_profiler", "data_types", "checkpoint")
# What keeps a nested value apart from DeepSpeed's default, whatever its type.
EXAMPLES = {bool: True, int: 7, float: 7.0, str: "text"}


def plain(hint):
    """The type of X | None; lists by their container."""
    (inner,) = [arg for arg in typing.get_args(hint) if arg is not type(None)] or [hint]
    return {tuple: list}.get(typing.get_origin(inner), inner)


def test_every_section_is_compared():
    assert {*deepspeed_models(), *NOT_PYDANTIC} == set(SECTIONS)


@pytest.mark.parametrize("section", [name for name in SECTIONS if name not in NOT_PYDANTIC])
def test_names_types_and_ranges_are_deepspeeds(section):
    model = deepspeed_models()[section]
    theirs = {field.alias or name: field for name, field in model.model_fields.items()}
    hints = typing.get_type_hints(HINTS[section], vars(ours))
    for field in dataclasses.fields(HINTS[section]):
        option = theirs[field.name]
        if field.name == "stage":  # an enum there; parallel.zero_stage decides it
            continue
        assert plain(hints[field.name]) is plain(option.annotation), field.name
        allowed = field.metadata.get("range")
        for limit in option.metadata:
            least = getattr(limit, "ge", None)
            least = limit.gt + 1 if least is None else least
            assert allowed is not None and allowed.at_least >= least, field.name


def test_deepspeed_takes_every_option():
    """One dictionary with all of them: DeepSpeed's models refuse unknown keys, and the others must arrive."""
    from deepspeed.runtime.config import DeepSpeedConfig

    given = {}
    for name in setting_names(Options):
        section, _, key = name.rpartition(".")
        hint = typing.get_type_hints(HINTS[section], vars(ours))[key] if section else HINTS[key]
        value = ["all_reduce"] if plain(hint) is list else EXAMPLES[plain(hint)]
        (given.setdefault(section, {}) if section else given)[key] = value
    given |= {
        "train_batch_size": 49,
        "zero_optimization": {**given["zero_optimization"], "stage": 1},
        "communication_data_type": "bf16",
        "data_types": {"grad_accum_dtype": "fp32"},
        "fp16": {**given["fp16"], "enabled": False},
    }
    config = DeepSpeedConfig(given)
    profiler, zero = given["flops_profiler"], given["zero_optimization"]
    assert {key: getattr(config.flops_profiler_config, key) for key in profiler} == profiler
    assert config.zero_config.prefetch_bucket_size == zero["stage3_prefetch_bucket_size"]
    assert config.grad_accum_dtype == "fp32" and config.load_universal_checkpoint is True
    assert str(config.communication_data_type) == "torch.bfloat16"
    for name, value in given.items():
        if name not in SECTIONS and name != "communication_data_type":
            assert getattr(config, name) == value, name


@pytest.mark.parametrize("key", REFUSED)
def test_what_is_refused_is_not_taken_elsewhere(key):
    assert not [name for name in setting_names(Options) if name == key or name.startswith(f"{key}.")]


# How a run's DeepSpeed file and section agree with its configuration

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


def test_agreement_is_accepted_and_other_options_pass_through(tmp_path):
    config = with_json(
        tmp_path, {**AGREEING, "wall_clock_breakdown": True}, "deepspeed.comms_logger.enabled=false"
    )
    options = config.deepspeed_options(dp_size=2)
    assert options["zero_optimization"] == {"stage": 1, "reduce_bucket_size": 12345}
    assert options["wall_clock_breakdown"] is True and options["comms_logger"] == {"enabled": False}


def test_auto_leaves_the_value_to_the_configuration(tmp_path):
    auto = {
        key: dict.fromkeys(value, "auto") if isinstance(value, dict) else "auto"
        for key, value in AGREEING.items()
    }
    del auto["zero_optimization"]["reduce_bucket_size"]
    config = with_json(tmp_path, {**auto, "gradient_accumulation_steps": "auto"})
    assert config.deepspeed_options(1) == tiny().deepspeed_options(1)


def leaves(tree: dict[str, Any], path: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in tree.items():
        found |= leaves(value, f"{path}{key}.") if isinstance(value, dict) else {f"{path}{key}": value}
    return found


DERIVED = sorted(leaves(tiny().deepspeed_options(1)).keys() - leaves(DEFAULTS).keys())


@pytest.mark.parametrize("key", DERIVED)
def test_a_contradiction_of_any_derived_option_is_refused(key):
    value = leaves(tiny().deepspeed_options(1))[key]
    wrong = (
        {bool: not value, int: value + 1, float: value + 1, str: "fp16"}[type(value)]
        if value != "fp32"
        else "bf16"
    )
    with pytest.raises(ConfigError, match=f"deepspeed.{key} is {wrong!r}, but .* makes it {value!r}"):
        tiny(f"deepspeed.{key}={wrong}").deepspeed_options(1)


@pytest.mark.parametrize("key", REFUSED)
def test_options_that_have_a_section_of_their_own_are_refused(key):
    with pytest.raises(ConfigError, match=f"deepspeed.{key} is not taken from DeepSpeed options; remove it"):
        tiny(f"deepspeed.{key}={{enabled: true}}")


@pytest.mark.parametrize("key", ours.ONLY_AT_STAGE_3)
def test_options_without_effect_at_stages_1_and_2_are_refused_there(key):
    numbers = {"gradient_predivide_factor": 2.0, "zero_optimization.allgather_bucket_size": 1000}
    value = numbers.get(key, True)
    for stage in (1, 2):
        with pytest.raises(ConfigError, match=f"deepspeed.{key} has an effect at parallel.zero_stage 3 only"):
            tiny(f"deepspeed.{key}={value}", f"parallel.zero_stage={stage}")
    tiny(f"deepspeed.{key}={value}", "parallel.zero_stage=3")


@pytest.mark.parametrize("key", ours.ALWAYS_AT_STAGES_1_AND_2)
def test_what_stages_1_and_2_always_do_cannot_be_turned_off(key):
    for stage in (1, 2):
        tiny(f"deepspeed.{key}=true", f"parallel.zero_stage={stage}")
        with pytest.raises(
            ConfigError, match=f"deepspeed.{key} is False, but at parallel.zero_stage 1 and 2"
        ):
            tiny(f"deepspeed.{key}=false", f"parallel.zero_stage={stage}")
    tiny(f"deepspeed.{key}=false", "parallel.zero_stage=3")


WRONG_OPTIONS = {
    "deepspeed.zero_optimisation={}": "unknown setting deepspeed.zero_optimisation; the nearest valid key is "
    "deepspeed.zero_optimization.",
    "deepspeed.zero_optimization.reduce_bucket_sise=5": "the nearest valid key is "
    "deepspeed.zero_optimization.reduce_bucket_size.",
    "deepspeed.reduce_bucket_size=5": "the nearest valid key is deepspeed.zero_optimization.reduce_bucket_size.",
    "deepspeed.autotuning={enabled: true}": "unknown setting deepspeed.autotuning; valid keys here are bf16,",
    "deepspeed.1=2": "unknown setting deepspeed.1;",
    "deepspeed.zero_optimization.reduce_bucket_size=auto": "reduce_bucket_size must be a whole number, not 'auto'",
    "deepspeed.zero_optimization.reduce_bucket_size=0": "reduce_bucket_size is 0; it must be at least 1",
    "deepspeed.zero_optimization.overlap_comm=1": "overlap_comm must be true or false, not 1",
    "deepspeed.zero_optimization=[1]": "deepspeed.zero_optimization is [1], but it must be a mapping",
    "deepspeed.tensorboard=true": "deepspeed.tensorboard is a section, but its value is True",
    "deepspeed.wall_clock_breakdown='yes'": "wall_clock_breakdown must be true or false, not 'yes'",
    "deepspeed.steps_per_print=0": "deepspeed.steps_per_print is 0; it must be at least 1",
    "deepspeed.communication_data_type=fp8": "is 'fp8'; it must be one of fp32, fp16, bf16",
    "deepspeed.comms_logger.prof_ops=all_reduce": "deepspeed.comms_logger.prof_ops must be a list",
    "deepspeed.gradient_clipping=[1]": "deepspeed.gradient_clipping must be a finite number, not [1]",
}


@pytest.mark.parametrize("option", WRONG_OPTIONS)
def test_an_unknown_or_ill_typed_deepspeed_option_is_one_line(option):
    with pytest.raises(ConfigError) as error:
        tiny(option)
    assert WRONG_OPTIONS[option] in str(error.value) and "\n" not in str(error.value)


def test_deepspeed_numbers_are_read_as_ours_and_null_says_nothing():
    config = tiny(
        "deepspeed.zero_optimization={reduce_bucket_size: 5e8, overlap_comm: null}", "deepspeed.fp16=null"
    )
    assert config.deepspeed_options(1)["zero_optimization"] == {"stage": 1, "reduce_bucket_size": 500_000_000}
    assert config.deepspeed_options(1)["fp16"] == tiny().deepspeed_options(1)["fp16"]


def test_offloading_takes_our_optimizer_to_the_cpu():
    options = tiny("parallel.offload_optimizer=true", "parallel.zero_stage=2").deepspeed_options(1)
    assert options["zero_optimization"] == {
        "stage": 2,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
    }
    assert options["zero_force_ds_cpu_optimizer"] is False  # DeepSpeed's own would be compiled at the start


def test_accumulation_steps_depend_on_the_number_of_ranks():
    config = tiny("deepspeed.gradient_accumulation_steps=2")  # not wrong as such: right for one rank
    assert config.deepspeed_options(1)["gradient_accumulation_steps"] == 2
    with pytest.raises(ConfigError, match="is 2, but the section batch on 2 data-parallel ranks makes it 1"):
        config.deepspeed_options(2)


def test_loss_scaling_may_be_tuned_and_defaults_to_the_reference():
    options = tiny("training.precision=fp16", "deepspeed.fp16.initial_scale_power=12").deepspeed_options(1)
    assert options["fp16"] == {**DEFAULTS["fp16"], "initial_scale_power": 12, "enabled": True}
    assert options["bf16"] == {"enabled": False}
