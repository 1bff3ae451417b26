"""Heads of tasks between our runs and the classes of transformers that have them."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.hf.hf_runs import tree, write_run, write_vocabulary
from support.hf.published import random_model
from support.hf.published_files import write_tokenizer

from data_utils.common.errors import CheckpointError, ConfigError
from data_utils.common.settings import build, merge
from megatron_lite.config.model import ModelConfig
from megatron_lite.hf.common.verify import compare
from megatron_lite.hf.common.weights import TRAINING_JSON
from megatron_lite.hf.export import ExportOptions, export_run
from megatron_lite.hf.importing import import_directory
from megatron_lite.hf.published.heads import OTHER_HEADS, TASK_CLASSES
from megatron_lite.hf.published.verify import class_checks
from megatron_lite.hf.published.write_config import hf_config
from megatron_lite.inference.open_run import load_run

KINDS = ("text", "tags", "spans")
CLASSES = [(case, kind) for case, kinds in TASK_CLASSES.items() for kind in kinds]
USUAL = ("bert", "modernbert")
OF_BYTES = ("eurobert", "modernbert")  # their tokenizers; the others have words
LABELS = {"num_labels": 3, "id2label": {0: "bad", 1: "fair", 2: "good"}}
TREE = {
    "training": {"steps": 6, "precision": "fp32", "seed": 7},
    "data": {"sequence_length": 60},
    "objectives": {"masked_lm": 1},
}


def their_model(directory, case, kind, **changes):
    """A directory of the class, as its users publish it."""
    directory.mkdir()
    size = write_tokenizer(case if case in OF_BYTES else "bert", directory)
    name = TASK_CLASSES[case][kind].name
    if kind != "spans":
        changes = {**LABELS, **changes}
    if case in (
        "roberta",
        "xlm-roberta",
        "camembert",
    ):  # which counts positions from its padding, here the first line of the vocabulary
        changes = {"pad_token_id": 0, **changes}
    sizes = {"electra": "electra_generator", "deberta-v2": "deberta_v3"}.get(case, case.replace("-", "_"))
    model = random_model(sizes, class_name=name, vocab_size=size, **changes)
    model.save_pretrained(directory)
    return model


def brought(directory, case, output, **options):
    """The import of a directory."""
    objective = {"albert": "albert", "xlnet": "xlnet"}.get(case, "masked_lm")
    labels = {"masked_lm": "next_sentence", "albert": "sentence_order"}
    section = {labels[objective]: False} if objective in labels else {}
    kind = "hf_json" if case in OF_BYTES else "bert_wordpiece"
    tree = merge(TREE, {"tokenizer": {"kind": kind}, objective: section})
    tree["objectives"] = {objective: 1}
    return import_directory(directory, output, tree, **options)


@pytest.mark.parametrize(
    ("case", "kind"),
    [pytest.param(case, kind, marks=[] if case in USUAL else pytest.mark.slow) for case, kind in CLASSES],
)
def test_a_published_head_comes_back(tmp_path, case, kind, caplog):
    """Both ways compare logits; every tensor is bit-equal, the labels are the same."""
    their_model(tmp_path / "theirs", case, kind)
    proof = brought(tmp_path / "theirs", case, tmp_path / "run")
    assert proof is not None and proof.agreement == 1.0
    initialized = case != "deberta-v2"  # where what predicts tokens may not be left out
    assert caplog.text.count("they are initialized") == initialized
    proof = export_run(tmp_path / "run", tmp_path / "ours", ExportOptions())
    assert proof is not None and proof.agreement == 1.0
    before, after = (load_file(tmp_path / path / "model.safetensors") for path in ("theirs", "ours"))
    assert before.keys() == after.keys()
    assert [name for name in before if not torch.equal(before[name], after[name])] == []
    described = json.loads((tmp_path / "ours/config.json").read_text())
    assert described["architectures"] == [TASK_CLASSES[case][kind].name]
    if kind != "spans":
        assert described["id2label"] == {"0": "bad", "1": "fair", "2": "good"}
        assert load_run(tmp_path / "run").config.task.labels == ("bad", "fair", "good")


@pytest.mark.parametrize("kind", KINDS)
def test_what_the_class_does_not_have_is_beside_it(tmp_path, kind, caplog):
    """The export of a run becomes the same run again: the other heads come from a file of their own."""
    their_model(tmp_path / "theirs", "bert", kind)
    brought(tmp_path / "theirs", "bert", tmp_path / "run", verify=False)
    export_run(tmp_path / "run", tmp_path / "ours", ExportOptions(verify=False))
    caplog.clear()
    brought(tmp_path / "ours", "bert", tmp_path / "again")
    assert "they are initialized" not in caplog.text
    first, again = (load_run(tmp_path / name).model.state_dict() for name in ("run", "again"))
    assert first.keys() == again.keys() and all(torch.equal(first[name], again[name]) for name in first)
    assert f"`{OTHER_HEADS}` holds the weights" in (tmp_path / "ours/README.md").read_text()


@pytest.mark.parametrize("case", ["deberta_v3", "deberta_v3, odd", "deberta_v3, another"])
def test_a_body_without_a_head_is_an_encoder(tmp_path, case):
    """It predicts through its words, is compared by hidden states, and comes back with the names of its class."""
    (tmp_path / "theirs").mkdir()
    model = random_model(
        case, class_name="DebertaV2Model", vocab_size=write_tokenizer("bert", tmp_path / "theirs")
    )
    model.save_pretrained(tmp_path / "theirs")
    assert brought(tmp_path / "theirs", "bert", tmp_path / "run").agreement == 1.0
    run = load_run(tmp_path / "run")
    config = run.config.model
    assert not config.head_transform and not config.head_bias
    assert export_run(tmp_path / "run", tmp_path / "ours", ExportOptions()).agreement == 1.0
    before, after = (load_file(tmp_path / path / "model.safetensors") for path in ("theirs", "ours"))
    assert before.keys() == after.keys()
    assert [name for name in before if not torch.equal(before[name], after[name])] == []
    described = [json.loads((tmp_path / path / "config.json").read_text()) for path in ("theirs", "ours")]
    assert described[1].pop("torch_dtype") == described[0]["dtype"] and described[0] == described[1]
    before["encoder.layer.1.output.dense.bias"][0] += 1.0
    save_file(before, tmp_path / "ours/model.safetensors", {"format": "pt"})
    (states,) = class_checks(tmp_path / "ours", "DebertaV2Model", config, torch.float32)
    with torch.no_grad():
        found = compare(states.compute(run.model), states.expected)
    assert states.name == "hidden states" and found.largest_difference > 0.1


def test_a_number_is_a_head_of_one_output(tmp_path):
    their_model(tmp_path / "theirs", "roberta", "text", num_labels=1, id2label={0: "score"})
    assert brought(tmp_path / "theirs", "roberta", tmp_path / "run").agreement == 1.0
    assert load_run(tmp_path / "run").config.model.task_head.type == "values"
    export_run(tmp_path / "run", tmp_path / "ours", ExportOptions())


def test_a_wrong_head_is_noticed(tmp_path):
    """The comparison reads the head: one wrong weight of it is enough."""
    their_model(tmp_path / "theirs", "bert", "text")
    brought(tmp_path / "theirs", "bert", tmp_path / "run", verify=False)
    path = tmp_path / "theirs/model.safetensors"
    tensors = load_file(path)
    tensors["classifier.bias"][1] += 0.01
    save_file(tensors, path, {"format": "pt"})
    model = load_run(tmp_path / "run").model
    (head,) = class_checks(tmp_path / "theirs", "BertForSequenceClassification", model.config, torch.float32)
    with torch.no_grad():
        found = compare(head.compute(model), head.expected)
    assert head.name == "head" and found.largest_difference == pytest.approx(0.01, rel=1e-3)


def test_heads_that_differ_are_refused_by_name(tmp_path):
    cases = [
        ("xlnet", "text", {"summary_type": "mean"}, "summary_type is 'mean'; only 'last' can be imported"),
        ("modernbert", "text", {"classifier_pooling": "mean"}, "classifier_pooling is 'mean'; only 'cls'"),
        (
            "deberta-v2",
            "text",
            {"pooler_hidden_act": "relu"},
            "pooler_hidden_act is 'relu'; only 'gelu' can be",
        ),
    ]
    for number, (case, kind, changes, message) in enumerate(cases):
        their_model(tmp_path / f"{number}", case, kind, **changes)
        with pytest.raises(CheckpointError, match=message):
            brought(tmp_path / f"{number}", case, tmp_path / "run")
    their_model(tmp_path / "choices", "bert", "text")
    path = tmp_path / "choices/config.json"
    described = json.loads(path.read_text())
    path.write_text(json.dumps({**described, "architectures": ["BertForMultipleChoice"]}))
    with pytest.raises(
        CheckpointError, match="names 'BertForMultipleChoice', which has a head of its own; only "
    ):
        brought(tmp_path / "choices", "bert", tmp_path / "run")


def test_heads_of_no_class_are_not_exported():
    head = {
        "task_head": {"type": "classes", "classes": 3},
        "num_layers": 1,
        "hidden_size": 8,
        "num_attention_heads": 2,
    }
    cases = {
        "whose head no class of transformers for gpt2 has; export the checkpoint before": {"system": "gpt2"},
        "whose head no class of transformers for glm has": {"system": "glm4"},
        "RobertaForSequenceClassification has one; tune with model.task_head.pooler=true": {"system": "roberta"},
        "ModernBertForSequenceClassification has one; tune with": {"system": "modernbert"},
        "model.task_head.pooler_kind is 'tanh', which ModernBertForSequenceClassification": {
            "system": "modernbert", "task_head": {"pooler": True, "pooler_kind": "tanh"},
        },
        "model.task_head.mix is True, which BertForSequenceClassification does not have": {
            "system": "bert", "sentence_classes": 2, "task_head": {"mix": True},
        },
    }  # fmt: skip
    for message, options in cases.items():
        with pytest.raises(CheckpointError, match=message):
            hf_config(build(ModelConfig, merge({"vocab_size": 97, **head}, options)), {})


def test_an_export_of_ernie_2_records_no_objectives_and_its_heads_come_with_those_that_are_given(tmp_path):
    """No recipe names the tasks, since GLM's own classes have no such heads: an import names objectives and heads."""
    heads = ["token_document:2", "relevance:3"]
    model = {"system": "ernie2", "segments": 4, "max_position": 80, "class_heads": heads}
    tasks = {"objectives": {"token_document": 1}, "tokenizer": {"added_tokens": "none"}}
    given = merge(tree(write_vocabulary(tmp_path), **model), tasks)
    write_run(tmp_path / "run", given)
    export_run(tmp_path / "run", tmp_path / "out", ExportOptions())
    assert not (tmp_path / "out" / TRAINING_JSON).exists()
    least = {"training": {"steps": 4}, "data": {"sequence_length": 60}}
    import_directory(tmp_path / "out", tmp_path / "plain", merge(least, {"objectives": {"ernie": 1}}))
    assert not load_run(tmp_path / "plain").config.model.class_heads
    with_task = merge(least, {"objectives": {"token_document": 1}})
    with pytest.raises(ConfigError, match=r"class_heads is \[\]"):
        import_directory(tmp_path / "out", tmp_path / "refused", with_task)
    assert not (tmp_path / "refused").exists()
    import_directory(
        tmp_path / "out", tmp_path / "again", merge(with_task, {"model": {"class_heads": heads}})
    )
    before, after = (load_run(tmp_path / name).model.state_dict() for name in ("run", "again"))
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    ours = merge(given, {"model": {"system": None, "segments": 2, "sentence_classes": 2}})
    write_run(tmp_path / "ours", ours)
    with pytest.raises(
        CheckpointError, match="of a model with options that GLM's Hugging Face classes do not have"
    ):
        export_run(tmp_path / "ours", tmp_path / "glm", ExportOptions())
