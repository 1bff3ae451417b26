"""The model options of BERT, SpanBERT, ALBERT, ERNIE and UniLM: against the papers' formulas, and in every layout."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from support.data.recipes import make, span_boundaries, text_of, vocabulary
from support.distributed import run_ranks
from support.training.whole_weights import compare_weights, placed_weights

from data_utils.common.batch_fields import (
    BLOCK_POSITION_IDS,
    DOC,
    OBJECTIVE,
    POSITION_IDS,
    SEGMENT_IDS,
    TARGETS,
    TOKENS,
    WEIGHTS,
    Example,
)
from data_utils.common.settings import build
from data_utils.loader.loader import collate
from data_utils.objectives import LOSS_NAMES, ObjectiveChoice, make_objective, objective_class
from megatron_lite.config.model import ModelConfig
from megatron_lite.config.sections import ParallelConfig
from megatron_lite.config.tree import Config
from megatron_lite.engine.plain import make_engine
from megatron_lite.train.callbacks.gradient_norms import GradientNorms
from megatron_lite.train.loss_normalizer import mean_scales
from megatron_lite.transformer.batch import Batch
from megatron_lite.transformer.flops import parameter_count, step_flops
from megatron_lite.transformer.init import initialize_parameters
from megatron_lite.transformer.kernels.dropout import keep_features
from megatron_lite.transformer.loss_positions import few_count, find_loss_positions
from megatron_lite.transformer.micro_batch import MicroBatch, prepare
from megatron_lite.transformer.transformer import Transformer

NAMES = ("masked_lm", "spanbert", "albert", "unilm")
SECTIONS = {"masked_lm": {"next_sentence": True}}
OPTIONS = {
    "segments": 6, "task_types": 64, "sentence_classes": 2, "span_boundary_places": 4, "embedding_size": 24,
    "sentence_dropout": 0.3,
}  # fmt: skip
SIZES = {
    "num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "vocab_size": 3000, "max_position": 80,
    "embedding_dropout": 0.0, "attention_dropout": 0.0, "output_dropout": 0.0,
}  # fmt: skip
SAMPLES = 8


def mixed_batch(seed: int, names=NAMES) -> np.ndarray:
    """Rows of two documents each, from all objectives that need more than GLM's layers."""
    choices = [
        ObjectiveChoice(name, objective_class(name).config_class(**SECTIONS.get(name, {}))) for name in names
    ]
    made = make_objective(choices, vocabulary(), 5, 72)
    chunks = [text_of(length, first=1000 + 40 * i) for i, length in enumerate((40, 20) * SAMPLES)]
    lengths = np.array([len(chunk) for chunk in chunks])
    samples = np.arange(seed * SAMPLES, (seed + 1) * SAMPLES)
    return collate(made, np.concatenate(chunks), lengths, np.full(SAMPLES, 2), samples)


def make_model(seed: int = 3, **options) -> Transformer:
    config = ModelConfig(**{**SIZES, **OPTIONS, **options})
    model = Transformer(config, num_losses=len(LOSS_NAMES))
    initialize_parameters(model.named_parameters(), config, seed)
    with torch.no_grad():  # zeros and ones would hide a mistake
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(0, 0.3)
    return model


def test_rows_are_sorted_by_the_head_that_predicts_them():
    batch = mixed_batch(0)
    weights = batch[:, WEIGHTS].copy().view(np.float32).reshape(-1)
    objectives = batch[:, OBJECTIVE].reshape(-1)
    found, labelled = find_loss_positions(weights, objectives, ModelConfig(**SIZES, **OPTIONS))
    names = [LOSS_NAMES[i] for i in objectives]
    rows = [i for i in range(len(weights)) if weights[i]]
    sentences = [i for i in rows if names[i] in ("next_sentence", "sentence_order")]
    assert found.sentences.tolist() == sentences and len(sentences) > 3
    assert found.tokens.tolist() == [i for i in rows if i not in sentences]
    expected = []
    for number, row in enumerate(batch):
        used = int((row[DOC] >= 0).sum())
        example = Example.from_fields(row[:, :used])
        if LOSS_NAMES[row[OBJECTIVE, 0]] == "masked_spans":
            boundaries = span_boundaries(example)
            boundaries[:, :3] += number * row.shape[1]
            expected += [each for each in boundaries.tolist() if each[3] <= 4]  # the table has four places
    assert len(expected) > 5
    spans = labelled[len(found.tokens) : len(found.tokens) + len(found.boundaries)]
    assert spans.tolist() == [row for row, *_ in expected]
    # Places count from 1 there.
    assert found.boundaries.tolist() == [[a, b, place - 1] for _, a, b, place in expected]
    assert {LOSS_NAMES[i] for i in found.objectives[len(found.tokens) :]} == {
        "span_boundary", "next_sentence", "sentence_order",
    }  # fmt: skip


