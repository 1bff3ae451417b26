"""The options of blank infilling."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from support.data.blank_infilling import (
    SPECIAL,
    VOCABULARY,
    WORD_START,
    check_layout,
    masked_positions,
    objective,
    poisson,
    rebuilt,
    spans_of,
)
from support.data.chi_square import chi_square, chi_square_limit
from support.data.recipes import many, text_of

from data_utils.common.batch_fields import Example
from data_utils.common.errors import ConfigError
from data_utils.loader.loader import collate
from data_utils.objectives.blank_infilling import TOKEN, BlankInfilling, BlankInfillingConfig


def test_single_span_prob_precedes_the_mode():
    examples = many(objective(token_prob=0.0, single_span_prob=0.5), text_of(100), 2000)
    single = [example for example in examples if example.objective[0] == TOKEN]
    assert abs(len(single) / 2000 - 0.5) < 5 * np.sqrt(0.25 / 2000)
    assert all(len(spans_of(example)) == 1 for example in single)
    lengths = np.array([len(spans_of(example)[0][1]) - 1 for example in single])
    counts = np.bincount(lengths, minlength=9)
    observed = np.array([*counts[1:8], counts[8:].sum()])
    p = poisson(39)
    expected = len(single) * np.array([*p[:7], p[7:].sum()])
    assert chi_square(observed, expected) < chi_square_limit(7)


def test_block_mask_prob_hides_inputs_only_and_only_of_the_token_objective():
    made = objective(block_mask_prob=0.3, token_prob=0.5, sentence_prob=0.25)
    hidden = shown = 0
    for sample in range(400):
        example = made.example(text_of(200), sample)
        assert SPECIAL.dblock not in example.tokens[example.ord == 0]
        assert SPECIAL.dblock not in example.targets
        assert (rebuilt(example) == text_of(200)).all()
        for inputs, targets, _, _ in spans_of(example):
            assert inputs[0] == SPECIAL.sop
            same = inputs[1:] == targets[:-1]
            assert (inputs[1:][~same] == SPECIAL.dblock).all()
            if example.objective[0] == TOKEN:
                hidden, shown = hidden + (~same).sum(), shown + same.sum()
            else:
                assert same.all()
    total = hidden + shown
    assert abs(hidden / total - 0.3) < 5 * np.sqrt(0.21 / total)


def test_block_mask_prob_does_not_change_the_spans():
    plain, noisy = (
        objective().example(text_of(300), 1),
        objective(block_mask_prob=0.5).example(text_of(300), 1),
    )
    assert (plain.targets == noisy.targets).all() and (plain.tokens != noisy.tokens).any()


def test_context_mask_ratio_hides_text_near_masks():
    made = objective(context_mask_ratio=0.05, context_mask_range=2)
    for sample in range(100):
        text = text_of(200)
        example = made.example(text, sample)
        part_a = example.tokens[example.ord == 0]
        masks = np.flatnonzero(part_a == SPECIAL.mask)
        hidden = np.flatnonzero(part_a == SPECIAL.dblock)
        assert len(hidden) == int(0.05 * 201)
        assert all(1 <= np.abs(masks - at).min() <= 2 for at in hidden)
        assert part_a[0] == SPECIAL.cls and part_a[-1] in (SPECIAL.eos, SPECIAL.mask)
        again = rebuilt(example)
        assert ((again == text) | (again == SPECIAL.dblock)).all() and len(again) == len(text)
        assert SPECIAL.dblock not in example.targets


def test_random_position_shifts_within_the_limit():
    shifts = []
    made, unshifted = objective(64, random_position=True), objective(64)
    for sample in range(2000):
        shifted = made.example(text_of(40), sample)
        size_a = int((shifted.ord == 0).sum())
        shift = int(shifted.position_ids[0])
        shifts.append(shift / (64 - (size_a - 1)))
        assert shifted.position_ids.max() <= 64
        plain = unshifted.example(text_of(40), sample)
        assert (shifted.position_ids - shift == plain.position_ids).all()
    assert min(shifts) == 0 and max(shifts) == 1
    assert abs(np.mean(shifts) - 0.5) < 5.5 * np.sqrt(1 / 12 / 2000)  # 5, and the grid is coarse


def test_sentinels_replace_mask_and_sop_after_the_first_span():
    made = objective(sentinel_first=2000, sentinel_count=3)
    spans = [(0, 1), (2, 3), (4, 5), (6, 7), (8, 9)]
    example = made.build(text_of(12), spans, order=[4, 2, 0, 1, 3])
    part_a = example.tokens[example.ord == 0]
    assert [int(part_a[1 + start]) for start, _ in spans] == [2002, 2004, 2000, 2000, SPECIAL.mask]
    starts = [int(inputs[0]) for inputs, _, _, _ in spans_of(example)]
    assert starts == [SPECIAL.sop, 2001, 2003, 2005, 2001]
    assert (example.position_ids[example.ord > 0] == 512).all()
    assert (example.block_position_ids[example.ord > 0] == [1, 2] * 5).all()


def test_masked_lm_predicts_in_place():
    made = objective(masked_lm=True)
    text = text_of(512, with_eos=False)
    assert made.row_length < 540
    masked = []
    for example in many(made, text, 300):
        predicted = example.weights > 0
        assert len(example.tokens) == 513 and (example.ord == 0).all()
        assert (example.tokens[predicted] == SPECIAL.mask).all()
        whole = np.where(predicted, example.targets, example.tokens)
        assert (whole[1:] == text).all() and (example.targets[~predicted] == 0).all()
        assert (example.position_ids == np.arange(513)).all()
        masked.append(predicted.sum())
    assert min(masked) >= int(0.15 * 513)
    assert np.mean(masked) < 82  # 76 and half a span: the drawn spans, not the 16 rejections of a tight row


def test_shuffle_spans_off_keeps_the_order_of_the_text():
    for example in many(objective(shuffle_spans=False), text_of(200), 50):
        positions = [position for _, _, position, _ in spans_of(example)]
        assert positions == sorted(positions) and len(positions) > 1


def test_cross_document_attention_joins_the_chunks():
    made = objective(cross_document_attention=True)
    texts = [text_of(100), text_of(150, first=1500), text_of(200, first=2000)]
    batch = collate(made, np.concatenate(texts), [100, 150, 200], [3], [1])
    (document,) = Example.from_fields(batch[0]).documents()
    check_layout(document, SPECIAL.mask)
    assert (rebuilt(document) == np.concatenate(texts)).all()
    assert (document.tokens == SPECIAL.cls).sum() == 1


def word_begins(text: np.ndarray) -> np.ndarray:
    """Places of a text where a word begins, then its end."""
    begins = np.flatnonzero(WORD_START[text])
    return np.array([0, *begins[begins > 0], len(text)])


def test_whole_words_masks_words_and_counts_them():
    text = text_of(120, with_eos=False)
    begins = word_begins(text)
    assert len(begins) - 1 == 80
    lengths, chosen = [], np.zeros(80)
    for example in many(objective(whole_words=True), text, 2000):
        assert (rebuilt(example) == text).all()
        spans = np.searchsorted(begins, masked_positions(example))
        assert (begins[spans] == masked_positions(example)).all()  # boundaries of words
        assert (spans[1:, 0] > spans[:-1, 1]).all()  # a word stays between two blanks
        words = spans[:, 1] - spans[:, 0]
        assert words.sum() - words.max() < int(0.15 * 81) <= words.sum()
        lengths += words.tolist()
        for begin, end in spans:
            chosen[begin:end] += 1
    observed = np.bincount(lengths, minlength=9)
    p = poisson(39)
    expected = len(lengths) * np.array([*p[:7], p[7:].sum()])
    assert chi_square(np.array([*observed[1:8], observed[8:].sum()]), expected) < chi_square_limit(7)
    inner = chosen[8:-8] / chosen[8:-8].mean()
    assert abs(inner - 1).max() < 0.2


def test_whole_words_fit_short_rows_and_long_words():
    """Rows as short as they may be; and a text of one long word, whose blank is cut to what positions allow."""
    config = {"whole_words": True, "masked_ratio": 0.4, "mean_span_length": 1.0}
    made = objective(48, row_length=BlankInfillingConfig(**config).least_row_length(48), **config)
    for sample in range(300):
        text = text_of(40 + sample % 7)
        batch = collate(made, text, [len(text)], [1], [sample])
        (example,) = Example.from_fields(batch[0]).documents()
        kept = rebuilt(example)
        assert (kept == text[: len(kept)]).all() and len(text) - len(kept) <= len(text) // 32
        begins = {*word_begins(text).tolist(), len(kept) - 1, len(kept)}
        assert {int(x) for span in masked_positions(example) for x in span} <= begins
    one_word = np.full(47, np.flatnonzero(~WORD_START)[0], np.int32)
    assert masked_positions(made.example(one_word, 0)) == [(0, 47)]


def test_whole_words_need_a_vocabulary_that_knows_them():
    with pytest.raises(ConfigError, match="whole words"):
        BlankInfilling(BlankInfillingConfig(whole_words=True), replace(VOCABULARY, word_start=None), 5, 512)
