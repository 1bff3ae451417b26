"""A run that stops learning says so once, and a run that learns slowly says nothing."""

from __future__ import annotations

import logging
import math

import pytest
from support.distributed import run_ranks
from support.training.training import make_trainer

from data_utils.common.settings import merge
from megatron_lite.telemetry.standstill import MIN_EVALUATIONS, Standstill


def said(losses, rate=1.0, interval=100) -> list[str]:
    watch = Standstill()
    advice = (watch.advice(interval * n, loss, rate) for n, loss in enumerate(losses, start=1))
    return [text for text in advice if text]


def power_law(evaluations: int) -> list[float]:
    """Chinchilla's form for a fixed size (arXiv:2203.15556, equation 10): most of the loss cannot be learnt."""
    return [1.69 + 406.4 / 4e8**0.34 + 410.7 / (1e5 * 100 * n) ** 0.28 for n in range(1, evaluations + 1)]


def test_a_loss_that_stands_is_reported_once_with_where_to_look() -> None:
    (text,) = said([5.3, *[5.2 + 0.001 * math.sin(n) for n in range(20)]])
    assert "5.2" in text
    for setting in ("optimizer.lr", "model.positions=rotary", "docs/learning.md"):
        assert setting in text


def test_a_loss_that_rises_has_another_reason() -> None:
    (text,) = said([5.0, 4.0, 3.0, 3.3, 3.5, 3.7, 3.8])
    assert "rises, from 3.0000 to" in text and "rotary" not in text


@pytest.mark.parametrize("evaluations", [10, 100, 1000])
def test_a_run_that_learns_slowly_is_left_alone(evaluations) -> None:
    assert said(power_law(evaluations)) == []
    assert len(said(power_law(1000)[-1:] * 20)) == 1


def test_nothing_is_said_too_early_or_where_the_rate_has_fallen() -> None:
    assert said([5.0] * (MIN_EVALUATIONS - 1)) == []
    assert said([5.0] * 50, rate=0.2) == []


def warnings_of_fit(context, tree) -> list[str]:
    found: list[str] = []
    log = logging.getLogger("megatron_lite.train.evaluation")
    log.handle = lambda record: found.append(record.getMessage())  # type: ignore[method-assign]
    make_trainer(context, tree).fit()
    return found


def test_a_run_that_learns_nothing_warns_once(settings) -> None:
    still = {
        "optimizer": {"lr": 1e-12},
        "training": {"eval_interval": 1, "steps": 9},
        "schedule": {"kind": "constant"},
    }
    (texts,) = run_ranks(warnings_of_fit, 1, merge(settings, still))
    assert (
        len([text for text in texts if "has stopped falling" in text and "model.positions=rotary" in text])
        == 1
    )