def reference_losses(model: Transformer, row: np.ndarray) -> dict[str, list[float]]:
    """The losses of one row without padding, each head written out from its paper on the model's own weights."""
    p = dict(model.named_parameters())
    inputs = MicroBatch.from_batch(
        Batch(row[None]), torch.device("cpu"), model.config, kernel="dense"
    )  # in row order
    ids = {field: torch.from_numpy(row[field].copy()).long() for field in (TOKENS, POSITION_IDS, SEGMENT_IDS)}
    embedded = (
        p["embedding.word_embeddings.weight"][ids[TOKENS]]
        + p["embedding.position_embeddings.weight"][ids[POSITION_IDS]]
        + p["embedding.block_position_embeddings.weight"][row[BLOCK_POSITION_IDS]]
        + p["embedding.segment_embeddings.weight"][ids[SEGMENT_IDS]]
        + p["embedding.task_embeddings.weight"][row[OBJECTIVE]]
    )
    hidden = F.linear(embedded, p["embedding.projection.weight"], p["embedding.projection.bias"])
    captured = []
    handle = model.layers[0].register_forward_pre_hook(lambda _, args: captured.append(args[0]))
    last = model.hidden_states(inputs.tokens, inputs.ids, inputs.plan)
    handle.remove()
    torch.testing.assert_close(captured[0], hidden)
    last = F.layer_norm(last, (32,), p["final_layernorm.weight"], p["final_layernorm.bias"], 1e-5)

    def gelu_norm(x, name):
        x = F.gelu(F.linear(x, p[f"{name}.dense.weight"], p[f"{name}.dense.bias"]), approximate="tanh")
        return F.layer_norm(x, x.shape[-1:], p[f"{name}.layernorm.weight"], p[f"{name}.layernorm.bias"], 1e-5)

    def token_loss(x, target):
        logits = x @ p["embedding.word_embeddings.weight"][:3000].T
        return F.cross_entropy(logits, torch.tensor(target)).item()

    losses: dict[str, list[float]] = {}
    example = Example.from_fields(row)
    boundaries = {r: rest for r, *rest in span_boundaries(example).tolist()}
    for i in np.flatnonzero(example.weights):
        name, target = LOSS_NAMES[row[OBJECTIVE, i]], int(row[TARGETS, i])
        if name in ("next_sentence", "sentence_order"):
            pooled = torch.tanh(
                F.linear(last[i], p["heads.sentence.dense.weight"], p["heads.sentence.dense.bias"])
            )
            logits = F.linear(
                pooled, p["heads.sentence.classifier.weight"], p["heads.sentence.classifier.bias"]
            )
            losses.setdefault(name, []).append(F.cross_entropy(logits, torch.tensor(target)).item())
            continue
        losses.setdefault(name, []).append(token_loss(gelu_norm(last[i], "heads.projection"), target))
        if name == "masked_spans" and boundaries[i][2] <= 4:
            before, after, place = boundaries[i]
            places = p["heads.span_boundary.place_embeddings.weight"]
            x = torch.cat([last[before], last[after], places[place - 1]])
            x = gelu_norm(gelu_norm(x, "heads.span_boundary.inner"), "heads.span_boundary.outer")
            losses.setdefault("span_boundary", []).append(token_loss(x, target))
    return losses


