"""Data-parallel ZeRO against one process: loss, gradient norm and weights after three AdamW steps."""

import numpy as np
import pytest
import torch
from batches import prefix_batch
from distributed import run_ranks

from data_utils.objectives.base import WEIGHTS
from megatron_lite.boxes import matrix_shape, whole_shape
from megatron_lite.config import Config, ParallelConfig
from megatron_lite.deepspeed_options import deepspeed_options
from megatron_lite.engine import MicroBatch, make_engine
from megatron_lite.errors import ConfigError
from megatron_lite.settings import build, merge

SAMPLES, STEPS = 8, 3


def tree(**sections):
    base = {
        "model": {
            "num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "vocab_size": 500, "max_position": 512,
            "embedding_dropout": 0.0, "attention_dropout": 0.0, "output_dropout": 0.0,
        },
        "training": {"steps": 10, "precision": "fp32"},
        "batch": {"micro_batch_size": 2, "global_batch_size": SAMPLES},
        "optimizer": {"clip_grad_norm": 0.5},
    }  # fmt: skip
    return merge(base, sections)


def train(context, settings, poison_step=None):
    """STEPS steps on fixed samples, spread over micro-batches and ranks; unequal loss-token counts everywhere."""
    config = build(Config, settings)
    engine = make_engine(config, context, num_objectives=3)
    size, accumulation = config.batch.micro_batch_size, config.batch.accumulation_steps(context.dp.size)
    records = []
    for step in range(STEPS):
        samples = prefix_batch(step, rows=SAMPLES, vocab=500)
        weight = float(np.count_nonzero(samples[:, WEIGHTS]))
        mine = [samples[(m * context.dp.size + context.dp.rank) * size :][:size] for m in range(accumulation)]
        poisoned = step == poison_step and context.dp.rank == context.dp.size - 1
        factor = float("nan") if poisoned else 1.0 / weight
        result = engine.train_step([MicroBatch(batch, step, factor) for batch in mine], lr=1e-3)
        sums = result.objective_sums if context.counts_losses else torch.zeros_like(result.objective_sums)
        records.append((context.sum(sums)[:, 0].sum().item() / weight, result))
    return records, own_weights(engine)


def own_weights(engine):
    """The fp32 weights this rank owns at their place in the whole: {name: matrix with NaN elsewhere}."""
    weights = {}
    for fragment in engine.fragments():
        shape = whole_shape(fragment.shape, fragment.partition, fragment.tp.size)
        matrix = weights.setdefault(fragment.name, torch.full(matrix_shape(shape), float("nan")))
        for run in fragment.runs():
            values = fragment.tensors["weight"][run.start - fragment.start : run.stop - fragment.start]
            box = run.box
            matrix[box.row : box.row_stop, box.column : box.column_stop] = values.detach().view(box.shape)
    return weights


@pytest.fixture(scope="module")
def single():
    return run_ranks(train, 1, tree())[0]


@pytest.mark.parametrize(
    "world_size, zero_stage, micro",
    [(1, 2, 1), (2, 1, 2), (2, 2, 1), (4, 2, 2), (4, 1, 1), (1, 3, 2), (2, 3, 2), (4, 3, 1)],
)
def test_every_layout_equals_one_process(single, world_size, zero_stage, micro):
    settings = tree(parallel={"zero_stage": zero_stage}, batch={"micro_batch_size": micro})
    compare(run_ranks(train, world_size, settings), single)


def compare(results, single):
    """Loss, gradient norm and weights of every rank against one process; together the ranks own every weight."""
    for name, expected in single[1].items():
        assert not expected.isnan().any()
        covered = torch.zeros_like(expected, dtype=torch.bool)
        for _, weights in results:
            if name not in weights:
                continue
            owned = ~weights[name].isnan()
            covered |= owned
            # Three steps of at most 1e-3 each; Adam's division amplifies differences where gradients are near 0.
            torch.testing.assert_close(
                weights[name][owned], expected[owned], rtol=1e-4, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}"
            )
        assert covered.all(), name
    for records, _ in results:
        for (loss, result), (expected_loss, expected) in zip(records, single[0], strict=True):
            # fp32: only the order of sums differs; measured 7e-8 in loss, 3e-7 in norm.
            assert loss == pytest.approx(expected_loss, rel=1e-6)
            assert result.grad_norm == pytest.approx(expected.grad_norm, rel=1e-5)
            assert not result.skipped and result.grad_norm > 0.5  # clipping was active


