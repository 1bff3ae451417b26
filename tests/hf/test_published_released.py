"""Directories with the tensors and fields of released files come in, and what their class ignores is named."""

import json
import logging

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.hf.published import random_model
from support.hf.published_files import OBJECTIVE, TREE, edit, tensors_once, write_tokenizer
from support.hf.released_facts import RELEASED, write_released
from support.selection import slow_but

from data_utils.common.errors import CheckpointError, ConfigError
from megatron_lite.hf.export import ExportOptions, export_run
from megatron_lite.hf.importing import import_directory
from megatron_lite.hf.published.systems import PUBLISHED
from megatron_lite.inference.open_run import open_run

CAUSAL = {"objectives": {"causal": 1}}
WITHOUT_LABELS = {  # of sentences, for which the files have no head
    "bert": {"objectives": {"masked_lm": 1}, "masked_lm": {"next_sentence": False}},
    "albert": {"objectives": {"albert": 1}, "albert": {"sentence_order": False}},
    "electra_generator": {"objectives": {"masked_lm": 1}},
    "ernie": {"objectives": {"masked_lm": 1}},
    "gpt": CAUSAL,
}


def tree_of(case):
    key = case.partition(",")[0]
    return TREE | (WITHOUT_LABELS | {k: v for k, v in OBJECTIVE.items() if k not in WITHOUT_LABELS})[key]


@pytest.mark.parametrize("name", slow_but([*RELEASED][::4], RELEASED))
def test_a_released_directory_comes_in_and_names_what_it_leaves_out(tmp_path, caplog, name):
    """Outputs of the class are compared; today's tensors are bit-equal in an export."""
    found = RELEASED[name]
    caplog.set_level(logging.WARNING)
    _, state = write_released(name, tmp_path / "theirs")
    proof = import_directory(tmp_path / "theirs", tmp_path / "run", tree_of(found.case))
    assert proof is not None and proof.agreement == 1.0
    lines = [record.getMessage() for record in caplog.records if "left out: " in record.getMessage()]
    assert all(any(module in line for line in lines) for module in found.named), lines
    assert bool(lines) == bool(found.named)
    export_run(tmp_path / "run", tmp_path / "ours", ExportOptions(verify=False))
    after = tensors_once(tmp_path / "ours")
    assert after.keys() == state.keys()
    assert [key for key in state if not torch.equal(state[key], after[key])] == []


def rewrite(directory, change):
    """Change the tensors of a directory."""
    path = directory / "model.safetensors"
    save_file(change(load_file(path)), path, {"format": "pt"})


def strip(directory, *names):
    """Take fields out of config.json."""
    path = directory / "config.json"
    described = json.loads(path.read_text())
    path.write_text(json.dumps({key: x for key, x in described.items() if key not in names}))


def write(case, directory, class_name=None, **changes):
    directory.mkdir()
    size = write_tokenizer(case.partition(",")[0], directory)
    # Hidden states have fewer sums than logits to hide rounding in: weights are nearer to real models'.
    model = random_model(case, 0.1, class_name, vocab_size=size, **changes)
    model.save_pretrained(directory)
    return model


def refused(directory, output, case):
    with pytest.raises((CheckpointError, ConfigError)) as error:
        import_directory(directory, output, tree_of(case))
    assert "\n" not in str(error.value) and not output.exists()
    return str(error.value)


BODIES = {  # the class without a head -> the case, and a parameter that is new in the run
    "BertModel": ("bert", "heads.projection.dense.weight"),
    "ErnieModel": ("ernie", "heads.bias"),
    "AlbertModel": ("albert", "heads.sentence.classifier.weight"),
    "RobertaModel": ("roberta", "heads.projection.layernorm.bias"),
    "XLMRobertaModel": ("xlm_roberta", "heads.bias"),
    "XLNetModel": ("xlnet", "heads.bias"),
    "ModernBertModel": ("modernbert", "heads.projection.dense.weight"),
    "ModernBertDecoderModel": ("modernbert_decoder", "heads.bias"),
    "EuroBertModel": ("eurobert", "heads.vocabulary.weight"),
    "LlamaModel": ("llama", "heads.vocabulary.weight"),
    "Qwen3Model": ("qwen3", "heads.vocabulary.weight"),
    "GlmModel": ("glm4", "heads.vocabulary.weight"),
    "GPT2Model": ("gpt2", None),
    "OpenAIGPTModel": ("gpt", None),
    "BartModel": ("bart", None),
    "T5Model": ("t5", None),
}