@torch.no_grad()
def test_every_head_computes_its_papers_formula():
    model, seen = make_model(), set()
    for row in mixed_batch(1):
        row = np.ascontiguousarray(row[:, row[DOC] >= 0])
        expected = reference_losses(model, row)
        loss, sums = model(MicroBatch.from_batch(Batch(row[None]), torch.device("cpu"), model.config))
        assert loss.item() == pytest.approx(sum(map(sum, expected.values())), rel=1e-5)  # fp32 sums
        for name, values in expected.items():
            total, weight = sums[LOSS_NAMES.index(name)].tolist()
            assert weight == len(values) and total == pytest.approx(sum(values), rel=1e-5)
        seen |= expected.keys()
    assert seen >= {
        "masked",
        "masked_spans",
        "span_boundary",
        "masked_ngrams",
        "next_sentence",
        "sentence_order",
    }


@torch.no_grad()
def test_albert_drops_out_what_its_classes_are_predicted_from():
    model, cpu = make_model(sentence_dropout=0.4), torch.device("cpu")
    inputs = MicroBatch.from_batch(Batch(mixed_batch(1)), cpu, model.config, dropout_seed=5)
    hidden = torch.randn(len(inputs.tokens), 32)
    _, classes = model.heads(hidden, inputs.loss_positions, model.final_layernorm, inputs.dropout)
    rows = inputs.loss_positions.sentences
    stays = keep_features(inputs.dropout.keys[rows], int(inputs.dropout.salts[-1, 3]), 32, 0.4)
    assert len(rows) > 8 and 0.5 < stays.float().mean() < 0.7
    pooled = torch.tanh(model.heads.sentence.dense(model.final_layernorm(hidden[rows])))
    torch.testing.assert_close(classes, model.heads.sentence.classifier(pooled * stays / 0.6))


