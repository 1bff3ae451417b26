"""The estimates of the dry run against the trace of the step itself."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from support.project import ROOT
from support.remedies import advised
from support.step_profiles import BERT, CASES, LAYOUTS, PAPER, config_of

from data_utils.common.errors import ConfigError
from megatron_lite.config.tree import load_config
from megatron_lite.engine.engine import Engine
from megatron_lite.estimate.average_sequence import average_sequence
from megatron_lite.estimate.batches import random_batches
from megatron_lite.estimate.block_costs import block_costs
from megatron_lite.estimate.communication import Traffic
from megatron_lite.estimate.gpus import GPUS
from megatron_lite.estimate.parameters import buckets, stages
from megatron_lite.estimate.sizes import RankGroup, Sizes
from megatron_lite.estimate.step_estimate import estimate, require_one_transformer
from megatron_lite.optim.buckets import ParamGroup, assign_buckets
from megatron_lite.transformer.tensor_parallel import TensorParallel
from megatron_lite.transformer.transformer import Transformer

H100 = GPUS["h100"]
# The largest deviations from the trace that were seen; they may only fall.
MOST = {"memory": 0.01, "tp": 0.015, "dp": 0.01, "pp": 0.01}  # tp: the traced batch is longer than the mean


def estimated(name):
    files, processes, micro_batches, settings, *_ = CASES[name]
    config = config_of(files, processes, micro_batches, settings)
    return config, processes, estimate(config, processes, H100, average_sequence(config))


def deviations(found, traced):
    """Name -> how far an estimate is from the trace, as a part of its number."""
    pairs = {"memory": (found.peak_gib, traced.expected.peak_gib)}
    for group, sent in traced.expected.collective_mb.items():
        if sent > 1:  # sums of a few numbers are not counted
            pairs[group] = found.communication_mb.get(group, 0.0), sent
    return {name: ours / theirs - 1 for name, (ours, theirs) in pairs.items()}


def assert_near(name, traced):
    _, _, found = estimated(name)
    seen = deviations(found, traced)
    print(f"{name:40} " + " ".join(f"{key} {value:+.1%}" for key, value in seen.items()))
    assert {key: value for key, value in seen.items() if abs(value) > MOST.get(key, 0.01)} == {}
    assert found.rank_parameters == traced.details.rank_parameters or "ZeRO 3" in name


@pytest.mark.parametrize("name", ["data parallel", "tensor parallel", "pipeline"])
def test_estimates_are_near_the_trace(profile_of, name):
    assert_near(name, profile_of(name))


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        *LAYOUTS,
        "bert",
        "sequence parallel",
        "t5",
        "unilmv2",
        "deberta",
        "xlnet",
        "modern",
        "local layers",
        "loss rows",
    ],
)
def test_estimates_are_near_the_trace_in_every_layout(profile_of, name):
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
    # Gradients and weights, both in fp32, in each of the micro-batches.
    sent = 8 * found.rank_parameters * config.batch.accumulation_steps(2)
    assert found.communication_mb == {"dp": pytest.approx(sent / 1e6)}


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
        named = dict(Transformer(config.model, parallel=TensorParallel()).named_parameters())
    decays = {True: ParamGroup(0.1, True), False: ParamGroup(0.0, True)}
    groups = {
        p: decays[not (name.endswith("bias") or "layernorm" in name)] for name, p in reversed(named.items())
    }
    expected = assign_buckets(groups, sizes.bucket_size)
    (stage,) = stages(config)
    found = buckets(stage, sizes)
    assert Counter(len(b.parameters) for b in found) == Counter(len(p) for _, p in expected)
    assert len(found) == len(expected) > 4


def test_collectives_cost_what_a_ring_moves():
    size = 10**9

    def milliseconds(kind, *ranks):
        found = Traffic(H100)
        found.add(kind, size, RankGroup("dp", ranks))
        return found.milliseconds["dp"]

    assert milliseconds("all_reduce", *range(8)) == pytest.approx(2 * 7 / 8 * size / 360e6)
    assert milliseconds("gather", 0, 8) == pytest.approx(size / 2 / 40e6)
    assert milliseconds("send", 0, 1) == pytest.approx(size / 360e6)
    # Each GPU of a node has a link to the others: a ring over whole nodes uses all eight, one over two of each two.
    assert milliseconds("all_reduce", *range(64)) == pytest.approx(2 * 63 / 64 * size / 320e6)
    assert milliseconds("all_reduce", 0, 4, 8, 12) == pytest.approx(2 * 3 / 4 * size / 80e6)
    assert milliseconds("gather", 0) == 0


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
def test_each_optimizer_has_its_state(kind, of_matrices, of_rest):
    """Bytes for each number of the matrices of blocks, and of the rest, which is embeddings; averages have 4 more."""
    plain = config_of(PAPER, 8, 1, ())
    rows = average_sequence(plain)
    config = config_of(PAPER, 8, 1, (f"optimizer.kind={kind}", "ema.decay=0.9"))
    found = estimate(config, 8, H100, rows)
    (stage,) = stages(plain)
    blocks = sum(p.numbers for p in stage.parameters if p.decays and p.name.startswith("layers."))
    expected = blocks * of_matrices + (stage.numbers - blocks) * of_rest + stage.numbers * 4
    assert found.peak.optimizer == pytest.approx(expected / 8, rel=0.01)


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


def test_a_step_takes_its_flops_and_waits_for_what_is_not_hidden():
    """By hand, from the counts of the estimate."""
    settings = ("parallel.tensor_parallel_size=2", "parallel.pipeline_parallel_size=4")
    rows = average_sequence(config_of(PAPER, 64, 4, ()))
    found = estimate(config_of(PAPER, 64, 4, settings), 64, H100, rows, 0.5)
    assert found.compute_ms == pytest.approx(found.flops / (0.5 * 989e12) * 1e3)
    sent = found.communication_ms
    exchange = sum(ms for group, ms in sent.items() if group not in ("tp", "pp"))
    exposed = max(0.0, exchange - found.compute_ms / 4)  # ZeRO 1: beside one of four micro-batches
    assert found.bubble == 1 + 3 / 4
    assert found.step_ms == pytest.approx(
        found.bubble * (found.compute_ms + sent["tp"] + sent["pp"]) + exposed
    )
    assert found.mfu(H100) == pytest.approx(found.flops / found.step_ms / 989e9)


def test_recomputation_computes_again():
    rows = average_sequence(config_of(PAPER, 8, 1, ()))
    none, selective, full = (
        estimate(config_of(PAPER, 8, 1, (f"training.recompute={kind}",)), 8, H100, rows)
        for kind in ("none", "selective", "full")
    )
    assert none.flops == selective.flops == full.flops
    assert full.compute_ms == pytest.approx(none.compute_ms * 4 / 3)
    # Attention's two products of 512 keys, of width 1024, beside 12 x 1024 of the others: a twentieth.
    assert 1.005 < selective.compute_ms / none.compute_ms < 1.05


@pytest.mark.parametrize(("recompute", "passes"), [("none", 4), ("full", 6)])
def test_experts_exchange_tokens_in_every_pass(recompute, passes):
    """By hand: each token goes to its two experts and back, half of them of the other rank; bf16, width 256."""
    settings = "parallel.expert_parallel_size=2", "optimizer.kind=adamw", f"training.recompute={recompute}"
    config = load_config([ROOT / "configs/laptop-experts.yaml"], settings).with_vocab_size(8192)
    found = block_costs(config, average_sequence(config).batch, False)
    assert found.sent == {("send", "dp"): pytest.approx(passes * 2 * 256 * 2 / 2)}
    assert found.saved > 0 and found.backward > 0


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
