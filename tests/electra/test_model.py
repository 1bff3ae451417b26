"""Generator and discriminator: the golden row, transformers' classes, 50 steps of both, what is shared."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from support.hf.own_models import NO_DROPOUT
from support.systems.electra import batch_of, electra_config, ours_like, their_names, their_pair

from data_utils.common.batch_fields import (
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
from data_utils.common.losses import MASKED, REPLACED
from data_utils.objectives import LOSSES
from megatron_lite.engine.parameter_groups import parameter_groups
from megatron_lite.models.electra import model as electra_model
from megatron_lite.models.electra.batch import ElectraBatch
from megatron_lite.parallel.context import ParallelContext
from megatron_lite.train.loss_normalizer import mean_scales
from megatron_lite.transformer.attention_backends.layout import allowed
from megatron_lite.transformer.build import build_model, model_spec
from megatron_lite.transformer.micro_batch import prepare

CPU = torch.device("cpu")
SMALL = {"model": NO_DROPOUT}
# Two odd sizes, and embeddings as wide as the generator, or as the discriminator.
CASES = {
    "narrow embeddings": {},
    "odd": {
        "model": {"hidden_size": 36, "num_attention_heads": 3, "num_layers": 3, "ffn_size": 50, "embedding_size": 17},
        "electra": {"generator_size": 0.34, "generator_heads": 3},
    },
    "embeddings of the discriminator": {"model": {"embedding_size": None}, "electra": {"generator_size": 0.25}},
    "embeddings of the generator": {"model": {"embedding_size": 24}},
}  # fmt: skip


def case_config(name):
    changes = CASES[name]
    return electra_config(**{**changes, "model": {**NO_DROPOUT, **changes.get("model", {})}})


def inputs_of(batch, config, scale=True):
    made = prepare(batch, CPU, config.model)
    if scale:
        factors = np.ones(len(LOSSES))
        factors[REPLACED.number] = config.training.loss_weights["replaced"]
        made.scale_weights(mean_scales(factors, batch.loss_divisors(len(LOSSES))))
    return made.to(CPU)


def test_the_golden_row(monkeypatch):
    """Text 101 5 8 9 6 102, places 1, 3 and 4 chosen; the generator draws 7, 9 and 8. Its measures by hand."""
    config = electra_config(**SMALL, electra={"generator_heads": 2})
    row = np.zeros((1, len(FIELDS), 8), np.int32)
    row[:, DOC, 6:] = -1
    row[0, TOKENS, :6] = [101, 103, 8, 103, 6, 102]
    row[0, TARGETS, [1, 3, 4]] = [5, 9, 6]
    row[:, WEIGHTS].view(np.float32)[0, [1, 3, 4]] = 1.0
    row[0, POSITION_IDS, :6] = np.arange(6)
    seen = {}
    model = build_model(config, len(LOSSES))
    monkeypatch.setattr(electra_model, "draw", lambda *_: torch.tensor([7, 9, 8]))
    # Places 1 and 2 are called replaced: the first is, and 4 as well.
    scores = torch.tensor([-1.0, 0.3, 0.2, -0.1, -0.4, -2.0])
    monkeypatch.setattr(model, "scores", lambda batch: seen.update(tokens=batch.tokens) or scores)
    entropy = F.binary_cross_entropy_with_logits

    def kept(scores, label, **options):
        seen["label"] = label
        return entropy(scores, label, **options)

    monkeypatch.setattr(F, "binary_cross_entropy_with_logits", kept)
    batch = ElectraBatch(row, np.array([4]), 1)
    model.begin_evaluation()
    _, sums = model(inputs_of(batch, config, scale=False))
    assert seen["tokens"].tolist() == [101, 7, 8, 9, 8, 102]
    assert seen["label"].tolist() == [0, 1, 0, 0, 1, 0]
    entropies = np.log1p(np.exp(np.where([0, 1, 0, 0, 1, 0], -scores, scores)))
    assert sums[MASKED.number, 1] == 3
    assert sums[REPLACED.number].tolist() == pytest.approx([entropies.sum(), 6])
    assert model.measures(ParallelContext.alone(), 0.0) == pytest.approx(
        {"replaced_accuracy": 4 / 6, "replaced_recall": 1 / 2, "generator_accuracy": 1 / 3}
    )
    assert batch.loss_divisors(len(LOSSES))[[MASKED.number, REPLACED.number]].tolist() == [3, 6]


def their_loss(pair, batch, drawn):
    """Both means from the classes' logits. Args: drawn: of the chosen tokens, row by row."""
    generator, discriminator = pair
    fields = batch.fields
    tensors = torch.from_numpy(fields.astype(np.int64))
    visible = torch.from_numpy(allowed(fields[:, DOC], fields[:, ORD], fields[:, GRP]))
    visible |= torch.eye(visible.shape[1], dtype=torch.bool) & ~visible.any(-1, keepdim=True)
    more = {
        "attention_mask": visible[:, None],
        "position_ids": tensors[:, POSITION_IDS],
        "token_type_ids": tensors[:, SEGMENT_IDS],
    }
    chosen = torch.from_numpy(batch.weights > 0)
    logits = generator(tensors[:, TOKENS], **more).logits[chosen]
    targets = tensors[:, TARGETS][chosen]
    tokens = tensors[:, TOKENS].clone()
    tokens[chosen] = drawn
    label = torch.zeros(chosen.shape)
    label[chosen] = (drawn != targets).float()
    real = torch.from_numpy(fields[:, DOC] >= 0)
    scores = discriminator(tokens, **more).logits
    return F.cross_entropy(logits, targets), F.binary_cross_entropy_with_logits(scores[real], label[real])


