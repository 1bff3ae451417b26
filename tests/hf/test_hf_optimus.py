"""OPTIMUS as two directories of transformers and a file of latent matrices, and back, bit by bit."""

import json
import shutil

import pytest
import torch
import transformers
from safetensors.torch import load_file
from support.data.tokenizer_files import byte_bpe_json
from support.systems.optimus_runs import write_run
from support.training.whole_weights import load_weights

from data_utils.common.errors import CheckpointError, ConfigError
from megatron_lite.checkpoint.verify import find_manifest
from megatron_lite.hf.export import ExportOptions, export_run
from megatron_lite.hf.importing import import_directory
from megatron_lite.inference.open_run import open_run
from megatron_lite.models.optimus import huggingface
from megatron_lite.models.optimus.config import latent_of
from megatron_lite.models.optimus.huggingface_verify import their_logits
from megatron_lite.models.optimus.open_run import open_latent

TEXT = "The quick brown fox."


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """The run, its weights, and its export."""
    root = tmp_path_factory.mktemp("optimus")
    run, weights = write_run(root)
    proof = export_run(run, root / "export", ExportOptions())
    assert proof is not None and proof.agreement == 1.0
    assert proof.largest_difference <= 1e-5 * max(1, proof.largest_logit)
    return run, weights, root / "export"


def test_the_directory_is_what_transformers_loads(exported):
    _, weights, export = exported
    files = {
        "encoder",
        "decoder",
        "latent.json",
        "latent.safetensors",
        "training.json",
        "README.md",
        "proof.json",
    }
    assert {path.name for path in export.iterdir()} == files
    bert = transformers.BertForPreTraining.from_pretrained(export / "encoder")
    gpt2 = transformers.GPT2LMHeadModel.from_pretrained(export / "decoder")
    words = "embedding.word_embeddings.weight"
    assert torch.equal(bert.bert.embeddings.word_embeddings.weight, weights[f"encoder.{words}"])
    assert torch.equal(gpt2.transformer.wte.weight, weights[f"decoder.{words}"])
    latent = load_file(export / "latent.safetensors")
    assert latent.keys() == {"posterior.weight", "memory.weight", "embedding.weight"}
    assert all(torch.equal(matrix, weights[f"latent.{name}"]) for name, matrix in latent.items())
    described = json.loads((export / "latent.json").read_text())
    assert described == {
        "format": "megatron-lite-optimus", "version": 1, "latent_size": 8, "feature": "pooler", "memory": True,
        "embedding": True,
    }  # fmt: skip


def test_tokenizers_of_the_export_give_the_ids_of_the_run(exported):
    run, _, export = exported
    opened = open_run(run)
    encoder = transformers.AutoTokenizer.from_pretrained(export / "encoder")
    assert encoder(TEXT, add_special_tokens=False)["input_ids"] == opened.tokenizer.encode(TEXT)
    decoder = transformers.AutoTokenizer.from_pretrained(export / "decoder")
    special = opened.decoder_tokenizer.special
    assert decoder(TEXT, add_special_tokens=False)["input_ids"] == opened.decoder_tokenizer.encode(TEXT)
    found = decoder.pad_token_id, decoder.bos_token_id, decoder.eos_token_id
    assert found == (special.pad, special.sop, special.eop)
    assert decoder.convert_ids_to_tokens(found) == ["<PAD>", "<BOS>", "<EOS>"]
    config = transformers.AutoConfig.from_pretrained(export / "decoder")
    assert (config.pad_token_id, config.bos_token_id, config.eos_token_id) == found


@torch.no_grad()
def test_likelihoods_match_the_run(exported):
    """The whole way of a sentence, with transformers alone."""
    run, _, export = exported
    ours = open_latent(run, device=torch.device("cpu"))
    sentences = ours.read([TEXT])
    bert = transformers.BertForPreTraining.from_pretrained(export / "encoder").eval()
    gpt2 = transformers.GPT2LMHeadModel.from_pretrained(export / "decoder").eval()
    read, write = (
        transformers.AutoTokenizer.from_pretrained(export / name) for name in ("encoder", "decoder")
    )
    latent = load_file(export / "latent.safetensors")
    pooled = bert.bert(**read(TEXT, return_tensors="pt")).pooler_output
    mu, _ = (pooled @ latent["posterior.weight"].T).chunk(2, dim=1)
    torch.testing.assert_close(mu, ours.encode(sentences)[0], rtol=1e-5, atol=1e-5)
    tokens = torch.tensor([[write.bos_token_id, *write(TEXT)["input_ids"], write.eos_token_id]])
    logits = their_logits(gpt2, latent, tokens[:, :-1], mu)
    expected = -torch.nn.functional.cross_entropy(logits[0], tokens[0, 1:], reduction="sum")
    found = ours.log_likelihood(sentences, mu[:, None])
    torch.testing.assert_close(found[0, 0], expected, rtol=1e-5, atol=1e-5)


