"""An engine pads batches to few lengths where products of half precision need a kernel for each."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from support.configs import tiny
from support.recipes import RECIPES, collate, make, windows

from megatron_lite.model import model_input
from megatron_lite.model.batch import Batch
from megatron_lite.train.engine import Engine


@pytest.mark.parametrize("precision, has_few", [("bf16", True), ("fp32", False)])
def test_lengths_of_varying_batches(monkeypatch, precision, has_few):
    monkeypatch.setattr(model_input, "cpu_has_half_matmul", lambda dtype: True)
    one = SimpleNamespace(size=1, rank=0)
    context = SimpleNamespace(pp=one, tp=one, device=torch.device("cpu"))
    engine = SimpleNamespace(context=context, _config=tiny(f"training.precision={precision}"))
    made = make("t5", 100, **RECIPES["t5"].config)
    batches = [Batch(collate(made, windows(16, 100, seed))) for seed in range(30)]
    lengths = {len(Engine.prepared(engine, batch, None).plan.order) for batch in batches}
    tokens = {batch.tokens for batch in batches}
    assert len(tokens) > 20 and (len(lengths) <= 8 if has_few else lengths == tokens)
