"""Training runs in this process, and what they wrote down."""

from __future__ import annotations

import json
from pathlib import Path

from data_utils.common.settings import build
from data_utils.loader.loader import open_datasets
from data_utils.tokenizers.tokenizer import load_tokenizer
from megatron_lite.config.tree import Config
from megatron_lite.engine.plain import make_engine
from megatron_lite.train.trainer import Trainer
from megatron_lite.transformer.build import model_spec


def open_data(tree):
    """The configuration of a tree, and its samples."""
    config = build(Config, tree)
    tokenizer = load_tokenizer(config.tokenizer)
    config = config.with_vocab_size(tokenizer.vocab_size)
    seed, phases = config.training.seed, config.phase_plan.samples
    return config, open_datasets(
        config.data, config.objective_choices, tokenizer, seed, phases=phases, unit=config.sample_unit
    )


def make_trainer(context, tree):
    """The trainer of a configuration on this rank, before its first step."""
    config, data = open_data(tree)
    sizes = config.parallel.tensor_parallel_size, config.parallel.pipeline_parallel_size
    assert (context.tp.size, context.pp.size) == sizes, "run_ranks takes the layout as `parallel`"
    engine = make_engine(config, context, len(data.loss_names))
    train = model_spec(config).samples(config, data.train, "train")
    validation = data.validation and model_spec(config).samples(config, data.validation, "validation")
    return Trainer(config, context, engine, train, validation, data.loss_names)


def fit(context, tree):
    """Train to the end, as the function of `run_ranks`; the weights of this rank by name."""
    trainer = make_trainer(context, tree)
    trainer.fit()
    return {name: p.detach().clone() for name, p in trainer.engine.named_parameters.items()}


def records(directory, kind="train"):
    """Step -> losses and perplexity in metrics.jsonl."""
    lines = [json.loads(line) for line in (Path(directory) / "metrics.jsonl").read_text().splitlines()]
    return {
        r["step"]: {k: v for k, v in r.items() if k.startswith("loss") or k == "perplexity"}
        for r in lines
        if r["kind"] == kind
    }
