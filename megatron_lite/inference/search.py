"""Greedy search, sampling and beam search for a batch of texts and any model.

A `DecodingState` holds the model and the texts, and gives the logits of the next tokens. The result of a text does not
depend on the others. A finished text leaves the batch.

Beam search equals that of GLM's code and of transformers, so that an exported model generates the same. Of the
likeliest continuations of a text's hypotheses, those among the first `num_beams` that end are finished; the first
`num_beams` of the others stay live. At the length limit all end. A text is done when `num_beams` are finished and its
best live hypothesis, scored at its current length, is not better than the worst of them. Scores are log probabilities
over the whole vocabulary: banned tokens are skipped, and their probability is not redistributed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from megatron_lite.config.generation import GenerationConfig

NEVER = float("-inf")


class DecodingState(Protocol):
    """The sequences of a batch: initially one for each text, later one for each beam."""

    def first(self) -> torch.Tensor:
        """fp32 logits [texts, V] of each text's first new token. Called once."""
        ...

    def next(self, tokens: Sequence[int]) -> torch.Tensor:
        """Append one token to each sequence. Returns: fp32 logits [sequences, V] of the next one."""
        ...

    def select(self, indices: Sequence[int]) -> None:
        """Keep these sequences; an index may be repeated (beams)."""
        ...


@dataclass(frozen=True)
class Hypothesis:
    """A generated sequence."""

    tokens: list[int]  # without the end token
    score: float = 0.0  # beam: log probability over the length penalty
    ended: bool = True  # not cut at the length limit
    log_p: float = 0.0  # beam: log probability, end token included


@dataclass(frozen=True)
class _Live:
    tokens: list[int]
    total: float = 0.0  # log probability


