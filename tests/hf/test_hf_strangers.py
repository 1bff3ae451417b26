"""A downloaded training.json decides what is learnt. It decides nothing of how and where the new run works."""

import dataclasses
import json
import logging
import shutil

import pytest
from support.data.tokenizer_files import byte_bpe_json
from support.systems.optimus_runs import write_run as write_optimus

from data_utils.common.errors import CheckpointError
from data_utils.common.settings import build, keys_of, section_in, setting_names, to_tree
from data_utils.objectives.ul2 import DenoiserConfig
from data_utils.tokenizers.tokenizer import TokenizerConfig, load_tokenizer
from megatron_lite.config.tree import Config
from megatron_lite.hf.common.recipe import portable_recipe, read_recipe, tokenizer_options
from megatron_lite.hf.export import ExportOptions, export_run
from megatron_lite.hf.importing import import_directory

CANARY = "/a/path/of/a/stranger"
# What a stranger may decide, as a user would expect it. Sections of which he decides all, by name:
RECIPES = ("model", "decoder", "batch", "schedule", "objectives")
# ... and settings of others. The objectives' sections are his but for their paths.
SETTINGS = {
    "training": "steps seed precision loss_normalization loss_weights label_smoothing",
    "optimizer": "kind lr beta1 beta2 eps weight_decay clip_grad_norm",
    "data": "sequence_length row_length",
    "task": "name kind reader labels text_fields label_field form pattern template verbalizers scoring length_power "
    "loss mask sequence_length target_length question_length answer_length stride masked_ratio "
    "target_mask_prob blank_ratio metrics",
}
PATHS = {"optimus.encoder_from", "optimus.decoder_from", "entities.vectors"}
# A plan of steps is the run's own, as phases are.
PLANS = {"schedule.parts", *(f"batch.ramp.{key}" for key in ("start", "by", "samples"))}
# A model with muP is not exported.
PLANS |= {f"{stack}.mup.base_{size}_size" for stack in ("model", "decoder") for size in ("hidden", "head")}
# Nor one with heads of several tasks; heads of classes belong to the objectives that an import names.
PLANS |= {
    f"{stack}.{heads}" for stack in ("model", "decoder") for heads in ("task_head.heads", "class_heads")
}
FREE_TEXT = {f"task.{key}" for key in ["name", "labels", "text_fields", "label_field", "template", "metrics"]}


def may_decide(name):
    section, _, key = name.partition(".")
    if name in PLANS:
        return False
    if section in SETTINGS:
        return key in SETTINGS[section].split()
    objectives = keys_of(Config).keys() - {f.name for f in dataclasses.fields(Config)}
    if name == "entities.layer_types":  # no class of transformers has them
        return False
    if ".lora." in name:  # an export has the updates merged
        return False
    if ".experts." in name:  # of published systems alone, whose config.json has them
        return False
    return section in RECIPES or (section in objectives and name not in PATHS)


def edited(directory, change):
    path = directory / "training.json"
    described = json.loads(path.read_text())
    change(described)
    path.write_text(json.dumps(described))
    return directory


@pytest.fixture(scope="module")
def directory(exports, tmp_path_factory):
    """The files of an export that say what it is."""
    found = tmp_path_factory.mktemp("stranger")
    shutil.copyfile(exports / "huggingface/training.json", found / "training.json")
    return found


@pytest.mark.parametrize("name", list(setting_names(Config)))
def test_every_setting_is_taken_left_out_by_name_or_refused_by_name(directory, tmp_path, caplog, name):
    """A canary in place of the value: of settings that are taken, its type or range is refused."""
    copy = shutil.copytree(directory, tmp_path / "copy")
    section, *rest = name.split(".")

    def plant(described):
        tree = described["tokenizer"] if section == "tokenizer" else described["config"]
        if section == "decoder_tokenizer":
            tree = described["decoder_tokenizer"] = dict(described["tokenizer"])
        keys = rest if section.endswith("tokenizer") else [section, *rest]
        for key in keys[:-1]:
            if tree.get(key) is None:
                tree[key] = {"name": "x", "kind": "cloze", "reader": "jsonl"} if key == "task" else {}
            tree = tree[key]
        tree[keys[-1]] = CANARY

    edited(copy, plant)
    caplog.set_level(logging.WARNING)
    try:
        found = read_recipe(copy)
    except CheckpointError as error:
        message = str(error)
        assert "\n" not in message and "training.json" in message
        parents = [
            f"config.{'.'.join([section, *rest[:n]])} is no part of an export" for n in range(len(rest))
        ]
        assert (rest or [section])[-1] in message or any(parent in message for parent in parents)
        is_taken = "is no part of an export" not in message
    else:
        is_taken = CANARY in json.dumps([found.config, found.tokenizers])
    if section in ("tokenizer", "decoder_tokenizer"):
        assert is_taken == (rest != ["path"])
    else:
        assert is_taken == may_decide(name)


def test_names_of_special_tokens_go_with_an_export(directory, tmp_path):
    (tmp_path / "tokenizer.json").write_text(json.dumps(byte_bpe_json(["<finis>"])))
    config = TokenizerConfig(kind="hf_json", path=str(tmp_path), roles={"eos": "<finis>"})
    options = tokenizer_options(load_tokenizer(config))
    assert options["roles"] == config.roles
    assert "roles" not in tokenizer_options(load_tokenizer(dataclasses.replace(config, roles={})))
    copy = edited(shutil.copytree(directory, tmp_path / "copy"), lambda tree: tree.update(tokenizer=options))
    again = build(
        TokenizerConfig, {**read_recipe(copy).tokenizers["tokenizer"], "path": str(tmp_path)}, "tokenizer."
    )
    assert load_tokenizer(again).fingerprint == options["fingerprint"]


