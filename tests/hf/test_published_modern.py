"""Llama, Mistral, Qwen, EuroBERT, T5 1.1 and mT5: the order of turned features, packing, and what is refused."""

import json
import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from support.hf.published import random_model, write_random

from data_utils.common.batch_fields import DOC, ORD, PADDING_DOC, POSITION_IDS, TOKENS
from data_utils.common.errors import CheckpointError
from data_utils.common.settings import build
from megatron_lite.config.model import ModelConfig
from megatron_lite.hf.published.source import open_published
from megatron_lite.hf.published.tensor_map import to_ours
from megatron_lite.hf.published.verify_inputs import our_output, texts_to_batch
from megatron_lite.hf.published.write_config import former_fields, hf_config
from megatron_lite.inference.cache import CachedPlan, id_fields, run_cached_stack
from megatron_lite.transformer.init import initialize_parameters
from megatron_lite.transformer.transformer import Transformer

SIZES = {"num_layers": 1, "hidden_size": 32, "num_attention_heads": 4, "vocab_size": 97}
# fp32, the same sums in another order; times the largest value beyond 1.
TOLERANCE = 1e-5


@pytest.mark.parametrize(
    "case",
    [
        *("llama", "llama, tied", "mistral, odd", "qwen2, odd", "qwen3, odd", "eurobert", "eurobert, tied"),
        *("neobert", "neobert, odd", "modernbert", "modernbert, odd", "modernbert_decoder, odd"),
    ],
)
@torch.no_grad()
def test_documents_packed_in_a_row_are_each_alone(case, tmp_path):
    theirs = write_random(case, tmp_path)
    source = open_published(tmp_path)
    model = Transformer(build(ModelConfig, source.settings))
    weights = to_ours(source.theirs, source.mappings)
    for name, parameter in model.named_parameters():
        parameter.zero_()
        parameter[: len(weights.read(name))] = weights.read(name)
    rng = np.random.default_rng(0)
    texts = [rng.integers(4, 97, length).astype(np.int32) for length in (71, 30, 9)]
    batch = texts_to_batch(model.config, [np.concatenate(texts)])
    ends = np.cumsum([len(text) for text in texts])
    for document, (text, end) in enumerate(zip(texts, ends, strict=True)):
        places = slice(end - len(text), end)
        batch[0, DOC, places], batch[0, POSITION_IDS, places] = document, np.arange(len(text))
        batch[0, ORD, places] = np.arange(len(text)) * source.system.is_causal
    assert (
        not (batch[0, DOC] == PADDING_DOC).any()
        and batch[0, TOKENS].tolist() == np.concatenate(texts).tolist()
    )
    logits = our_output(model, batch)[1][0].split([len(text) for text in texts])
    for ours, text in zip(logits, texts, strict=True):
        expected = theirs(torch.from_numpy(text.astype(np.int64))[None])["logits"][0]
        assert (ours - expected).abs().max() <= TOLERANCE * max(1.0, expected.abs().max())


@pytest.mark.parametrize("case", ["modernbert", "modernbert_decoder, odd", "modernbert, older"])
def test_config_json_of_both_versions_is_read_and_written(case, tmp_path):
    """Version 4 of transformers names global layers and wavelengths by fields of their own."""
    write_random(case, tmp_path)
    path = tmp_path / "config.json"
    described, settings = json.loads(path.read_text()), open_published(tmp_path).settings
    config = build(ModelConfig, settings)
    exported = hf_config(config, {}).to_dict() | former_fields(config)
    old = {
        **described,
        **{name: exported[name] for name in ("global_attn_every_n_layers", "local_attention")},
    }
    old |= {f"{kind}_rope_theta": exported[f"{kind}_rope_theta"] for kind in ("global", "local")}
    new = {
        **described,
        **{name: exported[name] for name in ("layer_types", "rope_parameters", "local_attention")},
    }
    for version, lacks in ((old, ("layer_types", "rope_parameters")), (new, ("global_attn_every_n_layers",))):
        for name in lacks:
            version.pop(name, None)
        path.write_text(json.dumps(version))
        assert open_published(tmp_path).settings | {"global_every": 3} == settings | {"global_every": 3}
    assert settings["global_every"] == (2 if "odd" in case else 3)
    window = settings["attention_window"] + settings["system"].endswith("decoder")
    assert (
        exported["local_attention"] // 2 == window
        and exported["global_attn_every_n_layers"] == settings["global_every"]
    )