class Search:
    """
    Args:
        ends: tokens that end a sequence.
        banned: tokens that are never generated.
        ignored: see `repeats`.
        unseen: tokens of each sequence that the state adds itself. They count in lengths.
        stops: greedy search and sampling: True for a sequence after which generation stops.
        takes_cut: beam: sequences cut at the length limit compete with those that ended; if False they are used only
            when none ended.
    """

    def __init__(
        self,
        config: GenerationConfig,
        ends: Collection[int],
        banned: Collection[int],
        ignored: Collection[int] = (),
        unseen: int = 0,
        takes_cut: bool = True,
        stops: Callable[[list[int]], bool] | None = None,
    ):
        self.takes_cut, self.stops = takes_cut, stops
        self.config, self.ends, self.ignored, self.unseen = (
            config,
            frozenset(ends),
            frozenset(ignored),
            unseen,
        )
        self.banned = sorted(token for token in set(banned) - set(ends) if token >= 0)

    def run(
        self, state: DecodingState, limits: Sequence[int], generators: Sequence[torch.Generator] = ()
    ) -> list[list[Hypothesis]]:
        """The generated sequences of each text, the best first: one, or up to `num_beams`.

        Args:
            limits: most tokens of each sequence, at least 1, end token included.
            generators: of each text, for sampling.
        """
        if self.config.strategy == "beam":
            return self._beams(state, limits)
        return [[found] for found in self._one_by_one(state, limits, generators)]

    def _allowed(self, scores: torch.Tensor, spans: Sequence[list[int]]) -> torch.Tensor:
        """`scores` [sequences, V] with -inf for tokens that may not follow."""
        scores[:, self.banned] = NEVER
        for token_scores, span in zip(scores, spans, strict=True):
            if len(span) < self.config.min_length:
                token_scores[[end for end in self.ends if end >= 0]] = NEVER
            if self.config.no_repeat_ngram_size:
                token_scores[repeats(span, self.config.no_repeat_ngram_size, self.ignored)] = NEVER
        return scores

    def _one_by_one(
        self, state: DecodingState, limits: Sequence[int], generators: Sequence[torch.Generator]
    ) -> list[Hypothesis]:
        spans: list[list[int]] = [[] for _ in limits]
        ended = [False] * len(limits)
        texts, logits = list(range(len(limits))), state.first()
        while texts:
            # A copy, because `_allowed` writes in place and the tensor is the state's.
            logits = self._allowed(logits.clone(), [spans[text] for text in texts])
            tokens: list[int] = []
            going: list[int] = []  # indices of the sequences that continue
            for index, text in enumerate(texts):
                token = self._choose(logits[index], generators[text] if generators else None)
                ended[text] = token is None or token in self.ends
                if token is None or ended[text]:
                    continue
                spans[text].append(token)
                if len(spans[text]) < limits[text] and not (self.stops and self.stops(spans[text])):
                    tokens.append(token)
                    going.append(index)
            # A finished text leaves the batch, so that the last tokens of the longest completion are computed alone.
            if going and len(going) < len(texts):
                state.select(going)
            texts = [texts[index] for index in going]
            if texts:
                logits = state.next(tokens)
        return [Hypothesis(span, ended=end) for span, end in zip(spans, ended, strict=True)]

    def _choose(self, logits: torch.Tensor, generator: torch.Generator | None) -> int | None:
        """The next token of a sequence; None: no token is allowed."""
        if logits.max() == NEVER:
            return None
        return int(logits.argmax()) if self.config.strategy == "greedy" else self.draw(logits, generator)

    def draw(self, logits: torch.Tensor, generator: torch.Generator | None) -> int:
        """Sample a token by temperature, top_k and top_p. Args: logits: [V]."""
        logits = logits / self.config.temperature
        ordered, order = logits.sort(descending=True)
        probabilities = ordered.softmax(-1)
        if self.config.top_k:
            probabilities[self.config.top_k :] = 0.0
        # A token is kept if the likelier ones have not reached top_p; the likeliest is always kept.
        before = probabilities.cumsum(-1) - probabilities
        removed = before >= self.config.top_p * probabilities.sum()
        removed[0] = False  # also where top_p is 0 in fp32
        probabilities[removed] = 0.0
        return int(order[torch.multinomial(probabilities, 1, generator=generator)])

    def _beams(self, state: DecodingState, limits: Sequence[int]) -> list[list[Hypothesis]]:
        finished: list[list[Hypothesis]] = [[] for _ in limits]
        live = [[_Live([])] for _ in limits]
        texts, logits, step = list(range(len(limits))), state.first(), 1
        while texts:
            before = [each for text in texts for each in live[text]]
            # The softmax comes before the ban: the probability of a banned token is not redistributed.
            log_p = self._allowed(logits.log_softmax(-1), [each.tokens for each in before])
            # [all live hypotheses of all texts, V]
            totals = log_p + torch.tensor([each.total for each in before], device=log_p.device)[:, None]
            parents: list[int] = []  # for each new hypothesis the index of the sequence that it continues
            first, going = 0, []
            for text in texts:
                text_totals = totals[first : first + len(live[text])]
                is_last = step >= limits[text]
                sources, live[text] = self._continue(text_totals, live[text], finished[text], step, is_last)
                if live[text]:
                    parents += [first + source for source in sources]
                    going.append(text)
                first += len(text_totals)
            texts, step = going, step + 1
            if texts:
                state.select(parents)
                logits = state.next([each.tokens[-1] for text in texts for each in live[text]])
        return finished

    def _continue(
        self, totals: torch.Tensor, live: list[_Live], finished: list[Hypothesis], step: int, is_last: bool
    ) -> tuple[list[int], list[_Live]]:
        """One step of one text, which adds to `finished`.

        Returns: for each new live hypothesis the index of its parent in `totals`, and the hypotheses; none if done.
        """
        beams, vocabulary = self.config.num_beams, totals.shape[1]
        count = max(2, 1 + len(self.ends)) * beams  # at least `beams` of them do not end
        best, indices = totals.flatten().topk(min(count, totals.numel()))
        sources: list[int] = []
        after: list[_Live] = []
        cut: list[Hypothesis] = []
        for rank, (total, index) in enumerate(zip(best.tolist(), indices.tolist(), strict=True)):
            if total == NEVER:
                break
            source, token = divmod(index, vocabulary)
            span, is_end = live[source].tokens, token in self.ends
            if is_end or is_last:
                # As in transformers: an end beyond the first `num_beams` candidates does not count.
                if rank < beams and (is_end or self.takes_cut):
                    score = self._score(total, step)
                    finished.append(Hypothesis(span if is_end else [*span, token], score, is_end, total))
                elif is_last and not is_end:
                    cut.append(Hypothesis([*span, token], self._score(total, step), False, total))
            elif len(after) < beams:
                sources.append(source)
                after.append(_Live([*span, token], total))
        if not after and not finished:  # none ended, and the limit is reached or no token is allowed
            length = max(step - 1, 1)
            finished += cut or [
                Hypothesis(each.tokens, self._score(each.total, length), False, each.total) for each in live
            ]
        finished.sort(key=lambda found: found.score, reverse=True)
        del finished[beams:]
        # The rule of transformers, at the current length. With a positive length penalty a longer hypothesis
        # might still win, but published figures are made with this one.
        if len(finished) == beams and after and finished[-1].score >= self._score(after[0].total, step):
            return [], []
        return sources, after

    def _score(self, total: float, length: int) -> float:
        return self.config.score(total, length + self.unseen)


def repeats(span: Sequence[int], size: int, ignored: Collection[int] = ()) -> list[int]:
    """Tokens that would repeat an n-gram of this size.

    Args: ignored: with one of them among the last size - 1 tokens, any token may follow (UniLM's sentence marks).
    """
    tail = list(span[len(span) - size + 1 :]) if size > 1 else []
    if len(span) < size or not set(tail).isdisjoint(ignored):
        return []
    starts = range(len(span) - size + 1)
    return [span[i + size - 1] for i in starts if list(span[i : i + size - 1]) == tail]
