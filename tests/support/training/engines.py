"""Small engines in a layout of ranks: their settings, how to make them, and values by which every element is known."""

from __future__ import annotations

import math

import torch
from support.distributed import run_ranks
from support.training.stub_engine import expected

from data_utils.common.settings import build, merge
from megatron_lite.config.sections import ParallelConfig
from megatron_lite.config.tree import Config
from megatron_lite.engine.plain import make_engine as make
from megatron_lite.transformer.tensor_parallel import local_shard, whole_shape

SAMPLES = 8


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


def make_engine(context, settings):
    config = build(Config, settings)
    return make(config, context, num_losses=3)


def fill(engine, step):
    for fragment, owned, positions in placed(engine):
        for kind, values in fragment.tensors.items():
            part = values[owned.start - fragment.start : owned.stop - fragment.start]
            part.data.copy_(expected(fragment.name, kind, step, positions))
    engine.gather_weights()
    engine.load_scalar_state({"adam_step": float(step), "loss_scaler": {"cur_scale": 2.0**step}})


def placed(engine):
    """Every fragment's runs with their elements' flat positions in the whole parameter, by the cut of the model.

    Not by the boxes of the runs, which are under test: a wrong box would be filled and read as wrongly.
    """
    for fragment in engine.fragments():
        tp, partition = fragment.tp, fragment.partition
        shape = whole_shape(fragment.shape, partition, tp.size)
        whole = torch.arange(math.prod(shape)).view(shape)
        positions = local_shard(whole, partition, tp.rank, tp.size, fragment.shape[0]).flatten()
        for owned in fragment.ranges():
            yield fragment, owned, positions[owned.start : owned.stop]


def layout(tp=1, pp=1, zero=1, sp=False, ep=1):
    return {
        "expert_parallel_size": ep,
        "tensor_parallel_size": tp,
        "pipeline_parallel_size": pp,
        "zero_stage": zero,
        "sequence_parallel": sp,
    }


def run_layout(function, ranks, parallel, settings, *args):
    settings = tree(parallel=parallel, **settings)
    return run_ranks(function, ranks, settings, *args, parallel=ParallelConfig(**parallel))
