"""Every layout loads what every other saved: each element of the weights and both moments, and the scalars, bit for
bit; and training goes on as in one process. A few pairs always run (more in test_checkpoint.py); `-m slow` runs all.
"""

import math

import numpy as np
import pytest
import torch
from support.distributed import run_ranks
from support.training.engines import SAMPLES, expected, fill, layout, make_engine, placed, run_layout, tree
from support.training.whole_weights import compare_steps, compare_weights, placed_weights
from support.transformer.batches import prefix_batch

from data_utils.common.batch_fields import WEIGHTS
from data_utils.common.settings import build
from megatron_lite.checkpoint.manifest import ADAM_STATE, list_checkpoints
from megatron_lite.checkpoint.read import _SliceReader, load_checkpoint, newest_valid
from megatron_lite.checkpoint.shard_slices import ShardSlice, matrix_shape
from megatron_lite.checkpoint.verify import read_checkpoint
from megatron_lite.checkpoint.write import save_checkpoint
from megatron_lite.config.sections import ParallelConfig
from megatron_lite.config.tree import Config
from megatron_lite.transformer.batch import Batch
from megatron_lite.transformer.flops import parameter_shapes

MAX_RANKS = 8
ORIGIN = ShardSlice(0, 0, 0, 0)  # boxes within it are indices into the whole parameter
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
SOME = [(1, 1, 3, 3), (1, 3, 1, 1), (2, 1, 2, 3)]


def identify(case):
    return "tp{}-pp{}-dp{}-zero{}".format(*case)


def save_and_load(context, settings, path, other):
    """Save as this layout, load what another saved. Returns the boxes that this rank owns: {(parameter, box)}."""
    engine = make_engine(context, settings)
    fill(engine, 1)
    save_checkpoint(path, 1, engine, {}, context)
    parts = [
        (values[owned.start - fragment.start : owned.stop - fragment.start], fragment.name, kind, positions)
        for fragment, owned, positions in placed(engine)
        for kind, values in fragment.tensors.items()
    ]
    for part, *_ in parts:
        part.data.fill_(float("nan"))
    engine.load_scalar_state({"adam_step": 0.0, "loss_scaler": {}})
    load_checkpoint(newest_valid(other, context), engine, context)
    for part, name, kind, positions in parts:
        assert torch.equal(part, expected(name, kind, 1, positions)), (name, kind)
    assert engine.scalar_state()["adam_step"] == 1.0
    return {(fragment.name, owned.slice) for fragment, owned, _ in placed(engine)}


def whole_parameters(shapes):
    """Every parameter's values and moments as `fill` makes them: {(name, kind): matrix}."""
    return {
        (name, kind): expected(name, kind, 1, torch.arange(math.prod(shape))).view(matrix_shape(shape))
        for name, shape in shapes.items()
        for kind in ADAM_STATE
    }


def check_boxes(found, boxes):
    """Read boxes out of a checkpoint and compare every element."""
    reader, whole = _SliceReader(found), whole_parameters(found.shapes)
    for name, box in boxes:
        for kind in ADAM_STATE:
            part = torch.full(box.shape, float("nan"))
            reader.fill(part, box, name, kind)
            assert torch.equal(part, whole[name, kind][box.within(ORIGIN)]), (found.path, name, kind, box)


@pytest.mark.parametrize("cases", [SOME, pytest.param(ALL, marks=pytest.mark.slow)], ids=["some", "all"])
def test_every_layout_loads_what_every_layout_saved(tmp_path, cases):
    """Each layout's engine saves, and loads what the layout before it in the list saved. For the other pairs, the
    boxes that its ranks own are read, as `load` does, from what every layout saved: one box is read but once for all
    layouts that have it.
    """
    paths = [tmp_path / identify(case) for case in cases]
    boxes = set()
    for case, path, other in zip(cases, paths, [paths[0], *paths], strict=False):
        tp, pp, dp, zero = case
        of_ranks = run_layout(save_and_load, tp * pp * dp, layout(tp, pp, zero), MATRIX_MODEL, path, other)
        assert all(of_ranks)  # every rank owns something
        boxes.update(*of_ranks)
    expected_shapes = parameter_shapes(build(Config, tree(**MATRIX_MODEL)).model)
    for path in paths:
        (found,) = list_checkpoints(path)
        found = read_checkpoint(found)
        assert found.shapes == expected_shapes  # as a run that would load it expects them
        check_boxes(found, boxes)
    print(f"{len(cases) ** 2} pairs of layouts, {len(boxes)} different boxes of parameters")


