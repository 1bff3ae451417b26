"""A run of the objective `optimus` as a LatentModel: posteriors, likelihoods and texts of its newest weights."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch

from data_utils.common.errors import ConfigError, DataError
from data_utils.common.seeds import derive_seed
from data_utils.loader.loader import collate
from data_utils.objectives import LOSS_NAMES, make_objective
from data_utils.tokenizers.tokenizer import Tokenizer
from data_utils.tokenizers.vocabulary import vocabulary_of
from megatron_lite.config.generation import GenerationConfig
from megatron_lite.config.tree import Config
from megatron_lite.inference.cache import CachedPlan, id_fields, run_cached_stack
from megatron_lite.inference.open_run import OpenRun, default_device, open_run, with_weights
from megatron_lite.inference.search import Search
from megatron_lite.models.optimus.batch import LatentBatch
from megatron_lite.models.optimus.config import decoder_of, latent_of
from megatron_lite.models.optimus.interface import Sentence
from megatron_lite.models.optimus.model import Optimus
from megatron_lite.transformer.build import build_model
from megatron_lite.transformer.kernels.fused import choose_kernels
from megatron_lite.transformer.micro_batch import MicroBatch


class LatentRun:
    """A LatentModel (interface.py).

    Args: model: in eval mode. decoder_tokenizer: the same as `tokenizer` where there is one vocabulary.
    """

    def __init__(
        self, config: Config, tokenizer: Tokenizer, decoder_tokenizer: Tokenizer, model: Optimus, name: str
    ):
        latent = latent_of(config)
        assert latent is not None and config.decoder is not None
        self.config, self.model, self.name = config, model, name
        self.tokenizer, self.decoder_tokenizer = tokenizer, decoder_tokenizer
        self.latent_size, self._has_memory = latent.latent_size, latent.memory
        self._decoder = config.decoder
        self.longest = longest_sentence(config)
        other = None if decoder_tokenizer is tokenizer else decoder_tokenizer
        self._objective = make_objective(
            config.objective_choices, vocabulary_of(tokenizer, other), 0, max(self.longest, 16)
        )

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    def read(self, texts: Sequence[str]) -> list[Sentence]:
        """Raises: DataError for a text without tokens, or with more than the positions hold."""
        sentences = []
        for number, text in enumerate(texts, 1):
            encoded, decoded = self.tokenizer.encode(text), self.decoder_tokenizer.encode(text)
            length = max(len(encoded), len(decoded))
            if not encoded or not decoded:
                raise DataError(f"text {number} has no token; give each text at least a word.")
            if length > self.longest:
                raise DataError(
                    f"text {number} has {length} tokens, but {self.name} has positions for {self.longest}; shorten it."
                )
            sentences.append(Sentence(text, encoded, decoded))
        return sentences

    @torch.no_grad()
    def encode(self, sentences: Sequence[Sentence]) -> tuple[torch.Tensor, torch.Tensor]:
        return self.model.posterior(self._input(sentences))

    @torch.no_grad()
    def features(self, sentences: Sequence[Sentence]) -> torch.Tensor:
        return self.model.features(self._input(sentences))

    @torch.no_grad()
    def log_likelihood(self, sentences: Sequence[Sentence], z: torch.Tensor) -> torch.Tensor:
        count, samples, size = z.shape
        batch = self._input([sentence for sentence in sentences for _ in range(samples)])
        drawn = z.reshape(-1, size).to(self.device, torch.float32)
        return -self.model.reconstruction(batch, drawn).view(count, samples)

    @torch.no_grad()
    def decode(self, z: torch.Tensor, config: GenerationConfig, first: int = 0) -> list[str]:
        special = self.decoder_tokenizer.special
        banned = set(asdict(special).values()) - {special.unk}
        search = Search(config, {special.eop}, banned)
        room = self._decoder.max_position + 1 - self._has_memory - 1
        generators = [
            torch.Generator(device=self.device).manual_seed(
                derive_seed(config.seed, "latent", first + number)
            )
            for number in range(len(z))
        ]
        rows = Rows(self.model, z.to(self.device, torch.float32), special.sop, self._has_memory)
        limits = [min(config.max_length, room)] * len(z)
        found = search.run(rows, limits, generators)
        return [self.decoder_tokenizer.decode(each[0].tokens) for each in found]

    def untrained(self) -> LatentRun:
        """The weights that a run of this configuration begins with, where it takes none from another."""
        other = copy.copy(self)
        model = build_model(self.config, len(LOSS_NAMES))
        assert isinstance(model, Optimus)
        other.model = model.eval().to(self.device)
        return other

    def _input(self, sentences: Sequence[Sentence]) -> MicroBatch:
        """The model's input for sentences, one row each."""
        pieces = [
            tokens for sentence in sentences for tokens in (sentence.encoder_tokens, sentence.decoder_tokens)
        ]
        if self.decoder_tokenizer is self.tokenizer:
            pieces = pieces[::2]
        numbers = np.arange(len(sentences))
        fields = collate(
            self._objective,
            np.concatenate([np.asarray(piece, np.int32) for piece in pieces]),
            np.array([len(piece) for piece in pieces]),
            np.full(len(sentences), len(pieces) // len(sentences)),
            numbers,
        )
        batch = LatentBatch(fields, numbers, 0, self.latent_size, self._has_memory)
        return MicroBatch.from_batch(batch, self.device, self.config.model, decoder_config=self._decoder)


class Rows:
    """Texts that begin with a latent vector alone (a State of search.py). Args: z: fp32 [R, P]."""

    def __init__(self, model: Optimus, z: torch.Tensor, begin: int, has_memory: bool):
        self.model, self.z = model, z
        self._begin, self._has_memory = begin, has_memory
        self.plan = CachedPlan(model.decoder.config)
        self.place = 0  # of the next token, the same for all

    def first(self) -> torch.Tensor:
        """Logits after the memory slot (if any, its token does not matter) and BOS."""
        count = 1 + self._has_memory
        tokens = torch.full((len(self.z), count), self._begin, device=self.z.device)
        return self.read(tokens, self._has_memory)[:, -1]

    def next(self, tokens: Sequence[int]) -> torch.Tensor:
        return self.read(torch.tensor(tokens, device=self.z.device)[:, None], False)[:, -1]

    def read(self, tokens: torch.Tensor, has_slot: bool) -> torch.Tensor:
        """Logits of new tokens, fp32 [R, N, V]. Args: tokens: int64 [R, N]; has_slot: the first is the slot."""
        rows, count = tokens.shape
        positions = torch.arange(self.place, self.place + count, device=tokens.device).expand(rows, -1)
        self.place += count
        self.plan.expect(positions, is_causal=True)
        of_row = torch.arange(rows, device=tokens.device)
        slots = of_row * count if has_slot else of_row[:0]
        latent = self.model.latent.condition(self.z, of_row.repeat_interleave(count), slots)
        hidden = run_cached_stack(self.model.decoder, tokens, id_fields(positions), self.plan, latent)
        return self.model.decoder.logits(hidden).float()

    def select(self, indices: Sequence[int]) -> None:
        self.plan.select(indices)
        self.z = self.z[torch.tensor(indices, device=self.z.device)]


def open_latent(
    path: Path,
    tokenizer_path: Path | None = None,
    decoder_tokenizer_path: Path | None = None,
    device: torch.device | None = None,
) -> LatentRun:
    """The newest weights of a run, or one `step_...` directory, on a GPU if there is one.

    Raises: CheckpointError, DataError as for `open_run`; ConfigError for a run of another objective.
    """
    return latent_run(open_run(path, tokenizer_path, decoder_tokenizer_path), device or default_device())


def longest_sentence(config: Config) -> int:
    """The most tokens of a sentence: CLS and SEP, BOS and the slot have positions too."""
    return min(config.model.max_position - 1, decoder_of(config).max_position - latent_of(config).memory)


def latent_run(
    run: OpenRun, device: torch.device, change: Callable[[torch.Tensor], torch.Tensor] = lambda weight: weight
) -> LatentRun:
    """An opened run with its weights. Args: change: applied to each weight, for example to round it.

    Raises: ConfigError for a run of another objective.
    """
    config = run.config
    if config.decoder is None:
        names = ", ".join(choice.name for choice in config.objective_choices)
        raise ConfigError(f"{run.checkpoint.path} is a run of {names}; give a run of the objective optimus.")
    choose_kernels(config.training.kernels)
    with torch.device("meta"):
        model = Optimus(config.model, config.decoder, latent_of(config), num_losses=len(LOSS_NAMES))
    model = with_weights(model, run.checkpoint, change).to(device)
    other = run.decoder_tokenizer or run.tokenizer
    return LatentRun(config, run.tokenizer, other, model, str(run.checkpoint.path))
