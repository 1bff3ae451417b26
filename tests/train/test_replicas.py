import pytest
import torch
from support.distributed import run_ranks
from support.training.engines import tree

from data_utils.common.settings import build
from megatron_lite.config.sections import ParallelConfig
from megatron_lite.config.tree import Config
from megatron_lite.engine.plain import make_engine
from megatron_lite.train.callbacks.replica_check import differing_replicas, fingerprint


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_single_flipped_bit_changes_the_fingerprint(dtype):
    weight = torch.randn(7, 3, generator=torch.Generator().manual_seed(0)).to(dtype)
    before = fingerprint(weight)
    bits = weight.view(torch.int32 if dtype == torch.float32 else torch.int16).flatten()
    for element in range(len(bits)):
        for bit in range(8 * weight.element_size()):
            mask = torch.tensor(1 << bit).to(bits.dtype)
            bits[element] ^= mask
            assert fingerprint(weight) != before
            bits[element] ^= mask
    assert fingerprint(weight) == before


def flip_one_bit(context, settings, name, rank):
    engine = make_engine(build(Config, settings), context, num_losses=3)
    zero_stage = settings["parallel"]["zero_stage"]
    assert differing_replicas(engine.named_parameters, context, zero_stage) == []
    if context.rank == rank and name in engine.named_parameters:
        engine.named_parameters[name].data.view(torch.int32).view(-1)[5] ^= 1
    return differing_replicas(engine.named_parameters, context, zero_stage)


@pytest.mark.parametrize(
    "tp, pp, zero_stage, name, rank, expected",
    [
        # ranks are pipeline x data x tensor: 4 processes
        (1, 1, 2, "layers.1.mlp.dense_h_to_4h.weight", 2, ["ranks [0, 1, 3] and ranks [2]"]),
        (2, 1, 1, "layers.0.input_layernorm.bias", 3, ["ranks [1] and ranks [3]", "ranks [2] and ranks [3]"]),
        pytest.param(
            *(2, 1, 1, "layers.0.attention.dense.weight", 1, ["ranks [1] and ranks [3]"]),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            *(1, 2, 1, "final_layernorm.weight", 3, ["ranks [2] and ranks [3]"]), marks=pytest.mark.slow
        ),
        (
            1,
            2,
            1,
            "embedding.word_embeddings.weight",
            3,
            ["ranks [1] and ranks [3]", "ranks [2] and ranks [3]"],
        ),
        (2, 2, 1, "embedding.word_embeddings.weight", 2, ["ranks [0] and ranks [2]"]),
    ],
)
def test_a_flipped_bit_of_a_replica_is_named_on_every_rank(tp, pp, zero_stage, name, rank, expected):
    parallel = {"tensor_parallel_size": tp, "pipeline_parallel_size": pp, "zero_stage": zero_stage}
    settings = tree(parallel=parallel, batch={"micro_batch_size": 1})
    results = run_ranks(flip_one_bit, 4, settings, name, rank, parallel=ParallelConfig(**parallel))
    assert results == [[f"{name} on {ranks}" for ranks in expected]] * 4
