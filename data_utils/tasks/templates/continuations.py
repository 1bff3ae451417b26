"""Log probability of a text after another, as evaluation harnesses ask for it, in the format of every objective.

    glm               [CLS] context [gMASK]    sop continuation
    causal            <eos> context continuation
    prefix            [CLS] context            sop continuation
    xlnet             context continuation     a query at the position of each token of the continuation
    unilm, unilmv2    [CLS] context [SEP] continuation [SEP]    a [MASK] at the position of each, as its decoder appends
    t5, bart, mass    as sequence to sequence: the encoder reads the context, the decoder writes the continuation
    bert              [CLS] context continuation [SEP]    a document for each token, in which it alone is masked

All but the last give the log probability of the continuation. The last gives a pseudo log likelihood, the sum of the
log probabilities of each token given all others (arXiv:1910.14659): it is no probability of the text.

GLM's blank is a [gMASK], without an end behind it, or the one that the run has learnt. With `allow_masks` a [MASK],
[sMASK] or [gMASK] that a context spells out is its blank, in the formats glm and bert.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from data_utils.common.batch_fields import Example
from data_utils.common.errors import ConfigError, DataError
from data_utils.common.setting_files import shown
from data_utils.tasks.base import TargetGroup, TaskSample, target_group_with_loss
from data_utils.tasks.templates.examples import (
    LOSS_OF_MASK,
    after_prefix,
    document,
    fill_blanks,
    left_to_right,
    with_pseudo_masks,
    without_loss,
)
from data_utils.tasks.templates.inputs import Inputs
from data_utils.tasks.templates.sequence import context_affixes, encoder_decoder_example, overhead
from data_utils.tasks.templates.windows import FORMS as FORMS_OF_TEXTS
from data_utils.tasks.templates.windows import continued, windows
from data_utils.tokenizers.special_tokens import NO_TOKEN
from data_utils.tokenizers.vocabulary import Vocabulary, vocabulary_of

FORMS = ("glm", "causal", "prefix", "bert", "unilm", "unilmv2", "encoder_decoder")
# Formats whose continuation is a text by itself; elsewhere it goes on after the context.
_SEPARATE = ("unilm", "unilmv2", "encoder_decoder")
_WITH_BLANKS = ("glm", "bert")
# What pseudo log likelihoods predict, by format, the usual one first.
_PSEUDO_SCORES = {"bert": ("words", "tokens"), "glm": ("blanks",)}


@dataclass(frozen=True)
class TokenizedPair:
    """A context and its continuation, in tokens.

    Args:
        blank: how many tokens of the context stand before the blank.
        mask: the blank's token and its loss in pretraining.
        cut: tokens that the context has lost at its beginning.
    """

    context: list[int]
    continuation: list[int]
    blank: int
    mask: tuple[int, int]
    cut: int = 0


class Continuations:
    """Makes the samples that score continuations and whole texts, and the prompts to write on.

    Args:
        inputs: `config.sequence_length` is the longest document; `config.stride` is that of windows.
        bidirectional: glm: contexts are read both ways.
        score_end: the end of a text after the continuation is part of it.
        allow_masks: a blank that a context spells out is one.
        first_token: `windows` predicts the first token of a text too.
        no_start: causal: contexts begin with their own first token, not with eos, as lm_eval's models read them.
    """

    def __init__(
        self,
        inputs: Inputs,
        *,
        bidirectional: bool = True,
        score_end: bool = False,
        allow_masks: bool = False,
        first_token: bool = True,
        no_start: bool = False,
    ) -> None:
        self.inputs, self.score_end, self.allow_masks = inputs, score_end, allow_masks
        self.bidirectional, self.no_start = bidirectional, no_start
        self.max_length = inputs.config.sequence_length
        self.is_xlnet = inputs.input_format.objective == "xlnet"
        self.format_name = "xlnet" if self.is_xlnet else inputs.input_format.name
        has_start = self.format_name != "causal" or bool(inputs.start)
        # Nothing stands before a first token that could predict it.
        self.first_token = first_token and has_start
        self._encode = functools.lru_cache(maxsize=64)(inputs.tokenizer.encode)  # choices share their context

    @property
    def is_pseudo(self) -> bool:
        """Whether the score is a pseudo log-likelihood, not a probability."""
        return self.format_name == "bert"

    def check(self) -> None:
        """Raise ConfigError for settings that no text can have."""
        self.inputs.require_format(FORMS)
        if self.allow_masks and self.format_name not in _WITH_BLANKS:
            raise ConfigError(
                f"allow_masks is set, but inputs of {self.inputs.input_format.objective} have no blanks; use a run of "
                "blank_infilling or masked_lm, or remove allow_masks."
            )
        config, objective = self.inputs.config, self.inputs.input_format.objective
        if config.mask != "auto" and self.format_name != "glm":
            raise ConfigError(
                f"the mask is {config.mask}, but inputs of {objective} do not choose one; use a run of "
                "blank_infilling, or leave it out."
            )
        if not self.bidirectional and self.format_name != "glm":
            raise ConfigError(
                f"a context is to be read from left to right, but inputs of {objective} do not choose that; use a run "
                "of blank_infilling, or leave it out."
            )
        if self.no_start and self.format_name != "causal":
            raise ConfigError(
                f"no_start is set, but inputs of {self.inputs.input_format.objective} need their start token; use a "
                "run of causal, or remove no_start."
            )
        if self.score_end and self.format_name in ("bert", "xlnet"):
            raise ConfigError(
                f"score_end is set, but {self.inputs.input_format.objective} predicts no end token; remove score_end."
            )
        if self.score_end and self.format_name == "causal" and self.inputs.special.eos == NO_TOKEN:
            raise ConfigError("score_end is set, but the vocabulary has no eos; remove score_end.")

    # ---- a context and its continuation ----

    def tokenize(self, context: str, continuation: str) -> TokenizedPair:
        """Raises: DataError for a continuation without a token, or one that is longer than the model."""
        tokens, blank, mask = self._context_with_blank(context)
        if blank is None:
            tokens, following = self._encode_together(context, continuation)
            blank = len(tokens)
        else:
            following = list(self._encode(continuation))
        if not following:
            raise DataError(f"the continuation {shown(continuation)} has no token; correct the task.")
        if not tokens and self.format_name == "causal" and not self._before(tokens):
            raise DataError(
                f"the continuation {shown(continuation)} has no context, and the vocabulary has neither a start nor "
                "an end token; give it a context."
            )
        max_tokens = self._max_context(tokens, len(following))
        if max_tokens < 0:
            raise DataError(
                f"the continuation {shown(continuation)} has {len(following)} tokens, but only "
                f"{len(following) + max_tokens} fit the model; shorten it, or use a model with more positions."
            )
        return self._cut(TokenizedPair(tokens, following, blank, mask), max_tokens)

    def _context_with_blank(self, context: str) -> tuple[list[int], int | None, tuple[int, int]]:
        """The tokens around the blank that a context spells out, its position, and its token and loss.

        The position is None, and the tokens are not made, where the context spells out none.
        """
        if not self.allow_masks:
            return [], None, self.inputs.mask()
        special = self.inputs.special
        mask_names = {getattr(special, name): name for name in ("gmask", "smask", "mask")}
        ids = self.inputs.tokenizer.encode_with_specials(context)
        positions = [position for position, token in enumerate(ids) if token in mask_names]
        if len(positions) > 1:
            raise DataError(
                f"the context {shown(context)} has {len(positions)} blanks; a continuation fills only one."
            )
        if not positions:
            return [], None, self.inputs.mask()
        token = ids.pop(positions[0])
        if self.format_name == "glm":
            return ids, positions[0], (token, LOSS_OF_MASK[mask_names[token]])
        return ids, positions[0], self.inputs.mask()  # BERT has learnt [MASK] alone

    def _encode_together(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """Token ids of a context and of its continuation.

        Both are tokenized together and cut where the context ends: in training a text is one. The two are tokenized
        apart where a token would reach over the boundary.
        """
        if self.format_name in _SEPARATE:
            return list(self._encode(context)), self.inputs.tokenizer.encode(continuation.strip())
        stripped = context.rstrip()  # a space belongs to the word after it
        following = context[len(stripped) :] + continuation
        # lm_eval keeps the cut even where a token reaches over the boundary, and may then score nothing.
        context_ids = list(self._encode(stripped))
        ids = self.inputs.tokenizer.encode(stripped + following)
        if len(ids) > len(context_ids) and ids[: len(context_ids)] == context_ids:
            return context_ids, ids[len(context_ids) :]
        return context_ids, self.inputs.tokenizer.encode(following)

    def _before(self, context: Sequence[int]) -> list[int]:
        """Causal: the token before a context.

        Where training puts none (Qwen), an empty context is the end of a text, as in lm_eval: else nothing would
        predict the first token.
        """
        if context:
            return [] if self.no_start else self.inputs.start
        return self.inputs.start or self.inputs.ended([])

    def _max_context(self, context: Sequence[int], following: int) -> int:
        """Most tokens of a context before a continuation of `following` tokens; negative if that does not fit."""
        input_format, end = self.inputs.input_format, int(self.score_end)
        if input_format.name == "encoder_decoder":
            left = self.max_length - 1 - input_format.predict_cls - following  # of the decoder's positions
            return left if left < 0 else self.max_length - overhead(input_format)
        if input_format.name == "causal":
            start = len(self._before(context))
            max_tokens = self.max_length + 1 - start - following - end
            # Without a start the context has a token, or nothing predicts the first.
            return max_tokens if max_tokens or start else -1
        num_specials = {"glm": 4, "prefix": 1 + end, "xlnet": 0, "bert": 2}.get(self.format_name, 3)
        return self.max_length - num_specials - following

    def _cut(self, pair: TokenizedPair, max_tokens: int) -> TokenizedPair:
        cut = max(0, len(pair.context) - max_tokens)
        # Contexts lose their beginning; text after the blank cannot go, since the blank depends on it.
        if cut > pair.blank:
            raise DataError(
                f"a context has {len(pair.context) - pair.blank} tokens after its blank, too many for a model of "
                f"{self.max_length} positions; shorten it, or use a model with more positions."
            )
        return TokenizedPair(pair.context[cut:], pair.continuation, pair.blank - cut, pair.mask, cut)

    def sample(self, pair: TokenizedPair) -> TaskSample:
        """The sample whose groups' log probabilities sum to that of the continuation."""
        # A masked language model has no probability of several tokens at once: a document for each token, in
        # which it is masked.
        if self.format_name == "bert":
            return self._mask_in_turn(pair)
        example = self._example(pair)
        group = target_group_with_loss(example)
        first = self.inputs.input_format.predict_cls  # BART's CLS is no part of the continuation
        scored = slice(first, first + len(pair.continuation) + self.score_end)
        group = TargetGroup(0, group.positions[scored], group.targets[scored])
        return TaskSample([without_loss(example)], [group], cut=pair.cut)

    def _example(self, pair: TokenizedPair) -> Example:
        """A document in which the continuation, and maybe its end, have a loss."""
        inputs, special, input_format = self.inputs, self.inputs.special, self.inputs.input_format
        context, following = pair.context, pair.continuation
        if self.format_name == "glm":
            before, after = context[: pair.blank], context[pair.blank :]
            mask, loss = pair.mask
            part_a = inputs.part_a([*before, mask, *after])
            return fill_blanks(part_a, [(len(before) + 1, following)], special, loss, ends=self.score_end)
        if self.format_name in ("causal", "prefix") and self.score_end:
            following = inputs.ended(following)
        if self.format_name == "causal":
            before = self._before(context)
            return left_to_right([*context, *following], len(following), before, input_format.loss())
        if self.format_name == "prefix":
            return after_prefix([special.cls, *context], special.sop, following, input_format.loss())
        if self.format_name == "xlnet":
            return self._queried(context, following)
        first, last = context_affixes(input_format, special)
        context = [*first, *context, *last]
        if input_format.name == "encoder_decoder":
            return encoder_decoder_example(inputs, context, following)
        target = [*following, special.sep]
        segments = (4, 5) if input_format.name == "unilm" else (0, 1)
        # UniLM is scored in one pass: a [MASK] beside each token sees what its decoder's appended [MASK] sees.
        masks = [special.mask] * len(target)
        return with_pseudo_masks(context, target, masks, target, input_format.loss(1), segments=segments)

    def _queried(self, context: Sequence[int], following: Sequence[int]) -> Example:
        """XLNet: a document in which a query predicts each token of `following`."""
        masks = [self.inputs.special.mask] * len(following)
        loss = self.inputs.input_format.loss()
        return with_pseudo_masks(context, following, masks, following, loss, sees_itself=False)

    def _mask_in_turn(self, pair: TokenizedPair, ends: Sequence[int] | None = None) -> TaskSample:
        """A document for each token of the continuation, in which it is masked.

        Args: ends: for each token, the end of the tokens that are masked with it; None = it alone is.
        """
        special, (mask, loss) = self.inputs.special, pair.mask
        before, after = pair.context[: pair.blank], pair.context[pair.blank :]
        tokens = [special.cls, *before, *pair.continuation, *after, special.sep]
        documents, groups = [], []
        for number, token in enumerate(pair.continuation):
            position = 1 + len(before) + number
            targets = [0] * len(tokens)
            targets[position] = token
            end = position + 1 if ends is None else position + ends[number] - number
            masked = [*tokens[:position], *[mask] * (end - position), *tokens[end:]]
            weights = [float(i == position) for i in range(len(tokens))]
            example = document(tokens=masked, targets=targets, weights=weights, objective=loss)
            groups.append(target_group_with_loss(example, number))
            documents.append(without_loss(example))
        return TaskSample(documents, groups, cut=pair.cut)

    # ---- whole texts: pseudo log likelihoods ----

    @property
    def knows_word_blanks(self) -> bool:
        """Whether a GLM has learned [MASK], the blank of words; a run of long spans alone has not."""
        return "mask" in self.inputs.input_format.masks

    def check_score(self, score: str) -> None:
        """Raise ConfigError unless the run gives this score of a text: left-to-right, or one of `pseudo_sample`."""
        scores = _PSEUDO_SCORES.get(self.format_name, ())
        if self.format_name == "glm" and not self.knows_word_blanks:
            scores = ()
        if not self.is_pseudo:
            scores = (*scores, "left-to-right")
        if score not in scores:
            raise ConfigError(
                f"the score is {score}, but a run of {self.inputs.input_format.objective} "
                f"gives {' or '.join(scores)}; choose that."
            )
        if score == "blanks" and self.inputs.config.mask not in ("auto", "mask"):
            raise ConfigError(
                f"the mask is {self.inputs.config.mask}, but the blanks of words are [MASK]; leave it out, or score "
                "left-to-right."
            )
        if score in ("words", "blanks") and self._vocabulary.word_start is None:
            raise ConfigError(f"{self._vocabulary.words_unknown}; score by tokens, or left-to-right.")

    def pseudo_tokens(self, text: str) -> list[int]:
        """The tokens of a text that `pseudo_sample` takes. Raises: DataError as that."""
        tokens = list(self._encode(text))
        max_tokens = self.max_length - (4 if self.format_name == "glm" else 2)
        if not 0 < len(tokens) <= max_tokens:
            raise DataError(
                f"the text {shown(text)} has {len(tokens)} tokens, but a text has 1 to {max_tokens} here; leave it "
                "out, or give a model with more positions."
            )
        return tokens

    def pseudo_sample(self, text: str, score: str) -> TaskSample:
        """The sample whose groups' log probabilities sum to a text's pseudo log likelihood.

        Args:
            score: what is predicted from all the rest.
                tokens: each token (arXiv:1910.14659).
                words: each token, without the tokens after it in its word, which would give it away (arXiv:2305.10588).
                blanks: GLM: each word is a blank, whose tokens and end are predicted from left to right.
        Raises: DataError for a text without a token, or longer than the model.
        """
        tokens = self.pseudo_tokens(text)
        pair = TokenizedPair([], tokens, 0, self.inputs.mask())
        if score == "tokens":
            return self._mask_in_turn(pair)
        if score == "words":
            # Byte-level BPE marks spaces alone. As in the paper's program a full stop is no part of the last word.
            words = self._words(tokens, self.inputs.tokenizer.cuts(text))
            return self._mask_in_turn(pair, [end for start, end in words for _ in range(start, end)])
        return self._blanks_in_turn(tokens, self._words(tokens))

    def _words(self, tokens: list[int], cuts: np.ndarray | None = None) -> list[tuple[int, int]]:
        """Start and end of each word. Args: cuts: where words begin besides."""
        starts = self._vocabulary.word_starts(np.array(tokens))
        starts[0] = True
        if cuts is not None:
            starts |= cuts
        return list(itertools.pairwise([*np.flatnonzero(starts).tolist(), len(tokens)]))

    @functools.cached_property
    def _vocabulary(self) -> Vocabulary:
        return vocabulary_of(self.inputs.tokenizer)

    def _blanks_in_turn(self, tokens: list[int], words: list[tuple[int, int]]) -> TaskSample:
        """GLM: a document for each word, in which it is a blank."""
        mask, loss = self.inputs.special.mask, LOSS_OF_MASK["mask"]
        documents, groups = [], []
        for number, (start, end) in enumerate(words):
            context = self.inputs.part_a([*tokens[:start], mask, *tokens[end:]])
            example = fill_blanks(context, [(start + 1, tokens[start:end])], self.inputs.special, loss)
            groups.append(target_group_with_loss(example, number))
            documents.append(without_loss(example))
        return TaskSample(documents, groups)

    # ---- whole texts: probabilities ----

    def check_texts(self) -> None:
        """Raise ConfigError if the run does not tell how likely a text is."""
        if self.format_name not in (*FORMS_OF_TEXTS, "xlnet"):
            raise ConfigError(
                f"the task measures perplexity, but a run of {self.inputs.input_format.objective} gives no likelihood "
                f"of a text; use a run of the form {', '.join(FORMS_OF_TEXTS)}, or of xlnet."
            )
        size, stride = self.max_length - 1, self.inputs.config.stride
        if stride >= size:
            raise ConfigError(
                f"the stride ({stride}) must be below the window size ({size}), so that every token has a context; "
                "lower it."
            )

    def windows(self, text: str) -> list[TaskSample]:
        """A text as windows (windows.py), a group in each, which predict every token once; see `first_token`."""
        ids = list(self.inputs.tokenizer.encode(text))
        first = int(not self.first_token)
        samples = []
        for window in windows(len(ids), self.max_length - 1, self.inputs.config.stride, first):
            tokens, new = ids[window.start : window.end], window.end - window.new
            if new < 1:
                continue
            known = len(tokens) - new
            example = (
                self._queried(tokens[:known], tokens[known:])
                if self.is_xlnet
                else continued(self.inputs, tokens, new, bidirectional=self.bidirectional)
            )
            samples.append(TaskSample([without_loss(example)], [target_group_with_loss(example)]))
        return samples

    # ---- texts to write on ----

    def prompt(self, context: str, max_new_tokens: int) -> tuple[list[int], int]:
        """The tokens before a completion of up to `max_new_tokens`, and how many were cut at the beginning.

        Raises: ConfigError where such a completion leaves no token for a context; DataError as `tokenize`.
        """
        input_format, special = self.inputs.input_format, self.inputs.special
        ids, blank, mask = self._context_with_blank(context)
        if blank is None:
            ids = list(self._encode(context))
            blank = len(ids)
        # A decoder writes into positions of its own sequence.
        reserved = 0 if input_format.name == "encoder_decoder" else max_new_tokens
        max_tokens = self.max_length - overhead(input_format) - 1 - reserved
        if max_tokens < 1:
            raise ConfigError(
                f"answers of up to {max_new_tokens} tokens (max_gen_toks) leave no tokens for a context in a model of "
                f"{self.max_length} positions; lower max_gen_toks."
            )
        pair = self._cut(TokenizedPair(ids, [], blank, mask), max_tokens)
        if input_format.name == "glm":
            before, after = pair.context[: pair.blank], pair.context[pair.blank :]
            return self.inputs.part_a([*before, mask[0], *after]), pair.cut
        first, last = context_affixes(input_format, special)
        if self.no_start and pair.context:
            first = []
        return [*first, *pair.context, *last], pair.cut
