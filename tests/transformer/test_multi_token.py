"""Multi-token prediction is the formula of DeepSeek-V3 around the block of transformers, on each document by itself."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from support.data.recipes import collate, make, windows
from support.hf.further_tokens import add_further
from support.hf.published import as_in_files, write_random

from data_utils.common.batch_fields import (
    DOC,
    FIELDS,
    OBJECTIVE,
    ORD,
    PADDING_DOC,
    POSITION_IDS,
    TARGETS,
    TOKENS,
    WEIGHTS,
)
from data_utils.common.errors import ConfigError
from data_utils.common.losses import MTP
from data_utils.common.settings import build, merge
from data_utils.objectives import LOSS_NAMES, LOSSES
from megatron_lite.config.model import ModelConfig
from megatron_lite.config.phase_plan import PhasePlan
from megatron_lite.config.tree import Config
from megatron_lite.finetune.setup import load_tree
from megatron_lite.hf.common.weights import Weights
from megatron_lite.hf.published.source import open_published
from megatron_lite.hf.published.tensor_map import to_ours
from megatron_lite.train.loss_normalizer import LossNormalizer
from megatron_lite.train.step import StepCounts, StepInputs
from megatron_lite.transformer.batch import Batch
from megatron_lite.transformer.flops import active_count, parameter_count, step_flops
from megatron_lite.transformer.micro_batch import MicroBatch
from megatron_lite.transformer.router import Router
from megatron_lite.transformer.transformer import Transformer

LENGTHS = [[9, 1, 12, 2], [3, 20]]  # tokens of the documents of each row; padding follows
WEIGHT = 0.3


def documents(vocabulary=97):
    rng = np.random.default_rng(3)
    # Token 0 is padding to the class, which gives it no gradient as an input.
    return [[rng.integers(1, vocabulary, n) for n in row] for row in LENGTHS]


def rows_of(documents, length=32):
    """As the objective `causal` makes them, without a token before a text."""
    fields = np.zeros((len(documents), len(FIELDS), length), np.int32)
    fields[:, DOC] = PADDING_DOC
    weights = fields[:, WEIGHTS].view(np.float32)
    for row, texts in enumerate(documents):
        end = 0
        for number, text in enumerate(texts):
            start, end = end, end + len(text)
            fields[row, TOKENS, start:end] = text
            fields[row, TARGETS, start : end - 1] = text[1:]
            weights[row, start : end - 1] = 1.0
            fields[row, [POSITION_IDS, ORD], start:end] = np.arange(len(text))
            fields[row, DOC, start:end], fields[row, OBJECTIVE, start:end] = number, 3
    return fields


def loaded(source, **options):
    model = Transformer(build(ModelConfig, {**source.settings, **options}), num_losses=len(LOSSES))
    weights = to_ours(source.theirs, source.mappings)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            read = weights.read(name)
            parameter.zero_()[: len(read)] = read
    return model


def test_loss_and_gradients_are_those_of_the_formula(tmp_path):
    """Of packed documents as of each alone; in one process, with the layer read from a directory."""
    theirs = write_random("glm4_moe", tmp_path)
    further = add_further(theirs, tmp_path)
    source = open_published(tmp_path)
    model, texts = loaded(source), documents()
    batch = Batch(rows_of(texts))
    data = MicroBatch.from_batch(batch, torch.device("cpu"), model.config)
    whole = [torch.from_numpy(text) for row in texts for text in row]
    first = torch.cat(
        [F.cross_entropy(theirs(t[None]).logits[0, :-1], t[1:], reduction="none") for t in whole]
    )
    second = torch.cat([further(theirs, t) for t in whole if len(t) > 2])
    (first.mean() + WEIGHT * second.mean()).backward()

    scales = np.ones(len(LOSSES), np.float32)
    scales[MTP.number] = WEIGHT / len(second) * len(first)
    data.scale_weights(scales)
    loss, sums = model(data)
    sums[MTP.number] /= scales[MTP.number]
    (loss / len(first)).backward()
    counts = {LOSSES[i].name: (loss.item(), n.item()) for i, (loss, n) in enumerate(sums) if n}
    assert counts == {
        "causal": (pytest.approx(first.sum().item(), rel=1e-5), len(first)),
        "mtp": (pytest.approx(second.sum().item(), rel=1e-5), len(second)),
    }
    assert len(second) == sum(max(0, n - 2) for row in LENGTHS for n in row)
    gradients = as_in_files({name: p.grad for name, p in theirs.named_parameters()})
    of_layer = {name: p.grad for name, p in further.named_parameters()}
    gradients |= further.in_files(of_layer, theirs.config.num_hidden_layers)
    expected = to_ours(Weights(source.theirs.shapes, gradients.__getitem__), source.mappings)
    largest = max(grad.abs().max() for grad in gradients.values())
    for name, parameter in model.named_parameters():
        if name.endswith("router.bias"):
            assert parameter.grad is None
        else:
            grad = parameter.grad[: expected.shapes[name][0]]
            torch.testing.assert_close(grad, expected.read(name), rtol=1e-5, atol=1e-5 * largest)
    # Its router counts tokens as those of the other blocks do.
    routers = [module for module in model.modules() if isinstance(module, Router)]
    chosen = model.config.experts.per_token
    assert [router.step_sums[: model.config.experts.count].sum() / chosen for router in routers] == [
        batch.tokens
    ] * 3
    with torch.no_grad():
        assert [LOSSES[i].name for i, (_, n) in enumerate(model(data)[1]) if n] == ["causal"]


@pytest.mark.parametrize("begin", ["eos", "none"])
@pytest.mark.parametrize("name", ["causal", "fill_in_middle"])
def test_the_target_is_the_token_after_the_next_of_the_document(name, begin):
    """Of every token that has a second successor there, and of the last but one where the last predicts the end."""
    rows = collate(make(name, 64, begin=begin), windows(6, 64, 1))
    further = Batch(rows).further
    for row, tokens, targets, weights in zip(rows, *further, strict=True):
        for number in range(row[DOC].max() + 1):
            here = np.flatnonzero(row[DOC] == number)
            text = row[TOKENS, here]
            predicted = max(0, len(text) - (1 if begin == "eos" else 2))
            assert np.array_equal(weights[here], np.arange(len(text)) < predicted)
            assert np.array_equal(tokens[here][:-1], text[1:])
            assert np.array_equal(targets[here][: max(0, len(text) - 2)], text[2:])
        assert not weights[row[DOC] == PADDING_DOC].any()


TREE = {
    "model": {
        "num_layers": 1, "hidden_size": 16, "num_attention_heads": 2, "vocab_size": 97, "mtp_layers": 1,
        "positions": "rotary", "attention_dropout": 0.0, "output_dropout": 0.0, "embedding_dropout": 0.0,
    },
    "objectives": {"causal": 1}, "training": {"steps": 2, "mtp_weight": WEIGHT}, "batch": {"micro_batch_size": 1},
}  # fmt: skip


def test_its_weight_is_of_the_mean_over_the_step():
    """On two ranks with two micro-batches each, of unequal lengths; the logged loss has no part of it."""
    config = build(Config, TREE)
    rng = np.random.default_rng(0)
    batches = [Batch(rows_of([[rng.integers(0, 97, n) for n in (3 * i + 2, 7)]])) for i in range(4)]
    inputs = [StepInputs([], StepCounts.zeros(len(LOSSES))) for _ in range(2)]
    for number, batch in enumerate(batches):
        of_rank = inputs[number % 2]
        of_rank.counts.add(batch, config.model)
        of_rank.micro_batch_divisors.append(batch.loss_divisor)
        of_rank.micro_batches.append(MicroBatch.from_batch(batch, torch.device("cpu"), config.model))
    model = Transformer(config.model, num_losses=len(LOSSES))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    plain = [model(data)[1] for of_rank in inputs for data in of_rank.micro_batches]
    expected = torch.stack(plain).sum(0)
    further, first = expected[MTP.number], expected[3]
    assert [further[1], first[1]] == [sum(3 * i + 5 for i in range(4)), sum(3 * i + 7 for i in range(4))]

    divisors = np.sum([each.counts.loss_divisors for each in inputs], axis=0).tolist()
    normalizer = LossNormalizer(config.phase_plan, LOSS_NAMES, 2)
    total, sums = 0.0, torch.zeros(len(LOSSES), 3, dtype=torch.float64)
    for of_rank in inputs:
        for data in normalizer.micro_batches(of_rank, divisors, 0):
            loss, of_losses = model(data)
            total += (loss * data.loss_factor).item()
            sums[:, :2] += of_losses
    means = {"loss/causal": (first[0] / first[1]).item(), "loss/mtp": (further[0] / further[1]).item()}
    assert total == pytest.approx(means["loss/causal"] + WEIGHT * means["loss/mtp"], rel=1e-5)
    shown = normalizer.means(sums.numpy(), 1)
    assert shown == pytest.approx({"loss": means["loss/causal"], **means}, rel=1e-5)


def test_a_phase_changes_its_weight():
    phases = [{"steps": 1}, {"mtp_weight": 0.1}]
    plan = PhasePlan(build(Config, merge(TREE, {"phases": phases, "data": {"train": [{"prefix": "x"}]}})))
    assert [plan.config(step).training.mtp_weight for step in range(2)] == [WEIGHT, 0.1]


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"objectives": {"causal": 1, "prefix_lm": 1}}, "objectives prefix_lm"),
        ({"training": {"loss_normalization": "per_objective"}}, "training.loss_normalization per_objective"),
        ({"parallel": {"zero_stage": 3}}, "parallel.zero_stage 3"),
        ({"model": {"share_layers": "all"}}, "model.share_layers all"),
        ({"model": {"decoder_layers": 1, "positions": "learned"}}, "objectives has causal|decoder_layers"),
    ],
)
def test_what_it_does_not_support_is_refused(changes, part):
    with pytest.raises(ConfigError, match=part):
        build(Config, merge(TREE, changes))


def test_its_weight_without_the_layer_is_refused():
    with pytest.raises(ConfigError, match=r"mtp_weight is 0\.1, but model\.mtp_layers is 0; set that to 1"):
        build(Config, merge(TREE, {"model": {"mtp_layers": 0}, "training": {"mtp_weight": 0.1}}))


def test_fine_tuning_leaves_it_out():
    pretrained = merge(TREE, {"training": {"mtp_weight": 0.1}})
    tree = load_tree([], None, ["task.kind=classification"], pretrained)
    assert "mtp_layers" not in tree["model"] and "mtp_weight" not in tree["training"]
    task = {
        "name": "mine",
        "reader": "jsonl",
        "kind": "seq2seq",
        "train": "a.jsonl",
        "validation": ["b.jsonl"],
    }
    with pytest.raises(ConfigError, match=r"mtp_layers is 1 with task\.kind seq2seq"):
        build(Config, merge(TREE, {"task": task}))


def test_counts_of_the_layer():
    """Parameters and FLOPs: a further block, the product that joins its inputs, four norms, and the head again."""
    changes = {"experts": {"count": 4, "per_token": 2, "width": 12}, "biases": "none", "ffn": "gated"}
    tree = {**TREE["model"], **changes, "rms_norm": True}
    with_layer, without, deeper = (
        build(ModelConfig, {**tree, **sizes})
        for sizes in ({}, {"mtp_layers": 0}, {"mtp_layers": 0, "num_layers": 2})
    )
    for count in (parameter_count, active_count):
        assert count(with_layer) - count(deeper) == 2 * 16 * 16 + 3 * 16
    difference = step_flops(with_layer, 100, 150, 900) - step_flops(deeper, 100, 150, 900)
    assert difference == 6 * 100 * 2 * 16 * 16 and step_flops(without, 100, 150, 900) < step_flops(
        deeper, 100, 150, 900
    )
    batch, counts = Batch(rows_of(documents())), StepCounts.zeros(len(LOSSES))
    counts.add(batch, with_layer)
    assert counts.loss_tokens == sum(max(0, n - 1) + max(0, n - 2) for row in LENGTHS for n in row)
