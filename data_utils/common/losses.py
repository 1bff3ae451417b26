"""Names and numbers of losses. An objective declares its own in its file; here are those that the model knows too."""

from __future__ import annotations

from dataclasses import dataclass

MOST_LOSSES = 64  # rows of the task embedding: one for each loss, and some to spare


@dataclass(frozen=True, eq=False)
class Loss:
    """A loss as it is reported. Objectives that share a loss use the same object."""

    name: str
    number: int  # in the `objective` field and in checkpoints (`model.task_rows`): it never changes

    @property
    def is_shared(self) -> bool:
        """Whether it is a loss of this file, which several objectives may have."""
        return self in SHARED

    @property
    def sentence_level(self) -> bool:
        """Whether the sentence head predicts it from CLS, instead of the vocabulary from a token."""
        return self.number in SENTENCE_LEVEL


MASKED = Loss("masked", 5)
MASKED_SPANS = Loss("masked_spans", 6)
NEXT_SENTENCE_LOSS = Loss("next_sentence", 9)
SENTENCE_ORDER_LOSS = Loss("sentence_order", 10)
SPAN_BOUNDARY = Loss("span_boundary", 21)  # the tokens of MASKED_SPANS again; no token has it in its field
REPLACED = Loss("replaced", 28)  # of every token, by a discriminator
MASKED_DIFFUSION = Loss("masked_diffusion", 29)
ENTITIES = Loss("entities", 36)  # of every token at which one begins, among those of its Example
CONTRASTIVE = Loss("contrastive", 43)  # of the vectors of a global batch; no token has it, and rows name it
MTP = Loss("mtp", 44)  # of the token after the next, by a further block; no token has it in its field
CLASS_HEADS = {"sentence_reordering": 31, "sentence_distance": 33, "token_document": 35, "capitalization": 38,
    "discourse_relation": 40, "relevance": 42}  # fmt: skip
SENTENCE_LEVEL = (NEXT_SENTENCE_LOSS.number, SENTENCE_ORDER_LOSS.number, 31, 33, 40, 42)
CLASS_LEVEL = (*SENTENCE_LEVEL, 35, 38)  # predicted by a head of classes, not by the vocabulary
BY_TOKENS = (MASKED_DIFFUSION.number,)  # divided by all tokens of the texts, not by predicted weights
SHARED = (
    MASKED,
    MASKED_SPANS,
    MTP,
    NEXT_SENTENCE_LOSS,
    SENTENCE_ORDER_LOSS,
    SPAN_BOUNDARY,
    REPLACED,
    MASKED_DIFFUSION,
    ENTITIES,
)
