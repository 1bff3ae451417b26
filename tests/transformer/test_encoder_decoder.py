"""A model with encoder and decoder against attention and blocks written out, and against transformers' BART and T5."""

import dataclasses

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from support.data.recipes import RECIPES, collate, windows
from support.data.recipes import make as make_objective
from support.transformer.batches import prefix_batch

from data_utils.common.batch_fields import (
    BLOCK_POSITION_IDS,
    DOC,
    FIELDS,
    GRP,
    ORD,
    POSITION_IDS,
    SEGMENT_IDS,
    TARGETS,
    TOKENS,
    WEIGHTS,
)
from data_utils.objectives import LOSS_NAMES
from megatron_lite.config.model import ModelConfig
from megatron_lite.transformer.attention_backends.layout import allowed
from megatron_lite.transformer.batch import Batch
from megatron_lite.transformer.flops import parameter_count
from megatron_lite.transformer.init import initialize_parameters
from megatron_lite.transformer.micro_batch import MicroBatch
from megatron_lite.transformer.transformer import Transformer

CPU = torch.device("cpu")
GLM_LIKE = ModelConfig(
    num_layers=2, decoder_layers=3, hidden_size=32, num_attention_heads=4, vocab_size=3000, max_position=64,
    segments=2, embedding_dropout=0.0, attention_dropout=0.0, output_dropout=0.0,
)  # fmt: skip
BART = dataclasses.replace(
    GLM_LIKE, norm="post", embedding_norm=True, positions="learned", segments=0, activation="gelu_erf"
)
T5 = dataclasses.replace(
    GLM_LIKE, rms_norm=True, biases="none", positions="none", segments=0, activation="relu", head_dim=16, ffn_size=40,
)  # fmt: skip
CONFIGS = {"glm": GLM_LIKE, "bart": BART, "t5": T5}
DROPOUTS = {
    "embedding_dropout": 0.1,
    "attention_dropout": 0.1,
    "output_dropout": 0.1,
    "activation_dropout": 0.1,
}
EACH_CONFIG = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)


def make(config, **options):
    """A model whose norms and biases are drawn too, in fp64."""
    model = Transformer(config, num_losses=len(LOSS_NAMES), **options).double()
    initialize_parameters(model.named_parameters(), dataclasses.replace(config, init_std=0.1), 1)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "layernorm" in name or name.endswith("bias"):
                parameter += torch.empty_like(parameter).normal_(0.0, 0.2, generator=generator)
    return model


def batch_of(name, sequence_length=40, rows=3, seed=1):
    recipe = RECIPES[name]
    return collate(
        make_objective(name, sequence_length, **recipe.config), windows(rows, sequence_length, seed)
    )


