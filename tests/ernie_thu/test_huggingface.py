"""The published layout becomes a run and comes back to the bit; the run computes what a plain model of it does."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from support.commands import assert_refused, forked
from support.data.tokenizer_files import bert_vocab
from support.hf.own_models import weights_of
from support.systems.entity_models import RandomVectors, batch_of
from support.systems.entity_reference import reference_losses
from support.systems.ernie_thu import ErnieThu

from data_utils.common.errors import CheckpointError, ConfigError, UserError
from data_utils.common.losses import ENTITIES
from data_utils.common.settings import build, merge, to_tree
from data_utils.objectives import LOSSES
from megatron_lite.config.tree import Config
from megatron_lite.hf.common.weights import Weights
from megatron_lite.hf.export import ExportOptions, export_run
from megatron_lite.hf.importing import import_directory
from megatron_lite.hf.published.tensor_map import tensor_mappings, to_ours
from megatron_lite.inference.open_run import open_run
from megatron_lite.models.ernie_thu.huggingface import HUGGINGFACE_FORMAT, SYSTEM
from megatron_lite.train.loss_normalizer import mean_scales
from megatron_lite.transformer.build import build_model, model_spec
from megatron_lite.transformer.micro_batch import prepare

CPU = torch.device("cpu")
TREE = {"training": {"steps": 6, "precision": "fp32", "seed": 7}, "data": {"sequence_length": 57}}
WORDS = bert_vocab()
BASE = {
    "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 64,
    "max_position_embeddings": 64, "layer_types": ["sim", "mix", "norm", "norm"], "hidden_act": "gelu",
    "type_vocab_size": 2, "hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1,
    "initializer_range": 0.02, "vocab_size": len(WORDS),
}  # fmt: skip
# Fields of ernie_config.json, width and heads of the entities.
SIZES = {
    "as published": ({}, 100, 4),
    "odd": (
        {
            "hidden_size": 36, "num_attention_heads": 3, "num_hidden_layers": 3, "intermediate_size": 50,
            "layer_types": ["norm", "sim", "mix"], "entity_attention_heads": 3,
        }, 15, 3,
    ),
    "few types": (
        {"hidden_size": 20, "num_hidden_layers": 5, "layer_types": ["mix", "norm"], "entity_attention_heads": 1}, 7, 1,
    ),
}  # fmt: skip


def write_directory(directory, name="as published", **changes):
    """The directory of a plain model with random weights, and the model."""
    fields, width, heads = SIZES[name]
    described = {**BASE, **fields}
    directory.mkdir(parents=True)
    torch.manual_seed(len(name))
    model = ErnieThu(described, width, heads)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            is_norm = "LayerNorm" in key or key.endswith("bias")
            parameter.add_(torch.randn_like(parameter) * (0.3 if is_norm else 0.1))
            if parameter.dim() == 2 and "embeddings" in key:
                parameter.mul_(0.2)
    torch.save(model.state_dict(), directory / "pytorch_model.bin")
    (directory / "ernie_config.json").write_text(json.dumps(described | changes))
    (directory / "vocab.txt").write_text("\n".join(WORDS) + "\n")
    return model


@pytest.fixture(scope="module", params=list(SIZES))
def imported(request, tmp_path_factory):
    """The plain model, its directory, and the run made from that."""
    root = tmp_path_factory.mktemp("ernie")
    model = write_directory(root / "original", request.param)
    assert import_directory(root / "original", root / "run", TREE, verify=False) is None
    return model, root / "original", root / "run"


def test_every_tensor_and_file_comes_back(imported, tmp_path):
    model, original, run = imported
    assert export_run(run, tmp_path / "export", ExportOptions(verify=False)) is None
    before, after = model.state_dict(), load_file(tmp_path / "export/model.safetensors")
    assert before.keys() == after.keys()
    assert [name for name in before if not torch.equal(before[name], after[name])] == []
    old, new = (
        json.loads((path / "ernie_config.json").read_text()) for path in (original, tmp_path / "export")
    )
    old["layer_types"] += ["sim"] * (old["num_hidden_layers"] - len(old["layer_types"]))
    assert new == old
    assert (tmp_path / "export/vocab.txt").read_bytes() == (original / "vocab.txt").read_bytes()
    assert not json.loads((tmp_path / "export/proof.json").read_text())["proven"]
    import_directory(tmp_path / "export", tmp_path / "again", TREE, verify=False)  # from safetensors
    weights, again = weights_of(run), weights_of(tmp_path / "again")
    assert weights.keys() == again.keys() and all(torch.equal(x, again[name]) for name, x in weights.items())
    assert set(weights) == set(model_spec(open_run(run).config).shapes(open_run(run).config))


def test_the_run_computes_what_the_source_does(imported):
    """Losses and scores within 1e-5 of their size, and the gradient of every parameter."""
    plain, _, path = imported
    run = open_run(path)
    config = run.config
    model = build_model(config, len(LOSSES)).eval()
    weights = weights_of(path)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.zero_()
            parameter[: len(weights[name])] = weights[name]
    section = config.objective_choices[0].section
    vectors = RandomVectors(section.size)
    batch = batch_of(4, share=0.2, vectors=vectors, vocab=len(WORDS))
    inputs = prepare(batch, CPU, config.model)
    inputs.scale_weights(mean_scales(np.ones(len(LOSSES)), batch.loss_divisors(len(LOSSES))))
    inputs = inputs.to(CPU)
    loss, sums = model(inputs)
    loss.backward()
    found, scores = reference_losses(plain, batch, vectors)
    assert len(found[ENTITIES]) > 20
    means = {which: torch.stack(losses).mean() for which, losses in found.items() if losses}
    assert len(means) == 3
    for which, mean in means.items():
        assert sums[which.number, 0].item() == pytest.approx(mean.item(), rel=1e-5)
    expected = sum(means.values())
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    with torch.no_grad():
        hidden = model.run(inputs.tokens, inputs.ids, inputs.plan, None, condition=inputs.extra_inputs)
        logits = model.entity_logits(hidden, inputs.extra_inputs)[
            (inputs.extra_inputs.predicted >= 0).flatten()
        ]
    for own, other in zip(logits, scores, strict=True):
        largest = max(1.0, other.abs().max().item())
        assert (own[: len(other)] - other).abs().max().item() <= 1e-5 * largest
    expected.backward()
    theirs = {
        name: x.grad if x.grad is not None else torch.zeros_like(x) for name, x in plain.named_parameters()
    }
    shapes = model_spec(config).shapes(config)
    grads = {name: tuple(grad.shape) for name, grad in theirs.items()}
    ours = to_ours(Weights(grads, theirs.__getitem__), tensor_mappings(SYSTEM, shapes, config.model))
    for name, parameter in model.named_parameters():
        other = ours.read(name)
        own = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        scale = max(other.abs().max().item(), 1e-3)
        assert (own[: len(other)] - other).abs().max().item() <= 1e-5 * scale + 1e-7, name


def test_commands_convert_both_ways_and_say_that_there_is_no_proof(tmp_path):
    write_directory(tmp_path / "original")
    given = ("training.steps=6", "training.precision=fp32", "data.sequence_length=57")
    command = "scripts/convert_checkpoint.py"
    result = forked(command, "import", "--input", tmp_path / "original", "--output", tmp_path / "run", *given)
    assert_refused(result, "add --no-verify")
    assert not (tmp_path / "run").exists()
    paths = ("--input", tmp_path / "original", "--output", tmp_path / "run")
    done = forked(command, "import", *paths, "--no-verify", *given)
    assert done.returncode == 0 and "not verified" in done.stdout, done.stderr
    usual = forked(
        command, "import", "--input", tmp_path / "original", "--output", tmp_path / "usual", "--no-verify"
    )
    assert usual.returncode == 0 and "1,000 steps" in usual.stdout, usual.stderr
    paths = ("--checkpoint", tmp_path / "run", "--output", tmp_path / "export")
    assert_refused(forked(command, "export", *paths), "add --no-verify")
    done = forked(command, "export", *paths, "--no-verify", "--dtype", "bf16")
    assert done.returncode == 0, done.stderr
    assert (
        load_file(tmp_path / "export/model.safetensors")["bert.pooler.dense.weight"].dtype == torch.bfloat16
    )
    assert "layout of its repository" in (tmp_path / "export/README.md").read_text()


BAD = {
    "a type": ({"layer_types": ["sim", "mux"]}, {}, "ernie_config.json.*layer_types"),
    "too many types": ({"layer_types": ["sim"] * 5}, {}, "has 5 layer_types for 4 layers"),
    "no types": ({"layer_types": None}, {}, "ernie_config.json.*layer_types"),
    "activation": ({"hidden_act": "swish"}, {}, "ernie_config.json.*hidden_act"),
    "a size": ({"hidden_size": 32.5}, {}, "ernie_config.json.*hidden_size"),
    "a far size": ({"intermediate_size": 10**9}, {}, "ernie_config.json sets model.ffn_size to 1000000000"),
    "far layers": ({"num_hidden_layers": 10**9}, {}, "ernie_config.json declares 1000000000 layers"),
    "another block": ({"layer_types": ["sim", "mix", "norm", "mix"]}, {}, "also has bert.encoder.layer.3.attention"),
    "other vocabulary": ({"vocab_size": 50}, {}, r"word_embeddings.weight has shape|vocab_size"),
    "entities": ({}, {"entities": {"size": 50}}, "entities.size is 50, but .* has 100; leave it out"),
    "a setting": ({}, {"model": {"hidden_size": 64}}, "model.hidden_size is 64, but .* has 32"),
    "heads": ({"entity_attention_heads": 3}, {}, r"entities.heads \(3\) does not divide entities.size \(100\)"),
    "an objective": ({}, {"objectives": {"entities": 0, "masked_lm": 1}}, "has entities; set objectives"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_directories_are_refused_in_one_line(tmp_path, name):
    changes, tree, message = BAD[name]
    write_directory(tmp_path / "original", **changes)
    with pytest.raises(UserError, match=message) as error:
        import_directory(tmp_path / "original", tmp_path / "run", {**TREE, **tree}, verify=False)
    assert "\n" not in str(error.value) and not (tmp_path / "run").exists()


def changed(path, change):
    state = torch.load(path, weights_only=True)
    change(state)
    torch.save(state, path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda state: state.pop("cls.predictions_ent.transform.dense.weight"), "only the weights of BertForPre"),
        (lambda state: state.pop("cls.seq_relationship.bias"), "lacks cls.seq_relationship.bias; it does not hold a"),
        (lambda state: state.update(more=torch.ones(2)), "also has more; it does not hold a"),
        (lambda state: state["cls.predictions.decoder.weight"].add_(1), None),
        (lambda state: state.update({"bert.pooler.dense.bias": torch.ones(3)}), "has shape"),
    ],
)  # fmt: skip
def test_bad_weights_are_refused_in_one_line(tmp_path, change, message):
    write_directory(tmp_path / "original")
    path = tmp_path / "original/pytorch_model.bin"
    changed(path, change)
    if message is None:  # a tie whose ends differ: `changed` keeps them one tensor
        changed(
            path, lambda state: state.update({"cls.predictions.decoder.weight": torch.zeros(len(WORDS), 32)})
        )
        message = "cls.predictions.decoder.weight differs from"
    with pytest.raises(CheckpointError, match=message) as error:
        import_directory(tmp_path / "original", tmp_path / "run", TREE, verify=False)
    assert "\n" not in str(error.value) and not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("ernie_config.json", "{", "ernie_config.json"),
        ("ernie_config.json", "[]", "ernie_config.json"),
        ("vocab.txt", None, "has no vocab.txt; fetch it, or set tokenizer.path"),
        ("vocab.txt", "\n".join(WORDS[:-1]) + "\n", "rows of word embeddings, but the tokenizer has"),
        ("pytorch_model.bin", None, "has neither model.safetensors nor pytorch_model.bin"),
        ("pytorch_model.bin", "x", "pytorch_model.bin is damaged"),
    ],
)  # fmt: skip
def test_bad_files_are_refused_in_one_line(tmp_path, name, content, message):
    write_directory(tmp_path / "original")
    path = tmp_path / "original" / name
    path.unlink()
    if content is not None:
        path.write_text(content)
    with pytest.raises((CheckpointError, ConfigError), match=message) as error:
        import_directory(tmp_path / "original", tmp_path / "run", TREE, verify=False)
    assert "\n" not in str(error.value) and not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"model": {"activation": "gelu_tanh"}},
            "has model.activation gelu_tanh, which the published layout",
        ),
        ({"model": {"layernorm_epsilon": 1e-5}}, "has model.layernorm_epsilon 1e-05, which"),
        (
            {"model": {"sentence_classes": 0}, "entities": {"next_sentence": False}},
            "has no label of two sentences",
        ),
    ],
)
def test_a_model_that_the_layout_cannot_say_is_not_exported(tmp_path, changes, message):
    write_directory(tmp_path / "original")
    import_directory(tmp_path / "original", tmp_path / "run", TREE, verify=False)
    run = open_run(tmp_path / "run")
    run = replace(run, config=build(Config, merge(to_tree(run.config), changes)))
    with pytest.raises(CheckpointError, match=message):
        HUGGINGFACE_FORMAT.require_model(run)