def test_every_tensor_comes_back(exported, tmp_path):
    _, weights, export = exported
    proof = import_directory(export, tmp_path / "again", {})
    assert proof is not None and proof.agreement == 1.0
    found = load_weights(find_manifest(tmp_path / "again"))
    assert found.keys() == weights.keys()
    assert [name for name in weights if not torch.equal(found[name], weights[name])] == []
    before, after = open_run(exported[0]), open_run(tmp_path / "again")
    assert after.tokenizer.fingerprint == before.tokenizer.fingerprint
    assert after.decoder_tokenizer.fingerprint == before.decoder_tokenizer.fingerprint
    assert (
        latent_of(after.config) == latent_of(before.config) and after.config.decoder == before.config.decoder
    )
    export_run(tmp_path / "again", tmp_path / "export", ExportOptions())
    for name in ("encoder/model.safetensors", "decoder/model.safetensors", "latent.safetensors"):
        first, second = load_file(export / name), load_file(tmp_path / "export" / name)
        assert first.keys() == second.keys() and all(torch.equal(first[key], second[key]) for key in first)
    for name in ("encoder/vocab.txt", "decoder/vocab.json", "decoder/tokenizer_config.json"):
        assert (export / name).read_bytes() == (tmp_path / "export" / name).read_bytes()


def test_a_directory_without_its_configuration_is_imported(exported, tmp_path):
    """training.json is ours; what the model is follows from the other files."""
    directory = copied(exported[2], tmp_path)
    (directory / "training.json").unlink()
    tree = {"training": {"steps": 5}, "data": {"sequence_length": 16}}
    import_directory(directory, tmp_path / "again", tree)
    found = load_weights(find_manifest(tmp_path / "again"))
    assert all(torch.equal(found[name], weight) for name, weight in exported[1].items())


@pytest.mark.parametrize(
    "changes",
    [
        {"optimus": {"memory": False}},
        {"optimus": {"embedding": False, "feature": "cls"}, "model": {"sentence_classes": 0}},
        {"model": {"system": "roberta", "segments": 1, "sentence_classes": 0}, "optimus": {"feature": "cls"}},
    ],
    ids=["without memory", "without embedding", "roberta"],
)
def test_other_forms_are_proved_too(tmp_path, changes):
    run, weights = write_run(tmp_path, **changes)
    assert export_run(run, tmp_path / "export", ExportOptions()).agreement == 1.0
    import_directory(tmp_path / "export", tmp_path / "again", {})
    found = load_weights(find_manifest(tmp_path / "again"))
    assert found.keys() == weights.keys()
    assert all(torch.equal(found[name], weight) for name, weight in weights.items())


def test_one_tokenizer_for_both_stacks_stays_one(tmp_path):
    tokenizers = {"tokenizer": {"added_tokens": "glm"}}
    run, weights = write_run(tmp_path, **tokenizers, decoder_tokenizer=None)
    export_run(run, tmp_path / "export", ExportOptions(dtype="bf16"))
    import_directory(tmp_path / "export", tmp_path / "again", {})
    opened = open_run(tmp_path / "again")
    assert opened.decoder_tokenizer is None
    assert opened.tokenizer.fingerprint == open_run(run).tokenizer.fingerprint
    found = load_weights(find_manifest(tmp_path / "again"))
    assert all(torch.equal(found[name], weight.bfloat16().float()) for name, weight in weights.items())


def test_a_tokenizer_json_takes_the_three_tokens(tmp_path):
    (tmp_path / "tokenizer.json").write_text(json.dumps(byte_bpe_json(["<|endoftext|>"])))
    section = {"kind": "hf_json", "path": str(tmp_path / "tokenizer.json")}
    run, weights = write_run(tmp_path, decoder_tokenizer=section)
    export_run(run, tmp_path / "export", ExportOptions(verify=False))
    ours = open_run(run).decoder_tokenizer
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "export/decoder")
    assert theirs(TEXT, add_special_tokens=False)["input_ids"] == ours.encode(TEXT)
    assert theirs.convert_tokens_to_ids(["<PAD>", "<BOS>", "<EOS>"]) == [
        ours.special.pad,
        ours.special.sop,
        ours.special.eop,
    ]
    import_directory(tmp_path / "export", tmp_path / "again", {}, verify=False)
    assert open_run(tmp_path / "again").decoder_tokenizer.fingerprint == ours.fingerprint
    found = load_weights(find_manifest(tmp_path / "again"))
    assert all(torch.equal(found[name], weight) for name, weight in weights.items())


