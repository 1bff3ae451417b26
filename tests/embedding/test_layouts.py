"""A step of text pairs equals plain torch on the whole global batch, in every layout and in any number of chunks."""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from sentence_transformers.sentence_transformer.losses import MSELoss, MultipleNegativesRankingLoss
from support.distributed import run_ranks
from support.selection import slow_but

from data_utils.common.batch_fields import DOC, FIELDS, OBJECTIVE, PADDING_DOC, POSITION_IDS, TOKENS
from data_utils.common.losses import CONTRASTIVE
from data_utils.common.settings import build
from data_utils.objectives import LOSS_NAMES
from megatron_lite.config.sections import ParallelConfig
from megatron_lite.config.tree import Config
from megatron_lite.engine.plain import make_engine
from megatron_lite.models.text_pairs.batch import PairBatch
from megatron_lite.transformer.build import build_model
from megatron_lite.transformer.micro_batch import MicroBatch
from megatron_lite.transformer.pair_records import PairRecords

RECORDS, TEXTS, LENGTH, VOCABULARY, STEPS = 8, 3, 40, 96, 3
EXCLUDED = 5  # a record whose query is an earlier one's
TARGETS = np.random.default_rng(0).standard_normal((RECORDS, 32)).astype(np.float32) / 5  # of a teacher
SKIPPED = (3, 2)  # tokens of prompts that the mean leaves out


class Layout(NamedTuple):
    tensor: int = 1
    pipeline: int = 1
    data: int = 1
    size: int = RECORDS  # of a micro-batch
    zero: int = 1
    sequence: bool = False
    pooling: str = "mean"
    system: str = "bert"
    kind: str = (
        "pairs"  # with negatives; "twice": the query is its own positive; "teacher": the aim is vectors
    )

    @property
    def ranks(self) -> int:
        return self.tensor * self.pipeline * self.data


def config_of(layout: Layout) -> Config:
    tree = {
        "model": {
            "system": layout.system, "num_layers": 2, "hidden_size": 32, "num_attention_heads": 4,
            "vocab_size": VOCABULARY, "max_position": 64, "sentence_classes": 0,
            "decoder_layers": 2 * (layout.system == "t5"),
        },
        "objectives": {"contrastive": 1.0},
        "contrastive": {
            "query_length": 8, "document_length": 16,
            **({"loss": "mse"} if layout.kind == "teacher" else {"matryoshka_sizes": [32, 8]}),
        },
        "embedding": {"pooling": layout.pooling, "include_prompt": layout.pooling != "mean"},
        "training": {"steps": 10, "precision": "fp32"},
        "batch": {"micro_batch_size": layout.size, "global_batch_size": RECORDS},
        "optimizer": {"clip_grad_norm": 0.5},
        "parallel": {
            "tensor_parallel_size": layout.tensor, "pipeline_parallel_size": layout.pipeline,
            "sequence_parallel": layout.sequence, "zero_stage": layout.zero,
        },
    }  # fmt: skip
    return build(Config, tree)


@functools.cache
def drawn(step: int, kind: str) -> tuple[np.ndarray, PairRecords]:
    """The rows of a global batch: three texts of unequal lengths in each, one record lacks its negative."""
    generator = np.random.default_rng(step)
    fields = np.zeros((RECORDS, len(FIELDS), LENGTH), np.int32)
    fields[:, DOC] = PADDING_DOC
    is_text = np.ones((RECORDS, TEXTS), bool)
    is_text[2, 2] = False
    texts = np.arange(1, RECORDS * TEXTS + 1).reshape(RECORDS, TEXTS)
    if kind != "pairs":
        is_text, texts = is_text[:, :2], texts[:, :2]
    if kind == "twice":
        texts[:, 1] = texts[:, 0]
    for number, row in enumerate(fields):
        tokens = [generator.integers(5, VOCABULARY, generator.integers(5, 13)) for _ in range(TEXTS)]
        at = 0
        for text in np.flatnonzero(is_text[number]):
            chosen = tokens[0 if kind == "twice" else text]
            here = slice(at, at + len(chosen))
            row[TOKENS, here] = chosen
            row[POSITION_IDS, here] = np.arange(len(chosen))
            row[DOC, here] = text
            row[OBJECTIVE, here] = CONTRASTIVE.number
            at = here.stop
    fields[EXCLUDED] = 0
    fields[EXCLUDED, DOC] = PADDING_DOC
    is_counted = np.arange(RECORDS) != EXCLUDED
    texts = (texts * is_text).astype(np.uint64)
    return fields, PairRecords(0, texts, is_text, is_counted, np.zeros(RECORDS, np.float32))


