import dataclasses

import numpy as np
import pytest
import torch
from support.data.recipes import RECIPES, collate, windows
from support.data.recipes import make as make_objective
from support.transformer.batches import prefix_batch
from support.transformer.kernels import interpreted_kernels

from data_utils.common.batch_fields import DOC, TARGETS, TOKENS, WEIGHTS
from data_utils.objectives import LOSS_NAMES
from megatron_lite.config.model import ModelConfig
from megatron_lite.transformer.batch import Batch
from megatron_lite.transformer.flops import parameter_count
from megatron_lite.transformer.init import initialize_parameters
from megatron_lite.transformer.kernels.dropout import keep_features
from megatron_lite.transformer.micro_batch import MicroBatch
from megatron_lite.transformer.transformer import Transformer

CPU = torch.device("cpu")
CONFIG = ModelConfig(
    num_layers=2, hidden_size=32, num_attention_heads=4, vocab_size=100, max_position=64,
    embedding_dropout=0.0, attention_dropout=0.0, output_dropout=0.0,
)  # fmt: skip


def make(config=CONFIG, seed=1, **options):
    model = Transformer(config, num_losses=3, **options)
    initialize_parameters(model.named_parameters(), config, seed)
    return model


def gradients(model, batch, kernel="auto", dropout_seed=None):
    loss, per_objective = model(
        MicroBatch.from_batch(Batch(batch), CPU, model.config, dropout_seed=dropout_seed, kernel=kernel)
    )
    grads = torch.autograd.grad(loss, list(model.parameters()))
    return loss, per_objective, grads


def test_initial_weights_are_a_pure_function_of_seed_and_name():
    one, two, other = (dict(make(seed=s).named_parameters()) for s in (1, 1, 2))
    deeper = dict(make(dataclasses.replace(CONFIG, num_layers=3)).named_parameters())
    for name, value in one.items():
        assert torch.equal(value, two[name])
        if "dense" not in name.rsplit(".", 2)[-2]:  # output projections depend on the depth by their scale
            assert torch.equal(value, deeper[name])
    assert not torch.equal(one["embedding.word_embeddings.weight"], other["embedding.word_embeddings.weight"])
    assert not torch.equal(one["layers.0.mlp.dense_h_to_4h.weight"], one["layers.1.mlp.dense_h_to_4h.weight"])


def test_initial_scales():
    model = make(dataclasses.replace(CONFIG, hidden_size=256, num_layers=8))
    expected = {
        "embedding.word_embeddings.weight": 0.02,
        "layers.3.attention.query_key_value.weight": 0.02,
        "layers.3.attention.dense.weight": 0.02 / 4,  # 1 / sqrt(2 x 8)
        "layers.3.mlp.dense_4h_to_h.weight": 0.02 / 4,
    }
    for name, std in expected.items():
        # 25600 draws or more: the standard deviation is known to 0.5 %, 4 sigma.
        drawn = model.get_parameter(name)[:100] if "word" in name else model.get_parameter(name)
        assert drawn.std().item() == pytest.approx(std, rel=0.02)
    assert not model.get_parameter("embedding.word_embeddings.weight")[100:].any()  # padding
    assert not model.get_parameter("layers.0.mlp.dense_h_to_4h.bias").any()
    assert model.get_parameter("final_layernorm.weight").eq(1).all()


@pytest.mark.parametrize("init", ["gpt2", "t5"])
def test_tables_may_begin_with_scales_of_their_own(init):
    """Only initial values of words and of positions change, by the factor of their scales."""
    config = dataclasses.replace(CONFIG, init=init)
    scaled = dataclasses.replace(config, init_words_std=0.5, init_positions_std=0.25)
    factors = {
        "embedding.word_embeddings.weight": 0.5 / (1.0 if init == "t5" else 0.02),
        "embedding.position_embeddings.weight": 0.25 / 0.02,
        "embedding.block_position_embeddings.weight": 0.25 / 0.02,
    }
    before, after = (dict(make(each).named_parameters()) for each in (config, scaled))
    assert factors.keys() < after.keys() == before.keys()
    for name, value in after.items():
        torch.testing.assert_close(value, before[name] * factors.get(name, 1.0), rtol=1e-6, atol=0)


