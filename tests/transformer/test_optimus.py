"""OPTIMUS: two stacks and a latent vector, against transformers' classes and a dense reference."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from support.hf.published import write_random
from support.systems.latent import latent_batch, latent_config, random_sentences, sentence_fields
from torch.nn.functional import cross_entropy

from data_utils.common.batch_fields import FIELDS, ORD, POSITION_IDS, TARGETS, TOKENS, WEIGHTS
from data_utils.objectives import LOSS_NAMES
from megatron_lite.hf.published.source import open_published
from megatron_lite.hf.published.tensor_map import to_ours
from megatron_lite.models.optimus.config import latent_of
from megatron_lite.transformer.batch import Batch
from megatron_lite.transformer.build import build_model, model_spec
from megatron_lite.transformer.micro_batch import MicroBatch, prepare

CPU = torch.device("cpu")
# fp32, the same sums in another order; of the largest value.
TOLERANCE = 1e-5


def built(**changes):
    config = latent_config(**changes)
    model = build_model(config, len(LOSS_NAMES))
    with torch.no_grad():  # norms and biases that differ from their initial values
        generator = torch.Generator().manual_seed(3)
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return config, model


def prepared(config, fields, samples=None, **options):
    batch = latent_batch(fields, config, samples)
    return prepare(batch, CPU, config.model, decoder_config=config.decoder, **options).to(CPU)


def reconstructions(config, model, fields, z, **options):
    return model.reconstruction(prepared(config, fields, **options), z)


def close(ours, expected, tolerance=TOLERANCE):
    assert ours.shape == expected.shape
    assert (ours - expected).abs().max() <= tolerance * max(1.0, expected.detach().abs().max())


def test_parameters_are_counted_and_named():
    config, model = built()
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    assert shapes["latent.posterior.weight"] == (16, 32)
    assert shapes["latent.memory.weight"] == (3 * 32, 8)
    assert shapes["latent.embedding.weight"] == (32, 8)
    assert model_spec(config).shapes(config).keys() == shapes.keys()
    assert model_spec(config).count(config) == sum(p.numel() for p in model.parameters())


# The published architectures


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """GPT2LMHeadModel and BertForPreTraining of transformers, and ours with their weights."""
    settings, weights, theirs = {}, {}, {}
    for stack, case in (("encoder", "bert"), ("decoder", "gpt2")):
        path = tmp_path_factory.mktemp(stack)
        theirs[stack] = write_random(case, path)
        source = open_published(path)
        settings[stack] = {**source.settings, "attention_dropout": 0.0}
        weights[stack] = to_ours(source.theirs, source.mappings)
    config = latent_config(model=settings["encoder"], decoder=settings["decoder"], optimus={"latent_size": 6})
    model = build_model(config, len(LOSS_NAMES)).eval()
    with torch.no_grad():
        for stack, read in weights.items():
            for name, parameter in getattr(model, stack).named_parameters():
                parameter.zero_()
                values = read.read(name)
                parameter[: len(values)] = values
        for parameter in model.latent.parameters():
            parameter.normal_(0.0, 0.5, generator=torch.Generator().manual_seed(1))
    return config, model, theirs


@torch.no_grad()
def test_the_encoder_is_bert(published):
    config, model, theirs = published
    sentences = random_sentences(0, 3, 2)
    fields = sentence_fields(sentences)
    mu, logvar = model.posterior(prepared(config, fields))
    pooled = []
    for encoded, _ in (pair for row in sentences for pair in row):
        tokens = torch.tensor([[1, *encoded, 2]])
        pooled.append(theirs["encoder"].bert(tokens).pooler_output)
    expected = torch.cat(pooled) @ model.latent.posterior.weight.T
    close(torch.cat([mu, logvar], dim=1), expected)


@torch.no_grad()
def test_the_decoder_is_gpt2_with_a_cache_of_length_1(published):
    """The memory is a past key and value of each layer, positions begin at 1, W_D z is added to the embeddings."""
    config, model, theirs = published
    from transformers import DynamicCache

    gpt2 = theirs["decoder"]
    sentences = random_sentences(1, 2, 3)
    fields = sentence_fields(sentences)
    z = torch.randn(6, latent_of(config).latent_size, generator=torch.Generator().manual_seed(2))
    ours = reconstructions(config, model, fields, z)
    heads, layers = gpt2.config.n_head, gpt2.config.n_layer
    for number, (_, decoded) in enumerate(pair for row in sentences for pair in row):
        memory = (model.latent.memory.weight @ z[number]).view(layers, 1, heads, 1, -1)
        tokens = torch.tensor([[3, *decoded]])
        cache = DynamicCache()
        for layer in range(layers):
            cache.update(memory[layer], memory[layer], layer)
        embedded = gpt2.transformer.wte(tokens) + model.latent.embedding.weight @ z[number]
        positions = torch.arange(1, 1 + tokens.shape[1])[None]
        logits = gpt2(inputs_embeds=embedded, position_ids=positions, past_key_values=cache).logits[0]
        expected = cross_entropy(logits, torch.tensor([*decoded, 4]), reduction="sum")
        close(ours[number], expected)


# The ways of the latent vector


NO_DROPOUT: Any = SimpleNamespace(dropout=None, at_layer=lambda _: None, locally_at_layer=lambda _: None)


def dense_reference(model, config, decoded, z):
    """-log p of one sentence with plain matrix products: keys and values of the memory are put before the tokens'."""
    stack, sizes = model.decoder, config.decoder
    memory = (model.latent.memory.weight @ z).view(sizes.num_layers, -1)
    tokens = torch.tensor([3, *decoded])
    x = stack.embedding.word_embeddings.weight[tokens] + model.latent.embedding.weight @ z
    x = x + stack.embedding.position_embeddings.weight[torch.arange(1, 1 + len(tokens))]
    heads, size = sizes.num_attention_heads, sizes.head_size
    for layer, block in enumerate(stack.layers):
        normed = block.input_layernorm(x)
        q, k, v = block.attention.query_key_value(normed).view(len(x), 3, heads, size).unbind(1)
        k = torch.cat([memory[layer].view(1, heads, size), k])
        v = torch.cat([memory[layer].view(1, heads, size), v])
        scores = torch.einsum("qhd,khd->hqk", q, k) / size**0.5
        hidden = torch.ones(len(x), len(x) + 1, dtype=torch.bool).triu(2)
        scores = scores.masked_fill(hidden, float("-inf")).softmax(-1)
        out = torch.einsum("hqk,khd->qhd", scores, v).reshape(len(x), -1)
        x = x + block.attention.dense(out)
        x = x + block.mlp(block.post_attention_layernorm(x), NO_DROPOUT, layer)
    logits = stack.logits(x)
    return cross_entropy(logits, torch.tensor([*decoded, 4]), reduction="sum")


