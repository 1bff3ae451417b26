"""The JSON Schema of settings, read by a validator of others: what it takes is what the program takes."""

from __future__ import annotations

import json

import jsonschema
import pytest
import yaml
from support.commands import forked
from support.project import ROOT

from data_utils.common.errors import ConfigError
from data_utils.common.setting_files import load_yaml
from megatron_lite.config.tree import load_config

SCHEMA = json.loads((ROOT / "configs/settings.schema.json").read_text(encoding="utf-8"))
VALIDATOR = jsonschema.Draft202012Validator(SCHEMA)
CONFIGS = [file for file in ROOT.glob("configs/**/*.yaml") if file.parent.name != "cleaning"]


def mistakes(tree):
    return {".".join(map(str, error.absolute_path)) for error in VALIDATOR.iter_errors(tree)}


def test_the_command_prints_the_shipped_schema():
    printed = forked("pretrain_glm.py", "--schema")
    assert printed.returncode == 0 and json.loads(printed.stdout) == SCHEMA
    jsonschema.Draft202012Validator.check_schema(SCHEMA)


@pytest.mark.parametrize("file", CONFIGS, ids=lambda file: str(file.relative_to(ROOT / "configs")))
def test_every_configuration_of_ours_is_valid(file):
    assert not mistakes(load_yaml(file))


WRONG = {
    "optimizer.beta2": {"optimizer": {"beta2": 1.0}},  # below 1
    "optimizer.kind": {"optimizer": {"kind": "sgd"}},
    "training.steps": {"training": {"steps": "many"}},
    "training.seed": {"training": {"seed": -1}},
    "model.num_layers": {"model": {"num_layers": 2.5}},
    "model.tie_word_embeddings": {"model": {"tie_word_embeddings": "perhaps"}},
    "data.train": {"data": {"train": "corpus"}},
    "data.train.0": {"data": {"train": [{"weight": 2}]}},  # without its prefix
    "blank_infilling.token_prob": {"blank_infilling": {"token_prob": 2}},
    "phases.0": {"phases": [{"stepps": 3}]},
    "training": {"training": {"step": 3}},
    "": {"trainng": {}},
}


@pytest.mark.parametrize("place", WRONG)
def test_both_refuse_what_cannot_be(tmp_path, place):
    assert mistakes(WRONG[place]) == {place}
    (tmp_path / "wrong.yaml").write_text(yaml.safe_dump(WRONG[place]))
    with pytest.raises(ConfigError, match=r"wrong\.yaml:\d+: "):
        load_config([ROOT / "configs/tiny.yaml", tmp_path / "wrong.yaml"])
