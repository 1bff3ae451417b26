"""Fill blanks: encode the texts once, then generate each span token by token with cached keys and values.

The template is that of training. Part A is the text with its mask tokens, bidirectional. Each blank is a span of part B
that starts with sop, has its mask's position, counts block positions 1, 2, ... and ends with eop (or eos). Blanks are
filled in text order; later ones see the spans of earlier ones. Beam search keeps several hypotheses for a blank, and
only the best of them for the next. Several texts are filled as a batch: the k-th blanks of all texts at a time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict

import torch

from data_utils.common.errors import ConfigError, DataError
from data_utils.common.seeds import derive_seed
from data_utils.tokenizers.special_tokens import SpecialTokens
from data_utils.tokenizers.tokenizer import Tokenizer
from megatron_lite.config.generation import GenerationConfig
from megatron_lite.inference.attention_probe import (
    SINGLE_STACK,
    AttentionProbe,
    QueryToken,
    Replay,
    query_tokens,
)
from megatron_lite.inference.cache import CachedPlan, id_fields, pad_batch, run_cached_stack
from megatron_lite.inference.memory import check_memory, max_texts
from megatron_lite.inference.search import Hypothesis, Search
from megatron_lite.transformer.transformer import Transformer


class BlankFiller:
    """Fills the blanks of texts.

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
        ignored: Collection[int] = (),
        stops: Callable[[list[int]], bool] | None = None,
    ):
        self.model = model
        self.special = special
        self.config = config
        self.device = next(model.parameters()).device
        ends = {special.eop, special.eos}
        self.search = Search(config, ends, set(asdict(special).values()), ignored, stops=stops)
        # For probabilities of whole spans: the probability of a cut span is the sum over all its continuations.
        self._ended_search = Search(config, ends, set(asdict(special).values()), ignored, takes_cut=False)
        self._texts = 0  # filled so far

    def fill(self, context: Sequence[int]) -> list[list[int]]:
        """`fill_all` of one text."""
        return self.fill_all([context])[0]

    def fill_all(self, contexts: Sequence[Sequence[int]]) -> list[list[list[int]]]:
        """For each text the spans for its mask tokens, in text order, without sop, eop or eos.

        The spans of a text do not depend on the other texts. All texts are one batch, as far as memory allows.

        Args:
            contexts: part A of each: CLS, the text with its mask tokens, and eos where the text is complete.
        Raises: DataError without a mask, or if positions exceed the model's tables.
        """
        return [[hypotheses[0].tokens for hypotheses in text] for text in self.hypotheses(contexts)]

    def ranked_spans(self, context: Sequence[int]) -> list[list[tuple[float, list[int]]]]:
        """For each blank up to `num_beams` spans with their probabilities, the likeliest first.

        Spans that do not end within max_length are left out, unless none does. Later blanks see the likeliest span.
        Beam search may miss a likely span with an unlikely first token.

        Args: context: as for `fill_all`.
        """
        assert self.config.strategy == "beam" and self.config.length_penalty == 0.0, (
            "scores are log probabilities"
        )
        ranked = []
        for hypotheses in self.hypotheses([context], self._ended_search)[0]:
            totals: dict[tuple[int, ...], float] = {}
            for each in hypotheses:  # a span may end with eop and with eos
                span = tuple(each.tokens)
                totals[span] = totals.get(span, 0.0) + math.exp(each.score)
            ranked.append(sorted(((p, list(span)) for span, p in totals.items()), reverse=True))
        return ranked

    @torch.no_grad()
    def hypotheses(
        self, contexts: Sequence[Sequence[int]], search: Search | None = None
    ) -> list[list[list[Hypothesis]]]:
        """The spans found for each text and each of its blanks, the best first. Args: search: None: by the settings."""
        blanks = [self._blanks(context) for context in contexts]
        for context in contexts:
            self.check_length(context)
        longest = max(map(len, contexts)) + self._longest()
        size = max_texts(self.model.config, self.config, longest)
        return [
            text
            for first in range(0, len(contexts), size)
            for text in self._fill_batch(
                contexts[first : first + size], blanks[first : first + size], search or self.search
            )
        ]

    def _fill_batch(
        self, contexts: Sequence[Sequence[int]], blanks: Sequence[list[int]], search: Search
    ) -> list[list[list[Hypothesis]]]:
        generators = [self._generator() for _ in contexts]
        found: list[list[list[Hypothesis]]] = [[] for _ in contexts]
        plan, texts = self.encoded(contexts), list(range(len(contexts)))
        # The k-th blanks of all texts together; later blanks see earlier spans, as in training.
        for number in range(max(map(len, blanks))):
            # A copy, since the search leaves the tokens of its live hypotheses in it; the cache gets the chosen
            # span below.
            state = _Span(self, plan.copy(), [blanks[text][number] for text in texts])
            limits = [self._longest()] * len(texts)
            results = search.run(state, limits, [generators[text] for text in texts])
            for text, result in zip(texts, results, strict=True):
                found[text].append(result)
            remaining = [index for index, text in enumerate(texts) if len(blanks[text]) > number + 1]
            if not remaining:
                break
            texts = [texts[index] for index in remaining]
            plan.select(remaining)
            spans = [self._inputs(found[text][number][0]) for text in texts]
            # In one pass instead of token by token.
            self.write(plan, spans, [blanks[text][number] for text in texts])
        return found

    def _blanks(self, context: Sequence[int]) -> list[int]:
        masks = {self.special.mask, self.special.smask, self.special.gmask}
        blanks = [position for position, token in enumerate(context) if token in masks]
        if not blanks:
            raise DataError("the text has no blank; add [MASK], [sMASK] or [gMASK].")
        return blanks

    def encoded(self, contexts: Sequence[Sequence[int]], probe: AttentionProbe | None = None) -> CachedPlan:
        """The cache that holds part A of each text."""
        tokens, is_token = pad_batch(contexts, self.device)
        # Part A sees all of itself, whatever comes later: it is computed once for all blanks and beams.
        positions = torch.arange(tokens.shape[1], device=self.device).expand(tokens.shape)
        plan = CachedPlan(self.model.config, probe)
        plan.expect(positions, is_token=is_token)
        run_cached_stack(self.model, tokens, id_fields(positions), plan)
        return plan

    def write(
        self, plan: CachedPlan, spans: Sequence[Sequence[int]], positions: Sequence[int], first: int = 1
    ) -> torch.Tensor:
        """Add tokens of part B to a cache. Returns: logits [R, longest span, V] of the token after each.

        Args:
            spans: the new tokens of each of the R sequences.
            positions: of the blank of each sequence.
            first: block position of the spans' first tokens.
        """
        tokens, is_token = pad_batch(spans, self.device)
        blank_positions = torch.tensor(positions, device=self.device)[:, None].expand(tokens.shape)
        steps = torch.arange(first, first + tokens.shape[1], device=self.device).expand(tokens.shape)
        plan.expect(blank_positions, is_token=is_token, is_causal=True)
        return self.model.logits(
            run_cached_stack(self.model, tokens, id_fields(blank_positions, steps), plan)
        ).float()

    @torch.no_grad()
    def replay(
        self, context: Sequence[int], found: Sequence[Hypothesis], probe: AttentionProbe | None = None
    ) -> Replay:
        """Run the model once more on a text with its spans. Args: probe: keeps attention weights."""
        plan, queries, logits = self.encoded([context], probe), query_tokens(context, []), []
        for position, each in zip(self._blanks(context), found, strict=True):
            span = self._inputs(each)
            predicted = len(each.tokens) + each.ended
            logits.append(self.write(plan, [span], [position])[0, :predicted])
            queries += [QueryToken(token, number < predicted) for number, token in enumerate(span)]
        return Replay(logits, {SINGLE_STACK: (queries, [query.token for query in queries])})

    def _inputs(self, found: Hypothesis) -> list[int]:
        """A span as later blanks see it: sop and its tokens.

        Block positions end at max_position. A span that is cut there has none for its last token, and in training such
        a token is no input either: only a document's tail is that long, and its last token is a target alone.
        """
        return [self.special.sop, *found.tokens][: self.model.config.max_position]

    def context(self, tokens: Sequence[int]) -> list[int]:
        """See `blank_context`."""
        return blank_context(tokens, self.special)

    def _generator(self) -> torch.Generator:
        """Random numbers of the next text, so that its draws do not depend on the other texts of its batch."""
        self._texts += 1
        seed = derive_seed(self.config.seed, "generate", self._texts)
        return torch.Generator(device=self.device).manual_seed(seed)

    def check_length(self, context: Sequence[int]) -> None:
        """Raise DataError if part A exceeds the model's positions, or its beams need too much memory."""
        limit = self.model.config.max_position + 1
        if len(context) > limit:
            raise DataError(
                f"a text has {len(context)} tokens with [CLS] and end token, but the model has positions for {limit}; "
                f"shorten it by {len(context) - limit} tokens, or give a model with a larger model.max_position."
            )
        check_memory(self.model.config, self.config, len(context) + self._longest())

    def _longest(self) -> int:
        return min(self.config.max_length, self.model.config.max_position)


