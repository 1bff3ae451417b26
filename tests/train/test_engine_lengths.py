"""An engine gives products of half precision few shapes where each needs a kernel of its own."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.configs import tiny
from support.data.recipes import RECIPES, collate, make, windows
from torch.utils._python_dispatch import TorchDispatchMode

from data_utils.objectives import LOSS_NAMES
from megatron_lite.engine.engine import Engine
from megatron_lite.transformer import lengths as lengths_of
from megatron_lite.transformer.batch import Batch
from megatron_lite.transformer.init import initialize_parameters
from megatron_lite.transformer.kernels import compat
from megatron_lite.transformer.transformer import Transformer

CPU = torch.device("cpu")
PRODUCTS = ("mm", "addmm", "bmm", "baddbmm")


def engine(*settings: str) -> Any:
    one = SimpleNamespace(size=1, rank=0)
    return SimpleNamespace(
        context=SimpleNamespace(pp=one, tp=one, device=CPU), _config=tiny(*settings), _has_graphs=False
    )


def batches(name: str, count: int) -> list[Batch]:
    made = make(name, 100, **RECIPES[name].config)
    return [Batch(collate(made, windows(16, 100, seed))) for seed in range(count)]


@pytest.mark.parametrize("precision, has_few", [("bf16", True), ("fp32", False)])
def test_lengths_of_varying_batches(monkeypatch, precision, has_few):
    monkeypatch.setattr(lengths_of, "cpu_has_half_matmul", lambda dtype: True)
    varying = batches("t5", 30)
    hosts = [Engine.prepared(engine(f"training.precision={precision}"), batch, None) for batch in varying]
    lengths, tokens = {len(host.plan.order) for host in hosts}, {batch.tokens for batch in varying}
    assert len(tokens) > 20 and (len(lengths) <= 8 if has_few else lengths == tokens)
    losses, rows = {len(host.weight_objectives) for host in hosts}, {batch.loss_tokens for batch in varying}
    assert len(rows) > 15 and (len(losses) <= 8 if has_few else losses == rows)


class Shapes(TorchDispatchMode):
    """The shapes of all products of half precision."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[tuple[Any, ...]] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        operands = [x for x in args if isinstance(x, torch.Tensor)]
        if func.overloadpacket.__name__ in PRODUCTS and operands[0].dtype == torch.bfloat16:
            self.seen.add((func.overloadpacket.__name__, *((x.shape, x.stride()) for x in operands)))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("dropout", [pytest.param(0.0, marks=pytest.mark.slow), 0.1])
def test_products_have_few_shapes(monkeypatch, dropout):
    """12 products of the block for each length of the tokens, 3 of the head for each count of rows with loss."""
    for module in (lengths_of, compat):
        monkeypatch.setattr(module, "cpu_has_half_matmul", lambda dtype: True)
    made = engine(
        "training.precision=bf16",
        "model.num_layers=1",
        "model.vocab_size=3072",
        f"model.attention_dropout={dropout}",
    )
    model = Transformer(made._config.model, num_losses=len(LOSS_NAMES))
    initialize_parameters(model.named_parameters(), made._config.model, 1)
    model.to(torch.bfloat16)
    lengths, counts = set(), set()
    with Shapes() as shapes:
        for batch in batches("t5", 24):
            inputs = Engine.prepared(made, batch, 1 if dropout else None).to(CPU)
            lengths.add(len(inputs.tokens))
            counts.add(len(inputs.targets))
            model(inputs)[0].backward()
    assert len(lengths) <= 8 and len(counts) <= 8
    assert len(shapes.seen) <= 12 * len(lengths) + 3 * len(counts)
