"""The published models against their table, every validation rule, and the order in which files combine."""

from __future__ import annotations

import ast
import dataclasses
import json
import traceback
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
import yaml
from support.project import ROOT

from data_utils.base.errors import ConfigError
from data_utils.base.settings import build, merge, parse_override, to_tree
from data_utils.text.tokenizers import assign_special_tokens, sentencepiece_special_tokens
from megatron_lite.config import deepspeed_options as deepspeed_module
from megatron_lite.config import events as events_module
from megatron_lite.config import sections as sections_module
from megatron_lite.config import tree as config_module
from megatron_lite.config.deepspeed_options import DEFAULTS, REFUSED
from megatron_lite.config.parameter_count import padded_vocab_size, parameter_count
from megatron_lite.config.tree import (
    BatchConfig,
    Config,
    ParallelConfig,
    load_config,
)

MODELS = ROOT / "configs"

# The published models: layers, hidden size, heads, largest position, padded vocabulary, million parameters.
PUBLISHED = {
    "glm-base": (12, 768, 12, 512, 30592, "109.3"),
    "glm-large": (24, 1024, 16, 512, 30592, "334.7"),
    "glm-410m": (30, 1024, 16, 512, 30592, "410.3"),
    "glm-515m": (30, 1152, 18, 512, 30592, "514.6"),
    "glm-roberta": (24, 1024, 16, 512, 50304, "354.9"),
    "glm-large-chinese": (24, 1024, 16, 1024, 50048, "355.7"),
    "glm-2b": (36, 2048, 32, 1024, 50304, "1920."),
    "glm-10b": (48, 4096, 64, 1024, 50304, "9881."),
    "glm-10b-1024": (48, 4096, 64, 1024, 50304, "9881."),
    "glm-10b-chinese": (48, 4096, 64, 1024, 50048, "9880."),
}

# Their recipes: lr, beta2, eps, weight decay, steps, decay, end of decay, warm-up, floor, token, sentence.
RECIPES = {
    "glm-base": (4e-4, 0.98, 1e-6, 0.1, 150_000, "cosine", 120_000, 6_000, 0.05, 1.0, 0.0),
    "glm-large": (2e-4, 0.98, 1e-6, 0.1, 200_000, "cosine", 160_000, 8_000, 0.05, 1.0, 0.0),
    "glm-roberta": (4e-4, 0.98, 1e-6, 0.01, 500_000, "linear", 500_000, 30_000, 0.025, 1.0, 0.0),
    "glm-large-chinese": (4e-4, 0.98, 1e-6, 0.01, 250_000, "cosine", 200_000, 8_000, 0.1, 0.4, 0.3),
    "glm-2b": (1e-4, 0.95, 1e-8, 0.1, 250_000, "cosine", 175_000, 7_000, 0.1, 0.4, 0.3),
    "glm-10b": (1e-4, 0.95, 1e-8, 0.1, 250_000, "cosine", 175_000, 7_000, 0.1, 0.5, 0.3),
    "glm-10b-1024": (3e-5, 0.95, 1e-8, 0.1, 250_000, "linear", 50_000, 250, 0.1, 0.4, 0.3),
    "glm-10b-chinese": (1e-4, 0.95, 1e-8, 0.1, 150_000, "cosine", 120_000, 4_800, 0.1, 0.5, 0.3),
}

BERT = {"pad": 0, "unk": 100, "cls": 101, "sep": 102, "mask": 103}
ROBERTA = {"cls": 0, "pad": 2, "sep": 2, "eos": 2, "unk": 3, "mask": 50264}

TINY = {
    "model": {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 300},
    "training": {"steps": 100},
}


def tiny(*overrides: str) -> Config:
    tree: dict[str, Any] = TINY
    for override in overrides:
        tree = merge(tree, parse_override(override))
    return build(Config, tree)


def published(name: str) -> Config:
    return load_config([MODELS / f"{name}.yaml"])


# The published models


def test_every_published_model_has_a_file():
    assert {path.stem for path in MODELS.glob("glm-*.yaml")} == set(PUBLISHED)


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_model_has_the_published_size(name):
    model = published(name).model
    layers, hidden, heads, max_position, vocab, millions = PUBLISHED[name]
    shape = (model.num_layers, model.hidden_size, model.num_attention_heads, model.max_position)
    assert shape == (layers, hidden, heads, max_position)
    assert padded_vocab_size(model.vocab_size) == vocab
    digits = 4 - len(millions.partition(".")[0])
    assert f"{parameter_count(model) / 1e6:.{digits}f}" == millions.rstrip(".")


