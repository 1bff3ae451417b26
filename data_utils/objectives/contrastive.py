"""Contrastive learning of text vectors: a query, a text that belongs to it, and negatives. Here: rows and settings.

A sample is a record of a corpus of text pairs (data_utils/build/text_pairs.py), and its row holds the texts of the
record, each a document: number 0 is the query, 1 the positive, 2, 3, ... are negatives. A text stands as the model
reads one text, with its special tokens, and is cut at its end, behind prompt and special tokens in front, to a length
that counts them all. No token has a loss: the loss is of the vectors of a whole global batch (`Loss` contrastive),
which is of one corpus (data_utils/loader/mixture.py, `unit`).

Sources: InfoNCE, arXiv:1807.03748; joint softmax, GTE, arXiv:2308.03281; CoSENT, kexue.fm/archives/8847; Matryoshka,
arXiv:2205.13147; a margin for false negatives, arXiv:2402.16829; vectors of a teacher, arXiv:2004.09813.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from data_utils.common.batch_fields import ORD, POSITION_IDS, TOKENS
from data_utils.common.losses import CONTRASTIVE
from data_utils.common.settings import check, checked, setting
from data_utils.objectives.base import RowObjective, RowSizes
from data_utils.objectives.compiled import (
    Chunks,
    begin_row,
    compiled,
    copy_range,
    count_up,
    entry_point,
    mark_document,
)
from data_utils.objectives.interface import TextFormat
from data_utils.objectives.own_corpora import TEXT_PAIRS, check_corpora
from data_utils.objectives.registry import register

# How a model reads one text; see `head_document` in data_utils/tasks/templates/heads_input.py.
FORMS = {
    "bert": TextFormat("bert", before=("cls",), after=("sep",)),
    "glm": TextFormat("glm", before=("cls",), after=("eos",)),
    "prefix": TextFormat("prefix", before=("cls",)),
    "causal": TextFormat("causal", before=("eos",), is_causal=True),
    "causal_cls": TextFormat("causal", before=("cls",), is_causal=True),
    "causal_none": TextFormat("causal", is_causal=True),
    "xlnet": TextFormat("bert", after=("sep", "cls")),
    "t5": TextFormat("encoder_decoder", after=("eos",)),
    "bart": TextFormat("encoder_decoder", before=("cls",), after=("eos",)),
}
# The objective that reads texts in a form.
_READERS = {"bert": "masked_lm", "glm": "blank_infilling", "prefix": "prefix_lm"}
LOSSES = ("infonce", "cosent", "mse")
DIRECTIONS = ("query_to_document", "symmetric", "joint")


@dataclass(frozen=True, kw_only=True, slots=True)
@checked("contrastive")
class ContrastiveConfig(RowSizes):
    """Which texts of a pair are read, how, and the loss of their vectors."""

    query_length: int = setting(
        64, "Tokens of a query at most, prompt and special tokens included.", at_least=4
    )
    document_length: int = setting(256, "The same of a positive or negative.", at_least=4)
    negatives: int = setting(
        1, "Negatives of a record that are read, at most; a corpus may have more or fewer.", at_least=0
    )
    form: str = setting(
        "bert",
        "How a text is written: bert ([CLS] x [SEP]), glm and bart ([CLS] x eos), prefix ([CLS] x), causal (eos x, "
        "from left to right), causal_cls (the same with CLS) and causal_none (x alone), t5 (x eos), xlnet (x [SEP] "
        "[CLS]). Where it is left out, as the run's other objective has it, or model.system.",
        one_of=tuple(FORMS),
    )
    loss: str = setting(
        "infonce",
        "infonce: the positive against all other documents of the global batch; cosent: the order of the scores of all "
        "its pairs, without negatives; mse: the mean squared difference from a teacher's vectors (vectors in "
        "data.train), without negatives.",
        one_of=LOSSES,
    )
    temperature: float = setting(0.05, "Cosines are divided by it.", above=0)
    directions: str = setting(
        "query_to_document",
        "infonce: query_to_document; symmetric adds positive to queries; joint has all in one softmax, queries among "
        "queries and positives among documents too (GTE).",
        one_of=DIRECTIONS,
    )
    matryoshka_sizes: tuple[int, ...] = setting(
        (),
        "The loss is the sum of those of the first numbers of a vector, of these sizes; [] = of all.",
        at_least=1,
    )
    matryoshka_weights: tuple[float, ...] = setting((), "Weights of these losses; [] = 1 each.", above=0)
    false_negative_margin: float | None = setting(
        None,
        "Leave out documents whose cosine with the query exceeds the positive's by more than this; null = only texts "
        "that equal the positive or the query.",
        at_least=-2,
        at_most=2,
    )

    own_corpora = TEXT_PAIRS
    model_module = "megatron_lite.models.text_pairs.model_spec"

    def __post_init__(self) -> None:
        for side, length in zip(("query", "document"), self.text_lengths, strict=True):
            check(
                length > self.overhead,
                f"contrastive.{side}_length is {length}, all for special tokens; raise it.",
            )
        sizes, weights = self.matryoshka_sizes, self.matryoshka_weights
        check(
            len(set(sizes)) == len(sizes),
            f"contrastive.matryoshka_sizes is {list(sizes)}, with a size twice; give each once.",
        )
        check(
            not weights or len(weights) == len(sizes),
            f"contrastive.matryoshka_weights has {len(weights)} numbers for {len(sizes)} matryoshka_sizes; give one "
            "for each, or none.",
        )
        check(
            self.loss == "infonce"
            or (self.directions == "query_to_document" and self.false_negative_margin is None),
            f"contrastive.loss is {self.loss}, which has no directions and no false negatives; leave out directions "
            "and false_negative_margin.",
        )
        check(
            self.loss != "mse" or not sizes,
            f"contrastive.matryoshka_sizes is {list(sizes)}, but loss mse compares whole vectors; remove it.",
        )

    def check_run(self, config: Any) -> None:
        """Raise ConfigError unless each global batch can be of one corpus, and all are of one size."""
        check_corpora(config)
        normalization = config.training.loss_normalization
        check(
            normalization != "mean_of_means",
            f"training.loss_normalization is {normalization}, but the loss of contrastive is of a global batch, not of "
            "micro-batches; set it to global_tokens or per_objective.",
        )
        check(
            not config.model.decoder_layers or config.parallel.pipeline_parallel_size == 1,
            f"parallel.pipeline_parallel_size is {config.parallel.pipeline_parallel_size} with model.decoder_layers "
            f"({config.model.decoder_layers}), but vectors are of the encoder alone; set it to 1.",
        )
        size, ramp = config.batch.global_batch_size, config.batch.ramp
        check(
            ramp is None and not any("ramp" in phase.batch for phase in config.phases),
            "batch.ramp is set, but the loss of contrastive is of a global batch of one size; remove it.",
        )
        for number, phase in enumerate(config.phases):
            other = phase.batch.get("global_batch_size", size)
            check(
                other == size,
                f"phases[{number}].batch.global_batch_size is {other}, but the loss of contrastive is of a global "
                f"batch of one size, here {size}; remove it from the phase.",
            )
            check(
                phase.skip_samples % size == 0,
                f"phases[{number}].skip_samples is {phase.skip_samples}, but with contrastive whole global batches are "
                f"left out; choose a multiple of {size}.",
            )
            for name in ("negatives", "loss"):
                check(
                    name not in phase.objective_settings.get("contrastive", {}),
                    f"phases[{number}].contrastive.{name} is set, but corpora are opened once; set it outside phases.",
                )
        check(
            not config.data.has_caps,
            "data.train has max_epochs, but with contrastive corpora have whole global batches; set weights instead.",
        )
        samples = config.training.eval_samples
        check(
            not config.data.validation or samples % size == 0,
            f"training.eval_samples is {samples}, but the loss of contrastive is of whole global batches; choose a "
            f"multiple of {size}.",
        )
        for each in self.matryoshka_sizes:
            check(
                each <= config.model.hidden_size,
                f"contrastive.matryoshka_sizes has {each}, more than model.hidden_size ({config.model.hidden_size}); "
                "remove it.",
            )

    @property
    def reads_as(self) -> str:
        return _READERS.get(self.form, self.form.partition("_")[0])

    @property
    def text_lengths(self) -> tuple[int, int]:
        """Tokens of a query, and of another text, at most."""
        return self.query_length, self.document_length

    @property
    def needs_scores(self) -> bool:
        return self.loss == "cosent"

    @property
    def needs_vectors(self) -> bool:
        return self.loss == "mse"

    @property
    def has_negatives(self) -> bool:
        """Whether the texts of other records are in the loss of a record."""
        return self.loss == "infonce"

    @property
    def negatives_read(self) -> int:
        return self.negatives if self.has_negatives else 0

    @property
    def needed_roles(self) -> tuple[str, ...]:  # type: ignore[override]
        text_format = FORMS[self.form]
        return (*map(str, text_format.before), *text_format.after)

    @property
    def loss_share(self) -> float:
        """No token is predicted."""
        return 0.0

    @property
    def overhead(self) -> int:
        return len(self.needed_roles)

    def least_row_length(self, sequence_length: int) -> int:
        """The longest record: `data.sequence_length` has no part in it."""
        return self.query_length + (1 + self.negatives_read) * self.document_length

    def max_position_needed(self, sequence_length: int) -> int:
        return max(self.text_lengths) - 1


@compiled
def _write_text(row, offset, text, specials, settings):
    """The special tokens before, the tokens of a text, and those after. Returns the end."""
    first = offset + settings.num_before
    end = first + len(text)
    copy_range(row[TOKENS], offset, first, specials, 0)
    copy_range(row[TOKENS], first, end, text, 0)
    copy_range(row[TOKENS], end, end + settings.num_after, specials, settings.num_before)
    end += settings.num_after
    count_up(row[POSITION_IDS], offset, end, 0)
    if settings.is_causal:
        count_up(row[ORD], offset, end, 0)
    return end


@entry_point
def _fill_rows(batch, chunks, tables, record):
    settings, chunks, specials = record[0], Chunks(*chunks), tables[0]
    k, start = 0, 0  # the chunk, and where its text begins
    for i in range(len(batch)):
        row, offset = batch[i], 0
        begin_row(row, settings.pad)
        for document in range(chunks.first_document, chunks.first_document + chunks.counts[i]):
            longest = settings.query_length if document == 0 else settings.document_length
            # Cut here, where the prompt is in place and the special tokens have theirs: never the beginning.
            length = min(chunks.lengths[k], longest - settings.overhead)
            # No more texts than a row holds, whatever a sample has: estimates fill rows with other text.
            if length > 0 and document < settings.texts:
                end = _write_text(row, offset, chunks.tokens[start : start + length], specials, settings)
                mark_document(row, offset, end, document, settings.loss)
                offset = end
            start += chunks.lengths[k]
            k += 1


@register
class Contrastive(RowObjective):
    """See the top of this file."""

    name = "contrastive"
    config_class = ContrastiveConfig
    losses = (CONTRASTIVE,)
    entry = staticmethod(_fill_rows)

    @classmethod
    def text_format_for(cls, config: ContrastiveConfig) -> TextFormat:
        return FORMS[config.form]

    def values(self) -> dict[str, Any]:
        text_format = FORMS[self.config.form]
        return super().values() | {
            "texts": 2 + self.config.negatives_read,
            "num_before": len(text_format.before),
            "num_after": len(text_format.after),
            "is_causal": text_format.is_causal,
        }

    def length_table(self) -> np.ndarray:
        """No spans are drawn: the special tokens before a text, and those after."""
        special = self.vocabulary.special
        return np.array([getattr(special, role) for role in self.config.needed_roles], np.int32)

    def fill(
        self,
        batch: np.ndarray,
        tokens: np.ndarray,
        chunk_lengths: np.ndarray,
        chunks_per_sample: np.ndarray,
        sample_indices: np.ndarray,
    ) -> None:
        """See `Objective.fill`. The `doc` field numbers the texts of a record from 0: the query."""
        text = tokens if tokens.ndim == 1 else tokens[0]
        self._fill(batch, Chunks(text, chunk_lengths, chunks_per_sample, sample_indices, 0))
