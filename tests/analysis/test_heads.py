"""The importance of heads against differences of the loss, and what their removal is."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from support.transformer.batches import prefix_batch

from megatron_lite.analysis import heads as measures
from megatron_lite.analysis.heads import Examples, Head
from megatron_lite.config.model import ModelConfig
from megatron_lite.transformer.batch import Batch
from megatron_lite.transformer.init import initialize_parameters
from megatron_lite.transformer.micro_batch import MicroBatch
from megatron_lite.transformer.transformer import Transformer

CPU = torch.device("cpu")
SIZES = {
    "num_layers": 2, "hidden_size": 24, "num_attention_heads": 3, "vocab_size": 100, "max_position": 64,
    "init_std": 0.2, "embedding_dropout": 0.0, "attention_dropout": 0.0, "output_dropout": 0.0,
}  # fmt: skip


def model_of(**options):
    config = ModelConfig(**{**SIZES, **options})
    model = Transformer(config)
    initialize_parameters(model.named_parameters(), config, 3)
    return model.double().eval()


def examples(rows=4):
    return [Examples(Batch(prefix_batch(0, rows=rows)), np.arange(rows))]


def loss(model, fields):
    with torch.no_grad():
        return measures.loss_sum(model, MicroBatch.from_batch(Batch(fields), CPU, model.config)).item()


def scaled(model, head, factor):
    """A model whose head hands on `factor` of what it did."""
    with torch.no_grad():
        measures._columns(model, head).mul_(factor)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"share_layers": "all"},
        {"share_layers": "attention"},
        {"decoder_layers": 1},
        {"num_key_value_heads": 1, "positions": "rotary"},
    ],
    ids=str,
)
def test_importance_equals_differences_of_the_loss(options):
    model = model_of(**options)
    fields = prefix_batch(0, rows=4)
    found = measures.importance(model, examples())
    assert sum(map(len, found.values())) == len(measures.all_heads(model))
    for head in measures.all_heads(model):
        differences = []
        for row in fields:
            ends = []
            for factor in (1.001, 0.999):
                scaled(model, head, factor)
                ends.append(loss(model, row[None]))
                scaled(model, head, 1 / factor)
            differences.append(abs(ends[0] - ends[1]) / 0.002)
        expected = np.mean(differences)
        # The loss is an fp32 number of some tens of nats.
        assert found[head.group][head.number].item() == pytest.approx(expected, rel=0.02, abs=0.01)


def test_documents_of_one_example_are_one():
    model = model_of()
    (one,) = examples(4)
    together = measures.importance(model, [replace(one, owner=np.array([0, 0, 1, 1]))])
    fields = one.batch.fields
    split = [[Examples(Batch(fields[rows]), np.zeros(2, int))] for rows in ([0, 1], [2, 3])]
    parts = [measures.importance(model, pair) for pair in split]
    for name, values in together.items():
        torch.testing.assert_close(values, (parts[0][name] + parts[1][name]) / 2, rtol=1e-5, atol=1e-7)
    apart = measures.importance(model, [one])
    assert not torch.allclose(together["layer 0"], apart["layer 0"] * 2, rtol=1e-3)


def test_importance_of_tokens_is_the_mean_over_them():
    """Its sum over tokens is at least that of the whole example, whose derivatives may cancel."""
    model = model_of()
    (one,) = examples(1)
    by_token = measures.importance(model, [one], per_token=True)
    by_example = measures.importance(model, [one])
    for name, values in by_token.items():
        assert (values * one.batch.tokens >= by_example[name] * (1 - 1e-6)).all()
        assert not torch.allclose(values * one.batch.tokens, by_example[name], rtol=1e-2)


def test_a_removed_head_is_a_gate_of_0_and_comes_back():
    model = model_of()
    fields = prefix_batch(0, rows=2)
    whole, head = loss(model, fields), Head("layer 1", 2)
    groups = measures.projections(model)
    gates = {name: torch.ones(1, 3) for name in groups}
    gates[head.group][0, head.number] = 0.0
    given = MicroBatch.from_batch(Batch(fields), CPU, model.config)
    owners = {name: torch.zeros(len(given.tokens), dtype=torch.int64) for name in groups}
    with measures._gated(groups, gates, owners), torch.no_grad():
        gated = measures.loss_sum(model, given).item()
    with measures.without(model, [head]):
        assert loss(model, fields) == pytest.approx(gated, rel=1e-9) != whole
    assert loss(model, fields) == whole


def test_greedy_takes_the_cheapest_head_at_every_step():
    model = model_of()
    fields = prefix_batch(0, rows=2)
    score = lambda: -loss(model, fields)  # noqa: E731
    found = measures.greedy(model, score, 3)
    left, removed = measures.all_heads(model), []
    for head, after in found:
        costs = {}
        for one in left:
            with measures.without(model, [*removed, one]):
                costs[one] = score()
        assert max(costs, key=costs.get) == head and costs[head] == pytest.approx(after)
        left.remove(head)
        removed.append(head)
    each = measures.ablated(model, score, measures.all_heads(model))
    assert max(each, key=each.get) == found[0][0]
    only = measures.alone(model, score, measures.all_heads(model))
    with measures.without(model, [Head("layer 0", 0), Head("layer 0", 2)]):
        assert only[Head("layer 0", 1)] == score()


def test_the_least_important_heads_go_first_and_layers_keep_some():
    sizes = {
        "layer 0": torch.tensor([3.0, 4.0]),
        "layer 1": torch.tensor([0.6, 0.01]),
    }  # shares 0.6 0.8, 1.0 0.02
    assert measures.lowest(sizes, 2, keep=1) == [("layer 1", 1), ("layer 0", 0)]
    assert measures.lowest(sizes, 3, keep=1) == [("layer 1", 1), ("layer 0", 0)]
    assert measures.lowest(sizes, 3, keep=0) == [("layer 1", 1), ("layer 0", 0), ("layer 0", 1)]
    assert measures.lowest(sizes, 1, keep=1, removed=[Head("layer 1", 1)]) == [("layer 0", 0)]


def test_pruning_again_measures_between_the_steps():
    model = model_of()
    measured = []

    def measure():
        measured.append(measures.importance(model, examples()))
        return measured[-1]

    removed = measures.prune(model, measure(), 4, 2, measure, keep=0, raw=False)
    assert len(removed) == len(set(removed)) == 4 and len(measured) == 2
    assert all(measured[1][head.group][head.number] == 0 for head in removed[:2])
    assert measures.prune(model_of(), measured[0], 6, 6, measure, keep=1, raw=False) == measures.lowest(
        measured[0], 4, keep=1
    )