@pytest.mark.parametrize("path", sorted(MODELS.glob("*.yaml")), ids=lambda path: path.stem)
def test_the_parameter_count_is_that_of_the_real_module(path):
    """And what --dry-run says that one rank holds."""
    import torch

    from megatron_lite.model.glm import GLM
    from megatron_lite.train.estimate import stages

    config = load_config([path])
    if config.model.vocab_size is None:
        config = config.with_vocab_size(1000)
    with torch.device("meta"):
        parameters = dict(GLM(config.model).named_parameters())
    assert sum(parameter.numel() for parameter in parameters.values()) == parameter_count(config.model)
    (stage,) = stages(replace(config, parallel=ParallelConfig()))
    assert stage.parameters == parameter_count(config.model)
    width = config.model.embedding_size or config.model.hidden_size
    padding = len(parameters["embedding.word_embeddings.weight"]) - config.model.vocab_size
    assert parameter_count(config.model) - parameter_count(config.model, padded=False) == padding * width


@pytest.mark.parametrize("name", RECIPES)
def test_a_published_recipe_is_that_of_the_reference(name):
    config = published(name)
    optimizer, schedule, objective = (
        config.optimizer,
        config.schedule,
        config.objective_sections["blank_infilling"],
    )
    assert (
        *(optimizer.lr, optimizer.beta2, optimizer.eps, optimizer.weight_decay),
        *(config.training.steps, schedule.kind, schedule.decay_steps, schedule.warmup_steps),
        schedule.min_lr_ratio,
        *(objective.token_prob, objective.sentence_prob),
    ) == RECIPES[name]  # fmt: skip
    assert (optimizer.beta1, optimizer.clip_grad_norm) == (0.9, 1.0)
    if objective.sentence_prob > 0:
        assert (objective.document_min_ratio, objective.block_mask_prob) == (0.25, 0.1)


def test_the_papers_mix_may_be_laid_over_a_model():
    """Short spans and long ones, half each; everything else stays the model's."""
    config = load_config([MODELS / "glm-10b.yaml", MODELS / "objectives/paper.yaml"])
    mix = config.objective_sections["blank_infilling"]
    assert (mix.token_prob, mix.sentence_prob, mix.masked_ratio, mix.mean_span_length) == (
        0.5,
        0.0,
        0.15,
        3.0,
    )
    assert (mix.document_min_ratio, mix.document_max_ratio, mix.document_min_context) == (0.5, 1.0, 1)
    model = published("glm-10b")
    sections = {**config.objective_sections, "blank_infilling": model.objective_sections["blank_infilling"]}
    assert dataclasses.replace(config, objective_sections=sections) == model


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_vocabulary_is_the_size_of_the_models_tokenizer(name):
    config = published(name)
    sizes = {
        "bert_wordpiece": assign_special_tokens(BERT, 30522)[1],
        "gpt2_bpe": assign_special_tokens({"eos": 50256}, 50257)[1],
        "hf_json": assign_special_tokens(ROBERTA, 50265)[1],
        "sentencepiece": sentencepiece_special_tokens(50000, config.tokenizer.fixed_command_tokens)[1],
    }
    assert config.model.vocab_size == sizes[config.tokenizer.kind]


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_batch_fits_8_and_64_ranks(name):
    batch = published(name).batch
    for ranks in (8, 64):
        steps = batch.accumulation_steps(ranks)
        assert steps * ranks * batch.micro_batch_size == batch.global_batch_size


def test_no_two_published_models_share_a_run_directory():
    directories = [published(name).run.directory for name in PUBLISHED]
    assert len(set(directories)) == len(directories)


# The other systems: layers, hidden size, heads, objective, row length, lr, sequences per step, steps.
SYSTEMS = {
    "bert-base": (12, 768, 12, "masked_lm", 512, 1e-4, 256, 1_000_000),
    "bert-large": (24, 1024, 16, "masked_lm", 512, 1e-4, 256, 1_000_000),
    "roberta-large": (24, 1024, 16, "masked_lm", 512, 4e-4, 8192, 500_000),
    "spanbert-large": (24, 1024, 16, "spanbert", 512, 1e-4, 256, 2_400_000),
    "albert-base": (12, 768, 12, "albert", 512, 4e-4, 4096, 125_000),
    "ernie-base": (12, 768, 12, "ernie", 512, 1e-4, 256, 1_000_000),
    "gpt": (12, 768, 12, "causal", 512, 2.5e-4, 64, 1_000_000),
    "gpt2-xl": (48, 1600, 25, "causal", 1024, 1.5e-4, 512, 600_000),
    "unilm-large": (24, 1024, 16, "unilm", 512, 3e-5, 330, 770_000),
    "unilmv2-base": (12, 768, 12, "unilmv2", 664, 6e-4, 7680, 500_000),
    "xlnet-large": (24, 1024, 16, "xlnet", 600, 4e-4, 8192, 500_000),
    "mass-base": (12, 1024, 16, "mass", 768, 1e-4, 256, 500_000),
    "t5-base": (24, 768, 12, "t5", 568, 4e-4, 128, 524_288),
    "bart-large": (24, 1024, 16, "bart", 928, 4e-4, 8000, 500_000),
}


