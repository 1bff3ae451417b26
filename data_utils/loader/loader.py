"""Corpora and objective -> batches by sample number. This module connects the other data modules.

A batch is one int32 array of fixed shape. The price is padding, 1 to 2 % of a row
(benchmarks/padding.py); in return kernels, compilers and pipeline buffers see one shape.
"""

from __future__ import annotations

import functools
import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from data_utils.common.batch_fields import FIELDS
from data_utils.common.checksums import identity
from data_utils.common.errors import DataError
from data_utils.common.seeds import derive_seed
from data_utils.common.urls import is_url
from data_utils.dataset.indexed_dataset import IndexedDataset
from data_utils.dataset.local_copy import local_copy
from data_utils.dataset.manifest import ENTITIES, LABELS, SCORES, TEXT_HASHES
from data_utils.loader.annotations import require_annotation
from data_utils.loader.config import CorpusConfig, DataConfig, PhaseSamples
from data_utils.loader.epoch_caps import capped_weights
from data_utils.loader.mixture import Index, Mixture, epoch_tokens, epoch_windows
from data_utils.loader.pair_corpora import linked, open_pairs
from data_utils.loader.sampler import WindowIndex
from data_utils.loader.sentences import SentenceIndex
from data_utils.loader.short_samples import Shortener
from data_utils.objectives import LOSS_NAMES, ObjectiveChoice, make_objective
from data_utils.objectives.interface import DOCUMENT_OVERHEAD, Objective
from data_utils.objectives.own_corpora import shares
from data_utils.tokenizers.tokenizer import Tokenizer
from data_utils.tokenizers.vocabulary import Vocabulary, vocabulary_of

# Further files of a corpus, and what a checkpoint calls their checksums.
FURTHER_CHECKSUMS = {ENTITIES: "entities_sha256", TEXT_HASHES: "hashes_sha256", SCORES: "scores_sha256"}
_BLOCKS_CHECKED = 4  # MiB of each file of a corpus, by each rank at its start


