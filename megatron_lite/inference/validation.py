"""The validation losses of a checkpoint, by the evaluation of its own training loop, in one process."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from data_utils.common.errors import ConfigError
from data_utils.common.settings import build, merge, to_tree
from data_utils.loader.loader import open_datasets
from megatron_lite.checkpoint.read import load_weights_only
from megatron_lite.config.sections import ParallelConfig
from megatron_lite.config.tree import Config
from megatron_lite.engine.plain import PlainEngine
from megatron_lite.inference.open_run import OpenRun
from megatron_lite.parallel.context import ParallelContext, initialize
from megatron_lite.parallel.launch import Launch
from megatron_lite.runtime.process import set_numerics
from megatron_lite.telemetry.writer import Metrics
from megatron_lite.train.evaluation import Evaluation
from megatron_lite.train.loss_normalizer import LossNormalizer
from megatron_lite.transformer.attention_choice import set_attention
from megatron_lite.transformer.build import model_spec

ALL = "all corpora"
# Sections about the layout and the surroundings of the training run. Averaged weights are read as weights.
_NOT_INHERITED = ("parallel", "deepspeed", "ema", "profiler", "trackers", "checkpoint")


@contextlib.contextmanager
def one_process() -> Iterator[ParallelContext]:
    """The context of one process that evaluates."""
    context = initialize(Launch(0, 1, 0), ParallelConfig(), 600.0)
    try:
        yield context
    finally:
        context.close()


def validation_losses(
    run: OpenRun, overrides: Mapping[str, Any], context: ParallelContext
) -> dict[str, dict[str, float]]:
    """The run's own validation record, and that of each of its corpora by itself where there are several.

    Args: overrides: sections with other values than the run's, such as `data.validation`. context: of `one_process`.
    Returns: ALL or a corpus's prefix -> the numbers of a record of kind `validation`.
    Raises: ConfigError without validation data, for another model, or for wrong settings.
    """
    inherited = {name: value for name, value in to_tree(run.config).items() if name not in _NOT_INHERITED}
    config = build(Config, merge(inherited, overrides))
    corpora = config.data.validation
    if not corpora:
        raise ConfigError(
            f"{run.checkpoint.path} has no validation data; give some as 'data.validation=[{{prefix: PATH}}]', or a "
            "task with --task FILE."
        )
    decoder = run.decoder_tokenizer and run.decoder_tokenizer.vocab_size
    config = config.with_vocab_size(run.tokenizer.vocab_size, decoder)
    set_numerics(config.training, context.device)
    set_attention(config, context.device)
    spec, plan, engine, found, step = model_spec(config), config.phase_plan, None, {}, run.checkpoint.step
    for name, chosen in {ALL: corpora, **{one.prefix: (one,) for one in corpora if len(corpora) > 1}}.items():
        # No training corpus is needed, but the loader wants one.
        data = replace(config.data, train=chosen, validation=chosen)
        datasets = open_datasets(
            data,
            config.objective_choices,
            run.tokenizer,
            config.training.seed,
            run.decoder_tokenizer,
            unit=config.sample_unit,
        )
        if engine is None:
            engine = PlainEngine(config, context, len(datasets.loss_names))
            load_weights_only(run.checkpoint, engine, context)
            engine.set_step(step)
        samples = spec.samples(config, datasets.validation, "validation")
        normalizer = LossNormalizer(plan, datasets.loss_names, context.dp.size)
        evaluation = Evaluation(config, plan, context, engine, samples, normalizer, None, None)
        found[name] = evaluation.run(step, Metrics(Path(config.run.directory), False, False))
    return found