@pytest.mark.parametrize("kernel", ["cpu", "dense"])
def test_the_slot_is_a_key_and_value_before_the_tokens(kernel):
    config, model = built()
    sentences = random_sentences(3, 2, 3)
    z = torch.randn(6, 8, requires_grad=True)
    ours = reconstructions(config, model, sentence_fields(sentences), z, kernel=kernel)
    decoded = [pair[1] for row in sentences for pair in row]
    expected = torch.stack([dense_reference(model, config, each, z[i]) for i, each in enumerate(decoded)])
    close(ours, expected)
    gradients = torch.autograd.grad(
        ours.sum(), [z, *model.latent.parameters()], retain_graph=True, allow_unused=True
    )
    expected_gradients = torch.autograd.grad(
        expected.sum(), [z, *model.latent.parameters()], allow_unused=True
    )
    assert sum(gradient is not None for gradient in gradients) == 3  # z, memory, embedding
    for gradient, wanted in zip(gradients, expected_gradients, strict=True):
        if wanted is not None:
            close(gradient, wanted, 1e-4)  # sums over all sentences


def test_a_zero_memory_takes_its_share_of_attention():
    """A zero key scores 0, not minus infinity: z = 0 is not the same as no memory."""
    config, model = built(optimus={"embedding": False})
    sentences = random_sentences(4, 1, 2)
    with_slot = reconstructions(config, model, sentence_fields(sentences), torch.zeros(2, 8))
    without = latent_config(optimus={"embedding": False})
    fields = sentence_fields(sentences)
    model.latent.memory = None
    plain = reconstructions(without, model, fields, torch.zeros(2, 8))
    assert (with_slot - plain).abs().min() > 1e-3


