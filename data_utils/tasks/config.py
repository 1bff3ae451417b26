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
    name: str = setting(REQUIRED, "the task, which gives fields, patterns and metrics; any name for your own")
    kind: str = setting(REQUIRED, "what the model does", one_of=tuple(KINDS))
    reader: str = setting(REQUIRED, "the format of the files", one_of=READERS)
    train: str | None = setting(None, "file to train on; for pairs, the one with the sources", is_path=True)
    validation: tuple[str, ...] = setting((), "files to evaluate on", is_path=True)
    test: tuple[str, ...] = setting((), "files to predict, whose labels may be missing", is_path=True)
    labels: tuple[str, ...] = setting((), "classes or tags, in the order of numbers; () = the task's own")
    text_fields: tuple[str, ...] = setting((), "fields of the texts, one or two; () = the task's own")
    label_field: str | None = setting(None, "field of the label; null = the task's own")
    form: str = setting("auto", "inputs of which model; auto = that of the run's objective", one_of=FORMS)
    pattern: int = setting(0, "cloze: number of the task's pattern", at_least=0)
    template: str | None = setting(None, "your own pattern, like '{text} It was [MASK].'; null = the task's")
    verbalizers: dict[str, Any] = setting_mapping("cloze, own pattern: label -> the words that say it")
    scoring: str = setting(
        "auto",
        "cloze: restricted (logits of one token of each answer), sum or mean of log probabilities; auto = restricted "
        "where all answers are one token, else sum",
        one_of=SCORINGS,
    )
    length_power: float = setting(1.0, "mean: power of the answer's tokens that divides the sum", at_least=0)
    loss: str = setting("cross_entropy", "cloze: of the choices' scores", one_of=LOSSES)
    marks: dict[str, Any] = setting_mapping(
        "typing, classification: field with a span of the text -> what stands around it; {} = typing: {mention: 。}"
    )
    entity_ids: str | None = setting(None, "numbers of entities that lines name", is_path=True)
    min_score: float = setting(0.0, "entities of a lower score are left out")
    mask: str = setting("auto", "the blank's token; auto = the one that the run has learnt", one_of=MASKS)
    sequence_length: int = setting(256, "most tokens of an input, special ones counted", at_least=8)
    target_length: int = setting(64, "most tokens of an output", at_least=1)
    question_length: int = setting(64, "spans: most tokens of a question", at_least=1)
    answer_length: int = setting(30, "spans: most tokens of an answer", at_least=1)
    stride: int = setting(128, "spans, language modelling: tokens between the starts of windows", at_least=1)
    bidirectional: bool = setting(True, "language modelling, lambada: the context is read both ways")
    masked_ratio: float = setting(0.7, "unilm: part of the target that is masked", above=0, at_most=1)
    target_mask_prob: float = fraction(
        0.5, "unilmv2: tokens of the target that others see as [MASK] or another token"
    )
    blank_ratio: float = setting(0.1, "blanks: part of the words that is hidden", above=0, below=1)
    train_samples: int | None = setting(None, "samples to draw by the seed; null = all", at_least=1)
    skip_bad_lines: bool = setting(False, "leave out lines that cannot be read, and count them")
    metrics: tuple[str, ...] = setting((), "metrics to compute; () = the task's own")
    positive: str | None = setting(
        None, "f1, f1a: the class, or the choice's number; null = the second of two"
    )
    negative: str | None = setting(None, "micro_f1: the class that says nothing, such as no_relation")

    @property
    def writes_text(self) -> bool:
        """Whether predictions are texts that the model writes."""
        return self.kind in ("seq2seq", "blanks")
