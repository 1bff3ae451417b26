"""The formulas of the dry run against the trace of the step itself."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from support.project import ROOT
from support.remedies import advised
from support.step_profiles import BERT, CASES, FEW, LAYOUTS, PAPER, config_of

from data_utils.common.errors import ConfigError
from megatron_lite.config.tree import load_config
from megatron_lite.engine.engine import Engine
from megatron_lite.estimate.average_sequence import average_sequence
from megatron_lite.estimate.batches import random_batches
from megatron_lite.estimate.block_costs import BlockCosts
from megatron_lite.estimate.gpus import GPUS, HOST
from megatron_lite.estimate.parameters import buckets, stages
from megatron_lite.estimate.sizes import Sizes
from megatron_lite.estimate.step_estimate import estimate, require_one_transformer
from megatron_lite.estimate.tally import Tally
from megatron_lite.model.tensor_parallel import TensorParallel
from megatron_lite.model.transformer import GLM
from megatron_lite.optim.buckets import ParamGroup, assign_buckets

H100 = GPUS["h100"]
# The largest deviations of the formulas that were seen; they may only fall.
MOST = {"memory": 0.01, "time": 0.015, "launches": 0.03}
MOST_OF_SOME = {
    "10B, ZeRO 2, full": {"memory": 0.03},
    "335M, ZeRO 3": {
        "time": 0.016
    },  # both batches of the trace have one length, of the three that are likely
    "t5": {"time": 0.03, "launches": 0.031},
    # Parts without an update cost zeros side by side with the others, and weights are gathered ahead otherwise.
    "1B, LoRA of two parts, ZeRO 3": {"memory": 0.05, "time": 0.07, "launches": 0.04},
}


def estimated(name):
    files, processes, micro_batches, settings, *_ = CASES[name]
    config = config_of(files, processes, micro_batches, settings)
    return config, processes, estimate(config, processes, H100, average_sequence(config))


def deviations(found, traced):
    """Name -> how far the formulas are from the trace, as a part of its number."""
    pairs = {
        "memory": (found.peak_gib, traced.expected.peak_gib),
        "time": (found.roofline_ms, traced.expected.roofline_ms),
        "launches": (found.launches, traced.details.launches),
    }
    return {name: ours / theirs - 1 for name, (ours, theirs) in pairs.items()}


def assert_near(name, traced):
    _, _, found = estimated(name)
    most = MOST | MOST_OF_SOME.get(name, {})
    seen = deviations(found, traced)
    print(f"{name:40} " + " ".join(f"{key} {value:+.1%}" for key, value in seen.items()))
    assert {key: value for key, value in seen.items() if abs(value) > most[key]} == {}
    assert found.rank_parameters == traced.details.rank_parameters or "ZeRO 3" in name


@pytest.mark.parametrize("name", ["data parallel", "tensor parallel", "pipeline", "bert"])
def test_formulas_are_near_the_trace(profile_of, name):
    assert_near(name, profile_of(name))


OF_ATTENTION = ("without dropout, fa3", "local layers, fa3")


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        *LAYOUTS,
        "sequence parallel",
        "t5",
        "unilmv2",
        "deberta",
        "xlnet",
        "modern",
        "local layers",
        "loss rows",
        *OF_ATTENTION,
    ],
)
def test_formulas_are_near_the_trace_in_every_layout(profile_of, name):
    assert_near(name, profile_of(name))


def test_zero_3_has_an_estimate_where_every_parameter_is_small():
    small = [
        "model.hidden_size=32",
        "model.num_layers=2",
        "model.num_attention_heads=2",
        "model.vocab_size=512",
    ]
    config = load_config([ROOT / "configs/tiny.yaml"], ["parallel.zero_stage=3", *small])
    found = estimate(config, 2, H100, average_sequence(config))
    parameters = len(stages(Sizes(config, 2, average_sequence(config)))[0].parameters)
    assert found.collectives["dp"] > parameters  # each is gathered by a call of its own


def assert_counts_of_a_block(name, traced):
    """Kernels of a block are counted one by one: their number is exact, and so is that of attention's calls."""
    config, processes, _ = estimated(name)
    costs = BlockCosts(Sizes(config, processes, average_sequence(config)))
    forward, backward = Tally(H100), Tally(H100)
    costs.forward(forward)
    costs.backward(backward)
    expected = traced.expected
    assert forward.launches == expected.launches_per_layer_forward
    assert backward.launches == expected.launches_per_layer_backward
    assert len(costs.attention_launches()) == expected.attention_calls_per_layer


@pytest.mark.parametrize("name", ["data parallel", "tensor parallel", "pipeline", "bert"])
def test_kernels_of_a_block_are_counted_exactly(profile_of, name):
    assert_counts_of_a_block(name, profile_of(name))


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        *(name for name in LAYOUTS if "ZeRO 3" not in name),
        "sequence parallel",
        "modern",
        "local layers",
        "llama",
        "qwen3",
        "deberta",
        "xlnet",
    ],
)
def test_kernels_of_a_block_are_counted_exactly_in_every_layout(profile_of, name):
    assert_counts_of_a_block(name, profile_of(name))