@pytest.mark.parametrize("seed", [0, 1])
def test_rows_that_fill_change_nothing(seed):
    model, batch = make_model().double(), Batch(mixed_batch(seed))
    results = []
    for few_counts in (False, True):
        host = prepare(batch, torch.device("cpu"), model.config, few_counts=few_counts)
        host.scale_weights(np.arange(1, 1 + len(LOSS_NAMES), dtype=np.float32))
        inputs = host.to(torch.device("cpu"))
        loss, sums = model(inputs)
        results.append((inputs, loss, sums, torch.autograd.grad(loss, list(model.parameters()))))
    (inputs, loss, sums, grads), (filled, *others) = results
    for part in ("tokens", "boundaries", "sentences"):
        mine, theirs = (len(getattr(x.loss_positions, part)) for x in (inputs, filled))
        assert theirs == few_count(mine) > mine, part
    # The layers run in fp64; losses and their gradients pass through fp32.
    torch.testing.assert_close(others[0], loss, rtol=1e-6, atol=0)
    torch.testing.assert_close(others[1], sums, rtol=1e-5, atol=1e-6)
    for mine, theirs in zip(others[2], grads, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


def test_a_batch_without_loss_has_no_rows_to_fill():
    fields = mixed_batch(0)
    fields[:, WEIGHTS] = 0
    host = prepare(Batch(fields), torch.device("cpu"), make_model().config, few_counts=True)
    assert len(host.weight_objectives) == 0


def test_counts_are_few_and_close():
    counts = np.arange(5000)
    few = np.array([few_count(int(count)) for count in counts])
    assert (few >= counts).all() and (few - counts <= np.maximum(15, counts / 16)).all()
    assert len(np.unique(few[:257])) == 17 and len(np.unique(few[257:513])) == 16 == len(
        np.unique(few[1025:2049])
    )


OF_BLOCKS = {"attention": "layers.0.attention.", "ffn": "layers.0.mlp.", "all": "layers.0."}


@pytest.mark.parametrize("choice", OF_BLOCKS)
def test_shared_layers_are_one_of_the_first_block_run_again(choice):
    """Loss, gradients (the sum of all copies') and FLOPs equal a plain model's whose blocks hold copies."""
    shared, plain = make_model(share_layers=choice), make_model(seed=4)
    state = shared.state_dict()
    copies = {n.replace("layers.0.", "layers.1."): x for n, x in state.items() if OF_BLOCKS[choice] in n}
    assert copies and not copies.keys() & state.keys()
    assert state.keys() | copies.keys() == plain.state_dict().keys()
    plain.load_state_dict({**state, **copies})
    batch = MicroBatch.from_batch(Batch(mixed_batch(0)), torch.device("cpu"), plain.config)
    losses = [model(batch)[0] for model in (shared, plain)]
    assert torch.equal(*losses)
    for model, loss in zip((shared, plain), losses, strict=True):
        loss.backward()
        assert sum(p.numel() for p in model.parameters()) == parameter_count(model.config)
    theirs = {name: parameter.grad for name, parameter in plain.named_parameters()}
    for name, parameter in shared.named_parameters():
        copy = name.replace("layers.0.", "layers.1.")
        expected = theirs[name] + theirs[copy] if copy in copies else theirs[name]
        torch.testing.assert_close(parameter.grad, expected, rtol=1e-5, atol=1e-6)
    assert step_flops(shared.config, 9, 5, 11) == step_flops(plain.config, 9, 5, 11)


def test_parameters_of_the_ablation():
    """ALBERT's base model; 12 M with all shared as in arXiv:1909.11942."""
    given = {"system": "albert", "num_layers": 12, "hidden_size": 768, "num_attention_heads": 12}
    counts = {
        choice: parameter_count(build(ModelConfig, {**given, "vocab_size": 30000, "share_layers": choice}))
        for choice in ("all", "attention", "ffn", "none")
    }
    attention, ffn, norms = 4 * (768 * 768 + 768), 2 * 768 * 3072 + 768 + 3072, 4 * 768
    assert round(counts["all"] / 1e6) == 12
    assert counts["attention"] - counts["all"] == 11 * (ffn + norms)
    assert counts["ffn"] - counts["all"] == 11 * (attention + norms)
    assert counts["none"] - counts["all"] == 11 * (attention + ffn + norms)


def tree(parallel, **model):
    return {
        "model": {**SIZES, **OPTIONS, **model},
        "training": {"steps": 10, "precision": "fp32"},
        "batch": {"micro_batch_size": 2, "global_batch_size": SAMPLES},
        "optimizer": {"clip_grad_norm": 0.5},
        # Several buckets: a shared block's must not be reduced after the first of its uses.
        "deepspeed": {"zero_optimization": {"reduce_bucket_size": 3000}},
        "data": {"sequence_length": 72},
        "objectives": dict.fromkeys(NAMES, 1.0),
        "parallel": parallel,
        **SECTIONS,
    }  # fmt: skip


def train(context, settings):
    """Two steps; the second without rows for the sentence and the boundary head. Losses, norms (whole, and of each
    layer), weights."""
    config = build(Config, settings)
    engine = make_engine(config, context, len(LOSS_NAMES))
    size, accumulation = config.batch.micro_batch_size, config.batch.accumulation_steps(context.dp.size)
    records = []
    for step, names in enumerate((NAMES, ("masked_lm",))):
        samples = mixed_batch(step, names)
        if step:
            samples[:, WEIGHTS][samples[:, OBJECTIVE] == LOSS_NAMES.index("next_sentence")] = 0
        weight = float(np.count_nonzero(samples[:, WEIGHTS]))
        mine = [samples[(m * context.dp.size + context.dp.rank) * size :][:size] for m in range(accumulation)]
        layers = GradientNorms(config, context)
        with engine.observed_gradients(layers.add):
            result = engine.train_step(
                [engine.prepared(Batch(batch), step, 1.0 / weight) for batch in mine], lr=1e-3
            )
        sums = context.sum_losses(result.objective_sums)
        norms = layers.norms(engine.clip_divisor(result.grad_norm))
        records.append((sums, result.grad_norm, norms))
    return records, placed_weights(engine)


LAYOUTS = [
    # world, layout, shared layers
    (2, {"tensor_parallel_size": 2}, "all"),
    (4, {"tensor_parallel_size": 2, "sequence_parallel": True, "pipeline_parallel_size": 2}, "none"),
    (2, {"zero_stage": 3}, "attention"),
]
MORE_LAYOUTS = [
    (2, {"zero_stage": 2}, "all"),
    (2, {"zero_stage": 2}, "ffn"),
    (2, {"tensor_parallel_size": 2, "sequence_parallel": True}, "none"),
    (2, {"pipeline_parallel_size": 2}, "none"),
    (2, {"zero_stage": 3}, "all"),
    (4, {"tensor_parallel_size": 2, "sequence_parallel": True, "zero_stage": 2}, "attention"),
]

# Beside the blocks, under the names that metrics.jsonl has for their gradients.
LAYERS = {
    *(f"embedding.{name}_embeddings" for name in ("word", "position", "block_position", "segment", "task")),
    "embedding.projection", "final_layernorm", "heads.sentence", "heads.span_boundary", "heads.projection",
}  # fmt: skip


@pytest.fixture(scope="module")
def single():
    return {choice: run_ranks(train, 1, tree({}, share_layers=choice))[0] for choice in ("none", *OF_BLOCKS)}


@pytest.mark.parametrize(
    "world, parallel, shared",
    [*LAYOUTS, *(pytest.param(*layout, marks=pytest.mark.slow) for layout in MORE_LAYOUTS)],
)
def test_heads_and_options_are_the_same_in_every_layout(single, world, parallel, shared):
    """fp32: only the order of sums differs."""
    expected_records, expected_weights = single[shared]
    results = run_ranks(
        train, world, tree(parallel, share_layers=shared), parallel=ParallelConfig(**parallel)
    )
    for records, _ in results:
        for (sums, norm, layers), (expected_sums, expected_norm, expected_layers) in zip(
            records, expected_records, strict=True
        ):
            torch.testing.assert_close(sums, expected_sums, rtol=1e-6, atol=1e-6)
            assert norm == pytest.approx(expected_norm, rel=1e-5)
            assert math.hypot(*layers.values()) == pytest.approx(norm, rel=1e-5)
            assert layers == pytest.approx(expected_layers, rel=1e-5, abs=1e-7)
    blocks = {"layers.0"} if shared == "all" else {"layers.0", "layers.1"}
    assert {name for name in expected_records[0][2] if name.startswith("layers.")} == blocks
    assert expected_records[0][2].keys() - blocks == LAYERS
    assert all(norm > 0 for norm in expected_records[0][2].values())
    compare_weights([weights for _, weights in results], expected_weights)
    assert "heads.span_boundary.place_embeddings.weight" in expected_weights


def test_losses_become_means_of_their_own_rows():
    batch = mixed_batch(0)
    totals = [
        float(batch[:, WEIGHTS].view(np.float32)[batch[:, OBJECTIVE] == i].sum())
        for i in range(len(LOSS_NAMES))
    ]
    factors = np.arange(1.0, len(totals) + 1)
    before = batch.copy()
    halves = [Batch(half) for half in np.split(batch, 2)]
    assert totals == pytest.approx(sum(half.loss_divisors(len(totals)) for half in halves))
    weighed = [half.with_scaled_weights(mean_scales(factors, totals)) for half in halves]
    weights = np.concatenate([half.weights for half in weighed])
    for i, total in enumerate(totals):
        found = weights[batch[:, OBJECTIVE] == i].sum()
        assert found == pytest.approx(factors[i] if total else 0.0, rel=1e-5)
    assert all(half.fields is given.fields for half, given in zip(weighed, halves, strict=True))
    assert np.array_equal(batch, before)


def test_sections_say_which_segments_and_labels_they_make():
    for name, section in ((name, objective_class(name).config_class) for name in NAMES):
        config = section(**SECTIONS.get(name, {}))
        made = make(name, 72, **SECTIONS.get(name, {}))
        chunk, ones = text_of(60), np.ones(64, np.int64)
        batch = collate(made, np.tile(chunk, 64), ones * 60, ones, np.arange(64))
        labels = np.isin(
            batch[:, OBJECTIVE], [LOSS_NAMES.index(n) for n in ("next_sentence", "sentence_order")]
        )
        assert bool((labels & (batch[:, WEIGHTS] != 0)).any()) == config.has_sentence_label
        assert batch[:, SEGMENT_IDS].max() < config.segments
