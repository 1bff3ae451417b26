"""Generation with the input template of the objective that a run was trained on: `make_decoder` chooses the decoder.

    blank_infilling   fills the text's one blank
    causal            continues the text: every token sees the tokens before it
    prefix_lm         continues the text, which is read in both directions; sop starts the completion
    unilm, unilmv2    the text, [SEP], and a [MASK] at the next position, which predicts its token. The token replaces
                      the mask, and a new mask follows (arXiv:1905.03197, section 2.4). The mask is never kept.
    masked_diffusion  replaces masks after the text, in any order (unmasking.py)
    t5, bart, mass    the decoder generates from the encoder's output, which is computed once

A completion ends with eos, with [SEP] for UniLM, and with either for MASS.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict
from typing import Protocol

import torch

from data_utils.common.errors import ConfigError, DataError
from data_utils.common.seeds import derive_seed
from data_utils.objectives import OBJECTIVES, ObjectiveChoice
from data_utils.objectives.interface import TextFormat, first_known, role_token
from data_utils.tokenizers.special_tokens import NO_TOKEN, SpecialTokens
from data_utils.tokenizers.tokenizer import Tokenizer
from megatron_lite.config.generation import GenerationConfig
from megatron_lite.inference.attention_probe import AttentionProbe, Replay
from megatron_lite.inference.filling import BlankFiller
from megatron_lite.inference.memory import check_memory, max_texts
from megatron_lite.inference.open_run import OpenRun, Run, objective_names
from megatron_lite.inference.search import Hypothesis, Search
from megatron_lite.inference.states import (
    EncoderDecoder,
    LeftToRight,
    MaskAppending,
    PromptTemplate,
    TextState,
)
from megatron_lite.inference.unmasking import Unmasking
from megatron_lite.transformer.transformer import Transformer

_UNMASKING = ("unmask_steps", "unmask_block", "guidance")  # options of runs that write by unmasking


class Decoder(Protocol):
    """Generates completions of texts with the template that a run was trained with."""

    def context(self, tokens: Sequence[int]) -> list[int]:
        """A text's tokens with the template's special tokens: what the model reads before the completion."""
        ...

    def check_length(self, context: Sequence[int]) -> None:
        """Raise DataError if the model has too few positions for the text and a completion."""
        ...

    def generate(self, contexts: Sequence[Sequence[int]]) -> list[list[int]]:
        """The best completion of each context, without its end token. It does not depend on the other contexts."""
        ...


def make_decoder(run: Run, config: GenerationConfig) -> Decoder:
    """The decoder of a run. Raises: ConfigError if none of the run's objectives trains generation."""
    return make_decoder_for(run.model, run.tokenizer, run.objectives, config, str(run.checkpoint.path))


def make_decoder_for(
    model: Transformer,
    tokenizer: Tokenizer,
    objectives: Sequence[ObjectiveChoice],
    config: GenerationConfig,
    run: str,
    stops: Callable[[list[int]], bool] | None = None,
) -> Decoder:
    """The decoder of a model. Args: objectives: of its training. run: its name, in messages. stops: see Search."""
    lacking, special = tokenizer.lacking, tokenizer.special
    ignored = ignored_tokens(tokenizer, config)
    # The first objective that trains generation decides, in the order of the configuration.
    for choice in objectives:
        if _fills_blanks(choice) and not model.config.decoder_layers:
            return BlankDecoder(BlankFiller(model, special, config, ignored, stops))
        template = _template(choice, special, lacking, config)
        if template is not None:
            return TextDecoder(model, special, config, template, ignored, stops)
    raise _cannot_generate(objectives, run)


def check_can_generate(run: OpenRun) -> None:
    """Raise ConfigError if none of the run's objectives trains filling blanks or generation."""
    if not any(writing is not None and writing.generation for writing in map(_writing, run.objectives)):
        raise _cannot_generate(run.objectives, str(run.checkpoint.path))


def _cannot_generate(objectives: Sequence[ObjectiveChoice], run: str) -> ConfigError:
    writers = [
        name
        for name, made in OBJECTIVES.items()
        if made.text_format is not None and made.text_format.generation
    ]
    return ConfigError(
        f"{run} was trained on {', '.join(objective_names(objectives))}, which does not train generation; give a "
        f"run of one of {', '.join(writers)}."
    )


def template_of(objectives: Sequence[ObjectiveChoice], tokenizer: Tokenizer) -> PromptTemplate | None:
    """The template of the first objective that trains completing whole texts; None: there is none."""
    templates = (_template(choice, tokenizer.special, tokenizer.lacking) for choice in objectives)
    return next((template for template in templates if template is not None), None)


