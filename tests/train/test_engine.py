"""Skipped steps and the derived DeepSpeed dictionary. That layouts compute the same: test_parity.py."""

from types import SimpleNamespace

import deepspeed
import pytest
import torch
from support import parity
from support.configs import tiny
from support.distributed import run_ranks
from support.training.engines import SAMPLES, tree
from support.transformer.batches import prefix_batch

from data_utils.common.errors import ConfigError
from data_utils.common.settings import build, merge
from megatron_lite.checkpoint.read import load_checkpoint, newest_valid
from megatron_lite.checkpoint.write import save_checkpoint
from megatron_lite.config.sections import ParallelConfig
from megatron_lite.config.tree import Config
from megatron_lite.engine.engine import warn_of_slow_attention
from megatron_lite.engine.parameter_groups import parameter_groups
from megatron_lite.engine.plain import make_engine
from megatron_lite.optim.uncompiled import AdamW
from megatron_lite.transformer.batch import Batch
from megatron_lite.transformer.build import build_model
from megatron_lite.transformer.kernels import fused


def poisoned_steps(context, settings):
    """Three steps, in the second of which one rank's gradients are no numbers: what was skipped, and what changed."""
    config = build(Config, settings)
    engine = make_engine(config, context, num_losses=3)
    size, accumulation = config.batch.micro_batch_size, config.batch.accumulation_steps(context.dp.size)
    outcome = []
    for step in range(3):
        samples = prefix_batch(step, rows=SAMPLES, vocab=500)
        mine = [samples[(m * context.dp.size + context.dp.rank) * size :][:size] for m in range(accumulation)]
        poisoned = step == 1 and context.dp.rank == context.dp.size - 1
        factor = float("nan") if poisoned else 0.01
        before = own_weights(engine)
        result = engine.train_step([engine.prepared(Batch(batch), step, factor) for batch in mine], lr=1e-3)
        after = own_weights(engine)
        assert after.isfinite().all()
        outcome.append((result.skipped, not torch.equal(before, after)))
    return outcome


def own_weights(engine):
    """The fp32 weights this rank owns, one after the other."""
    return torch.cat([fragment.tensors["weight"].detach().clone() for fragment in engine.fragments()])


NON_FINITE = [
    (precision, *engine)
    for precision in ("fp32", "bf16", "fp16")
    for engine in ((1, False), (2, False), (1, True), (2, True), (3, True))
]


@pytest.mark.parametrize(
    "precision, zero_stage, offload",
    [  # each precision, stage and place of the optimizer always
        pytest.param(*case, marks=[pytest.mark.slow] * (i % 3 != 1)) for i, case in enumerate(NON_FINITE)
    ],
)
def test_a_non_finite_gradient_on_one_rank_is_skipped_by_all(precision, zero_stage, offload):
    parallel = {"zero_stage": zero_stage, "offload_optimizer": offload}
    results = run_ranks(poisoned_steps, 2, tree(training={"precision": precision}, parallel=parallel))
    assert results == [[(False, True), (True, False), (False, True)]] * 2


@pytest.mark.parametrize("precision", [pytest.param("fp32", marks=pytest.mark.slow), "bf16"])
def test_all_stages_and_tensor_parallel_ranks_skip_together(precision):
    parallel = {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}
    settings = tree(training={"precision": precision}, parallel=parallel)
    results = run_ranks(poisoned_steps, 4, settings, parallel=ParallelConfig(**parallel))
    assert results == [[(False, True), (True, False), (False, True)]] * 4


def optimizer_and_compiled_operations(context, settings):
    engine = make_engine(build(Config, settings), context, num_losses=3)
    return type(engine._zero.optimizer), deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"]


@pytest.mark.parametrize("offload", [False, True])
def test_nothing_is_compiled_at_the_start(offload):
    """DeepSpeed's own optimizers and shared memory would be, for minutes, and a killed build blocks later starts."""
    settings = tree(parallel={"offload_optimizer": offload, "zero_stage": 2})
    assert run_ranks(optimizer_and_compiled_operations, 1, settings) == [(AdamW, False)]


def test_the_deepspeed_dictionary_is_derived():
    config = build(
        Config,
        tree(deepspeed={"zero_optimization": {"reduce_bucket_size": 1000}, "wall_clock_breakdown": True}),
    )
    options = config.deepspeed_options(dp_size=2)
    assert options["gradient_accumulation_steps"] == 2 and options["gradient_clipping"] == 0.5
    assert options["zero_optimization"] == {"reduce_bucket_size": 1000, "stage": 1}
    assert options["wall_clock_breakdown"] is True
    assert options["timers"] == {"throughput": {"enabled": False}}  # it would wait for the device


