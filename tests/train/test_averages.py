"""Averages of the weights: by hand, in layouts and checkpoints, and where they stand in for the weights."""

from __future__ import annotations

import math

import pytest
import torch
from support.distributed import run_ranks
from support.training.engines import SAMPLES, layout, make_engine, tree
from support.training.whole_weights import load_weights
from support.transformer.batches import prefix_batch

from megatron_lite.checkpoint.read import load_checkpoint
from megatron_lite.checkpoint.verify import read_checkpoint
from megatron_lite.checkpoint.write import save_checkpoint
from megatron_lite.config.sections import ParallelConfig
from megatron_lite.optim import ema as averages
from megatron_lite.transformer.batch import Batch

# At an interval of 1 the decay is below the warmup from the fourth update on, at 2 from the first.
STEPS, DECAY = 5, 0.3
KEPT = {"ema": {"decay": DECAY, "use": True}}


def settings_of(parallel, **sections):
    return tree(parallel=parallel, batch={"micro_batch_size": 2}, **sections)


def step(engine, number, factor=0.01):
    """One step on fixed samples; `factor` infinity makes gradients that are skipped."""
    samples = prefix_batch(number, rows=SAMPLES, vocab=500)
    share = SAMPLES // 2 // engine.context.dp.size
    micro = [samples[(m * engine.context.dp.size + engine.context.dp.rank) * 2 :][:2] for m in range(share)]
    engine.set_step(number)
    return engine.train_step([engine.prepared(Batch(rows), number, factor) for rows in micro], lr=1e-2)


def parts(engine, kind):
    return {f.name: f.tensors[kind].detach().clone() for f in engine.fragments() if kind in f.tensors}


def average_by_hand(context, settings, interval, early):
    """Largest differences of the averages from fp64, of an update in spacings of fp32, and of the weights.

    Step 3 is skipped. Args: early: steps that are computed in fp64.
    """
    averages._EARLY = early
    engine = make_engine(context, settings)
    expected = {name: values.double() for name, values in parts(engine, "weight").items()}
    updates, spacings = 0, 0.0
    for number in range(1, STEPS + 1):
        before = parts(engine, "ema")
        result = step(engine, number, float("inf") if number == 3 else 0.01)
        assert result.skipped == (number == 3)
        updates += number != 3
        decay = min(DECAY**interval, (1 + updates) / (10 + updates))
        if number != 3 and number % interval == 0:
            for name, weight in parts(engine, "weight").items():
                expected[name] += (1 - decay) * (weight.double() - expected[name])
                exact = before[name].double() + (1 - decay) * (weight.double() - before[name].double())
                larger = torch.maximum(before[name].abs(), weight.abs())
                spacing = torch.nextafter(larger, torch.tensor(math.inf)) - larger
                difference = parts(engine, "ema")[name].double() - exact
                spacings = max(spacings, (difference.abs() / spacing.double()).max().item())
    values, weights = parts(engine, "ema"), parts(engine, "weight")
    assert values.keys() == expected.keys()
    away = max((weights[name] - values[name]).abs().max().item() for name in expected)
    error = max((values[name] - expected[name]).abs().max().item() for name in expected)
    return error, spacings, away


@pytest.mark.parametrize("interval", [1, 2])
@pytest.mark.parametrize(
    ("early", "limit"), [(averages._EARLY, 0.5), (0, 1.5)], ids=["early steps", "later ones"]
)
def test_averages_are_those_by_hand(interval, early, limit):
    settings = settings_of(layout(), ema={"decay": DECAY, "interval": interval})
    ((error, spacings, away),) = run_ranks(average_by_hand, 1, settings, interval, early)
    # fp32 numbers of about 1 are rounded in each update; the weights have moved on by steps of 0.01. In fp32 the
    # factor is rounded as well, which is far from 0 in these first steps.
    assert error < 1e-6 and 0 < spacings <= limit * (1 + 1e-6) and away > 1e-3


def save_averages(context, settings, path):
    """Train and save. Returns whether the model's weights came back, whether it had others within, both losses."""
    engine = make_engine(context, settings)
    for number in range(1, STEPS):
        step(engine, number)
    batches = [Batch(prefix_batch(9, rows=2, vocab=500))]
    before = {name: p.detach().clone() for name, p in engine.named_parameters.items()}
    losses = [engine.evaluate(batches)]
    with engine.averaged_weights():
        losses.append(engine.evaluate(batches))
        within = any(not torch.equal(p, before[name]) for name, p in engine.named_parameters.items())
    back = all(torch.equal(p, before[name]) for name, p in engine.named_parameters.items())
    saved = save_checkpoint(path, STEPS, engine, {"config": {"ema": settings.get("ema", {})}}, context)
    again = make_engine(context, settings)
    load_checkpoint(read_checkpoint(saved), again, context)
    kept = parts(engine, "ema"), parts(again, "ema")
    is_equal = all(torch.equal(kept[0][name], kept[1][name]) for name in kept[0])
    return back, within, is_equal, losses[0].sum().item() != losses[1].sum().item()


def load_averages(context, settings, path, plain):
    """Averages as another layout saved them; and those that begin at the weights of a run without."""
    engine = make_engine(context, settings)
    (saved,) = path.iterdir()
    found = read_checkpoint(saved)
    load_checkpoint(found, engine, context)
    whole = load_weights(found)  # what the run uses: the averages
    equal = all(
        torch.equal(v[: whole[name].numel()], whole[name].flatten())
        for name, v in parts(engine, "ema").items()
    )
    saved = save_checkpoint(plain, 1, make_engine(context, tree()), {}, context)
    load_checkpoint(read_checkpoint(saved), engine, context)
    weights = parts(engine, "weight")
    return equal, all(torch.equal(v, weights[name]) for name, v in parts(engine, "ema").items())


def test_averages_are_saved_loaded_in_other_layouts_and_measured(tmp_path):
    parallel = layout(tp=2, zero=2)
    found = run_ranks(
        save_averages, 4, settings_of(parallel, **KEPT), tmp_path / "two",
        parallel=ParallelConfig(**parallel),
    )  # fmt: skip
    assert found == [(True, True, True, True)] * 4
    settings = settings_of(layout(), **KEPT)
    assert run_ranks(load_averages, 1, settings, tmp_path / "two", tmp_path / "plain") == [(True, True)]