class Reference:
    """The model written out on the tokens of a batch in place, [B, S]."""

    def __init__(self, config, weights, fields):
        self.config, self.weights = config, weights
        fields = fields.astype(np.int64)
        self.is_target = torch.from_numpy((fields[:, ORD] > 0) & (fields[:, DOC] >= 0))
        self.mask = torch.from_numpy(allowed(fields[:, DOC], fields[:, ORD], fields[:, GRP]))
        self.fields = torch.from_numpy(fields)

    def linear(self, name, x):
        return F.linear(x, self.weights[f"{name}.weight"], self.weights.get(f"{name}.bias"))

    def norm(self, name, x):
        weight, epsilon = self.weights[f"{name}.weight"], self.config.layernorm_epsilon
        if self.config.rms_norm:
            return x * (x.pow(2).mean(-1, keepdim=True) + epsilon).rsqrt() * weight
        return F.layer_norm(x, x.shape[-1:], weight, self.weights[f"{name}.bias"], epsilon)

    def softmax(self, q, k, v, queries, keys):
        mask = self.mask & queries[..., None] & keys[:, None]
        q, k, v = (x.unflatten(-1, (self.config.num_attention_heads, -1)) for x in (q, k, v))
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / q.shape[-1] ** 0.5
        weights = scores.masked_fill(~mask[:, None], float("-inf")).softmax(-1).nan_to_num(0.0)
        return torch.einsum("bhqk,bkhd->bqhd", weights, v).flatten(2)

    def attention(self, name, x, part):
        q, k, v = self.linear(f"{name}.query_key_value", x).chunk(3, -1)
        return self.linear(f"{name}.dense", self.softmax(q, k, v, part, part))

    def cross(self, name, x, encoded):
        k, v = self.linear(f"{name}.key_value", encoded).chunk(2, -1)
        out = self.softmax(self.linear(f"{name}.query", x), k, v, self.is_target, ~self.is_target)
        return self.linear(f"{name}.dense", out)

    def mlp(self, name, x):
        x = self.linear(f"{name}.dense_h_to_4h", x)
        kind = self.config.activation
        x = F.relu(x) if kind == "relu" else F.gelu(x, approximate="tanh" if kind == "gelu_tanh" else "none")
        return self.linear(f"{name}.dense_4h_to_h", x)

    def block(self, i, x, part, encoded=None):
        p = f"layers.{i}"
        parts = [("input", "post_attention", lambda x: self.attention(f"{p}.attention", x, part))]
        if encoded is not None:
            parts += [("cross", "cross", lambda x: self.cross(f"{p}.cross_attention", x, encoded))]
        parts += [("post_attention", "output", lambda x: self.mlp(f"{p}.mlp", x))]
        for before, after, function in parts:
            if self.config.norm == "pre":
                x = x + function(self.norm(f"{p}.{before}_layernorm", x))
            else:
                x = self.norm(f"{p}.{after}_layernorm", x + function(x))
        return x

    def embed(self, own):
        x = self.weights["embedding.word_embeddings.weight"][self.fields[:, TOKENS]]
        for name, field in (
            (f"{own}.position_embeddings", POSITION_IDS), ("embedding.block_position_embeddings", BLOCK_POSITION_IDS),
            ("embedding.segment_embeddings", SEGMENT_IDS),
        ):  # fmt: skip
            if f"{name}.weight" in self.weights:
                x = x + self.weights[f"{name}.weight"][self.fields[:, field]]
        return self.norm(f"{own}.layernorm", x) if f"{own}.layernorm.weight" in self.weights else x

    def loss(self):
        x = self.embed("embedding")
        for i in range(self.config.num_layers):
            x = self.block(i, x, ~self.is_target)
        if self.config.norm == "pre":
            x = self.norm("encoder_layernorm", x)
        y = self.embed("decoder_embedding")
        for i in range(self.config.num_layers, self.config.total_layers):
            y = self.block(i, y, self.is_target, x)
        if self.config.norm == "pre":
            y = self.norm("final_layernorm", y)
        words = self.weights["embedding.word_embeddings.weight"][: self.config.vocab_size]
        losses = F.cross_entropy(
            (y @ words.T).flatten(0, 1), self.fields[:, TARGETS].flatten(), reduction="none"
        )
        has_loss = (self.fields[:, WEIGHTS] != 0).flatten()
        return losses[has_loss].sum()


def results(model, fields, kernel="auto", dropout_seed=None, **options):
    data = MicroBatch.from_batch(
        Batch(fields), CPU, model.config, kernel=kernel, dropout_seed=dropout_seed, **options
    )
    loss, _ = model(data)
    return loss, torch.autograd.grad(loss, list(model.parameters()))


def assert_close(ours, expected):
    # The layers run in fp64; losses and their gradients pass through fp32.
    torch.testing.assert_close(ours[0].double(), expected[0].double(), rtol=1e-6, atol=0)
    for mine, theirs in zip(ours[1], expected[1], strict=True):
        assert (mine - theirs).abs().max() <= 1e-6 * max(1.0, theirs.abs().max())


@EACH_CONFIG
@pytest.mark.parametrize("name", ["t5", "bart", "mass"])
def test_the_model_equals_blocks_and_attention_written_out(config, name):
    model, fields = make(config), batch_of(name)
    weights = dict(model.named_parameters())
    expected = Reference(config, weights, fields).loss()
    gradients = torch.autograd.grad(expected, list(weights.values()))
    assert all(gradient.any() for gradient in gradients)
    for kernel, options in (("auto", {}), ("dense", {}), ("cpu", {"multiple": 16, "has_one_length": True})):
        assert_close(results(model, fields, kernel, **options), (expected, gradients))


@EACH_CONFIG
def test_the_calls_of_cuda_give_the_same(config, emulated_kernel, monkeypatch):
    model, fields = make(config), batch_of("mass")
    assert_close(results(model, fields, "varlen", multiple=64), results(model, fields))


