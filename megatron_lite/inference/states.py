"""The sequences of a batch during generation: a `DecodingState` of search.py for each type of model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from data_utils.tokenizers.special_tokens import NO_TOKEN
from megatron_lite.inference.attention_probe import SINGLE_STACK, AttentionProbe, QueryToken, query_tokens
from megatron_lite.inference.cache import (
    CachedCross,
    CachedPlan,
    id_fields,
    pad_batch,
    run_cached_decoder,
    run_cached_encoder,
    run_cached_stack,
)
from megatron_lite.inference.search import DecodingState
from megatron_lite.transformer.transformer import Transformer


class TextState(DecodingState, Protocol):
    """The sequences of a batch, made from a model, the texts' tokens, a template and optionally an `AttentionProbe`."""

    def query_and_key_tokens(
        self, context: Sequence[int], read: Sequence[int]
    ) -> dict[str, tuple[list[QueryToken], list[int]]]:
        """See `Replay`. Args: context: of the one text. read: the completion's tokens that were read."""
        ...


@dataclass(frozen=True)
class PromptTemplate:
    """The special tokens and attention of an objective's text and completion.

    Args:
        make: the state of a batch. With an encoder, positions of the completion start at 0.
        before, after: tokens around the text.
        ends: tokens that end the completion.
        start: tokens that predict the completion's first token; none: the text's last token, or a mask, does.
        forced: first tokens of every completion, which are not returned.
        allowed: special tokens that may be generated.
        mask: the token that predicts the token at its position.
        segments: segment ids of the text and of the completion.
    """

    make: Callable[..., Any]
    before: tuple[int, ...]
    after: tuple[int, ...]
    ends: tuple[int, ...]
    start: tuple[int, ...] = ()
    forced: tuple[int, ...] = ()
    allowed: tuple[int, ...] = ()
    is_causal: bool = False
    mask: int = NO_TOKEN
    segments: tuple[int, int] = (0, 0)


class _Rows:
    """Sequences of one stack that has read the texts (a `DecodingState` of search.py)."""

    def __init__(
        self,
        model: Transformer,
        contexts: Sequence[Sequence[int]],
        template: PromptTemplate,
        probe: AttentionProbe | None = None,
    ):
        self.model, self.template = model, template
        self.device = next(model.parameters()).device
        self.plan = CachedPlan(model.config, probe and probe.for_stack(SINGLE_STACK))
        self.tokens, self.is_token = pad_batch(contexts, self.device)
        self.lengths = torch.tensor([len(context) for context in contexts], device=self.device)
        self.next_positions = self.lengths.clone()  # position of each sequence's next token

    def segment(self, is_completion: bool) -> int:
        return self.template.segments[is_completion] if self.model.config.segments > 1 else 0

    def read(self) -> torch.Tensor:
        """Hidden states [R, N, D] of the texts."""
        positions = torch.arange(self.tokens.shape[1], device=self.device).expand(self.tokens.shape)
        self.plan.expect(positions, is_token=self.is_token, is_causal=self.template.is_causal)
        return run_cached_stack(
            self.model, self.tokens, id_fields(positions, segment=self.segment(False)), self.plan
        )

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.model.logits(hidden).float()

    def select(self, indices: Sequence[int]) -> None:
        self.plan.select(indices)
        self.next_positions = self.next_positions[torch.tensor(indices, device=self.device)]


class LeftToRight(_Rows):
    def first(self) -> torch.Tensor:
        hidden = self.read()
        if self.template.start:
            # The start token predicts the first token of the completion; without one the last token of the text
            # does.
            return self.next(self.template.start * len(self.tokens))
        rows = torch.arange(len(self.tokens), device=self.device)
        return self.logits(hidden[rows, self.lengths - 1])

    def next(self, tokens: Sequence[int]) -> torch.Tensor:
        words, positions = torch.tensor(tokens, device=self.device)[:, None], self.next_positions[:, None]
        self.next_positions = self.next_positions + 1
        self.plan.expect(positions)
        return self.logits(run_cached_stack(self.model, words, id_fields(positions), self.plan)[:, -1])

    def query_and_key_tokens(
        self, context: Sequence[int], read: Sequence[int]
    ) -> dict[str, tuple[list[QueryToken], list[int]]]:
        queries = query_tokens([*context, *self.template.start], read)
        queries[-1 - len(read)] = QueryToken(queries[-1 - len(read)].token, True)
        return {SINGLE_STACK: (queries, [query.token for query in queries])}


