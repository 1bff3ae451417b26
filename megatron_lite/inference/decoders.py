"""Answers of a run to texts, in the layout of its objective: `decoder_of` chooses the decoder.

    blank_infilling   what fills the text's one blank
    causal            how the text goes on: every token sees those before it
    prefix_lm         the same, where the text is read in both directions; sop begins the answer
    unilm, unilmv2    the text, [SEP], and a [MASK] at the next place, which predicts its own token. The token takes the
                      mask's place, and a new mask follows (arXiv:1905.03197, section 2.4). The mask is never kept.
    masked_diffusion  what stands in the place of masks behind the text, in any order (unmasking.py)
    t5, bart, mass    what the decoder writes on what the encoder read, whose output is kept

An answer ends with eos, that of UniLM with [SEP], that of MASS with either.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict
from typing import Protocol

import torch

from data_utils.common.errors import ConfigError, DataError
from data_utils.common.random_streams import derive_seed
from data_utils.objectives import OBJECTIVES, ObjectiveChoice
from data_utils.objectives.interface import Writing, first_known, token_of
from data_utils.tokenizers.special_tokens import NO_TOKEN, SpecialTokens
from data_utils.tokenizers.tokenizer import Tokenizer
from megatron_lite.config.generation import GenerationConfig
from megatron_lite.inference.filling import BlankFiller
from megatron_lite.inference.memory import most_texts, require_memory
from megatron_lite.inference.open_run import OpenRun, Run, objective_names
from megatron_lite.inference.search import Found, Search
from megatron_lite.inference.states import EncoderDecoder, Layout, LeftToRight, MaskAppending, Written
from megatron_lite.inference.unmasking import Unmasking
from megatron_lite.inference.watch import Replay, Watch
from megatron_lite.model.transformer import GLM


class Decoder(Protocol):
    """Writes answers to texts in the layout that a run was trained in."""

    def context(self, tokens: Sequence[int]) -> list[int]:
        """A text's tokens with the special tokens around them that the layout of training has, before the answer."""
        ...

    def require_room(self, context: Sequence[int]) -> None:
        """Raise DataError if the model has too few positions for the text and an answer."""
        ...

    def generate(self, contexts: Sequence[Sequence[int]]) -> list[list[int]]:
        """The best answer to each context, without its end. Each is that to the context alone."""
        ...


def decoder_of(run: Run, config: GenerationConfig) -> Decoder:
    """The decoder of a run. Raises: ConfigError if none of the run's objectives teaches to write."""
    return decoder_for(run.model, run.tokenizer, run.objectives, config, str(run.checkpoint.path))


def decoder_for(
    model: GLM,
    tokenizer: Tokenizer,
    objectives: Sequence[ObjectiveChoice],
    config: GenerationConfig,
    run: str,
    stops: Callable[[list[int]], bool] | None = None,
) -> Decoder:
    """The decoder of a model. Args: objectives: trained on. run: its name, for messages. stops: see Search."""
    lacking, special = tokenizer.lacking, tokenizer.special
    ignored = ignored_tokens(tokenizer, config)
    for choice in objectives:
        if _fills_blanks(choice) and not model.config.decoder_layers:
            return BlankDecoder(BlankFiller(model, special, config, ignored, stops))
        layout = _layout(choice, special, lacking, config)
        if layout is not None:
            return TextDecoder(model, special, config, layout, ignored, stops)
    raise _no_writer(objectives, run)


def require_writer(run: OpenRun) -> None:
    """Raise ConfigError if none of the run's objectives teaches to fill blanks or to write."""
    if not any(writing is not None and writing.way for writing in map(_writing, run.objectives)):
        raise _no_writer(run.objectives, str(run.checkpoint.path))


def _no_writer(objectives: Sequence[ObjectiveChoice], run: str) -> ConfigError:
    writers = [name for name, made in OBJECTIVES.items() if made.writing is not None and made.writing.way]
    return ConfigError(
        f"{run} was trained on {', '.join(objective_names(objectives))}, which does not teach to write; give a run of "
        f"one of {', '.join(writers)}."
    )