def in_rows(batch, config, values):
    """Values [K] of our rows with loss, in the order of the batch's."""
    order = prepare(batch, CPU, config.model).plan.order
    chosen = batch.weights.reshape(-1)[order] > 0
    return values[torch.from_numpy(np.argsort(order[(order >= 0) & chosen]))]


@pytest.mark.parametrize("name", CASES)
def test_losses_and_gradients_match_the_classes(name):
    config = case_config(name)
    pair = their_pair(config)
    model = ours_like(config, pair)
    assert {n for n, _ in model.named_parameters()} == set(model_spec(config).shapes(config))
    assert model_spec(config).count(config) == sum(p.numel() for p in model.parameters())
    batch = batch_of(3)
    inputs = inputs_of(batch, config)
    loss, sums = model(inputs)
    _, drawn = model.generated(inputs)
    masked, wrong = their_loss(pair, batch, in_rows(batch, config, drawn))
    assert torch.isclose(sums[MASKED.number, 0], masked, rtol=1e-5)
    assert torch.isclose(sums[REPLACED.number, 0], 50 * wrong, rtol=1e-5)
    loss.backward()
    (masked + 50 * wrong).backward()
    named = [dict(each.named_parameters(remove_duplicate=False)) for each in pair]
    for ours, theirs in their_names(config).items():
        grad = model.get_parameter(ours).grad
        expected = torch.cat([named[number][part].grad for number, part in theirs])
        rows = (
            slice(1, len(expected)) if "word_embeddings" in ours else slice(len(expected))
        )  # no row of padding
        difference = (grad[: len(expected)] - expected)[rows].abs().max()
        assert difference <= 1e-5 * max(1.0, expected.abs().max()), ours


def test_what_is_drawn_has_no_gradient_and_both_stacks_share_their_tables():
    config = case_config("narrow embeddings")
    model = ours_like(config, their_pair(config))
    inputs = inputs_of(batch_of(2), config)
    inputs.weights[: len(inputs.loss_positions.tokens)] *= (
        1e-9  # the generator's own loss, which tells what is chosen
    )
    model(inputs)[0].backward()
    assert all(p.grad is None or p.grad.abs().max() < 1e-6 for p in model.generator.layers.parameters())
    assert model.encoder.embedding.word_embeddings.weight.grad.abs().max() > 1e-3
    assert model.generator.embedding.word_embeddings is model.encoder.embedding.word_embeddings
    assert model.generator.embedding.projection is not model.encoder.embedding.projection


@pytest.mark.slow
def test_fifty_steps_match_the_classes():
    """Under plain AdamW, each side on what our generator draws; both learn."""
    config = case_config("narrow embeddings")
    pair = their_pair(config, std=0.05)
    model = ours_like(config, pair)
    decays = parameter_groups(dict(model.named_parameters()), config)
    ours = torch.optim.AdamW(
        [{k: g[k] for k in ("params", "weight_decay")} for g in decays], lr=5e-4, eps=1e-6
    )
    named = [dict(each.named_parameters(remove_duplicate=False)) for each in pair]
    decay_of = {p: g["weight_decay"] for g in decays for p in g["params"]}
    groups, seen = [], set()
    for name, parts in their_names(config).items():
        parameters = [named[number][part] for number, part in parts]
        parameters = [p for p in parameters if id(p) not in seen]
        seen |= set(map(id, parameters))
        groups.append({"params": parameters, "weight_decay": decay_of[model.get_parameter(name)]})
    assert seen == {id(p) for each in pair for p in each.parameters()}
    theirs = torch.optim.AdamW(groups, lr=5e-4, eps=1e-6)
    losses = []
    for step in range(50):
        batch = batch_of(4, first=4 * (step % 10))
        batch.fields[:, TOKENS] += 4 * (batch.fields[:, TOKENS] < 4)  # their row of padding has no gradient
        inputs = inputs_of(batch, config)
        loss, _ = model(inputs)
        with torch.no_grad():
            drawn = in_rows(batch, config, model.generated(inputs)[1])
        masked, wrong = their_loss(pair, batch, drawn)
        for optimizer, value in ((ours, loss), (theirs, masked + 50 * wrong)):
            optimizer.zero_grad()
            value.backward()
            optimizer.step()
        losses.append((loss.item(), (masked + 50 * wrong).item()))
    found, expected = np.array(losses).T
    np.testing.assert_allclose(found, expected, rtol=1e-4)
    assert expected[-10:].mean() < expected[:10].mean() - 1.0
