"""Classification and multiple choice as filling a blank: a pattern, and the words that say each class.

    glm        [CLS] before [MASK] after <eos>   sop answer         (GLM, arXiv:2103.10360, section 2.3)
    bert       [CLS] before [MASK] after [SEP]                      one token, in the blank's place
    causal     before answer                                        the blank is the end of the pattern
    prefix     [CLS] before   sop answer                            the same

With `restricted` every choice is one token, and one document serves all of them. With `sum` and `mean` each choice is a
document, whose score is the log probability of all its tokens and its end; `mean` divides by their number to a power.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from data_utils.common.batch_fields import Example
from data_utils.common.errors import ConfigError, DataError
from data_utils.common.setting_files import shown
from data_utils.tasks.base import TargetGroup, TaskRecord, TaskSample, target_group_with_loss
from data_utils.tasks.readers.files import plain_name
from data_utils.tasks.templates import cloze_rules
from data_utils.tasks.templates.examples import (
    after_prefix,
    document,
    fill_blanks,
    left_to_right,
    without_loss,
)
from data_utils.tasks.templates.inputs import Inputs, TokenSegment, joined_ids
from data_utils.tasks.templates.patterns import (
    Pattern,
    TextSegment,
    chosen_pattern,
    parse_template,
    rendered,
    require_one_blank,
)

IN_PLACE = ("bert", "unilm", "unilmv2")  # forms whose blank is one token, predicted where it stands
FORMS = ("glm", "causal", "prefix", *IN_PLACE)


class Cloze:
    """The kind `cloze`.

    Args: labels: the classes in the order of their numbers; () where records bring their own choices.
    """

    head = "choices"

    def __init__(self, inputs: Inputs, labels: Sequence[str] = ()) -> None:
        self.inputs = inputs
        self.task = plain_name(inputs.config.name)
        self.pattern: Pattern = chosen_pattern(inputs.config)
        self.slots = parse_template(self.pattern.template)
        self.labels = tuple(labels) or tuple(self.pattern.verbalizers)
        require_one_blank(self.slots, self.pattern.template)
        # COPA's third pattern asks for the word between premise and choice, in a document for each choice.
        self.one_document_each = any(slot.field == "choice" for slot in self.slots)
        self.words = self._words()
        self.scoring = self._scoring()

    @property
    def prediction_type(self) -> str:
        """The type of predictions, a key of METRICS_BY_PREDICTION_TYPE (metrics_by_task.py)."""
        if self.task == "record":
            return "texts"
        return "classes" if self.words or self.task == "wsc" else "numbers of choices"

    # ---- settings ----

    def _words(self) -> list[str]:
        """The verbalizers in the order of the labels; none where records bring their choices."""
        known = self.pattern.verbalizers
        if not known:
            return []
        # Named classes go by their names, since files have them in several orders (CB); numbers by their order.
        if set(known) == set(self.labels):
            return [known[label] for label in self.labels]
        if all(label.isdigit() for label in known) and len(known) == len(self.labels):
            return list(known.values())  # numbers are classes in their order, whatever the file calls them
        raise ConfigError(
            f"the verbalizers are for {', '.join(known)}, but the labels of the task are {', '.join(self.labels)}; "
            "each label needs one (task.labels, task.verbalizers)."
        )

    def _scoring(self) -> str:
        scoring = self.inputs.config.scoring
        if scoring != "auto":
            return scoring
        # One-token answers are choices with a repeated row: the softmax over the vocabulary cancels between
        # them, so that one document serves all.
        one_token = self.words and all(len(self._answer(words)) == 1 for words in self.words)
        return "restricted" if one_token or self.inputs.input_format.name in IN_PLACE else "sum"

    def check(self) -> None:
        inputs, form = self.inputs, self.inputs.input_format
        inputs.require_format(FORMS)
        if form.objective == "xlnet":
            raise ConfigError(
                "XLNet was not trained to fill a [MASK] inside a text; use task.kind classification, or another "
                "run."
            )
        if form.name in IN_PLACE and self.scoring != "restricted":
            raise ConfigError(
                f"task.scoring is {self.scoring}, but a run of {form.objective} predicts one token per blank; set "
                "it to restricted, or use a run of blank_infilling."
            )
        if self.one_document_each and self.scoring == "restricted":
            raise ConfigError(
                "the pattern makes one document per choice, which task.scoring restricted does not support; set it "
                "to sum."
            )
        if form.name in ("causal", "prefix") and not self.slots[-1].is_blank:
            raise ConfigError(
                f"the pattern {shown(self.pattern.template)} has text after its blank, which a run of "
                f"{form.objective} cannot read before it fills the blank; choose another task.pattern, or end "
                "task.template with [MASK]."
            )
        self._check_words()
        fixed = [segment for side in self._fixed() for segment in inputs.encode(side)]
        needed = len(joined_ids(fixed)) + self._overhead([self._answer(words) for words in self.words])
        if needed > inputs.config.sequence_length:
            raise ConfigError(
                f"task.sequence_length is {inputs.config.sequence_length}, but the pattern and its verbalizers "
                f"alone need {needed} tokens; raise it."
            )

    def _fixed(self) -> list[list[TextSegment]]:
        return [[TextSegment(slot.text) for slot in self.slots if slot.text]]

    def _check_words(self) -> None:
        answers = {words: self._answer(words) for words in self.words}
        seen: dict[tuple[int, ...], str] = {}
        for words, ids in answers.items():
            names = [self.inputs.tokenizer.special_names[i] for i in ids if i in self._special_ids]
            if not ids or names:
                what = f"gives {', '.join(names)}" if names else "has no token"
                raise ConfigError(
                    f"the verbalizer {shown(words)} {what}; choose words of the tokenizer's vocabulary."
                )
            if self.scoring == "restricted" and len(ids) > 1:
                raise ConfigError(
                    f"the verbalizer {shown(words)} has {len(ids)} tokens, but task.scoring restricted compares "
                    "single tokens; choose a shorter word, or set it to sum."
                )
        if len(self.words) == 1:
            raise ConfigError(f"the task has one verbalizer, {shown(self.words[0])}; it needs 2 or more.")
        for words in self.words:
            other = seen.setdefault(tuple(answers[words]), words)
            if other is not words or self.words.count(words) > 1:
                raise ConfigError(
                    f"the verbalizers {shown(other)} and {shown(words)} have the same tokens; choose different words."
                )

    @property
    def _special_ids(self) -> set[int]:
        return set(self.inputs.tokenizer.special_names)

    # ---- samples ----

    def prepare(self, records: Sequence[TaskRecord], *, training: bool) -> list[TaskRecord]:
        return cloze_rules.training_records(self.task, records) if training else list(records)

    def choices(self, record: TaskRecord, number: int = 0) -> tuple[str, ...]:
        """The names of a sample's groups, in order: the classes, or the texts of the record's choices."""
        if self.words:
            return self.labels
        return tuple(cloze_rules.record_choices(self.task, record, self.inputs.seed, number)[0])

    def sample(self, record: TaskRecord, number: int, epoch: int) -> TaskSample:
        texts, right = self._answers(record, number)
        prepare = cloze_rules.PREPARED.get(self.task)
        prepared = prepare(record) if prepare and self.inputs.config.template is None else record
        if self.one_document_each:
            word = self._answer(prepared.fields["joint"].strip(" ,"))
            asked = [prepared.with_fields(choice=choice) for choice in texts]
            answers = [word] * len(texts)
        else:
            asked, answers = (
                [prepared],
                [self._answer(cloze_rules.as_read(self.task, text)) for text in texts],
            )
        self._check_answers(texts, answers, record)
        contexts = [self._context(each, answers) for each in asked]
        cut = max(cut for *_, cut in contexts)
        if self.scoring == "restricted":
            documents, groups = self._restricted(*contexts[0][:2], answers)
        else:
            documents, groups = self._each(contexts * (len(answers) // len(contexts)), answers)
        return TaskSample(documents, groups, right, cut)

    def _answers(self, record: TaskRecord, number: int) -> tuple[list[str], int | None]:
        if not self.words:
            return cloze_rules.record_choices(self.task, record, self.inputs.seed, number)
        if record.label is None:
            return self.words, None
        if str(record.label) not in self.labels:
            raise DataError(
                f"{record.location}: label {shown(record.label)} is unknown; the labels are {', '.join(self.labels)}."
            )
        return self.words, self.labels.index(str(record.label))

    def _answer(self, text: str) -> list[int]:
        """Token ids of an answer, with a space before it unless the blank begins the text."""
        if self.pattern.is_glued or self.slots[0].is_blank:
            return self.inputs.tokenizer.encode(text.strip())
        return self.inputs.continuation(text)

    def _check_answers(
        self, texts: Sequence[str], answers: Sequence[Sequence[int]], record: TaskRecord
    ) -> None:
        """Raise DataError for a record's choice without a token, or with several where task.scoring is restricted."""
        for text, answer in zip(texts, answers, strict=True):
            if not answer or (self.scoring == "restricted" and len(answer) != 1):
                raise DataError(
                    f"{record.location}: the choice {shown(text)} has {len(answer)} tokens, but task.scoring is "
                    f"{self.scoring}; {'set it to sum' if answer else 'correct the file'}."
                )

    def _overhead(self, answers: Sequence[Sequence[int]]) -> int:
        """Tokens of a document beside the pattern: CLS, the blank, the end, the longest answer and its beginning."""
        form = self.inputs.input_format.name
        longest = 0 if self.scoring == "restricted" else max(map(len, answers), default=1)
        return {"glm": 4, "causal": 1, "prefix": 2}.get(form, 3) + longest

    def _context(
        self, record: TaskRecord, answers: Sequence[Sequence[int]]
    ) -> tuple[list[TokenSegment], list[TokenSegment], int]:
        """Tokens before and after the blank, cut to fit the sequence, and the number of tokens cut."""
        inputs = self.inputs
        before, after = rendered(self.slots, record, inputs.config)
        first, second = inputs.encode(before), inputs.encode(after or [])
        max_tokens = inputs.config.sequence_length - self._overhead(answers)
        kept, cut = inputs.cut([*first, *second], max_tokens, record)
        return kept[: len(first)], kept[len(first) :], cut

    def _restricted(
        self, before: list[TokenSegment], after: list[TokenSegment], answers: Sequence[Sequence[int]]
    ) -> tuple[list[Example], list[TargetGroup]]:
        example, row = self._one_row(joined_ids(before), joined_ids(after))
        rows = np.array([row], np.int32)
        return [example], [TargetGroup(0, rows, np.array(answer, np.int32)) for answer in answers]

    def _one_row(self, before: list[int], after: list[int]) -> tuple[Example, int]:
        """A document and the row that predicts the token in its blank."""
        inputs, special, form = self.inputs, self.inputs.special, self.inputs.input_format.name
        mask, loss = inputs.mask()
        if form == "glm":
            context = inputs.part_a([*before, mask, *after])
            # One token of part B: what fills the blank is not read.
            example = fill_blanks(context, [(len(before) + 1, [0])], special, loss, ends=False)
            return without_loss(example), len(context)
        if form == "causal":
            example = left_to_right([*before, 0], 0, inputs.start, loss)
            return example, len(example.tokens) - 1
        if form == "prefix":
            context = [special.cls, *before]
            return without_loss(after_prefix(context, special.sop, [0], loss)), len(context)
        tokens = [special.cls, *before, mask, *after, special.sep]
        return document(tokens=tokens, objective=loss), len(before) + 1

    def _each(
        self,
        contexts: Sequence[tuple[list[TokenSegment], list[TokenSegment], int]],
        answers: Sequence[Sequence[int]],
    ) -> tuple[list[Example], list[TargetGroup]]:
        power = self.inputs.config.length_power if self.scoring == "mean" else 0.0
        documents: list[Example] = []
        groups: list[TargetGroup] = []
        for (before, after, _), answer in zip(contexts, answers, strict=True):
            example = self._with_answer(joined_ids(before), joined_ids(after), answer)
            group = target_group_with_loss(example, len(documents))
            documents.append(without_loss(example))
            groups.append(replace(group, divisor=float(len(group.positions)) ** power))
        return documents, groups

    def _with_answer(self, before: list[int], after: list[int], answer: Sequence[int]) -> Example:
        """A document whose rows with loss predict the answer and its end."""
        inputs, special, form = self.inputs, self.inputs.special, self.inputs.input_format.name
        mask, loss = inputs.mask()
        if form == "glm":
            context = inputs.part_a([*before, mask, *after])
            return fill_blanks(context, [(len(before) + 1, answer)], special, loss)
        answer = inputs.ended(answer)
        if form == "causal":
            return left_to_right([*before, *answer], len(answer), inputs.start, loss)
        return after_prefix([special.cls, *before], special.sop, answer, loss)
