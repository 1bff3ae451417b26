"""Open a training run in one process: its configuration, tokenizer and newest weights. Needs no DeepSpeed."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from data_utils.common.errors import CheckpointError, ConfigError, DataError
from data_utils.common.settings import build
from data_utils.objectives import ObjectiveChoice
from data_utils.objectives.blank_infilling import BlankInfillingConfig
from data_utils.tokenizers.tokenizer import PROMPT_MARKERS, Tokenizer, TokenizerConfig, load_tokenizer
from megatron_lite.checkpoint.manifest import Checkpoint
from megatron_lite.checkpoint.read import find_checkpoint, weight_reader
from megatron_lite.config.model import ModelConfig
from megatron_lite.config.tree import Config, require_objectives
from megatron_lite.parallel.context import ParallelContext
from megatron_lite.transformer.build import model_spec
from megatron_lite.transformer.kernels.fused import choose_kernels
from megatron_lite.transformer.tensor_parallel import local_shard, partition_of
from megatron_lite.transformer.transformer import Transformer

log = logging.getLogger(__name__)
Model = TypeVar("Model", bound=nn.Module)


@dataclass(frozen=True)
class OpenRun:
    """A checkpoint of a training run with its configuration and tokenizer, without the weights."""

    config: Config  # with model.vocab_size
    tokenizer: Tokenizer
    checkpoint: Checkpoint
    decoder_tokenizer: Tokenizer | None = None  # OPTIMUS with two vocabularies

    @property
    def objectives(self) -> tuple[ObjectiveChoice, ...]:
        """The objectives the checkpoint was trained on, without those that had not started yet."""
        plan = self.config.phase_plan
        last_phase = plan.number(max(self.checkpoint.step - 1, 0))
        begun = {choice.name for each in plan.configs[: last_phase + 1] for choice in each.objective_choices}
        return tuple(choice for choice in self.config.objective_choices if choice.name in begun)

    def require_blank_infilling(self, blanks: Collection[str]) -> None:
        """Warn of `blanks` ([MASK], ...) that were not trained. Raises ConfigError if no blank was."""
        self.require_one_transformer()
        if "blank_infilling" not in objective_names(self.objectives):
            raise ConfigError(
                f"{self.checkpoint.path} was trained on {', '.join(objective_names(self.objectives))}, which does "
                "not train filling blanks; give a run of blank_infilling, or train this one on it."
            )
        if count := self.config.model.decoder_layers:
            raise ConfigError(
                f"{self.checkpoint.path} has model.decoder_layers {count}, but only models without a decoder fill "
                "blanks; give such a run."
            )
        trained = {blank for blank, share in blank_shares(self.objectives).items() if share}
        if missing := sorted(set(blanks) - trained):
            log.warning(
                "%s: trained on %s, not on %s; such blanks may be filled badly",
                *(self.checkpoint.path, ", ".join(sorted(trained)), ", ".join(missing)),
            )

    def require_one_transformer(self, for_task: bool = False) -> None:
        """Raise ConfigError for a model of two Transformers. Args: for_task: accept those that solve tasks."""
        for choice in self.config.objective_choices:
            if choice.section.own_model_advice is not None and not (for_task and choice.section.solves_tasks):
                raise ConfigError(f"{self.checkpoint.path} {choice.section.own_model_advice}")

    def with_model(self, device: torch.device | None = None, for_task: bool = False) -> Run:
        """Load the weights, onto a GPU if there is one. Args: for_task: as for `require_one_transformer`."""
        self.require_one_transformer(for_task)
        choose_kernels(self.config.training.kernels)
        made_of = model_spec(self.config).made_of(self.config)
        with torch.device("meta"):
            model = made_of[0](*made_of[1:])
        model = with_weights(model, self.checkpoint).to(device or default_device())
        return Run(self.config, self.tokenizer, self.checkpoint, model=model)


def default_device() -> torch.device:
    """A GPU if there is one."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@dataclass(frozen=True, kw_only=True)
class Run(OpenRun):
    """An `OpenRun` with its model."""

    model: Transformer  # fp32, eval mode


