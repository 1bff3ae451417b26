"""Every objective for tests: how to make it, rows for it, its mask as the paper has it, and how its text is rebuilt.

The masks are written from the papers, row by row, from what a row is (context, decoder input, query, ...).
Of `ord` and `grp` they use only the step numbers of UniLMv2 and XLNet, as the name of the drawn order.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

from data_utils.common.batch_fields import Example
from data_utils.loader.loader import collate as fill_rows
from data_utils.objectives import LOSS_NAMES, OBJECTIVES, make_one
from data_utils.objectives.interface import DOCUMENT_OVERHEAD, Objective
from data_utils.tokenizers.special_tokens import SpecialTokens
from data_utils.tokenizers.vocabulary import Vocabulary

SPECIAL = SpecialTokens(
    cls=101, sep=102, mask=103, smask=104, gmask=105, sop=106, eop=107, eos=0, pad=1, unk=100, dblock=99
)
SIZE = 3000
FIRST_TEXT_TOKEN = 1000
SENTINELS = tuple(range(FIRST_TEXT_TOKEN - 1, FIRST_TEXT_TOKEN - 101, -1))


def vocabulary() -> Vocabulary:
    """3,000 tokens; every third from 1000 on continues a word, every seventh ends a sentence."""
    ids = np.arange(SIZE)
    word_start = ~((ids >= FIRST_TEXT_TOKEN) & (ids % 3 == 2))
    sentence_end = (ids >= FIRST_TEXT_TOKEN) & (ids % 7 == 0)
    return Vocabulary(SPECIAL, SIZE, sentence_end, word_start, sentinels=SENTINELS)


def text_of(length: int, with_eos: bool = True, first: int = FIRST_TEXT_TOKEN) -> np.ndarray:
    """Distinct tokens, the last one eos if asked for."""
    text = np.arange(first, first + length, dtype=np.int32)
    if with_eos and length:
        text[-1] = SPECIAL.eos
    return text


def make(
    name: str, sequence_length: int, seed: int = 5, row_length: int | None = None, **config: Any
) -> Objective:
    return make_one(
        name, OBJECTIVES[name].config_class(**config), vocabulary(), seed, sequence_length, row_length
    )


def many(made: Objective, chunk: np.ndarray, samples: int) -> list[Example]:
    """The Examples of the same chunk under sample indices 0, 1, ..."""
    ones = np.ones(samples, np.int64)
    batch = fill_rows(made, np.tile(chunk, samples), ones * len(chunk), ones, np.arange(samples))
    return [Example.from_fields(row[:, row[5] >= 0]) for row in batch]


def windows(rows: int, sequence_length: int, seed: int) -> list[list[np.ndarray]]:
    """Random windows of chunks with distinct tokens; half of them begin with the rest of a document."""
    rng = np.random.default_rng(seed)
    made = []
    for row in range(rows):
        chunks, left, first = [], sequence_length, FIRST_TEXT_TOKEN
        while True:
            reserve = 0 if not chunks and row % 2 else DOCUMENT_OVERHEAD
            if left - reserve < 1 or (chunks and rng.random() < 0.1):
                break
            length = int(rng.integers(1, left - reserve + 1))
            chunks.append(text_of(length, bool(rng.random() < 0.7), first))
            first += length
            left -= length + reserve
        made.append(chunks)
    return made


def collate(made: Objective, samples: list[list[np.ndarray]], first_index: int = 0) -> np.ndarray:
    chunks = [chunk for sample in samples for chunk in sample]
    lengths = np.array([len(chunk) for chunk in chunks])
    counts = np.array([len(sample) for sample in samples])
    return fill_rows(made, np.concatenate(chunks), lengths, counts, np.arange(len(samples)) + first_index)


# Masks of one document, bool [rows, rows]: may the query row see the key row?


def everything(example: Example) -> np.ndarray:
    return np.ones((len(example.tokens), len(example.tokens)), bool)


def causal(example: Example) -> np.ndarray:
    return np.tri(len(example.tokens), dtype=bool)


def encoder_decoder(size: int, context: int) -> np.ndarray:
    """A context that sees itself, and a decoder that sees the context and what came before in the decoder."""
    mask = np.zeros((size, size), bool)
    for query in range(size):
        mask[query, :context] = True
        if query >= context:
            mask[query, context : query + 1] = True
    return mask


def from_sop(example: Example) -> np.ndarray:
    sop = np.flatnonzero(example.tokens == SPECIAL.sop)
    return encoder_decoder(len(example.tokens), int(sop[0]) if len(sop) else len(example.tokens))


def unilm(example: Example) -> np.ndarray:
    segments = example.segment_ids
    size = len(segments)
    if segments[0] == 2:
        return np.tri(size, dtype=bool)
    if segments[0] == 3:
        return np.tri(size, dtype=bool).T
    if segments[0] == 4:
        return encoder_decoder(size, int((segments == 4).sum()))
    return np.ones((size, size), bool)


def mass(example: Example) -> np.ndarray:
    encoder = example.segment_ids == 0
    fragment = set(
        (example.position_ids[~encoder] + 1).tolist()
    )  # a row has the position of the token before
    size = len(encoder)
    mask = np.zeros((size, size), bool)
    for query in range(size):
        for key in range(size):
            if encoder[query]:
                mask[query, key] = encoder[key]
            elif encoder[key]:
                mask[query, key] = int(example.position_ids[key]) not in fragment
            else:
                mask[query, key] = key <= query
    return mask


def unilmv2(example: Example) -> np.ndarray:
    """The paper's figure: blocks of chosen positions in the order of factorisation."""
    step_of = {}  # position -> number of its block
    context = int(np.argmax(example.tokens == SPECIAL.sep)) + 1
    chosen = (len(example.tokens) - context) // 2
    for row in range(context + chosen, len(example.tokens)):
        step_of[int(example.position_ids[row])] = -int(example.ord[row])
    kind = ["context"] * context + ["original"] * chosen + ["pseudo"] * chosen
    size = len(kind)
    mask = np.zeros((size, size), bool)
    for query in range(size):
        for key in range(size):
            step_q = step_of.get(int(example.position_ids[query]), 0)
            step_k = step_of.get(int(example.position_ids[key]), 0)
            if kind[key] == "context":
                seen = True
            elif kind[query] == "context":
                seen = False
            elif kind[key] == "original":
                seen = step_k <= step_q if kind[query] == "original" else step_k < step_q
            else:
                seen = kind[query] == "pseudo" and step_k == step_q
            mask[query, key] = seen
    return mask