@EACH_CONFIG
def test_padding_and_rows_that_fill_change_nothing(config):
    model, fields = make(config), batch_of("t5")
    assert_close(results(model, fields, multiple=64, few_counts=True), results(model, fields))


@EACH_CONFIG
def test_kernels_and_recomputation_drop_the_same(config):
    config = dataclasses.replace(config, **DROPOUTS)
    model, fields = make(config), batch_of("mass")
    expected = results(model, fields, "dense", dropout_seed=5)
    assert_close(results(model, fields, dropout_seed=5, multiple=8), expected)
    for recompute in ("selective", "full"):
        assert_close(results(make(config, recompute=recompute), fields, dropout_seed=5), expected)
    others = [results(model, fields, dropout_seed=seed)[0].item() for seed in (None, 6)]
    assert len({expected[0].item(), *others}) == 3


@EACH_CONFIG
def test_parameters_are_as_many_as_counted_and_named_as_published(config):
    model = make(config)
    assert parameter_count(config) == sum(p.numel() for p in model.parameters())
    names = {name for name, _ in model.named_parameters()}
    assert ("encoder_layernorm.weight" in names) == (config.norm == "pre")
    assert ("decoder_embedding.position_embeddings.weight" in names) == (config.positions != "none")
    assert ("decoder_embedding.layernorm.weight" in names) == config.embedding_norm
    cross = {name.split(".", 2)[2] for name in names if name.startswith("layers.2.cross")}
    weights = {
        "cross_layernorm.weight",
        *(f"cross_attention.{x}.weight" for x in ("query", "key_value", "dense")),
    }
    assert {name for name in cross if name.endswith("weight")} == weights
    assert not any("cross" in name for name in names if name.startswith(("layers.0", "layers.1")))


def test_published_sizes_are_counted():
    """T5 base without its two tables of distances [32, 12]; BART without the two unused rows of both tables."""
    common = {
        "embedding_norm": True,
        "norm": "post",
        "positions": "learned",
        "max_position": 1023,
        "vocab_size": 50265,
    }
    t5 = dataclasses.replace(
        T5, num_layers=12, decoder_layers=12, hidden_size=768, num_attention_heads=12, head_dim=None, ffn_size=3072,
        vocab_size=32128,
    )  # fmt: skip
    assert parameter_count(t5, padded=False) == 222_903_552 - 2 * 32 * 12
    for layers, hidden, heads, published in ((6, 768, 12, 139_420_416), (12, 1024, 16, 406_291_456)):
        bart = ModelConfig(
            num_layers=layers, decoder_layers=layers, hidden_size=hidden, num_attention_heads=heads, **common
        )
        assert parameter_count(bart, padded=False) == published - 2 * 2 * hidden


def test_the_decoder_sees_nothing_of_mass_hidden_fragment():
    """The loss does not depend on what replaces it, if the encoder has no block that mixes rows."""
    config = dataclasses.replace(BART, num_layers=1)
    model = make(config)
    with torch.no_grad():  # the encoder's rows do not see each other
        model.layers[0].attention.dense.weight.zero_()
    fields = batch_of("mass")
    hidden = fields[:, ORD] < 0
    losses = []
    for token in (1500, 1501):
        fields[:, TOKENS][hidden] = token
        losses.append(results(model, fields)[0].item())
    fields[:, TOKENS][(fields[:, ORD] == 0) & (fields[:, DOC] >= 0)] = 1500
    assert hidden.any() and losses[0] == losses[1] != results(model, fields)[0].item()


def test_a_batch_without_targets_has_no_loss_and_finite_gradients():
    fields = prefix_batch(0)
    fields[:, WEIGHTS] = 0
    fields[:, DOC] = np.where(fields[:, ORD] > 0, -1, fields[:, DOC])
    loss, gradients = results(make(BART), fields)
    assert loss == 0 and all(not gradient.any() for gradient in gradients)


# transformers' classes

PAIRS = [
    [(9, 5), (4, 7)],
    [(12, 3)],
    [(1, 1), (6, 6), (2, 4)],
]  # rows of documents: tokens of context and target