def writes_whole_texts(run: OpenRun, *, has_blanks: bool) -> bool:
    """Whether the run completes whole texts; otherwise it fills blanks, or neither.

    Args: has_blanks: the texts contain [MASK] tokens, which of the models that complete texts only encoders read.
    """
    if any(map(_fills_blanks, run.objectives)) and not run.config.model.decoder_layers:
        return False
    ways = {writing.generation for writing in map(_writing, run.objectives) if writing is not None}
    return bool(ways & ({"encoder_decoder"} if has_blanks else WAYS.keys()))


def check_generation_options(run: OpenRun, config: GenerationConfig) -> None:
    """Raise ConfigError for options that blank infilling does not read."""
    for choice in run.objectives:
        writing = _writing(choice)
        if writing is not None and writing.generation == "blanks":
            _refuse_unused(choice, writing, config)


def unused_options(run: OpenRun) -> set[str]:
    """The options of generation that none of the run's objectives reads."""
    writings = [writing for writing in map(_writing, run.objectives) if writing is not None]
    unused = set() if any(writing.modes for writing in writings) else {"mode"}
    return (
        unused if any(writing.generation == "unmasking" for writing in writings) else {*unused, *_UNMASKING}
    )


def _refuse_unused(choice: ObjectiveChoice, writing: TextFormat, config: GenerationConfig) -> None:
    """Raise ConfigError for options that this way of generating does not read."""
    mode = config.mode
    if writing.generation != "unmasking" and any(getattr(config, name) for name in _UNMASKING):
        raise ConfigError(
            f"{', '.join(_UNMASKING[:-1])} or {_UNMASKING[-1]} is set, but the run was trained on {choice.name}, which "
            "does not generate by unmasking; remove it."
        )
    if mode and mode not in writing.modes:
        raise ConfigError(
            f"mode is {mode}, but the run was trained on {choice.name}, which has "
            f"{f'the modes {chr(44).join(writing.modes)}' if writing.modes else 'no modes; leave it out'}."
        )


def _fills_blanks(choice: ObjectiveChoice) -> bool:
    writing = _writing(choice)
    return writing is not None and writing.generation == "blanks"


def ignored_tokens(tokenizer: Tokenizer, config: GenerationConfig) -> set[int]:
    """Ids of `no_repeat_except`. Raises: ConfigError for a word that is not one token."""
    ignored: set[int] = set()
    for word in config.no_repeat_except.split():
        # Byte-level vocabularies have a word with and without the space before it as two tokens.
        encoded = [tokenizer.encode_with_specials(text) for text in (word, f" {word}")]
        ids = {tokens[0] for tokens in encoded if len(tokens) == 1}
        if not ids:
            raise ConfigError(
                f"no_repeat_except has {word!r}, which is {len(encoded[0])} tokens; give words that are one token."
            )
        ignored |= ids
    return ignored


class BlankDecoder:
    """GLM: fills a text's one blank."""

    def __init__(self, filler: BlankFiller):
        self.filler = filler

    def context(self, tokens: Sequence[int]) -> list[int]:
        return self.filler.context(tokens)

    def check_length(self, context: Sequence[int]) -> None:
        special = self.filler.special
        blanks = sum(token in (special.mask, special.smask, special.gmask) for token in context)
        if blanks != 1:
            raise DataError(f"the text has {blanks} blanks; give a text with one.")
        self.filler.check_length(context)

    def generate(self, contexts: Sequence[Sequence[int]]) -> list[list[int]]:
        for context in contexts:
            self.check_length(context)
        return [spans[0] for spans in self.filler.fill_all(contexts)]


