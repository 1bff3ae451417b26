"""Every layout loads what every other saved: each element of the weights and both moments, and the scalars, bit for
bit; and training goes on as in one process. A few pairs always run (more in test_checkpoint.py); `-m slow` runs all.
"""

import numpy as np
import pytest
import torch
from batches import prefix_batch
from distributed import run_ranks
from test_checkpoint import expected, fill_and_save, layout, make_engine, placed, run_layout
from test_engine import SAMPLES, tree
from whole_weights import compare_steps, compare_weights, placed_weights

from data_utils.objectives.base import WEIGHTS
from megatron_lite import checkpoint
from megatron_lite.config import ParallelConfig
from megatron_lite.engine import MicroBatch

MAX_RANKS = 8
# 8 heads and 8 blocks allow 8 tensor-parallel ranks or stages; 840 samples divide over any number of ranks up to 8.
MATRIX_MODEL = {
    "model": {"num_layers": 8, "hidden_size": 16, "num_attention_heads": 8},
    "batch": {"micro_batch_size": 1, "global_batch_size": 840},
}
ALL = [
    (tp, pp, dp, zero)
    for tp in (1, 2, 4, 8)
    for pp in range(1, MAX_RANKS + 1)
    for dp in range(1, MAX_RANKS + 1)
    for zero in ((1, 2, 3) if pp == 1 else (1,))
    if tp * pp * dp <= MAX_RANKS
]
SOME_SAVED = [(1, 1, 3, 3), (2, 2, 1, 1)]
SOME_LOADED = [(1, 3, 1, 1), (2, 1, 2, 3)]


def identify(case):
    return "tp{}-pp{}-dp{}-zero{}".format(*case)


def run_case(function, case, *args):
    tp, pp, dp, zero = case
    return run_layout(function, tp * pp * dp, layout(tp, pp, zero), MATRIX_MODEL, *args)


class Saved:
    """A checkpoint of each layout, made when first asked for."""

    def __init__(self, directory):
        self.directory = directory

    def paths(self, cases):
        paths = [self.directory / identify(case) for case in cases]
        for case, path in zip(cases, paths, strict=True):
            if not path.exists():
                run_case(fill_and_save, case, path)
        return paths


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    return Saved(tmp_path_factory.mktemp("layouts"))


def load_each(context, settings, paths):
    """Load the checkpoints one after the other into one engine. Returns how many elements each gave."""
    engine = make_engine(context, settings)
    parts = [
        (values[run.start - fragment.start : run.stop - fragment.start], fragment.name, kind, positions)
        for fragment, run, positions in placed(engine)
        for kind, values in fragment.tensors.items()
    ]
    wanted = [expected(name, kind, 1, positions) for _, name, kind, positions in parts]
    for path in paths:
        for part, *_ in parts:
            part.data.fill_(float("nan"))
        engine.load_scalar_state({"adam_step": 0.0, "loss_scaler": {}})
        (found,) = checkpoint.list_checkpoints(path)
        checkpoint.load(checkpoint.read_checkpoint(found), engine, context)
        for (part, name, kind, _), values in zip(parts, wanted, strict=True):
            assert torch.equal(part, values), (path.name, name, kind)
        assert engine.scalar_state()["adam_step"] == 1.0
    return sum(len(part) for part, *_ in parts)


def check_target(saved, target, sources):
    counts = run_case(load_each, target, saved.paths(sources))
    assert all(counts) and sum(counts) >= 3 * 500 * 16  # every rank compared something


@pytest.mark.parametrize("target", SOME_LOADED, ids=identify)
def test_some_layouts_load_what_others_saved(saved, target):
    check_target(saved, target, SOME_SAVED)


@pytest.mark.slow
@pytest.mark.parametrize("target", ALL, ids=identify)
def test_every_layout_loads_what_every_layout_saved(saved, target):
    check_target(saved, target, ALL)


# Training goes on


BEFORE, AFTER = 2, 3  # steps


def train(context, settings, steps, load_from=None, save_to=None):
    """Some steps on fixed samples with unequal numbers of loss tokens, from and to a checkpoint."""
    engine = make_engine(context, settings)
    if load_from is not None:
        checkpoint.load(checkpoint.newest_valid(load_from, context), engine, context)
    size = settings["batch"]["micro_batch_size"]
    records = []
    for step in steps:
        samples = prefix_batch(step, rows=SAMPLES, vocab=500)
        weight = float(np.count_nonzero(samples[:, WEIGHTS]))
        count = SAMPLES // size // context.dp.size
        mine = [samples[(m * context.dp.size + context.dp.rank) * size :][:size] for m in range(count)]
        result = engine.train_step([MicroBatch(batch, step, 1.0 / weight) for batch in mine], lr=1e-3)
        sums = result.objective_sums if context.counts_losses else torch.zeros_like(result.objective_sums)
        records.append((context.sum(sums)[:, 0].sum().item() / weight, result))
    if save_to is not None:
        checkpoint.save(save_to, len(records), engine, {}, context)
    return records, placed_weights(engine)


@pytest.fixture(scope="module")
def unbroken():
    records, weights = run_ranks(train, 1, tree(), range(BEFORE + AFTER))[0]
    return records[BEFORE:], weights


CONTINUED = [
    # ranks, layout before; ranks, layout after
    (2, layout(zero=2), 4, layout(tp=2, pp=2)),
    (4, layout(tp=2, zero=3), 2, layout(pp=2)),
    (1, layout(), 2, layout()),
    (1, layout(), 4, layout(zero=3)),
    (1, layout(), 8, layout(tp=2, pp=2)),
    (2, layout(), 1, layout()),
    (2, layout(), 2, layout(zero=3)),
    (2, layout(tp=2), 2, layout(zero=2)),
    (2, layout(tp=2), 4, layout(tp=4)),
    (2, layout(tp=2), 1, layout(zero=2)),
    (2, layout(pp=2), 1, layout()),
    (2, layout(pp=2), 4, layout(pp=2)),
    (4, layout(), 2, layout(tp=2)),
    (4, layout(zero=3), 2, layout()),
    (4, layout(zero=3), 4, layout(tp=2, zero=3)),
    (4, layout(tp=4), 2, layout(tp=2, zero=3)),
    (4, layout(tp=2, pp=2), 4, layout(zero=2)),
    (4, layout(tp=2, pp=2), 1, layout(zero=3)),
    (8, layout(tp=2, pp=2), 4, layout(tp=2, zero=2)),
    (8, layout(tp=4, zero=2), 8, layout(pp=2)),
]


def continue_run(tmp_path, ranks, before, new_ranks, after):
    def run(count, parallel, *args):
        settings = tree(parallel=parallel, batch={"micro_batch_size": 1})
        return run_ranks(train, count, settings, *args, parallel=ParallelConfig(**parallel))

    run(ranks, before, range(BEFORE), None, tmp_path)
    return run(new_ranks, after, range(BEFORE, BEFORE + AFTER), tmp_path)


@pytest.mark.parametrize(
    "ranks, before, new_ranks, after",
    [CONTINUED[0], *(pytest.param(*pair, marks=pytest.mark.slow) for pair in CONTINUED[1:])],
)
def test_training_goes_on_in_another_layout(tmp_path, unbroken, ranks, before, new_ranks, after):
    """As in one process without a break, within the tolerances of whole_weights.py."""
    records, weights = zip(*continue_run(tmp_path, ranks, before, new_ranks, after), strict=True)
    compare_steps(records, unbroken[0])
    compare_weights(weights, unbroken[1])
