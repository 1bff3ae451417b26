"""Every rule of the configuration fires, and its message names the value, the rule and the remedy."""

from __future__ import annotations

import ast
import dataclasses
import json
import traceback
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
from support.configs import with_json
from support.project import ROOT
from support.remedies import advised
from support.rules import RULES

from data_utils.common.errors import ConfigError
from data_utils.common.settings import range_text
from megatron_lite.config import deepspeed_options as deepspeed_module
from megatron_lite.config import experts as experts_module
from megatron_lite.config import finetuning as finetuning_module
from megatron_lite.config import lora as lora_module
from megatron_lite.config import model as model_module
from megatron_lite.config import sections as sections_module
from megatron_lite.config import task_head as task_head_module
from megatron_lite.config import tree as config_module
from megatron_lite.config.tree import Config, load_config


@pytest.mark.parametrize("name", RULES)
def test_a_rule_names_the_value_the_rule_and_the_remedy(name):
    action, fragments = RULES[name]
    with pytest.raises(ConfigError) as error:
        action()
    message = str(error.value)
    for fragment in fragments:
        assert fragment in message
    assert "\n" not in message
    remedy = list(advised(message)) if isinstance(action, partial) else []
    try:
        _ = remedy and action(*remedy)
    except ConfigError as other:  # another rule's, for example of a layer that the remedy uncovers
        assert str(other) != message


def ranged_fields(cls: type) -> Iterator[tuple[type, dataclasses.Field]]:
    """Every setting with a range below `cls`, in items of lists as well, with its section."""
    hints = get_type_hints(cls)
    for hint, field in ((hints[field.name], field) for field in dataclasses.fields(cls)):
        if range_text(field):
            yield cls, field
        for nested in (hint, *get_args(hint)):
            if dataclasses.is_dataclass(nested):
                yield from ranged_fields(nested)


RANGED = list(ranged_fields(Config))


@pytest.mark.parametrize(
    ("section", "field"), RANGED, ids=[f"{section.__name__}.{field.name}" for section, field in RANGED]
)
def test_every_range_is_checked_in_a_section_made_in_code(section, field):
    required = [f for f in dataclasses.fields(section) if f.default is f.default_factory]
    needed = {f.name: (f.metadata["one_of"] or (1,))[0] for f in required}
    allowed, ends = field.metadata["one_of"], field.metadata["ends"]
    steps = {
        "at_least": -1,
        "above": 0,
        "at_most": 1,
        "below": 0,
    }  # from an end of the range to the next value outside
    bad = 99 if allowed and isinstance(allowed[0], int) else "none such"
    for name, value in ends.items():
        bad = value + steps[name]
    with pytest.raises(ConfigError, match=rf"\.{field.name} is .*; it must be "):
        section(**{**needed, field.name: bad})


def rule_lines(module: Any) -> dict[int, str]:
    """First line -> source of every statement of `module` that can refuse a configuration."""
    source = Path(module.__file__).read_text(encoding="utf-8")
    refusals = {}
    for node in ast.walk(ast.parse(source)):
        is_check = isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("check", "choice")
        if is_check or isinstance(node, ast.Raise):
            refusals[node.lineno] = ast.get_source_segment(source, node) or ""
    return refusals


def test_no_rule_lacks_a_test(tmp_path, monkeypatch):
    fired = set()

    def made(error, *arguments):
        # Where it is raised: pydantic passes a section's errors on without their frames.
        fired.update((frame.filename, frame.lineno) for frame in traceback.extract_stack())
        Exception.__init__(error, *arguments)

    monkeypatch.setattr(ConfigError, "__init__", made)
    for action in [action for action, _ in RULES.values()] + [
        lambda case=case: case(tmp_path) for case in BAD_FILES
    ]:
        try:
            action()
        except ConfigError as error:
            frames = traceback.extract_tb(error.__traceback__)
            fired |= {(frame.filename, frame.lineno) for frame in frames}
    sections = model_module, sections_module, deepspeed_module, experts_module
    for module in (config_module, finetuning_module, lora_module, task_head_module, *sections):
        for line, source in rule_lines(module).items():
            assert (module.__file__, line) in fired, f"no test fires line {line}: {source}"


BAD_FILES = [
    lambda tmp: with_json(tmp, "{"),
    lambda tmp: with_json(tmp, "[]"),
    lambda tmp: load_config([ROOT / "configs/glm-base.yaml"], [], tmp / "absent.json"),
    lambda tmp: as_configuration(tmp),
    lambda tmp: load_config([tmp / "config.toml"]),
    lambda tmp: load_config([flat(tmp)]),
    lambda tmp: load_config([ROOT / "configs/glm-base.yaml"], ["objective_starts={blank_infilling: 5}"]),
    lambda tmp: load_config([ROOT / "configs/glm-base.yaml"], ["model.task_mix=true"]),
]


def flat(directory):
    """A file without sections."""
    (directory / "flat.yaml").write_text("model_name: a\nout_dir: b\ntokenizer_dir: c\noptimizer: {lr: 1}\n")
    return directory / "flat.yaml"


def as_configuration(directory):
    """A DeepSpeed file, some of whose sections have names that are sections here too."""
    path = directory / "ds.json"
    path.write_text(json.dumps({"zero_optimization": {"stage": 2}, "optimizer": {"type": "AdamW"}}))
    load_config([path])


@pytest.mark.parametrize(
    ("case", "message"),
    zip(
        BAD_FILES,
        ["not valid JSON", "not list", "check the path", "pass it as --deepspeed_config",
         "config.toml is not YAML; docs/coming_from.md", "3 keys that are no sections",
         "sets objective_starts to .* which this version lacks: write phases",
         "model.task_mix; it is now model.task_head.mix"],
        strict=True,
    ),
)  # fmt: skip
def test_a_bad_deepspeed_file_is_named(tmp_path, case, message):
    with pytest.raises(ConfigError, match=message):
        case(tmp_path)
