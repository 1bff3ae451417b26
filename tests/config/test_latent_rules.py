"""Every rule of two stacks and a latent vector fires, and names the value, the rule and the remedy."""

import re

import pytest
from support.systems.latent import latent_config, latent_tree

from data_utils.common.errors import ConfigError
from data_utils.common.settings import build
from megatron_lite.config.model import ModelConfig
from megatron_lite.config.tree import Config


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"objectives": {"causal": 1}}, "objectives has optimus, causal; optimus has samples of its own"),
        ({"decoder": {"share_layers": "all"}}, "decoder.share_layers is all, which the stacks of optimus"),
        ({"model": {"relative": "buckets"}}, "model.relative is buckets, which the stacks of optimus"),
        ({"model": {"embedding_size": 16}}, "model.embedding_size is 16, which the stacks of optimus"),
        ({"decoder": {"max_position": 24}}, "decoder.max_position is 24; set it to 25"),
        ({"model": {"sentence_classes": 0}}, "optimus.feature is pooler, but model.sentence_classes is 0"),
        ({"parallel": {"tensor_parallel_size": 2}}, "parallel.tensor_parallel_size is 2, but optimus runs"),
        ({"parallel": {"pipeline_parallel_size": 2}}, "parallel.pipeline_parallel_size is 2, but optimus"),
        (
            {"checkpoint": {"initialize_from": "a"}, "optimus": {"decoder_from": "b"}},
            "checkpoint.initialize_from is a, but optimus also initializes a stack from b",
        ),
        ({"optimus": {"cycles": 21}}, "optimus.cycles is 21, more than training.steps"),
        (
            {"training": {"label_smoothing": 0.1}},
            "training.label_smoothing is 0.1, but the loss of optimus is a bound",
        ),
        (
            {"training": {"loss_normalization": "per_objective"}},
            "training.loss_normalization is per_objective",
        ),
    ],
)
def test_what_cannot_be_is_refused(changes, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        latent_config(**changes)


def test_a_decoder_needs_the_objective_and_the_objective_a_decoder():
    tree = latent_tree()
    with pytest.raises(ConfigError, match="the section decoder is null"):
        build(Config, {**tree, "decoder": None})
    with pytest.raises(ConfigError, match=r"decoder is set, .* objective optimus"):
        build(Config, {**tree, "objectives": {"causal": 1}})
    assert isinstance(build(Config, tree).decoder, ModelConfig)