def open_run(
    path: Path, tokenizer_path: Path | None = None, decoder_tokenizer_path: Path | None = None
) -> OpenRun:
    """A run directory (its newest valid checkpoint) or one `step_...` directory, without the weights.

    Args: tokenizer_path, decoder_tokenizer_path: replace the recorded paths.

    Raises: CheckpointError if there is none, it is damaged, or has no decoder_tokenizer to replace; DataError if the
        tokenizer cannot be loaded.
    """
    checkpoint = find_checkpoint(path, ParallelContext.alone())
    state = checkpoint.trainer_state()
    require_objectives(state.config, state.program)
    config = build(Config, state.config).trained(state.step)
    if config.tokenizer is None:
        raise CheckpointError(
            f"checkpoint {checkpoint.path} records no tokenizer; give a checkpoint of pretrain_glm.py."
        )
    section, of_decoder = config.tokenizer, config.decoder_tokenizer
    if tokenizer_path is not None:
        section = replace(section, path=str(tokenizer_path))
    tokenizer = _tokenizer(section, checkpoint, "give its path with --tokenizer")
    decoder_tokenizer, size = None, None
    if of_decoder is None and decoder_tokenizer_path is not None:
        raise CheckpointError(
            f"--decoder-tokenizer is {decoder_tokenizer_path}, but {checkpoint.path} has one tokenizer; remove it."
        )
    if of_decoder is not None:
        if decoder_tokenizer_path is not None:
            of_decoder = replace(of_decoder, path=str(decoder_tokenizer_path))
        decoder_tokenizer = _tokenizer(of_decoder, checkpoint, "give its path with --decoder-tokenizer")
        size = decoder_tokenizer.vocab_size
    config = config.with_vocab_size(tokenizer.vocab_size, size)
    return OpenRun(config, tokenizer, checkpoint, decoder_tokenizer)


def _tokenizer(section: TokenizerConfig, checkpoint: Checkpoint, remedy: str) -> Tokenizer:
    section = section.local()
    if not Path(section.path).exists():
        raise DataError(f"the tokenizer of {checkpoint.path}, {section.path}, does not exist; {remedy}.")
    return load_tokenizer(section)


def load_run(path: Path, tokenizer_path: Path | None = None, device: torch.device | None = None) -> Run:
    """`open_run` with the weights. Args: device: None = a GPU if there is one."""
    return open_run(path, tokenizer_path).with_model(device)


def objective_names(objectives: Iterable[ObjectiveChoice]) -> list[str]:
    """Names of the objectives in the configuration; an ablation of blank infilling without blanks has a suffix."""
    return [name + _ablation(section) for name, section in ((o.name, o.section) for o in objectives)]


def _ablation(section: Any) -> str:
    if not isinstance(section, BlankInfillingConfig):
        return ""
    if section.masked_lm:
        return ".masked_lm"
    return "" if section.sentinel_first is None else ".sentinel_first"


def blank_shares(objectives: Iterable[ObjectiveChoice]) -> dict[str, float]:
    """Blank ([MASK], ...) -> its share of blank infilling's samples."""
    for choice in objectives:
        if choice.name == "blank_infilling":
            section = choice.section
            drawn = 1.0 - section.single_span_prob  # else one short span
            shares = (section.token_prob, section.sentence_prob, section.document_prob)
            # Rounded because 1 - 0.7 - 0.3 is not 0.
            token, sentence, document = (round(drawn * share, 9) for share in shares)
            token += section.single_span_prob
            return dict(zip(PROMPT_MARKERS, (token, sentence, document), strict=True))
    return dict.fromkeys(PROMPT_MARKERS, 0.0)


def load_model(
    checkpoint: Checkpoint,
    config: ModelConfig,
    change: Callable[[torch.Tensor], torch.Tensor] = lambda weight: weight,
) -> Transformer:
    """The fp32 model of a checkpoint in eval mode. Args: change: applied to each weight, for example to round it."""
    with torch.device("meta"):
        model = Transformer(config)
    return with_weights(model, checkpoint, change)


def with_weights(
    model: Model,
    checkpoint: Checkpoint,
    change: Callable[[torch.Tensor], torch.Tensor] = lambda weight: weight,
) -> Model:
    """A model on the device "meta" with the weights of a checkpoint, in eval mode. Args: as for `load_model`."""
    read = weight_reader(checkpoint)
    return filled(model, checkpoint.shapes, lambda name: change(read(name)))


def filled(model: Model, names: Iterable[str], read: Callable[[str], torch.Tensor]) -> Model:
    """A model on the device "meta" with its weights, in eval mode. Args: read: name -> whole weight."""
    parameters, weights = dict(model.named_parameters()), {}
    for name in names:
        parameter = parameters[name]
        weights[name] = local_shard(read(name), partition_of(parameter), 0, 1, len(parameter))
    model.load_state_dict(weights, assign=True)
    return model.eval()