@pytest.mark.parametrize("class_name", slow_but([*BODIES][::3], BODIES))
def test_a_base_model_comes_in_with_new_heads(tmp_path, caplog, class_name):
    """Its hidden states are compared, each tensor that it shares with the class of the run goes back bit-equal."""
    case, new = BODIES[class_name]
    caplog.set_level(logging.WARNING)
    write(case, tmp_path / "theirs", class_name)
    tree = TREE | OBJECTIVE.get(case, CAUSAL if case == "gpt" else {"objectives": {"masked_lm": 1}})
    proof = import_directory(tmp_path / "theirs", tmp_path / "run", tree)
    assert proof is not None and proof.agreement == 1.0
    assert (new is None) == ("they are initialized" not in caplog.text)
    assert new is None or new in caplog.text
    export_run(tmp_path / "run", tmp_path / "ours", ExportOptions(verify=False))
    before, after = (load_file(tmp_path / path / "model.safetensors") for path in ("theirs", "ours"))
    whole = {key.removeprefix(PUBLISHED[model_type(tmp_path)].prefix): x for key, x in after.items()}
    dropped = {key for key in before if key not in whole}
    assert dropped == ({"pooler.dense.weight", "pooler.dense.bias"} if "Roberta" in class_name else set())
    assert [key for key in before if key in whole and not torch.equal(before[key], whole[key])] == []


def model_type(root):
    return json.loads((root / "theirs/config.json").read_text())["model_type"]


def test_a_base_model_without_a_pooler_comes_in(tmp_path):
    """As sentence encoders are saved. Nothing reads the layer, and the class makes a new one."""
    write("bert", tmp_path / "theirs", "BertModel")
    rewrite(tmp_path / "theirs", lambda state: {k: x for k, x in state.items() if "pooler" not in k})
    import_directory(tmp_path / "theirs", tmp_path / "run", tree_of("bert"))
    assert open_run(tmp_path / "run").config.model.sentence_classes == 0


def test_a_system_is_found_by_its_class_or_by_its_tensors(tmp_path):
    write("roberta", tmp_path / "theirs")
    strip(tmp_path / "theirs", "model_type")
    import_directory(tmp_path / "theirs", tmp_path / "run", tree_of("roberta"))
    strip(tmp_path / "theirs", "architectures")
    message = refused(tmp_path / "theirs", tmp_path / "other", "roberta")
    assert "fit roberta, xlm-roberta, camembert; add" in message
    write("gpt2", tmp_path / "gpt2")
    strip(tmp_path / "gpt2", "model_type", "architectures")
    import_directory(tmp_path / "gpt2", tmp_path / "gpt2 run", tree_of("gpt2"))
    rewrite(tmp_path / "gpt2", lambda state: state | {"something.else": torch.ones(3)})
    message = refused(tmp_path / "gpt2", tmp_path / "other", "gpt2")
    assert "has no model_type and names no class" in message and 'add "model_type" to it: bert' in message


@pytest.mark.parametrize(
    ("case", "class_name", "found"),
    [
        ("roberta", "RobertaForSequenceClassification", "classes"),
        ("roberta", "RobertaForTokenClassification", "tags"),
        ("bert", "BertForTokenClassification", "tags"),
        ("bert", "BertForQuestionAnswering", "spans"),
        ("electra_generator", "ElectraForSequenceClassification", "classes"),
    ],
)
def test_the_head_of_a_task_is_found_by_its_tensors(tmp_path, caplog, case, class_name, found):
    write(case, tmp_path / "theirs", class_name)
    strip(tmp_path / "theirs", "architectures")
    import_directory(tmp_path / "theirs", tmp_path / "run", tree_of(case))
    assert open_run(tmp_path / "run").config.model.task_head.type == found
    assert f"architectures is not given; the tensors fit {class_name}" in caplog.text


def test_a_head_that_can_be_of_two_tasks_is_asked_for(tmp_path):
    write("bert", tmp_path / "theirs", "BertForSequenceClassification")
    strip(tmp_path / "theirs", "architectures")
    message = refused(tmp_path / "theirs", tmp_path / "run", "bert")
    assert "fits BertForSequenceClassification or BertForTokenClassification; add" in message