def test_parameter_count_is_the_modules():
    assert parameter_count(CONFIG) == sum(p.numel() for p in make().parameters())


def test_plans_give_the_same_loss_and_gradients():
    model, batch = make(), prefix_batch(0)
    dense, prefix = gradients(model, batch, "dense"), gradients(model, batch, "cpu")
    # fp32, sums in another order.
    torch.testing.assert_close(dense[0], prefix[0], rtol=1e-6, atol=0)
    for a, b in zip(dense[2], prefix[2], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=2e-6)


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_every_objective_gives_the_same_with_and_without_padding(recipe, emulated_kernel):
    """Dense, in the order of the batch; calls, in their own order, with more and less padding; CUDA's two calls."""
    batch = collate(make_objective(recipe.name, 60, **recipe.config), windows(4, 60, 1))
    model = make(dataclasses.replace(CONFIG, vocab_size=4096)).double()
    model.num_losses = len(LOSS_NAMES)
    results = []
    kernels = [("dense", 1), ("cpu", 1), ("cpu", 256)]
    kernels += [] if recipe.name == "unilmv2" else [("varlen", 256)]
    for kernel, multiple in kernels:
        inputs = MicroBatch.from_batch(Batch(batch), CPU, model.config, kernel=kernel, multiple=multiple)
        loss, per_objective = model(inputs)
        results.append((loss, per_objective, torch.autograd.grad(loss, list(model.parameters()))))
    for loss, per_objective, grads in results[1:]:
        # The layers run in fp64; losses and their gradients pass through fp32.
        torch.testing.assert_close(loss, results[0][0], rtol=1e-6, atol=0)
        torch.testing.assert_close(per_objective, results[0][1], rtol=1e-5, atol=1e-6)
        for mine, theirs in zip(grads, results[0][2], strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_recompute_changes_nothing_with_dropout_on(recompute):
    batch = prefix_batch(0)
    config = dataclasses.replace(CONFIG, embedding_dropout=0.1, attention_dropout=0.1, output_dropout=0.1)
    expected = gradients(make(config), batch, dropout_seed=5)
    ours = gradients(make(config, recompute=recompute), batch, dropout_seed=5)
    assert torch.equal(expected[0], ours[0])
    for a, b in zip(expected[2], ours[2], strict=True):
        assert torch.equal(a, b)
    other = gradients(make(config), batch, dropout_seed=6)
    off = gradients(make(config), batch)
    assert len({expected[0].item(), other[0].item(), off[0].item()}) == 3


def test_loss_is_the_weighted_sum_over_loss_rows_only_and_splits_by_objective():
    model, batch = make(), prefix_batch(0)
    weights = batch[:, WEIGHTS].view(np.float32)
    weights *= np.random.default_rng(0).uniform(0.5, 2.0, weights.shape).astype(np.float32)
    inputs = MicroBatch.from_batch(Batch(batch), CPU, model.config, kernel="dense")
    loss, per_objective = model(inputs)
    hidden = model.hidden_states(inputs.tokens, inputs.ids, inputs.plan)
    logits = model.final_layernorm(hidden) @ model.embedding.word_embeddings.weight[:100].T
    each = torch.nn.functional.cross_entropy(
        logits, torch.from_numpy(batch[:, TARGETS]).flatten().long(), reduction="none"
    )
    expected = (each * torch.from_numpy(weights).flatten()).sum()
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)
    torch.testing.assert_close(
        per_objective.sum(0).float(),
        torch.stack([loss.detach(), torch.tensor(weights.sum())]),
        rtol=1e-6,
        atol=0,
    )
    assert (per_objective[:2, 1] > 0).all() and per_objective[2].eq(0).all()