def xlnet(example: Example) -> np.ndarray:
    """Content sees the tokens without a rank in its part, those of earlier ranks and itself; a query not its own token.

    Targets, SEP and CLS have ranks. Between the ranks of two parts one number is left out. A memory is a part of its
    own, before the others.
    """
    content = int(np.argmax(example.tokens == SPECIAL.cls)) + 1
    marks = np.flatnonzero(np.isin(example.tokens[:content], (SPECIAL.sep, SPECIAL.cls))).tolist()
    ranked = {*example.position_ids[content:].tolist(), *marks}
    ranks = {int(example.ord[at]) for at in ranked}
    memory = int(example.block_position_ids.sum())
    first = 2 if memory else 1
    second = next(number for number in range(first, first + len(ranks) + 1) if number not in ranks)
    part = (example.ord[:content] >= second).astype(int)
    part[:memory] = -1
    assert (np.diff(part) >= 0).all()
    size = len(example.tokens)
    mask = np.zeros((size, size), bool)
    for query in range(size):
        at = int(example.position_ids[query])
        for key in range(content):
            if part[key] != part[at]:
                mask[query, key] = part[key] < part[at]
            elif key not in ranked:
                mask[query, key] = True
            elif at in ranked:
                earlier = example.ord[key] < example.ord[at]
                mask[query, key] = earlier or (key == at and query < content)
    return mask


# The text of one document


def from_targets(example: Example) -> np.ndarray:
    return example.targets[example.weights > 0]


def rebuilt_prefix(example: Example) -> np.ndarray:
    return np.concatenate([example.tokens[1:][example.weights[1:] == 0], from_targets(example)])


