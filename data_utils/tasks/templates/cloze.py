"""Classification and multiple choice as filling a blank: a pattern, and the words that say each class.

    glm        [CLS] before [MASK] after <eos>   sop filling        (GLM, arXiv:2103.10360, section 2.3)
    bert       [CLS] before [MASK] after [SEP]                      one token, at the position of the blank
    causal     before filling                                       the blank is the end of the pattern
    prefix     [CLS] before   sop filling                           the same

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
from data_utils.tasks.templates.inputs import Inputs, joined_ids
from data_utils.tasks.templates.patterns import (
    Pattern,
    TextSegment,
    chosen_pattern,
    parse_template,
    rendered,
    require_one_blank,
)

IN_PLACE = ("bert", "unilm", "unilmv2")  # formats whose blank is one token, predicted where it stands
FORMS = ("glm", "causal", "prefix", *IN_PLACE)

# A context with a blank: tokens before it and after it, cut to fit, and the number of tokens cut.
_Context = tuple[list[int], list[int], int]


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
        self.has_document_per_choice = any(slot.field == "choice" for slot in self.slots)
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
        verbalizers = self.pattern.verbalizers
        if not verbalizers:
            return []
        # Named classes go by their names, since files have them in several orders (CB).
        if set(verbalizers) == set(self.labels):
            return [verbalizers[label] for label in self.labels]
        if all(label.isdigit() for label in verbalizers) and len(verbalizers) == len(self.labels):
            # Numbers are classes in their order, whatever the file calls them.
            return list(verbalizers.values())
        raise ConfigError(
            f"the verbalizers are for {', '.join(verbalizers)}, but the labels of the task are "
            f"{', '.join(self.labels)}; each label needs one (task.labels, task.verbalizers)."
        )

    def _scoring(self) -> str:
        scoring = self.inputs.config.scoring
        if scoring != "auto":
            return scoring
        # Fillings of one token are predicted at one position: the softmax over the vocabulary cancels between
        # them, so that one document serves all.
        one_token = self.words and all(len(self._filling(words)) == 1 for words in self.words)
        return "restricted" if one_token or self.inputs.input_format.name in IN_PLACE else "sum"

    def check(self) -> None:
        inputs, input_format = self.inputs, self.inputs.input_format
        inputs.require_format(FORMS)
        if input_format.objective == "xlnet":
            raise ConfigError(
                "XLNet was not trained to fill a [MASK] inside a text; use task.kind classification, or another "
                "run."
            )
        if input_format.name in IN_PLACE and self.scoring != "restricted":
            raise ConfigError(
                f"task.scoring is {self.scoring}, but a run of {input_format.objective} predicts one token per blank; "
                "set it to restricted, or use a run of blank_infilling."
            )
        if self.has_document_per_choice and self.scoring == "restricted":
            raise ConfigError(
                "the pattern makes one document per choice, which task.scoring restricted does not support; set it "
                "to sum."
            )
        if input_format.name in ("causal", "prefix") and not self.slots[-1].is_blank:
            raise ConfigError(
                f"the pattern {shown(self.pattern.template)} has text after its blank, which a run of "
                f"{input_format.objective} cannot read before it fills the blank; choose another task.pattern, or end "
                "task.template with [MASK]."
            )
        self._check_words()
        fixed_texts = [TextSegment(slot.text) for slot in self.slots if slot.text]
        fixed_tokens = len(joined_ids(inputs.encode(fixed_texts)))
        needed = fixed_tokens + self._overhead([self._filling(words) for words in self.words])
        if needed > inputs.config.sequence_length:
            raise ConfigError(
                f"task.sequence_length is {inputs.config.sequence_length}, but the pattern and its verbalizers "
                f"alone need {needed} tokens; raise it."
            )

    def _check_words(self) -> None:
        """Raise ConfigError for verbalizers that the tokenizer cannot write or tell apart."""
        special_names = self.inputs.tokenizer.special_names
        fillings = {words: self._filling(words) for words in self.words}
        for words, ids in fillings.items():
            specials = [special_names[i] for i in ids if i in special_names]
            if not ids or specials:
                problem = f"gives {', '.join(specials)}" if specials else "has no token"
                raise ConfigError(
                    f"the verbalizer {shown(words)} {problem}; choose words of the tokenizer's vocabulary."
                )
            if self.scoring == "restricted" and len(ids) > 1:
                raise ConfigError(
                    f"the verbalizer {shown(words)} has {len(ids)} tokens, but task.scoring restricted compares "
                    "single tokens; choose a shorter word, or set it to sum."
                )
        if len(self.words) == 1:
            raise ConfigError(f"the task has one verbalizer, {shown(self.words[0])}; it needs 2 or more.")
        first_words: dict[tuple[int, ...], str] = {}
        for words in self.words:
            other = first_words.setdefault(tuple(fillings[words]), words)
            if other is not words or self.words.count(words) > 1:
                raise ConfigError(
                    f"the verbalizers {shown(other)} and {shown(words)} have the same tokens; choose different words."
                )

    # ---- samples ----

    def prepare(self, records: Sequence[TaskRecord], *, training: bool) -> list[TaskRecord]:
        return cloze_rules.training_records(self.task, records) if training else list(records)

    def choices(self, record: TaskRecord, number: int = 0) -> tuple[str, ...]:
        """The names of a sample's groups, in order: the classes, or the texts of the record's choices."""
        if self.words:
            return self.labels
        return tuple(cloze_rules.record_choices(self.task, record, self.inputs.seed, number)[0])

    def sample(self, record: TaskRecord, number: int, epoch: int) -> TaskSample:
        choices, right = self._choices(record, number)
        prepare = cloze_rules.PREPARED.get(self.task)
        prepared = prepare(record) if prepare and self.inputs.config.template is None else record
        if self.has_document_per_choice:
            filling = self._filling(prepared.fields["joint"].strip(" ,"))
            rendered_records = [prepared.with_fields(choice=choice) for choice in choices]
            fillings = [filling] * len(choices)
        else:
            rendered_records = [prepared]
            fillings = [self._filling(cloze_rules.as_read(self.task, choice)) for choice in choices]
        for choice, filling in zip(choices, fillings, strict=True):
            if not filling or (self.scoring == "restricted" and len(filling) != 1):
                raise DataError(
                    f"{record.location}: the choice {shown(choice)} has {len(filling)} tokens, but task.scoring is "
                    f"{self.scoring}; {'set it to sum' if filling else 'correct the file'}."
                )
        contexts = [self._context(each, fillings) for each in rendered_records]
        cut = max(cut for _, _, cut in contexts)
        if self.scoring == "restricted":
            documents, groups = self._one_document(contexts[0], fillings)
        else:
            if len(contexts) == 1:
                contexts *= len(fillings)
            documents, groups = self._document_per_choice(contexts, fillings)
        return TaskSample(documents, groups, right, cut)

    def _choices(self, record: TaskRecord, number: int) -> tuple[list[str], int | None]:
        """The texts of the choices, and the index of the right one; None: it is not known."""
        if not self.words:
            return cloze_rules.record_choices(self.task, record, self.inputs.seed, number)
        if record.label is None:
            return self.words, None
        if str(record.label) not in self.labels:
            raise DataError(
                f"{record.location}: label {shown(record.label)} is unknown; the labels are {', '.join(self.labels)}."
            )
        return self.words, self.labels.index(str(record.label))

    def _filling(self, text: str) -> list[int]:
        """Token ids of a choice in the blank, with a space before it unless the blank begins the text."""
        if self.pattern.is_glued or self.slots[0].is_blank:
            return self.inputs.tokenizer.encode(text.strip())
        return self.inputs.continuation(text)

    def _overhead(self, fillings: Sequence[Sequence[int]]) -> int:
        """Tokens of a document that are not the pattern's: CLS, blank, end, the longest filling and its start."""
        longest = 0 if self.scoring == "restricted" else max(map(len, fillings), default=1)
        return {"glm": 4, "causal": 1, "prefix": 2}.get(self.inputs.input_format.name, 3) + longest

    def _context(self, record: TaskRecord, fillings: Sequence[Sequence[int]]) -> _Context:
        inputs = self.inputs
        texts_before, texts_after = rendered(self.slots, record, inputs.config)
        before, after = inputs.encode(texts_before), inputs.encode(texts_after or [], at_start=False)
        max_tokens = inputs.config.sequence_length - self._overhead(fillings)
        segments, cut = inputs.cut([*before, *after], max_tokens, record)
        return joined_ids(segments[: len(before)]), joined_ids(segments[len(before) :]), cut

    def _one_document(
        self, context: _Context, fillings: Sequence[Sequence[int]]
    ) -> tuple[list[Example], list[TargetGroup]]:
        """A document for all choices, which are compared at the position that predicts the blank's one token."""
        inputs, special, format_name = self.inputs, self.inputs.special, self.inputs.input_format.name
        before, after, _ = context
        mask, loss = inputs.mask()
        if format_name == "glm":
            part_a = inputs.part_a([*before, mask, *after])
            # One token of part B: what fills the blank is not read.
            filled = fill_blanks(part_a, [(len(before) + 1, [0])], special, loss, ends=False)
            example, position = without_loss(filled), len(part_a)
        elif format_name == "causal":
            example = left_to_right([*before, 0], 0, inputs.start, loss)
            position = len(example.tokens) - 1
        elif format_name == "prefix":
            example = without_loss(after_prefix([special.cls, *before], special.sop, [0], loss))
            position = 1 + len(before)
        else:
            tokens = [special.cls, *before, mask, *after, special.sep]
            example, position = document(tokens=tokens, objective=loss), len(before) + 1
        positions = np.array([position], np.int32)
        return [example], [TargetGroup(0, positions, np.array(filling, np.int32)) for filling in fillings]

    def _document_per_choice(
        self, contexts: Sequence[_Context], fillings: Sequence[Sequence[int]]
    ) -> tuple[list[Example], list[TargetGroup]]:
        """A document for each choice, scored by the log probability of its tokens and its end."""
        power = self.inputs.config.length_power if self.scoring == "mean" else 0.0
        documents: list[Example] = []
        groups: list[TargetGroup] = []
        for (before, after, _), filling in zip(contexts, fillings, strict=True):
            example = self._with_filling(before, after, filling)
            group = target_group_with_loss(example, len(documents))
            documents.append(without_loss(example))
            groups.append(replace(group, divisor=float(len(group.positions)) ** power))
        return documents, groups

    def _with_filling(self, before: list[int], after: list[int], filling: Sequence[int]) -> Example:
        """A document whose positions with loss predict the filling and its end."""
        inputs, special, format_name = self.inputs, self.inputs.special, self.inputs.input_format.name
        mask, loss = inputs.mask()
        if format_name == "glm":
            part_a = inputs.part_a([*before, mask, *after])
            return fill_blanks(part_a, [(len(before) + 1, filling)], special, loss)
        filling = inputs.ended(filling)
        if format_name == "causal":
            return left_to_right([*before, *filling], len(filling), inputs.start, loss)
        return after_prefix([special.cls, *before], special.sop, filling, loss)