@pytest.mark.slow
def test_norms_of_heads_add_what_a_trace_adds(more_profiles):
    """No kernel, and their memory and time within a hundredth."""

    def figures(name):
        found, traced = estimated(name)[2], more_profiles[name]
        expected = traced.expected
        return torch.tensor(
            [
                [found.launches, found.peak_gib, found.roofline_ms],
                [traced.details.launches, expected.peak_gib, expected.roofline_ms],
            ]
        )

    ours, theirs = (figures("qwen3") - figures("qwen3 without norms of heads")).tolist()
    assert ours[0] == theirs[0] == 0
    assert ours[1:] == pytest.approx(theirs[1:], rel=0.01)


def test_graphs_hold_results_of_each_length_and_a_pool():
    """By hand: six hidden states a block and length, and what one pass of all blocks keeps."""
    rows = average_sequence(config_of(PAPER, 64, 1, ()))
    with_graphs, without = (
        estimate(config_of(PAPER, 64, 1, settings), 64, H100, rows).peak
        for settings in (("training.cuda_graphs=true",), ())
    )
    assert without.graphs == 0
    of_results = 24 * 6 * (8448 + 8704) * 1024 * 2
    assert with_graphs.graphs == pytest.approx(of_results + without.activations, rel=0.03)
    assert with_graphs.total > without.total + of_results


@pytest.mark.parametrize("has_graphs", [False, True])
def test_training_pads_to_the_lengths_of_the_estimate(monkeypatch, has_graphs):
    """Micro-batches of 16 rows have few lengths, with CUDA graphs fewer."""
    config = config_of(PAPER, 64, 1, (f"training.cuda_graphs={has_graphs}",))
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda _: SimpleNamespace(multi_processor_count=132)
    )
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
    one = SimpleNamespace(size=1, rank=0)
    context = SimpleNamespace(device=torch.device("cuda"), pp=one, tp=one)
    engine = SimpleNamespace(_config=config, context=context, _has_graphs=has_graphs)
    found = [len(Engine.prepared(engine, batch, None).tokens) for batch in random_batches(config, 8)]
    expected = Sizes(config, 64, average_sequence(config)).lengths[0]
    assert sum(length in expected for length in found) >= 6 and len(expected) == (2 if has_graphs else 3)
    assert 8448 in expected


@pytest.mark.parametrize("files", [PAPER, BERT])
def test_buckets_match_the_optimizer(files):
    config = config_of(files, 64, 1, ())
    sizes = Sizes(config, 64, average_sequence(config))
    with torch.device("meta"):
        named = dict(GLM(config.model, parallel=TensorParallel()).named_parameters())
    decays = {True: ParamGroup(0.1, True), False: ParamGroup(0.0, True)}
    groups = {
        p: decays[not (name.endswith("bias") or "layernorm" in name)] for name, p in reversed(named.items())
    }
    expected = assign_buckets(groups, sizes.bucket_size)
    (stage,) = stages(sizes)
    found = buckets(stage, sizes)
    assert Counter(len(b.parameters) for b in found) == Counter(len(p) for _, p in expected)
    assert len(found) == len(expected) > 4


def test_collectives_of_data_parallelism_match_its_buckets():
    """335M on 64: seven buckets, each reduced and gathered once, and one sum of one number."""
    _, _, found = estimated("data parallel")
    assert found.collectives == {"dp": 15}
    assert found.collective_mb["dp"] == pytest.approx(6 * found.rank_parameters / 1e6, rel=0.001)


def test_parts_of_memory_match_a_hand_calculation():
    """One rank of 64 at ZeRO 1: 2 bytes a weight, 4 a summed gradient, a 64th of 12."""
    _, _, found = estimated("data parallel")
    peak, numbers = found.peak, found.rank_parameters
    assert peak.weights == pytest.approx(2 * numbers, rel=1e-3)
    assert peak.gradients == pytest.approx(4 * numbers, rel=1e-3)
    assert peak.optimizer == pytest.approx(12 * numbers / 64, rel=1e-3)
    # A block has 4 of the hidden state, 4 of attention, 8 of the FFN, keys and values gathered once; bf16.
    tokens = 8640
    assert peak.activations == pytest.approx(24 * tokens * 1024 * 2 * 18, rel=0.02)