def rebuilt_in_place(example: Example) -> np.ndarray:
    """Text and targets where they stand; a swapped pair is put back."""
    predicted = (example.weights > 0) & (np.arange(len(example.tokens)) > 0)
    whole = np.where(predicted, example.targets, example.tokens)
    middle = int(np.argmax(whole == SPECIAL.sep))
    first, second = whole[1:middle], whole[middle + 1 : -1]
    swapped = example.weights[0] > 0 and example.targets[0] == 1
    return np.concatenate([second, first] if swapped else [first, second])


def rebuilt_reordered(example: Example) -> np.ndarray:
    """The tokens of these tests count up, so that sorted they are the text; eos is last."""
    text = rebuilt_in_place(example)
    words = np.sort(text[text != SPECIAL.eos])
    return np.concatenate([words, text[text == SPECIAL.eos]])


def rebuilt_t5(example: Example, first: int = 0) -> np.ndarray:
    """Args: first: tokens before the text."""
    spans, current = [], []
    answers = from_targets(example)
    for token in answers[1:-1].tolist():
        if token in SENTINELS:
            spans.append(current)
            current = []
        else:
            current.append(token)
    spans.append(current)
    text = []
    for token in example.tokens[example.weights == 0].tolist()[first:]:
        text += spans.pop(0) if token in SENTINELS else [token]
    return np.array(text, np.int32)


def rebuilt_ul2(example: Example) -> np.ndarray:
    kind = LOSS_NAMES[example.objective[0]]
    assert example.tokens[0] == MODE_TOKENS[kind] and (example.objective == example.objective[0]).all()
    if kind != "continuations":
        return rebuilt_t5(example, 1)
    context, rest = example.tokens[example.weights == 0][1:], from_targets(example)
    assert not len(rest) or context[-1] == SPECIAL.eos
    return np.concatenate([context[:-1], rest]) if len(rest) else context


def rebuilt_diffusion(example: Example) -> np.ndarray:
    masked = example.weights > 0
    assert (masked == (example.tokens == SPECIAL.mask)).all()
    return np.where(masked, example.targets, example.tokens)


def rebuilt_mass(example: Example) -> np.ndarray:
    text = example.tokens[example.segment_ids == 0].copy()
    decoder = example.segment_ids == 1
    before = example.position_ids[decoder]
    assert not decoder.any() or example.tokens[decoder][0] == text[before[0]]
    text[before + 1] = example.targets[decoder]
    return text[1:-1]


def rebuilt_unilmv2(example: Example) -> np.ndarray:
    context = int(np.argmax(example.tokens == SPECIAL.sep)) + 1
    text = np.where(example.weights > 0, example.targets, example.tokens)[:context]
    for row in range(context, len(example.tokens)):
        answer = example.targets[row] if example.weights[row] > 0 else example.tokens[row]
        assert text[example.position_ids[row]] == answer
    return text[1:-1]


def rebuilt_xlnet(example: Example) -> np.ndarray:
    content = int(np.argmax(example.tokens == SPECIAL.cls)) + 1
    for row in range(content, len(example.tokens)):
        at = example.position_ids[row]
        assert example.tokens[at] == example.targets[row] and example.ord[at] == -example.ord[row]
        assert example.segment_ids[at] == example.segment_ids[row]
    return example.tokens[: content - 1][example.tokens[: content - 1] != SPECIAL.sep]


def rebuilt_middle(example: Example) -> np.ndarray:
    """A cut text has [CLS] first, [SEP] before its suffix and [MASK] before its middle, or its prefix and middle."""
    answers = from_targets(example).tolist()
    if answers[0] != SPECIAL.cls:
        return np.array(answers, np.int32)
    suffix, middle = answers.index(SPECIAL.sep), answers.index(SPECIAL.mask)
    prefix, end = answers[1:suffix], [SPECIAL.eos] if answers[-1] == SPECIAL.eos else []
    last = answers[middle + 1 : len(answers) - len(end)]
    return np.array([*prefix, *last, *answers[suffix + 1 : middle], *end], np.int32)


