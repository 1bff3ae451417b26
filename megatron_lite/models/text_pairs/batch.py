"""Batches of text pairs: beside the tokens, what a loss over the whole global batch needs to know of each text.

The loss compares the texts of all ranks, and equal texts are no negatives of each other. So each micro-batch has the
hashes of all texts of its global batch. Every rank reads these from the mapped datasets: they are a function of the
sample numbers, and no rank waits for another.

A record whose query or positive equals that of an earlier record of the global batch is left out of it, whatever
becomes of the earlier one: its row is padding, and it does not count. So no query and no positive is twice in a batch.
CoSENT and a teacher's vectors, which have no negatives, keep all records.

Shapes: N records of the global batch, k texts of each; B sequences of the micro-batch of S tokens, with G texts in all.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np

from data_utils.common.batch_fields import DOC, PADDING_DOC
from data_utils.common.losses import CONTRASTIVE
from data_utils.loader.loader import SampleLoader
from data_utils.loader.text_pairs import TextPairIndex
from data_utils.objectives.contrastive import FORMS, ContrastiveConfig
from megatron_lite.config.embedding import EmbeddingConfig
from megatron_lite.config.model import ModelConfig
from megatron_lite.transformer.batch import Batch, ExtraInputs
from megatron_lite.transformer.pair_records import PairInputs, PairRecords
from megatron_lite.transformer.pooling import TextBatch


def first_of_equals(texts: np.ndarray) -> np.ndarray:
    """Bool [N]: whether no earlier record has the query or the positive of a record. Args: texts: uint64 [N, k]."""
    is_first = np.ones(len(texts), bool)
    for column in texts[:, :2].T:
        found = np.zeros(len(texts), bool)
        found[np.unique(column, return_index=True)[1]] = True
        is_first &= found
    return is_first


class PairBatch(TextBatch):
    """Sequences with the texts of a record each; document d of a sequence is text d of its record.

    Args:
        fields, samples: as for Batch; the sequences of records that are left out are padding.
        numbers: int64 [B], the record of each sequence in `records`; -1 for padding.
        records: of the global batch.
        pooling: one of POOLINGS.
        prompt_tokens: tokens that the mean leaves out in front of a text: of the query and of the other texts.
        is_one_loss: the batch has one loss, not one for each record (CoSENT).
        targets: fp32 [B, D], the teacher's vector of each sequence's record; None = the loss has no teacher.
    """

    def __init__(
        self,
        fields: np.ndarray,
        samples: np.ndarray,
        numbers: np.ndarray,
        records: PairRecords,
        *,
        pooling: str,
        prompt_tokens: tuple[int, int] = (0, 0),
        is_one_loss: bool = False,
        targets: np.ndarray | None = None,
    ):
        super().__init__(fields, samples, pooling=pooling)
        self.numbers, self.records = numbers, records
        self.prompt_tokens, self.is_one_loss, self.targets = prompt_tokens, is_one_loss, targets
        self.skipped = self.skipped_tokens[self.texts % records.texts.shape[1]]

    @property
    def loss_divisor(self) -> float:
        """Records of this micro-batch that count; of one loss for the batch 1, where its first record is."""
        return float((self.numbers == 0 if self.is_one_loss else self.numbers >= 0).sum())

    def loss_divisors(self, num_losses: int) -> np.ndarray:
        divisors = np.zeros(num_losses)
        divisors[CONTRASTIVE.number] = self.loss_divisor
        return divisors

    @cached_property
    def texts(self) -> np.ndarray:
        """The texts of this micro-batch, int64 [G], ascending: as in `token_texts`."""
        return np.unique(self.token_texts[self.token_texts >= 0])

    def extra_inputs(
        self,
        order: np.ndarray,
        decoder_start: int,
        predicted: np.ndarray,
        few_counts: bool,
        config: ModelConfig,
    ) -> ExtraInputs:
        """`PairInputs`, and the weight of their loss."""
        pooled = super().extra_inputs(order, decoder_start, predicted, few_counts, config)
        return ExtraInputs(
            arrays={**pooled.arrays, "slots": self.texts},
            make=lambda tensors: PairInputs(
                **tensors, numbers=self.numbers, records=self.records, targets=self.targets
            ),
            weights=np.ones(1, np.float32),
            weight_objectives=np.array([CONTRASTIVE.number]),
        )

    @cached_property
    def token_texts(self) -> np.ndarray:
        """The text of each token, int64 [B * S]: k times its sequence plus its number in the record; -1 = padding."""
        doc = self.fields[:, DOC].astype(np.int64)
        texts = np.arange(len(doc))[:, None] * self.records.texts.shape[1] + doc
        return np.where(doc == PADDING_DOC, -1, texts).ravel()

    @property
    def skipped_tokens(self) -> np.ndarray:
        """Tokens at the start of each text that a vector without its prompt leaves out, int64 [k]."""
        query, document = self.prompt_tokens
        return np.array([query, *[document] * (self.records.texts.shape[1] - 1)])

    def padded(self, sequences: int) -> PairBatch:
        more = sequences - len(self.samples)
        samples = np.pad(self.samples, (0, more))
        numbers = np.pad(self.numbers, (0, more), constant_values=-1)
        targets = None if self.targets is None else np.pad(self.targets, ((0, more), (0, 0)))
        fields = super().padded(sequences).fields
        return PairBatch(
            fields, samples, numbers, self.records, pooling=self.pooling, prompt_tokens=self.prompt_tokens,
            is_one_loss=self.is_one_loss, targets=targets,
        )  # fmt: skip


class PairSamples:
    """The samples of a loader: PairBatches of corpora of text pairs, and fields of other corpora.

    A batch lies within a global batch, whose samples are of one corpus.
    """

    def __init__(self, loader: SampleLoader, section: ContrastiveConfig, embedding: EmbeddingConfig):
        self._loader, self.prefetch, self.fingerprint = loader, loader.prefetch, loader.fingerprint
        self._is_one_loss, self._has_negatives = section.loss == "cosent", section.has_negatives
        form = FORMS[section.form]
        self._num_before = len(form.before)
        self._pooling = embedding.pooling_of(form.is_causal)
        self._includes_prompt = embedding.include_prompt
        self._last: tuple[PairRecords, TextPairIndex, np.ndarray] | None = None

    def batch(self, indices: np.ndarray) -> np.ndarray | Batch:
        """Samples int64 [B]."""
        fields = self._loader.batch(indices)
        if not len(indices):
            return fields
        found = self._records_of(indices)
        if found is None:
            return fields
        records, index, windows = found
        numbers = indices - records.first_sample
        assert numbers.min() >= 0 and numbers.max() < len(records.texts), "samples of two global batches"
        targets = None
        if index.vectors is not None:
            targets = np.asarray(index.vectors[windows[numbers]], np.float32)
        numbers = np.where(records.is_counted[numbers], numbers, -1)
        skipped = numbers < 0
        fields[skipped] = 0
        fields[skipped, DOC] = PADDING_DOC
        query, document = (
            0 if self._includes_prompt or not tokens else tokens + self._num_before
            for tokens in index.prompt_tokens
        )
        return PairBatch(
            fields, indices, numbers, records, pooling=self._pooling, prompt_tokens=(query, document),
            is_one_loss=self._is_one_loss, targets=targets,
        )  # fmt: skip

    def _records_of(self, indices: np.ndarray) -> tuple[PairRecords, TextPairIndex, np.ndarray] | None:
        """The global batch of samples, its corpus, and its records there; None for a batch of text."""
        mixture = self._loader.mixture_at(indices)
        start, unit = mixture.start.first_sample, mixture.unit
        first = start + (int(indices.min()) - start) // unit * unit
        last = self._last  # one read: another thread may replace it
        if last is not None and last[0].first_sample == first:
            return last
        corpora, _, numbers = mixture.locate(np.arange(first, first + unit))
        index = mixture.indexes[corpora[0]]
        if not isinstance(index, TextPairIndex):
            return None
        texts = index.hashes(numbers)
        is_counted = first_of_equals(texts) if self._has_negatives else np.ones(len(texts), bool)
        records = PairRecords(first, texts, texts != 0, is_counted, index.scores(numbers))
        self._last = records, index, numbers
        return self._last
