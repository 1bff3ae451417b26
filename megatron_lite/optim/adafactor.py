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
from megatron_lite.optim.whole_tensors import (
    BLOCKS,
    Layout,
    Part,
    Piece,
    TensorOptimizer,
)

POWER, LEAST_SQUARE, LEAST_SCALE = -0.8, 1e-30, 1e-3


class AdaFactor(TensorOptimizer):
    """The means of all matrices lie in one vector: of each parameter its rows, then the columns of each block.

    Every rank has the vector, and in it the means of its pipeline stage.
    """

    def __init__(self, groups: list[dict[str, Any]], layout: Layout, settings: OptimizerConfig):
        super().__init__(groups, layout, settings)
        self._sizes = self.per_tensor(lambda tensor: float(tensor.size))
        self._least = torch.full((layout.count,), LEAST_SCALE, device=self.device)
        for part in self.parts:
            self._least[part.members] *= part.group["multipliers"].eps_factor
        # All means in one vector: one all-reduce sums the squares of the whole model.
        self._rows: dict[int, slice] = {}  # tensor -> where its means are
        self._columns: dict[int, slice] = {}
        length = 0
        for place, shape in enumerate(map(matrix_shape, layout.shapes.values())):
            row, column = length, length + shape[0]
            # Q, K and V are separate matrices to the reference, so a fused parameter has means for each block.
            for number in range(BLOCKS * place, BLOCKS * (place + 1)):
                height, width = layout.tensors[number].shape if number in layout.tensors else (0, shape[1])
                self._rows[number] = slice(row, row + height)
                self._columns[number] = slice(column, column + width)
                row, column = row + height, column + width
            length = column
        self._means = torch.zeros(length, device=self.device)
        self._divisors = torch.ones(length, device=self.device)
        # The tensor of each mean, and of each row's; `count` for others.
        self._tensors = torch.full((length,), layout.count, device=self.device)
        self._row_tensors = self._tensors.clone()
        for number, tensor in layout.tensors.items():
            rows, columns = self._rows[number], self._columns[number]
            self._divisors[rows], self._divisors[columns] = map(float, reversed(tensor.shape))
            self._tensors[rows] = self._tensors[columns] = self._row_tensors[rows] = number

    @staticmethod
    def moments(name: str, parameter: nn.Parameter) -> tuple[str, ...]:
        return ("exp_avg_sq",) if parameter.dim() == 1 else ()

    def whole_state(self, name: str) -> dict[str, torch.Tensor]:
        numbers = [number for number, tensor in self.layout.tensors.items() if tensor.name == name]
        if len(self.layout.shapes[name]) == 1:
            return {}
        rows = slice(self._rows[numbers[0]].start, self._rows[numbers[-1]].stop)
        columns = slice(self._columns[numbers[0]].start, self._columns[numbers[-1]].stop)
        return {
            "exp_avg_sq_row": self._means[rows],
            "exp_avg_sq_col": self._means[columns].view(len(numbers), -1),
        }

    def update(self, parts: list[Part]) -> None:
        matrices = [part for part in parts if not part.group["moments"]]
        factors = self._factors(matrices)
        for part in parts:
            if part.group["moments"]:
                square = part.state["exp_avg_sq"]
                # `share` is 0 in a skipped step: the lerp then changes nothing, and nobody waits for the device.
                square.lerp_(part.gradient.square() + LEAST_SQUARE, part.step**POWER * self.share)
                part.gradient.mul_(square.clamp(min=LEAST_SQUARE).rsqrt())
        for part in matrices:
            for piece in part.pieces:
                rows, columns = self._where(piece)
                self._matrix(part.gradient, piece).mul_(factors[rows][:, None]).mul_(factors[columns])
        sums = self.square_sums(parts, lambda part: part.weights, lambda part: part.gradient)
        of_weights, of_steps = (sums.float() / self._sizes).sqrt()
        rates, clip = self.share * of_weights.clamp(min=self._least), of_steps.clamp(min=1.0)
        for part in parts:
            lr, decay = part.group["lr"], part.group["weight_decay"]
            if decay:
                part.weights.addcmul_(part.weights, part.spread(lr * decay * rates), value=-1)
            part.weights.addcmul_(part.gradient, part.spread(lr * rates / clip), value=-1)

    def _factors(self, parts: list[Part]) -> torch.Tensor:
        """Take in the gradients of matrices; the factors of their rows and columns, as the means lie."""
        sums = torch.zeros(len(self._means), dtype=torch.float64, device=self.device)
        shares = torch.zeros(self.layout.count + 1, device=self.device)
        for part in parts:
            squares = part.gradient.square()
            for piece in part.counted:
                rows, columns = self._where(piece)
                square = self._matrix(squares, piece)
                sums[rows] += square.sum(1, dtype=torch.float64)
                sums[columns] += square.sum(0, dtype=torch.float64)
            shares[part.members] = part.step**POWER * self.share
        # fp64 sums over the pieces, so that the means do not depend on how ZeRO has cut the matrices.
        means = (self.layout.context.sum(sums) / self._divisors).float() + LEAST_SQUARE
        self._means.lerp_(means, shares[self._tensors])
        totals = torch.zeros(self.layout.count + 1, device=self.device)
        # mean of R: of each tensor, from its rows' means, all tensors at once.
        totals.index_add_(0, self._row_tensors, self._means * self._divisors)
        totals[: self.layout.count] /= self._sizes
        totals[self.layout.count] = 1.0
        return self._means.clamp(min=LEAST_SQUARE).rsqrt() * totals.sqrt()[self._row_tensors]

    def _where(self, piece: Piece) -> tuple[slice, slice]:
        """The means of a piece's rows, and of its columns."""
        row, column = self._rows[piece.tensor].start, self._columns[piece.tensor].start
        box = piece.box
        return slice(row + box.row, row + box.row_stop), slice(column + box.column, column + box.column_stop)

    @staticmethod
    def _matrix(flat: torch.Tensor, piece: Piece) -> torch.Tensor:
        return flat[piece.place].view(piece.box.shape)