def layout_of(objectives: Sequence[ObjectiveChoice], tokenizer: Tokenizer) -> Layout | None:
    """The layout of the first objective that teaches to write on whole texts; None: none does."""
    layouts = (_layout(choice, tokenizer.special, tokenizer.lacking) for choice in objectives)
    return next((layout for layout in layouts if layout is not None), None)


def may_write(run: OpenRun, *, has_blanks: bool) -> bool:
    """Whether the run writes on whole texts; else it fills blanks, or nothing.

    Args: has_blanks: the texts have [MASK] tokens, which only an encoder reads in a text.
    """
    if any(map(_fills_blanks, run.objectives)) and not run.config.model.decoder_layers:
        return False
    ways = {writing.way for writing in map(_writing, run.objectives) if writing is not None}
    return bool(ways & ({"encoder_decoder"} if has_blanks else WAYS.keys()))


def refuse_options_of_others(run: OpenRun, config: GenerationConfig) -> None:
    """Raise ConfigError for options that only other objectives read than the one by which a run fills blanks."""
    for choice in run.objectives:
        writing = _writing(choice)
        if writing is not None and writing.way == "blanks":
            _refuse_unused(choice, writing, config)


def _refuse_unused(choice: ObjectiveChoice, writing: Writing, config: GenerationConfig) -> None:
    """Raise ConfigError for options that this way of writing does not read."""
    mode = config.mode
    if writing.way != "unmasking" and (config.unmask_steps or config.unmask_block or config.guidance):
        raise ConfigError(
            f"unmask_steps, unmask_block or guidance is set, but the run was trained on {choice.name}, which takes no "
            "masks away; leave it out."
        )
    if mode and mode not in writing.modes:
        raise ConfigError(
            f"mode is {mode}, but the run was trained on {choice.name}, which has "
            f"{f'the modes {chr(44).join(writing.modes)}' if writing.modes else 'no modes; leave it out'}."
        )


def _fills_blanks(choice: ObjectiveChoice) -> bool:
    writing = _writing(choice)
    return writing is not None and writing.way == "blanks"


def ignored_tokens(tokenizer: Tokenizer, config: GenerationConfig) -> set[int]:
    """Ids of `no_repeat_except`. Raises: ConfigError for what is no token."""
    found: set[int] = set()
    for word in config.no_repeat_except.split():
        forms = [tokenizer.encode_with_specials(text) for text in (word, f" {word}")]
        ids = {form[0] for form in forms if len(form) == 1}
        if not ids:
            raise ConfigError(
                f"no_repeat_except has {word!r}, which is {len(forms[0])} tokens; name single tokens."
            )
        found |= ids
    return found


