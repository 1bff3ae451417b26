"""What several tests use around checkpoint."""

from __future__ import annotations

import math

import torch

from data_utils.base.settings import build
from megatron_lite.checkpoint.boxes import matrix_shape
from megatron_lite.checkpoint.manifest import KINDS
from megatron_lite.config.tree import Config, ParallelConfig
from megatron_lite.model.tensor_parallel import whole_shape
from megatron_lite.train.plain import make_engine as make
from support.distributed import run_ranks
from support.engines import tree


def make_engine(context, settings):
    config = build(Config, settings)
    return make(config, context, num_losses=3)


def fill(engine, step):
    for fragment, run, positions in placed(engine):
        for kind, values in fragment.tensors.items():
            part = values[run.start - fragment.start : run.stop - fragment.start]
            part.data.copy_(expected(fragment.name, kind, step, positions))
    engine.publish_weights()
    engine.load_scalar_state({"adam_step": float(step), "loss_scaler": {"cur_scale": 2.0**step}})


def placed(engine):
    """Every fragment's runs with their elements' flat positions in the whole parameter."""
    for fragment in engine.fragments():
        shape = whole_shape(fragment.shape, fragment.partition, fragment.tp.size)
        whole = torch.arange(math.prod(shape)).view(matrix_shape(shape))
        for run in fragment.runs():
            box = run.box
            yield fragment, run, whole[box.row : box.row_stop, box.column : box.column_stop].flatten()


def expected(name, kind, step, positions):
    base = 1000 * (sum(name.encode()) % 97) + 100 * KINDS.index(kind) + step
    return base + (positions % 64) / 64.0  # exact in fp32


def layout(tp=1, pp=1, zero=1, sp=False):
    return {
        "tensor_parallel_size": tp,
        "pipeline_parallel_size": pp,
        "zero_stage": zero,
        "sequence_parallel": sp,
    }


def run_layout(function, ranks, parallel, settings, *args):
    settings = tree(parallel=parallel, **settings)
    return run_ranks(function, ranks, settings, *args, parallel=ParallelConfig(**parallel))
