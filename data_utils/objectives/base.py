"""The base class of objectives that pack documents into rows, each with its own compiled `fill_chunk`, and of their
sections of the configuration.

An objective is a config section, a compiled function that writes the Example of one chunk (the part of a document that
lies in the sample's window), and a bound on the row tokens a chunk can need. The bound is linear in the length of the
chunk and holds for every draw, so rows never overflow and nothing is drawn again. There are two exceptions: BART and
blank infilling, whose number of spans varies, size their rows near the mean and cut the last tokens of a chunk where
its spans do not fit. Blank infilling also has its own loop and its own bound.
"""

from __future__ import annotations

import dataclasses
import functools
import typing
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from data_utils.common import batch_fields, random_streams
from data_utils.common.batch_fields import DOC, FIELDS, Example
from data_utils.common.errors import DataError
from data_utils.common.losses import Loss
from data_utils.common.random_streams import new_rng, source_digest
from data_utils.common.settings import check
from data_utils.objectives.compiled import Chunks, Scratch, cumulative_table, entry_point
from data_utils.objectives.interface import DOCUMENT_OVERHEAD, ObjectiveConfig, TextFormat
from data_utils.tokenizers.vocabulary import Vocabulary

# Texts of the greatest length in a row of whole texts. With sentences of at most 64 and on average 35 tokens 7.9 % of a
# row is padding; with two 15 %, with eight 3.8 %. Padding is dropped before the model; what is lost is the evenness of
# batches.
LONGEST_PER_ROW = 4


