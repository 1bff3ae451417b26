"""Masked language modelling: BERT (arXiv:1810.04805) and RoBERTa (arXiv:1907.11692).

15 % of the tokens of `[CLS] text [SEP]` are chosen; 80 % of them become [MASK], 10 % a random token, and 10 % stay
(`draw_corruption` in masking.py). All of them are predicted at their own positions. BERT: pairs with next-sentence
labels, and a fixed number of masks per text (`static_copies`). RoBERTa: no pairs, and masks drawn for each sample;
`input` names its four formats of inputs, of which the paper keeps `full` and finds `document` slightly better
(input_formats.py).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from data_utils.common.losses import MASKED, NEXT_SENTENCE_LOSS
from data_utils.common.settings import check, checked, setting
from data_utils.objectives.compiled import Chunks
from data_utils.objectives.input_formats import recut
from data_utils.objectives.interface import TextFormat
from data_utils.objectives.masked_text import (
    MaskedText,
    MaskedTextConfig,
    Pairing,
    Split,
)
from data_utils.objectives.registry import register
from data_utils.tokenizers.vocabulary import Vocabulary

SHORTEST = 8  # tokens of a sentence, where inputs are pairs of them


@dataclass(frozen=True, kw_only=True, slots=True)
@checked("masked_lm")
class MaskedLmConfig(MaskedTextConfig):
    """BERT without next-sentence prediction by default, that is RoBERTa."""

    whole_words: bool = setting(False, "Mask whole words.")
    next_sentence: bool = setting(False, "Two segments per sample and a next-sentence label on CLS (BERT).")
    static_copies: int = setting(
        0,
        "Precomputed maskings per text, used in turn (BERT: 10); 0 = a new masking for each sample.",
        at_least=0,
    )
    input: str = setting(
        "segments",
        "Input format, as in RoBERTa: segments (a span of one document; split in two with next_sentence), "
        "sentences (two sentences), full (full sentences, across documents) or document (full sentences of "
        "one document).",
        one_of=("segments", "sentences", "full", "document"),
    )

    def __post_init__(self) -> None:
        super(MaskedLmConfig, self).__post_init__()
        check(
            not self.next_sentence or self.input in ("segments", "sentences"),
            f"masked_lm.next_sentence is true with input {self.input}, whose examples have only one segment; set it "
            "to false, or input to segments or sentences.",
        )

    @property
    def pairing(self) -> Pairing:
        alone = Pairing.PAIR_ONLY if self.input == "sentences" else Pairing.NO_PAIR
        return Pairing.NEXT_SENTENCE if self.next_sentence else alone

    @property
    def splits(self) -> Split:  # type: ignore[override]
        return Split.AT_MARKS if self.input == "sentences" else Split.ANYWHERE

    @property
    def joins_documents(self) -> bool:  # type: ignore[override]
        return self.input == "full"

    @property
    def growth(self) -> float:
        """Three special tokens for two sentences."""
        return 1.0 + 1.5 / SHORTEST if self.input == "sentences" else 1.0

    @property
    def overhead(self) -> int:
        """CLS and SEP, and the SEP of a pair; CLS and SEP of the sentence that the window cuts."""
        return {"segments": 3, "sentences": 2}.get(self.input, 4)

    def max_position_needed(self, sequence_length: int) -> int:
        return sequence_length + 2

    def check_vocabulary(self, vocabulary: Vocabulary) -> None:
        check(
            self.input == "segments" or vocabulary.sentence_end is not None,
            f"masked_lm.input is {self.input}, but the tokens that end a sentence are unknown for this vocabulary; "
            "set it to segments.",
        )


@register
class MaskedLm(MaskedText):
    name = "masked_lm"
    config_class = MaskedLmConfig
    losses = (MASKED, NEXT_SENTENCE_LOSS)
    text_format = TextFormat("bert")

    def _fill(self, batch: np.ndarray, chunks: Chunks) -> None:
        if self.config.input != "segments" and len(batch):
            special, drops_eos = self.vocabulary.special, bool(self._record[0].drops_eos)
            tokens, lengths, counts = recut(
                self.config.input,
                SHORTEST,
                *(chunks.tokens, chunks.lengths, chunks.counts),
                (special.eos, special.sep),
                drops_eos,
                self._sentence_end,
            )
            chunks = chunks._replace(tokens=tokens, lengths=lengths, counts=counts)
        super()._fill(batch, chunks)

    def _unit_starts(self, tokens, chunk_lengths):  # type: ignore[no-untyped-def]
        if tokens.ndim == 1:
            return super()._unit_starts(tokens, chunk_lengths)
        # `recut` marks where the second sentence begins, see AT_MARKS.
        return super()._unit_starts(tokens[0], chunk_lengths) + 2 * tokens[1]