class _Span:
    """The k-th blanks of some texts (a `DecodingState` of search.py)."""

    def __init__(self, filler: BlankFiller, plan: CachedPlan, positions: list[int]):
        self.filler, self.plan, self.positions, self.step = filler, plan, positions, 0

    def first(self) -> torch.Tensor:
        return self.next([self.filler.special.sop] * len(self.positions))

    def next(self, tokens: Sequence[int]) -> torch.Tensor:
        self.step += 1
        return self.filler.write(self.plan, [[token] for token in tokens], self.positions, self.step)[:, -1]

    def select(self, indices: Sequence[int]) -> None:
        self.plan.select(indices)
        self.positions = [self.positions[index] for index in indices]


def blank_context(tokens: Sequence[int], special: SpecialTokens) -> list[int]:
    """Part A for a text's tokens: CLS first; eos last unless the text ends with [gMASK] and is continued there."""
    is_open = bool(tokens) and tokens[-1] == special.gmask and special.gmask != special.mask
    return [special.cls, *tokens] if is_open else [special.cls, *tokens, special.eos]


def insert_spans(
    tokens: Sequence[int], spans: Sequence[Sequence[int]], special: SpecialTokens
) -> list[list[int]]:
    """The text's tokens cut at the blanks: [text, span, text, span, ..., text]."""
    masks = {special.mask, special.smask, special.gmask}
    parts: list[list[int]] = [[]]
    remaining = iter(spans)
    for token in tokens:
        if token in masks:
            parts += [list(next(remaining)), []]
        else:
            parts[-1].append(token)
    if next(remaining, None) is not None:
        raise ConfigError("there are more spans than blanks.")
    return parts


def span_text(tokenizer: Tokenizer, span: Sequence[int]) -> str:
    """A span as printed, without spaces around it; "(nothing)", "(space)" or "(line break)" if that is all."""
    text = tokenizer.decode(span)
    nothing = "(line break)" if "\n" in text else "(space)" if text else "(nothing)"
    return text.strip() or nothing


def numbered_text(tokenizer: Tokenizer, context: Sequence[int], spans: Sequence[Sequence[int]]) -> str:
    """The text as printed, with ___1___ for its first blank. Args: spans: the original text of the blanks."""
    hidden = {tokenizer.special.cls, tokenizer.special.eos}
    parts = insert_spans([token for token in context if token not in hidden], spans, tokenizer.special)
    texts = [tokenizer.decode(part) for part in parts]
    for number, index in enumerate(range(1, len(texts), 2), start=1):
        # Byte-level tokens include the space before a word.
        space = " " if texts[index].startswith(" ") else ""
        texts[index] = f"{space}___{number}___"
    return " ".join("".join(texts).split())
