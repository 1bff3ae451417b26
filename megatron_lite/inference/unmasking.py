"""Generation by masked diffusion (LLaDA, arXiv:2502.09992): tokens start as masks; the likeliest are fixed first.

A completion of n tokens has blocks of `unmask_block` tokens, generated one after another, each in its share of the
`unmask_steps`. Step i of s of a block of m masks fixes m // s of them, one more if i < m % s: those whose chosen tokens
have the largest probability. What is fixed stays. A strategy of `sample` chooses tokens with Gumbel's noise, `greedy`
without. A completion ends at its first end token.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch

from data_utils.common.errors import ConfigError
from megatron_lite.inference.attention_probe import SINGLE_STACK, AttentionProbe, Replay, query_tokens
from megatron_lite.inference.cache import CachedPlan, id_fields, run_cached_stack
from megatron_lite.inference.search import NEVER, Hypothesis, Search
from megatron_lite.inference.states import PromptTemplate
from megatron_lite.transformer.transformer import Transformer


def fixed_counts(masks: int, steps: int) -> list[int]:
    """How many of the masks of a block each step fixes: 10 in 4 are 3, 3, 2, 2."""
    return [masks // steps + (step < masks % steps) for step in range(steps)]


class Unmasking:
    """Completes texts in any order of positions. Args: as of `LeftToRight`."""

    def __init__(
        self,
        model: Transformer,
        contexts: Sequence[Sequence[int]],
        template: PromptTemplate,
        probe: AttentionProbe | None = None,
    ):
        self._model, self._contexts, self._mask, self._watch = model, contexts, template.mask, probe
        self._device = next(model.parameters()).device

    def written(
        self, search: Search, limits: Sequence[int], generators: Sequence[torch.Generator]
    ) -> list[Hypothesis]:
        """The completion of each text. Raises: ConfigError for settings that unmasking does not support."""
        config = search.config
        if config.strategy == "beam" or config.top_k or config.top_p < 1 or config.no_repeat_ngram_size:
            raise ConfigError(
                "strategy beam, top_k, top_p or no_repeat_ngram_size is set, but the run generates by "
                "unmasking, which does not support them; set strategy to greedy or sample, and remove the others."
            )
        return [
            self._one(context, search, limit, generator)
            for context, limit, generator in zip(self._contexts, limits, generators, strict=True)
        ]

    def _one(
        self, context: Sequence[int], search: Search, limit: int, generator: torch.Generator
    ) -> Hypothesis:
        config, first = search.config, len(context)
        tokens = torch.tensor([*context, *[self._mask] * limit], device=self._device)
        boundaries = [*range(0, limit, config.unmask_block or limit), limit]
        # The steps are those of the whole completion, shared by its blocks.
        steps = max(1, (config.unmask_steps or limit) // (len(boundaries) - 1))
        for start, stop in pairwise(boundaries):
            for count in filter(None, fixed_counts(stop - start, steps)):
                logits = self._guided(tokens, first, config.guidance)[start:stop]
                logits[:, search.banned] = NEVER
                logits[: max(0, config.min_length - start), [end for end in search.ends if end >= 0]] = NEVER
                noisy = logits
                if config.strategy == "sample":
                    drawn = torch.rand(
                        logits.shape, dtype=logits.dtype, device=self._device, generator=generator
                    )
                    # Gumbel noise: its maximum is a draw from the softmax at this temperature. In fp64, as in
                    # LLaDA's code: low precision makes large draws too rare.
                    noisy = logits - config.temperature * (-drawn.log()).log()
                chosen = noisy.argmax(-1)
                # Confidence without noise decides which positions are fixed first.
                sure = logits.softmax(-1).gather(1, chosen[:, None])[:, 0]
                block = tokens[first + start : first + stop]
                # Positions that are fixed already are never chosen again.
                fixed = sure.masked_fill(block != self._mask, NEVER).topk(count).indices
                block[fixed] = chosen[fixed]
        answer = tokens[first:].tolist()
        ends = [index for index, token in enumerate(answer) if token in search.ends]
        return Hypothesis(answer[: ends[0]] if ends else answer, ended=bool(ends))

    def _guided(self, tokens: torch.Tensor, first: int, guidance: float) -> torch.Tensor:
        """fp64 logits [N, V] of a completion that starts at position `first`.

        Classifier-free guidance c: u + (1 + c) (l - u), where u are the logits with the text masked.
        """
        if not guidance:
            return self._logits(tokens[None])[0, first:]
        alone = tokens.clone()
        alone[:first] = self._mask
        with_text, without = self._logits(torch.stack([tokens, alone]))[:, first:]
        return without + (1 + guidance) * (with_text - without)

    def _logits(self, tokens: torch.Tensor, probe: AttentionProbe | None = None) -> torch.Tensor:
        """fp64 [R, N, V] of tokens [R, N] that all see each other."""
        # A new cache for every pass: all tokens see each other, so none can be kept when one changes.
        plan = CachedPlan(self._model.config, probe and probe.for_stack(SINGLE_STACK))
        positions = torch.arange(tokens.shape[1], device=self._device).expand(tokens.shape)
        plan.expect(positions)
        return self._model.logits(run_cached_stack(self._model, tokens, id_fields(positions), plan)).double()

    def replayed(self, answer: Hypothesis, end: int) -> Replay:
        """Each token's logits given all others, end token included. Args: end: the end token."""
        (context,), written = self._contexts, [*answer.tokens, *[end] * answer.ended]
        whole = torch.tensor([*context, *written], device=self._device)
        places = torch.arange(len(context), len(whole), device=self._device)
        rows = whole.repeat(len(places), 1)
        rows[torch.arange(len(places)), places] = self._mask
        logits = self._logits(rows)[torch.arange(len(places)), places].float()
        self._logits(whole[None], self._watch)
        return Replay([logits], {SINGLE_STACK: (query_tokens(context, written), whole.tolist())})
