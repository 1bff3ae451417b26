"""Blank infilling on text of distinct tokens: how to make Examples, and how to take them apart."""

from __future__ import annotations

import numpy as np
from support.data.recipes import FIRST_TEXT_TOKEN

from data_utils.common.batch_fields import Example
from data_utils.objectives.blank_infilling import BlankInfilling, BlankInfillingConfig
from data_utils.tokenizers.special_tokens import SpecialTokens
from data_utils.tokenizers.vocabulary import Vocabulary

SPECIAL = SpecialTokens(
    cls=101, sep=102, mask=103, smask=104, gmask=105, sop=30522, eop=30523, eos=0, pad=1, unk=100, dblock=99
)
SENTENCE_END = np.zeros(3000, bool)
SENTENCE_END[FIRST_TEXT_TOKEN::7] = True
WORD_START = ~((np.arange(3000) >= FIRST_TEXT_TOKEN) & (np.arange(3000) % 3 == 2))  # others continue a word
VOCABULARY = Vocabulary(SPECIAL, 3000, SENTENCE_END, WORD_START)
MIXED = {"token_prob": 0.4, "sentence_prob": 0.3, "document_min_ratio": 0.25}


def objective(
    sequence_length: int = 512, seed: int = 5, row_length: int | None = None, **config
) -> BlankInfilling:
    return BlankInfilling(BlankInfillingConfig(**config), VOCABULARY, seed, sequence_length, row_length)


def spans_of(example: Example) -> list[tuple[np.ndarray, np.ndarray, int, int]]:
    """Part B as (inputs, targets, pos0, first row), in its own order."""
    starts = np.flatnonzero(example.block_position_ids == 1)
    ends = [*starts, len(example.tokens)][1:]
    return [
        (example.tokens[a:b], example.targets[a:b], int(example.position_ids[a]), int(a))
        for a, b in zip(starts, ends, strict=True)
    ]


def masked_positions(example: Example) -> list[tuple[int, int]]:
    """Spans as [start, end) in the chunk, in text order."""
    found, removed = [], 0
    for _, targets, position, _ in sorted(spans_of(example), key=lambda span: span[2]):
        length = len(targets) - (targets[-1] == SPECIAL.eop)
        start = position + removed - 1  # the CLS is not part of the chunk
        found.append((start, start + length))
        removed += length - 1
    return found


def rebuilt(example: Example) -> np.ndarray:
    """The chunk, put together from part A and the targets of part B."""
    part_a = example.tokens[example.ord == 0]
    answers = {position: targets for _, targets, position, _ in spans_of(example)}
    chunks = []
    for position, token in enumerate(part_a):
        if position in answers:
            targets = answers[position]
            chunks.extend(targets[:-1] if targets[-1] == SPECIAL.eop else targets)
        else:
            chunks.append(token)
    assert chunks[0] == SPECIAL.cls
    return np.array(chunks[1:], np.int32)


def check_layout(example: Example, mask_token: int) -> None:
    """Everything the definition says about positions, order, inputs and targets of one document."""
    size_a = int((example.ord == 0).sum())
    assert (example.ord[size_a:] == np.arange(1, len(example.ord) - size_a + 1)).all()
    assert (example.grp == 0).all() and (example.block_position_ids[:size_a] == 0).all()
    assert (example.position_ids[:size_a] == np.arange(size_a)).all()
    assert (example.weights == (example.ord > 0)).all() and example.weights.dtype == np.float32
    assert (example.targets[:size_a] == 0).all()
    mask_at = np.flatnonzero(example.tokens[:size_a] == mask_token)
    spans = spans_of(example) if len(example.ord) > size_a else []
    assert sorted(position for _, _, position, _ in spans) == mask_at.tolist()
    for inputs, targets, position, row in spans:
        assert inputs[0] == SPECIAL.sop and (inputs[1:] == targets[:-1]).all()
        assert SPECIAL.eop not in targets[:-1]
        rows = slice(row, row + len(inputs))
        assert (example.position_ids[rows] == position).all()
        assert (example.block_position_ids[rows] == np.arange(1, len(inputs) + 1)).all()


def poisson(longest: int, mean: float = 3.0) -> np.ndarray:
    lengths = np.arange(1, longest + 1)
    weights = np.cumprod(mean / lengths)
    return weights / weights.sum()