def test_without_memory_the_decoder_is_the_plain_causal_run():
    config, model = built(optimus={"memory": False})
    model.latent.embedding.weight.data.zero_()
    sentences = random_sentences(5, 1, 2)
    fields = sentence_fields(sentences, memory=False)
    ours = reconstructions(config, model, fields, torch.randn(2, 8))
    for number, (_, decoded) in enumerate(sentences[0]):
        row = np.zeros((1, len(FIELDS), len(decoded) + 1), np.int32)
        row[0, TOKENS], row[0, TARGETS] = [3, *decoded], [*decoded, 4]
        row[0, POSITION_IDS] = row[0, ORD] = np.arange(len(decoded) + 1)
        row[:, WEIGHTS].view(np.float32)[:] = 1.0
        close(ours[number], model.decoder(MicroBatch.from_batch(Batch(row), CPU, config.decoder))[0])


def test_sentences_of_a_row_cannot_read_each_others_vector():
    """Another vector for one sentence leaves the others bit-equal."""
    config, model = built()
    fields = sentence_fields(random_sentences(6, 2, 3))
    z = torch.randn(6, 8)
    before = reconstructions(config, model, fields, z)
    z[2] += 1.0
    after = reconstructions(config, model, fields, z)
    assert (before == after).tolist() == [True, True, False, True, True, True]


def test_packed_padded_and_filled_sentences_are_those_alone():
    config, model = built()
    sentences = random_sentences(7, 2, 3)
    flat = [pair for row in sentences for pair in row]
    packed = prepared(config, sentence_fields(sentences, length=100), few_counts=True, multiple=64)
    mu, _ = model.posterior(packed)
    z = torch.randn(len(packed.extra_inputs.weight), 8)
    packed_losses = model.reconstruction(packed, z)
    assert packed.extra_inputs.weight.tolist() == [1.0] * 6 + [0.0] * (len(z) - 6)
    for number, pair in enumerate(flat):
        alone = prepared(config, sentence_fields([[pair]]))
        close(mu[number], model.posterior(alone)[0][0])
        close(packed_losses[number], model.reconstruction(alone, z[number : number + 1])[0])


# The loss


def test_the_loss_matches_the_formula():
    config, model = built(optimus={"free_bits": 0.02, "beta": 0.7, "init_std": 0.02})
    model.beta = 0.3
    fields = sentence_fields(random_sentences(8, 2, 2))
    batch = prepared(config, fields)
    loss, sums = model(batch)
    mu, logvar = model.posterior(batch)
    z = mu + (logvar / 2).exp() * batch.extra_inputs.noise
    rec = model.reconstruction(batch, z)
    kl = 0.5 * (mu**2 + logvar.exp() - logvar - 1)
    assert (kl > 0.02).any() and (kl <= 0.02).any()
    expected = rec.sum() + 0.3 * kl[kl > 0.02].sum()
    close(loss, expected)
    close(sums[LOSS_NAMES.index("reconstruction")], torch.stack([rec.sum(), torch.tensor(4.0)]))
    close(sums[LOSS_NAMES.index("kl")], torch.stack([kl.sum(), torch.tensor(4.0)]))
    assert sums.count_nonzero() == 4


def test_an_autoencoder_decodes_the_mean():
    config, model = built(optimus={"beta": 0.0})
    batch = prepared(config, sentence_fields(random_sentences(8, 2, 2)))
    loss, _ = model(batch)
    mu, _ = model.posterior(batch)
    assert torch.equal(loss, model.reconstruction(batch, mu).sum())


def test_a_noise_free_beginning_decodes_the_mean_while_the_weight_is_0():
    config, model = built(optimus={"noise_free": True})
    batch = prepared(config, sentence_fields(random_sentences(8, 2, 2)))
    mu, logvar = model.posterior(batch)
    drawn = mu + (logvar / 2).exp() * batch.extra_inputs.noise
    observed = []
    model.observe = lambda *seen: observed.append(seen[3])
    model.beta = 0.0
    assert torch.equal(model(batch)[0], model.reconstruction(batch, mu).sum())
    with torch.no_grad():
        sums = model(batch)[1]
    model.beta = 0.5
    with torch.no_grad():
        with_noise = model(batch)[1]
    row = LOSS_NAMES.index("reconstruction")
    close(with_noise[row, 0], model.reconstruction(batch, drawn).sum())
    assert sums[row, 0] != with_noise[row, 0]
    for z in observed:  # mutual information needs a draw from each posterior, also while the weight is 0
        close(z, drawn)