def test_the_card_and_the_record_hold_no_path(exported):
    run, weights, export = exported
    card = (export / "README.md").read_text()
    count = sum(weight.numel() for weight in weights.values())
    assert f"# OPTIMUS, {count:,} parameters" in card and "latent vector of 8 components" in card
    assert "2 layers, hidden size 32" in card and "a decoder of 3 layers" in card
    for path in (export / "README.md", export / "training.json", export / "decoder/tokenizer_config.json"):
        assert str(run.parent) not in path.read_text()


# Refusals


def copied(directory, tmp_path):
    return shutil.copytree(directory, tmp_path / "copy")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"decoder": {"system": None}}, "has decoder.system None, for which .* must be of the system gpt2"),
        ({"decoder": {"system": "gpt"}}, "has decoder.system 'gpt', for which .* must be of the system gpt2"),
        ({"model": {"system": None}}, "has model.system None, for which .* must be of a system like bert"),
        (
            {"model": {"system": "gpt2", "sentence_classes": 0}, "optimus": {"feature": "cls"}},
            "has model.system 'gpt2', for which .* must be of a system like bert",
        ),
    ],
)
def test_a_stack_without_a_class_is_refused_by_name(tmp_path, changes, message):
    run, _ = write_run(tmp_path, **changes)
    with pytest.raises(CheckpointError, match=message):
        export_run(run, tmp_path / "export", ExportOptions())
    assert not (tmp_path / "export").exists()


def edit(name, **changes):
    def damage(directory):
        path = directory / name
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))

    return damage


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (edit("latent.json", version=2), "version 2; this program reads .*, version 1"),
        (edit("latent.json", format="other"), "is of format 'other'"),
        (edit("latent.json", latent_size=0), "latent_size is 0"),
        (edit("latent.json", latent_size=4), "posterior.weight has shape"),
        (edit("latent.json", memory=False), "also has latent.memory.weight"),
        (edit("decoder/config.json", model_type="strange"), "decoder is of no system that can be imported"),
        (edit("encoder/config.json", model_type="gpt2"), "encoder"),
        (lambda directory: (directory / "latent.json").write_text("{"), "is not valid JSON"),
        (lambda directory: (directory / "latent.safetensors").unlink(), "missing or damaged"),
        (lambda directory: (directory / "encoder/config.json").unlink(), "config.json: No such file"),
    ],
)
def test_a_damaged_directory_is_refused(exported, tmp_path, damage, message):
    directory = copied(exported[2], tmp_path)
    damage(directory)
    with pytest.raises(CheckpointError, match=message):
        import_directory(directory, tmp_path / "again", {})
    assert not (tmp_path / "again").exists()


@pytest.mark.parametrize("name", ["posterior", "memory", "embedding"])
def test_each_matrix_is_compared(exported, tmp_path, monkeypatch, name):
    def write_wrong(path, shapes, tensors, *options):
        wrong = {matrix: tensor.clone() for matrix, tensor in zip(shapes, tensors, strict=True)}
        wrong[f"{name}.weight"][-1, -1] += 0.1
        write_tensors(path, shapes, wrong.values(), *options)

    write_tensors = huggingface.write_tensors
    monkeypatch.setattr(huggingface, "write_tensors", write_wrong)
    with pytest.raises(CheckpointError, match="does not compute what its source computes"):
        export_run(exported[0], tmp_path / "export", ExportOptions())


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({"optimus": {"feature": "cls"}}, "optimus.feature is 'cls', but .* has 'pooler'"),
        ({"decoder": {"num_layers": 2}}, "decoder.num_layers is 2, but .* has 3"),
        ({"model": {"hidden_size": 64}}, "model.hidden_size is 64, but .* has 32"),
    ],
)
def test_settings_that_contradict_the_model_are_refused(exported, tmp_path, tree, message):
    with pytest.raises(ConfigError, match=message):
        import_directory(exported[2], tmp_path / "again", tree)
    assert not (tmp_path / "again").exists()