def test_a_world_that_does_not_fit_the_batch_is_refused():
    with pytest.raises(
        ConfigError, match=r"global_batch_size \(8\).*micro_batch_size \(2\).*ranks \(3\) = 6"
    ):
        build(Config, tree()).deepspeed_options(dp_size=3)


@pytest.mark.parametrize(
    "system, objective", [("glm", "blank_infilling"), ("bert", "masked_lm"), ("albert", "masked_lm")]
)
def test_weight_decay_matches_matrices_and_tables(system, objective):
    """Norms and biases, which are vectors, have none."""
    options = "model.head_bias=true", "model.embedding_norm=true", "data.sequence_length=128"
    config = tiny(
        f"model.system={system}", f"objectives.{objective}=1", *options, "optimizer.weight_decay=0.3"
    )
    named = dict(build_model(config, 3).named_parameters())
    decay = {p: group["weight_decay"] for group in parameter_groups(named, config) for p in group["params"]}
    idle = {name for name in named if name.startswith("heads.sentence.")}  # without labels
    assert {name: decay[p] for name, p in named.items()} == {
        name: 0.3 if p.ndim == 2 and name not in idle else 0.0 for name, p in named.items()
    }


def evaluated_with_and_without_dropout(context, settings):
    """Losses of a batch, of engines that train with dropout and without it."""
    batch = Batch(prefix_batch(0, rows=2, vocab=500))
    dropout = dict.fromkeys(("embedding_dropout", "attention_dropout", "output_dropout"), 0.5)
    engines = [
        make_engine(build(Config, merge(settings, {"model": model})), context, 3) for model in (dropout, {})
    ]
    return [engine.evaluate([batch]) for engine in engines]


@pytest.mark.parametrize("stages", [1, 2])
def test_an_evaluation_has_no_dropout(stages):
    parallel = {"pipeline_parallel_size": stages}
    results = run_ranks(
        evaluated_with_and_without_dropout,
        stages,
        tree(parallel=parallel),
        parallel=ParallelConfig(**parallel),
    )
    for with_dropout, without in results:
        assert torch.equal(with_dropout, without)
    assert results[-1][0].sum() > 0  # of the last stage


def train_and_save(context, case, directory):
    engine = make_engine(case.config(), context, parity.OBJECTIVES)
    for step in range(2):
        engine.train_step(parity.micro_batches_of(case, engine, context, step), parity.LR)
    save_checkpoint(directory, 2, engine, {}, context)


def continue_and_compare(context, case, directory, record):
    engine = make_engine(case.config(), context, parity.OBJECTIVES)
    load_checkpoint(newest_valid(directory, context), engine, context)
    outcome = parity.Outcome(case)
    parity.run_step(context, engine, case, 2, record, outcome)
    for fragment in engine.fragments():
        parity.compare_fragment(outcome, "weights", 2, fragment, fragment.tensors["weight"], record.weights)
    return outcome.failures()


@pytest.mark.slow
@pytest.mark.parametrize(
    "before, after",
    [
        (parity.Case(1, 1, 2, 2, offload=True), parity.Case(2, 2, 1)),
        (parity.Case(2, 1, 1), parity.Case(1, 1, 2, 1, offload=True)),
        (parity.Case(1, 1, 2, 3, offload=True), parity.Case(2, 1, 2, 3, True, offload=True)),
    ],
    ids=str,
)
def test_a_run_continues_with_or_without_offloading(tmp_path, before, after):
    """Two steps, a checkpoint, the third step on another layout: as three steps in one process."""

    def run(function, case, *args):
        parallel = ParallelConfig(tensor_parallel_size=case.tensor, pipeline_parallel_size=case.pipeline)
        return run_ranks(function, case.ranks, case, tmp_path, *args, parallel=parallel)

    run(train_and_save, before)
    record = parity.reference_of(after)
    assert run(continue_and_compare, after, record) == [[]] * after.ranks


@pytest.mark.parametrize(
    ("kernels", "relative", "device", "is_main", "said"),
    [
        ("torch", "xlnet", "cuda", True, 1), ("torch", "xlnet", "cuda", False, 0), ("torch", "xlnet", "cpu", True, 0),
        ("fused", "xlnet", "cuda", True, 0), ("fused", "buckets", "cuda", True, 0),
    ],
)  # fmt: skip
def test_attention_under_a_mask_is_never_silent_on_gpus(
    monkeypatch, caplog, kernels, relative, device, is_main, said
):
    monkeypatch.setattr(fused, "_is_wanted", kernels == "fused")
    config = tiny(f"model.relative={relative}")
    context = SimpleNamespace(device=torch.device(device), is_main=is_main)
    warn_of_slow_attention(config, context)
    assert len(caplog.records) == said
    assert not said or "model.relative is xlnet" in caplog.text
