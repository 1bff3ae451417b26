"""Habits of heads: the weights of attention, and their means."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from data_utils.tasks.base import TargetGroup, TaskSample
from data_utils.tasks.templates.examples import document
from megatron_lite.analysis.attention_maps import attention_statistics, text_weights
from megatron_lite.analysis.words import Text
from megatron_lite.config.model import ModelConfig
from megatron_lite.transformer.init import initialize_parameters
from megatron_lite.transformer.transformer import Transformer

SIZES = {
    "num_layers": 2, "hidden_size": 24, "num_attention_heads": 3, "vocab_size": 100, "max_position": 64,
    "init_std": 0.2,
}  # fmt: skip


def test_habits_by_hand():
    """Three tokens: one of the layout, a word, one of the layout."""
    looks = torch.tensor([[0.5, 0.5, 0.0], [0.0, 0.0, 1.0], [0.25, 0.25, 0.5]])
    found = {name: values.item() for name, values in attention_statistics(looks[None, None], 1, 1).items()}
    entropies = [np.log(2), 0.0, 0.5 * np.log(4) + 0.5 * np.log(2)]
    assert found["entropy"] == pytest.approx(np.mean(entropies))
    assert found["distance"] == pytest.approx(np.mean([0.5, 1.0, 0.75]))
    assert found["before_text"] == pytest.approx(0.25) and found["after_text"] == pytest.approx(0.5)
    assert found["itself"] == pytest.approx(1 / 3)
    assert found["previous"] == pytest.approx(0.25 / 3) and found["next"] == pytest.approx(0.5)


@pytest.mark.parametrize(
    "options", [{}, {"positions": "rotary"}, {"relative": "buckets", "positions": "none"}], ids=str
)
def test_weights_match_the_kernel(options):
    """`text_weights` refuses what gives another output than the kernel; a text from left to right looks back only."""
    config = ModelConfig(**SIZES, **options)
    model = Transformer(config)
    initialize_parameters(model.named_parameters(), config, 3)
    tokens = np.random.default_rng(0).integers(0, 100, 9)
    example = document(tokens=tokens, ord=np.arange(9), objective=0)
    text = Text(["a"], [9], TaskSample([example], [TargetGroup(0, np.arange(9, dtype=np.int32))]), 0)
    run = SimpleNamespace(model=model.eval(), config=SimpleNamespace(model=config))
    weights = text_weights(run, text)
    assert weights.shape == (2, 3, 9, 9) and torch.allclose(weights.sum(-1), torch.ones(2, 3, 9))
    assert not weights.triu(1).any() and (weights.diagonal(dim1=-2, dim2=-1) > 0).all()
