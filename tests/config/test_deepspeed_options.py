"""Our table of DeepSpeed options against the installed DeepSpeed: names, types, ranges, and what it makes of them."""

from __future__ import annotations

import dataclasses
import typing

import pytest

from data_utils.base.settings import setting_names
from megatron_lite.config import deepspeed_options as ours
from megatron_lite.config.deepspeed_options import REFUSED, Options


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
