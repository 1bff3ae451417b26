"""Filling of blanks: words hidden at random, or where the file hides them.

glm    [CLS] text with a [MASK] for each blank <eos>   sop filling eop   sop filling eop ...
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from data_utils.common.errors import ConfigError, DataError
from data_utils.tasks.base import TaskRecord, TaskSample
from data_utils.tasks.templates.examples import Draws, document, fill_blanks
from data_utils.tasks.templates.inputs import Inputs, TokenSegment
from data_utils.tokenizers.vocabulary import vocabulary_of

_BLANK_MARK = "<blank>"  # of a file with hidden words
_Stretch = tuple[list[int], bool]  # tokens, and whether they are hidden


class Blanks:
    """The kind `blanks`. Hidden words that are neighbours make one blank.

    Blanks are filled in the order of the text, each ends with eop, and later ones see earlier ones.
    """

    head, prediction_type = "tokens", "texts"
    labels = ()

    def __init__(self, inputs: Inputs, labels: Sequence[str] = ()) -> None:
        self.inputs = inputs
        self.vocabulary = vocabulary_of(inputs.tokenizer)

    def check(self) -> None:
        self.inputs.require_format(("glm",))
        if self.vocabulary.word_start is None:
            raise ConfigError(
                f"task.kind blanks masks words, but {self.vocabulary.words_unknown}; use another run."
            )

    def prepare(self, records: Sequence[TaskRecord], *, training: bool) -> list[TaskRecord]:
        return list(records)

    def prompt(self, record: TaskRecord, number: int = 0, epoch: int = 0) -> list[int]:
        return self._with_blanks(record, number, epoch)[0]

    def written(self, prompt: Sequence[int], completions: Sequence[Sequence[int]]) -> str:
        """The whole text, its blanks filled in their order."""
        mask, _ = self.inputs.mask()
        fillings = iter(completions)
        tokens: list[int] = []
        for token in prompt:
            tokens += next(fillings, ()) if token == mask else (token,)
        return self.inputs.tokenizer.decode(tokens, skip_special=True).strip()

    def sample(self, record: TaskRecord, number: int, epoch: int) -> TaskSample:
        context, blanks, cut = self._with_blanks(record, number, epoch)
        _, loss = self.inputs.mask()
        if any(not filling for _, filling in blanks):  # a file that does not say what it hides
            return TaskSample([document(tokens=context, objective=loss)], cut=cut)
        return TaskSample([fill_blanks(context, blanks, self.inputs.special, loss)], cut=cut)

    def _with_blanks(
        self, record: TaskRecord, number: int, epoch: int
    ) -> tuple[list[int], list[tuple[int, list[int]]], int]:
        """Part A, position and tokens of each blank, and how many tokens of the text were cut."""
        if "masked" in record.fields:
            stretches, cut = self._as_in_file(record)
        else:
            stretches, cut = self._draw(record, number, epoch)
        mask, _ = self.inputs.mask()
        tokens: list[int] = []
        blanks = []
        for ids, is_hidden in stretches:
            if is_hidden:
                blanks.append((len(tokens) + 1, ids))  # CLS stands before the text
            tokens += [mask] if is_hidden else ids
        return self.inputs.part_a(tokens), blanks, cut

    def _as_in_file(self, record: TaskRecord) -> tuple[list[_Stretch], int]:
        """The stretches of a text whose blanks the file marks, the shown ones cut to fit, and the number of tokens cut.

        A hidden stretch is empty where the file does not say what it hides.
        """
        inputs = self.inputs
        texts = record.needed("masked").split(_BLANK_MARK)
        fillings = record.fields.get("fillings") or [""] * (len(texts) - 1)
        shown: list[TokenSegment] = []
        hidden: list[list[int]] = []
        for number, text in enumerate(map(str.strip, texts)):
            # Only what begins the text has no space before it.
            encode = inputs.continuation if number else inputs.tokenizer.encode
            shown.append(TokenSegment(encode(text) if text else [], True))
            if number < len(fillings):
                encode = inputs.continuation if number or text else inputs.tokenizer.encode
                hidden.append(encode(fillings[number]) if fillings[number] else [])
        segments, cut = inputs.cut(shown, inputs.config.sequence_length - 2 - len(fillings), record)
        stretches: list[_Stretch] = []
        for segment, ids in itertools.zip_longest(segments, hidden):
            stretches.append((segment.ids, False))
            if ids is not None:
                stretches.append((ids, True))
        return stretches, cut

    def _draw(self, record: TaskRecord, number: int, epoch: int) -> tuple[list[_Stretch], int]:
        """The stretches of a text of which random words are hidden, and the number of tokens cut at its end."""
        config = self.inputs.config
        ids = self.inputs.tokenizer.encode(record.needed("text").strip())
        tokens = np.array(ids[: config.sequence_length - 2], np.int32)
        if not len(tokens):
            raise DataError(f"{record.location}: the text has no token; correct or remove the sample.")
        starts = self.vocabulary.word_starts(tokens)
        starts[0] = True
        word_numbers = np.cumsum(starts) - 1
        num_words = int(word_numbers[-1]) + 1
        count = max(1, int(config.blank_ratio * num_words + 1e-9))
        draws = Draws(self.inputs.seed, "blanks", number, epoch)
        is_hidden = np.isin(word_numbers, draws.chosen(num_words, count))
        edges = [0, *(np.flatnonzero(np.diff(is_hidden)) + 1).tolist(), len(tokens)]
        stretches = [
            (tokens[start:end].tolist(), bool(is_hidden[start])) for start, end in itertools.pairwise(edges)
        ]
        return stretches, len(ids) - len(tokens)