@torch.no_grad()
def test_the_decoder_writes_what_its_class_writes(tmp_path):
    """With a cache, token by token, beyond the window."""
    theirs = write_random("modernbert_decoder", tmp_path)
    source = open_published(tmp_path)
    model = Transformer(build(ModelConfig, source.settings))
    weights = to_ours(source.theirs, source.mappings)
    for name, parameter in model.named_parameters():
        parameter.zero_()
        parameter[: len(weights.read(name))] = weights.read(name)
    text = torch.randint(4, 97, (2, 60), generator=torch.Generator().manual_seed(0))
    expected, plan = theirs(text)["logits"], CachedPlan(model.config)
    for start, stop in ((0, 21), *((place, place + 1) for place in range(21, 60))):
        positions = torch.arange(start, stop).expand(2, -1)
        plan.expect(positions, is_causal=True)
        logits = model.logits(run_cached_stack(model, text[:, start:stop], id_fields(positions), plan))
        difference = (logits - expected[:, start:stop]).abs().max()
        assert difference <= TOLERANCE * max(1.0, expected.abs().max()), start


def test_modernbert_begins_with_normal_weights_that_end_at_two_deviations():
    """The deviation that is left is 0.880 of the one that is drawn; both output projections are 1 / sqrt(2 L) of it."""
    config = build(ModelConfig, {"system": "modernbert", **SIZES, "num_layers": 2, "hidden_size": 128})
    drawn = dict(Transformer(config).named_parameters())
    initialize_parameters(drawn.items(), config, 7)
    shrunk = {"layers.1.attention.dense.weight": 0.5, "layers.0.mlp.dense_4h_to_h.weight": 0.5}
    plain = (
        "embedding.word_embeddings.weight",
        "layers.0.attention.query_key_value.weight",
        "heads.projection.dense.weight",
    )
    for name, factor in (dict.fromkeys(plain, 1.0) | shrunk).items():
        weights = drawn[name][:97]
        assert 0.0395 * factor < weights.abs().max() <= 0.04 * factor, name
        assert abs(weights.std() / factor - 0.0176) < 3e-4, name
    assert "layers.0.input_layernorm.weight" not in drawn and "layers.1.input_layernorm.weight" in drawn
    assert [name for name in drawn if name.endswith("bias")] == ["heads.bias"]


def edit(directory, **changes):
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def remove(directory, name):
    path = directory / "config.json"
    path.write_text(json.dumps({k: v for k, v in json.loads(path.read_text()).items() if k != name}))


def rope(kind, **more):
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 1e4, **more}}


LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


