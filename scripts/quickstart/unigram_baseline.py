"""Compare a run's validation loss with a unigram model, which knows token frequencies and nothing else.

    python -m scripts.quickstart.unigram_baseline RUN_DIRECTORY

The unigram model knows how often each token is a target in the run's own training samples (add-one
smoothed) and is scored on the targets of the run's validation: the same samples, the same blanks, eop included.
Counts of the raw text would give a weaker model, because eop does not occur there. Writes
RUN_DIRECTORY/unigram.json.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from data_utils.common.batch_fields import DOC, OBJECTIVE, PADDING_DOC, TARGETS, WEIGHTS
from data_utils.common.errors import ArgumentParser, ConfigError, run_command
from data_utils.common.files import require_directory, write_whole
from data_utils.common.losses import BY_TOKENS
from data_utils.loader.loader import SampleLoader, open_datasets
from data_utils.objectives import SENTENCE_LEVEL
from data_utils.tokenizers.tokenizer import load_tokenizer
from megatron_lite.config.tree import Config, load_config
from megatron_lite.telemetry.records import last_validation

BATCH = 64  # samples read at a time
NOT_BETTER_STATUS = 1


def main(arguments: Sequence[str] | None = None) -> int:
    args = parse_arguments(arguments)
    require_directory(args.run, "give the directory of a run that has begun")
    config = load_config([args.run / "config.yaml"])
    model = last_validation(args.run)
    unigram = unigram_losses(config)
    write_whole(args.run / "unigram.json", (json.dumps(unigram, indent=1) + "\n").encode(), "RUN_DIRECTORY")
    print(table(unigram, model))
    gain = unigram["loss"] - model["loss"]
    if args.margin is not None and gain < args.margin:
        print(f"the model gains {gain:.3f} nats, less than --margin {args.margin}", file=sys.stderr)
        return NOT_BETTER_STATUS
    return 0


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path, metavar="RUN_DIRECTORY", help="holds config.yaml and metrics.jsonl")
    parser.add_argument(
        "--margin", type=float, help=f"exit with status {NOT_BETTER_STATUS} if the model gains less, nats"
    )
    return parser.parse_args(arguments)


def unigram_losses(config: Config) -> dict[str, float]:
    """Loss of the unigram model on the run's validation targets: {"loss": ..., "loss/token": ...}, nats."""
    from megatron_lite.telemetry.reports import objective_losses  # here: torch takes seconds to load

    if config.tokenizer is None:
        raise ConfigError("the run's configuration names no tokenizer; give a directory of pretrain_glm.py.")
    tokenizer, phase_plan = load_tokenizer(config.tokenizer), config.phase_plan
    seed, phases = config.training.seed, phase_plan.samples
    data = open_datasets(config.data, config.objective_choices, tokenizer, seed, phases=phases)
    if data.validation is None:
        raise ConfigError("the run has no validation corpus; set data.validation.")
    shape = (len(data.loss_names), tokenizer.vocab_size)
    boundaries = [
        *phase_plan.first_samples,
        phase_plan.consumed(config.training.steps),
    ]  # a batch is of one phase
    ranges = itertools.starmap(range, itertools.pairwise(boundaries))
    seen = np.sum([target_counts(data.train, samples, shape) for samples in ranges], axis=0)
    wanted = target_counts(data.validation, range(config.training.eval_samples), shape)
    sums = loss_sums(seen, wanted, classes_of(config, data.loss_names))
    if config.model.span_boundary_places:  # predicts the same targets once more
        names = list(data.loss_names)
        sums[names.index("span_boundary")] = sums[names.index("masked_spans")]
    for number in BY_TOKENS:
        sums[number, 1] = token_count(data.validation, range(config.training.eval_samples), number)
    training = config.training
    factors = training.loss_weights if training.loss_normalization == "per_objective" else None
    return objective_losses(sums, data.loss_names, factors)


def classes_of(config: Config, names: Sequence[str]) -> list[int]:
    """The number of classes of each loss; 0 = its targets are tokens."""
    heads = dict(head.split(":") for head in config.model.class_heads)
    return [int(heads.get(name, 2 if name in SENTENCE_LEVEL else 0)) for name in names]


def loss_sums(seen: np.ndarray, wanted: np.ndarray, classes: Sequence[int]) -> np.ndarray:
    """float64 [objectives, 2]: the unigram model's loss sum on the wanted targets, and their weight.

    Losses of tokens share one distribution. Args: seen, wanted: of `target_counts`. classes: of `classes_of`.
    """
    nats = np.zeros(seen.shape)
    of_tokens = np.array(classes) == 0
    nats[of_tokens] = -log_frequencies(seen[of_tokens].sum(0))
    for loss, count in enumerate(classes):
        if count:
            nats[loss, :count] = -log_frequencies(seen[loss, :count])
    return np.stack([(wanted * nats).sum(1), wanted.sum(1)], axis=1)


def target_counts(loader: SampleLoader, samples: range, shape: tuple[int, int]) -> np.ndarray:
    """Summed weight of each token as a target in the samples: float64 [objectives, vocabulary]."""
    counts = np.zeros(shape[0] * shape[1])
    for start in range(0, len(samples), BATCH):
        batch = loader.batch(np.array(samples[start : start + BATCH]))
        cell = batch[:, OBJECTIVE].astype(np.int64) * shape[1] + batch[:, TARGETS]
        weights = batch[:, WEIGHTS].view(np.float32)
        counts += np.bincount(cell[weights > 0], weights=weights[weights > 0], minlength=len(counts))
    return counts.reshape(shape)


def token_count(loader: SampleLoader, samples: range, loss: int) -> int:
    """Tokens of the samples whose texts have a loss."""
    fields = (loader.batch(np.array([sample])) for sample in samples)
    return sum(int(((one[:, OBJECTIVE] == loss) & (one[:, DOC] != PADDING_DOC)).sum()) for one in fields)


def log_frequencies(counts: np.ndarray) -> np.ndarray:
    """Log of the add-one smoothed relative frequencies, nats."""
    return np.log(counts + 1) - np.log(counts.sum() + len(counts))


def table(unigram: dict[str, float], model: dict[str, Any]) -> str:
    """The two models side by side, for each objective."""
    rows = [f"validation at step {model['step']}, nats per token", f"{'':10}  unigram   model   gain"]
    for name, loss in unigram.items():
        if name in model:
            label = "all" if name == "loss" else name.removeprefix("loss/")
            rows.append(f"{label:10}  {loss:7.3f} {model[name]:7.3f} {loss - model[name]:6.3f}")
    return "\n".join(rows)


if __name__ == "__main__":
    run_command(main)