def test_free_text_is_taken_of_a_task_only(directory):
    """Text can be a path or an address. A new setting of text is no part of a recipe unless this list has it."""
    free = set()
    for name in setting_names(Config):
        cls, keys = Config, name.split(".")
        for key in keys[:-1]:
            cls = section_in(keys_of(cls)[key][0])
        hint, field = keys_of(cls)[keys[-1]]
        if "str" in str(hint) and "dict" not in str(hint) and not field.metadata.get("one_of"):
            free.add(name)
    assert {name for name in free if may_decide(name)} == FREE_TEXT


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"trackers": {"mlflow": {"uri": CANARY}}}, "config.trackers is no part of an export"),
        ({"data": {"local_directory": CANARY}}, "config.data.local_directory is no part"),
        ({"checkpoint": {"initialize_from": CANARY}}, "config.checkpoint is no part"),
        ({"training": {"stepz": 3}}, "config.training.stepz is no part"),
        ({"training": {"tf32": True}}, "config.training.tf32 is no part"),
        ({"optimizer": {"kernel": "apex"}}, "config.optimizer.kernel is no part"),
        ({"optimus": {"encoder_from": CANARY}}, "config.optimus.encoder_from is no part"),
        ({"model": {"num_layers": "2"}}, "model.num_layers is '2'; it must be a valid integer"),
        ({"objectives": {"masked_lm": True}}, "config.objectives says masked_lm"),
        ({"batch": [1]}, "config.batch says in all"),
        (
            {"model": {"num_attention_heads": 2}},
            "num_attention_heads is 4 in config.json and 2 in training.json",
        ),
        ({"model": {"adapter_size": 10**12}}, "sets model.adapter_size to 1000000000000, but these weights"),
    ],
)
def test_the_rest_is_refused_in_one_line(exports, tmp_path, section, message):
    copy = shutil.copytree(exports / "huggingface", tmp_path / "copy")
    (name,) = section

    def plant(described):
        former = described["config"].get(name)
        both = isinstance(former, dict) and isinstance(section[name], dict)
        described["config"][name] = {**former, **section[name]} if both else section[name]

    edited(copy, plant)
    with pytest.raises(CheckpointError) as raised:
        import_directory(copy, tmp_path / "run", {}, verify=False)
    assert message in str(raised.value) and "\n" not in str(raised.value)
    assert not (tmp_path / "run").exists()


def test_an_export_writes_what_an_import_takes(exports, caplog):
    """So nothing is left out of an honest export, and a user's own settings go over it."""
    recorded = read_recipe(exports / "huggingface")
    written = json.loads((exports / "huggingface/training.json").read_text())["config"]
    assert recorded.config == {name: section for name, section in written.items() if section is not None}
    assert not caplog.records
    assert to_tree(build(Config, {**recorded.config}))["training"]["steps"] == 6


def test_a_list_of_sections_is_a_recipes_where_it_has_no_text(directory, tmp_path):
    """UL2's denoisers: written, taken as they were, and each checked as a section is; parts of a schedule stay."""
    denoisers = [to_tree(DenoiserConfig(mode="extreme", noise_ratio=0.5)), to_tree(DenoiserConfig(share=2.0))]
    ul2 = {"ul2": {"denoisers": denoisers}, "objectives": {"ul2": 1}}
    config = build(Config, {**read_recipe(directory).config, **ul2})
    recipe = portable_recipe(config)
    copy = shutil.copytree(directory, tmp_path / "copy")
    edited(copy, lambda described: described["config"].update({name: recipe[name] for name in ul2}))
    taken = read_recipe(copy).config
    assert (
        to_tree(build(Config, taken))["ul2"]["denoisers"] == denoisers and "parts" not in recipe["schedule"]
    )
    for change, message in (
        ({"path": CANARY}, "path"),
        ({"noise_ratio": 2}, "noise_ratio"),
        ({"mode": CANARY}, "mode"),
    ):
        strange = {**recipe["ul2"], "denoisers": [{**recipe["ul2"]["denoisers"][0], **change}]}
        edited(copy, lambda described, strange=strange: described["config"].update(ul2=strange))
        with pytest.raises(CheckpointError, match=rf"training\.json: .*ul2\.denoisers.*{message}"):
            read_recipe(copy)


def test_stacks_of_a_stranger_are_held_to_the_same(tmp_path):
    run, _ = write_optimus(tmp_path)
    export_run(run, tmp_path / "export", ExportOptions(verify=False))
    copy = shutil.copytree(tmp_path / "export", tmp_path / "copy")
    edited(copy, lambda described: described["config"].update(run={"directory": CANARY}))
    with pytest.raises(CheckpointError, match=r"config\.run is no part of an export"):
        import_directory(copy, tmp_path / "again", {}, verify=False)
    copy = shutil.copytree(tmp_path / "export", tmp_path / "other")
    edited(copy, lambda described: described["config"]["optimus"].update(encoder_from=CANARY))
    with pytest.raises(CheckpointError, match=r"config\.optimus\.encoder_from is no part of an export"):
        import_directory(copy, tmp_path / "again", {}, verify=False)
