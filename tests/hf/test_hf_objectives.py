"""What a run was trained on goes along with its weights, and decides what its export and scripts/generate.py do."""

import json
from dataclasses import replace

import pytest
import torch
import yaml
from support.commands import forked
from support.hf.hf_runs import make_config, tree, write_run
from transformers import pipeline

from data_utils.common.errors import CheckpointError
from data_utils.common.settings import build, merge
from megatron_lite.config.tree import Config
from megatron_lite.hf.export import ExportOptions, export_run
from megatron_lite.hf.glm.modeling_glm import GLMForBlankInfilling
from megatron_lite.hf.importing import import_directory
from megatron_lite.inference.open_run import open_run

# Each section's own settings changed, so that a default in their place is noticed.
RUNS = {
    "masked_lm": {
        "objectives": {"masked_lm": 1.0},
        "masked_lm": {"masked_ratio": 0.25, "static_copies": 3},
        "data": {"sequence_length": 58},
    },
    "causal": {"objectives": {"causal": 1.0}, "data": {"sequence_length": 58}},
    "mixture": {
        "objectives": {"blank_infilling": 2.0, "t5": 1.0, "prefix_lm": 1.0},
        "phases": [{"steps": 1, "objectives": {"blank_infilling": 2.0, "t5": 1.0}}, {}],
        "blank_infilling": {"token_prob": 0.7, "sentence_prob": 0.3},
        "t5": {"noise_ratio": 0.3, "sentinel_first": 30, "sentinel_count": 9},
        "data": {"sequence_length": 56},
    },
    "masked in place": {"blank_infilling": {"masked_lm": True}, "data": {"sequence_length": 58}},
}


@pytest.fixture(scope="module")
def made(vocabulary, tmp_path_factory):
    """Name -> a directory with run/ and export/."""
    root = tmp_path_factory.mktemp("objectives")
    for name, change in RUNS.items():
        write_run(root / name / "run", merge(tree(vocabulary), change))
        export_run(root / name / "run", root / name / "export", ExportOptions(verify=False))
    return root


def generate(run, text):
    return forked("scripts/generate.py", "--checkpoint", run, "--text", text, "--max-length", "4")


@pytest.mark.parametrize("name", RUNS)
def test_a_run_is_the_same_after_export_and_import(vocabulary, made, tmp_path, name):
    before = make_config(merge(tree(vocabulary), RUNS[name]))
    import_directory(made / name / "export", tmp_path / "run", {}, verify=False)
    after = build(Config, yaml.safe_load((tmp_path / "run/config.yaml").read_text()))
    assert after.objective_choices == before.objective_choices
    for section in ("objectives", "objective_sections"):
        assert getattr(after, section) == getattr(before, section)
    assert open_run(tmp_path / "run").config.objective_choices == before.objective_choices


CARDS = {
    "masked_lm": ("masked_lm 1 (masked_ratio 0.25, static_copies 3)", "It was not trained to fill blanks"),
    "causal": ("| objectives | causal 1 |", "# Transformer, "),
    "mixture": (
        "blank_infilling 2 (token 0.7, sentence 0.3, document 0); t5 1 (",
        "It fills the blanks `[MASK]` (a phrase), `[sMASK]` (sentences). It has",
    ),
    "masked in place": ("(token 1, sentence 0, document 0, masked_lm True)", "It was not trained to fill"),
}


@pytest.mark.parametrize("name", CARDS)
def test_the_card_describes_what_was_trained(made, name):
    card = (made / name / "export/README.md").read_text()
    for part in CARDS[name]:
        assert part in card
    fills = name == "mixture"
    assert ('pipeline("blank-infilling"' in card) == fills == ("- blank-infilling" in card)
    assert "prefix_lm" not in card  # its turn would have come later


def test_the_card_counts_the_exported_parameters(made):
    config = json.loads((made / "causal/export/config.json").read_text())
    with torch.device("meta"):
        model = GLMForBlankInfilling(GLMForBlankInfilling.config_class(**config))
    exported = sum(parameter.numel() for parameter in set(model.glm.parameters()))
    assert f"# Transformer, {exported:,} parameters" in (made / "causal/export/README.md").read_text()


@pytest.mark.parametrize(
    "name, trained",
    [
        ("masked_lm", "trained on masked_lm"),
        ("causal", "trained on causal"),
        ("masked in place", "trained on blank_infilling.masked_lm"),
    ],
)
def test_blanks_are_refused_by_a_model_of_another_objective(made, name, trained):
    done = generate(made / name / "run", "word1 [MASK] word2")
    assert done.returncode == 2 and done.stdout == "" and done.stderr.count("\n") == 1
    assert trained in done.stderr and "does not train filling blanks" in done.stderr
    with pytest.raises(ValueError, match=f"{trained}, which does not teach to fill blanks"):
        pipeline("blank-infilling", model=str(made / name / "export"), trust_remote_code=True)
    model = GLMForBlankInfilling.from_pretrained(made / name / "export")
    ids = torch.tensor([[1, 4, 2]])
    inputs = {"input_ids": ids, "position_ids": ids * 0, "block_position_ids": ids * 0}
    with pytest.raises(ValueError, match=trained):
        model.generate(**inputs, max_new_tokens=2)
    model.config.trained_objectives.append("blank_infilling")  # as after training on it
    assert model.generate(**inputs, max_new_tokens=2).shape[1] > 3


def test_a_blank_that_was_not_trained_is_named(made):
    good = generate(made / "mixture/run", "word1 [MASK] word2 [sMASK]")
    assert good.returncode == 0 and good.stderr == ""
    odd = generate(made / "mixture/run", "word1 [gMASK]")
    assert odd.returncode == 0 and odd.stderr.count("\n") == 1
    assert "trained on [MASK], [sMASK], not on [gMASK]" in odd.stderr


def test_an_objective_counts_from_its_first_phase(made):
    found = open_run(made / "mixture/run")
    assert [choice.name for choice in found.objectives] == ["blank_infilling", "t5"]
    later = replace(found, checkpoint=replace(found.checkpoint, step=2))
    assert [choice.name for choice in later.objectives] == ["blank_infilling", "t5", "prefix_lm"]


def test_the_released_layout_is_for_models_that_fill_blanks(made, tmp_path):
    with pytest.raises(CheckpointError, match="trained on causal, but the released layout"):
        export_run(made / "causal/run", tmp_path / "export", ExportOptions(layout="released"))
    export_run(made / "mixture/run", tmp_path / "mixture", ExportOptions(layout="released"))
    assert [path.name for path in tmp_path.iterdir()] == ["mixture"]