def test_what_lora_freezes_costs_its_weights_alone():
    config = config_of(PAPER, 8, 1, ("model.lora.rank=8",))
    found = estimate(config, 8, H100, average_sequence(config))
    trained = 24 * 8 * (1024 + 3072 + 1024 + 1024 + 2 * (1024 + 4096))
    assert found.peak.weights == pytest.approx(2 * found.rank_parameters, rel=1e-3)
    assert found.peak.gradients == pytest.approx(4 * trained, rel=1e-3)
    assert found.peak.optimizer == pytest.approx(12 * trained / 8, rel=1e-3)
    whole = estimate(without := config_of(PAPER, 8, 1, ()), 8, H100, average_sequence(without))
    assert 0.64 < found.flops / whole.flops < 0.75  # attention's products have both gradients


@pytest.mark.parametrize(
    ("kind", "of_matrices", "of_rest"),
    [("lamb", 12, 12), ("stable_adamw", 12, 12), ("adafactor", 4, 4), ("muon", 8, 12)],
)
def test_each_optimizer_has_its_state_and_its_time(kind, of_matrices, of_rest):
    """Bytes for each number of the matrices of blocks, and of the rest, which is embeddings; averages have 4 more."""
    plain = config_of(PAPER, 8, 1, ())
    rows = average_sequence(plain)
    config = config_of(PAPER, 8, 1, (f"optimizer.kind={kind}", "ema.decay=0.9"))
    usual, found = (estimate(each, 8, H100, rows) for each in (plain, config))
    (stage,) = stages(Sizes(plain, 8, rows))
    blocks = sum(p.numbers for p in stage.parameters if p.is_matrix)
    expected = blocks * of_matrices + (stage.numbers - blocks) * of_rest + stage.numbers * 4
    assert found.peak.optimizer == pytest.approx(expected / 8, rel=0.01)
    assert 1.0 < found.kernel_ms["optimizer"] / usual.kernel_ms["optimizer"] < 20.0
    assert found.launches > usual.launches


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ("parallel.zero_stage=2", "gradients"),
        ("parallel.offload_optimizer=true", "optimizer"),
        ("training.recompute=full", "activations"),
        ("training.recompute=selective", "activations"),
        ("parallel.tensor_parallel_size=2", "weights"),
        ("parallel.pipeline_parallel_size=4", "weights"),
    ],
)
def test_what_saves_memory_saves_its_part(change, part):
    plain = config_of(PAPER, 8, 4, ())
    other = config_of(PAPER, 8, 4, (change,))
    rows = average_sequence(plain)
    before, after = (estimate(config, 8, H100, rows).peak for config in (plain, other))
    assert getattr(after, part) < getattr(before, part)


def test_sequence_parallelism_divides_what_tensor_parallelism_leaves_whole():
    rows = average_sequence(config_of(PAPER, 8, 1, ()))
    split = ("parallel.tensor_parallel_size=4", "parallel.sequence_parallel=true")
    whole, divided = (
        estimate(config_of(PAPER, 8, 1, settings), 8, H100, rows).peak for settings in (split[:1], split)
    )
    assert divided.activations < 0.75 * whole.activations and divided.weights == whole.weights


def test_times_follow_from_the_counts():
    for name in FEW:
        if CASES[name][4] is None:
            config, _, found = estimated(name)
            rows = config.batch.micro_batch_size * CASES[name][2] * config.row_length / 512
            assert found.host_ms == pytest.approx(found.bubble * HOST.millis(found.launches, rows))
            assert found.step_ms > found.busy_ms > 0 and 0 < found.mfu(H100) < 1
            assert found.roofline_ms == pytest.approx(sum(found.kernel_ms.values()) * found.bubble)


@pytest.mark.parametrize(("dropout", "launches"), [(0.0, 2), (0.1, 0)])
def test_the_host_pays_for_torchs_public_attention(dropout, launches):
    """Forward without dropout; the memory-efficient kernel has as many launches, and no public function."""
    small = ["model.vocab_size=512", "training.precision=bf16", f"model.attention_dropout={dropout}"]
    fa2, torch = (
        load_config([ROOT / "configs/tiny.yaml"], [*small, f"training.attention={name}"])
        for name in ("fa2", "torch")
    )
    more, less = (estimate(config, 2, H100, average_sequence(config)).host_ms for config in (fa2, torch))
    calls = launches * fa2.model.num_layers * fa2.batch.accumulation_steps(2)
    assert more - less == pytest.approx(calls * HOST.public_call_us / 1e3)


@pytest.mark.parametrize("name", ["optimus-base", "optimus-tiny"])
def test_two_stacks_are_refused_by_name(name):
    """With settings by which the encoder is profiled."""
    with pytest.raises(ConfigError, match="decoder is set") as error:
        require_one_transformer(load_config([name]))
    encoder = str(error.value).partition("and the decoder")[0]
    config = load_config([name], advised(encoder))
    require_one_transformer(config)
    assert [choice.name for choice in config.objective_choices] == ["masked_lm"]


def test_models_with_a_decoder_are_estimated():
    config = load_config([ROOT / "configs/bart-large.yaml"])
    found = estimate(config, 8, H100, average_sequence(config))
    assert found.peak_gib > 5 and found.rank_parameters > 3e8