def batch_of(layout: Layout, step: int, numbers: np.ndarray) -> PairBatch:
    fields, records = drawn(step, layout.kind)
    of_rows = np.where(records.is_counted[numbers], numbers, -1)
    prompt = SKIPPED if layout.pooling == "mean" else (0, 0)
    return PairBatch(
        fields[numbers], numbers, of_rows, records, pooling=layout.pooling, prompt_tokens=prompt,
        targets=TARGETS[numbers] if layout.kind == "teacher" else None,
    )  # fmt: skip


def plain_loss(unit: torch.Tensor, records: PairRecords) -> torch.Tensor:
    """The mean of softmax cross entropies at temperature 0.05, of vectors [records, texts, D] of length 1."""
    used = np.flatnonzero(records.is_counted)
    columns = [(j, c) for j in used for c in (1, 2) if records.is_text[j, c]]
    documents = torch.stack([unit[j, c] for j, c in columns])
    scores = unit[used, 0] @ documents.T / 0.05
    return F.cross_entropy(scores, torch.tensor([columns.index((j, 1)) for j in used]))


def plain_vectors(layout: Layout, dropout_seed: int | None) -> tuple[torch.Tensor, list[torch.nn.Parameter]]:
    """Of the first step's texts, [records, texts, D], by loops over them; and the parameters of the model."""
    config = config_of(layout)
    model = build_model(config, len(LOSS_NAMES))
    batch = batch_of(layout, 0, np.arange(RECORDS))
    data = MicroBatch.from_batch(batch, torch.device("cpu"), config.model, dropout_seed=dropout_seed)
    states = model.final_layernorm(model.run(data.tokens, data.ids, data.plan, data.dropout))
    order = (
        batch.fields[:, DOC].ravel() >= 0
    )  # with one process and no kernels the plan keeps the order of the tokens
    assert int(order.sum()) == int((data.tokens != 0).sum())
    doc, row = batch.fields[:, DOC].ravel()[order], np.repeat(np.arange(RECORDS), LENGTH)[order]
    vectors = torch.zeros(RECORDS, TEXTS, 32)
    for number in range(RECORDS):
        for text in range(TEXTS):
            mine = np.flatnonzero((row == number) & (doc == text))
            if len(mine):
                skipped = SKIPPED[text > 0] if layout.pooling == "mean" else 0
                chosen = {"mean": mine[skipped:], "cls": mine[:1], "last": mine[-1:]}[layout.pooling]
                vectors[number, text] = states[chosen].mean(0)
    return vectors, list(model.parameters())


def plain(layout: Layout) -> tuple[float, float]:
    """Loss and gradient norm of the first step: one graph. Without negatives by the classes of the package."""
    vectors, parameters = plain_vectors(layout, 0)
    records = drawn(0, layout.kind)[1]
    columns = [vectors[records.is_counted, text] for text in (0, 1)]
    if layout.kind == "teacher":
        targets = [torch.from_numpy(TARGETS[records.is_counted])] * 2
        columns = [F.normalize(each, dim=-1) for each in columns]
        loss = MSELoss(torch.nn.Identity()).compute_loss_from_embeddings(columns, targets)
    elif layout.kind == "twice":
        inner = MultipleNegativesRankingLoss(torch.nn.Identity(), scale=20.0)
        loss = sum(
            inner.compute_loss_from_embeddings([each[:, :size] for each in columns], None) for size in (32, 8)
        )
    else:
        loss = sum(plain_loss(F.normalize(vectors[..., :size], dim=-1), records) for size in (32, 8))
    loss.backward()
    norms = [p.grad.norm() for p in parameters if p.grad is not None]
    return loss.item(), torch.stack(norms).norm().item()


