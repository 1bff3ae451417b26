"""Documents of labelled samples in the fields of pretraining, and random numbers of a sample.

fill_blanks           GLM: a context with blanks, and part B that fills them
left_to_right         GPT: all from left to right
after_prefix          prefix LM, T5, BART: a context that is read both ways, and what follows it
with_pseudo_masks     UniLM, UniLMv2: the same, where a mask at the position of each token predicts it
partly_masked_target  masked diffusion: a text, and a target of which a random share is masks
document              any other: fields given one by one
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from data_utils.common.batch_fields import Example
from data_utils.common.errors import DataError
from data_utils.common.losses import MASKED
from data_utils.common.seeds import derive_seed
from data_utils.objectives.blank_infilling import DOCUMENT, SENTENCE, TOKEN
from data_utils.tokenizers.special_tokens import SpecialTokens

LOSS_OF_MASK = {"mask": TOKEN, "smask": SENTENCE, "gmask": DOCUMENT}  # blank's token -> number of its loss


class Draws:
    """Random numbers of one purpose, a pure function of (seed, names): the sample, and the epoch where that counts.

    They are made of the raw words of NumPy's Philox, which no version of NumPy may change.
    """

    def __init__(self, seed: int, *names: str | int):
        self._words = np.random.Philox(key=derive_seed(seed, "task", *names))

    def uniform(self, count: int) -> np.ndarray:
        """float64 [count] in [0, 1)."""
        return (self._words.random_raw(count) >> np.uint64(11)) * 2.0**-53

    def chosen(self, total: int, count: int) -> np.ndarray:
        """`count` of the numbers below `total` without replacement, ascending."""
        return np.sort(np.argsort(self.uniform(total), kind="stable")[:count])


def document(
    *, tokens: Sequence[int] | np.ndarray, objective: int, **fields: Sequence | np.ndarray
) -> Example:
    """An Example of one document from sequences of one length; fields not given are 0, positions 0, 1, ..."""
    length = len(tokens)
    sequences = {"tokens": tokens, "position_ids": np.arange(length), **fields}
    weights = np.asarray(sequences.pop("weights", np.zeros(length)), np.float32)
    arrays = {name: np.asarray(values, np.int32) for name, values in sequences.items()}
    for name in ("block_position_ids", "targets", "doc", "ord", "grp", "segment_ids"):
        arrays.setdefault(name, np.zeros(length, np.int32))
    arrays["objective"] = np.full(length, objective, np.int32)
    assert len(weights) == length and all(len(array) == length for array in arrays.values())
    return Example(weights=weights, **arrays)


def fill_blanks(
    context: Sequence[int],
    blanks: Sequence[tuple[int, Sequence[int]]],
    special: SpecialTokens,
    objective: int,
    *,
    ends: bool = True,
    loss: int | None = None,
) -> Example:
    """GLM's `context` with the fillings of its blanks as part B, in the order given; later ones see earlier ones.

    Args:
        context: part A with CLS, and eos where the run's has it.
        blanks: position of each blank in the context and the tokens that fill it.
        ends: each filling ends with eop.
        loss: number of tokens at the end of part B that have a loss; None: all.
    Raises: DataError for a filling without a token.
    """
    size = len(context)
    tokens, positions, targets = list(context), list(range(size)), [0] * size
    block_positions = [0] * size
    for position, filling in blanks:
        if not len(filling):
            raise DataError("the text for the blank is empty; it needs at least one token.")
        inputs = [special.sop, *filling] if ends else [special.sop, *filling[:-1]]
        tokens += inputs
        targets += [*filling, special.eop] if ends else filling
        positions += [position] * len(inputs)
        block_positions += range(1, len(inputs) + 1)
    added = len(tokens) - size
    weights = np.zeros(len(tokens))
    weights[size if loss is None else len(tokens) - loss :] = 1.0
    return document(
        tokens=tokens,
        position_ids=positions,
        block_position_ids=block_positions,
        targets=np.where(weights > 0, targets, 0),
        weights=weights,
        ord=[*[0] * size, *range(1, added + 1)],
        objective=objective,
    )


def left_to_right(tokens: Sequence[int], loss: int, start: Sequence[int], objective: int) -> Example:
    """Example that predicts each token from those before it, as in `causal`.

    Args: loss: number of tokens at the end that have a loss. start: `Inputs.start`; without one the first token cannot
        be predicted.
    """
    inputs, targets = [*start, *tokens[:-1]], [*tokens[1 - len(start) :]]
    weights = np.zeros(len(inputs))
    weights[len(inputs) - min(loss, len(inputs)) :] = 1.0
    return document(
        tokens=inputs,
        targets=np.where(weights > 0, targets, 0),
        weights=weights,
        ord=np.arange(len(inputs)),
        objective=objective,
    )


def after_prefix(
    context: Sequence[int],
    start: int,
    targets: Sequence[int],
    objective: int,
    *,
    first_position: int | None = None,
    segment: int = 0,
    group: int = 0,
) -> Example:
    """`context` of order 0, then `start` and the targets from left to right, each predicted from those before.

    Args:
        start: the token that predicts the first target.
        first_position: of `start`; None: it goes on where the context ends.
        segment: of what follows the context.
        group: of the context.
    """
    size, length = len(context), len(targets)
    first = size if first_position is None else first_position
    return document(
        tokens=[*context, start, *targets[:-1]],
        position_ids=[*range(size), *range(first, first + length)],
        targets=[*[0] * size, *targets],
        weights=[*[0.0] * size, *[1.0] * length],
        ord=[*[0] * size, *range(1, length + 1)],
        grp=[*[group] * size, *[0] * length],
        segment_ids=[*[0] * size, *[segment] * length],
        objective=objective,
    )


def partly_masked_target(
    context: Sequence[int], target: Sequence[int], mask: int, share: float, draws: Draws, objective: int
) -> Example:
    """`context`, none of it masked, and a target whose tokens are masks with probability `share` (LLaDA).

    A mask has the weight 1 / `share`. The loss is divided by the tokens of targets: those of the context have the
    number of a loss that is divided by weights, which are 0.
    """
    size = len(context)
    tokens = np.array([*context, *target], np.int32)
    is_mask = np.arange(len(tokens)) >= size
    is_mask[size:] &= draws.uniform(len(target)) < share
    example = document(
        tokens=np.where(is_mask, mask, tokens),
        targets=np.where(is_mask, tokens, 0),
        weights=is_mask / share,
        objective=objective,
    )
    example.objective[:size] = MASKED.number
    return example


def with_pseudo_masks(
    context: Sequence[int],
    seen: Sequence[int] | np.ndarray,
    masks: Sequence[int] | np.ndarray,
    targets: Sequence[int],
    objective: int,
    *,
    segments: tuple[int, int] = (0, 0),
    sees_itself: bool = True,
) -> Example:
    """`context`, the tokens that follow it, and for each of them a mask at its position, which predicts it.

    Token j has order j; its mask has order -j and group j, so that it sees the context, the tokens before j and itself.

    Args:
        seen: tokens that follow the context, as later ones see them.
        masks: what is read in their stead where they are predicted.
        segments: of the context, of what follows it.
        sees_itself: false: masks have no group, as XLNet's query stream.
    """
    size, length = len(context), len(targets)
    steps, positions = np.arange(1, length + 1), size + np.arange(length)
    zeros = [0] * (size + length)
    return document(
        tokens=[*context, *seen, *masks],
        position_ids=[*range(size), *positions, *positions],
        targets=[*zeros, *targets],
        weights=[*zeros, *[1.0] * length],
        ord=[*[0] * size, *steps, *-steps],
        grp=[*zeros, *(steps if sees_itself else 0 * steps)],
        segment_ids=[*[segments[0]] * size, *[segments[1]] * (2 * length)],
        objective=objective,
    )


def without_loss(example: Example) -> Example:
    """The same document without targets: its parts say what is scored."""
    zeros = np.zeros(len(example.tokens), np.int32)
    fields = {name: getattr(example, name) for name in Example.__dataclass_fields__}
    return Example(**fields | {"targets": zeros, "weights": zeros.astype(np.float32)})