@pytest.mark.parametrize("width", [64, 256])
def test_latent_matrices_begin_at_the_scale_of_their_stack(width):
    """A given scale and trained stacks come first."""

    def stds(**options) -> dict[str, float]:
        sizes = {"hidden_size": width}
        decoder = {"hidden_size": width // 2}
        config = latent_config(model=sizes, decoder=decoder, optimus={"latent_size": 16, **options})
        latent = build_model(config, len(LOSS_NAMES)).latent
        return {name.split(".")[0]: float(p.detach().std()) for name, p in latent.named_parameters()}

    def are(found, posterior, memory, embedding):
        expected = {"posterior": posterior, "memory": memory, "embedding": embedding}
        assert found == pytest.approx(
            expected, rel=0.12
        )  # the smallest has 512 elements: 3.1 % is a standard error

    own, others = width**-0.5, (width // 2) ** -0.5
    are(stds(), own, others, others)
    are(stds(init_std=0.3), 0.3, 0.3, 0.3)
    are(stds(encoder_from="bert"), 0.02, others, others)
    are(stds(decoder_from="gpt2"), own, 0.02, 0.02)


def test_length_weighted_losses_are_divided_by_the_tokens():
    """Those between and with BOS and EOS, as the released code counts."""
    config, model = built(optimus={"length_weighted": True, "beta": 0.0})
    sentences = random_sentences(9, 1, 3)
    batch = prepared(config, sentence_fields(sentences))
    loss, _ = model(batch)
    mu, _ = model.posterior(batch)
    rec = model.reconstruction(batch, mu)
    lengths = torch.tensor([len(pair[1]) + 2 for pair in sentences[0]])
    close(loss, (rec / lengths).sum())


def test_the_noise_is_a_pure_function_of_seed_sample_and_sentence():
    config, _ = built()
    fields = sentence_fields(random_sentences(10, 2, 3))
    whole = latent_batch(fields, config, [7, 9]).noise
    assert np.array_equal(latent_batch(fields[1:], config, [9]).noise, whole[3:])
    assert len(np.unique(whole)) == whole.size
    assert not np.array_equal(latent_batch(fields, config, [7, 9], seed=6).noise, whole)


def test_noise_is_standard_normal():
    config = latent_config(optimus={"latent_size": 64})
    fields = sentence_fields([[([], [])] * 4] * 50)
    noise = latent_batch(fields, config).noise
    assert noise.shape == (200, 64)
    # 12,800 numbers: the standard errors of mean and variance are 0.009 and 0.0125; five of them.
    assert abs(noise.mean()) < 0.045 and abs(noise.var() - 1.0) < 0.0625


def test_a_batch_of_padding_has_no_loss():
    config, model = built()
    fields = sentence_fields([[([6], [6])]])
    padding = latent_batch(fields, config).padded(3)
    assert padding.loss_divisor == 1.0
    empty = latent_batch(fields[:0], config, []).padded(2)
    loss, sums = model(prepare(empty, CPU, config.model, decoder_config=config.decoder).to(CPU))
    assert loss == 0.0 and not sums.any()


def test_counts_leave_the_other_stack_out():
    """Each token sees the tokens before it in its own stack alone, and the slot."""
    config, _ = built()
    batch = latent_batch(sentence_fields([[([5, 6, 7], [8, 9])]]), config)
    assert batch.tokens == 5 + 4
    assert batch.decoder_keys == 1 + 2 + 3 + 4
    assert batch.visible_keys == 25 + 10
    assert batch.decoder_tokens == 4 and batch.loss_divisor == 1.0


def test_dropout_differs_between_the_stacks():
    options = {"attention_dropout": 0.2, "output_dropout": 0.2}
    config, model = built(model=options, decoder=options)
    fields = sentence_fields(random_sentences(11, 2, 3))
    first = model(prepared(config, fields, dropout_seed=1))[0]
    assert torch.equal(first, model(prepared(config, fields, dropout_seed=1))[0])
    assert not torch.equal(first, model(prepared(config, fields, dropout_seed=2))[0])
    assert not torch.equal(first, model(prepared(config, fields))[0])
