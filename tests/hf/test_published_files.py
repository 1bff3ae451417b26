"""Directories of published systems as strangers have them: files of all ages, fields that change what they compute."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.data.tokenizer_files import bert_vocab, write_bert
from support.hf.published import random_model
from support.hf.published_files import OBJECTIVE, TREE, edit, write_directory

from data_utils.common.errors import CheckpointError, ConfigError
from data_utils.common.settings import build, merge
from data_utils.objectives import LOSS_NAMES
from megatron_lite.config.tree import Config
from megatron_lite.hf.common.imported_run import write_training_checkpoint
from megatron_lite.hf.common.weights import Weights
from megatron_lite.hf.export import ExportOptions, export_run
from megatron_lite.hf.importing import import_directory
from megatron_lite.inference.open_run import open_run
from megatron_lite.train.start import check_start, keep_task_rows
from megatron_lite.transformer.flops import parameter_shapes


def old_names(state):
    """As the first releases: gamma and beta, no prefix."""
    return {
        name.removeprefix("bert.")
        .replace("LayerNorm.weight", "LayerNorm.gamma")
        .replace("LayerNorm.bias", "LayerNorm.beta"): tensor
        for name, tensor in state.items()
    }


def save_pickle(directory, tensors):
    torch.save(tensors, directory / "pytorch_model.bin")


def save_pickled_shards(directory, tensors):
    names = sorted(tensors)
    table = {name: f"pytorch_model-{i % 2 + 1:05d}-of-00002.bin" for i, name in enumerate(names)}
    for file in set(table.values()):
        torch.save({name: tensors[name] for name in names if table[name] == file}, directory / file)
    (directory / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": table}))


def save_tensors(directory, tensors):
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})


@pytest.mark.parametrize("save", [save_pickle, save_pickled_shards, save_tensors])
def test_files_of_all_ages_are_read(tmp_path, save):
    """Former names, both ends of the tie, and buffers of integers as the classes of their time saved them."""
    write_directory("bert", tmp_path / "new")
    shutil.copytree(tmp_path / "new", tmp_path / "old")
    state = load_file(tmp_path / "old/model.safetensors")
    old = old_names(state)
    words = state["bert.embeddings.word_embeddings.weight"]
    buffers = {
        "embeddings.position_ids": torch.arange(160)[None],
        "embeddings.token_type_ids": torch.zeros(1, 160).long(),
    }
    (tmp_path / "old/model.safetensors").unlink()
    save(tmp_path / "old", old | buffers | {"cls.predictions.decoder.weight": words.clone()})
    tree = TREE | OBJECTIVE["bert"]
    import_directory(tmp_path / "old", tmp_path / "run", tree, verify=False)
    export_run(tmp_path / "run", tmp_path / "export", ExportOptions())
    after = load_file(tmp_path / "export/model.safetensors")
    assert (
        all(torch.equal(after[name], tensor) for name, tensor in state.items())
        and after.keys() == state.keys()
    )


@pytest.mark.parametrize("save", [save_pickle, save_tensors])
def test_other_integers_are_refused_by_name(tmp_path, save):
    write_directory("bert", tmp_path / "bert")
    state = load_file(tmp_path / "bert/model.safetensors")
    (tmp_path / "bert/model.safetensors").unlink()
    save(tmp_path / "bert", state | {"bert.encoder.layer.0.counter": torch.arange(3)})
    with pytest.raises(
        CheckpointError, match=r"'bert\.encoder\.layer\.0\.counter' is not a floating-point tensor"
    ):
        import_directory(tmp_path / "bert", tmp_path / "run", TREE | OBJECTIVE["bert"])


@pytest.mark.parametrize("pad", [0, 1, 3])
def test_a_roberta_counts_positions_from_its_padding(tmp_path, pad):
    lines = [line for line in bert_vocab() if line != "[PAD]"]
    lines.insert(pad, "[PAD]")
    model = random_model("roberta", vocab_size=len(lines), pad_token_id=pad)
    model.save_pretrained(tmp_path / "original")
    write_bert(tmp_path / "original", lines)
    import_directory(tmp_path / "original", tmp_path / "run", TREE | OBJECTIVE["roberta"])
    assert open_run(tmp_path / "run").config.model.max_position == 160 - pad - 2
    export_run(tmp_path / "run", tmp_path / "export", ExportOptions())
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("original", "export"))
    assert [name for name in before if not torch.equal(before[name], after[name])] == []
    edit(tmp_path / "export", pad_token_id=pad + 1)
    with pytest.raises(CheckpointError, match=f"pad_token_id is {pad + 1}, .* pads with {pad};"):
        import_directory(tmp_path / "export", tmp_path / "other", TREE | OBJECTIVE["roberta"])


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"hidden_act": "gelu_new"}, ("hidden_act is 'gelu_new'", "one of gelu.")),
        ({"pad_token_id": None}, ("pad_token_id is None", "counts positions")),
    ],
)
def test_a_roberta_that_its_class_cannot_compute_is_refused(tmp_path, changes, parts):
    write_directory("roberta", tmp_path / "roberta")
    edit(tmp_path / "roberta", **changes)
    with pytest.raises(CheckpointError) as error:
        import_directory(tmp_path / "roberta", tmp_path / "run", TREE | OBJECTIVE["roberta"])
    assert all(part in str(error.value) for part in parts) and not (tmp_path / "run").exists()


def test_an_ernie_of_three_task_rows_trains_the_one_its_class_reads(tmp_path):
    """ERNIE 3.0 has three. Its rows stay as they were, and each objective takes the next one."""
    lines = bert_vocab()
    random_model("ernie2", vocab_size=len(lines), task_type_vocab_size=3).save_pretrained(tmp_path / "ernie")
    write_bert(tmp_path / "ernie", lines)
    three = {"masked_lm": 1, "ernie": 1, "albert": 1}
    import_directory(tmp_path / "ernie", tmp_path / "run", TREE | {"objectives": three})
    rows = open_run(tmp_path / "run").config.model.task_rows
    names = ("masked", "masked_units", "masked_ngrams", "sentence_order")
    assert [rows[LOSS_NAMES.index(name)] for name in names] == [0, 1, 2, 2]
    export_run(tmp_path / "run", tmp_path / "export", ExportOptions())
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("ernie", "export"))
    assert [name for name in before if not torch.equal(before[name], after[name])] == []
    with pytest.raises(ConfigError, match="task_types is 3"):
        import_directory(tmp_path / "ernie", tmp_path / "other", TREE | {"objectives": three | {"causal": 1}})


def test_a_new_roberta_with_another_activation_is_refused(tmp_path):
    """Before it is trained, not when it is exported. A run that has begun goes on."""
    sizes = {"num_layers": 1, "hidden_size": 8, "num_attention_heads": 1, "vocab_size": 99}
    tree = {"model": {"system": "roberta", "activation": "relu", **sizes}, "objectives": {"masked_lm": 1}}
    config = build(Config, TREE | tree | {"run": {"directory": str(tmp_path)}})
    with pytest.raises(
        ConfigError, match=r"model\.activation is relu with model\.system roberta, .* gelu_erf"
    ):
        check_start(config)
    shapes = parameter_shapes(config.model)
    weights = Weights(shapes, lambda name: torch.zeros(shapes[name]))
    write_training_checkpoint(tmp_path / "checkpoints/step_00000000", weights, config)
    check_start(config)


def test_runs_keep_their_rows_of_the_task_embedding(tmp_path):
    tree = {
        "model": {"system": "ernie2", "num_layers": 1, "hidden_size": 8, "num_attention_heads": 1, "vocab_size": 99},
        "objectives": {"masked_lm": 1},
        "run": {"directory": str(tmp_path)},
    }  # fmt: skip

    def begun(**changes):
        return build(Config, merge(TREE | tree, changes))

    def saved(config):
        shapes = parameter_shapes(config.model)
        write_training_checkpoint(
            tmp_path / "checkpoints/step_00000000",
            Weights(shapes, lambda name: torch.zeros(shapes[name])),
            config,
        )

    masked, units = (LOSS_NAMES.index(name) for name in ("masked", "masked_units"))
    new = keep_task_rows(begun())
    assert new.model.task_rows[masked] == 0 and new.model.task_rows[units] == -1
    saved(new)
    more = keep_task_rows(begun(objectives={"ernie": 1}))
    assert more.model.task_rows[masked] == 0 and more.model.task_rows[units] == 1


@pytest.mark.parametrize("added_tokens", ["none", "optimus"])
def test_tokens_without_a_row_are_named_with_what_helps(tmp_path, added_tokens):
    """A tokenizer that got a token which the embedding did not: either side can be mended."""
    source = tmp_path / "source"
    write_directory("bert", source)
    write_bert(source, [*bert_vocab(), *(["later"] if added_tokens == "none" else [])])
    tree = merge(TREE, {"objectives": {"masked_lm": 1}, "tokenizer": {"added_tokens": added_tokens}})
    with pytest.raises(CheckpointError) as caught:
        import_directory(source, tmp_path / "run", tree)
    rows, message = len(bert_vocab()), str(caught.value)
    assert f"{source} has {rows} rows" in message
    helps = (
        f"resize_token_embeddings({rows + 1})" if added_tokens == "none" else "tokenizer.added_tokens=none"
    )
    assert helps in message and ("'later'" in message or "<BOS>" in message)
    assert message.count("/") == str(source).count("/"), "no path of ours"