def train(context, layout: Layout) -> list[tuple[float, float]]:
    """Loss and gradient norm of each step, and the loss of an evaluation at the end."""
    engine = make_engine(config_of(layout), context, len(LOSS_NAMES))
    found = []
    for step in range(STEPS):
        per_pass = layout.size * layout.data
        batches = [
            batch_of(layout, step, np.arange(first, first + layout.size))
            for first in range(context.dp.rank * layout.size, RECORDS, per_pass)
        ]
        engine.set_step(step + 1)
        micro_batches = [engine.prepared(batch, step, 1.0 / (RECORDS - 1)) for batch in batches]
        result = engine.train_step(micro_batches, 1e-3)
        loss, weight, _ = context.sum_losses(result.objective_sums)[CONTRASTIVE.number].tolist()
        assert weight == RECORDS - 1
        found.append((loss / weight, result.grad_norm))
    loss, weight, _ = context.sum_losses(engine.evaluate(batches))[CONTRASTIVE.number].tolist()
    return [*found, (loss / weight, weight)]


@functools.cache
def one_process(layout: Layout) -> list[tuple[float, float]]:
    return run_ranks(train, 1, layout)[0]


@pytest.mark.parametrize(
    "layout",
    [
        *(Layout(pooling=pooling) for pooling in ("mean", "cls", "last")),
        Layout(pooling="cls", kind="twice"),
        Layout(kind="teacher"),
    ],
    ids=lambda layout: f"{layout.pooling}-{layout.kind}",
)
def test_one_process_equals_plain_torch(layout):
    assert one_process(layout)[0] == pytest.approx(plain(layout), rel=1e-5)


def test_the_same_text_twice_differs_by_dropout_alone():
    layout = Layout(pooling="cls", kind="twice")
    with torch.no_grad():
        (vectors, _), (without, _) = plain_vectors(layout, 0), plain_vectors(layout, None)
    is_there = drawn(0, "twice")[1].is_counted
    assert (vectors[is_there, 0] - vectors[is_there, 1]).abs().amax(1).min() > 0.1
    assert (without[:, 0] - without[:, 1]).abs().max() < 1e-6


USUAL = [
    Layout(tensor=2, data=2, size=4, sequence=True),
    Layout(data=2, size=4, zero=3),
    Layout(pipeline=2, size=2, kind="teacher"),
    Layout(data=2, size=2, system="t5"),
]
FURTHER = [
    Layout(size=2),
    Layout(data=2, size=2),
    Layout(data=4, size=1, zero=2),
    Layout(pipeline=2, data=2, size=2),
    Layout(pipeline=2, tensor=2, size=1, pooling="cls", kind="twice"),
    Layout(data=2, size=2, kind="teacher"),
]


@pytest.mark.parametrize(
    "layout",
    slow_but(USUAL, USUAL + FURTHER),
    ids=lambda layout: "-".join(f"{k}{v}" for k, v in layout._asdict().items()),
)
def test_layouts_equal_one_process(layout):
    parallel = ParallelConfig(tensor_parallel_size=layout.tensor, pipeline_parallel_size=layout.pipeline)
    expected = one_process(Layout(pooling=layout.pooling, system=layout.system, kind=layout.kind))
    for found in run_ranks(train, layout.ranks, layout, parallel=parallel):
        assert np.array(found) == pytest.approx(np.array(expected), rel=1e-5)
