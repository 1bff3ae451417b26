"""The interface of an objective: its section of the configuration, and the method that fills the rows of a batch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

import numpy as np

from data_utils.tokenizers.special_tokens import SpecialTokens
from data_utils.tokenizers.vocabulary import Vocabulary

# Row tokens that a window reserves for each document that begins in it. CLS and one span of blank infilling need 3; no
# objective needs more than it reserves.
DOCUMENT_OVERHEAD = 4


@dataclass(frozen=True)
class TextFormat:
    """How an objective formats a text and the completion that follows it, for inputs of tasks and for generation.

    Special tokens are named by their roles; a number is the id of another token.
    """

    input_format: str  # of tasks, one of FORMS in data_utils/tasks/config.py
    # How a completion is generated: "blanks" fills the blanks of a text; "left_to_right" continues it; "masks" appends
    # a mask that predicts its own token; "unmasking" fills masks behind it; "encoder_decoder" generates in a second
    # stack; None = not at all.
    generation: str | None = None
    before: tuple[str | int, ...] = ()  # tokens before a text
    # `before` of each mode, if there are several.
    modes: Mapping[str, tuple[str | int, ...]] = field(default_factory=dict)
    after: tuple[str, ...] = ()  # tokens after a text
    # The token that predicts the completion's first token; of several roles the first that exists.
    start: tuple[str, ...] = ()
    forced: tuple[str, ...] = ()  # tokens with which every completion begins, and which are not returned
    ends: tuple[str, ...] = ()  # tokens that end a completion; training writes the first
    allowed: tuple[str, ...] = ()  # special tokens that a completion may have
    masks: tuple[str, ...] = ("mask",)  # tokens of blanks that the run has learnt
    segments: tuple[int, int] = (0, 0)  # segment ids of a text and of its completion
    group: int = 0  # `grp` of an encoder's text
    is_causal: bool = False  # whether a token of a text sees only those before it


def role_token(role: str | int, special: SpecialTokens) -> int:
    """The id of a role's token; a number is an id."""
    return role if isinstance(role, int) else getattr(special, role)


def first_known(roles: Sequence[str], lacking: Collection[str]) -> str:
    """The first of the roles that a vocabulary has, else the last. Args: lacking: the roles that it lacks."""
    return next((role for role in roles if role not in lacking), roles[-1])


class ObjectiveConfig(ABC):
    """The interface between an objective's section of the configuration and a training run."""

    __slots__ = ()

    on_resume: ClassVar[str] = "phase"  # see `setting`
    segments = 2  # segment ids are below this
    needed_roles: tuple[str, ...] = ()  # special tokens that the vocabulary must have
    has_span_boundaries = False  # whether spans are predicted again, from the tokens around them
    has_block_positions = False  # whether block_position_ids hold positions that position_ids do not
    memory_length: int = 0  # first tokens of long texts: block_position_ids 1, no loss, no gradient (XLNet)
    whole_documents = False  # whether a sample is a row of whole documents, not a window of the joined corpus
    # The annotation of each token that `fill` also reads: "entities", "capitals", "spans" or "labels", see `gather` in
    # data_utils/loader/sampler.py; None = nothing.
    token_annotation: str | None = None
    # The kind of corpora that the objective alone reads, each of which names it: "labelled pairs" or "text pairs";
    # None = it reads text.
    own_corpora: str | None = None
    token_units_setting = "whole_words=false"  # makes the objective mask tokens instead of whole words
    # The module whose MODEL_SPEC describes the model that the objective trains
    # (megatron_lite/transformer/build.py); None = one Transformer.
    model_module: str | None = None
    # With a model_module: the end of the sentence that tells a user why the run cannot be opened as one Transformer.
    own_model_advice: str | None = None
    solves_tasks = False  # whether that model can be fine-tuned on tasks
    has_second_stack = False  # whether that model has a second Transformer, of the section `decoder`
    # Files by which the model's Hugging Face directory differs from the directory of one Transformer; a name that ends
    # in / is a directory with a Transformer's files. The first name occurs in no other directory.
    model_files: tuple[str, ...] = ()

    @property
    def reads_as(self) -> str | None:
        """The objective whose texts these are; None: they are its own."""
        return None

    @property
    def has_target(self) -> bool:
        """Whether only tokens with ord > 0 have a loss, as in a decoder."""
        return False

    @property
    def has_sentence_label(self) -> bool:
        """Whether some CLS tokens have a class label, for which the model needs a sentence head."""
        return False

    @property
    def class_heads(self) -> Mapping[str, int]:
        """The losses whose labels are classes, and their number: `model.class_heads` needs a head for each."""
        return {}

    def further_head_sizes(self, hidden_size: int) -> Mapping[str, int]:
        """Sizes of the attention heads of Transformers besides `model` and `decoder`, by what they are of, in words.

        Args: hidden_size: of `model`.
        """
        return {}

    @property
    @abstractmethod
    def loss_share(self) -> float:
        """Share of the row tokens that is predicted, on average, in long documents and without padding."""

    @abstractmethod
    def least_row_length(self, sequence_length: int) -> int:
        """A row length that every window fits, tokens."""

    @abstractmethod
    def row_length_for(self, sequence_length: int) -> int:
        """Row length for windows of `sequence_length` tokens where the configuration gives none, a multiple of 8."""

    @abstractmethod
    def max_position_needed(self, sequence_length: int) -> int:
        """Largest position id that can occur; the model needs one position more."""

    def check_run(self, config: Any) -> None:  # noqa: B027  (most ask for nothing)
        """Raise ConfigError unless the rest of the configuration, a `Config`, is as the objective needs it."""

    def check_vocabulary_size(self, size: int) -> None:  # noqa: B027  (most sections name no ids)
        """Raise ConfigError for token ids of the section that are not below `size`."""

    def check_vocabulary(self, vocabulary: Vocabulary) -> None:  # noqa: B027  (most ask for nothing)
        """Raise ConfigError unless the vocabulary has what the section asks for."""


class Objective(Protocol):
    """The interface between an objective and collation. Most objectives are a `RowObjective` (base.py)."""

    row_length: int  # tokens per row of the batch; every valid sample fits
    sequence_length: int  # source tokens per sample, at most

    def fill(
        self,
        batch: np.ndarray,
        tokens: np.ndarray,
        chunk_lengths: np.ndarray,
        chunks_per_sample: np.ndarray,
        sample_indices: np.ndarray,
    ) -> None:
        """Write sample i to `batch[i]` (int32 `[len(FIELDS), row_length]`), padding included.

        Must be a pure function of (seed, sample index, text): the same sample gives the same row in
        any batch. Raises DataError for a sample that cannot fit.
        """
        ...
