"""muP: nothing changes at the base width, and the changes of what a model computes keep their size at others."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from support import parity
from support.distributed import run_ranks
from support.training.engines import tree
from support.training.parity_cases import Case
from support.transformer.optimizers import ALL

from data_utils.common.settings import build
from megatron_lite.config.model import ModelConfig, MupConfig
from megatron_lite.config.tree import Config
from megatron_lite.transformer.init import initialize_parameters
from megatron_lite.transformer.mup import is_hidden
from megatron_lite.transformer.transformer import Transformer
from scripts.coordinate_check import at_width, check, draw, slope

WIDTHS = (64, 128, 256, 512)


def steps_of(context, case):
    """Losses and weights of a case's steps."""
    engine = parity.make_engine(case.config(), context, case.num_losses)
    losses = [
        engine.train_step(parity.micro_batches_of(case, engine, context, step), parity.LR).objective_sums
        for step in range(case.steps)
    ]
    return losses, {name: parameter.detach().clone() for name, parameter in engine.named_parameters.items()}


@dataclasses.dataclass(frozen=True)
class AtBase(Case):
    """A case with muP, whose base has its own width."""

    mup: bool = False

    def config(self) -> Config:
        config = super().config()
        base = MupConfig(base_hidden_size=config.model.hidden_size, base_head_size=config.model.head_size)
        return dataclasses.replace(
            config, model=dataclasses.replace(config.model, mup=base if self.mup else None)
        )


def both(context, kind):
    return [steps_of(context, AtBase(optimizer=kind, mup=mup)) for mup in (False, True)]


@pytest.mark.parametrize("kind", ["adamw", *ALL])
def test_at_the_base_width_nothing_changes(kind):
    (without, weights), (losses, others) = run_ranks(both, 1, kind)[0]
    assert all(torch.equal(one, other) for one, other in zip(without, losses, strict=True))
    assert all(torch.equal(weights[name], others[name]) for name in weights)


HEADS = {
    "vocab_size": 50, "head_transform": True, "sentence_classes": 2,
    "task_head": {"type": "classes", "classes": 3, "pooler": True}, "span_boundary_places": 4,
    "tie_word_embeddings": False, "init": "plain",
}  # fmt: skip


def test_which_initial_values_follow_the_width():
    config = build(ModelConfig, {**dict(num_layers=2, hidden_size=128, num_attention_heads=2), **HEADS})
    narrow = dataclasses.replace(config, mup=MupConfig(base_hidden_size=8))
    models = Transformer(config), Transformer(narrow)
    for model in models:
        initialize_parameters(model.named_parameters(), model.config, 1)
    usual, scaled = (dict(model.named_parameters()) for model in models)
    hidden = {name for name in usual if (usual[name] != scaled[name]).any()}
    assert {name.split(".", 2)[-1] for name in hidden if name.startswith("layers.")} == {
        "attention.query_key_value.weight", "attention.dense.weight", "mlp.dense_h_to_4h.weight",
        "mlp.dense_4h_to_h.weight",
    }  # fmt: skip
    assert {name for name in hidden if not name.startswith("layers.")} == {
        "heads.projection.dense.weight", "heads.sentence.dense.weight", "heads.span_boundary.inner.dense.weight",
        "heads.span_boundary.outer.dense.weight",
    }  # fmt: skip
    assert all(torch.allclose(usual[name], 4 * scaled[name]) for name in hidden)


@pytest.mark.parametrize(
    "name, found",
    [
        ("layers.1.mlp_adapter.down.weight", True), ("layers.1.mlp_adapter.up.weight", False),
        ("heads.task.pooler.weight", True), ("heads.task.pool.weight", True),
        ("heads.task.classifier.weight", False), ("heads.vocabulary.weight", False),
        ("layers.0.cross_attention.query.weight", True), ("layers.0.input_layernorm.weight", False),
        ("layers.0.mlp.dense_h_to_4h.bias", False), ("relative_bias.weight", False),
    ],
)  # fmt: skip
def test_what_is_between_two_widths(name, found):
    assert is_hidden(name) == found


