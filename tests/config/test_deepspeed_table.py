"""The table of DeepSpeed's options against the installed DeepSpeed: names, types, and who reads what."""

from __future__ import annotations

import sys
import typing
from typing import Any

import pytest
from support.configs import tiny
from support.distributed import run_ranks

from megatron_lite.config.deepspeed_table import OPTION_TYPES, Policy, sort_options, table
from megatron_lite.engine.plain import make_engine


def deepspeed_models():
    """Our section -> DeepSpeed's pydantic model."""
    from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
    from deepspeed.runtime.tensor_parallel.config import TPTrainingConfig
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
    from deepspeed.runtime.zero.offload_config import DeepSpeedZeroOffloadOptimizerConfig

    return {
        "bf16": DeepSpeedBF16Config,
        "fp16": DeepSpeedFP16Config,
        "zero_optimization": DeepSpeedZeroConfig,
        "zero_optimization.offload_optimizer": DeepSpeedZeroOffloadOptimizerConfig,
        "tensor_parallel": TPTrainingConfig,
    }


FIELDS = [
    (f"{section}.{field.alias or name}", field)
    for section, model in deepspeed_models().items()
    for name, field in model.model_fields.items()
    if f"{section}.{name}" not in deepspeed_models()
]
KEYS = table().options


def todays(key: str) -> str:
    return table().former_flags[key][0] if key in table().former_flags else table().former.get(key, key)


def test_each_field_of_deepspeed_has_a_policy():
    assert {todays(key) for key, _ in FIELDS} <= KEYS.keys()


PLAIN = {bool: ("flag",), float: ("number", "share"), str: ("dtype", "device")}


TYPED = [(key, field) for key, field in FIELDS if KEYS[todays(key)].type_name != "any"]


@pytest.mark.parametrize(("key", "field"), TYPED, ids=[key for key, _ in TYPED])
def test_types_are_deepspeeds(key, field):
    arguments = [
        arg for arg in typing.get_args(field.annotation) if arg is not type(None) and isinstance(arg, type)
    ]
    kind = arguments[0] if len(arguments) == 1 else field.annotation
    row = KEYS[todays(key)]
    if kind in PLAIN and key not in table().former_flags:
        assert row.type_name in PLAIN[kind]
    elif kind is int:
        assert OPTION_TYPES[row.type_name][0] is int


class Asked(dict):
    """A configuration that records which keys are looked up."""

    asked: typing.ClassVar[set[str]] = set()

    def get(self, key, default=None):
        self.asked.add(key)
        return super().get(key, default)

    def __contains__(self, key):
        self.asked.add(key)
        return super().__contains__(key)

    def keys(self):
        return Asked.Keys()

    class Keys:
        def __contains__(self, key):
            Asked.asked.add(key)
            return False

        def __iter__(self):
            return iter(())


def test_each_section_that_deepspeed_looks_up_has_a_policy():
    from deepspeed.runtime import config as theirs

    Asked.asked.clear()
    theirs.DeepSpeedConfig(Asked(train_batch_size=1))
    asked = Asked.asked | set(theirs._REMOVED_TOP_LEVEL_CONFIG_KEYS)
    asked |= {f"zero_optimization.{key}" for key in theirs._REMOVED_ZERO_CONFIG_KEYS}
    assert len(asked) > 60
    known = {*KEYS, *table().former, *table().former_flags} | {key.rpartition(".")[0] for key in KEYS}
    assert asked <= known


# A value that is neither DeepSpeed's default nor one that sets nothing, by kind
OTHER: dict[str, Any] = {
    "flag": True, "number": 7.0, "count": 7, "size": 7, "depth": 7, "dtype": "bf16",
}  # fmt: skip


def record_reads(context, options: dict[str, Any], stage: int, precision: str) -> set[str]:
    """The options that are read after the configuration is parsed, while an engine is made."""
    from deepspeed.runtime.config import DeepSpeedConfig

    read: set[str] = set()
    places = {model: f"{section}." for section, model in deepspeed_models().items()} | {DeepSpeedConfig: ""}
    for cls, place in places.items():
        aliases = {name: field.alias or name for name, field in getattr(cls, "model_fields", {}).items()}
        plain = cls.__getattribute__

        def recorded(self, name, plain=plain, place=place, aliases=aliases):
            caller = sys._getframe(1).f_code.co_filename
            if not caller.endswith("config.py") and "pydantic" not in caller:
                read.add(place + aliases.get(name, name))
            return plain(self, name)

        cls.__getattribute__ = recorded
    settings = [f"parallel.zero_stage={stage}", f"training.precision={precision}", "model.hidden_size=32"]
    config = tiny(*settings, *(f"deepspeed.{key}={value}" for key, value in options.items()))
    engine = make_engine(config, context, num_losses=1)
    if stage < 3:  # what this project's optimizer reads instead of DeepSpeed's
        made = config.deepspeed_options(1)
        bucket = made["zero_optimization"]["reduce_bucket_size"]
        assert str(engine._zero._communication_type) == "torch.bfloat16"
        assert bucket == 7 and len(engine._zero.buckets) > 20, "each parameter is a bucket of its own"
        read |= {"communication_data_type", "zero_optimization.reduce_bucket_size"}
    return read


def test_no_text_is_handed_on():
    """It could be a path that DeepSpeed writes to: the file may be a stranger's (SECURITY.md)."""
    handed_on = (Policy.PASSED_ON, Policy.STAGE_3)
    types = {row.type_name for row in KEYS.values() if row.policy in handed_on}
    assert types <= {"flag", "count", "size", "depth", "number", "share", "dtype"}


# DeepSpeed reads what is in these once they are on.
SWITCHED = ("flops_profiler.",)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_what_is_handed_on_is_read_by_the_engine_of_the_stage(stage):
    policies = (Policy.PASSED_ON, Policy.STAGE_3) if stage == 3 else (Policy.PASSED_ON,)
    keys = [key for key, row in KEYS.items() if row.policy in policies and not key.startswith(SWITCHED)]
    options = {
        "communication_data_type": "bf16",
        "zero_optimization.reduce_bucket_size": 7 if stage < 3 else 1000,
    }
    (read,) = run_ranks(record_reads, 1, options, stage, "fp16")
    fp16 = {"fp16.min_loss_scale", "fp16.hysteresis", "fp16.loss_scale_window", "fp16.consecutive_hysteresis"}
    if "float16_config" in read:  # its method gives the arguments of the scaler together
        read |= fp16 | {"fp16.initial_scale_power"}
    assert sorted(set(keys) - read) == []


def test_dictionary_has_handed_options_of_the_stage_alone():
    given = {key: OTHER[row.type_name] for key, row in KEYS.items() if row.policy is Policy.STAGE_3}
    nested: dict[str, Any] = {}
    for key, value in given.items():
        nested.setdefault("zero_optimization", {})[key.partition(".")[2]] = value
    options = sort_options(nested)
    assert not options.problems
    assert options.for_deepspeed(1) == {} and options.for_deepspeed(3) == nested
    assert options.without_effect(1).keys() == given.keys() and options.without_effect(3) == {}
