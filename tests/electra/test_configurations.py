"""The configurations of ELECTRA: sizes of the released classes, and the recipe of the published code."""

import math
import re

import pytest
import torch
from support.project import ROOT

from data_utils.common.settings import build, merge, to_tree
from megatron_lite.config.tree import Config, load_config
from megatron_lite.estimate.average_sequence import average_sequence
from megatron_lite.estimate.dry_run import dry_run
from megatron_lite.estimate.gpus import gpu_named
from megatron_lite.estimate.step_estimate import estimate
from megatron_lite.models.electra.config import generator_of
from megatron_lite.models.electra.model import Electra
from megatron_lite.transformer.build import model_spec
from megatron_lite.transformer.flops import parameter_count

MODELS = ROOT / "configs"
ELECTRAS = {  # discriminator and generator of the released classes, each with the tables that both share
    "electra-small": (13_549_057, 4_620_026),
    "electra-base": (109_483_009, 33_740_602),
    "electra-large": (335_142_913, 51_295_290),
}


def published(name):
    return load_config([MODELS / f"{name}.yaml"])


def test_every_configuration_is_in_the_table():
    assert {path.stem for path in MODELS.glob("electra-*.yaml")} == set(ELECTRAS)


@pytest.mark.parametrize("name", ELECTRAS)
def test_electra_is_a_generator_and_a_discriminator(name):
    config = published(name)
    sizes = {key: math.prod(shape) for key, shape in model_spec(config).shapes(config).items()}
    of_generator = sum(size for key, size in sizes.items() if key.startswith("generator."))
    generator = generator_of(config)
    assert (sum(sizes.values()) - of_generator, parameter_count(generator, padded=False)) == ELECTRAS[name]
    found = re.findall(r"([\d.]+) M", (MODELS / f"{name}.yaml").read_text().partition("\n\n")[0])
    counted = [sum(sizes.values()), ELECTRAS[name][0], of_generator]
    assert found == [f"{count / 1e6:.1f}" for count in counted]
    with torch.device("meta"):
        made = Electra(config.model, generator)
    assert sum(parameter.numel() for parameter in made.parameters()) == model_spec(config).count(config)


def test_electra_has_the_recipe_of_its_code():
    """Lines: width of the embeddings, of the generator, its heads; rate, rows, length, masked part."""
    found = {}
    for name in ELECTRAS:
        config = published(name)
        (section,) = [choice.section for choice in config.objective_choices]
        width = section.generator_width(config.model.hidden_size)
        found[name] = (
            *(
                config.model.embedding_size or config.model.hidden_size,
                width,
                section.num_generator_heads(width),
                config.optimizer.lr,
            ),
            *(config.batch.global_batch_size, config.row_length, section.masked_ratio),
        )
        assert (section.mask_token_prob, section.random_token_prob) == (0.85, 0.0)
        assert config.training.loss_weights == {"replaced": 50.0}
        assert (config.schedule.kind, config.schedule.warmup_steps, config.optimizer.weight_decay) == (
            *("linear", 10_000),
            0.01,
        )
    assert found == {
        "electra-small": (128, 64, 1, 5e-4, 128, 128, 0.15),
        "electra-base": (768, 256, 4, 2e-4, 256, 512, 0.15),
        "electra-large": (1024, 256, 4, 2e-4, 2048, 512, 0.25),
    }


def test_deberta_is_two_stacks_of_its_sizes_with_words_each():
    """DebertaV2Model of base and of small, a head for tokens, and one that finds replaced tokens."""
    config = published("deberta-v3-base-rtd")
    sizes = {key: math.prod(shape) for key, shape in model_spec(config).shapes(config).items()}
    by_stack = [
        sum(size for key, size in sizes.items() if key.startswith(p)) for p in ("generator.", "encoder.")
    ]
    assert by_stack == [141_304_320 + 768 * 771 + 128_100, 183_831_552]
    found = re.findall(r"([\d.]+) M", (MODELS / "deberta-v3-base-rtd.yaml").read_text().partition("\n\n")[0])
    counted = [sum(sizes.values()), 183_831_552 + 768 * 769 + 769, 128_100 * 768]
    assert found == [f"{count / 1e6:.1f}" for count in counted]


@pytest.mark.parametrize(
    "name", ["electra-base", pytest.param("deberta-v3-base-rtd", marks=pytest.mark.slow)]
)
def test_the_dry_run_counts_both_stacks(name, capsys):
    """Its FLOPs are the model spec's, the memory holds a common table once, times and launches are sums."""
    config, gpu = published(name), gpu_named("h100")
    dry_run(config, 8, "h100")
    printed, count = capsys.readouterr().out, model_spec(config).count(config)
    assert f"parameters        {count:,}; {count:,} on the largest rank" in printed and "it fits" in printed
    rows = average_sequence(config)
    found, samples = estimate(config, 8, gpu, rows), config.batch.global_batch_size // 8
    work = [int(each * samples) for each in (rows.tokens, rows.loss_tokens, rows.visible_keys, 0, 0)]
    assert found.flops == pytest.approx(model_spec(config).flops(config, *work), rel=1e-3)
    assert found.peak.weights == pytest.approx(2 * count, rel=0.01)
    tree = {"objectives": {"masked_lm": 1}, "training": {"loss_normalization": "global_tokens"}}
    alone = {name: x for name, x in to_tree(config).items() if name not in ("electra", "objectives")}
    alone["training"] = {name: x for name, x in alone["training"].items() if name != "loss_weights"}
    one = estimate(build(Config, merge(alone, tree)), 8, gpu, rows)
    assert one.step_ms < found.step_ms < 2.5 * one.step_ms
    assert found.peak.activations > 1.2 * one.peak.activations
