"""Text from text: sequence to sequence in the layout of every objective that can write, and filling of blanks.

    glm        [CLS] source [MASK] <eos>    sop target                by a template (GLM, arXiv:2103.10360, 2.3)
    causal     <eos> source target
    prefix     [CLS] source                 sop target
    t5         source <eos>                 sop target                positions of the target from 0
    bart       [CLS] source <eos>           sop [CLS] target          CLS only where the run predicts it
    mass       [CLS] source [SEP]           [CLS] target
    unilm      [CLS] source [SEP] target [SEP]                        random tokens of the target predicted in place
    unilmv2    [CLS] source [SEP] target [SEP]   pseudo masks         every token of the target predicted once
    diffusion  source target <eos> <eos> ...      a random part of the target masked, its ends too

A target is predicted with its end: eop (glm), [SEP] (mass, unilm, unilmv2), else eos. That of masked diffusion, whose
form is "bert", is filled up to `task.target_length` with eos: so all have as many tokens as are written in use.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from data_utils.common.batch_fields import Example
from data_utils.common.errors import ConfigError, DataError
from data_utils.objectives.interface import first_known, token_of
from data_utils.objectives.masked_diffusion import MaskedDiffusionConfig
from data_utils.tasks.base import TaskRecord, TaskSample
from data_utils.tasks.readers.files import plain_name
from data_utils.tasks.templates.examples import (
    Draws,
    after_prefix,
    document,
    fill_blanks,
    left_to_right,
    partly_masked_target,
    with_pseudo_masks,
)
from data_utils.tasks.templates.input_formats import InputFormat
from data_utils.tasks.templates.inputs import Inputs, TokenSegment, joined_ids, overlapping_windows
from data_utils.tasks.templates.patterns import (
    MARK,
    Slot,
    TextSegment,
    parse_template,
    rendered,
    require_one_blank,
)
from data_utils.tokenizers.special_tokens import NO_TOKEN, SpecialTokens
from data_utils.tokenizers.vocabulary import vocabulary_of

FORMS = ("glm", "causal", "prefix", "encoder_decoder", "unilm", "unilmv2")
_LEAST_SHARE = MaskedDiffusionConfig().least_share  # of the tokens of an answer
_SUMMARY = "[MASK] Content: {source}"
TEMPLATES = {
    **dict.fromkeys(("gigaword", "cnndm", "cnndmoriginal", "xsum"), _SUMMARY),
    "squadquestions": "{context} Question: [MASK] Answer: {answer:fixed}",
    "squadanswers": "{question:fixed} [MASK] . {context}",
}
OWN = "{source} [MASK]"  # for your own data: the text before the blank is cut at its beginning
NO_ANSWER = "N/A"
# Probabilities that a chosen token of UniLM's target becomes [MASK] or a random token; it stays with the rest.
_MASKED, _REPLACED = 0.8, 0.1


def context_affixes(form: InputFormat, special: SpecialTokens) -> tuple[list[int], list[int]]:
    """Special tokens before and after a text that another text follows; GLM's form has its own."""
    writing = form.writing
    begin, end = ([token_of(role, special) for role in roles] for roles in (writing.before, writing.after))
    return [token for token in begin if token != NO_TOKEN], end


def overhead(form: InputFormat) -> int:
    """Most tokens of what stands before a target, beside those of the source."""
    return 3 if form.name == "glm" else len(form.writing.before) + len(form.writing.after)


def encoder_decoder_example(inputs: Inputs, context: Sequence[int], target: Sequence[int]) -> Example:
    """Example of an encoder's context and its decoder's target with an end token; BART may predict CLS before it."""
    special, writing = inputs.special, inputs.input_format.writing
    start = getattr(special, first_known(writing.start, inputs.tokenizer.lacking))
    begin, end = [special.cls] if inputs.input_format.predict_cls else [], getattr(special, writing.ends[0])
    following, loss = [*begin, *target, end], inputs.input_format.loss()
    return after_prefix(
        context, start, following, loss, first_position=0, segment=writing.segments[1], group=writing.group
    )


