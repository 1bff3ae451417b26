"""Inputs of the heads: classes and numbers of texts, tags of words, spans of an answer.

glm              [CLS] a [SEP] b <eos>          the position of CLS
bert, unilm      [CLS] a [SEP] b [SEP]          segments 0 and 1; the position of CLS
XLNet            a [SEP] b [SEP] [CLS]          as in its pretraining
prefix           [CLS] a [SEP] b
causal           <eos> a b                      the last position, which alone has read everything
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from data_utils.common.batch_fields import Example
from data_utils.common.errors import ConfigError, DataError
from data_utils.common.setting_files import shown
from data_utils.tasks.base import TargetGroup, TaskRecord, TaskSample
from data_utils.tasks.readers.conll import is_bio
from data_utils.tasks.readers.files import plain_name
from data_utils.tasks.readers.marked import is_marked
from data_utils.tasks.templates.examples import document
from data_utils.tasks.templates.inputs import Inputs, TokenSegment, overlapping_windows
from data_utils.tasks.templates.marked import check_marks, marked_tokens
from data_utils.tasks.templates.patterns import field_text

FORMS = ("glm", "bert", "unilm", "unilmv2", "prefix", "causal")
# The fields of tasks whose files name their texts otherwise than text_a and text_b.
_TEXT_FIELDS = {
    **dict.fromkeys(("cb", "rte", "axb", "axg"), ("premise", "hypothesis")),
    "boolq": ("passage", "question"),
    "multirc": ("passage", "question", "answer"),
    "wic": ("sentence1", "sentence2", "word"),
}
_NUM_SPECIALS = 2  # special tokens of a document before its first text and after its last


@dataclass(frozen=True)
class HeadDocument:
    """A document for a head.

    Args:
        summary: the position that stands for the whole document.
        starts: the first position of each text.
    """

    example: Example
    summary: int
    starts: tuple[int, ...]


def head_document(inputs: Inputs, texts: Sequence[Sequence[int]]) -> HeadDocument:
    """One document of the texts' tokens; its length is that of the texts and at most `overhead`."""
    special, input_format = inputs.special, inputs.input_format
    is_causal, is_xlnet = input_format.name == "causal", input_format.objective == "xlnet"
    has_segments = input_format.name in ("bert", "unilm", "unilmv2")
    separator = _separator(inputs)
    if is_xlnet:
        end = [special.sep, special.cls]
    else:
        end = {"glm": [special.eos], "causal": [], "prefix": []}.get(input_format.name, [special.sep])
    tokens: list[int] = []
    if is_causal:
        tokens = inputs.start
    elif not is_xlnet:
        tokens = [special.cls]
    segments = [0] * len(tokens)
    starts = []
    for number, text in enumerate(texts):
        starts.append(len(tokens))
        is_last = number == len(texts) - 1
        tokens += [*text, *(end if is_last else separator)]
        segments += [min(number, 1) * has_segments] * (len(tokens) - len(segments))
    order = np.arange(len(tokens)) if is_causal else np.zeros(len(tokens))
    # The one token that sees the whole text: the last where tokens see only what precedes them; XLNet's CLS
    # stands at the end.
    summary = len(tokens) - 1 if is_causal or is_xlnet else 0
    example = document(tokens=tokens, ord=order, segment_ids=segments, objective=input_format.loss())
    return HeadDocument(example, summary, tuple(starts))


def overhead(inputs: Inputs, texts: int) -> int:
    """Most tokens of a document that are not of its texts."""
    return _NUM_SPECIALS + (texts - 1) * len(_separator(inputs))


def _separator(inputs: Inputs) -> list[int]:
    """What stands between two texts."""
    has_sep = inputs.input_format.name != "causal" and "sep" not in inputs.tokenizer.lacking
    return [inputs.special.sep] if has_sep else []