def test_logits_and_scores_are_scaled():
    """With the weights of a model without muP: as its logits over m, and its scores by the width of a head."""
    config = build(ModelConfig, {**dict(num_layers=1, hidden_size=32, num_attention_heads=2), **HEADS})
    scaled = dataclasses.replace(config, mup=MupConfig(base_hidden_size=8, base_head_size=4))
    usual, model = Transformer(config), Transformer(scaled)
    initialize_parameters(usual.named_parameters(), dataclasses.replace(config, init_std=0.5), 1)
    model.load_state_dict(usual.state_dict())
    rows = torch.randn(5, 32)
    with torch.no_grad():
        for head in (lambda made: made.heads.sentence, lambda made: made.heads.task.classifier):
            linear = getattr(head(usual), "classifier", head(usual))
            inner = torch.tanh(usual.heads.sentence.dense(rows)) if linear is not head(usual) else rows
            expected = inner / 4 @ linear.weight.T + linear.bias
            assert torch.allclose(head(model)(rows), expected, atol=1e-6)
        logits = model.heads.vocabulary_logits(rows, model.embedding.word_embeddings)
        assert torch.allclose(logits, rows / 4 @ usual.heads.vocabulary.weight.T, atol=1e-5)
    assert (
        model.layers[0].attention.query_factor == 0.5
    )  # sqrt(4) / 16, for a kernel that divides by sqrt(16)
    assert config.query_factor == 1.0


def config_of(**optimizer):
    settings = tree(
        model={"vocab_size": 200, "max_position": 64, "num_attention_heads": 4},
        batch={"micro_batch_size": 8}, data={"sequence_length": 48},
        optimizer={"lr": 2**-9, "weight_decay": 0.0, "clip_grad_norm": 0.0, **optimizer},
    )  # fmt: skip
    return build(Config, settings)


def slopes(context, config, steps, is_mup):
    found = check(context, config, WIDTHS, steps, 1, is_mup)
    return {name: slope(WIDTHS, values) for name, values in found.items()}


@pytest.mark.slow
@pytest.mark.parametrize("steps", [3, 10])
def test_changes_keep_their_size_at_every_width_with_mup_alone(steps):
    config = config_of()
    with_mup, without = (run_ranks(slopes, 1, config, steps, is_mup)[0] for is_mup in (True, False))
    assert set(with_mup) == {"block 1", "block 2", "logits"}
    assert all(abs(with_mup[name]) < 0.15 for name in ("block 1", "block 2")), with_mup
    assert -0.6 < with_mup["logits"] < 0.1
    assert without.pop("logits") > (0.5 if steps == 3 else 0.3)  # in later steps they grow less
    assert all(value > 0.5 for value in without.values()), without


@pytest.mark.slow
@pytest.mark.parametrize("kind", ALL)
def test_the_rule_of_each_optimizer_keeps_the_changes(kind):
    found = run_ranks(slopes, 1, config_of(kind=kind), 3, True)[0]
    assert all(abs(found[name]) < 0.15 for name in ("block 1", "block 2")), found
    assert -0.6 < found["logits"] < 0.1


def test_models_keep_their_proportions():
    model = ModelConfig(num_layers=1, hidden_size=64, num_attention_heads=4, head_dim=8, ffn_size=96)
    wide = at_width(model, 256, 64)
    assert (wide.head_dim, wide.ffn_size, wide.num_attention_heads) == (32, 384, 4)
    assert wide.mup == MupConfig(base_hidden_size=64, base_head_size=8)
    assert at_width(wide, 64, None) == model


def test_the_picture(tmp_path):
    changes = {name: {"logits": [1.0, 2.0]} for name in ("standard", "muP")}
    draw(changes, (64, 128), tmp_path / "check.png")
    assert (tmp_path / "check.png").read_bytes().startswith(b"\x89PNG")