@pytest.mark.parametrize("name", SYSTEMS)
def test_a_system_has_its_headline_recipe(name):
    config = published(name)
    model, (choice,) = config.model, config.objective_choices
    assert (
        *(model.num_layers, model.hidden_size, model.num_attention_heads, choice.name),
        choice.section.row_length_for(config.data.sequence_length),
        *(config.optimizer.lr, config.batch.global_batch_size, config.training.steps),
    ) == SYSTEMS[name]


def test_ernie_2_adds_a_task_every_50000_steps():
    config = published("ernie2-base")
    batch, tokens = config.batch.global_batch_size, 512
    assert config.model.task_embedding and batch * tokens == 393_216
    rows = {choice.section.row_length_for(config.data.sequence_length) for choice in config.objective_choices}
    assert rows == {tokens}
    starts = {choice.name: choice.first_sample / batch for choice in config.objective_choices}
    assert starts == {"ernie": 0, "albert": 50_000, "masked_lm": 100_000}
    assert config.training.steps == 150_000


def test_every_configuration_is_in_a_table():
    named = {path.stem for path in MODELS.glob("*.yaml")}
    assert named == {"tiny", "ernie2-base", *PUBLISHED, *SYSTEMS}


def test_objectives_are_chosen_and_mixed():
    assert [choice.name for choice in tiny().objective_choices] == ["blank_infilling"]
    config = tiny(
        "objectives={causal: 2, t5: 1, mass: 0}", "objective_starts={t5: 100}", "t5.noise_ratio=0.2"
    )
    causal, t5 = config.objective_choices
    assert (causal.name, causal.weight, causal.first_sample, causal.section) == (
        "causal",
        2.0,
        0,
        config.objective_sections["causal"],
    )
    assert (t5.name, t5.weight, t5.first_sample, t5.section.noise_ratio) == ("t5", 1.0, 100, 0.2)