LAYOUTS = [
    # world, tensor, pipeline, sequence parallel, zero, micro batch, recompute
    (2, 2, 1, False, 1, 2, "none"),
    (2, 2, 1, True, 2, 2, "full"),
    (4, 2, 1, True, 1, 2, "selective"),
    (4, 4, 1, False, 2, 4, "none"),
    (2, 2, 1, False, 3, 2, "none"),
    (4, 2, 1, True, 3, 2, "full"),
    (2, 1, 2, False, 1, 2, "none"),
    (4, 1, 2, False, 1, 1, "selective"),
    (4, 2, 2, False, 1, 2, "none"),
    (4, 2, 2, True, 1, 2, "full"),
    (8, 2, 2, True, 1, 2, "none"),
]


@pytest.mark.parametrize("world_size, tp, pp, sequence_parallel, zero_stage, micro, recompute", LAYOUTS)
def test_every_3d_layout_equals_one_process(
    single, world_size, tp, pp, sequence_parallel, zero_stage, micro, recompute
):
    parallel = {
        "tensor_parallel_size": tp,
        "pipeline_parallel_size": pp,
        "sequence_parallel": sequence_parallel,
        "zero_stage": zero_stage,
    }
    settings = tree(parallel=parallel, batch={"micro_batch_size": micro}, training={"recompute": recompute})
    compare(run_ranks(train, world_size, settings, parallel=ParallelConfig(**parallel)), single)


@pytest.mark.parametrize("precision, zero_stage", [("bf16", 1), ("bf16", 2), ("fp16", 1), ("fp16", 2)])
def test_half_precision_follows_fp32(single, precision, zero_stage):
    settings = tree(training={"precision": precision}, parallel={"zero_stage": zero_stage})
    records, _ = run_ranks(train, 2, settings)[0]
    for (loss, result), (expected_loss, expected) in zip(records, single[0], strict=True):
        # bf16 keeps 8 bits: losses agree to about 1e-4, norms to 3e-3 (measured).
        assert loss == pytest.approx(expected_loss, rel=1e-3)
        assert result.grad_norm == pytest.approx(expected.grad_norm, rel=2e-2)
        assert result.loss_scale == (65536.0 if precision == "fp16" else 1.0)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("zero_stage", [1, 2])
def test_a_non_finite_gradient_on_one_rank_is_skipped_by_all(precision, zero_stage):
    settings = tree(training={"precision": precision}, parallel={"zero_stage": zero_stage})
    results = run_ranks(train, 2, settings, 1)
    for records, weights in results:
        assert [result.skipped for _, result in records] == [False, True, False]
        for weight in weights.values():
            assert not weight.isinf().any() and weight.isfinite().any()


def test_the_deepspeed_dictionary_is_derived():
    config = build(
        Config,
        tree(deepspeed={"zero_optimization": {"reduce_bucket_size": 1000}, "wall_clock_breakdown": True}),
    )
    options = deepspeed_options(config, dp_size=2)
    assert options["gradient_accumulation_steps"] == 2 and options["gradient_clipping"] == 0.5
    assert options["zero_optimization"] == {"reduce_bucket_size": 1000, "stage": 1}
    assert options["wall_clock_breakdown"] is True


def test_a_world_that_does_not_fit_the_batch_is_refused():
    with pytest.raises(
        ConfigError, match=r"global_batch_size \(8\).*micro_batch_size \(2\).*ranks \(3\) = 6"
    ):
        deepspeed_options(build(Config, tree()), dp_size=3)
