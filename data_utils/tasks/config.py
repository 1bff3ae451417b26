"""The section `task` of a configuration: labelled data to train and evaluate on instead of an objective."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from data_utils.common.settings import REQUIRED, checked, fraction, setting, setting_mapping

# Metrics that follow from a text's log probability, not from predictions.
PERPLEXITIES = ("token_perplexity", "word_perplexity", "bits_per_byte")
# Kind -> the metrics of a task whose name and settings say no others.
KINDS = {
    "cloze": ("accuracy",), "classification": ("accuracy",), "regression": ("pearson", "spearman"),
    "seq2seq": ("exact_match",), "blanks": ("bleu",), "language_modelling": PERPLEXITIES,
    "lambada": ("accuracy", "word_perplexity"), "spans": ("answer_em", "answer_f1"),
    "tagging": ("entity_f1",),
    "typing": ("loose_micro_f1", "loose_macro_f1", "strict_accuracy"),
}  # fmt: skip
READERS = ("jsonl", "superglue", "glue", "squad", "conll", "pairs", "text", "synthetic")
FORMS = ("auto", "glm", "bert", "causal", "prefix", "unilm", "unilmv2", "encoder_decoder")
SCORINGS = ("auto", "restricted", "sum", "mean")
LOSSES = ("cross_entropy", "hinge", "generative", "mix")
MASKS = ("auto", "mask", "smask", "gmask")


@dataclass(frozen=True, kw_only=True, slots=True)
@checked("task")
class TaskConfig:
    name: str = setting(
        REQUIRED,
        "name of the task, which selects fields, patterns and metrics; any name for a task of your own",
    )
    kind: str = setting(REQUIRED, "type of the task", one_of=tuple(KINDS))
    reader: str = setting(REQUIRED, "format of the files", one_of=READERS)
    train: str | None = setting(
        None, "training file; for reader pairs, the file with the sources", is_path=True
    )
    validation: tuple[str, ...] = setting((), "validation files", is_path=True)
    test: tuple[str, ...] = setting((), "files to predict; labels are optional", is_path=True)
    labels: tuple[str, ...] = setting((), "classes or tags, in the order of their ids; () = the task's own")
    text_fields: tuple[str, ...] = setting((), "one or two fields with the texts; () = the task's own")
    label_field: str | None = setting(None, "field with the label; null = the task's own")
    form: str = setting("auto", "input format; auto = the format of the run's objective", one_of=FORMS)
    pattern: int = setting(0, "cloze: index of the task's pattern", at_least=0)
    template: str | None = setting(None, "your own pattern, like '{text} It was [MASK].'; null = the task's")
    verbalizers: dict[str, Any] = setting_mapping(
        "cloze with template: label -> the words that fill the blank"
    )
    scoring: str = setting(
        "auto",
        "cloze: restricted (compare the logits of one token per choice), sum or mean of log probabilities; auto = "
        "restricted if every choice is one token, otherwise sum",
        one_of=SCORINGS,
    )
    length_power: float = setting(
        1.0, "scoring mean: exponent of the number of tokens that divides the sum", at_least=0
    )
    loss: str = setting("cross_entropy", "cloze: loss over the scores of the choices", one_of=LOSSES)
    marks: dict[str, Any] = setting_mapping(
        "typing, classification: field with a span of the text -> token put around the span; {} = typing: "
        "{mention: 。}"
    )
    entity_ids: str | None = setting(None, "file with the entity ids of the names in the lines", is_path=True)
    min_score: float = setting(0.0, "entities with a lower score are skipped")
    mask: str = setting(
        "auto", "token of the blank; auto = the one that the run was trained with", one_of=MASKS
    )
    sequence_length: int = setting(256, "longest input, tokens, including special tokens", at_least=8)
    target_length: int = setting(64, "longest output, tokens", at_least=1)
    question_length: int = setting(64, "spans: longest question, tokens", at_least=1)
    answer_length: int = setting(30, "spans: longest answer, tokens", at_least=1)
    stride: int = setting(128, "spans, language modelling: stride of the windows, tokens", at_least=1)
    bidirectional: bool = setting(True, "language modelling, lambada: bidirectional attention in the context")
    masked_ratio: float = setting(0.7, "unilm: fraction of the target that is masked", above=0, at_most=1)
    target_mask_prob: float = fraction(
        0.5, "unilmv2: probability that later tokens see a target token as [MASK] or another token"
    )
    blank_ratio: float = setting(0.1, "blanks: fraction of the words that is masked", above=0, below=1)
    train_samples: int | None = setting(
        None, "number of training samples, drawn with the seed; null = all", at_least=1
    )
    skip_bad_lines: bool = setting(False, "skip and count lines that cannot be read")
    metrics: tuple[str, ...] = setting((), "metrics to compute; () = the task's own")
    positive: str | None = setting(
        None, "f1, f1a: the positive class, or the index of the positive choice; null = the second of two"
    )
    negative: str | None = setting(None, "micro_f1: the negative class, such as no_relation")

    @property
    def writes_text(self) -> bool:
        """Whether predictions are texts that the model writes."""
        return self.kind in ("seq2seq", "blanks")