# Training goes on


BEFORE, AFTER = 2, 3  # steps


def train(context, settings, steps, load_from=None, save_to=None):
    """Some steps on fixed samples with unequal numbers of loss tokens, from and to a checkpoint."""
    engine = make_engine(context, settings)
    if load_from is not None:
        load_checkpoint(newest_valid(load_from, context), engine, context)
    size = settings["batch"]["micro_batch_size"]
    records = []
    for step in steps:
        samples = prefix_batch(step, rows=SAMPLES, vocab=500)
        weight = float(np.count_nonzero(samples[:, WEIGHTS]))
        count = SAMPLES // size // context.dp.size
        mine = [samples[(m * context.dp.size + context.dp.rank) * size :][:size] for m in range(count)]
        result = engine.train_step(
            [
                engine.prepared(Batch(batch), step, 1.0 / weight, 1.0 / count / context.dp.size)
                for batch in mine
            ],
            lr=1e-3,
        )
        sums = context.sum_losses(result.objective_sums)
        records.append((sums[:, 0].sum().item() / weight, result.outcome()))
    if save_to is not None:
        save_checkpoint(save_to, len(records), engine, {}, context)
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


def continue_run(tmp_path, ranks, before, new_ranks, after, **sections):
    def run(count, parallel, *args):
        settings = tree(parallel=parallel, batch={"micro_batch_size": 1}, **sections)
        return run_ranks(train, count, settings, *args, parallel=ParallelConfig(**parallel))

    run(ranks, before, range(BEFORE), None, tmp_path)
    return run(new_ranks, after, range(BEFORE, BEFORE + AFTER), tmp_path)


@pytest.mark.parametrize(
    "ranks, before, new_ranks, after",
    [CONTINUED[0], *(pytest.param(*pair, marks=pytest.mark.slow) for pair in CONTINUED[1:])],
)
def test_training_continues_in_another_layout(tmp_path, unbroken, ranks, before, new_ranks, after):
    """As in one process without a break, within the tolerances of whole_weights.py."""
    records, weights = zip(*continue_run(tmp_path, ranks, before, new_ranks, after), strict=True)
    compare_steps(records, unbroken[0])
    compare_weights(weights, unbroken[1])


DECODER = {"num_layers": 1, "decoder_layers": 2, "norm": "post", "embedding_norm": True}


EXPERTS = {
    "biases": "none",
    "experts": {
        "count": 4,
        "per_token": 2,
        "width": 16,
        "biased": True,
        "bias_rate": 0.01,
        "balance_loss": 0.1,
    },
}


@pytest.mark.parametrize(
    "ranks, before, new_ranks, after, kind",
    [
        (4, layout(tp=2, zero=2, ep=2), 2, layout(pp=2), "adamw"),
        pytest.param(4, layout(ep=4), 4, layout(ep=2, zero=2), "adamw", marks=pytest.mark.slow),
        pytest.param(2, layout(tp=2), 2, layout(ep=2), "muon", marks=pytest.mark.slow),
        pytest.param(4, layout(ep=2), 2, layout(pp=2), "adafactor", marks=pytest.mark.slow),
        pytest.param(2, layout(pp=2), 4, layout(ep=4), "adafactor", marks=pytest.mark.slow),
    ],
)
def test_training_with_experts_continues_in_another_layout(tmp_path, ranks, before, new_ranks, after, kind):
    """The biases too, which no optimizer holds."""
    sections = {"model": EXPERTS, "optimizer": {"kind": kind}}
    records, weights = run_ranks(train, 1, tree(**sections), range(BEFORE + AFTER))[0]
    biases = [name for name in weights if name.endswith(".router.bias")]
    assert len(biases) == 2
    continued = continue_run(tmp_path, ranks, before, new_ranks, after, **sections)
    of_ranks, new_weights = zip(*continued, strict=True)
    compare_steps(of_ranks, records[BEFORE:])
    compare_weights(new_weights, weights)


@pytest.mark.slow
def test_training_of_encoder_and_decoder_continues_in_another_layout(tmp_path):
    unbroken = run_ranks(train, 1, tree(model=DECODER), range(BEFORE + AFTER))[0]
    ranks = continue_run(tmp_path, 2, layout(tp=2), 2, layout(pp=2), model=DECODER)
    records, weights = zip(*ranks, strict=True)
    compare_steps(records, unbroken[0][BEFORE:])
    compare_weights(weights, unbroken[1])