class Seq2Seq:
    """The kind `seq2seq`. Fields: source and target, or those of the template; the target may be the label."""

    head, prediction_type = "tokens", "texts"
    labels = ()

    def __init__(self, inputs: Inputs, labels: Sequence[str] = ()) -> None:
        self.inputs = inputs
        config, form = inputs.config, inputs.input_format
        self.task = plain_name(config.name)
        known = TEMPLATES.get(self.task, OWN)
        self.template = known if config.template is None else config.template
        slots = parse_template(self.template)
        if form.name == "glm":
            require_one_blank(slots, self.template)
        else:  # other layouts have no blank; a summary's source needs no words before it
            slots = tuple(slot for slot in slots if not slot.is_blank)
            if config.template is None:
                slots = tuple(slot for slot in slots if slot.field)
        self.slots: tuple[Slot, ...] = slots
        # The target goes on after the source; elsewhere it is a text of its own.
        self.goes_on = form.name in ("glm", "causal", "prefix") or form.writes_by_unmasking
        self.cuts_start = self.template == OWN and self.goes_on
        special = set(inputs.tokenizer.special_names)
        count = inputs.tokenizer.num_tokens
        self.ordinary = np.array([i for i in range(count) if i not in special], np.int32)

    def check(self) -> None:
        forms = (*FORMS, "bert") if self.inputs.input_format.writes_by_unmasking else FORMS
        self.inputs.require_format(forms, {"bert": "predicts single tokens and cannot generate text"})
        if not any(slot.field for slot in self.slots):
            raise ConfigError(
                f"task.template {self.template!r} has no field; add the one with the source, such as {{source}} "
                f"{MARK}."
            )
        fixed = [TextSegment(slot.text) for slot in self.slots if slot.text]
        needed = len(joined_ids(self.inputs.encode(fixed))) + self._overhead() + 1
        if needed > self.inputs.config.sequence_length:
            raise ConfigError(
                f"task.sequence_length is {self.inputs.config.sequence_length}, but the template {self.template!r} "
                f"and a source of one token need {needed}; raise it."
            )
        if self.inputs.input_format.name == "causal" and self.inputs.special.eos == NO_TOKEN:
            raise ConfigError(
                "the vocabulary has no end token, so a target would never end; set tokenizer.added_tokens to glm, "
                "or use another run."
            )

    @property
    def last_position(self) -> int:
        """Largest position of a target and its end."""
        config, form = self.inputs.config, self.inputs.input_format
        if form.name == "glm":
            return config.target_length + 1  # a block's positions count from 1, that of sop
        if form.name == "encoder_decoder":
            return config.target_length + form.predict_cls
        return config.sequence_length + config.target_length - form.writes_by_unmasking

    def prepare(self, records: Sequence[TaskRecord], *, training: bool) -> list[TaskRecord]:
        if not training:
            return list(records)
        if self.task == "squadanswers":
            records = [window for record in records for window in self._windows(record)]
        return [record for record in records if self._target(record) is not None]

    def prompt(self, record: TaskRecord, number: int = 0, epoch: int = 0) -> list[int]:
        return self._context(record)[0]

    def written(self, prompt: Sequence[int], answers: Sequence[Sequence[int]]) -> str:
        return self.inputs.tokenizer.decode(answers[0], skip_special=True).strip()

    def sample(self, record: TaskRecord, number: int, epoch: int) -> TaskSample:
        context, blank, cut = self._context(record)
        text = self._target(record)
        if text is None:
            return TaskSample([document(tokens=context, objective=self.inputs.input_format.loss())], cut=cut)
        whole = self._encoded_target(text)
        if not whole:
            raise DataError(f"{record.location}: the target has no token; correct or remove the sample.")
        target = whole[: self.inputs.config.target_length]
        draws = Draws(self.inputs.seed, "target", number, epoch)
        example = self._example(context, blank, target, draws)
        return TaskSample([example], cut=cut + len(whole) - len(target))

    def _target(self, record: TaskRecord) -> str | None:
        fields = record.fields
        if self.task == "squadquestions":
            return fields.get("question")
        if self.task == "squadanswers":
            return None if record.label is None else (*record.label, NO_ANSWER)[0]
        return fields.get("target", record.label)

    def _encoded_target(self, text: str) -> list[int]:
        # A target that goes on after the source keeps the space before its first word.
        return self.inputs.continuation(text) if self.goes_on else self.inputs.tokenizer.encode(text.strip())

    def _context(self, record: TaskRecord) -> tuple[list[int], int, int]:
        """Tokens before the target, the position of the blank (GLM's form), and the number of tokens cut."""
        inputs, special, form = self.inputs, self.inputs.special, self.inputs.input_format
        if self.task == "squadquestions":
            record = self._near_answer(record)
        before, after = rendered(self.slots, record, inputs.config)
        first, second = inputs.encode(before), inputs.encode(after or [])
        if not joined_ids([*first, *second]):
            raise DataError(f"{record.location}: the source has no token; correct or remove the sample.")
        max_tokens = inputs.config.sequence_length - self._overhead()
        kept, cut = inputs.cut([*first, *second], max_tokens, record, at_start=self.cuts_start)
        tokens = joined_ids(kept)
        blank = len(joined_ids(kept[: len(first)]))
        if form.name == "glm":
            mask, _ = inputs.mask()
            return inputs.part_a([*tokens[:blank], mask, *tokens[blank:]]), blank + 1, cut
        begin, end = context_affixes(form, special)
        return [*begin, *tokens, *end], 0, cut

    def _overhead(self) -> int:
        """Tokens of what stands before the target, beside those of the source."""
        return overhead(self.inputs.input_format)

    def _windows(self, record: TaskRecord) -> list[TaskRecord]:
        """A record for each window of a long context, half a window apart; one without the answer has none."""
        context, answers = record.needed("context"), record.fields.get("answers", ())
        _, offsets = self.inputs.tokenizer.encode_with_offsets(context)
        question = self.inputs.tokenizer.encode(record.needed("question"))
        max_tokens = self.inputs.config.sequence_length - self._overhead() - len(question) - 2
        if len(offsets) <= max_tokens or max_tokens < 2:
            return [record]
        found = []
        for start, end in overlapping_windows(len(offsets), max_tokens, max_tokens // 2):
            first, last = offsets[start][0], offsets[end - 1][1]
            inside = tuple(text for text, at in answers if first <= at and at + len(text) <= last)
            part = record.with_fields(context=context[first:last])
            found.append(part if record.label is None else replace(part, label=inside))
        return found

    def _near_answer(self, record: TaskRecord) -> TaskRecord:
        """The record with the part of a long context that is around its first answer."""
        text, start = (*record.fields.get("answers", ()), ("", 0))[0]
        context = record.needed("context")
        ids, offsets = self.inputs.tokenizer.encode_with_offsets(context)
        others = self.inputs.tokenizer.encode(f"Question: Answer: {text}")
        max_tokens = max(1, self.inputs.config.sequence_length - self._overhead() - len(others))
        if len(ids) > max_tokens:
            at = next((i for i, (_, end) in enumerate(offsets) if end > start), 0)
            first = min(max(0, at - max_tokens // 2), len(ids) - max_tokens)
            context = context[offsets[first][0] : offsets[first + max_tokens - 1][1]]
        return record.with_fields(context=context, answer=text)

    def _example(self, context: list[int], blank: int, target: list[int], draws: Draws) -> Example:
        inputs, special, form = self.inputs, self.inputs.special, self.inputs.input_format
        if form.name == "glm":
            return fill_blanks(context, [(blank, target)], special, inputs.mask()[1])
        if form.name == "causal":
            whole = inputs.ended([*context, *target])
            start = inputs.start
            return left_to_right(whole[len(start) :], len(whole) - len(context), start, form.loss())
        if form.name == "prefix":
            return after_prefix(context, special.sop, inputs.ended(target), form.loss())
        if form.writes_by_unmasking:
            length = inputs.config.target_length
            # One length for all answers, so that a sample does not depend on its batch.
            answer = [*target, *[special.eos] * (length - len(target))]
            share = _LEAST_SHARE + (1.0 - _LEAST_SHARE) * draws.uniform(1)[0]
            return partly_masked_target(context, answer, special.mask, share, draws, form.loss())
        if form.name == "unilm":
            return self._masked_in_place(context, [*target, special.sep], draws)
        if form.name == "unilmv2":
            return self._pseudo_masked(context, [*target, special.sep], draws)
        return encoder_decoder_example(inputs, context, target)

    # ---- UniLM ----

    def _treated(self, tokens: np.ndarray, draws: Draws) -> np.ndarray:
        """Chosen tokens as UniLM's models read them: 80 % [MASK], 10 % another token, 10 % themselves."""
        what, which = draws.uniform(len(tokens)), draws.uniform(len(tokens))
        others = self.ordinary[(which * len(self.ordinary)).astype(np.int64)]
        kept = np.where(what < _MASKED + _REPLACED, others, tokens)
        return np.where(what < _MASKED, self.inputs.special.mask, kept)

    def _masked_in_place(self, context: list[int], target: list[int], draws: Draws) -> Example:
        """UniLM v1 (arXiv:1905.03197): round(ratio x target) of the target and its [SEP], at least one."""
        size = len(context)
        tokens = np.array([*context, *target], np.int32)
        count = max(1, round(self.inputs.config.masked_ratio * (len(target) - 1)))
        chosen = size + draws.chosen(len(target), count)
        targets, weights = np.zeros(len(tokens), np.int32), np.zeros(len(tokens))
        targets[chosen], weights[chosen] = tokens[chosen], 1.0
        tokens[chosen] = self._treated(tokens[chosen], draws)
        return document(
            tokens=tokens,
            targets=targets,
            weights=weights,
            ord=[*[0] * size, *range(1, len(target) + 1)],
            segment_ids=[*[4] * size, *[5] * len(target)],
            objective=self.inputs.input_format.loss(1),
        )

    def _pseudo_masked(self, context: list[int], target: list[int], draws: Draws) -> Example:
        """UniLMv2 (arXiv:2002.12804): a pseudo mask predicts each token of the target and its [SEP].

        Some tokens are replaced where the others see them (`target_mask_prob`), so that the model does not rely on
        every word before.
        """
        words = np.array(target, np.int32)
        dropped = draws.uniform(len(target)) < self.inputs.config.target_mask_prob
        seen = np.where(dropped, self._treated(words, draws), words)
        masks = self._treated(words, draws)
        return with_pseudo_masks(
            context, seen, masks, target, self.inputs.input_format.loss(1), segments=(0, 1)
        )


class Blanks:
    """The kind `blanks`: words hidden at random, or where the file hides them; neighbours make one blank.

    The spans are filled in the order of the text, each ends with eop, and later ones see earlier ones.
    """

    head, prediction_type = "tokens", "texts"
    labels = ()
    mark = "<blank>"  # of a file with hidden words

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
        return self._hidden(record, number, epoch)[0]

    def written(self, prompt: Sequence[int], answers: Sequence[Sequence[int]]) -> str:
        """The whole text, its blanks filled in their order."""
        mask, _ = self.inputs.mask()
        fillings = iter(answers)
        whole = [token for item in prompt for token in (next(fillings, ()) if item == mask else (item,))]
        return self.inputs.tokenizer.decode(whole, skip_special=True).strip()

    def sample(self, record: TaskRecord, number: int, epoch: int) -> TaskSample:
        context, blanks, cut = self._hidden(record, number, epoch)
        _, loss = self.inputs.mask()
        if any(not filling for _, filling in blanks):  # a file that does not say what it hides
            return TaskSample([document(tokens=context, objective=loss)], cut=cut)
        return TaskSample([fill_blanks(context, blanks, self.inputs.special, loss)], cut=cut)

    def _hidden(
        self, record: TaskRecord, number: int, epoch: int
    ) -> tuple[list[int], list[tuple[int, list[int]]], int]:
        """Part A, position and tokens of each blank, and how many tokens of the text were cut."""
        made = self._as_in_file(record) if "masked" in record.fields else self._drawn(record, number, epoch)
        stretches, cut = made
        mask, _ = self.inputs.mask()
        tokens: list[int] = []
        blanks = []
        for ids, hidden in stretches:
            if hidden:
                blanks.append((len(tokens) + 1, ids))
            tokens += [mask] if hidden else ids
        return self.inputs.part_a(tokens), blanks, cut

    def _as_in_file(self, record: TaskRecord) -> tuple[list[tuple[list[int], bool]], int]:
        texts = record.needed("masked").split(self.mark)
        given = record.fields.get("fillings") or [""] * (len(texts) - 1)
        stretches: list[tuple[list[int], bool]] = []
        for number, text in enumerate(texts):
            words = text.strip()
            ids = self._encoded(words, number == 0) if words else []
            stretches.append((ids, False))
            if number < len(given):
                filling = given[number]
                stretches.append((self._encoded(filling, not number and not words) if filling else [], True))
        segments = [TokenSegment(ids, not hidden) for ids, hidden in stretches if not hidden]
        max_tokens = self.inputs.config.sequence_length - 2 - len(given)
        kept, cut = self.inputs.cut(segments, max_tokens, record)
        shown = iter(kept)
        return [(ids, True) if hidden else (next(shown).ids, False) for ids, hidden in stretches], cut

    def _encoded(self, text: str, begins: bool) -> list[int]:
        return self.inputs.tokenizer.encode(text) if begins else self.inputs.continuation(text)

    def _drawn(self, record: TaskRecord, number: int, epoch: int) -> tuple[list[tuple[list[int], bool]], int]:
        config = self.inputs.config
        whole = self.inputs.tokenizer.encode(record.needed("text").strip())
        ids = np.array(whole[: config.sequence_length - 2], np.int32)
        if not len(ids):
            raise DataError(f"{record.location}: the text has no token; correct or remove the sample.")
        starts = self.vocabulary.word_starts(ids)
        starts[0] = True
        word = np.cumsum(starts) - 1
        words = int(word[-1]) + 1
        count = max(1, int(config.blank_ratio * words + 1e-9))
        draws = Draws(self.inputs.seed, "blanks", number, epoch)
        hidden = np.isin(word, draws.chosen(words, count))
        edges = [0, *(np.flatnonzero(np.diff(hidden)) + 1).tolist(), len(ids)]
        stretches = [
            (ids[start:end].tolist(), bool(hidden[start])) for start, end in itertools.pairwise(edges)
        ]
        return stretches, len(whole) - len(ids)
