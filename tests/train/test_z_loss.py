"""z-loss in addition to the loss: apart in every layout, in what a run reports, and no part of an evaluation."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from support import parity
from support.distributed import run_ranks
from support.training.parity_cases import VOCAB_SIZE, Case

from data_utils.common.batch_fields import WEIGHTS
from megatron_lite.config.sections import ParallelConfig
from megatron_lite.config.tree import Config
from megatron_lite.telemetry.reports import objective_losses, train_line
from megatron_lite.transformer.build import build_model
from megatron_lite.transformer.micro_batch import MicroBatch
from megatron_lite.transformer.transformer import Transformer

FACTOR, SMOOTHING = 0.05, 0.1
NAMES = ["a", "b", "c"]


@dataclasses.dataclass(frozen=True)
class WithZLoss(Case):
    def config(self) -> Config:
        config = super().config()
        training = dataclasses.replace(config.training, z_loss=FACTOR, label_smoothing=SMOOTHING)
        return dataclasses.replace(config, training=training)


def by_hand() -> tuple[torch.Tensor, torch.Tensor]:
    """Sums of training, [objectives, 3], and of an evaluation, [objectives, 2], from all logits of the first step."""
    case = WithZLoss()
    model = build_model(case.config(), case.num_losses)
    assert isinstance(model, Transformer)
    batch, _ = parity.micro_batch(case, 0, 0, case.num_samples)
    data = MicroBatch.from_batch(batch, torch.device("cpu"), model.config)
    with torch.no_grad():
        logits = model._logits_and_classes(model._hidden(data), data)[0][:, :VOCAB_SIZE].double()
    z = FACTOR * logits.logsumexp(-1).square()
    trained = F.cross_entropy(logits, data.targets.long(), reduction="none", label_smoothing=SMOOTHING)
    evaluated = F.cross_entropy(logits, data.targets.long(), reduction="none")

    def summed(*columns: torch.Tensor) -> torch.Tensor:
        found = torch.zeros(case.num_losses, len(columns), dtype=torch.float64)
        return found.index_add_(
            0, data.loss_positions.objectives, torch.stack(columns, 1) * data.weights[:, None]
        )

    ones = torch.ones_like(z)
    return summed(trained, ones, z), summed(evaluated, ones)


def of_a_layout(context, case):
    """The sums of all ranks: of an evaluation, then of a step, on the same samples."""
    engine = parity.make_engine(case.config(), context, case.num_losses)
    size, dp = case.micro_batch_size, context.dp
    firsts = [(micro * dp.size + dp.rank) * size for micro in range(case.accumulation)]
    evaluated = engine.evaluate([parity.micro_batch(case, 0, first, size)[0] for first in firsts])
    result = engine.train_step(parity.micro_batches_of(case, engine, context, 0), parity.LR)
    return [context.sum_losses(sums) for sums in (evaluated, result.objective_sums)]


@pytest.fixture(scope="module")
def expected():
    return by_hand()


@pytest.mark.parametrize(
    "case",
    [
        WithZLoss(accumulation=2),
        pytest.param(WithZLoss(tensor=2), marks=pytest.mark.slow),
        pytest.param(WithZLoss(pipeline=2, accumulation=2), marks=pytest.mark.slow),
        pytest.param(WithZLoss(data=2, zero_stage=2), marks=pytest.mark.slow),
        WithZLoss(tensor=2, pipeline=2, sequence_parallel=True),
    ],
    ids=str,
)
def test_z_loss_is_apart_in_every_layout(case, expected):
    for evaluated, trained in run_ranks(
        of_a_layout, case.ranks, case, parallel=ParallelConfig(**case.parallel)
    ):
        torch.testing.assert_close(trained, expected[0], rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(evaluated[:, :2], expected[1], rtol=1e-5, atol=1e-6)
        assert not evaluated[:, 2].any() and trained[:, 2].any()


def test_samples_have_weights(expected):
    """All of the step's: what is compared above is no part of it."""
    assert expected[0][:, 1].sum() == np.count_nonzero(WithZLoss().samples(0)[:, WEIGHTS])


SUMS = np.array([[6.0, 2.0, 0.5], [0.0, 0.0, 0.0], [1.0, 2.0, 0.3]])


@pytest.mark.parametrize(
    ("factors", "last_divides", "loss", "z_loss"),
    [
        (None, False, 7 / 4, 0.8 / 4),
        ({"a": 2.0}, False, 2 * 6 / 2 + 1 / 2, 2 * 0.5 / 2 + 0.3 / 2),
        (None, True, 7 / 2, 0.8 / 2),
    ],
)
def test_the_sum_of_both_is_what_training_minimises(factors, last_divides, loss, z_loss):
    found = objective_losses(SUMS, NAMES, factors, last_divides)
    assert found == pytest.approx({"loss": loss, "loss/a": 3.0, "loss/c": 0.5, "z_loss": z_loss})
    without = objective_losses(SUMS * [1, 1, 0], NAMES, factors, last_divides)
    assert without == {name: value for name, value in found.items() if name != "z_loss"}


def test_the_line_of_a_run_names_both():
    values = {
        "loss": 2.5, "lr": 0.1, "grad_norm": 1.0, "tokens_per_second": 10.0, "mfu": 0.1, "skipped_steps": 0,
        "data_share": 0.0, "padding": 0.0, "eta_seconds": 1.0,
    }  # fmt: skip
    assert "loss 2.5000 | z loss 0.0034 | lr" in train_line(1, 2, {**values, "z_loss": 0.0034})
    assert "z loss" not in train_line(1, 2, values)