class MaskAppending(_Rows):
    def first(self) -> torch.Tensor:
        self.read()
        return self._predicted(self.next_positions.new_zeros(len(self.next_positions), 0))

    def next(self, tokens: Sequence[int]) -> torch.Tensor:
        self.next_positions = self.next_positions + 1
        return self._predicted(torch.tensor(tokens, device=self.device)[:, None])

    def _predicted(self, chosen: torch.Tensor) -> torch.Tensor:
        """Logits [R, V] of a mask at each next position, after `chosen` [R, 0 or 1], the token before it."""
        count = chosen.shape[1]
        # UniLM predicts at a [MASK]: it is computed in one pass with the token before it, and only the token is cached.
        # So a completion takes as many passes as with a causal model.
        words = torch.cat([chosen, chosen.new_full((len(chosen), 1), self.template.mask)], dim=1)
        positions = self.next_positions[:, None] + torch.arange(-count, 1, device=self.device)
        self.plan.expect(positions, is_causal=True, num_cached=count)
        ids = id_fields(positions, segment=self.segment(True))
        return self.logits(run_cached_stack(self.model, words, ids, self.plan)[:, -1])

    def query_and_key_tokens(
        self, context: Sequence[int], read: Sequence[int]
    ) -> dict[str, tuple[list[QueryToken], list[int]]]:
        mask = QueryToken(self.template.mask, True)
        queries = [
            *query_tokens(context, []),
            mask,
            *(query for token in read for query in (QueryToken(token, False), mask)),
        ]
        return {SINGLE_STACK: (queries, [*context, *read, self.template.mask])}


class EncoderDecoder(_Rows):
    def __init__(
        self,
        model: Transformer,
        contexts: Sequence[Sequence[int]],
        template: PromptTemplate,
        probe: AttentionProbe | None = None,
    ):
        super().__init__(model, contexts, template, probe)
        positions = torch.arange(self.tokens.shape[1], device=self.device).expand(self.tokens.shape)
        self.plan.expect(positions, is_token=self.is_token)
        self.encoded = run_cached_encoder(model, self.tokens, id_fields(positions), self.plan)
        self.cross = CachedCross(self.is_token, probe and probe.for_stack("cross"))
        # The encoder's cache is no longer needed; the decoder has its own cache.
        self.plan = CachedPlan(model.config, probe and probe.for_stack("decoder"))
        self.next_positions = torch.zeros_like(self.lengths)

    def first(self) -> torch.Tensor:
        for token in (*self.template.start, *self.template.forced):
            logits = self.next([token] * len(self.tokens))
        return logits

    def next(self, tokens: Sequence[int]) -> torch.Tensor:
        words, positions = torch.tensor(tokens, device=self.device)[:, None], self.next_positions[:, None]
        self.next_positions = self.next_positions + 1
        self.plan.expect(positions)
        ids = id_fields(positions, segment=self.segment(True))
        hidden = run_cached_decoder(self.model, words, ids, self.plan, self.encoded, self.cross)
        return self.logits(hidden[:, -1])

    def select(self, indices: Sequence[int]) -> None:
        super().select(indices)
        self.cross.select(indices)

    def query_and_key_tokens(
        self, context: Sequence[int], read: Sequence[int]
    ) -> dict[str, tuple[list[QueryToken], list[int]]]:
        first = [*self.template.start, *self.template.forced]
        queries = [*query_tokens(first[:-1], []), *query_tokens([], [*first[-1:], *read])]
        text, tokens = query_tokens(context, []), [query.token for query in queries]
        return {
            SINGLE_STACK: (text, list(context)),
            "decoder": (queries, tokens),
            "cross": (queries, list(context)),
        }