class TextHead:
    """The kinds `classification` and `regression`.

    Args: labels: the classes in the order of their numbers; () for numbers.
    """

    def __init__(self, inputs: Inputs, labels: Sequence[str] = ()) -> None:
        self.inputs, self.labels = inputs, tuple(labels)
        self.is_class = inputs.config.kind != "regression"
        self.head, self.prediction_type = ("classes", "classes") if self.is_class else ("values", "numbers")

    def check(self) -> None:
        self.inputs.require_format(FORMS)
        check_marks(self.inputs)
        if self.is_class and len(set(self.labels)) < 2:
            raise ConfigError(
                f"the task has the classes ({', '.join(self.labels)}); it needs 2 or more: set task.labels."
            )

    def prepare(self, records: Sequence[TaskRecord], *, training: bool) -> list[TaskRecord]:
        return list(records)

    def sample(self, record: TaskRecord, number: int, epoch: int) -> TaskSample:
        inputs = self.inputs
        fields = self._text_fields(record)
        if is_marked(inputs.config):
            return self._marked_sample(record, field_text(fields[0], record, inputs.config))
        texts = [field_text(name, record, inputs.config).strip() for name in fields]
        # Without a separator the space before a text is all that parts it from the one before.
        is_joined = inputs.input_format.name == "causal"
        segments = [
            TokenSegment(inputs.tokenizer.encode(" " + text if is_joined and i else text), True)
            for i, text in enumerate(texts)
        ]
        max_tokens = inputs.config.sequence_length - overhead(inputs, len(texts))
        segments, cut = inputs.cut(segments, max_tokens, record)
        head = head_document(inputs, [segment.ids for segment in segments])
        return TaskSample([head.example], [self._target_group(head.summary, record)], cut=cut)

    def _marked_sample(self, record: TaskRecord, text: str) -> TaskSample:
        max_tokens = self.inputs.config.sequence_length - overhead(self.inputs, 1)
        ids, entities, cut = marked_tokens(self.inputs, text, record, max_tokens)
        head = head_document(self.inputs, [ids])
        example = head.example
        if entities is not None:
            first = head.starts[0]
            padded = np.pad(entities, (first, len(example.tokens) - first - len(ids)))
            example = replace(example, block_position_ids=padded)
        return TaskSample([example], [self._target_group(head.summary, record)], cut=cut)

    def _text_fields(self, record: TaskRecord) -> Sequence[str]:
        if self.inputs.config.text_fields:
            return self.inputs.config.text_fields
        fields = _TEXT_FIELDS.get(plain_name(self.inputs.config.name), ())
        if fields and all(name in record.fields for name in fields):
            return fields
        return ("text_a", "text_b") if "text_b" in record.fields else ("text_a",)

    def _target_group(self, position: int, record: TaskRecord) -> TargetGroup:
        positions = np.array([position], np.int32)
        if record.label is None:
            return TargetGroup(0, positions)
        if self.is_class:
            number = label_number(record.label, self.labels, record)
            return TargetGroup(0, positions, np.array([number], np.int32))
        return TargetGroup(0, positions, value=float(record.label))


class Typing(TextHead):
    """The kind `typing`: which of the labels hold of the mention between two marks."""

    def __init__(self, inputs: Inputs, labels: Sequence[str] = ()) -> None:
        super().__init__(inputs, labels)
        self.head, self.prediction_type = "sets", "label sets"

    def _target_group(self, position: int, record: TaskRecord) -> TargetGroup:
        positions = np.array([position], np.int32)
        if record.label is None:
            return TargetGroup(0, positions)
        holds = np.array([label in record.label for label in self.labels], np.int32)
        return TargetGroup(0, positions, holds)


def label_number(label: object, labels: Sequence[str], record: TaskRecord) -> int:
    """The index of a label among the labels. Raises DataError for an unknown one."""
    if str(label) not in labels:
        raise DataError(
            f"{record.location}: label {shown(label)} is unknown; the labels are {', '.join(labels)}."
        )
    return labels.index(str(label))


class Tagging:
    """The kind `tagging`: a tag for the first token of every word; its other tokens have none.

    A sentence that is too long continues in further documents, so that each word gets a tag.
    Args: labels: the tags in the order of their numbers.
    """

    head = "tags"

    def __init__(self, inputs: Inputs, labels: Sequence[str] = ()) -> None:
        self.inputs, self.labels = inputs, tuple(labels)
        self.prediction_type = "entities" if is_bio(self.labels) else "tags"

    def check(self) -> None:
        self.inputs.require_format(FORMS)
        if len(set(self.labels)) < 2:
            raise ConfigError(
                f"the task has the tags ({', '.join(self.labels)}); it needs 2 or more: set task.labels."
            )

    def prepare(self, records: Sequence[TaskRecord], *, training: bool) -> list[TaskRecord]:
        return list(records)

    def sample(self, record: TaskRecord, number: int, epoch: int) -> TaskSample:
        words = record.needed("words")
        tags = record.label
        if tags is not None and len(tags) != len(words):
            raise DataError(
                f"{record.location}: {len(words)} words have {len(tags)} tags; each word needs one."
            )
        max_tokens = self.inputs.config.sequence_length - overhead(self.inputs, 1)
        chunks, cut = self._chunks(words, max_tokens)
        documents: list[Example] = []
        groups: list[TargetGroup] = []
        num_words = 0  # in the documents so far
        for chunk in chunks:
            head = head_document(self.inputs, [[token for word in chunk for token in word]])
            lengths = [len(word) for word in chunk]
            positions = head.starts[0] + np.cumsum([0, *lengths[:-1]])
            chunk_tags = () if tags is None else tags[num_words : num_words + len(chunk)]
            numbers = [label_number(tag, self.labels, record) for tag in chunk_tags]
            groups.append(
                TargetGroup(len(documents), positions.astype(np.int32), np.array(numbers, np.int32))
            )
            documents.append(head.example)
            num_words += len(chunk)
        return TaskSample(documents, groups, cut=cut)

    def _chunks(self, words: Sequence[str], max_tokens: int) -> tuple[list[list[list[int]]], int]:
        """The words' tokens in chunks of at most `max_tokens` tokens, and how many of single words were cut."""
        chunks: list[list[list[int]]] = [[]]
        used = cut = 0
        for number, word in enumerate(words):
            word_ids = self.inputs.tokenizer.encode(" " + word if number else word)
            cut += max(0, len(word_ids) - max_tokens)
            # A word that the tokenizer drops still has a tag, which needs a position.
            ids = (word_ids or [self.inputs.special.unk])[:max_tokens]
            if used + len(ids) > max_tokens:
                chunks.append([])
                used = 0
            chunks[-1].append(ids)
            used += len(ids)
        return chunks, cut


