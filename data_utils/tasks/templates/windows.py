"""Log probabilities of a text, window by window.

Window i begins at token i x stride of a text and has W = sequence_length - 1 of its tokens (CLS and the blank are not
counted, as in published figures). It predicts what the window before did not reach. So each token, or each but the
first, is predicted exactly once.

    glm, both ways        [CLS] what the window before reached [MASK]   sop the new tokens
    glm, left to right    [CLS] first token [MASK]                      sop the rest, of which the new have a loss
    prefix                [CLS] what the window before reached          sop the new tokens
    causal                <eos> all, of which the new have a loss
"""

from __future__ import annotations

from dataclasses import dataclass

from data_utils.common.batch_fields import Example
from data_utils.tasks.templates.examples import after_prefix, fill_blanks, left_to_right
from data_utils.tasks.templates.inputs import Inputs

FORMS = ("glm", "causal", "prefix")


@dataclass(frozen=True)
class Window:
    """Tokens [start, end) of a document; those from `new` on are predicted."""

    start: int
    new: int
    end: int


def windows(tokens: int, size: int, stride: int, first: int = 1) -> list[Window]:
    """The windows of a document.

    Args:
        size: tokens of a window.
        stride: tokens between the starts of two, below `size`.
        first: the first token that is predicted, 0 or 1.
    """
    assert 1 <= stride < size
    result = [Window(0, first, min(size, tokens))]
    while result[-1].end < tokens:
        previous = result[-1]
        start = previous.start + stride
        result.append(Window(start, previous.end, min(start + size, tokens)))
    return result


def continued(inputs: Inputs, tokens: list[int], new: int, *, bidirectional: bool) -> Example:
    """A text whose last `new` tokens have a loss, and no end. Args: bidirectional: GLM reads the context both ways."""
    special, input_format = inputs.special, inputs.input_format
    if input_format.name == "causal":
        return left_to_right(tokens, new, inputs.start, input_format.loss())
    known = len(tokens) - new
    if input_format.name == "prefix":
        context, targets = tokens[:known], tokens[known:]
        return after_prefix([special.cls, *context], special.sop, targets, input_format.loss())
    mask, loss = inputs.mask()
    if not bidirectional:
        known = min(known, 1)
    context = [special.cls, *tokens[:known], mask]
    return fill_blanks(context, [(known + 1, tokens[known:])], special, loss, ends=False, loss=new)
