"""Fine-tuning inputs: worked examples, masks against the papers, no leak, packing."""

from __future__ import annotations

import numpy as np
import pytest
from support.mask_rule import allowed, leaks
from support.recipes import SPECIAL, encoder_decoder

from data_utils.base.errors import DataError
from data_utils.objectives import LOSS_NAMES, Vocabulary
from data_utils.objectives.blank_infilling import BlankInfilling, BlankInfillingConfig
from data_utils.objectives.fine_tuning import (
    glm_cloze,
    glm_seq2seq,
    pack,
    pseudo_mask_seq2seq,
    unilm_seq2seq,
)
from data_utils.objectives.planes import Example

SOURCE, TARGET = list(range(1000, 1006)), list(range(1100, 1104))


def mask_of(example: Example) -> np.ndarray:
    return allowed(example.doc, example.ord, example.grp)


def no_leak(example: Example) -> bool:
    """[SEP] ends the source too, so its prediction is left out."""
    words = np.where(example.targets >= 1000, example.weights, 0.0)
    return not leaks(example.tokens, example.targets, words, mask_of(example))


def test_a_cloze_pattern_with_its_verbalizers():
    pattern = [1000, 1001, SPECIAL.mask, 1002]
    good, bad = glm_cloze(pattern, [[1200], [1201, 1202]], SPECIAL)
    assert good.tokens.tolist() == [101, 1000, 1001, 103, 1002, 106, 1200]
    assert good.targets.tolist() == [0, 0, 0, 0, 0, 1200, 107]
    assert bad.tokens.tolist() == [101, 1000, 1001, 103, 1002, 106, 1201, 1202]
    assert bad.position_ids.tolist() == [0, 1, 2, 3, 4, 3, 3, 3]
    assert bad.block_position_ids.tolist() == [0, 0, 0, 0, 0, 1, 2, 3]
    assert bad.weights.tolist() == [0, 0, 0, 0, 0, 1, 1, 1]
    assert (mask_of(bad) == encoder_decoder(8, 5)).all() and no_leak(good) and no_leak(bad)


def test_a_cloze_has_the_form_of_pretraining():
    made = BlankInfilling(BlankInfillingConfig(), Vocabulary(SPECIAL, 3000), 1, 64)
    (cloze,) = glm_cloze([1000, SPECIAL.mask, 1003], [[1001, 1002]], SPECIAL)
    pretraining = made.build(np.arange(1000, 1004), [(1, 3)], [0])
    for name in Example.__dataclass_fields__:
        assert (getattr(cloze, name) == getattr(pretraining, name)).all(), name


@pytest.mark.parametrize("pattern", [[1000], [SPECIAL.mask, 1000, SPECIAL.mask]])
def test_a_cloze_needs_one_blank(pattern):
    with pytest.raises(DataError, match="must have one"):
        glm_cloze(pattern, [[1200]], SPECIAL)
    with pytest.raises(DataError, match="empty"):
        glm_cloze([SPECIAL.mask], [[]], SPECIAL)


def test_glm_sequence_to_sequence():
    example = glm_seq2seq(SOURCE, TARGET, SPECIAL)
    assert example.tokens.tolist() == [101, *SOURCE, 103, 106, *TARGET]
    assert example.targets[example.weights > 0].tolist() == [*TARGET, SPECIAL.eop]
    assert set(example.position_ids[8:]) == {7} and example.block_position_ids[8:].tolist() == [1, 2, 3, 4, 5]
    assert (mask_of(example) == encoder_decoder(13, 8)).all() and no_leak(example)


@pytest.mark.parametrize("ratio", [0.01, 0.5, 1.0])
def test_unilm_sequence_to_sequence(ratio):
    seen = set()
    for seed in range(60):
        example = unilm_seq2seq(SOURCE, TARGET, SPECIAL, ratio, np.random.default_rng(seed))
        chosen = np.flatnonzero(example.weights)
        assert len(chosen) == max(1, round(5 * ratio)) and chosen.min() >= 8
        assert (example.tokens[chosen] == SPECIAL.mask).all()
        text = np.where(example.weights > 0, example.targets, example.tokens)
        assert text.tolist() == [101, *SOURCE, 102, *TARGET, 102]
        assert (mask_of(example) == encoder_decoder(13, 8)).all() and no_leak(example)
        assert example.segment_ids.tolist() == [4] * 8 + [5] * 5
        seen.update(chosen.tolist())
    assert seen == set(range(8, 13)), "every token of the target is masked at some time, its end included"


def test_pseudo_masks_predict_every_token_of_the_target():
    example = pseudo_mask_seq2seq(SOURCE, TARGET, SPECIAL)
    assert example.tokens.tolist() == [101, *SOURCE, 102, *TARGET, 102, *[103] * 5]
    assert example.targets[example.weights > 0].tolist() == [*TARGET, 102]
    assert (example.position_ids[13:] == example.position_ids[8:13]).all()
    expected = np.zeros((18, 18), bool)
    expected[:13, :13] = encoder_decoder(13, 8)
    for j in range(5):
        expected[13 + j, : 8 + j] = True  # the source and the tokens before
        expected[13 + j, 13 + j] = True
    assert (mask_of(example) == expected).all() and no_leak(example)
    late = np.where(example.ord < 0, example.ord - 1, example.ord)
    assert leaks(example.tokens, example.targets, example.weights, allowed(example.doc, late, example.grp))


def test_packed_examples_do_not_see_each_other():
    examples = [glm_seq2seq(SOURCE, TARGET, SPECIAL), pseudo_mask_seq2seq(SOURCE, TARGET, SPECIAL)]
    row = pack(examples, 40, SPECIAL.pad)
    mask = mask_of(row)
    assert (mask[:13, :13] == mask_of(examples[0])).all() and (
        mask[13:31, 13:31] == mask_of(examples[1])
    ).all()
    assert mask.sum() == mask[:13, :13].sum() + mask[13:31, 13:31].sum()
    assert (row.tokens[31:] == SPECIAL.pad).all() and (row.doc[31:] == -1).all()
    for packed, example in zip(row.documents(), examples, strict=True):
        assert (packed.tokens == example.tokens).all() and (packed.weights == example.weights).all()
    assert LOSS_NAMES[row.objective[0]] == "document"
    with pytest.raises(DataError, match="room for 30"):
        pack(examples, 30, SPECIAL.pad)
