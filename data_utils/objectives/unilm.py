"""UniLM v1 (arXiv:1905.03197): four kinds of language model with one cloze task.

Each Example `[CLS] A [SEP] B [SEP]` is bidirectional, sequence-to-sequence (B sees A and the tokens before it in B),
left-to-right or right-to-left. Every kind predicts masked tokens at their own positions, without a shift. Segment ids
distinguish the kinds: 0 and 1 bidirectional, 2 left-to-right, 3 right-to-left, 4 and 5 sequence-to-sequence. The kind
is drawn per Example; the paper draws it per batch.
"""

from __future__ import annotations

from dataclasses import dataclass

from data_utils.common.losses import NEXT_SENTENCE_LOSS, Loss
from data_utils.common.settings import check, checked, fraction, setting
from data_utils.objectives.interface import TextFormat
from data_utils.objectives.masked_text import MaskedText, MaskedTextConfig, Pairing
from data_utils.objectives.registry import register


@dataclass(frozen=True, kw_only=True, slots=True)
@checked("unilm")
class UniLmConfig(MaskedTextConfig):
    """Settings of the mixture of language models, and of the masked tokens."""

    bidirectional_prob: float = fraction(1 / 3, "Probability of a bidirectional sample.")
    seq2seq_prob: float = fraction(1 / 3, "Probability of a sequence-to-sequence sample.")
    left_to_right_prob: float = fraction(
        1 / 6, "Probability of a left-to-right sample; otherwise right-to-left."
    )
    single_token_prob: float = fraction(
        0.8, "Probability of masking a single token; otherwise a bigram or trigram."
    )
    next_sentence: bool = setting(True, "Next-sentence label on CLS of bidirectional samples.")

    segments = 6

    @property
    def length_weights(self) -> tuple[float, float, float]:
        longer_prob = 1 - self.single_token_prob
        return self.single_token_prob, longer_prob / 2, longer_prob / 2

    @property
    def pairing(self) -> Pairing:
        return Pairing.NEXT_SENTENCE if self.next_sentence else Pairing.PAIR_ONLY

    def __post_init__(self) -> None:
        MaskedTextConfig.__post_init__(self)  # slots: super() without arguments fails
        names = ("bidirectional_prob", "seq2seq_prob", "left_to_right_prob")
        total = sum(getattr(self, name) for name in names)
        check(
            total <= 1.0 + 1e-9,
            f"unilm.{', '.join(names)} add up to {total:g}; their sum must be at most 1 (the remaining probability "
            "is right-to-left).",
        )

    @property
    def language_model_probs(self) -> tuple[float, float, float, float]:
        """Bidirectional, sequence-to-sequence, left-to-right, right-to-left."""
        first_three = (self.bidirectional_prob, self.seq2seq_prob, self.left_to_right_prob)
        return (*first_three, max(0.0, 1.0 - sum(first_three)))


@register
class UniLm(MaskedText):
    name = "unilm"
    config_class = UniLmConfig
    losses = (
        Loss("bidirectional", 11),
        Loss("seq2seq", 12),
        Loss("left_to_right", 13),
        Loss("right_to_left", 14),
        NEXT_SENTENCE_LOSS,
    )
    text_format = TextFormat(
        "unilm", "masks", before=("cls",), after=("sep",), ends=("sep",), segments=(4, 5)
    )