@pytest.mark.parametrize(
    ("fields", "names"),
    [
        ({"num_labels": 5, "id2label": {"0": "no", "1": "yes"}}, ("no", "yes", "LABEL_2", "LABEL_3", "LABEL_4")),
        ({"id2label": {str(i): f"name{i}" for i in range(7)}}, tuple(f"name{i}" for i in range(5))),
        ({"num_labels": 2, "id2label": None}, tuple(f"LABEL_{i}" for i in range(5))),
        ({"id2label": {"0": "a", "4": "e"}}, ("a", "LABEL_1", "LABEL_2", "LABEL_3", "e")),
        ({"id2label": {str(i): f"name{i}" for i in range(5)}, "num_labels": 3}, tuple(f"name{i}" for i in range(5))),
    ],
)  # fmt: skip
def test_the_rows_of_a_head_decide_how_many_labels_there_are(tmp_path, caplog, fields, names):
    write("bert", tmp_path / "theirs", "BertForSequenceClassification", num_labels=5)
    strip(tmp_path / "theirs", "label2id", "id2label")
    edit(tmp_path / "theirs", **fields)
    import_directory(tmp_path / "theirs", tmp_path / "run", tree_of("bert"))
    config = open_run(tmp_path / "run").config
    assert config.model.task_head.classes == 5 and config.task.labels == names
    assert "labels, and the head has 5" in caplog.text
    assert export_run(tmp_path / "run", tmp_path / "ours", ExportOptions()).agreement == 1.0
    assert tuple(json.loads((tmp_path / "ours/config.json").read_text())["id2label"].values()) == names


def test_a_name_of_two_labels_is_refused_before_a_run_of_it_exists(tmp_path):
    write("bert", tmp_path / "theirs", "BertForSequenceClassification", num_labels=3)
    strip(tmp_path / "theirs", "label2id", "id2label")
    edit(tmp_path / "theirs", id2label={"0": "yes", "1": "yes", "2": "no"})
    message = refused(tmp_path / "theirs", tmp_path / "run", "bert")
    assert "config.json" in message and "'yes' to more than one of 3 labels" in message


def test_all_that_stands_against_an_import_is_reported_at_once(tmp_path):
    write("bert", tmp_path / "theirs")
    edit(tmp_path / "theirs", hidden_act="tanh", is_decoder=True, position_embedding_type="relative_key")
    rewrite(
        tmp_path / "theirs",
        lambda state: (
            state
            | {f"bert.encoder.layer.{i}.adapter.weight": torch.ones(3) for i in range(3)}
            | {"reward.weight": torch.ones(3)}
        ),
    )
    message = refused(tmp_path / "theirs", tmp_path / "run", "bert")
    for part in (
        "hidden_act is 'tanh'",
        "is_decoder is True",
        "position_embedding_type is 'relative_key'",
        "reward.weight",
    ):
        assert part in message
    edit(tmp_path / "theirs", hidden_act="gelu", is_decoder=False, position_embedding_type="absolute")
    rewrite(tmp_path / "theirs", lambda state: {k: x for k, x in state.items() if "layer.1.output" not in k})
    message = refused(tmp_path / "theirs", tmp_path / "run", "bert")
    for part in (
        "bert.encoder.layer.0-2.adapter.weight (3)",
        "reward.weight",
        "lacks bert.encoder.layer.1.output",
    ):
        assert part in message


@pytest.mark.parametrize(
    ("case", "class_name", "fields", "part"),
    [
        ("t5", "T5EncoderModel", {}, "T5EncoderModel, an encoder alone; a t5 here has a decoder"),
        ("gpt2", "GPT2DoubleHeadsModel", {}, "'GPT2DoubleHeadsModel', which has a head of its own"),
        ("bart", None, {"normalize_before": True}, "normalize_before is True; only False"),
        ("roberta", None, {"position_embedding_type": "relative_key_query"}, "position_embedding_type is 'rel"),
    ],
)  # fmt: skip
def test_what_would_be_another_model_is_refused_with_its_reason(tmp_path, case, class_name, fields, part):
    write(case, tmp_path / "theirs", class_name)
    edit(tmp_path / "theirs", **fields)
    assert part in refused(tmp_path / "theirs", tmp_path / "run", case)


def test_what_an_import_does_not_take_as_it_is_stands_in_its_lines(tmp_path, caplog):
    write("bart", tmp_path / "theirs")
    edit(tmp_path / "theirs", encoder_layerdrop=0.1)
    rewrite(tmp_path / "theirs", lambda state: {key: x.double() for key, x in state.items()})
    import_directory(tmp_path / "theirs", tmp_path / "run", tree_of("bart"))
    assert "encoder_layerdrop is 0.1; it is not trained here" in caplog.text
    assert "are of fp64; they are rounded to fp32" in caplog.text


@pytest.mark.parametrize("case", ["t5", "mt5"])
def test_a_decoder_deeper_than_its_encoder_is_proved_without_generation(tmp_path, caplog, case):
    write(case, tmp_path / "theirs", num_layers=1, num_decoder_layers=3)
    proof = import_directory(tmp_path / "theirs", tmp_path / "run", tree_of(case))
    assert proof is not None and proof.agreement == 1.0
    assert "generation is not compared" in caplog.text
    assert export_run(tmp_path / "run", tmp_path / "ours", ExportOptions()).agreement == 1.0