class BlankDecoder:
    """GLM: the filling of a text's one blank."""

    def __init__(self, filler: BlankFiller):
        self.filler = filler

    def context(self, tokens: Sequence[int]) -> list[int]:
        return self.filler.context(tokens)

    def require_room(self, context: Sequence[int]) -> None:
        special = self.filler.special
        blanks = sum(token in (special.mask, special.smask, special.gmask) for token in context)
        if blanks != 1:
            raise DataError(f"the text has {blanks} blanks; an answer fills one.")
        self.filler.require_room(context)

    def generate(self, contexts: Sequence[Sequence[int]]) -> list[list[int]]:
        for context in contexts:
            self.require_room(context)
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
        model: GLM,
        special: SpecialTokens,
        config: GenerationConfig,
        layout: Layout,
        ignored: Collection[int] = (),
        stops: Callable[[list[int]], bool] | None = None,
    ):
        self.model, self.config, self.layout = model, config, layout
        if model.config.has_query_terms:
            raise ConfigError(
                f"model.relative is {model.config.relative}, whose positions are not cached; give another run."
            )
        ends = {token for token in layout.ends if token != NO_TOKEN}
        banned = set(asdict(special).values()) - set(layout.allowed)
        self.search = Search(config, ends, banned, ignored, unseen=len(layout.forced), stops=stops)
        self._texts = 0  # answered so far

    def context(self, tokens: Sequence[int]) -> list[int]:
        return [*self.layout.before, *tokens, *self.layout.after]

    def _room(self, context: Sequence[int]) -> int:
        """Most tokens of an answer."""
        places = self.model.config.max_position + 1
        if self.model.config.positions == "none":
            return self.config.max_length
        if self.layout.make is EncoderDecoder:
            return places - len(self.layout.forced) if len(context) <= places else 0
        return places - len(context)

    def require_room(self, context: Sequence[int]) -> None:
        if not context:
            raise DataError("the text has no token; give at least one.")
        if self._room(context) < 1:
            raise DataError(
                f"a text has {len(context)} tokens with special ones, but the model has positions for "
                f"{self.model.config.max_position + 1}, its answer counted; shorten it, or give a model with a larger "
                "model.max_position."
            )
        require_memory(self.model.config, self.config, len(context) + self.config.max_length)

    def generate(self, contexts: Sequence[Sequence[int]]) -> list[list[int]]:
        return [best.tokens for ((best, *_),) in self.found(contexts)]

    @torch.no_grad()
    def found(self, contexts: Sequence[Sequence[int]]) -> list[list[list[Found]]]:
        """As `BlankFiller.found`: each text has one answer."""
        for context in contexts:
            self.require_room(context)
        longest = max(map(len, contexts)) + self.config.max_length
        most = most_texts(self.model.config, self.config, longest)
        return [
            found
            for first in range(0, len(contexts), most)
            for found in self._together(contexts[first : first + most])
        ]

    def _together(self, contexts: Sequence[Sequence[int]]) -> list[list[list[Found]]]:
        limits = [min(self.config.max_length, self._room(context)) for context in contexts]
        state, generators = (
            self.layout.make(self.model, contexts, self.layout),
            [self._generator() for _ in contexts],
        )
        if isinstance(state, Unmasking):
            return [[[found]] for found in state.written(self.search, limits, generators)]
        return [[each] for each in self.search.run(state, limits, generators)]

    @torch.no_grad()
    def replay(self, context: Sequence[int], found: Sequence[Found], watch: Watch | None = None) -> Replay:
        """As `BlankFiller.replay`."""
        (answer,) = found
        state = self.layout.make(self.model, [context], self.layout, watch)
        if isinstance(state, Unmasking):
            return state.replayed(answer, min(self.search.ends, default=NO_TOKEN))
        read = answer.tokens if answer.ended else answer.tokens[:-1]
        logits = [state.first(), *(state.next([token]) for token in read)]
        return Replay([torch.cat(logits)], state.shown(context, read))

    def _generator(self) -> torch.Generator:
        """Random numbers of the next text, as `BlankFiller._generator`."""
        self._texts += 1
        seed = derive_seed(self.config.seed, "generate", self._texts)
        return torch.Generator(device=next(self.model.parameters()).device).manual_seed(seed)


# `Writing.way` of the objective -> the state that writes an answer to a whole text.
WAYS: dict[str, Callable[..., Written | Unmasking]] = {
    "unmasking": Unmasking,
    "left_to_right": LeftToRight,
    "masks": MaskAppending,
    "encoder_decoder": EncoderDecoder,
}


def _layout(
    choice: ObjectiveChoice,
    special: SpecialTokens,
    lacking: Collection[str],
    config: GenerationConfig | None = None,
) -> Layout | None:
    """The layout of an objective; None: it does not teach to write on whole texts. Raises: ConfigError."""
    writing = _writing(choice)
    if writing is None or writing.way not in WAYS:
        return None
    mode = "" if config is None else config.mode
    if config is not None:
        _refuse_unused(choice, writing, config)

    def tokens(roles: Sequence[str | int]) -> tuple[int, ...]:
        return tuple(token for role in roles if (token := token_of(role, special)) != NO_TOKEN)

    return Layout(
        WAYS[writing.way],
        before=tokens(writing.modes.get(mode, writing.before)),
        after=tokens(writing.after),
        ends=tokens(writing.ends),
        start=tokens([first_known(writing.start, lacking)] if writing.start else ()),
        forced=tokens(writing.forced),
        allowed=tokens(writing.allowed),
        is_causal=writing.is_causal,
        mask=special.mask if writing.way in ("masks", "unmasking") else NO_TOKEN,
        segments=writing.segments,
    )


def _writing(choice: ObjectiveChoice) -> Writing | None:
    return OBJECTIVES[choice.name].writing_of(choice.section)