class Spans:
    """The kind `spans`: an answer's first and last token in `question [SEP] window of the context`.

    A long context has several windows, each with its own document and target group. The positions of a group are CLS,
    which stands for "no answer in this window", and the tokens of the context; so no answer lies in the question.
    """

    head, prediction_type = "spans", "texts"
    labels = ()

    def __init__(self, inputs: Inputs, labels: Sequence[str] = ()) -> None:
        self.inputs = inputs

    def check(self) -> None:
        inputs, config = self.inputs, self.inputs.config
        inputs.require_format(
            tuple(name for name in FORMS if name != "causal"),
            {"causal": "sees no later tokens and therefore not the end of an answer"},
        )
        max_tokens = config.sequence_length - overhead(inputs, 2) - config.question_length
        if max_tokens < config.answer_length:
            raise ConfigError(
                f"task.sequence_length ({config.sequence_length}) leaves {max_tokens} tokens for the context "
                f"besides question_length ({config.question_length}), fewer than answer_length "
                f"({config.answer_length}); raise it."
            )

    def prepare(self, records: Sequence[TaskRecord], *, training: bool) -> list[TaskRecord]:
        """In training a record for each window, so that a long context does not make a large batch."""
        if not training:
            return list(records)
        lengths: dict[str, int] = {}  # several questions have one context
        window_records: list[TaskRecord] = []
        for record in records:
            context = record.needed("context")
            if context not in lengths:
                lengths[context] = len(self.inputs.tokenizer.encode(context))
            count = len(self._windows(len(self._question(record)[0]), lengths[context]))
            if count == 1:
                window_records.append(record)
            else:
                window_records += [record.with_fields(window=number) for number in range(count)]
        return window_records

    def sample(self, record: TaskRecord, number: int, epoch: int) -> TaskSample:
        question, cut = self._question(record)
        context, offsets = self.inputs.tokenizer.encode_with_offsets(record.needed("context"))
        answer = self._answer(record, offsets)
        windows = self._windows(len(question), len(context))
        if "window" in record.fields:
            windows = [windows[record.fields["window"]]]
        documents: list[Example] = []
        groups: list[TargetGroup] = []
        for start, end in windows:
            head = head_document(self.inputs, [question, context[start:end]])
            context_start = head.starts[1]
            positions = [head.summary, *range(context_start, context_start + end - start)]
            targets: list[int] = []
            if answer is not None:
                first, last = answer
                inside = start <= first <= last < end
                # 0 is CLS: no answer in this window.
                targets = [first - start + 1, last - start + 1] if inside else [0, 0]
            groups.append(
                TargetGroup(len(documents), np.array(positions, np.int32), np.array(targets, np.int32))
            )
            documents.append(head.example)
        return TaskSample(documents, groups, cut=cut)

    def answer_text(self, record: TaskRecord, group: int, first: int, last: int) -> str:
        """The text of an answer, cut from the context's own characters.

        Args:
            group: of the record's sample. first, last: indices of its positions; 0: no answer.
        """
        if not 0 < first <= last:
            return ""
        context = record.needed("context")
        ids, offsets = self.inputs.tokenizer.encode_with_offsets(context)
        windows = self._windows(len(self._question(record)[0]), len(ids))
        start, _ = windows[record.fields.get("window", group)]
        begin, end = offsets[start + first - 1][0], offsets[start + last - 1][1]
        return context[begin:end].strip()

    def _question(self, record: TaskRecord) -> tuple[list[int], int]:
        """Token ids of the question, and the number of tokens cut."""
        ids = self.inputs.tokenizer.encode(record.needed("question").strip())
        max_tokens = self.inputs.config.question_length
        return ids[:max_tokens], max(0, len(ids) - max_tokens)

    def _windows(self, question_tokens: int, context_tokens: int) -> list[tuple[int, int]]:
        """[start, end) of each window in the context's tokens; they overlap, and the last one ends it."""
        config = self.inputs.config
        max_tokens = config.sequence_length - overhead(self.inputs, 2) - question_tokens
        return overlapping_windows(context_tokens, max_tokens, config.stride)

    def _answer(self, record: TaskRecord, offsets: Sequence[tuple[int, int]]) -> tuple[int, int] | None:
        """First and last token of the first answer; (-1, -1) if the text has no answer; None without a label."""
        answers = record.fields.get("answers")
        if not answers:
            return None if record.label is None else (-1, -1)
        text, start = answers[0]
        first = bisect.bisect_right([end for _, end in offsets], start)
        last = bisect.bisect_left([begin for begin, _ in offsets], start + len(text)) - 1
        return (first, last) if first <= last else (-1, -1)
