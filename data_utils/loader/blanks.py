"""Samples of blank infilling as texts with blanks, to be filled by a model and compared with the original."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from data_utils.common.batch_fields import Example
from data_utils.loader.loader import SampleLoader
from data_utils.objectives.blank_infilling import TOKEN
from data_utils.tokenizers.special_tokens import SpecialTokens

MOST_BLANKS = 8  # of a prompt
MOST_TOKENS = 150  # of a prompt; longer texts are cut


@dataclass(frozen=True)
class Prompt:
    """A text with short blanks, and the original tokens of each blank."""

    context: list[int]  # part A, cut at the end
    originals: list[list[int]]


def blanked_examples(loader: SampleLoader, num_samples: int) -> Iterator[Example]:
    """The documents of the token objective with at least one blank among the first samples, in their order."""
    for index in range(num_samples):
        for example in Example.from_fields(loader.batch(np.array([index]))[0]).documents():
            if example.objective[0] == TOKEN and (example.ord > 0).any():
                yield example


def blank_tokens(example: Example, special: SpecialTokens) -> list[list[int]]:
    """Token ids of each blank, in text order: part B has the blank's position, and its spans end with eop."""
    in_part_b = example.ord > 0
    positions, targets = example.position_ids[in_part_b], example.targets[in_part_b]
    spans = [targets[positions == position].tolist() for position in np.unique(positions)]
    return [[token for token in span if token not in (special.eop, special.eos)] for span in spans]


def prompts(loader: SampleLoader, num_samples: int, special: SpecialTokens) -> Iterator[Prompt]:
    """The beginnings of `blanked_examples` that hold a blank."""
    for example in blanked_examples(loader, num_samples):
        prompt = cut(example, special)
        if prompt.originals:
            yield prompt


def cut(example: Example, special: SpecialTokens) -> Prompt:
    """The beginning of an example's text with at most MOST_BLANKS blanks."""
    context = example.tokens[example.ord == 0][:MOST_TOKENS].tolist()
    blanks = [position for position, token in enumerate(context) if token == special.mask]
    if len(blanks) > MOST_BLANKS:
        context = context[: blanks[MOST_BLANKS]]
    return Prompt(context, blank_tokens(example, special)[: min(len(blanks), MOST_BLANKS)])
