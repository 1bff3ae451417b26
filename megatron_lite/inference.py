"""Open a training run for use in one process: its configuration, tokenizer and newest weights. Needs no DeepSpeed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from data_utils.tokenizers import Tokenizer, load_tokenizer
from megatron_lite import checkpoint
from megatron_lite.config import Config, ModelConfig
from megatron_lite.errors import CheckpointError
from megatron_lite.model import GLM
from megatron_lite.parallel_context import ParallelContext
from megatron_lite.settings import build
from megatron_lite.tensor_parallel import local_shard, partition_of


@dataclass(frozen=True)
class Run:
    config: Config
    tokenizer: Tokenizer
    model: GLM  # fp32, eval mode
    checkpoint: checkpoint.Checkpoint


def load_run(path: Path, tokenizer_path: Path | None = None, device: torch.device | None = None) -> Run:
    """The model of a run directory (its newest valid checkpoint) or of one `step_...` directory.

    Raises: CheckpointError if there is none or it is damaged; DataError if the tokenizer cannot be loaded.
    """
    device = device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
    found = find_checkpoint(path)
    config = build(Config, found.trainer_state().config)
    if config.tokenizer is None:
        raise CheckpointError(
            f"checkpoint {found.path} names no tokenizer; give one of a run of pretrain_glm.py."
        )
    tokenizer_config = (
        config.tokenizer if tokenizer_path is None else replace(config.tokenizer, path=str(tokenizer_path))
    )
    tokenizer = load_tokenizer(tokenizer_config)
    config = config.with_vocab_size(tokenizer.vocab_size)
    return Run(config, tokenizer, load_model(found, config.model).to(device), found)


def load_model(
    found: checkpoint.Checkpoint,
    config: ModelConfig,
    change: Callable[[torch.Tensor], torch.Tensor] = lambda weight: weight,
) -> GLM:
    """The fp32 model of a checkpoint in eval mode; `change` is applied to each weight, for example to round it."""
    with torch.device("meta"):
        model = GLM(config)
    parameters = dict(model.named_parameters())
    weights = {}
    for name, weight in checkpoint.iterate_weights(found):
        parameter = parameters[name]
        weights[name] = local_shard(change(weight), partition_of(parameter), 0, 1, len(parameter))
    model.load_state_dict(weights, assign=True)
    return model.eval()


def find_checkpoint(path: Path) -> checkpoint.Checkpoint:
    """A `step_...` directory, or the newest valid checkpoint of a run directory; checksums verified."""
    return checkpoint.find_checkpoint(path, ParallelContext.alone())