def pairs_batch():
    """int32 [rows, fields, 24], and the documents: context, input and labels of the decoder."""
    rng = np.random.default_rng(3)
    fields = np.zeros((len(PAIRS), len(FIELDS), 26), np.int32)
    fields[:, DOC] = -1
    weights, documents = fields[:, WEIGHTS].view(np.float32), []
    for row, lengths in enumerate(PAIRS):
        end = 0
        for number, (context, target) in enumerate(lengths):
            a, b, labels = (rng.integers(5, 90, size) for size in (context, target, target))
            start, middle, end = end, end + context, end + context + target
            fields[row, TOKENS, start:end] = np.r_[a, b]
            fields[row, POSITION_IDS, start:end] = np.r_[np.arange(context), np.arange(target)]
            fields[row, ORD, middle:end] = np.arange(1, target + 1)
            fields[row, TARGETS, middle:end] = labels
            fields[row, DOC, start:end] = number
            weights[row, middle:end] = 1.0
            documents.append([torch.from_numpy(x)[None] for x in (a, b, labels)])
    return fields, documents


def small(config, **changes):
    return dataclasses.replace(config, vocab_size=96, max_position=31, **changes)


def compare(ours, theirs, named_pairs):
    """Loss of all documents in packed rows against each by itself, and the gradients of tied pairs of tensors."""
    fields, documents = pairs_batch()
    loss, gradients = results(ours, fields)
    expected = sum(
        F.cross_entropy(theirs(input_ids=a, decoder_input_ids=b).logits[0], labels[0], reduction="sum")
        for a, b, labels in documents
    )
    torch.testing.assert_close(loss.double(), expected.double(), rtol=1e-5, atol=0)
    expected.backward()
    by_name = dict(zip((name for name, _ in ours.named_parameters()), gradients, strict=True))
    theirs_by_name = {name: parameter.grad for name, parameter in theirs.named_parameters()}
    used = set()
    for name, others, factors in named_pairs:
        parts = by_name[name].chunk(len(others))
        for part, other, factor in zip(parts, others, factors, strict=True):
            gradient = theirs_by_name[other].double() * factor
            part = part[: len(gradient)]
            assert (part - gradient[-len(part) :]).abs().max() <= 1e-5 * max(1.0, gradient.abs().max()), name
        used.add(name)
    assert used == set(by_name)


def copied(ours, theirs, named_pairs):
    """Write our weights to transformers' model."""
    state = dict(ours.named_parameters())
    with torch.no_grad():
        for name, others, factors in named_pairs:
            parts = state[name].chunk(len(others))
            for part, other, factor in zip(parts, others, factors, strict=True):
                parameter = theirs.get_parameter(other)
                parameter[len(parameter) - len(part[: len(parameter)]) :] = part[: len(parameter)] * factor


def bart_pairs(config):
    """Our name, theirs in order of rows, and what ours is multiplied by."""

    def pair(name, *others):
        kinds = ("weight", "bias")
        return [
            (f"{name}.{kind}", [f"{other}.{kind}" for other in others], [1.0] * len(others)) for kind in kinds
        ]

    found = [("embedding.word_embeddings.weight", ["model.shared.weight"], [1.0])]
    for side, name in (("encoder", "embedding"), ("decoder", "decoder_embedding")):
        found.append((f"{name}.position_embeddings.weight", [f"model.{side}.embed_positions.weight"], [1.0]))
        found += pair(f"{name}.layernorm", f"model.{side}.layernorm_embedding")
    for i in range(config.total_layers):
        side, number = ("encoder", i) if i < config.num_layers else ("decoder", i - config.num_layers)
        a, b = f"model.{side}.layers.{number}", f"layers.{i}"
        found += pair(f"{b}.attention.query_key_value", *(f"{a}.self_attn.{x}_proj" for x in "qkv"))
        found += pair(f"{b}.attention.dense", f"{a}.self_attn.out_proj")
        found += pair(f"{b}.post_attention_layernorm", f"{a}.self_attn_layer_norm")
        if side == "decoder":
            found += pair(f"{b}.cross_attention.query", f"{a}.encoder_attn.q_proj")
            found += pair(f"{b}.cross_attention.key_value", *(f"{a}.encoder_attn.{x}_proj" for x in "kv"))
            found += pair(f"{b}.cross_attention.dense", f"{a}.encoder_attn.out_proj")
            found += pair(f"{b}.cross_layernorm", f"{a}.encoder_attn_layer_norm")
        found += pair(f"{b}.mlp.dense_h_to_4h", f"{a}.fc1") + pair(f"{b}.mlp.dense_4h_to_h", f"{a}.fc2")
        found += pair(f"{b}.output_layernorm", f"{a}.final_layer_norm")
    return found