def test_final_dropout_drops_what_the_head_takes():
    """After the final norm, by each token's key and place; nothing else changes."""
    model, batch = make(dataclasses.replace(CONFIG, final_dropout=0.4)), prefix_batch(0)
    inputs = MicroBatch.from_batch(Batch(batch), CPU, model.config, dropout_seed=5)
    loss, _ = model(inputs)
    rows = inputs.loss_positions.tokens
    vectors = model.final_layernorm(model.hidden_states(inputs.tokens, inputs.ids, inputs.plan)[rows])
    salt = inputs.dropout.features(0.4, -1, "final").salt
    stays = keep_features(inputs.dropout.keys[rows], salt, 32, 0.4)
    assert 0.5 < stays.float().mean() < 0.7
    logits = (vectors * stays / 0.6) @ model.embedding.word_embeddings.weight[:100].T
    each = torch.nn.functional.cross_entropy(logits, inputs.targets.long(), reduction="none")
    torch.testing.assert_close(loss, (each * inputs.weights).sum(), rtol=1e-5, atol=0)


def test_padding_vocabulary_rows_take_no_part():
    model, batch = make(), prefix_batch(0)
    weight = model.embedding.word_embeddings.weight
    assert len(weight) == 128
    before = gradients(model, batch)
    with torch.no_grad():
        weight[100:] = 1e4
    after = gradients(model, batch)
    assert torch.equal(before[0], after[0])
    assert not before[2][0][100:].any()


def test_no_loss_row_sees_the_token_it_predicts():
    """Changing the inputs after a row (in order) leaves it unchanged: causal within part B."""
    model, batch = make(), prefix_batch(1, rows=1, documents=1)
    weights = batch[0, WEIGHTS].view(np.float32)
    rows = np.flatnonzero(weights)
    assert len(rows) >= 2
    inputs = MicroBatch.from_batch(Batch(batch), CPU, model.config)
    base = model.hidden_states(inputs.tokens, inputs.ids, inputs.plan)
    changed = batch.copy()
    changed[0, TOKENS, rows[1] :] = (changed[0, TOKENS, rows[1] :] + 1) % 100
    inputs = MicroBatch.from_batch(Batch(changed), CPU, model.config)
    other = model.hidden_states(inputs.tokens, inputs.ids, inputs.plan)
    assert torch.equal(base[: rows[1]], other[: rows[1]])
    assert not torch.equal(base[rows[1]], other[rows[1]])


def test_embedding_gradient_shrink_scales_only_the_input_side():
    batch, name = prefix_batch(0), "embedding.word_embeddings.weight"
    losses, grads = {}, {}
    for alpha in (1.0, 0.5, 0.1):
        model = make(dataclasses.replace(CONFIG, embedding_gradient_shrink=alpha))
        losses[alpha], _, values = gradients(model, batch)
        grads[alpha] = dict(zip(dict(model.named_parameters()), values, strict=True))
    assert losses[1.0] == losses[0.5] == losses[0.1]
    # gradient = head part + alpha x input part, so differences give the input part twice.
    input_part = (grads[1.0][name] - grads[0.1][name]) / 0.9
    torch.testing.assert_close(input_part, (grads[1.0][name] - grads[0.5][name]) / 0.5, rtol=1e-4, atol=1e-6)
    used = np.unique(batch[:, TOKENS][batch[:, DOC] >= 0])
    unused = np.setdiff1d(np.arange(len(input_part)), used)
    assert input_part[used].abs().max() > 1e-3 and input_part[unused].abs().max() < 1e-6
    block = "layers.0.mlp.dense_h_to_4h.weight"
    assert torch.equal(grads[1.0][block], grads[0.1][block])


def test_the_kernels_of_gpus_give_the_same_model():
    """Where biases are added, what is kept for the backward pass, which gradients meet: on CPU, interpreted."""
    config = dataclasses.replace(
        CONFIG, vocab_size=20, embedding_dropout=0.1, attention_dropout=0.1, output_dropout=0.1
    )
    batch = prefix_batch(0, rows=1, length=20, vocab=20, documents=1)
    expected = gradients(make(config), batch, dropout_seed=5)
    with interpreted_kernels():
        ours = gradients(make(config), batch, dropout_seed=5)
    # fp32 sums in another order.
    torch.testing.assert_close(ours[0], expected[0], rtol=1e-6, atol=0)
    for mine, theirs in zip(ours[2], expected[2], strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=2e-6)
