"""Losses of tasks: against torch's own losses, sample by sample, and the same in every layout."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from support.distributed import run_ranks
from support.tasks.task_batches import CLASSES, VOCAB, sample, task_batch

from data_utils.common.batch_fields import Example
from data_utils.common.settings import build, merge
from megatron_lite.config.model import ModelConfig
from megatron_lite.config.sections import ParallelConfig
from megatron_lite.config.tree import Config
from megatron_lite.engine.plain import make_engine
from megatron_lite.transformer.batch import Batch
from megatron_lite.transformer.init import initialize_parameters
from megatron_lite.transformer.loss import LossTerms, cross_entropy
from megatron_lite.transformer.micro_batch import MicroBatch
from megatron_lite.transformer.predictions import token_scores
from megatron_lite.transformer.transformer import Transformer

CPU = torch.device("cpu")
HEADS = ("choices", "classes", "values", "tags", "spans")
LOSSES = ("cross_entropy", "hinge", "generative", "mix")
SIZES = {
    "num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "vocab_size": VOCAB, "max_position": 40,
    "embedding_dropout": 0.0, "attention_dropout": 0.0, "output_dropout": 0.0, "task_head": {"dropout": 0.0},
}  # fmt: skip


def head_options(head: str) -> dict:
    if head == "choices":
        return {}
    return {"task_head": {"type": head, "classes": CLASSES if head in ("classes", "tags") else 0}}


def make_model(head: str, options: dict) -> Transformer:
    config = build(ModelConfig, merge(merge(SIZES, head_options(head)), options))
    model = Transformer(config, num_losses=4)
    initialize_parameters(model.named_parameters(), model.config, 3)
    with torch.no_grad():
        for parameter in model.parameters():  # larger than initial weights: losses and gradients that differ
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(5)))
    return model


def hidden_of(model: Transformer, example: Example) -> torch.Tensor:
    """[S, D] after the final norm, of a document alone, under a mask of all pairs."""
    fields = np.stack([getattr(example, name).view(np.int32) for name in Example.__dataclass_fields__])
    batch = MicroBatch.from_batch(Batch(fields[None]), CPU, model.config, kernel="dense")
    return model.final_layernorm(model.hidden_states(batch.tokens, batch.ids, batch.plan))


def expected_loss(model: Transformer, head: str, loss: str, number: int) -> torch.Tensor:
    made = sample(head, number)
    hidden = [hidden_of(model, document) for document in made.documents]
    if head == "choices":
        logits = [model.heads.logits(x, model.embedding.word_embeddings) for x in hidden]
        scores = torch.stack(
            [
                -F.cross_entropy(
                    logits[p.document][p.positions], torch.tensor(p.targets).long(), reduction="sum"
                )
                / p.divisor
                for p in made.target_groups
            ]
        )
        right = scores[made.right]
        entropy = F.cross_entropy(scores[None], torch.tensor([made.right]))
        wrong = torch.cat([scores[: made.right], scores[made.right + 1 :]])
        return {
            "cross_entropy": entropy,
            "hinge": (1 + wrong - right).clamp(min=0).sum(),
            "generative": -right,
            "mix": entropy - right,
        }[loss]
    (part,) = made.target_groups
    rows = hidden[0][part.positions]
    kind = model.config.task_head.pooler_kind
    if model.heads.task.has_pooler and kind == "transform":
        rows = model.heads.projection(rows)
    elif model.heads.task.has_pooler:
        rows = {"tanh": torch.tanh, "gelu": F.gelu}[kind](model.heads.task.pooler(rows))
    if model.heads.task.pool is not None:
        whole = torch.cat([rows[0], hidden[0].max(0).values, hidden[0].mean(0)])
        rows = model.heads.task.pool(whole[None]).relu()
    outputs = model.heads.task.classifier(rows)
    targets = torch.tensor(part.targets).long()
    if head == "values":
        return (outputs[0, 0] - part.value) ** 2
    if head == "spans":
        ends = (
            F.cross_entropy(outputs[:, i][None], target[None])
            for i, target in zip((0, 1), targets, strict=True)
        )
        return sum(ends) / 2
    return F.cross_entropy(outputs, targets, reduction="sum")


CASES = [
    *(("choices", loss, False) for loss in LOSSES),
    *((head, "cross_entropy", pooled) for head in HEADS[1:] for pooled in (False, True)),
    *((head, "cross_entropy", "concat") for head in ("classes", "values")),
    *((head, "cross_entropy", "transform") for head in ("classes", "spans")),
    ("values", "cross_entropy", "gelu"),
]
POOLS = {
    False: {},
    True: {"task_head": {"pooler": True}},
    "concat": {"task_head": {"pool": "concat"}},
    "gelu": {"task_head": {"pooler": True, "pooler_kind": "gelu"}},
    "transform": {"task_head": {"pooler": True, "pooler_kind": "transform"}, "head_transform": True},
}


@pytest.mark.parametrize("head, loss, pooled", CASES)
def test_loss_and_gradients_equal_those_of_each_sample_alone(head, loss, pooled):
    model = make_model(head, POOLS[pooled])
    numbers = range(5)
    batch = task_batch(head, numbers, loss)
    total, sums = model(MicroBatch.from_batch(batch, CPU, model.config))
    expected = sum(expected_loss(model, head, loss, number) for number in numbers)
    # fp32, other orders of sums; the losses are of size 10.
    torch.testing.assert_close(total, expected, rtol=1e-5, atol=1e-5)
    assert sums[-1].tolist() == pytest.approx([total.item(), batch.loss_divisor]) and not sums[:-1].any()
    named = dict(model.named_parameters())
    grads = [torch.autograd.grad(x, list(named.values()), allow_unused=True) for x in (total, expected)]
    for name, ours, theirs in zip(named, *grads, strict=True):
        if theirs is None:
            assert ours is None or not ours.any(), name
        else:
            tolerance = 1e-5 * max(1.0, float(theirs.abs().max()))
            torch.testing.assert_close(ours, theirs, rtol=0, atol=tolerance, msg=name)


@pytest.mark.parametrize("head, pool", [*((head, "token") for head in HEADS), ("classes", "concat")])
def test_rows_that_fill_change_nothing(head, pool):
    """Few counts of rows, for kernels that are built for each: the same losses, gradients and answers."""
    model, results = make_model(head, {"task_head": {"pool": pool}}), []
    for few_counts in (False, True):
        batch = MicroBatch.from_batch(task_batch(head, range(5)), CPU, model.config, few_counts=few_counts)
        loss, _ = model(batch)
        grads = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
        answers, likeliest = model(batch, predict=True)
        results.append((len(batch.extra_inputs.positions), loss, grads, answers, likeliest))
    (rows, loss, grads, answers, likeliest), filled = results
    assert filled[0] % 16 == 0 and filled[0] > rows
    torch.testing.assert_close(filled[1], loss)
    torch.testing.assert_close(filled[3:], (answers, likeliest))
    for ours, theirs in zip(filled[2], grads, strict=True):
        assert (ours is None) == (theirs is None)
        if ours is not None:
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_weights_count_what_has_a_label():
    assert task_batch("choices", range(5)).loss_divisor == 5
    assert task_batch("spans", range(5)).loss_divisor == 5
    assert task_batch("choices", range(5)).loss_tokens > 0 == task_batch("classes", range(5)).loss_tokens
    tags = sum(len(sample("tags", n).target_groups[0].targets) for n in range(5))
    batch = task_batch("tags", range(5))
    assert batch.loss_divisor == tags and batch.loss_divisors(4).tolist() == [0, 0, 0, tags]


def test_scores_of_parts_are_log_probabilities():
    """Not divided; the flag says whether each target is the likeliest token."""
    model = make_model("choices", {})
    batch = task_batch("choices", range(4))
    scores, likeliest = model(MicroBatch.from_batch(batch, CPU, model.config), predict=True)
    expected, flags = [], []
    for number in range(4):
        made = sample("choices", number)
        for part in made.target_groups:
            hidden = hidden_of(model, made.documents[part.document])
            logits = model.heads.logits(hidden, model.embedding.word_embeddings)[part.positions]
            targets = torch.tensor(part.targets).long()
            expected.append(-F.cross_entropy(logits, targets, reduction="sum").item())
            flags.append(bool((logits.argmax(-1) == targets).all()))
    assert scores.tolist() == pytest.approx(expected, rel=1e-5)
    assert likeliest.tolist() == flags
    logits = model.heads.vocabulary_logits(torch.randn(6, 32), model.embedding.word_embeddings)
    best = logits[:, :VOCAB].argmax(-1)
    assert token_scores(logits, best, model.embedding.word_embeddings)[1].all()
    assert not token_scores(logits, (best + 1) % VOCAB, model.embedding.word_embeddings)[1].any()


@pytest.mark.parametrize("smoothing", [0.1, 0.5])
def test_label_smoothing_equals_torch(smoothing):
    """The columns that pad the vocabulary have no share."""
    generator = torch.Generator().manual_seed(0)
    logits = (3 * torch.randn(7, 16, generator=generator)).requires_grad_()
    targets = torch.randint(0, 11, (7,), generator=generator)
    weights = torch.rand(7, generator=generator)
    expected = F.cross_entropy(logits[:, :11], targets, reduction="none", label_smoothing=smoothing)
    (expected_grad,) = torch.autograd.grad((expected * weights).sum(), logits)
    ours = cross_entropy(logits * 1.0, targets, valid=11, terms=LossTerms(smoothing, 11))
    (grad,) = torch.autograd.grad((ours * weights).sum(), logits)
    torch.testing.assert_close(ours, expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(grad, expected_grad, rtol=1e-6, atol=1e-6)


def task_config(head: str, parallel: dict, pooled: bool | str) -> Config:
    options = {"task_head": {"dropout": 0.1}, "output_dropout": 0.1}
    for more in (POOLS[pooled], head_options(head)):
        options = merge(options, more)
    options = merge(SIZES, options)
    return build(
        Config,
        {
            "model": options,
            "training": {"steps": 3, "precision": "fp32", "label_smoothing": 0.1},
            "batch": {"micro_batch_size": 2, "global_batch_size": 4},
            "optimizer": {"lr": 0.01},
            "schedule": {"warmup_steps": 0},
            "data": {"sequence_length": 32},
            "parallel": parallel,
            "task": {"name": "test", "kind": "cloze", "reader": "jsonl"},
        },
    )


def train(context, head, parallel, pooled):
    """Three steps of 4 samples. Returns losses, norms and the final scores of samples that are not trained on."""
    engine = make_engine(task_config(head, parallel, pooled), context, 4)
    dp, records = context.dp, []
    for step in range(3):
        numbers = [range(4 * step + 2 * m, 4 * step + 2 * m + 2) for m in range(2)]
        batches = [task_batch(head, n) for n in numbers]
        weight = sum(batch.loss_divisor for batch in batches)
        mine = [engine.prepared(batch, 40 + step, 1 / weight) for batch in batches[dp.rank :: dp.size]]
        result = engine.train_step(mine, 0.01)
        sums = context.sum_losses(result.objective_sums)
        records.append((sums[-1].tolist(), result.grad_norm))
    return records, engine.predict(task_batch(head, range(100, 103)))[0]


LAYOUTS = {
    "TP": {"tensor_parallel_size": 2},
    "SP": {"tensor_parallel_size": 2, "sequence_parallel": True},
    "ZeRO 2": {"zero_stage": 2},
    "ZeRO 3": {"zero_stage": 3},
}
# Two layouts with one head; each head in all of them in slow runs.
ALWAYS = {"choices": ["SP"], "spans": ["ZeRO 2"]}


@pytest.mark.parametrize(
    ("head", "layouts"),
    [*ALWAYS.items(), *(pytest.param(head, [*LAYOUTS], marks=pytest.mark.slow) for head in HEADS)],
)
def test_every_layout_equals_one_process(head, layouts):
    """Dropout included. fp32: only the order of sums differs; Adam amplifies that where gradients vanish."""
    pooled = {"values": True, "classes": "concat"}.get(head, False)
    records, outputs = run_ranks(train, 1, head, {}, pooled)[0]
    for parallel in map(LAYOUTS.__getitem__, layouts):
        results = run_ranks(train, 2, head, parallel, pooled, parallel=ParallelConfig(**parallel))
        for theirs, their_outputs in results:
            for (sums, norm), (expected_sums, expected_norm) in zip(theirs, records, strict=True):
                assert sums == pytest.approx(expected_sums, rel=1e-4), parallel
                assert norm == pytest.approx(expected_norm, rel=1e-4), parallel
            torch.testing.assert_close(their_outputs, outputs, rtol=1e-3, atol=1e-3)