class RowSizes(ObjectiveConfig):
    """Sections whose row lengths follow from the bound `growth * tokens + overhead` of a chunk.

    A window holds chunks whose tokens, and DOCUMENT_OVERHEAD more for each but a continuing first one, fit
    sequence_length; with `overhead <= DOCUMENT_OVERHEAD * growth` one long chunk is then the worst case.
    """

    __slots__ = ()

    @property
    def growth(self) -> float:
        """Row tokens per token of text, at most."""
        return 1.0

    @property
    def overhead(self) -> int:
        """Further row tokens per chunk, at most."""
        return 2

    def tokens_needed(self, lengths: Any) -> Any:
        """Row tokens that chunks of these lengths need at most, int64."""
        # 1e-9: a product such as 1.15 * 100 may be just below the integer that it means.
        return np.floor(self.growth * np.asarray(lengths) + 1e-9).astype(np.int64) + self.overhead

    def most_tokens(self, length: int) -> int:
        """Row tokens of a chunk of `length` tokens where there is room for any draw."""
        return int(self.tokens_needed(length))

    def least_row_length(self, sequence_length: int) -> int:
        assert self.overhead <= DOCUMENT_OVERHEAD * self.growth
        return int(self.tokens_needed(sequence_length))

    def row_length_for(self, sequence_length: int) -> int:
        return -(-self.least_row_length(sequence_length) // 8) * 8

    def max_position_needed(self, sequence_length: int) -> int:
        return sequence_length + self.overhead - 1

    @property
    def length_weights(self) -> Sequence[float] | np.ndarray:
        """Weights of spans of 1, 2, ... mask units (see masking.py), if the objective draws spans."""
        return (1.0,)

    @property
    def mask_units(self) -> str | None:
        """What is masked as a whole: "words", or None: single tokens. "sentences": what BART permutes."""
        return None


class WholeTextSizes(RowSizes):
    """Sections whose rows hold whole texts, each at most twice: consecutive ones, as many as fit."""

    __slots__ = ()

    whole_documents = True

    @property
    def growth(self) -> float:
        """Row tokens per token of text: a text is in its row twice."""
        return 2.0

    def row_length_for(self, sequence_length: int) -> int:
        """Room for several of the longest texts: what is left at the end of rows is then a small part of them."""
        return -(-LONGEST_PER_ROW * self.least_row_length(sequence_length) // 8) * 8


def numeric_settings(config: Any) -> dict[str, Any]:
    """The settings of a section that are numbers or booleans."""
    hints = typing.get_type_hints(type(config))
    types = {field.name: hints[field.name] for field in dataclasses.fields(config)}
    return {name: cls(getattr(config, name)) for name, cls in types.items() if cls in (bool, int, float)}


def _make_record(values: dict[str, Any], digest: int) -> np.ndarray:
    """Settings as compiled code reads them: a record array of length 1, types from the values.

    A record, not a tuple, because it is passed as one pointer. An np.uint64 (key, threshold) keeps its type. Numba's
    cache on disk notices changes only in the entry point's own file, but the argument types are part of its key.
    Therefore the digest of all sources is the name of a field.
    """
    dtypes = {bool: np.bool_, int: np.int64, float: np.float64, np.uint64: np.uint64}
    fields = [(f"sources_{digest:x}", np.bool_), *((k, dtypes[type(v)]) for k, v in values.items())]
    record = np.recarray(1, np.dtype(fields, align=True))
    for name, value in values.items():
        record[name] = value
    return record


def check_token(key: str, token: int | None, size: int) -> None:
    """Raise ConfigError for a token id that is not below the vocabulary size. Args: key: name of the setting."""
    check(
        token is None or token < size,
        f"{key} ({token}) must be below model.vocab_size ({size}): it is a token id; lower it.",
    )


@entry_point
def _look_up(table, tokens, values):
    """values = table[tokens] without NumPy's int64 copy of the tokens. Returns False if a token is not in the table."""
    for i in range(len(tokens)):
        # Compiled code has no bounds checks: a foreign token id would read memory of others.
        if not 0 <= tokens[i] < len(table):
            return False
        values[i] = table[tokens[i]]
    return True


class RowObjective:
    """An objective around one compiled entry point (see `Objective` in interface.py).

    A subclass names its section, its losses and its entry point, which calls `fill_chunks` with the objective's own
    function. (Each file has its own entry point, because numba cannot cache a function that takes another one.)
    The entry point reads the settings `values` and the special tokens.

    Args:
        config: the objective's section. seed: the Philox key of all random numbers, `settings.key` in compiled code
            (random_streams.py).
        sequence_length: source tokens per sample, at most.
        row_length: tokens per row of the batch; None: the config's.
    Raises: ConfigError if they do not fit together.
    """

    name: ClassVar[str]  # of the objective and of its section in the configuration
    config_class: ClassVar[type[ObjectiveConfig]]
    losses: ClassVar[tuple[Loss, ...]]  # `settings.loss` is the number of the first
    entry: ClassVar[Callable[..., Any]]
    compiled_files: ClassVar[tuple[str, ...]] = ()  # further files that the entry point calls into
    scratch_type: ClassVar[type[Any]] = (
        Scratch  # a NamedTuple of the arrays that the compiled code works with
    )
    text_format: ClassVar[TextFormat | None] = None  # for tasks and generation; None = not supported
    ends_with_sep: ClassVar[bool] = False  # [SEP] follows the text, so see `length_in_row`
    _digest: ClassVar[int]

    def __init_subclass__(cls) -> None:
        """Take the digest of the sources now: the files may change after the import."""
        if not hasattr(cls, "entry"):  # a common base class of several objectives
            return
        own_file = getattr(cls.entry, "py_func", cls.entry).__code__.co_filename
        shared = (str(Path(__file__).with_name(name)) for name in ("base.py", "compiled.py", "masking.py"))
        files = (random_streams.__file__, batch_fields.__file__, *shared)
        cls._digest = source_digest(*files, own_file, *cls.compiled_files)

    @classmethod
    def text_format_for(cls, config: Any) -> TextFormat | None:
        """`text_format` where it depends on the section."""
        return cls.text_format

    def __init__(
        self,
        config: Any,
        vocabulary: Vocabulary,
        seed: int,
        sequence_length: int,
        row_length: int | None = None,
    ) -> None:
        check(sequence_length >= 2, f"sequence_length is {sequence_length}; it must be at least 2.")
        least, default = config.least_row_length(sequence_length), config.row_length_for(sequence_length)
        self.config = config
        self.vocabulary = vocabulary
        self.sequence_length = int(sequence_length)
        self.row_length = default if row_length is None else row_length
        check(
            self.row_length >= least,
            f"row_length {self.row_length} is too short for sequence_length {sequence_length} with "
            f"{self.name}; it must be at least {least} ({default} is recommended).",
        )
        missing = [role for role in config.needed_roles if role in vocabulary.lacking]
        check(
            not missing,
            f"{self.name} needs the special token{'s' * (len(missing) > 1)} {', '.join(missing)}, which the "
            "tokenizer does not have; choose another tokenizer or objective, or set tokenizer.added_tokens=glm and "
            "rebuild the corpora.",
        )
        config.check_vocabulary(vocabulary)
        self.mask_units = self.choose_mask_units()
        check(
            self.mask_units != "words" or vocabulary.word_start is not None,
            f"{self.name} masks whole words, but {vocabulary.words_unknown}; set "
            f"{self.name}.{config.token_units_setting}.",
        )
        self._length_table = self.length_table()
        special: dict[str, Any] = {
            field.name: int(getattr(vocabulary.special, field.name))
            for field in dataclasses.fields(vocabulary.special)
        }
        size = vocabulary.num_tokens or vocabulary.size  # random tokens are below it
        values = special | {"vocabulary_size": int(size), "sequence_length": self.sequence_length}
        # BERT's corpora end documents with [SEP] (GLM's BERT vocabulary with [PAD]); a row writes its own [SEP]
        # instead.
        values |= {"drops_eos": self.ends_with_sep and special["eos"] in (special["sep"], special["pad"])}
        values |= {"key": np.uint64(seed), "loss": self.losses[0].number} | self.values()
        self._record = _make_record(values, self._digest)

    def values(self) -> dict[str, Any]:
        """The settings that compiled code reads: the section's numbers, and the bound of lengths for `fill_chunks`."""
        bound = {"growth": float(self.config.growth), "overhead": int(self.config.overhead)}
        return bound | numeric_settings(self.config)

    def length_table(self) -> np.ndarray:
        """Span lengths, see `cumulative_table`."""
        return cumulative_table(self.config.length_weights)

    def choose_mask_units(self) -> str | Callable[[np.ndarray], np.ndarray] | None:
        """As `RowSizes.mask_units`, or a function that finds them: int32 tokens of one chunk -> bool for each token.

        `whole_words` in a section becomes "words" in its `mask_units`, and `_unit_starts` asks the vocabulary for them.
        """
        return self.config.mask_units

    def fill(
        self,
        batch: np.ndarray,
        tokens: np.ndarray,
        chunk_lengths: np.ndarray,
        chunks_per_sample: np.ndarray,
        sample_indices: np.ndarray,
    ) -> None:
        """See `Objective.fill`. The `doc` field numbers the chunks of a sample from 0."""
        ends = np.cumsum(chunks_per_sample)
        needed = np.concatenate([[0], np.cumsum(self.tokens_needed(chunk_lengths))])
        needed = needed[ends] - needed[ends - chunks_per_sample]
        longest = chunk_lengths.max(initial=0)
        # The compiled loops write without bounds checks, so what does not fit is refused before they run.
        if needed.max(initial=0) > batch.shape[2] or longest > self.sequence_length:
            worst = int(np.argmax(needed))
            raise DataError(
                f"sample {sample_indices[worst]} has {chunks_per_sample[worst]} chunks that can need "
                f"{needed[worst]} tokens of a row (the longest chunk has {longest}), too many for sequence_length "
                f"{self.sequence_length} and rows of {batch.shape[2]}; the tokens of a window plus "
                f"{DOCUMENT_OVERHEAD} for each document must not exceed sequence_length."
            )
        if tokens.ndim == 2 and self.config.token_annotation is None:
            tokens = tokens[0]
        self._fill(batch, Chunks(tokens, chunk_lengths, chunks_per_sample, sample_indices, 0))

    def tokens_needed(self, chunk_lengths: np.ndarray) -> np.ndarray:
        """Row tokens that each chunk can need, int64 [chunks]."""
        return self.config.tokens_needed(chunk_lengths)

    def example(self, chunk: np.ndarray, sample_index: int, chunk_index: int = 0) -> Example:
        """The Example of one chunk (int32 tokens, not empty) as `fill` draws it when it is alone in a row."""
        text = np.ascontiguousarray(chunk, np.int32)
        batch = np.empty((1, len(FIELDS), self.config.most_tokens(len(text))), np.int32)
        lengths, counts, samples = (np.array([number], np.int64) for number in (len(text), 1, sample_index))
        self._fill(batch, Chunks(text, lengths, counts, samples, chunk_index))
        return Example.from_fields(batch[0][:, batch[0, DOC] >= 0])

    def _fill(self, batch: np.ndarray, chunks: Chunks) -> Any:
        chunks = chunks._replace(unit_start=self._unit_starts(chunks.tokens, chunks.lengths))
        return self.entry(batch, tuple(chunks), self._tables(batch.shape[2]), self._record)

    def _tables(self, row_length: int) -> tuple[Any, ...]:
        """The argument `tables` of an entry point, see `with_scratch`."""
        # Made by the caller: numba frees an array at its last mention in compiled code, and a pointer into it
        # is no mention.
        scratch = np.empty((len(self.scratch_type._fields), row_length + 2), np.int64)
        return self._length_table, new_rng(), scratch, self._sentence_end

    @functools.cached_property
    def _sentence_end(self) -> np.ndarray:
        ends = self.vocabulary.sentence_end
        return np.zeros(self.vocabulary.size, np.bool_) if ends is None else np.array(ends, np.bool_)

    def _unit_starts(self, tokens: np.ndarray, chunk_lengths: np.ndarray) -> np.ndarray:
        """Bool [tokens]: whether a mask unit begins at each token."""
        if self.mask_units is None:
            return np.ones(len(tokens), np.bool_)
        # A name is compiled code over the whole batch; a function sees one chunk at a time, as it may look at
        # neighbours.
        if callable(self.mask_units):
            chunks = np.split(tokens, np.cumsum(chunk_lengths)[:-1])
            return np.concatenate([np.zeros(0, np.bool_), *map(self.mask_units, chunks)])
        if self.mask_units == "words":
            return self.vocabulary.word_starts(tokens)
        starts = np.ones(len(tokens), np.bool_)  # the first token of a chunk always begins a sentence
        if not _look_up(self.vocabulary.sentence_end, tokens[:-1], starts[1:]):
            raise DataError(
                f"the text has token ids {tokens.min()} to {tokens.max()}, but the vocabulary has "
                f"{self.vocabulary.size} tokens; the dataset was built with another tokenizer: rebuild it."
            )
        return starts
