"""NeoBERT, of which transformers has no class: its directory becomes a run and comes back, and what is refused."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.data.tokenizer_files import bert_vocab, write_bert
from support.hf.neobert import NeoBERTLMHead
from support.hf.published import random_model
from support.hf.published_files import TREE, edit

from data_utils.common.errors import CheckpointError
from data_utils.common.settings import build
from megatron_lite.config.model import ModelConfig
from megatron_lite.hf.export import ExportOptions, export_run
from megatron_lite.hf.importing import import_directory
from megatron_lite.hf.published.neobert import _BY_HEAD as BY_HEAD
from megatron_lite.hf.published.source import open_published
from megatron_lite.hf.published.verify_inputs import our_output, texts_to_batch
from megatron_lite.hf.published.write_config import hf_config
from megatron_lite.inference.open_run import load_run
from megatron_lite.transformer.flops import parameter_shapes
from megatron_lite.transformer.init import initialize_parameters
from megatron_lite.transformer.transformer import Transformer

SIZES = {"num_layers": 1, "hidden_size": 128, "num_attention_heads": 4, "vocab_size": 97}
MASKED = TREE | {"objectives": {"masked_lm": 1}}
# The published config.json, but for its sizes: with fields that no class reads.
RELEASED = {
    "auto_map": {"AutoConfig": "model.NeoBERTConfig", "AutoModelForMaskedLM": "model.NeoBERTLMHead"},
    "classifier_init_range": 0.02, "decoder_init_range": 0.02, "embedding_init_range": 0.02, "dim_head": 12,
    "kwargs": {"pretrained_model_name_or_path": "google-bert/bert-base-uncased", "trust_remote_code": True},
}  # fmt: skip


def write_directory(directory, **changes):
    directory.mkdir()
    lines = bert_vocab()
    model = random_model("neobert", vocab_size=len(lines), **changes)
    model.save_pretrained(directory)
    write_bert(directory, lines)
    edit(directory, **RELEASED)
    return model


def described(directory):
    return json.loads((directory / "config.json").read_text())


def test_begins_with_uniform_weights():
    config = build(ModelConfig, {"system": "neobert", **SIZES})
    drawn = dict(Transformer(config).named_parameters())
    initialize_parameters(drawn.items(), config, 7)
    for name in ("embedding.word_embeddings.weight", "layers.0.mlp.dense_4h_to_h.weight"):
        weights = drawn[name][:97]
        assert 0.0199 < weights.abs().max() <= 0.02 and abs(weights.std() - 0.02 / 3**0.5) < 2e-4
    assert not drawn["heads.bias"].any() and (drawn["final_layernorm.weight"] == 1).all()


def test_queries_keys_and_values_of_a_head_stand_together():
    config = build(ModelConfig, {"system": "neobert", **SIZES, "hidden_size": 4, "num_attention_heads": 2})
    theirs = torch.arange(12)  # q q k k v v of the first head, and of the second
    assert BY_HEAD.to_ours(theirs, config).tolist() == [0, 1, 6, 7, 2, 3, 8, 9, 4, 5, 10, 11]
    assert torch.equal(BY_HEAD.to_theirs(BY_HEAD.to_ours(theirs, config), config), theirs)


@pytest.mark.parametrize(("intermediate_size", "width"), [(96, 64), (50, 40), (3072, 2048), (11, 8)])
def test_the_width_of_the_ffn_follows_from_its_field(intermediate_size, width, tmp_path):
    random_model("neobert", intermediate_size=intermediate_size).save_pretrained(tmp_path)
    source = open_published(tmp_path)
    assert source.settings["ffn_size"] == width and source.settings["max_position"] == 159
    config = build(ModelConfig, source.settings)
    kept = hf_config(config, described(tmp_path)).to_dict()
    assert kept["intermediate_size"] == intermediate_size and kept["max_length"] == 160
    new = hf_config(config, {}).to_dict()
    assert 8 * -(-int(2 * new["intermediate_size"] / 3) // 8) == width and "ffn_width" not in new


def test_a_directory_comes_back(tmp_path):
    """Weights and tokenizer bit for bit, config.json but for where its code is and a field that repeats others."""
    theirs = write_directory(tmp_path / "original")
    import_directory(tmp_path / "original", tmp_path / "run", MASKED, verify=False)
    export_run(tmp_path / "run", tmp_path / "export", ExportOptions(verify=False))
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("original", "export"))
    assert before.keys() == after.keys()
    assert [name for name in before if not torch.equal(before[name], after[name])] == []
    old, new = described(tmp_path / "original"), described(tmp_path / "export")
    differing = {name for name in old.keys() | new.keys() if old.get(name) != new.get(name)}
    assert differing <= {"auto_map", "kwargs", "transformers_version", "torch_dtype"}
    assert new["auto_map"]["AutoModelForMaskedLM"] == "chandar-lab/NeoBERT--model.NeoBERTLMHead"
    for name in ("vocab.txt", "tokenizer_config.json"):
        assert (tmp_path / "original" / name).read_bytes() == (tmp_path / "export" / name).read_bytes()
    loaded, loading = NeoBERTLMHead.from_pretrained(tmp_path / "export", output_loading_info=True)
    assert not loading["missing_keys"] and not loading["unexpected_keys"]
    ids = torch.arange(5, 45)[None]
    with torch.no_grad():
        assert torch.equal(loaded.eval()(ids).logits, theirs(ids).logits)


@torch.no_grad()
def test_a_new_run_goes_to_its_layout(tmp_path):
    """Without files of an import: every id and size is written."""
    write_directory(tmp_path / "original", intermediate_size=50)
    import_directory(tmp_path / "original", tmp_path / "run", MASKED, verify=False)
    run = load_run(tmp_path / "run")
    (tmp_path / "run/published").rename(tmp_path / "elsewhere")
    config = run.config.model
    assert config.ffn_size == 40
    run = load_run(tmp_path / "run", tmp_path / "elsewhere/vocab.txt")
    export_run(
        tmp_path / "run", tmp_path / "export", ExportOptions(verify=False), tmp_path / "elsewhere/vocab.txt"
    )
    theirs = NeoBERTLMHead.from_pretrained(tmp_path / "export").eval()
    assert theirs.config.pad_token_id == run.tokenizer.special.pad
    texts = [torch.arange(5, 45).numpy(), torch.arange(20, 29).numpy()]
    _, ours = our_output(run.model, texts_to_batch(config, texts))
    for logits, text in zip(ours, texts, strict=True):
        expected = theirs(torch.from_numpy(text)[None]).logits[0]
        assert (logits[: len(text)] - expected).abs().max() <= 1e-5 * max(1.0, expected.abs().max())


def test_no_proof_is_claimed(tmp_path):
    write_directory(tmp_path / "original")
    with pytest.raises(CheckpointError, match=r"no class NeoBERTLMHead, with .* add --no-verify") as error:
        import_directory(tmp_path / "original", tmp_path / "run", MASKED)
    assert "\n" not in str(error.value) and not (tmp_path / "run").exists()
    import_directory(tmp_path / "original", tmp_path / "run", MASKED, verify=False)
    with pytest.raises(CheckpointError, match="no class NeoBERTLMHead"):
        export_run(tmp_path / "run", tmp_path / "export", ExportOptions())
    assert not (tmp_path / "export").exists()


def without(name):
    def change(directory):
        state = load_file(directory / "model.safetensors")
        save_file(
            {key: x for key, x in state.items() if key != name},
            directory / "model.safetensors",
            {"format": "pt"},
        )

    return change


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        (lambda d: edit(d, intermediate_size=99), ("ffn.w12.weight", "shape")),
        (lambda d: edit(d, intermediate_size="wide"), ("transformers cannot use it",)),
        (lambda d: edit(d, num_attention_heads=5), ("num_attention_heads",)),
        (lambda d: edit(d, norm_eps="small"), ("norm_eps", "fetch it again")),
        (lambda d: edit(d, max_length=0), ("max_position",)),
        (lambda d: edit(d, architectures=["NeoBERTForSequenceClassification"]),
         ("'NeoBERTForSequenceClassification'", "only NeoBERTLMHead")),
        (without("decoder.bias"), ("lacks decoder.bias",)),
        (without("decoder.weight"), ("lacks decoder.weight",)),
    ],
)  # fmt: skip
def test_what_it_cannot_be_is_refused_in_one_line(change, parts, tmp_path):
    random_model("neobert").save_pretrained(tmp_path)
    change(tmp_path)
    with pytest.raises(CheckpointError) as error:
        open_published(tmp_path)
    message = str(error.value)
    assert "\n" not in message and all(part in message for part in parts), message


@pytest.mark.parametrize(
    ("option", "value"),
    [("ffn_size", 42), ("tie_word_embeddings", True), ("num_key_value_heads", 2), ("rotary_base", 5e5)],
)
def test_an_option_that_it_does_not_have_is_not_exported(option, value):
    config = build(ModelConfig, {"system": "neobert", **SIZES, "ffn_size": 40, option: value})
    assert parameter_shapes(config)
    with pytest.raises(CheckpointError, match=rf"model\.{option} is .*, which NeoBERTLMHead does not have"):
        hf_config(config, {})