def is_exchanged(example: Example) -> bool:
    """Whether B is another document's, or stands before A."""
    if (example.objective == LOSS_NAMES.index("permutation")).all():
        text = rebuilt_xlnet(example)
        return bool((np.diff(text[text != SPECIAL.eos]) != 1).any())
    exchanged = [LOSS_NAMES.index(name) for name in ("next_sentence", "sentence_distance")]
    return bool(example.weights[0] > 0 and example.objective[0] in exchanged)


@dataclasses.dataclass(frozen=True)
class Recipe:
    """How one objective is tested."""

    name: str
    mask: Callable[[Example], np.ndarray]
    rebuilt: Callable[[Example], np.ndarray]
    config: dict[str, Any] = dataclasses.field(default_factory=dict)
    answers_are_inputs: bool = True  # some row holds what another one predicts


UL2_TOKENS = {"regular_token": 110, "extreme_token": 111, "sequential_token": 112}
MODE_TOKENS = dict(zip(("regular_spans", "extreme_spans", "continuations"), UL2_TOKENS.values(), strict=True))
ALL_MASKED = {"mask_token_prob": 1.0, "random_token_prob": 0.0}  # a kept token is a leak by intention

RECIPES = {
    "causal": Recipe("causal", causal, from_targets),
    "fill_in_middle": Recipe("fill_in_middle", causal, rebuilt_middle),
    "fill_in_middle, always": Recipe("fill_in_middle", causal, rebuilt_middle, {"rate": 1.0}),
    "prefix_lm": Recipe("prefix_lm", from_sop, rebuilt_prefix),
    "roberta": Recipe("masked_lm", everything, rebuilt_in_place, ALL_MASKED, False),
    "bert": Recipe("masked_lm", everything, rebuilt_in_place, ALL_MASKED | {"next_sentence": True}, False),
    "masked_diffusion": Recipe("masked_diffusion", everything, rebuilt_diffusion, {}, False),
    "spanbert": Recipe("spanbert", everything, rebuilt_in_place, ALL_MASKED, False),
    "albert": Recipe("albert", everything, rebuilt_in_place, ALL_MASKED, False),
    "sentence_reordering": Recipe("sentence_reordering", everything, rebuilt_reordered, ALL_MASKED, False),
    "sentence_distance": Recipe(
        "sentence_distance", everything, rebuilt_in_place, ALL_MASKED | {"far_prob": 0.0}, False
    ),
    "relevance": Recipe("relevance", everything, rebuilt_in_place, ALL_MASKED, False),
    "ernie": Recipe("ernie", everything, rebuilt_in_place, ALL_MASKED, False),
    "unilm": Recipe("unilm", unilm, rebuilt_in_place, ALL_MASKED, False),
    "t5": Recipe("t5", from_sop, rebuilt_t5),
    "ul2": Recipe("ul2", from_sop, rebuilt_ul2, UL2_TOKENS),
    "bart": Recipe("bart", from_sop, from_targets),
    "mass": Recipe("mass", mass, rebuilt_mass, ALL_MASKED),
    "unilmv2": Recipe("unilmv2", unilmv2, rebuilt_unilmv2),
    "xlnet": Recipe("xlnet", xlnet, rebuilt_xlnet),
    "xlnet, one text": Recipe("xlnet", xlnet, rebuilt_xlnet, {"two_texts": False}),
    "xlnet with memory": Recipe("xlnet", xlnet, rebuilt_xlnet, {"memory_length": 4}),
}


def span_boundaries(example: Example) -> np.ndarray:
    """What the span-boundary objective needs, int64 `[rows with loss, 4]`.

    Columns: the row, the row before its span, the row after its span, its place in the span (1, 2, ...).
    The outer rows are never predicted themselves: CLS or SEP at the least stands there.
    """
    predicted = np.concatenate([[0], (example.weights > 0).astype(np.int64), [0]])
    change = np.diff(predicted)
    starts, ends = np.flatnonzero(change == 1), np.flatnonzero(change == -1)
    rows = np.flatnonzero(predicted[1:-1])
    span = np.searchsorted(starts, rows, side="right") - 1
    return np.stack([rows, starts[span] - 1, ends[span], rows - starts[span] + 1], axis=1)
