"""AdaFactor: the second moment of a matrix from the means of its rows and columns, steps relative to the weights.

    b = 1 - t^-0.8;  R, C = b R + (1 - b) (mean of g^2 over each row, each column + 1e-30)
    u = g / sqrt(R C / mean R);  w -= lr max(1e-3, rms(w)) (u / max(1, rms(u)) + weight_decay w)

Vectors keep a second moment of each element. Source: arXiv:1804.04235; without first moment, as
transformers.optimization.Adafactor with scale_parameter.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from megatron_lite.checkpoint.shard_slices import matrix_shape
from megatron_lite.config.sections import OptimizerConfig
from megatron_lite.optim.whole_tensors import BLOCKS, BucketShard, OwnedSlice, TensorIndex, TensorOptimizer

DECAY_EXPONENT, MIN_SQUARE, MIN_SCALE = -0.8, 1e-30, 1e-3


class AdaFactor(TensorOptimizer):
    """The means of all matrices lie in one vector: of each parameter its rows, then the columns of each block.

    Every rank has the vector, and in it the means of its pipeline stage.
    """

    def __init__(self, groups: list[dict[str, Any]], index: TensorIndex, settings: OptimizerConfig):
        super().__init__(groups, index, settings)
        self._sizes = self.per_tensor(lambda tensor: float(tensor.size))
        self._min_scales = torch.full((index.count,), MIN_SCALE, device=self.device)
        for shard in self.shards:
            self._min_scales[shard.tensors] *= shard.group["multipliers"].eps_factor
        # All means in one vector: one all-reduce sums the squares of the whole model.
        self._row_means: dict[int, slice] = {}  # tensor -> positions in the vector
        self._column_means: dict[int, slice] = {}
        length = 0
        for i, shape in enumerate(map(matrix_shape, index.shapes.values())):
            row, column = length, length + shape[0]
            # Q, K and V are separate matrices to the reference, so a fused parameter has means for each block.
            for number in range(BLOCKS * i, BLOCKS * (i + 1)):
                height, width = index.tensors[number].shape if number in index.tensors else (0, shape[1])
                self._row_means[number] = slice(row, row + height)
                self._column_means[number] = slice(column, column + width)
                row, column = row + height, column + width
            length = column
        self._means = torch.zeros(length, device=self.device)
        # Elements of a row or column; fp64, since what they multiply is summed over the rows of a vocabulary.
        self._divisors = torch.ones(length, dtype=torch.float64, device=self.device)
        # The tensor of each mean, and of each row's mean; `count` for others.
        self._mean_tensors = torch.full((length,), index.count, device=self.device)
        self._row_tensors = self._mean_tensors.clone()
        for number, tensor in index.tensors.items():
            rows, columns = self._row_means[number], self._column_means[number]
            self._divisors[rows], self._divisors[columns] = map(float, reversed(tensor.shape))
            self._mean_tensors[rows] = self._mean_tensors[columns] = self._row_tensors[rows] = number

    @staticmethod
    def moments(name: str, parameter: nn.Parameter) -> tuple[str, ...]:
        return ("exp_avg_sq",) if parameter.dim() == 1 else ()

    def whole_state(self, name: str) -> dict[str, torch.Tensor]:
        numbers = [number for number, tensor in self.index.tensors.items() if tensor.name == name]
        if len(self.index.shapes[name]) == 1:
            return {}
        rows = slice(self._row_means[numbers[0]].start, self._row_means[numbers[-1]].stop)
        columns = slice(self._column_means[numbers[0]].start, self._column_means[numbers[-1]].stop)
        return {
            "exp_avg_sq_row": self._means[rows],
            "exp_avg_sq_col": self._means[columns].view(len(numbers), -1),
        }

    def update(self, shards: list[BucketShard]) -> None:
        matrices = [shard for shard in shards if not shard.group["moments"]]
        factors = self._update_means(matrices)
        for shard in shards:
            if shard.group["moments"]:
                square = shard.state["exp_avg_sq"]
                # `step_factor` is 0 in a skipped step: the lerp then changes nothing, without a wait for the device.
                square.lerp_(
                    shard.gradient.square() + MIN_SQUARE, shard.step**DECAY_EXPONENT * self.step_factor
                )
                shard.gradient.mul_(square.clamp(min=MIN_SQUARE).rsqrt())
        for shard in matrices:
            for owned in shard.slices:
                rows, columns = self._mean_positions(owned)
                self._as_matrix(shard.gradient, owned).mul_(factors[rows][:, None]).mul_(factors[columns])
        sums = self.square_sums(shards, lambda shard: shard.weights, lambda shard: shard.gradient)
        weight_rms, step_rms = (sums.float() / self._sizes).sqrt()
        rates, clip = self.step_factor * weight_rms.clamp(min=self._min_scales), step_rms.clamp(min=1.0)
        for shard in shards:
            lr, decay = shard.group["lr"], shard.group["weight_decay"]
            if decay:
                shard.weights.addcmul_(shard.weights, shard.per_element(lr * decay * rates), value=-1)
            shard.weights.addcmul_(shard.gradient, shard.per_element(lr * rates / clip), value=-1)

    def _update_means(self, shards: list[BucketShard]) -> torch.Tensor:
        """Average the gradients of matrices into the means. Returns the factors of rows and columns, as means lie."""
        sums = torch.zeros(len(self._means), dtype=torch.float64, device=self.device)
        weights = torch.zeros(self.index.count + 1, device=self.device)  # of the gradient, for each tensor
        for shard in shards:
            squares = shard.gradient.square()
            for owned in shard.summed_slices:
                rows, columns = self._mean_positions(owned)
                square = self._as_matrix(squares, owned)
                sums[rows] += square.sum(1, dtype=torch.float64)
                sums[columns] += square.sum(0, dtype=torch.float64)
            weights[shard.tensors] = shard.step**DECAY_EXPONENT * self.step_factor
        # fp64 sums over the slices, so that the means do not depend on how ZeRO has cut the matrices.
        means = (self.index.context.sum(sums) / self._divisors).float() + MIN_SQUARE
        self._means.lerp_(means, weights[self._mean_tensors])
        totals = torch.zeros(self.index.count + 1, dtype=torch.float64, device=self.device)
        # mean R of each tensor, from the means of its rows, all tensors at once.
        totals.index_add_(0, self._row_tensors, self._means * self._divisors)
        totals[: self.index.count] /= self._sizes
        totals[self.index.count] = 1.0
        return self._means.clamp(min=MIN_SQUARE).rsqrt() * totals.sqrt().float()[self._row_tensors]

    def _mean_positions(self, owned: OwnedSlice) -> tuple[slice, slice]:
        """Positions in the vector of means: of the slice's rows, and of its columns."""
        row, column = self._row_means[owned.tensor].start, self._column_means[owned.tensor].start
        region = owned.region
        return (
            slice(row + region.row, row + region.row_stop),
            slice(column + region.column, column + region.column_stop),
        )

    @staticmethod
    def _as_matrix(flat: torch.Tensor, owned: OwnedSlice) -> torch.Tensor:
        return flat[owned.positions].view(owned.region.shape)
