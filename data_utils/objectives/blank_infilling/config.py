"""The section `blank_infilling`: what is masked, how often, and how long rows are."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from data_utils.common.settings import check, checked, fraction, setting
from data_utils.objectives.compiled import cumulative_table, span_count_moments
from data_utils.objectives.interface import ObjectiveConfig
from data_utils.tokenizers.vocabulary import Vocabulary

TOKEN, SENTENCE, DOCUMENT = range(3)  # the objectives, and the numbers of their losses
ROOM_DEVIATIONS = 1.0  # a row has room for the mean number of spans and this many standard deviations
EXPECTED_SENTENCE_LENGTH = 8  # tokens; shorter than in real text; only used to size rows
PLACEMENTS = ("uniform", "reference")


@dataclass(frozen=True, kw_only=True, slots=True)
@checked("blank_infilling")
class BlankInfillingConfig(ObjectiveConfig):
    """Settings of the spans. Probabilities are per Example; ratios refer to n, the tokens of the text and its CLS."""

    segments = 1
    has_block_positions = True

    token_prob: float = fraction(
        1.0, "Probability of the token objective (short spans, [MASK]); bert_prob in the reference code."
    )
    sentence_prob: float = fraction(
        0.0,
        "Probability of the sentence objective (whole sentences, [sMASK]); the document objective takes the"
        " rest.",
    )
    masked_ratio: float = fraction(0.15, "Token objective: minimum fraction of the tokens that is masked.")
    sentence_ratio: float = fraction(
        0.15, "Sentence objective: minimum fraction of the tokens that is masked."
    )
    mean_span_length: float = setting(
        3.0,
        "Token objective: mean of the Poisson distribution of span lengths before truncation, in tokens.",
        above=0,
    )
    max_span_length: int = setting(
        39,
        "Token objective: longest span; the Poisson distribution is truncated to 1..max_span_length tokens.",
        at_least=1,
    )
    whole_words: bool = setting(
        False, "Token objective: mask whole words; masked_ratio and span lengths then count words."
    )
    placement: str = setting(
        "uniform",
        "Token objective: uniform = uniform over all placements with at least one token between spans; "
        "reference = sorted independent offsets, which favours spans that are one token apart.",
        one_of=PLACEMENTS,
    )
    document_min_ratio: float = fraction(
        0.5,
        "Document objective: shortest span as a fraction of the text; gpt_min_ratio in the reference code.",
    )
    document_max_ratio: float = fraction(1.0, "Document objective: longest span as a fraction of the text.")
    document_min_context: int = setting(
        2,
        "Document objective: tokens, CLS included, that are never masked (reference code: 2; paper: 1).",
        at_least=1,
    )
    document_tail_prob: float = fraction(
        0.5,
        "Document objective: probability that the span is the end of the text (followed by eos, without "
        "eop) instead of anywhere; gpt_infill_prob in the reference code, which despite its name selects "
        "the end.",
    )
    single_span_prob: float = fraction(
        0.0, "Probability of a single short span, drawn before the objective; counted as token objective."
    )
    block_mask_prob: float = fraction(
        0.0, "Token objective: probability that an input token of part B, except sop, is replaced by dBLOCK."
    )
    context_mask_ratio: float = fraction(
        0.0,
        "Token objective: fraction of the tokens of part A replaced by dBLOCK near masks; no loss on them.",
    )
    context_mask_range: int = setting(
        3, "Maximum distance from a mask at which context_mask_ratio applies, in tokens.", at_least=1
    )
    random_position: bool = setting(
        False,
        "Shift the position ids of a sample by a uniform random offset such that they stay <= "
        "sequence_length.",
    )
    sentinel_first: int | None = setting(
        None,
        "Ablation: id of the first of sentinel_count token pairs (mask, start). Span k of part B uses pair "
        "k - 1 instead of [MASK] and sop; the first span keeps [MASK] and sop. The position of part B is "
        "sequence_length.",
        at_least=0,
    )
    sentinel_count: int = setting(
        100, "Number of sentinel pairs; further spans start again with the first pair.", at_least=1
    )
    masked_lm: bool = setting(
        False, "Ablation: replace spans by [MASK] in place and predict them there, as BERT does; no part B."
    )
    shuffle_spans: bool = setting(True, "Shuffle the spans of part B; false (ablation) = text order.")
    cross_document_attention: bool = setting(
        False, "true (reference): the documents packed into a row are masked and attended to as one text"
    )

    @property
    def needed_roles(self) -> tuple[str, ...]:  # type: ignore[override]
        if self.masked_lm:
            return "cls", "mask"
        others = {
            "smask": self.sentence_prob > 0,
            "gmask": self.document_prob > 0,
            "dblock": self.block_mask_prob > 0 or self.context_mask_ratio > 0,
        }
        return ("cls", "mask", "sop", "eop", "eos", *(role for role in others if others[role]))

    def __post_init__(self) -> None:
        check(
            self.token_prob + self.sentence_prob <= 1.0 + 1e-9,
            f"blank_infilling.token_prob ({self.token_prob}) + sentence_prob ({self.sentence_prob}) exceeds 1; "
            "lower one of them (the remaining probability is the document objective).",
        )
        check(
            self.document_min_ratio <= self.document_max_ratio,
            f"blank_infilling.document_min_ratio ({self.document_min_ratio}) exceeds document_max_ratio "
            f"({self.document_max_ratio}); swap them.",
        )
        check(
            not self.masked_lm or self.token_prob == 1.0,
            f"blank_infilling.masked_lm needs token_prob 1.0, not {self.token_prob}; set it to 1.",
        )

    @property
    def document_prob(self) -> float:
        """Probability of the document objective."""
        return max(0.0, 1.0 - self.token_prob - self.sentence_prob)

    def least_row_length(self, sequence_length: int) -> int:
        """A row length, in tokens, that every valid window fits when each chunk has the fewest spans.

        A chunk of t tokens needs at most t + 3 + 2 * masked_ratio * (t + 1) / longest span. Documents
        that begin in the window have `DOCUMENT_OVERHEAD` = 4 reserved, a continuing one nothing.
        """
        longest = min(self.max_span_length, max(1, sequence_length - 1))
        return sequence_length + 3 + int(2 * self.masked_ratio * (sequence_length + 1) / longest)

    def row_length_for(self, sequence_length: int) -> int:
        """Row length for windows of `sequence_length` source tokens, a multiple of 8; see `ROOM_DEVIATIONS`."""
        length = max(
            sequence_length + 1 + self._room(sequence_length + 1), self.least_row_length(sequence_length)
        )
        return -(-length // 8) * 8

    def _room(self, n: int) -> int:
        """Tokens that the spans add to a text of n tokens, mean + ROOM_DEVIATIONS, for the objective that adds most."""
        room = 2
        if self.sentence_prob > 0:
            room = 2 * (int(self.sentence_ratio * n) // EXPECTED_SENTENCE_LENGTH + 1)
        if self.token_prob > 0 and not self.masked_lm:
            weights = np.diff(poisson_length_table(self.mean_span_length, self.max_span_length)) / 2.0**32
            mean, deviation = span_count_moments(weights, int(self.masked_ratio * n))
            room = max(room, math.ceil(2 * (mean + ROOM_DEVIATIONS * deviation)))
        return room

    def most_tokens(self, length: int) -> int:
        """Row tokens of a chunk of `length` tokens where there is room for any draw."""
        return 3 * length + 8

    def max_position_needed(self, sequence_length: int) -> int:
        """Part A has at most CLS + sequence_length tokens, counted from 0. A block position is at most the length of a
        span with its sop, and only a document's tail (which has no eop) is longer than sequence_length - 1.
        """
        return sequence_length

    @property
    def has_target(self) -> bool:
        return not self.masked_lm

    @property
    def loss_share(self) -> float:
        """The mean of the three objectives, weighted by the lengths of their rows."""
        weights = np.diff(poisson_length_table(self.mean_span_length, self.max_span_length))
        mean_length = float(np.average(np.arange(1, len(weights) + 1), weights=weights))
        # Predicted and all tokens of a row, per token of text.
        predicted = self.document_prob * (self.document_min_ratio + self.document_max_ratio) / 2
        total = self.document_prob
        for probability, masked, span_length in (
            (self.token_prob, self.masked_ratio, mean_length),
            (self.sentence_prob, self.sentence_ratio, float(EXPECTED_SENTENCE_LENGTH)),
        ):
            spans = 0.0 if self.masked_lm else masked / span_length
            predicted += probability * (masked + spans)
            total += probability * (1.0 + 2.0 * spans)
        not_single = 1.0 - self.single_span_prob  # a single short span masks next to nothing
        return not_single * predicted / (not_single * total + self.single_span_prob)

    def check_vocabulary_size(self, size: int) -> None:
        if self.sentinel_first is None:
            return
        end = self.sentinel_first + 2 * self.sentinel_count
        check(
            end <= size,
            f"blank_infilling.sentinel_first ({self.sentinel_first}) and sentinel_count ({self.sentinel_count}) "
            f"need ids below {end}, but model.vocab_size is {size}; lower one of them.",
        )

    def check_vocabulary(self, vocabulary: Vocabulary) -> None:
        check(
            vocabulary.sentence_end is not None or self.sentence_prob == 0,
            f"blank_infilling.sentence_prob is {self.sentence_prob}, but the tokens that end a sentence are unknown "
            "for this vocabulary; set it to 0.",
        )
        first, last = self.sentinel_first, 2 * self.sentinel_count + (self.sentinel_first or 0)
        free = first is None or all(not first <= i < last for i in vars(vocabulary.special).values())
        check(
            free,
            f"blank_infilling.sentinel_first ({first}) overlaps the special tokens below {last}; choose other ids.",
        )


def poisson_length_table(mean: float, longest: int) -> np.ndarray:
    """Truncated Poisson of span lengths, cumulative in units of 2**-32: int64 `[longest + 1]`, from 0.

    See `cumulative_table`. Every length keeps a positive weight, because it may be the only one that fits.
    """
    lengths = np.arange(1, longest + 1)
    log_weights = lengths * math.log(mean) - np.array([math.lgamma(length + 1) for length in lengths])
    return cumulative_table(np.exp(log_weights - log_weights.max()))
