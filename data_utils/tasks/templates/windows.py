"""Language modelling and LAMBADA: log probabilities of a text, window by window.

Window i begins at token i x stride of a document and has W = sequence_length - 1 of its tokens (CLS and the blank are
not counted, as in published figures). It predicts what the window before did not reach. So each token but the first is
predicted exactly once.

    glm, both ways        [CLS] what the window before reached [MASK]   sop the new tokens
    glm, left to right    [CLS] first token [MASK]                      sop the rest, of which the new have a loss
    prefix                [CLS] what the window before reached          sop the new tokens
    causal                <eos> all, of which the new have a loss

LAMBADA predicts the last word from all before it: `[CLS] context [MASK] <eos>` and `sop word`. Its context is cut at
the beginning.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from data_utils.common.batch_fields import Example
from data_utils.common.errors import ConfigError, DataError
from data_utils.tasks.base import TaskRecord, TaskSample, target_group_with_loss
from data_utils.tasks.templates.examples import after_prefix, fill_blanks, left_to_right, without_loss
from data_utils.tasks.templates.inputs import Inputs
from data_utils.tasks.templates.sequence import context_affixes

FORMS = ("glm", "causal", "prefix")
_NO_TEXT = dict.fromkeys(("bert", "unilm", "unilmv2", "encoder_decoder"), "gives no likelihood of a text")


@dataclasses.dataclass(frozen=True)
class Window:
    """Tokens [start, end) of a document; those from `new` on are predicted."""

    start: int
    new: int
    end: int


def windows(tokens: int, size: int, stride: int, first: int = 1) -> list[Window]:
    """The windows of a document.

    Args:
        size: tokens of a window.
        stride: tokens between the starts of two, below `size`.
        first: the first token that is predicted, 0 or 1.
    """
    assert 1 <= stride < size
    result = [Window(0, first, min(size, tokens))]
    while result[-1].end < tokens:
        previous = result[-1]
        start = previous.start + stride
        result.append(Window(start, previous.end, min(start + size, tokens)))
    return result


class LanguageModelling:
    """The kind `language_modelling`. `prepare` makes a record for each window; its `group` is the document's index."""

    head, prediction_type = "tokens", "likelihoods"
    labels = ()

    def __init__(self, inputs: Inputs, labels: Sequence[str] = ()) -> None:
        self.inputs = inputs
        self.size = inputs.config.sequence_length - 1

    def check(self) -> None:
        self.inputs.require_format(FORMS, _NO_TEXT)
        if self.inputs.config.stride >= self.size:
            raise ConfigError(
                f"task.stride ({self.inputs.config.stride}) must be below sequence_length - 1 ({self.size}), so that "
                "every predicted token has a context; lower it."
            )

    def prepare(self, records: Sequence[TaskRecord], *, training: bool) -> list[TaskRecord]:
        """A record for each window, with its tokens and how many of them are new."""
        window_records = []
        for record in records:
            ids = np.array(self.inputs.tokenizer.encode(record.needed("text")), np.int32)
            if len(ids) < 2:
                raise DataError(
                    f"{record.location}: the text has {len(ids)} tokens; it needs 2, as the first is not predicted."
                )
            for number, window in enumerate(windows(len(ids), self.size, self.inputs.config.stride)):
                fields = {"tokens": ids[window.start : window.end], "new": window.end - window.new}
                window_records.append(
                    TaskRecord((record.index, number), fields, None, record.index, record.location)
                )
        return window_records

    def sample(self, record: TaskRecord, number: int, epoch: int) -> TaskSample:
        tokens = record.fields["tokens"].tolist()
        return TaskSample([continued(self.inputs, tokens, record.fields["new"])])


def continued(inputs: Inputs, tokens: list[int], new: int) -> Example:
    """A text whose last `new` tokens have a loss, and no end."""
    special, input_format = inputs.special, inputs.input_format
    if input_format.name == "causal":
        return left_to_right(tokens, new, inputs.start, input_format.loss())
    known = len(tokens) - new
    if input_format.name == "prefix":
        context, targets = tokens[:known], tokens[known:]
        return after_prefix([special.cls, *context], special.sop, targets, input_format.loss())
    mask, loss = inputs.mask()
    if not inputs.config.bidirectional:
        known = min(known, 1)
    context = [special.cls, *tokens[:known], mask]
    return fill_blanks(context, [(known + 1, tokens[known:])], special, loss, ends=False, loss=new)


class Lambada:
    """The kind `lambada`: one group, the last word of the text, which is right if its every token is the likeliest."""

    head, prediction_type = "choices", "last words"
    labels = ()

    def __init__(self, inputs: Inputs, labels: Sequence[str] = ()) -> None:
        self.inputs = inputs

    def check(self) -> None:
        self.inputs.require_format(FORMS, _NO_TEXT)

    def prepare(self, records: Sequence[TaskRecord], *, training: bool) -> list[TaskRecord]:
        return list(records)

    def sample(self, record: TaskRecord, number: int, epoch: int) -> TaskSample:
        context, last_word, cut = self._tokens(record)
        example = self._example(context, last_word)
        groups = [target_group_with_loss(example)]
        return TaskSample([without_loss(example)], groups, right=0, cut=cut)

    def prompt(self, record: TaskRecord, number: int = 0, epoch: int = 0) -> list[int]:
        """Token ids that the model reads before it writes the word; in GLM's format the context is read both ways."""
        inputs, context = self.inputs, self._tokens(record)[0]
        if inputs.input_format.name == "glm":
            return inputs.part_a([*context, inputs.mask()[0]])
        first, last = context_affixes(inputs.input_format, inputs.special)
        return [*first, *context, *last]

    def written(self, prompt: Sequence[int], completions: Sequence[Sequence[int]]) -> str:
        return self.inputs.tokenizer.decode(completions[0], skip_special=True).strip()

    def predicted(self, record: TaskRecord, text: str, *, is_right: bool) -> str:
        """The first word of what the model writes. A right one ends where the last word does: no end is scored."""
        if is_right:
            last_word = self.inputs.tokenizer.decode(self._tokens(record)[1], skip_special=True).strip()
            if last_word and text.startswith(last_word):
                return last_word
        return next(iter(text.split()), "")

    def _tokens(self, record: TaskRecord) -> tuple[list[int], list[int], int]:
        """Tokens of the context, which is cut, and of the last word, and the number of tokens cut."""
        words = record.needed("text").rsplit(maxsplit=1)
        if len(words) < 2:
            raise DataError(f"{record.location}: the text has one word; it needs a context and a last word.")
        context = self.inputs.tokenizer.encode(words[0].strip())
        last_word = self.inputs.continuation(words[1])
        max_tokens = self.inputs.config.sequence_length - 4 - len(last_word)
        if max_tokens < 1:
            raise DataError(
                f"{record.location}: the last word has {len(last_word)} tokens, which leave no tokens for a context; "
                f"set task.sequence_length to {len(last_word) + 5} or more."
            )
        return context[-max_tokens:], last_word, max(0, len(context) - max_tokens)

    def _example(self, context: list[int], last_word: list[int]) -> Example:
        inputs = self.inputs
        if inputs.input_format.name != "glm" or not inputs.config.bidirectional:
            return continued(inputs, [*context, *last_word], len(last_word))
        mask, loss = inputs.mask()
        part_a = inputs.part_a([*context, mask])
        return fill_blanks(part_a, [(len(context) + 1, last_word)], inputs.special, loss, ends=False)
