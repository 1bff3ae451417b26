"""Data-parallel ZeRO against one process: loss, gradient norm and weights after three AdamW steps."""

import pytest
import torch
from batches import prefix_batch
from distributed import run_ranks

from megatron_lite.config import Config
from megatron_lite.engine import Engine, deepspeed_options
from megatron_lite.errors import ConfigError
from megatron_lite.model import ModelInput, build_model
from megatron_lite.settings import build, merge

SAMPLES, STEPS = 8, 3


def tree(**sections):
    base = {
        "model": {
            "num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "vocab_size": 100, "max_position": 512,
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
    model = build_model(config, num_objectives=3)
    engine = Engine(model, config, context)
    size, accumulation = config.batch.micro_batch_size, config.batch.accumulation_steps(context.dp_size)
    records = []
    for step in range(STEPS):
        samples = prefix_batch(step, rows=SAMPLES)
        mine = [samples[(m * context.dp_size + context.dp_rank) * size :][:size] for m in range(accumulation)]
        inputs = [ModelInput.from_batch(batch, context.device) for batch in mine]
        weight = context.sum(torch.tensor([sum(i.weights.sum().item() for i in inputs)])).item()
        total = torch.zeros(1)
        for item in inputs:
            loss, _ = engine.forward(item)
            factor = float("nan") if step == poison_step and context.rank == context.world_size - 1 else 1.0
            engine.backward(loss * factor * context.dp_size * accumulation / weight)
            total += loss.item()
            result = engine.micro_step(1e-3)
        records.append((context.sum(total).item() / weight, result))
    return records, {name: p.detach().float() for name, p in model.named_parameters()}


@pytest.fixture(scope="module")
def single():
    return run_ranks(train, 1, tree())[0]


@pytest.mark.parametrize(
    "world_size, zero_stage, micro", [(1, 2, 1), (2, 1, 2), (2, 2, 1), (4, 2, 2), (4, 1, 1)]
)
def test_every_layout_equals_one_process(single, world_size, zero_stage, micro):
    settings = tree(parallel={"zero_stage": zero_stage}, batch={"micro_batch_size": micro})
    for records, weights in run_ranks(train, world_size, settings):
        for (loss, result), (expected_loss, expected) in zip(records, single[0], strict=True):
            # fp32: only the order of sums differs; measured 7e-8 in loss, 3e-7 in norm.
            assert loss == pytest.approx(expected_loss, rel=1e-6)
            assert result.grad_norm == pytest.approx(expected.grad_norm, rel=1e-5)
            assert not result.skipped and result.grad_norm > 0.5  # clipping was active
        for name, expected_weight in single[1].items():
            # Three steps of at most 1e-3 each; Adam's division amplifies differences where gradients are near 0.
            torch.testing.assert_close(weights[name], expected_weight, rtol=1e-4, atol=1e-6, msg=name)


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
        for name, weight in weights.items():
            assert weight.isfinite().all()
            assert torch.equal(weight, results[0][1][name])


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
