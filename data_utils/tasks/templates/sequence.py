"""Text from text: sequence to sequence in the input format of every objective that can write.

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

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from data_utils.common.batch_fields import Example
from data_utils.common.errors import ConfigError, DataError
from data_utils.objectives.interface import first_known, role_token
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
from data_utils.tasks.templates.inputs import Inputs, joined_ids, overlapping_windows
from data_utils.tasks.templates.patterns import (
    MARK,
    Slot,
    TextSegment,
    parse_template,
    rendered,
    require_one_blank,
)
from data_utils.tokenizers.special_tokens import NO_TOKEN, SpecialTokens

FORMS = ("glm", "causal", "prefix", "encoder_decoder", "unilm", "unilmv2")
_LEAST_SHARE = MaskedDiffusionConfig().least_share  # of the tokens of a target
_SUMMARY = "[MASK] Content: {source}"
TEMPLATES = {
    **dict.fromkeys(("gigaword", "cnndm", "cnndmoriginal", "xsum"), _SUMMARY),
    "squadquestions": "{context} Question: [MASK] Answer: {answer:fixed}",
    "squadanswers": "{question:fixed} [MASK] . {context}",
}
OWN_TEMPLATE = "{source} [MASK]"  # for your own data: the text before the blank is cut at its beginning
NO_ANSWER = "N/A"
# Probabilities that a chosen token of UniLM's target becomes [MASK] or a random token; it stays with the rest.
_MASKED, _REPLACED = 0.8, 0.1


def context_affixes(input_format: InputFormat, special: SpecialTokens) -> tuple[list[int], list[int]]:
    """Special tokens before and after a text that another text follows; not for GLM's format, see `Inputs.part_a`."""
    writing = input_format.writing
    before, after = (
        [role_token(role, special) for role in roles] for roles in (writing.before, writing.after)
    )
    return [token for token in before if token != NO_TOKEN], after


def overhead(input_format: InputFormat) -> int:
    """Most tokens that stand before a target and are not of the source."""
    writing = input_format.writing
    return 3 if input_format.name == "glm" else len(writing.before) + len(writing.after)


def encoder_decoder_example(inputs: Inputs, context: Sequence[int], target: Sequence[int]) -> Example:
    """An encoder's context, and its decoder's target with an end token; BART may predict CLS before it."""
    special, input_format = inputs.special, inputs.input_format
    writing = input_format.writing
    start = getattr(special, first_known(writing.start, inputs.tokenizer.lacking))
    first = [special.cls] if input_format.predict_cls else []
    return after_prefix(
        context,
        start,
        [*first, *target, getattr(special, writing.ends[0])],
        input_format.loss(),
        first_position=0,
        segment=writing.segments[1],
        group=writing.group,
    )