@pytest.mark.parametrize("scale", [False, True])
def test_bart_and_mass_arithmetic_matches_transformers(scale):
    """MASS is BART with scaled embeddings."""
    from transformers import BartConfig, BartForConditionalGeneration

    config = small(BART, scale_embedding=scale)
    theirs = BartForConditionalGeneration(
        BartConfig(
            vocab_size=96, d_model=32, encoder_layers=2, decoder_layers=3, encoder_attention_heads=4,
            decoder_attention_heads=4, encoder_ffn_dim=128, decoder_ffn_dim=128, max_position_embeddings=32,
            dropout=0.0, activation_function="gelu", scale_embedding=scale, pad_token_id=1,
        )
    ).double()  # fmt: skip
    ours, pairs = make(config), bart_pairs(config)
    copied(ours, theirs, pairs)
    compare(ours, theirs.eval(), pairs)


def t5_pairs(config):
    """T5 does not scale scores: the factor is in its queries here. Its distance tables are zeros."""
    scale = config.head_size**-0.5
    found = [("embedding.word_embeddings.weight", ["shared.weight"], [1.0])]
    found.append(("encoder_layernorm.weight", ["encoder.final_layer_norm.weight"], [1.0]))
    found.append(("final_layernorm.weight", ["decoder.final_layer_norm.weight"], [1.0]))
    for i in range(config.total_layers):
        side, number = ("encoder", i) if i < config.num_layers else ("decoder", i - config.num_layers)
        a, b = f"{side}.block.{number}.layer", f"layers.{i}"
        names = [f"{a}.0.SelfAttention.{x}.weight" for x in "qkv"]
        found.append((f"{b}.attention.query_key_value.weight", names, [scale, 1.0, 1.0]))
        found.append((f"{b}.attention.dense.weight", [f"{a}.0.SelfAttention.o.weight"], [1.0]))
        found.append((f"{b}.input_layernorm.weight", [f"{a}.0.layer_norm.weight"], [1.0]))
        last = 1
        if side == "decoder":
            last, cross = 2, f"{a}.1.EncDecAttention"
            found.append((f"{b}.cross_attention.query.weight", [f"{cross}.q.weight"], [scale]))
            names = [f"{cross}.{x}.weight" for x in "kv"]
            found.append((f"{b}.cross_attention.key_value.weight", names, [1.0, 1.0]))
            found.append((f"{b}.cross_attention.dense.weight", [f"{cross}.o.weight"], [1.0]))
            found.append((f"{b}.cross_layernorm.weight", [f"{a}.1.layer_norm.weight"], [1.0]))
        mlp = f"{a}.{last}.DenseReluDense"
        found.append((f"{b}.mlp.dense_h_to_4h.weight", [f"{mlp}.wi.weight"], [1.0]))
        found.append((f"{b}.mlp.dense_4h_to_h.weight", [f"{mlp}.wo.weight"], [1.0]))
        found.append((f"{b}.post_attention_layernorm.weight", [f"{a}.{last}.layer_norm.weight"], [1.0]))
    return found


def test_t5_arithmetic_without_distances_matches_transformers():
    from transformers import T5Config, T5ForConditionalGeneration

    config = small(T5, layernorm_epsilon=1e-6)
    theirs = T5ForConditionalGeneration(
        T5Config(
            vocab_size=96, d_model=32, d_kv=16, d_ff=40, num_layers=2, num_decoder_layers=3, num_heads=4,
            dropout_rate=0.0, feed_forward_proj="relu", tie_word_embeddings=True,
        )
    ).double()  # fmt: skip
    ours, pairs = make(config), t5_pairs(config)
    copied(ours, theirs, pairs)
    with torch.no_grad():
        for side in (theirs.encoder, theirs.decoder):
            side.block[0].layer[0].SelfAttention.relative_attention_bias.weight.zero_()
        # T5 multiplies the last norm's output by D^-1/2 before the head.
        theirs.decoder.final_layer_norm.weight *= 32**0.5
    pairs = [(n, o, [32**0.5] if n == "final_layernorm.weight" else f) for n, o, f in pairs]
    compare(ours, theirs.eval(), pairs)