class TextDecoder:
    """
    Args:
        model: in eval mode, on its device.
        special: the tokenizer's special ids.
        ignored: tokens of `no_repeat_except`.
        stops: see Search.
    """

    def __init__(
        self,
        model: Transformer,
        special: SpecialTokens,
        config: GenerationConfig,
        template: PromptTemplate,
        ignored: Collection[int] = (),
        stops: Callable[[list[int]], bool] | None = None,
    ):
        self.model, self.config, self.template = model, config, template
        # The cache makes a bias from position ids alone, which XLNet's and DeBERTa's scores do not follow from.
        if model.config.has_query_terms:
            raise ConfigError(
                f"model.relative is {model.config.relative}, which generation does not support; give another run."
            )
        ends = {token for token in template.ends if token != NO_TOKEN}
        # Special tokens are written by the template alone: generated ones would be read as structure.
        banned = set(asdict(special).values()) - set(template.allowed)
        self.search = Search(config, ends, banned, ignored, unseen=len(template.forced), stops=stops)
        self._texts = 0  # completed so far

    def context(self, tokens: Sequence[int]) -> list[int]:
        return [*self.template.before, *tokens, *self.template.after]

    def _max_new_tokens(self, context: Sequence[int]) -> int:
        """Most tokens of a completion."""
        positions = self.model.config.max_position + 1
        if self.model.config.positions == "none":
            return self.config.max_length
        if self.template.make is EncoderDecoder:
            return positions - len(self.template.forced) if len(context) <= positions else 0
        return positions - len(context)

    def check_length(self, context: Sequence[int]) -> None:
        if not context:
            raise DataError("the text has no token; give at least one.")
        if self._max_new_tokens(context) < 1:
            raise DataError(
                f"a text has {len(context)} tokens with special tokens, but the model has positions for "
                f"{self.model.config.max_position + 1}, completion included; shorten it, or give a model with a larger "
                "model.max_position."
            )
        check_memory(self.model.config, self.config, len(context) + self.config.max_length)

    def generate(self, contexts: Sequence[Sequence[int]]) -> list[list[int]]:
        return [best.tokens for ((best, *_),) in self.hypotheses(contexts)]

    @torch.no_grad()
    def hypotheses(self, contexts: Sequence[Sequence[int]]) -> list[list[list[Hypothesis]]]:
        """As `BlankFiller.hypotheses`: each text has one completion."""
        for context in contexts:
            self.check_length(context)
        longest = max(map(len, contexts)) + self.config.max_length
        size = max_texts(self.model.config, self.config, longest)
        return [
            text
            for first in range(0, len(contexts), size)
            for text in self._complete_batch(contexts[first : first + size])
        ]

    def _complete_batch(self, contexts: Sequence[Sequence[int]]) -> list[list[list[Hypothesis]]]:
        limits = [min(self.config.max_length, self._max_new_tokens(context)) for context in contexts]
        generators = [self._generator() for _ in contexts]
        state = self.template.make(self.model, contexts, self.template)
        if isinstance(state, Unmasking):
            return [[[hypothesis]] for hypothesis in state.written(self.search, limits, generators)]
        return [[each] for each in self.search.run(state, limits, generators)]

    @torch.no_grad()
    def replay(
        self, context: Sequence[int], found: Sequence[Hypothesis], probe: AttentionProbe | None = None
    ) -> Replay:
        """As `BlankFiller.replay`."""
        (completion,) = found
        state = self.template.make(self.model, [context], self.template, probe)
        if isinstance(state, Unmasking):
            return state.replayed(completion, min(self.search.ends, default=NO_TOKEN))
        # The logits after the last token of a completion that was cut were never used.
        read = completion.tokens if completion.ended else completion.tokens[:-1]
        logits = [state.first(), *(state.next([token]) for token in read)]
        return Replay([torch.cat(logits)], state.query_and_key_tokens(context, read))

    def _generator(self) -> torch.Generator:
        """Random numbers of the next text, as `BlankFiller._generator`."""
        self._texts += 1
        # One generator for each text: a common one would make draws depend on the other texts of a batch.
        seed = derive_seed(self.config.seed, "generate", self._texts)
        return torch.Generator(device=next(self.model.parameters()).device).manual_seed(seed)


# `TextFormat.way` of the objective -> the state that generates the completion of a whole text.
WAYS: dict[str, Callable[..., TextState | Unmasking]] = {
    "unmasking": Unmasking,
    "left_to_right": LeftToRight,
    "masks": MaskAppending,
    "encoder_decoder": EncoderDecoder,
}


def _template(
    choice: ObjectiveChoice,
    special: SpecialTokens,
    lacking: Collection[str],
    config: GenerationConfig | None = None,
) -> PromptTemplate | None:
    """The template of an objective; None: it does not train completing whole texts. Raises: ConfigError."""
    writing = _writing(choice)
    if writing is None or writing.generation not in WAYS:
        return None
    mode = "" if config is None else config.mode
    if config is not None:
        _refuse_unused(choice, writing, config)

    def tokens(roles: Sequence[str | int]) -> tuple[int, ...]:
        return tuple(token for role in roles if (token := role_token(role, special)) != NO_TOKEN)

    return PromptTemplate(
        WAYS[writing.generation],
        before=tokens(writing.modes.get(mode, writing.before)),
        after=tokens(writing.after),
        ends=tokens(writing.ends),
        start=tokens([first_known(writing.start, lacking)] if writing.start else ()),
        forced=tokens(writing.forced),
        allowed=tokens(writing.allowed),
        is_causal=writing.is_causal,
        mask=special.mask if writing.generation in ("masks", "unmasking") else NO_TOKEN,
        segments=writing.segments,
    )


def _writing(choice: ObjectiveChoice) -> TextFormat | None:
    return OBJECTIVES[choice.name].text_format_for(choice.section)