class Seq2Seq:
    """The kind `seq2seq`. Fields: source and target, or those of the template; the target may be the label."""

    head, prediction_type = "tokens", "texts"
    labels = ()

    def __init__(self, inputs: Inputs, labels: Sequence[str] = ()) -> None:
        self.inputs = inputs
        config, input_format = inputs.config, inputs.input_format
        self.task = plain_name(config.name)
        task_template = TEMPLATES.get(self.task, OWN_TEMPLATE)
        self.template = task_template if config.template is None else config.template
        slots = parse_template(self.template)
        if input_format.name == "glm":
            require_one_blank(slots, self.template)
        else:  # other formats have no blank; a summary's source needs no words before it
            slots = tuple(slot for slot in slots if not slot.is_blank)
            if config.template is None:
                slots = tuple(slot for slot in slots if slot.field)
        self.slots: tuple[Slot, ...] = slots
        # In these formats the target goes on after the source; elsewhere it is a text by itself.
        is_one_text = input_format.name in ("glm", "causal", "prefix") or input_format.writes_by_unmasking
        self.continues_source = is_one_text
        self.cuts_start = self.template == OWN_TEMPLATE and self.continues_source
        special = set(inputs.tokenizer.special_names)
        num_tokens = inputs.tokenizer.num_tokens
        self.ordinary = np.array([i for i in range(num_tokens) if i not in special], np.int32)

    def check(self) -> None:
        forms = (*FORMS, "bert") if self.inputs.input_format.writes_by_unmasking else FORMS
        self.inputs.require_format(forms, {"bert": "predicts single tokens and cannot generate text"})
        if not any(slot.field for slot in self.slots):
            raise ConfigError(
                f"task.template {self.template!r} has no field; add the one with the source, such as {{source}} "
                f"{MARK}."
            )
        fixed_texts = [TextSegment(slot.text) for slot in self.slots if slot.text]
        needed = len(joined_ids(self.inputs.encode(fixed_texts))) + overhead(self.inputs.input_format) + 1
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
        config, input_format = self.inputs.config, self.inputs.input_format
        if input_format.name == "glm":
            return config.target_length + 1  # a block's positions count from 1, that of sop
        if input_format.name == "encoder_decoder":
            return config.target_length + input_format.predict_cls
        return config.sequence_length + config.target_length - input_format.writes_by_unmasking

    def prepare(self, records: Sequence[TaskRecord], *, training: bool) -> list[TaskRecord]:
        if not training:
            return list(records)
        if self.task == "squadanswers":
            records = [window for record in records for window in self._windows(record)]
        return [record for record in records if self._target(record) is not None]

    def prompt(self, record: TaskRecord, number: int = 0, epoch: int = 0) -> list[int]:
        return self._context(record)[0]

    def written(self, prompt: Sequence[int], completions: Sequence[Sequence[int]]) -> str:
        return self.inputs.tokenizer.decode(completions[0], skip_special=True).strip()

    def sample(self, record: TaskRecord, number: int, epoch: int) -> TaskSample:
        context, blank, cut = self._context(record)
        text = self._target(record)
        if text is None:
            return TaskSample([document(tokens=context, objective=self.inputs.input_format.loss())], cut=cut)
        # A target that goes on after the source keeps the space before its first word.
        ids = (
            self.inputs.continuation(text)
            if self.continues_source
            else self.inputs.tokenizer.encode(text.strip())
        )
        if not ids:
            raise DataError(f"{record.location}: the target has no token; correct or remove the sample.")
        target = ids[: self.inputs.config.target_length]
        example = self._example(context, blank, target, Draws(self.inputs.seed, "target", number, epoch))
        return TaskSample([example], cut=cut + len(ids) - len(target))

    def _target(self, record: TaskRecord) -> str | None:
        """The text to write; None where the record has no label."""
        fields = record.fields
        if self.task == "squadquestions":
            return fields.get("question")
        if self.task == "squadanswers":
            return None if record.label is None else (*record.label, NO_ANSWER)[0]
        return fields.get("target", record.label)

    def _context(self, record: TaskRecord) -> tuple[list[int], int, int]:
        """Tokens before the target, the position of the blank (GLM's format), and the number of tokens cut."""
        inputs, input_format, cut_before = self.inputs, self.inputs.input_format, 0
        if self.task == "squadquestions":
            record, cut_before = self._near_answer(record)
        texts_before, texts_after = rendered(self.slots, record, inputs.config)
        before, after = inputs.encode(texts_before), inputs.encode(texts_after or [], at_start=False)
        if not joined_ids([*before, *after]):
            raise DataError(f"{record.location}: the source has no token; correct or remove the sample.")
        max_tokens = inputs.config.sequence_length - overhead(input_format)
        segments, cut = inputs.cut([*before, *after], max_tokens, record, at_start=self.cuts_start)
        cut += cut_before
        tokens, blank = joined_ids(segments), len(joined_ids(segments[: len(before)]))
        if input_format.name == "glm":
            mask, _ = inputs.mask()
            # CLS stands before the text.
            return inputs.part_a([*tokens[:blank], mask, *tokens[blank:]]), blank + 1, cut
        first, last = context_affixes(input_format, inputs.special)
        return [*first, *tokens, *last], 0, cut

    def _windows(self, record: TaskRecord) -> list[TaskRecord]:
        """A record for each window of a long context, half a window apart; one without the answer has none."""
        context, answers = record.needed("context"), record.fields.get("answers", ())
        _, offsets = self.inputs.tokenizer.encode_with_offsets(context)
        question = self.inputs.tokenizer.encode(record.needed("question"))
        max_tokens = (
            self.inputs.config.sequence_length - overhead(self.inputs.input_format) - len(question) - 2
        )
        if len(offsets) <= max_tokens or max_tokens < 2:
            return [record]
        windows = []
        for start, end in overlapping_windows(len(offsets), max_tokens, max_tokens // 2):
            first, last = offsets[start][0], offsets[end - 1][1]
            inside = tuple(text for text, at in answers if first <= at and at + len(text) <= last)
            window = record.with_fields(context=context[first:last])
            windows.append(window if record.label is None else replace(window, label=inside))
        return windows

    def _near_answer(self, record: TaskRecord) -> tuple[TaskRecord, int]:
        """The record with the window of a long context that is around its first answer, and how many tokens it lost."""
        text, start = (*record.fields.get("answers", ()), ("", 0))[0]
        context = record.needed("context")
        ids, offsets = self.inputs.tokenizer.encode_with_offsets(context)
        other_ids = self.inputs.tokenizer.encode(f"Question: Answer: {text}")
        length = self.inputs.config.sequence_length
        max_tokens = max(1, length - overhead(self.inputs.input_format) - len(other_ids))
        if len(ids) > max_tokens:
            answer_token = next((i for i, (_, end) in enumerate(offsets) if end > start), 0)
            first = min(max(0, answer_token - max_tokens // 2), len(ids) - max_tokens)
            context = context[offsets[first][0] : offsets[first + max_tokens - 1][1]]
        return record.with_fields(context=context, answer=text), max(0, len(ids) - max_tokens)

    def _example(self, context: list[int], blank: int, target: list[int], draws: Draws) -> Example:
        """A document in which the target and its end have a loss. Args: context, blank: of `_context`."""
        inputs, special, input_format = self.inputs, self.inputs.special, self.inputs.input_format
        if input_format.name == "glm":
            return fill_blanks(context, [(blank, target)], special, inputs.mask()[1])
        if input_format.name == "causal":
            tokens, start = inputs.ended([*context, *target]), inputs.start
            return left_to_right(tokens[len(start) :], len(tokens) - len(context), start, input_format.loss())
        if input_format.name == "prefix":
            return after_prefix(context, special.sop, inputs.ended(target), input_format.loss())
        if input_format.writes_by_unmasking:
            # One length for all targets, so that a sample does not depend on its batch.
            padding = [special.eos] * (inputs.config.target_length - len(target))
            share = _LEAST_SHARE + (1.0 - _LEAST_SHARE) * draws.uniform(1)[0]
            return partly_masked_target(
                context, [*target, *padding], special.mask, share, draws, input_format.loss()
            )
        if input_format.name == "unilm":
            return self._masked_in_place(context, [*target, special.sep], draws)
        if input_format.name == "unilmv2":
            return self._pseudo_masked(context, [*target, special.sep], draws)
        return encoder_decoder_example(inputs, context, target)

    # ---- UniLM ----

    def _corrupted(self, tokens: np.ndarray, draws: Draws) -> np.ndarray:
        """Chosen tokens as UniLM's models read them: 80 % [MASK], 10 % another token, 10 % themselves."""
        treatment, choice = draws.uniform(len(tokens)), draws.uniform(len(tokens))
        random_tokens = self.ordinary[(choice * len(self.ordinary)).astype(np.int64)]
        unmasked = np.where(treatment < _MASKED + _REPLACED, random_tokens, tokens)
        return np.where(treatment < _MASKED, self.inputs.special.mask, unmasked)

    def _masked_in_place(self, context: list[int], target: list[int], draws: Draws) -> Example:
        """UniLM v1 (arXiv:1905.03197): round(ratio x target) of the target and its [SEP], at least one."""
        size = len(context)
        tokens = np.array([*context, *target], np.int32)
        count = max(1, round(self.inputs.config.masked_ratio * (len(target) - 1)))
        chosen = size + draws.chosen(len(target), count)
        targets, weights = np.zeros(len(tokens), np.int32), np.zeros(len(tokens))
        targets[chosen], weights[chosen] = tokens[chosen], 1.0
        tokens[chosen] = self._corrupted(tokens[chosen], draws)
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

        Some tokens are corrupted where the others see them (`target_mask_prob`), so that the model does not rely on
        every word before.
        """
        tokens = np.array(target, np.int32)
        is_corrupted = draws.uniform(len(target)) < self.inputs.config.target_mask_prob
        seen = np.where(is_corrupted, self._corrupted(tokens, draws), tokens)
        masks = self._corrupted(tokens, draws)
        return with_pseudo_masks(
            context, seen, masks, target, self.inputs.input_format.loss(1), segments=(0, 1)
        )
