"""Fine-tuning inputs in the arrays of pretraining: classification by cloze, and sequence to sequence.

Each function turns the token ids of one labelled sample into an Example. Only the masks of UniLM are random, and the
caller gives their generator. These are plain NumPy functions, because fine-tuning sets are small.

    glm_cloze             GLM (arXiv:2103.10360, section 2.3): pattern with a blank, which the verbalizer fills
    glm_seq2seq           GLM: source and [MASK] as context, target as the blank's filling
    unilm_seq2seq         UniLM v1 (arXiv:1905.03197): tokens of the target masked in place, and [SEP] at its end
    pseudo_mask_seq2seq   UniLMv2 (arXiv:2002.12804): every target token predicted by a pseudo mask
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from data_utils.base.errors import DataError
from data_utils.objectives.blank_infilling import DOCUMENT, TOKEN
from data_utils.objectives.planes import Example
from data_utils.objectives.unilm import SEQ2SEQ_LOSS
from data_utils.text.special_tokens import SpecialTokens


def glm_cloze(
    pattern: Sequence[int], verbalizers: Sequence[Sequence[int]], special: SpecialTokens
) -> list[Example]:
    """One Example for each verbalizer, the label's words; the class is the one whose loss sum is least.

    Args:
        pattern: the text with exactly one [MASK], without CLS.
        verbalizers: token ids of each label's words, in the order of the labels.
    Raises: DataError for a pattern without exactly one [MASK], or an empty verbalizer.
    """
    blanks = [i for i, token in enumerate(pattern) if token == special.mask]
    if len(blanks) != 1:
        raise DataError(f"the cloze pattern has {len(blanks)} [MASK] tokens; it must have one.")
    return [_blank(list(pattern), blanks[0], words, special, TOKEN) for words in verbalizers]


def glm_seq2seq(source: Sequence[int], target: Sequence[int], special: SpecialTokens) -> Example:
    """`[CLS] source [MASK]` with the target as the filling of the blank; the last target is eop."""
    return _blank([*source, special.mask], len(source), target, special, DOCUMENT)


def _blank(
    context: list[int], at: int, filling: Sequence[int], special: SpecialTokens, objective: int
) -> Example:
    """Context with a blank at position `at`, filled by part B, as in blank infilling."""
    if not len(filling):
        raise DataError("the text that fills the blank is empty; give at least one token.")
    size, length = len(context) + 1, len(filling) + 1
    zeros = np.zeros(size, np.int32)
    steps = np.arange(1, length + 1)
    return _example(
        tokens=[special.cls, *context, special.sop, *filling],
        position_ids=[*range(size), *[at + 1] * length],
        block_position_ids=[*zeros, *steps],
        targets=[*zeros, *filling, special.eop],
        weights=[*zeros, *np.ones(length)],
        ord=[*zeros, *steps],
        objective=objective,
    )


def unilm_seq2seq(
    source: Sequence[int],
    target: Sequence[int],
    special: SpecialTokens,
    masked_ratio: float,
    rng: np.random.Generator,
) -> Example:
    """`[CLS] source [SEP] target [SEP]` with random tokens of the target and its [SEP] masked.

    Args:
        masked_ratio: part of the target, its [SEP] counted, that is masked; 0.2 to 0.7 in the paper.
        rng: seeded by the caller for the sample, for example with `derive_seed(seed, sample)`.
    Masking [SEP] teaches where to stop. At least one token is masked.
    """
    first, second = [special.cls, *source, special.sep], [*target, special.sep]
    tokens = np.array([*first, *second], np.int32)
    count = max(1, round(masked_ratio * len(second)))
    chosen = len(first) + rng.permutation(len(second))[:count]
    targets, weights = np.zeros(len(tokens), np.int32), np.zeros(len(tokens))
    targets[chosen], weights[chosen] = tokens[chosen], 1.0
    tokens[chosen] = special.mask
    return _example(
        tokens=tokens,
        position_ids=np.arange(len(tokens)),
        targets=targets,
        weights=weights,
        ord=[*[0] * len(first), *range(1, len(second) + 1)],
        segment_ids=[*[4] * len(first), *[5] * len(second)],
        objective=SEQ2SEQ_LOSS.number,
    )


def pseudo_mask_seq2seq(source: Sequence[int], target: Sequence[int], special: SpecialTokens) -> Example:
    """`[CLS] source [SEP]`, the target with [SEP], and a pseudo mask for each of its tokens.

    Target token j has order j; its pseudo mask, at the same position, has order -j and group j: it sees the
    source, the tokens before j and itself.
    """
    first, second = [special.cls, *source, special.sep], [*target, special.sep]
    length = len(second)
    steps = np.arange(1, length + 1)
    none, zeros = np.zeros(len(first), np.int32), np.zeros(len(first) + length, np.int32)
    positions = len(first) + np.arange(length)
    return _example(
        tokens=[*first, *second, *[special.mask] * length],
        position_ids=[*range(len(first)), *positions, *positions],
        targets=[*zeros, *second],
        weights=[*zeros, *np.ones(length)],
        ord=[*none, *steps, *-steps],
        grp=[*zeros, *steps],
        segment_ids=[*[4] * len(first), *[5] * (2 * length)],
        objective=SEQ2SEQ_LOSS.number,
    )


def _example(*, tokens, position_ids, targets, weights, ord, objective, **more) -> Example:
    """An Example of one document from sequences of one length; planes not given are 0."""
    length = len(tokens)
    given = {"tokens": tokens, "position_ids": position_ids, "targets": targets, "ord": ord, **more}
    planes = {name: np.asarray(values, np.int32) for name, values in given.items()}
    zeros = np.zeros(length, np.int32)
    for name in ("block_position_ids", "grp", "segment_ids", "doc"):
        planes.setdefault(name, zeros)
    planes["objective"] = np.full(length, objective, np.int32)
    assert all(len(plane) == length for plane in planes.values())
    return Example(weights=np.asarray(weights, np.float32), **planes)


def pack(examples: Sequence[Example], row_length: int, pad: int) -> Example:
    """Several Examples as the documents of one padded row. Raises DataError if they do not fit."""
    length = sum(len(example.tokens) for example in examples)
    if length > row_length:
        raise DataError(f"{len(examples)} Examples have {length} tokens; a row has room for {row_length}.")
    spare = row_length - length
    planes = {
        name: np.concatenate([*(getattr(example, name) for example in examples), np.zeros(spare, np.int32)])
        for name in Example.__dataclass_fields__
    }
    numbers = np.repeat(np.arange(len(examples)), [len(example.tokens) for example in examples])
    planes["doc"] = np.concatenate([numbers, np.full(spare, -1)]).astype(np.int32)
    planes["tokens"][length:] = pad
    planes["weights"] = planes["weights"].astype(np.float32)
    return Example(**planes)
