"""A loss that is divided by all tokens of its texts: by hand, with losses divided by weights, and in evaluation."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from support.configs import tiny
from support.distributed import run_ranks
from support.training.training import fit, make_trainer, records

from data_utils.common.batch_fields import DOC, FIELDS, OBJECTIVE, PADDING_DOC, WEIGHTS
from data_utils.common.losses import MASKED_DIFFUSION
from data_utils.common.settings import merge
from data_utils.objectives import LOSS_NAMES
from megatron_lite.train.loss_normalizer import LossNormalizer
from megatron_lite.train.step import StepCounts, StepInputs
from megatron_lite.transformer.batch import Batch

COUNT = len(LOSS_NAMES)
NUMBER = MASKED_DIFFUSION.number


def row(weights, objective, length):
    fields = np.zeros((1, len(FIELDS), length), np.int32)
    fields[0, DOC, len(weights) :] = PADDING_DOC
    fields[0, WEIGHTS, : len(weights)] = np.array(weights, np.float32).view(np.int32)
    fields[0, OBJECTIVE, : len(weights)] = objective
    return fields


@dataclass
class Input:
    """The numbers of an input that a step scales, and the nats of its rows."""

    weights: torch.Tensor
    of: np.ndarray  # the loss of each
    nats: torch.Tensor
    loss_factor: float = 1.0
    step_share: float = 1.0

    def scale_weights(self, scales):
        self.weights = self.weights * torch.from_numpy(scales[self.of])


def make_normalizer(normalization="global_tokens", factors=None):
    training = {"loss_normalization": normalization, "loss_weights": factors or {}}
    phase_plan = tiny(f"training={training}".replace("'", "")).phase_plan
    return LossNormalizer(phase_plan, LOSS_NAMES, dp_size=1)


def losses_of(batches, nats, normalization="global_tokens", factors=None):
    """The loss whose gradient a step takes, and the one that it reports. Args: nats: of each row with loss."""
    normalizer, inputs = make_normalizer(normalization, factors), []
    for batch, each in zip(batches, nats, strict=True):
        weighted = torch.from_numpy(batch.weights[batch.weights > 0])
        of = batch.fields[:, OBJECTIVE][batch.weights > 0]
        inputs.append(Input(weighted, of, torch.tensor(each)))
    counts = StepCounts(sum(b.loss_divisors(COUNT) for b in batches).tolist())
    step = StepInputs(inputs, counts, [b.loss_divisor for b in batches])
    ready = normalizer.micro_batches(step, counts.loss_divisors, 0)
    trained = sum(float((one.weights * one.nats).sum()) * one.loss_factor for one in ready)
    sums = torch.zeros(COUNT, 2, dtype=torch.float64)
    for one in ready:
        sums.index_add_(
            0, torch.from_numpy(one.of).long(), torch.stack([one.weights * one.nats, one.weights], 1).double()
        )
    sums = normalizer.with_token_counts(sums, counts.loss_divisors, 0)
    return trained, normalizer.means(np.column_stack([sums.numpy(), np.zeros(COUNT)]), 1)


def test_four_tokens_by_hand():
    """Two of four are masked with p = 1/2; they have the probabilities 1/2 and 1/4: (2 ln 2 + 2 ln 4) / 4."""
    batch = Batch(row([2.0, 0.0, 0.0, 2.0], NUMBER, 7))
    assert batch.loss_divisor == 4.0 and batch.loss_divisors(COUNT)[NUMBER] == 4.0 and batch.loss_tokens == 2
    trained, reported = losses_of([batch], [[math.log(2), math.log(4)]])
    assert trained == pytest.approx(1.0397, abs=1e-4)
    assert reported == {"loss": pytest.approx(trained), "loss/masked_diffusion": pytest.approx(trained)}


BATCHES = [
    Batch(np.concatenate([row([0.0, 5.0, 0.0], NUMBER, 6), row([1.0, 1.0, 0.0], 3, 6)])),
    Batch(np.concatenate([row([0.0, 0.0], NUMBER, 6), row([1.0], 3, 6)])),
]
NATS = [[2.0, 3.0, 4.0], [1.0]]
"""5 tokens of diffusion, of which one is masked, with 10 nats; 3 weights of the other loss, with 8."""


def test_beside_other_losses_and_in_several_micro_batches():
    """A micro-batch without a masked token counts its tokens."""
    trained, reported = losses_of(BATCHES, NATS)
    assert trained == pytest.approx(18 / 8) and reported["loss"] == pytest.approx(18 / 8)
    assert reported["loss/masked_diffusion"] == pytest.approx(2.0) and reported[
        "loss/causal"
    ] == pytest.approx(8 / 3)
    trained, _ = losses_of(BATCHES, NATS, "mean_of_means")
    assert trained == pytest.approx((17 / 5 + 1 / 3) / 2)
    trained, reported = losses_of(BATCHES, NATS, "per_objective", {"masked_diffusion": 0.5})
    assert trained == pytest.approx(0.5 * 2 + 8 / 3) == pytest.approx(reported["loss"])
    assert reported["loss/masked_diffusion"] == pytest.approx(2.0)


def alone(settings, **more):
    return merge(settings, {"objectives": {"masked_diffusion": 1.0}, **more})


def evaluated(context, tree):
    trainer = make_trainer(context, tree)
    with torch.no_grad():  # every token is as likely as any other
        for parameter in trainer.engine.named_parameters.values():
            parameter.zero_()
    return trainer.evaluate(), trainer.config.model.vocab_size, validation_rows(trainer)


def validation_rows(trainer):
    samples = np.arange(trainer.config.training.eval_samples)
    return trainer.evaluation._data.batch(samples)


def test_an_evaluation_divides_by_tokens(settings):
    """Where every token has ln V nats, the loss is ln V times the sum of weights over the tokens."""
    ((found, vocabulary, fields),) = run_ranks(evaluated, 1, alone(settings))
    weights, tokens = fields[:, WEIGHTS].view(np.float32).sum(), (fields[:, DOC] != PADDING_DOC).sum()
    assert found["loss"] == pytest.approx(math.log(vocabulary) * weights / tokens, rel=1e-5)
    assert abs(weights / tokens - 1) > 1e-3  # else it would not tell


def test_a_model_learns_by_diffusion(settings, tmp_path):
    run_ranks(fit, 1, alone(settings, training={"steps": 12}))
    losses = records(tmp_path / "run")
    assert (
        np.mean([losses[step]["loss"] for step in (11, 12)])
        < np.mean([losses[step]["loss"] for step in (1, 2)]) - 0.05
    )
