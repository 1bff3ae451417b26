"""What the ranks of a layout computed, beside one process: losses, gradient norms, weights at their place."""

import pytest
import torch

from megatron_lite.checkpoint.read import weight_reader
from megatron_lite.checkpoint.shard_slices import matrix_shape
from megatron_lite.transformer.tensor_parallel import whole_shape


def placed_weights(engine):
    """The fp32 weights this rank owns: {name: matrix of the whole parameter with NaN elsewhere}."""
    weights = {}
    for fragment in engine.fragments():
        if "weight" not in fragment.tensors:  # the state of a whole tensor
            continue
        shape = whole_shape(fragment.shape, fragment.partition, fragment.tp.size)
        matrix = weights.setdefault(fragment.name, torch.full(matrix_shape(shape), float("nan")))
        for owned in fragment.ranges():
            values = fragment.tensors["weight"][owned.start - fragment.start : owned.stop - fragment.start]
            box = owned.slice
            matrix[box.row : box.row_stop, box.column : box.column_stop] = values.detach().view(box.shape)
    return weights


def compare_weights(ranks, expected):
    """Each rank's `placed_weights` against one process's; together the ranks own every weight.

    Tolerance: some steps of at most 1e-3; Adam's division amplifies differences where gradients are near 0.
    """
    for name, whole in expected.items():
        assert not whole.isnan().any()
        covered = torch.zeros_like(whole, dtype=torch.bool)
        for weights in ranks:
            if name in weights:
                owned = ~weights[name].isnan()
                covered |= owned
                torch.testing.assert_close(
                    *(weights[name][owned], whole[owned]),
                    rtol=1e-4,
                    atol=1e-6,
                    msg=lambda m, n=name: f"{n}: {m}",
                )
        assert covered.all(), name


def compare_steps(ranks, expected):
    """Each rank's [(loss, StepResult)] against one process's. fp32: only the order of sums differs."""
    for records in ranks:
        for (loss, result), (expected_loss, one) in zip(records, expected, strict=True):
            assert loss == pytest.approx(expected_loss, rel=1e-6)
            assert result.grad_norm == pytest.approx(one.grad_norm, rel=1e-5)
            assert not result.skipped


def load_weights(checkpoint):
    """The whole fp32 model weights, by name, as `weight_reader` reads them."""
    read = weight_reader(checkpoint)
    return {name: read(name) for name in checkpoint.shapes}