@pytest.mark.parametrize(
    ("case", "change", "parts"),
    [
        ("llama", lambda d: edit(d, **rope("linear", factor=2.0)), ("rope_type is 'linear'", "one of default, llama3")),
        ("llama", lambda d: edit(d, **rope("yarn", factor=2.0)), ("rope_type is 'yarn'",)),
        ("llama", lambda d: edit(d, **rope("llama3", **{**LLAMA3, "high_freq_factor": 1.0})), ("rotary_scaling",)),
        ("llama", lambda d: edit(d, **rope("llama3", **{**LLAMA3, "factor": "eight"})), ("rotary_scaling", "'eight'")),
        ("llama", lambda d: edit(d, **rope("llama3", factor=8.0)), ("low_freq_factor",)),
        ("llama", lambda d: edit(d, attention_bias=True), ("attention_bias is", "only")),
        ("llama", lambda d: edit(d, mlp_bias=True), ("mlp_bias is", "only")),
        ("llama", lambda d: edit(d, hidden_act="tanh"), ("hidden_act is 'tanh'", "one of gelu")),
        ("llama", lambda d: edit(d, num_key_value_heads=3), ("num_key_value_heads (3) must divide",)),
        ("llama", lambda d: edit(d, head_dim=12), ("shape [64, 48], but the model needs [48, 48]",)),
        ("llama", lambda d: edit(d, tie_word_embeddings=True), ("lm_head.weight differs", "tied")),
        ("llama", lambda d: edit(d, architectures=["LlamaForTokenClassification"]),
         ("'LlamaForTokenClassification'", "only LlamaForCausalLM")),
        ("mistral", lambda d: edit(d, sliding_window=16), ("sliding_window is 16", "only")),
        ("mistral", lambda d: remove(d, "sliding_window"), ("sliding_window is 4096", "only")),
        ("qwen2", lambda d: edit(d, use_sliding_window=True), ("use_sliding_window is", "only")),
        ("qwen2", lambda d: edit(d, model_type="llama", architectures=["LlamaForCausalLM"]),
         ("also has model.layers.0-2.self_attn.k_proj.bias",)),
        ("qwen3", lambda d: edit(d, use_sliding_window=True), ("use_sliding_window is", "only")),
        ("qwen3", lambda d: edit(d, attention_bias=True), ("attention_bias is", "only")),
        ("qwen3", lambda d: edit(d, model_type="llama", architectures=["LlamaForCausalLM"]),
         ("also has model.layers.0-2.self_attn.k_norm.weight",)),
        ("eurobert", lambda d: edit(d, mlp_bias=True), ("mlp_bias is", "only")),
        ("eurobert", lambda d: edit(d, attention_bias=True), ("attention_bias is", "only")),
        ("modernbert", lambda d: edit(d, attention_bias=True), ("attention_bias is True", "only False")),
        ("modernbert", lambda d: edit(d, mlp_bias=True), ("mlp_bias is True", "only False")),
        ("modernbert", lambda d: edit(d, tie_word_embeddings=False), ("tie_word_embeddings is False", "only True")),
        ("modernbert", lambda d: edit(d, layer_types=["sliding_attention", *["full_attention"] * 3]),
         ("layer_types is ['sliding_attention'", "cannot be")),
        ("modernbert", lambda d: edit(d, layer_types=["full_attention"] * 4), ("layer_types is ['full", "cannot be")),
        ("modernbert", lambda d: edit(d, local_attention=1), ("attention_window is 0 with model.global_every 3",)),
        ("modernbert", lambda d: edit(d, classifier_activation="relu"), ("classifier_activation gives", "gelu_erf")),
        ("modernbert", lambda d: edit(d, rope_parameters={
            "full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}), ("rope_type is 'linear'", "default")),
        ("modernbert", lambda d: edit(d, architectures=["ModernBertForMultipleChoice"]),
         ("'ModernBertForMultipleChoice'", "only ModernBertForMaskedLM")),
        ("modernbert_decoder", lambda d: edit(d, local_attention=None), ("local_attention is None", "cannot be")),
        ("t5_1_1", lambda d: edit(d, feed_forward_proj="gated-silu"), ("feed_forward_proj is 'gated-silu'", "relu")),
        ("t5_1_1", lambda d: edit(d, feed_forward_proj="relu"), ("lacks", "DenseReluDense.wi.weight")),
        ("mt5", lambda d: edit(d, relative_attention_num_buckets=16), ("relative_attention_num_buckets is 16",)),
    ],
)  # fmt: skip
def test_what_the_model_cannot_be_is_refused_in_one_line(case, change, parts, tmp_path):
    write_random(case, tmp_path / "their")
    change(tmp_path / "their")
    with pytest.raises(CheckpointError) as error:
        open_published(tmp_path / "their")
    message = str(error.value)
    assert "\n" not in message and all(part in message for part in parts), message


@pytest.mark.parametrize("case", ["t5_1_1", "mt5"])
def test_a_head_is_untied_by_its_tensor(case, tmp_path):
    """Whatever config.json says; one that is equal to the words is a tie, also in a file that holds both."""
    write_random(case, tmp_path / "untied")
    assert not open_published(tmp_path / "untied").settings["tie_word_embeddings"]
    shutil.copytree(tmp_path / "untied", tmp_path / "tied")
    state = load_file(tmp_path / "tied/model.safetensors")
    state["lm_head.weight"] = state["shared.weight"].clone()
    save_file(state, tmp_path / "tied/model.safetensors", {"format": "pt"})
    source = open_published(tmp_path / "tied")
    assert source.settings["tie_word_embeddings"] and "lm_head.weight" not in source.mappings


@pytest.mark.parametrize(
    "case", ["llama", "mistral", "qwen2", "qwen3", "eurobert", "modernbert_decoder", "t5_1_1", "mt5"]
)
def test_an_option_that_the_class_does_not_have_is_not_exported(case, tmp_path):
    random_model(case).save_pretrained(tmp_path)
    config = build(ModelConfig, {**open_published(tmp_path).settings, "segments": 3})
    with pytest.raises(CheckpointError, match=r"model\.segments is 3, which \w+ does not have"):
        hf_config(config, {})
