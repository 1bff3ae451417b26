"""The stages of a layout against the real modules: parameters exactly, shares of the optimizer."""

import dataclasses

import pytest
import torch
from support.distributed import run_ranks
from support.project import ROOT
from support.selection import slow_but

from data_utils.common.settings import build, merge, to_tree
from megatron_lite.config.sections import ParallelConfig
from megatron_lite.config.tree import Config, load_config
from megatron_lite.engine.plain import make_engine
from megatron_lite.estimate.parameters import stages
from megatron_lite.transformer.flops import layer_costs, parameter_count
from megatron_lite.transformer.transformer import Transformer

MODEL = {
    "model": {"num_layers": 5, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 300, "max_position": 64},
    "training": {"steps": 10, "precision": "fp32"},
    "data": {"sequence_length": 64},
    "batch": {"micro_batch_size": 2, "global_batch_size": 16},
}  # fmt: skip

LAYOUTS = [
    {},
    {"zero_stage": 2},
    {"tensor_parallel_size": 2},
    {"pipeline_parallel_size": 2},
    {"pipeline_parallel_size": 4},
    {"pipeline_parallel_size": 2, "tensor_parallel_size": 2},
]


def held(context, tree):
    """Parameters of this rank, elements of the optimizer's shares, number of its stage."""
    engine = make_engine(build(Config, tree), context, 1)
    owned = sum(fragment.tensors["weight"].numel() for fragment in engine.fragments())
    return sum(p.numel() for p in engine.named_parameters.values()), owned, context.pp.rank


@pytest.mark.parametrize("layout", slow_but([LAYOUTS[-1]], LAYOUTS), ids=str)
def test_parameters_of_every_rank_match_the_real_engine(layout):
    tree = merge(MODEL, {"parallel": layout})
    config, world_size = build(Config, tree), 4
    ranks = run_ranks(held, world_size, tree, parallel=build(ParallelConfig, layout))
    expected = [stage.numbers for stage in stages(config)]
    for count, _, stage in ranks:
        assert count == expected[stage]
    # A data-parallel rank owns its share of the optimizer's state, padding left out.
    dp = config.parallel.data_parallel_size(world_size)
    for _, owned, stage in ranks:
        assert owned == pytest.approx(expected[stage] / dp, rel=0.02) or dp == 1


@pytest.mark.parametrize("norm", ["pre", "post"])
def test_stages_of_encoder_and_decoder_hold_their_blocks(norm):
    """Four stages of three and five blocks: the parts that only one stage has are on it."""
    options = {"num_layers": 3, "decoder_layers": 5, "norm": norm, "embedding_norm": norm == "post"}
    layout = {"pipeline_parallel_size": 4}
    tree = merge(MODEL, {"model": options, "parallel": layout, "objectives": {"t5": 1}})
    config = build(Config, tree)
    ranks = run_ranks(held, 4, tree, parallel=build(ParallelConfig, layout))
    expected = [stage.numbers for stage in stages(config)]
    assert [count for count, _, _ in ranks] == expected
    words = 384 * 64  # the last stage has them too
    assert sum(expected) - words == parameter_count(config.model)


@pytest.mark.parametrize("name", ["glm-10b", "albert-base", "bert-large", "spanbert-large", "unilm-large"])
def test_one_process_holds_the_whole_model(name):
    config = load_config([ROOT / f"configs/{name}.yaml"])
    (stage,) = stages(build(Config, merge(to_tree(config), {"parallel": {"pipeline_parallel_size": 1}})))
    with torch.device("meta"):
        whole = sum(parameter.numel() for parameter in Transformer(config.model).parameters())
    assert stage.numbers == parameter_count(config.model) == whole


@pytest.mark.parametrize(("objectives", "share"), [({"causal": 1}, 1.0), ({"causal": 1, "xlnet": 3}, 5 / 14)])
def test_the_head_costs_what_the_objectives_predict(objectives, share):
    """The cost by which pipeline stages are balanced."""
    config = build(Config, merge(MODEL, {"objectives": objectives, "model": {"max_position": 80}}))
    assert layer_costs(config.model, config.loss_share)[-1] == pytest.approx(share * 300 / (12 * 64))
    wide = dataclasses.replace(config.model, ffn_size=512, head_transform=True)
    of_block = 64 * (4 * 64 + 2 * 512)
    words, positions, *blocks, norm, head = layer_costs(wide, config.loss_share)
    assert (words, norm, blocks) == (0.0, 0.0, [1.0] * 5) and positions < 0.1
    assert head == pytest.approx(share * (64 * 64 + 64 * 300) / of_block)