@pytest.mark.parametrize("path", sorted(MODELS.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_configuration_survives_printing_and_reading(path):
    config = load_config([path])
    assert build(Config, yaml.safe_load(yaml.safe_dump(to_tree(config)))) == config


@pytest.mark.parametrize(
    ("vocab", "tp", "padded"), [(1, 1, 128), (128, 1, 128), (129, 1, 256), (30527, 8, 30720)]
)
def test_the_vocabulary_is_padded_to_128_rows_per_shard(vocab, tp, padded):
    assert padded_vocab_size(vocab, tp) == padded


# Every rule, with what the message must hold: the value, the rule, the remedy


def over(*overrides: str) -> Callable[[], Any]:
    return lambda: tiny(*overrides)


RULES: dict[str, tuple[Callable[[], Any], tuple[str, ...]]] = {
    "num_layers": (over("model.num_layers=0"), ("model.num_layers is 0", "at least 1")),
    "max_position": (over("model.max_position=-1"), ("model.max_position is -1", "at least 1")),
    "heads": (
        over("model.num_attention_heads=5"),
        ("num_attention_heads (5)", "divide", "choose a divisor of 64"),
    ),
    "dropout": (over("model.output_dropout=1"), ("model.output_dropout is 1.0", "in [0, 1)")),
    "negative dropout": (
        over("model.attention_dropout=-.1"),
        ("model.attention_dropout is -0.1", "in [0, 1)"),
    ),
    "shrink": (over("model.embedding_gradient_shrink=0"), ("embedding_gradient_shrink is 0.0", "in (0, 1]")),
    "init": (over("model.init_std=0"), ("model.init_std is 0.0", "above 0", "default is 0.02")),
    "epsilon": (over("model.layernorm_epsilon=-1e-5"), ("model.layernorm_epsilon is -1e-05", "above 0")),
    "vocab": (over("model.vocab_size=0"), ("model.vocab_size is 0", "at least 1, or null")),
    "gelu": (over("model.gelu=relu"), ("model.gelu is 'relu'", "one of tanh, erf")),
    "micro": (over("batch.micro_batch_size=0"), ("batch.micro_batch_size is 0", "at least 1")),
    "global": (
        over("batch.global_batch_size=10"),
        ("(10)", "multiple of batch.micro_batch_size (8)", "change one"),
    ),
    "world": (
        lambda: BatchConfig(micro_batch_size=4, global_batch_size=24).accumulation_steps(4),
        (
            "global_batch_size (24)",
            "(4) x data-parallel ranks (4) = 16",
            "number of processes that divides 6",
        ),
    ),
    "zero": (over("parallel.zero_stage=0"), ("parallel.zero_stage is 0", "one of 1, 2, 3")),
    "tensor": (over("parallel.tensor_parallel_size=0"), ("tensor_parallel_size is 0", "at least 1")),
    "zero under a pipeline": (
        over("parallel.pipeline_parallel_size=2", "parallel.zero_stage=2"),
        ("zero_stage is 2", "pipeline_parallel_size 2", "set zero_stage to 1"),
    ),
    "offloading under a pipeline": (
        over("parallel.pipeline_parallel_size=2", "parallel.offload_optimizer=true"),
        ("offload_optimizer is true", "pipeline_parallel_size 2", "drift apart", "set one of them"),
    ),
    "sequence parallelism alone": (
        over("parallel.sequence_parallel=true"),
        ("sequence_parallel is true", "tensor_parallel_size 1", "set it to false"),
    ),
    "processes": (
        lambda: ParallelConfig(tensor_parallel_size=2, pipeline_parallel_size=2).data_parallel_size(6),
        ("6 processes", "(2) x pipeline_parallel_size (2) = 4", "start a multiple of 4"),
    ),
    "heads over ranks": (
        over("parallel.tensor_parallel_size=8"),
        ("num_attention_heads (4)", "tensor_parallel_size (8)", "choose a divisor of 4"),
    ),
    "stages": (
        over("parallel.pipeline_parallel_size=8"),
        ("pipeline_parallel_size (8)", "num_layers (2)", "needs a block"),
    ),
    "fp16 under a pipeline": (
        over("parallel.pipeline_parallel_size=2", "training.precision=fp16"),
        ("precision is fp16", "drift apart", "use bf16"),
    ),
    "tokens over ranks": (
        over(
            "parallel.tensor_parallel_size=4",
            "parallel.sequence_parallel=true",
            "data.row_length=585",
            "batch.micro_batch_size=1",
        ),
        ("= 585 tokens", "tensor_parallel_size (4)", "change data.row_length"),
    ),
    "steps": (over("training.steps=0"), ("training.steps is 0", "at least 1")),
    "eval_interval": (over("training.eval_interval=-1"), ("training.eval_interval is -1", "at least 0")),
    "eval_samples": (over("training.eval_samples=0"), ("training.eval_samples is 0", "at least 1")),
    "nonfinite": (
        over("training.max_nonfinite_steps=0"),
        ("training.max_nonfinite_steps is 0", "at least 1"),
    ),
    "seed": (over("training.seed=-1"), ("training.seed is -1", f"in [0, {2**63})")),
    "large seed": (over(f"training.seed={2**63}"), (f"training.seed is {2**63}", f"in [0, {2**63})")),
    "precision": (over("training.precision=fp8"), ("training.precision is 'fp8'", "one of bf16, fp16, fp32")),
    "recompute": (
        over("training.recompute=some"),
        ("training.recompute is 'some'", "one of none, selective, full"),
    ),
    "normalization": (
        over("training.loss_normalization=mean"),
        ("training.loss_normalization is 'mean'", "one of global_tokens, per_objective, mean_of_means"),
    ),
    "loss weights without their mode": (
        over("training.loss_weights={token: 2}"),
        ("loss_normalization is global_tokens", "set that to per_objective, or remove the weights"),
    ),
    "loss weight of an unknown loss": (
        over("training.loss_weights={words: 2}", "training.loss_normalization=per_objective"),
        ("'words'", "one of token, sentence"),
    ),
    "loss weight": (
        over("training.loss_weights={token: -2}", "training.loss_normalization=per_objective"),
        ("training.loss_weights.token is -2", "0 or more"),
    ),
    "segments": (over("model.segments=-1"), ("model.segments is -1", "at least 0")),
    "embedding_size": (over("model.embedding_size=0"), ("embedding_size is 0", "at least 1, or null")),
    "labels without a head": (
        over("objectives={albert: 1}", "model.max_position=600"),
        ("model.sentence_head is false", "albert makes", "set it to true, or switch the labels off"),
    ),
    "head without labels": (
        over("model.sentence_head=true"),
        ("model.sentence_head is true", "no objective", "set it to false, or choose"),
    ),
    "boundary head without spans": (
        over("model.span_boundary_places=20"),
        ("span_boundary_places is 20 without the objective spanbert", "set it to 0, or add"),
    ),
    "too few segments": (
        over(
            "model.segments=2", "objectives={unilm: 1}", "model.sentence_head=true", "model.max_position=600"
        ),
        ("model.segments is 2", "the objectives use 6", "set it to 6, or to 0"),
    ),
    "shared layers in stages": (
        over("model.share_layers=true", "parallel.pipeline_parallel_size=2"),
        ("pipeline_parallel_size is 2 with model.share_layers", "size to 1, or share_layers to false"),
    ),
    "stop": (
        over("training.stop_after_step=101"),
        ("stop_after_step is 101", "at most training.steps (100)"),
    ),
    "lr": (over("optimizer.lr=0"), ("optimizer.lr is 0.0", "above 0")),
    "beta": (over("optimizer.beta2=1"), ("optimizer.beta2 is 1.0", "in [0, 1)")),
    "decay": (over("optimizer.weight_decay=-1"), ("optimizer.weight_decay is -1.0", "at least 0")),
    "schedule": (over("schedule.kind=step"), ("schedule.kind is 'step'", "one of cosine, linear, constant")),
    "warmup": (over("schedule.warmup_steps=-1"), ("schedule.warmup_steps is -1", "at least 0")),
    "floor": (over("schedule.min_lr_ratio=1.5"), ("schedule.min_lr_ratio is 1.5", "in [0, 1]")),
    "decay_steps": (
        over("schedule.decay_steps=10", "schedule.warmup_steps=10"),
        ("schedule.decay_steps (10)", "larger than schedule.warmup_steps (10)"),
    ),
    "warmup beyond the run": (
        over("schedule.warmup_steps=100"),
        ("schedule.warmup_steps (100)", "smaller than", "lower it or raise training.steps (100)"),
    ),
    "weight": (over("data.train=[{prefix: a, weight: 0}]"), ("data.train[0].weight is 0.0", "above 0")),
    "sequence": (over("data.sequence_length=8"), ("data.sequence_length is 8", "at least 16")),
    "positions": (
        over("data.sequence_length=513"),
        ("data.sequence_length (513)", "up to 513", "max_position is 512", "set model.max_position=513, or"),
    ),
    "row": (over("data.row_length=512"), ("data.row_length (512)", "at least 518", "null chooses 568")),
    "keep": (over("checkpoint.keep_last=-1"), ("checkpoint.keep_last is -1", "at least 0")),
    "keep_every": (
        over("checkpoint.keep_every=2500"),
        ("checkpoint.keep_every (2500)", "multiple of checkpoint.save_interval (1000)", "change one"),
    ),
    "resume": (over("checkpoint.resume=no"), ("checkpoint.resume must be text, not False",)),
    "resume choice": (
        over("checkpoint.resume=always"),
        ("checkpoint.resume is 'always'", "one of auto, never"),
    ),
    "failed saves": (
        over("checkpoint.max_failed_saves=0"),
        ("checkpoint.max_failed_saves is 0", "at least 1"),
    ),
    "initialize choice": (
        over("checkpoint.initialize=some"),
        ("checkpoint.initialize is 'some'", "one of weights, all"),
    ),
    "initialize from nothing": (
        over("checkpoint.initialize=all"),
        ("checkpoint.initialize is all", "initialize_from is null", "name a checkpoint"),
    ),
    "timeouts": (over("timeouts.step_seconds=0"), ("timeouts.step_seconds is 0", "at least 1")),
    "skipped samples": (
        over("events.skip_samples=[{first: 8, end: 8}]"),
        ("first 8 and end 8", "first must be the smaller"),
    ),
    "learning rate steps": (
        over("events.learning_rate=[{from_step: 9, until_step: 8, factor: 1}]"),
        ("from_step 9 and until_step 8", "must not be the larger"),
    ),
    "learning rate": (
        over("events.learning_rate=[{from_step: 9}]"),
        ("factor None and value None", "give one of them"),
    ),
    "shrink event": (
        over("events.embedding_gradient_shrink=[{from_step: 9, value: 2}]"),
        ("events.embedding_gradient_shrink[0].value is 2.0", "in (0, 1]"),
    ),
    "log": (over("run.log_interval=0"), ("run.log_interval is 0", "at least 1")),
    "peak": (over("run.peak_tflops=0"), ("run.peak_tflops is 0.0", "above 0, or null")),
    "sentinels": (
        over("blank_infilling.sentinel_first=200"),
        ("sentinel_first (200)", "below 400", "model.vocab_size is 300", "lower one of them"),
    ),
    "sentinels of t5": (
        over("objectives={t5: 1}", "t5.sentinel_first=300"),
        ("sentinel_first (300)", "below model.vocab_size (300)", "lower it"),
    ),
    "unknown objective": (over("objectives.bert=1"), ("'bert'", "one of blank_infilling, causal")),
    "objective weight": (over("objectives.causal=-1"), ("objectives.causal is -1", "0 or more")),
    "objective start without objective": (
        over("objective_starts.causal=5"),
        ("names 'causal'", "not among objectives", "add it"),
    ),
    "objective start": (
        over("objectives={causal: 1}", "objective_starts={causal: soon}"),
        ("objective_starts.causal is 'soon'", "number of samples"),
    ),
    "no objective from the start": (
        over("objectives={causal: 1, t5: 0}", "objective_starts={causal: 5}"),
        ("from sample 0 on", "give one"),
    ),
    "tokenizer": (
        lambda: tiny().with_vocab_size(301),
        ("model.vocab_size is 300", "tokenizer has 301", "set model.vocab_size=null"),
    ),
    "deepspeed contradiction": (
        over("deepspeed.train_batch_size=17"),
        (
            "deepspeed.train_batch_size is 17",
            "batch.global_batch_size makes it 16",
            "remove the DeepSpeed key",
        ),
    ),
    "deepspeed section": (over("deepspeed.fp16=true"), ("deepspeed.fp16 is True", "must be a mapping")),
    "deepspeed refused": (
        over("deepspeed.optimizer.type=Adam"),
        ("deepspeed.optimizer is not taken", "remove it, use the section optimizer"),
    ),
}


@pytest.mark.parametrize("name", RULES)
def test_a_rule_names_the_value_the_rule_and_the_remedy(name):
    action, fragments = RULES[name]
    with pytest.raises(ConfigError) as error:
        action()
    message = str(error.value)
    for fragment in fragments:
        assert fragment in message
    assert "\n" not in message


def ranged_fields(cls: type) -> Iterator[tuple[type, dataclasses.Field]]:
    """Every setting with a range below `cls`, in items of lists as well, with its section."""
    for hint, field in zip(get_type_hints(cls).values(), dataclasses.fields(cls), strict=True):
        if field.metadata.get("range"):
            yield cls, field
        for nested in (hint, *get_args(hint)):
            if dataclasses.is_dataclass(nested):
                yield from ranged_fields(nested)


RANGED = list(ranged_fields(Config))


@pytest.mark.parametrize(
    ("section", "field"), RANGED, ids=[f"{section.__name__}.{field.name}" for section, field in RANGED]
)
def test_every_range_is_checked_in_a_section_made_in_code(section, field):
    needed = {f.name: 1 for f in dataclasses.fields(section) if f.default is f.default_factory}
    allowed = field.metadata["range"]
    bad = next(value for value in (-1, 0, 2, "none such") if value not in allowed)
    with pytest.raises(ConfigError, match=rf"\.{field.name} is .*; it must be "):
        section(**{**needed, field.name: bad})


def rule_lines(module: Any) -> dict[int, str]:
    """First line -> source of every statement of `module` that can refuse a configuration."""
    source = Path(module.__file__).read_text(encoding="utf-8")
    refusals = {}
    for node in ast.walk(ast.parse(source)):
        is_check = isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("check", "choice")
        if is_check or isinstance(node, ast.Raise):
            refusals[node.lineno] = ast.get_source_segment(source, node) or ""
    return refusals


def test_no_rule_lacks_a_test(tmp_path):
    fired = set()
    for action in [action for action, _ in RULES.values()] + [
        lambda case=case: case(tmp_path) for case in BAD_FILES
    ]:
        try:
            action()
        except ConfigError as error:
            frames = traceback.extract_tb(error.__traceback__)
            fired |= {(frame.filename, frame.lineno) for frame in frames}
    for module in (config_module, sections_module, deepspeed_module, events_module):
        for line, source in rule_lines(module).items():
            assert (module.__file__, line) in fired, f"no test fires line {line}: {source}"


# DeepSpeed options


def with_json(tmp_path: Path, given: Any, *overrides: str) -> Config:
    """The tiny configuration merged with a DeepSpeed file; a str is written as it is."""
    base, path = tmp_path / "base.yaml", tmp_path / "ds.json"
    base.write_text(yaml.safe_dump(TINY))
    path.write_text(given if isinstance(given, str) else json.dumps(given))
    return load_config([base], overrides, path)


BAD_FILES = [
    lambda tmp: with_json(tmp, "{"),
    lambda tmp: with_json(tmp, "[]"),
    lambda tmp: with_json(tmp, {"steps_per_print": 5}, "deepspeed.steps_per_print=6"),
    lambda tmp: load_config([MODELS / "glm-base.yaml"], [], tmp / "absent.json"),
]


@pytest.mark.parametrize(
    ("case", "message"),
    zip(BAD_FILES, ["not valid JSON", "not list", "is 5, but .* says 6", "check the path"], strict=True),
)  # fmt: skip
def test_a_bad_deepspeed_file_is_named(tmp_path, case, message):
    with pytest.raises(ConfigError, match=message):
        case(tmp_path)


AGREEING = {
    "train_batch_size": 16,
    "train_micro_batch_size_per_gpu": 8,
    "gradient_clipping": 1.0,
    "zero_optimization": {"stage": 1, "reduce_bucket_size": 12345},
    "zero_allow_untested_optimizer": True,
    "data_types": {"grad_accum_dtype": "fp32"},
    "bf16": {"enabled": True},
    "fp16": {"enabled": False},
}


def test_agreement_is_accepted_and_other_options_pass_through(tmp_path):
    config = with_json(
        tmp_path, {**AGREEING, "wall_clock_breakdown": True}, "deepspeed.comms_logger.enabled=false"
    )
    options = config.deepspeed_options(dp_size=2)
    assert options["zero_optimization"] == {"stage": 1, "reduce_bucket_size": 12345}
    assert options["wall_clock_breakdown"] is True and options["comms_logger"] == {"enabled": False}


def test_auto_leaves_the_value_to_the_configuration(tmp_path):
    auto = {
        key: dict.fromkeys(value, "auto") if isinstance(value, dict) else "auto"
        for key, value in AGREEING.items()
    }
    del auto["zero_optimization"]["reduce_bucket_size"]
    config = with_json(tmp_path, {**auto, "gradient_accumulation_steps": "auto"})
    assert config.deepspeed_options(1) == tiny().deepspeed_options(1)


def leaves(tree: dict[str, Any], path: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in tree.items():
        found |= leaves(value, f"{path}{key}.") if isinstance(value, dict) else {f"{path}{key}": value}
    return found


DERIVED = sorted(leaves(tiny().deepspeed_options(1)).keys() - leaves(DEFAULTS).keys())


@pytest.mark.parametrize("key", DERIVED)
def test_a_contradiction_of_any_derived_option_is_refused(key):
    value = leaves(tiny().deepspeed_options(1))[key]
    wrong = (
        {bool: not value, int: value + 1, float: value + 1, str: "fp16"}[type(value)]
        if value != "fp32"
        else "bf16"
    )
    with pytest.raises(ConfigError, match=f"deepspeed.{key} is {wrong!r}, but .* makes it {value!r}"):
        tiny(f"deepspeed.{key}={wrong}").deepspeed_options(1)


@pytest.mark.parametrize("key", REFUSED)
def test_options_that_have_a_section_of_their_own_are_refused(key):
    with pytest.raises(ConfigError, match=f"deepspeed.{key} is not taken from DeepSpeed options; remove it"):
        tiny(f"deepspeed.{key}={{enabled: true}}")


WRONG_OPTIONS = {
    "deepspeed.zero_optimisation={}": "unknown setting deepspeed.zero_optimisation; the nearest valid key is "
    "deepspeed.zero_optimization.",
    "deepspeed.zero_optimization.reduce_bucket_sise=5": "the nearest valid key is "
    "deepspeed.zero_optimization.reduce_bucket_size.",
    "deepspeed.reduce_bucket_size=5": "the nearest valid key is deepspeed.zero_optimization.reduce_bucket_size.",
    "deepspeed.autotuning={enabled: true}": "unknown setting deepspeed.autotuning; valid keys here are bf16,",
    "deepspeed.1=2": "unknown setting deepspeed.1;",
    "deepspeed.zero_optimization.reduce_bucket_size=auto": "reduce_bucket_size must be a whole number, not 'auto'",
    "deepspeed.zero_optimization.reduce_bucket_size=0": "reduce_bucket_size is 0; it must be at least 1",
    "deepspeed.zero_optimization.overlap_comm=1": "overlap_comm must be true or false, not 1",
    "deepspeed.zero_optimization=[1]": "deepspeed.zero_optimization is [1], but it must be a mapping",
    "deepspeed.tensorboard=true": "deepspeed.tensorboard is a section, but its value is True",
    "deepspeed.wall_clock_breakdown='yes'": "wall_clock_breakdown must be true or false, not 'yes'",
    "deepspeed.steps_per_print=0": "deepspeed.steps_per_print is 0; it must be at least 1",
    "deepspeed.communication_data_type=fp8": "is 'fp8'; it must be one of fp32, fp16, bf16",
    "deepspeed.comms_logger.prof_ops=all_reduce": "deepspeed.comms_logger.prof_ops must be a list",
    "deepspeed.gradient_clipping=[1]": "deepspeed.gradient_clipping must be a finite number, not [1]",
}


@pytest.mark.parametrize("option", WRONG_OPTIONS)
def test_an_unknown_or_ill_typed_deepspeed_option_is_one_line(option):
    with pytest.raises(ConfigError) as error:
        tiny(option)
    assert WRONG_OPTIONS[option] in str(error.value) and "\n" not in str(error.value)


def test_deepspeed_numbers_are_read_as_ours_and_null_says_nothing():
    config = tiny(
        "deepspeed.zero_optimization={reduce_bucket_size: 5e8, overlap_comm: null}", "deepspeed.fp16=null"
    )
    assert config.deepspeed_options(1)["zero_optimization"] == {"stage": 1, "reduce_bucket_size": 500_000_000}
    assert config.deepspeed_options(1)["fp16"] == tiny().deepspeed_options(1)["fp16"]


def test_offloading_takes_our_optimizer_to_the_cpu():
    options = tiny("parallel.offload_optimizer=true", "parallel.zero_stage=2").deepspeed_options(1)
    assert options["zero_optimization"] == {
        "stage": 2,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
    }
    assert options["zero_force_ds_cpu_optimizer"] is False  # DeepSpeed's own would be compiled at the start


def test_accumulation_steps_depend_on_the_number_of_ranks():
    config = tiny("deepspeed.gradient_accumulation_steps=2")  # not wrong as such: right for one rank
    assert config.deepspeed_options(1)["gradient_accumulation_steps"] == 2
    with pytest.raises(ConfigError, match="is 2, but the section batch on 2 data-parallel ranks makes it 1"):
        config.deepspeed_options(2)


def test_loss_scaling_may_be_tuned_and_defaults_to_the_reference():
    options = tiny("training.precision=fp16", "deepspeed.fp16.initial_scale_power=12").deepspeed_options(1)
    assert options["fp16"] == {**DEFAULTS["fp16"], "initial_scale_power": 12, "enabled": True}
    assert options["bf16"] == {"enabled": False}


# How files and overrides combine


def test_later_files_win_and_overrides_come_last(tmp_path):
    first, second = tmp_path / "first.yaml", tmp_path / "second.yaml"
    first.write_text(yaml.safe_dump({**TINY, "optimizer": {"lr": 1e-3, "beta2": 0.9}}))
    second.write_text("optimizer: {lr: 2e-3}\ntraining: {steps: 50}\n")
    config = load_config([first, second], ["training.steps=60", "training.steps=70"])
    assert (config.optimizer.lr, config.optimizer.beta2, config.training.steps) == (2e-3, 0.9, 70)
    assert load_config([second, first]).optimizer.lr == 1e-3


def test_values_that_follow_from_others():
    config = tiny()
    assert (config.model.head_dim, config.decay_steps) == (16, 100)
    assert tiny("schedule.decay_steps=80").decay_steps == 80
    assert tiny("model.vocab_size=null").with_vocab_size(301).model.vocab_size == 301
    assert config.with_vocab_size(300) == config


def test_the_defaults_are_complete_but_for_what_only_the_user_knows():
    config = build(
        Config,
        {"model": {"num_layers": 1, "hidden_size": 8, "num_attention_heads": 1}, "training": {"steps": 1}},
    )
    assert config.data.train == () and config.tokenizer is None and config.deepspeed == {}
