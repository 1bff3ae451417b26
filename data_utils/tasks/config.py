"""The section `task` of a configuration: labelled data to train and evaluate on instead of an objective."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from data_utils.common.settings import REQUIRED, checked, fraction, setting, setting_mapping

# Kind -> the metrics of a task whose name and settings say no others.
KINDS = {
    "cloze": ("accuracy",), "classification": ("accuracy",), "regression": ("pearson", "spearman"),
    "seq2seq": ("exact_match",), "blanks": ("bleu",), "spans": ("answer_em", "answer_f1"),
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
        "Name of the task. A built-in name sets fields, patterns and metrics; any other name is your own "
        "task.",
    )
    kind: str = setting(REQUIRED, "Type of task: what the model predicts.", one_of=tuple(KINDS))
    reader: str = setting(REQUIRED, "File format.", one_of=READERS)
    train: str | None = setting(None, "Training file; for pairs, the file of sources.", is_path=True)
    validation: tuple[str, ...] = setting((), "Validation files.", is_path=True)
    test: tuple[str, ...] = setting((), "Test files to predict; labels may be missing.", is_path=True)
    labels: tuple[str, ...] = setting(
        (),
        "Classes or tags in the order of their ids; [] = the task's default, or the training file's labels, sorted.",
    )
    text_fields: tuple[str, ...] = setting(
        (), "One or two fields that hold the text; [] = the task's default."
    )
    label_field: str | None = setting(None, "Field that holds the label; null = the task's default.")
    form: str = setting(
        "auto", "Input format of this model family; auto = the run's objective decides.", one_of=FORMS
    )
    pattern: int = setting(0, "Cloze: index of the task's built-in pattern.", at_least=0)
    template: str | None = setting(
        None, "Your own pattern, such as '{text} It was [MASK].'; null = the task's default."
    )
    verbalizers: dict[str, Any] = setting_mapping(
        "Cloze with your own pattern: label -> the words that stand for it."
    )
    scoring: str = setting(
        "auto",
        "Cloze: restricted (logits of single-token choices), sum or mean of log-probabilities; auto = "
        "restricted if every choice is one token, otherwise sum.",
        one_of=SCORINGS,
    )
    length_power: float = setting(
        1.0, "Scoring mean: the sum of log-probabilities is divided by length^length_power.", at_least=0
    )
    loss: str = setting("cross_entropy", "Cloze: loss on the scores of the choices.", one_of=LOSSES)
    marks: dict[str, Any] = setting_mapping(
        "Typing and classification: field that marks a span of the text -> marker placed around it; {} = "
        "for typing {mention: 。}, otherwise none."
    )
    entity_ids: str | None = setting(
        None, "File with the ids of the entities named in the data.", is_path=True
    )
    min_score: float = setting(0.0, "Minimum entity score; entities with a lower score are dropped.")
    mask: str = setting(
        "auto", "Mask token of the blank; auto = the one the run was trained with.", one_of=MASKS
    )
    sequence_length: int = setting(
        256, "Maximum input length in tokens, special tokens included.", at_least=8
    )
    target_length: int = setting(64, "Maximum output length in tokens.", at_least=1)
    question_length: int = setting(64, "Spans: maximum question length in tokens.", at_least=1)
    answer_length: int = setting(30, "Spans: maximum answer length in tokens.", at_least=1)
    stride: int = setting(
        128,
        "Spans: distance between the starts of consecutive windows, in tokens.",
        at_least=1,
    )
    masked_ratio: float = setting(
        0.7, "UniLM: fraction of the target tokens that is masked.", above=0, at_most=1
    )
    target_mask_prob: float = fraction(
        0.5, "UniLMv2: probability that a target token is seen by the others as [MASK] or another token."
    )
    blank_ratio: float = setting(0.1, "Blanks: fraction of the words that is blanked.", above=0, below=1)
    train_samples: int | None = setting(
        None, "Number of training samples, drawn by the seed; null = all.", at_least=1
    )
    skip_bad_lines: bool = setting(False, "Skip lines that cannot be read, and count them.")
    metrics: tuple[str, ...] = setting((), "Metrics to compute; [] = the task's default.")
    positive: str | None = setting(
        None, "f1 and f1a: the positive class (label or index of the choice); null = the second of two."
    )
    negative: str | None = setting(
        None, "micro_f1: the class that stands for no relation, such as no_relation; it is not counted."
    )

    @property
    def writes_text(self) -> bool:
        """Whether predictions are texts that the model writes."""
        return self.kind in ("seq2seq", "blanks")