class SampleLoader:
    """Sample numbers -> batch. Stateless: the caller's count of consumed samples is the only state.

    Args: shorten: crops a share of the samples; None = all keep their length.
    """

    def __init__(self, mixture: Mixture, objective: Objective, shorten: Shortener | None = None):
        self.mixture, self.objective, self.shorten = mixture, objective, shorten

    @property
    def mixtures(self) -> list[Mixture]:
        """The mixture of each phase of the run."""
        return [self.mixture]

    def mixture_at(self, indices: np.ndarray) -> Mixture:
        """The mixture of samples int64 [B] of one phase."""
        return self.mixture

    def batch(self, indices: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
        """Samples int64 [B] as int32 [B, len(FIELDS), row_length], in `out` if given: a new array costs more."""
        tokens, lengths, counts = self.mixture.fetch(indices)
        if self.shorten is not None:
            tokens, lengths, counts = self.shorten(tokens, lengths, counts, indices)
        return collate(self.objective, tokens, lengths, counts, indices, out)

    def prefetch(self, indices: np.ndarray) -> None:
        """Ask the kernel to read samples int64 [B] of a later batch; see `Mixture.prefetch`."""
        self.mixture.prefetch(indices)

    def fingerprint(self) -> list[dict[str, object]]:
        """The corpora of the samples, each with the checksum of its token file."""
        return [
            {
                "documents": len(index.dataset),
                "tokens": index.dataset.num_tokens,
                "sha256": identity(index.dataset.manifest["files"][".bin"]),
                **_identities(index.dataset, FURTHER_CHECKSUMS),
                "weight": weight,
                # Only where the decoder reads its own token file.
                **_identities(getattr(index, "decoder_dataset", None), {".bin": "decoder_sha256"}),
            }
            for index, weight in self.mixture.corpora
        ]


class PhasedLoader(SampleLoader):
    """The loaders of a run's phases, as one. A batch is of one phase."""

    def __init__(self, loaders: Sequence[SampleLoader]):
        super().__init__(loaders[0].mixture, loaders[0].objective)
        self._loaders = list(loaders)
        self._first_samples = [mixture.start.first_sample for mixture in self.mixtures]

    def fingerprint(self) -> list[dict[str, object]]:
        """With the weights of all phases, which may depend on the length of the run and the size of the corpora."""
        of_phases = [[weight for _, weight in mixture.corpora] for mixture in self.mixtures]
        weights = zip(*of_phases, strict=True)
        return [
            {**entry, "phase_weights": list(each)}
            for entry, each in zip(super().fingerprint(), weights, strict=True)
        ]

    @property
    def mixtures(self) -> list[Mixture]:
        return [loader.mixture for loader in self._loaders]

    def mixture_at(self, indices: np.ndarray) -> Mixture:
        return self._loader_at(indices).mixture

    def batch(self, indices: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
        return self._loader_at(indices).batch(indices, out)

    def prefetch(self, indices: np.ndarray) -> None:
        self._loader_at(indices).prefetch(indices)

    def _loader_at(self, indices: np.ndarray) -> SampleLoader:
        """The loader of the phase of these samples."""
        phase = bisect_right(self._first_samples, int(indices.min())) - 1
        next_phase = self._first_samples[phase + 1 : phase + 2]
        assert not next_phase or indices.max() < next_phase[0]
        return self._loaders[phase]


def _identities(dataset: IndexedDataset | None, names: Mapping[str, str]) -> dict[str, object]:
    """The checksums of files of a dataset that exist. Args: names: suffix of a file -> name of its checksum."""
    files = {} if dataset is None else dataset.manifest["files"]
    return {name: identity(files[suffix]) for suffix, name in names.items() if suffix in files}


def collate(
    objective: Objective,
    tokens: np.ndarray,
    chunk_lengths: np.ndarray,
    chunks_per_sample: np.ndarray,
    sample_indices: np.ndarray,
    out: np.ndarray | None = None,
) -> np.ndarray:
    """The batch of the given samples; the objective's compiled code writes every row.

    Args:
        tokens: int32, the chunks of all samples one after the other, without CLS; with entities as from `gather`.
        chunk_lengths: int64, tokens per chunk.
        chunks_per_sample: int64 [B].
        sample_indices: int64 [B], >= 0, the address of each sample's random numbers.
        out: int32 [B, len(FIELDS), row_length], C-contiguous, to be reused; None: a new array.
    Returns: int32 [B, len(FIELDS), row_length]; the weights field holds float32 bits.
    Raises: DataError if the arrays do not belong together or a sample does not fit a row.
    """
    tokens = np.ascontiguousarray(tokens, np.int32)
    chunk_lengths = np.ascontiguousarray(chunk_lengths, np.int64)
    chunks_per_sample = np.ascontiguousarray(chunks_per_sample, np.int64)
    sample_indices = np.ascontiguousarray(sample_indices, np.int64)
    _check_lengths(tokens, chunk_lengths, chunks_per_sample, sample_indices)
    shape = (len(sample_indices), len(FIELDS), objective.row_length)
    if out is None:
        out = np.empty(shape, np.int32)
    elif out.shape != shape or out.dtype != np.int32 or not out.flags.c_contiguous:
        raise DataError(f"the batch buffer is {out.dtype} {out.shape}; it must be contiguous int32 {shape}.")
    objective.fill(out, tokens, chunk_lengths, chunks_per_sample, sample_indices)
    return out


def _check_lengths(
    tokens: np.ndarray, chunk_lengths: np.ndarray, chunks_per_sample: np.ndarray, sample_indices: np.ndarray
) -> None:
    """The compiled code reads without bounds checks, so the counts must add up."""
    total = chunk_lengths.sum()
    if chunk_lengths.min(initial=0) < 0 or total != tokens.shape[-1]:
        raise DataError(
            f"chunk lengths sum to {total} for {tokens.shape[-1]} tokens; they must be >= 0 and sum to it; the "
            "index and the data of the dataset disagree, verify the dataset."
        )
    total = chunks_per_sample.sum()
    if chunks_per_sample.min(initial=0) < 0 or total != len(chunk_lengths):
        raise DataError(
            f"chunks per sample sum to {total} for {len(chunk_lengths)} chunks; they must be >= 0 and sum to it; "
            "the windows of the sampler are inconsistent."
        )
    if len(sample_indices) != len(chunks_per_sample) or sample_indices.min(initial=0) < 0:
        raise DataError(
            f"{len(sample_indices)} sample indices for {len(chunks_per_sample)} samples; each sample needs one "
            "index >= 0."
        )


@dataclass(frozen=True)
class Datasets:
    train: SampleLoader
    validation: SampleLoader | None
    loss_names: Sequence[str]
    notes: Sequence[str] = ()  # what a user should know of the corpora, one line each


def open_datasets(
    data: DataConfig,
    objectives: Sequence[ObjectiveChoice],
    tokenizer: Tokenizer,
    seed: int,
    decoder_tokenizer: Tokenizer | None = None,
    phases: Sequence[PhaseSamples] = (),
    unit: int = 1,
) -> Datasets:
    """Open the corpora of a run and check that `tokenizer` made them.

    Args:
        objectives: `Config.objective_choices`.
        decoder_tokenizer: the tokenizer of each `decoder_prefix`, where the decoder has its own.
        phases: of the training samples, where the run has several; validation is of `data` in all.
        unit: `Config.sample_unit`.
    Raises: ConfigError without a training corpus or for objectives that do not suit the vocabulary;
        DataError for a missing, damaged or foreign dataset.
    """
    data.require_train()
    data.check_decoder(decoder_tokenizer is not None)
    vocabulary = vocabulary_of(tokenizer, decoder_tokenizer)
    objective = make_objective(objectives, vocabulary, seed, data.sequence_length, data.row_length)
    # With the objectives of all phases: what a later phase reads beside the tokens is asked for at the start.
    choices = [*objectives, *(choice for phase in phases for choice in phase.objectives)]
    opener = _CheckedOpener(data, objectives, choices, objective.row_length, tokenizer, decoder_tokenizer)
    shorten = Shortener(data.short_prob, seed) if data.short_prob else None
    loaders = [
        _make_loader(
            opener.mixture(corpora, derive_seed(seed, name), unit), objective, corpora, objectives, shorten
        )
        for name, corpora in (("train", data.train), ("validation", data.validation))
        if corpora
    ]
    if phases:
        loaders[0] = _phased_loader(loaders[0], phases, vocabulary, seed)
    indexes = [index for loader in loaders for index in loader.mixture.indexes]
    notes = [str(index) for index in indexes if type(index) is not WindowIndex]
    return Datasets(loaders[0], loaders[1] if data.validation else None, LOSS_NAMES, notes)


def _make_loader(
    mixture: Mixture,
    objective: Objective,
    corpora: Sequence[CorpusConfig],
    choices: Sequence[ObjectiveChoice],
    shorten: Shortener | None,
) -> SampleLoader:
    """A loader of samples; the samples of a corpus of pairs are of the objective that the corpus names."""
    if any(corpus.objective for corpus in corpora):
        objective = linked(objective, mixture, corpora, choices)
    return SampleLoader(mixture, objective, shorten)


def _phased_loader(
    run: SampleLoader, phases: Sequence[PhaseSamples], vocabulary: Vocabulary, seed: int
) -> SampleLoader:
    """The loader of all phases. Args: run: the loader of the run, whose corpora they share. seed: of the run."""
    mixtures = phase_mixtures(run.mixture.indexes, run.mixture.seed, phases, run.mixture.unit)
    loaders = []
    for mixture, phase in zip(mixtures, phases, strict=True):
        data, choices = phase.data, phase.objectives
        objective = make_objective(choices, vocabulary, seed, data.sequence_length, data.row_length)
        # `short_prob` is the run's.
        loaders.append(_make_loader(mixture, objective, data.train, choices, run.shorten))
    return PhasedLoader(loaders)


def corpus_weights(
    corpora: Sequence[CorpusConfig],
    objectives: Sequence[ObjectiveChoice],
    indexes: Sequence[Index] = (),
    length: int | None = None,
) -> list[float]:
    """Weights in samples.

    Args: indexes: of the corpora, where they have shares of the tokens. length: of their windows; None = as they have.
    Raises: ConfigError where corpora of pairs and the objectives do not go together.
    """
    weights = [corpus.share for corpus in corpora]
    if any(corpus.tokens is not None for corpus in corpora):
        # A share of the tokens is as many samples as its tokens fill: the mean window of a corpus differs with the
        # length of its documents.
        weights = [
            weight * epoch_windows(index, length) / max(1, epoch_tokens(index))
            for weight, index in zip(weights, indexes, strict=True)
        ]
        total = sum(weights)
        if 0 < total < math.inf:  # others are refused where quotas are made of them
            weights = [weight / total for weight in weights]
    if any(corpus.objective for corpus in corpora):
        return shares(corpora, objectives, weights)
    return weights


def phase_mixtures(
    indexes: Sequence[Index], seed: int, phases: Sequence[PhaseSamples], unit: int = 1
) -> list[Mixture]:
    """The mixture of each phase. Args: seed, unit: of the mixtures."""
    lengths = [phase.data.sequence_length for phase in phases]
    weights: Sequence[Sequence[float]] = [
        corpus_weights(phase.data.train, phase.objectives, indexes, length)
        for phase, length in zip(phases, lengths, strict=True)
    ]
    # The run's own length may be that of no phase: windows are those of the first phase, and later ones follow from it.
    if isinstance(indexes[0], WindowIndex) and indexes[0].window_length != lengths[0]:
        indexes = [
            type(index)(index.dataset, lengths[0], DOCUMENT_OVERHEAD, index.has_entities)
            for index in indexes
            if isinstance(index, WindowIndex)
        ]
    mixtures_of = functools.partial(_following_mixtures, indexes, seed, unit)
    if phases[0].data.has_caps:
        windows = [[epoch_windows(index, length) for index in indexes] for length in lengths]
        weights = capped_weights(weights, windows, seed, phases, mixtures_of)
    return mixtures_of(phases, weights)


def _following_mixtures(
    indexes: Sequence[Index],
    seed: int,
    unit: int,
    phases: Sequence[PhaseSamples],
    weights: Sequence[Sequence[float]],
) -> list[Mixture]:
    """Args: indexes: with the length of the first phase. weights: [phases][corpora]."""
    lengths = [phase.data.sequence_length for phase in phases]
    region = phases[0].data.region
    mixtures = [Mixture(list(zip(indexes, weights[0], strict=True)), seed, unit=unit)]
    # Scattered windows, cut off in the middle of an epoch, leave holes too short for a longer window; streams
    # of positions do not.
    if region or len(set(lengths)) > 1:
        mixtures = [mixtures[0].as_streams(region)]
    for phase, phase_weights, length in zip(phases[1:], weights[1:], lengths[1:], strict=True):
        # Each phase continues the corpora where the one before left them, so that an epoch visits everything once.
        mixtures.append(mixtures[-1].following(phase.first_sample, phase_weights, length))
    return mixtures


@dataclass(frozen=True)
class CorpusOpener:
    """Opens corpora as samples of one objective.

    Args: choices: the objectives; in a mixture all read windows. all_choices: with the objectives of all phases.
    """

    data: DataConfig
    choices: Sequence[ObjectiveChoice]
    all_choices: Sequence[ObjectiveChoice]
    row_length: int

    def mixture(self, corpora: Sequence[CorpusConfig], seed: int, unit: int) -> Mixture:
        indexes = [self.index(corpus) for corpus in corpora]
        weights = corpus_weights(corpora, self.choices, indexes)
        return Mixture(list(zip(indexes, weights, strict=True)), seed, unit=unit)

    def index(self, corpus: CorpusConfig) -> Index:
        length = self.data.sequence_length
        dataset = self.open(corpus.prefix)
        if corpus.objective is not None:
            return open_pairs(corpus, dataset, length, self.choices)
        if "text_pairs" in dataset.manifest:
            raise DataError(
                f"dataset {corpus.prefix} has text pairs, but its corpus names no objective; add objective: "
                "contrastive to it in data.train."
            )
        sections = [choice.section for choice in self.all_choices]
        if not sections[0].whole_documents:
            # LABELS belong to corpora of pairs, which name their objective and are opened above.
            annotations = {section.token_annotation for section in sections} - {None, LABELS}
            if annotations:
                require_annotation(dataset, annotations)
            return WindowIndex(dataset, length, DOCUMENT_OVERHEAD, bool(annotations))
        decoder_dataset = None
        if corpus.decoder_prefix is not None:
            decoder_dataset = self.open(corpus.decoder_prefix, is_decoder=True)
        overhead = sections[0].least_row_length(0)  # of a sentence without text
        return SentenceIndex(dataset, length, overhead, self.row_length, decoder_dataset)

    def open(self, prefix: str, is_decoder: bool = False) -> IndexedDataset:
        """The dataset as it is, to be counted; of one in a store the copy that training reads."""
        if is_url(prefix) and self.data.local_directory is not None:
            prefix = str(local_copy(prefix, self.data.local_directory))
        return IndexedDataset(prefix)


@dataclass(frozen=True)
class _CheckedOpener(CorpusOpener):
    """Opens corpora to be trained."""

    tokenizer: Tokenizer
    decoder_tokenizer: Tokenizer | None

    def open(self, prefix: str, is_decoder: bool = False) -> IndexedDataset:
        tokenizer = self.decoder_tokenizer if is_decoder else self.tokenizer
        assert tokenizer is not None  # checked by `check_decoder`
        if self.data.local_directory is not None:
            prefix = str(local_copy(prefix, self.data.local_directory))
        dataset = IndexedDataset(prefix)
        dataset.require_tokenizer(tokenizer.fingerprint, tokenizer.vocab_size, tokenizer.special.eos)
        try:
            dataset.verify_some(_BLOCKS_CHECKED)
        except DataError as error:
            error.only_here = True  # other ranks draw other blocks
            raise
        return dataset
