"""Blank infilling: the worked examples, the invariants of every Example, its configuration."""

from __future__ import annotations

import hashlib
import itertools
import os
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.data.blank_infilling import (
    MIXED,
    SPECIAL,
    VOCABULARY,
    check_layout,
    masked_positions,
    objective,
    rebuilt,
    spans_of,
)
from support.data.recipes import FIRST_TEXT_TOKEN, many, text_of
from support.project import ROOT
from support.transformer.mask_rule import allowed, leaks

from data_utils.common.batch_fields import FIELDS, Example
from data_utils.common.errors import ConfigError
from data_utils.common.setting_files import load_yaml
from data_utils.common.settings import build
from data_utils.loader.loader import collate
from data_utils.objectives.blank_infilling import (
    DOCUMENT,
    MOST_CUT,
    SENTENCE,
    TOKEN,
    BlankInfilling,
    BlankInfillingConfig,
)
from data_utils.objectives.interface import DOCUMENT_OVERHEAD
from data_utils.tokenizers.vocabulary import Vocabulary

PRESETS = sorted((ROOT / "configs" / "objectives").glob("*.yaml"))


# No deadline: the first call compiles. Derandomized: a failure on one machine is one on all.
relaxed = settings(deadline=None, derandomize=True, max_examples=150)


# --- worked examples -------------------------------------------------------------------------------------


def test_worked_example_of_two_spans():
    example = objective().build([1001, 1002, 1003, 1004, 1005, 1006, 0], [(2, 3), (4, 6)], order=[1, 0])
    assert example.tokens.tolist() == [101, 1001, 1002, 103, 1004, 103, 0, 30522, 1005, 1006, 30522, 1003]
    assert example.targets.tolist() == [0] * 7 + [1005, 1006, 30523, 1003, 30523]
    assert example.weights.tolist() == [0.0] * 7 + [1.0] * 5
    assert example.position_ids.tolist() == [0, 1, 2, 3, 4, 5, 6, 5, 5, 5, 3, 3]
    assert example.block_position_ids.tolist() == [0] * 7 + [1, 2, 3, 1, 2]
    assert example.ord.tolist() == [0] * 7 + [1, 2, 3, 4, 5]
    assert example.doc.tolist() == example.grp.tolist() == example.objective.tolist() == [0] * 12


def test_worked_example_of_a_document_tail():
    example = objective().build([1001, 1002, 1003, 1004, 1005, 1006, 0], [(3, 7)], [0], DOCUMENT, tail=True)
    assert example.tokens.tolist() == [101, 1001, 1002, 1003, 105, 30522, 1004, 1005, 1006]
    assert example.targets.tolist() == [0] * 5 + [1004, 1005, 1006, 0]
    assert example.weights.tolist() == [0.0] * 5 + [1.0] * 4
    assert example.position_ids.tolist() == [0, 1, 2, 3, 4, 4, 4, 4, 4]
    assert example.block_position_ids.tolist() == [0] * 5 + [1, 2, 3, 4]
    assert example.objective.tolist() == [DOCUMENT] * 9


def test_the_sentence_objective_uses_its_mask():
    example = objective().build([1001, 1002, 1003, 0], [(0, 2)], [0], SENTENCE)
    assert example.tokens.tolist() == [101, 104, 1003, 0, 30522, 1001, 1002]


# --- invariants of every Example ---------------------------------------------------------------------------


@relaxed
@given(
    length=st.integers(1, 300),
    with_eos=st.booleans(),
    sample=st.integers(0, 2**40),
    chunk=st.integers(0, 50),
    mode=st.sampled_from([TOKEN, SENTENCE, DOCUMENT]),
    max_span_length=st.sampled_from([1, 2, 5, 39]),
    ratio=st.sampled_from([0.05, 0.15, 0.5, 1.0]),
    placement=st.sampled_from(["uniform", "reference"]),
)
def test_every_example(length, with_eos, sample, chunk, mode, max_span_length, ratio, placement):
    text = text_of(length, with_eos)
    made = objective(
        token_prob=float(mode == TOKEN),
        sentence_prob=float(mode == SENTENCE),
        max_span_length=max_span_length,
        masked_ratio=ratio,
        sentence_ratio=ratio,
        placement=placement,
    )
    example = made.example(text, sample, chunk)
    check_layout(example, [SPECIAL.mask, SPECIAL.smask, SPECIAL.gmask][mode])
    assert (rebuilt(example) == text).all()
    assert set(example.doc) == {chunk} and set(example.objective) == {mode}
    assert not leaks(
        example.tokens, example.targets, example.weights, allowed(example.doc, example.ord, example.grp)
    )
    maskable = length - with_eos
    spans = masked_positions(example)
    masked = sum(end - start for start, end in spans)
    n = length + 1
    if mode == TOKEN:
        assert all(end - start <= max_span_length for start, end in spans)
        assert all(after[0] > before[1] for before, after in itertools.pairwise(spans))
        assert masked >= min(max(1, int(ratio * n)), maskable - maskable // (max_span_length + 1))
    elif mode == SENTENCE:
        assert all(after[0] >= before[1] for before, after in itertools.pairwise(spans))
        assert masked >= min(max(1, int(ratio * n)), maskable)
    elif spans:
        assert len(spans) == 1 and masked >= min(int(0.5 * n), n - 2)
    if mode != DOCUMENT:
        assert all(end <= maskable for _, end in spans), "eos is never masked here"
        assert bool(spans) == (maskable > 0)


def window(sequence_length: int, longest: int, continues: bool, seed: int) -> list[int]:
    """Chunk lengths that obey the rule of windows: each document that begins has 4 tokens reserved."""
    rng = np.random.default_rng(seed)
    chunks, used = [], 0
    if continues:
        chunks.append(int(rng.integers(1, min(longest, sequence_length) + 1)))
        used = chunks[0]
    while (room := sequence_length - used - DOCUMENT_OVERHEAD) >= 1:
        chunks.append(int(rng.integers(1, min(longest, room) + 1)))
        used += chunks[-1] + DOCUMENT_OVERHEAD
    return chunks


@relaxed
@given(
    sequence_length=st.integers(8, 160),
    longest=st.sampled_from([1, 2, 6, 40, 160]),
    continues=st.booleans(),
    mode=st.sampled_from([{}, {"token_prob": 0.0, "sentence_prob": 1.0}, {"token_prob": 0.0}, MIXED]),
    max_span_length=st.sampled_from([1, 2, 39]),
    ratio=st.sampled_from([0.15, 0.6, 1.0]),
    tight=st.booleans(),
    with_eos=st.booleans(),
    sample=st.integers(0, 2**62),
)
def test_every_row_of_packed_chunks(
    sequence_length, longest, continues, mode, max_span_length, ratio, tight, with_eos, sample
):
    """Nothing overflows, spans stay in their document; rows as short as allowed, too.

    Nothing is dropped but a few last tokens of chunks in full rows.
    """
    chunks = window(sequence_length, longest, continues, sample)
    config = mode | {"max_span_length": max_span_length, "masked_ratio": ratio}
    least = BlankInfillingConfig(**config).least_row_length(sequence_length)
    made = objective(sequence_length, row_length=least if tight else None, **config)
    texts, first = [], FIRST_TEXT_TOKEN
    for length in chunks:
        texts.append(text_of(length, with_eos, first))
        first += length
    batch = collate(made, np.concatenate(texts), chunks, [len(chunks)], [sample])
    row = Example.from_fields(batch[0])
    documents = row.documents()
    assert len(documents) == len(chunks)
    for document, text in zip(documents, texts, strict=True):
        mask_token = [SPECIAL.mask, SPECIAL.smask, SPECIAL.gmask][int(document.objective[0])]
        check_layout(document, mask_token)
        kept = rebuilt(document)
        assert len(text) - len(text) // MOST_CUT <= len(kept) and (kept == text[: len(kept)]).all()
        assert len(kept) == len(text) or int(document.objective[0]) == TOKEN
    assert not leaks(row.tokens, row.targets, row.weights, allowed(row.doc, row.ord, row.grp))
    limit = made.config.max_position_needed(sequence_length)
    assert max(row.position_ids.max(), row.block_position_ids.max()) <= limit
    padding = row.doc == -1
    assert (np.diff(padding.astype(int)) >= 0).all(), "padding is at the end"
    assert (row.tokens[padding] == SPECIAL.pad).all()
    for name in set(FIELDS) - {"tokens", "doc"}:
        assert not getattr(row, name)[padding].any()


@pytest.mark.parametrize("placement", ["uniform", "reference"])
def test_leak_test_fires_on_planted_leaks(placement):
    """Each change plants one leak; the test must see it."""
    example = objective(placement=placement).example(text_of(60), 3)
    fields = (example.tokens, example.targets, example.weights)
    sound = allowed(example.doc, example.ord, example.grp)
    assert not leaks(*fields, sound)
    size_a = int((example.ord == 0).sum())
    later = example.ord.copy()
    later[size_a:] = later[size_a:].max()  # part B sees all of part B
    assert leaks(*fields, allowed(example.doc, later, example.grp))
    visible = example.ord.copy()
    visible[size_a + 1] = 0  # one answer becomes context
    assert leaks(*fields, allowed(example.doc, visible, example.grp))
    grouped = example.grp.copy()
    grouped[size_a : size_a + 2] = 1  # sop sees the token after it
    assert leaks(*fields, allowed(example.doc, example.ord, grouped))
    unmasked = example.tokens.copy()
    unmasked[1] = example.targets[size_a]
    assert leaks(unmasked, *fields[1:], sound)


def test_all_punctuation_falls_back_to_one_span_and_still_masks_enough():
    """Every token is a sentence: 77 one-token spans would need 154 more tokens than the text has."""
    made = objective(token_prob=0.0, sentence_prob=1.0)
    chunk = np.full(512, FIRST_TEXT_TOKEN, np.int32)
    for example in many(made, chunk, 50):
        assert (rebuilt(example) == chunk).all()
        spans = spans_of(example)
        assert len(spans) == 1 and len(spans[0][1]) - 1 >= int(0.15 * 513)


def test_a_text_without_sentence_ends_is_one_sentence():
    made = BlankInfilling(
        BlankInfillingConfig(token_prob=0.0, sentence_prob=1.0),
        Vocabulary(SPECIAL, 3000, np.zeros(10, bool)),
        1,
        512,
    )
    assert masked_positions(made.example(text_of(20), 0)) == [(0, 19)]
    assert masked_positions(made.example(text_of(512, with_eos=False), 0)) == [(1, 512)]  # position limit


@pytest.mark.parametrize(("token_prob", "sentence_prob"), [(1.0, 0.0), (0.0, 1.0)])
def test_a_chunk_of_only_eos_keeps_its_text_without_loss(token_prob, sentence_prob):
    example = objective(token_prob=token_prob, sentence_prob=sentence_prob).example(
        np.array([SPECIAL.eos]), 0
    )
    assert example.tokens.tolist() == [SPECIAL.cls, SPECIAL.eos] and not example.weights.any()


def test_an_example_does_not_depend_on_its_batch():
    made = objective(**MIXED)
    lengths = [[500], [100, 200, 180], [1] * 100]
    samples = [7, 2**33 + 1, 12345]
    texts = [text_of(sum(chunks)) for chunks in lengths]
    together = collate(
        made,
        np.concatenate(texts),
        [n for chunks in lengths for n in chunks],
        [len(p) for p in lengths],
        samples,
    )
    for i, (text, chunks, sample) in enumerate(zip(texts, lengths, samples, strict=True)):
        assert (collate(made, text, chunks, [len(chunks)], [sample])[0] == together[i]).all()
    backwards = collate(
        made,
        np.concatenate(texts[::-1]),
        [n for chunks in lengths[::-1] for n in chunks],
        [len(p) for p in lengths[::-1]],
        samples[::-1],
    )
    assert (backwards[::-1] == together).all()
    assert (collate(made, texts[0], [500], [1], [8])[0] != together[0]).any()
    assert (collate(objective(seed=6, **MIXED), texts[0], [500], [1], [7])[0] != together[0]).any()


def test_example_is_what_the_batch_holds():
    made = objective(**MIXED)
    for sample, in_batch in enumerate(many(made, text_of(400), 20)):
        alone = made.example(text_of(400), sample)
        assert all((getattr(alone, name) == getattr(in_batch, name)).all() for name in FIELDS)


def mixed_batch() -> np.ndarray:
    """A few samples through every option that has its own code."""
    options = [
        {**MIXED, "single_span_prob": 0.2, "block_mask_prob": 0.2},
        {"context_mask_ratio": 0.1, "random_position": True, "placement": "reference"},
        {"sentinel_first": 2000, "sentinel_count": 3},
        {"masked_lm": True},
    ]
    chunks = [40, 30, 30, 1]
    tokens = np.tile(np.concatenate([text_of(n) for n in chunks]), 2)
    batches = [collate(objective(128, **o), tokens, chunks * 2, [4, 4], [3, 2**35]) for o in options]
    return np.concatenate([batch.ravel() for batch in batches])


def test_compiled_and_plain_python_agree():
    """Bit for bit, and without an overflow warning."""
    root = ROOT
    environment = dict(os.environ, NUMBA_DISABLE_JIT="1", PYTHONPATH=f"{root}:{root}/tests")
    command = [sys.executable, "-W", "error::RuntimeWarning", __file__]
    run = subprocess.run(command, env=environment, cwd=root, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip() == hashlib.sha256(mixed_batch().tobytes()).hexdigest()


# --- sizes and configuration --------------------------------------------------------------------------------


def test_row_length_holds_most_draws():
    """512 tokens at 15 % need 513 + 2 x 24.6 on average, with a standard deviation of 5."""
    made = objective()
    assert made.row_length == 568
    needed = np.array(
        [len(example.tokens) for example in many(objective(row_length=700), text_of(512, False), 3000)]
    )
    assert abs(needed.mean() - 562.3) < 1
    assert 0.05 < (needed > 568).mean() < 0.2


def test_where_spans_do_not_fit_the_text_ends_earlier_and_they_stay_as_drawn():
    text = text_of(512, False)
    roomy, usual = many(objective(row_length=700), text, 2000), many(objective(), text, 2000)
    lost = 0
    for whole, short in zip(roomy, usual, strict=True):
        over = max(0, len(whole.tokens) - 568)
        if over > 512 // MOST_CUT:
            continue  # drawn again
        kept = rebuilt(short)
        assert len(kept) == 512 - over and (kept == text[: 512 - over]).all()
        lengths = [
            sorted(len(targets) for _, targets, _, _ in spans_of(example)) for example in (whole, short)
        ]
        assert lengths[0] == lengths[1]
        lost += over
    assert 0 < lost < 2000 * 512 / 1000  # less than one token in a thousand


def test_row_length_check():
    least = BlankInfillingConfig().least_row_length(512)
    assert objective(row_length=least).row_length == least
    with pytest.raises(ConfigError, match=f"at least {least}"):
        objective(row_length=least - 1)


@pytest.mark.parametrize(
    ("config", "part"),
    [
        ({"token_prob": 0.8, "sentence_prob": 0.3}, "sentence_prob"),
        ({"masked_ratio": 1.5}, "masked_ratio"),
        ({"masked_ratio": float("nan")}, "masked_ratio"),
        ({"max_span_length": 0}, "max_span_length"),
        ({"mean_span_length": 0.0}, "mean_span_length"),
        ({"placement": "random"}, "uniform, reference"),
        ({"document_min_ratio": 0.9, "document_max_ratio": 0.5}, "document_max_ratio"),
        ({"masked_lm": True, "token_prob": 0.5}, "masked_lm"),
        ({"sentinel_first": -4}, "sentinel_first"),
    ],
)
def test_config_errors_name_the_setting(config, part):
    with pytest.raises(ConfigError, match=part):
        BlankInfillingConfig(**config)


def test_sentences_need_sentence_ends():
    with pytest.raises(ConfigError, match="sentence_prob"):
        BlankInfilling(
            BlankInfillingConfig(token_prob=0.5, sentence_prob=0.5), Vocabulary(SPECIAL, 3000), 1, 512
        )


@pytest.mark.parametrize("path", PRESETS, ids=lambda path: path.stem)
def test_presets_load_and_make_examples(path):
    tree = load_yaml(path)
    assert list(tree) == ["blank_infilling"]
    config = build(BlankInfillingConfig, tree["blank_infilling"], "blank_infilling.")
    example = BlankInfilling(config, VOCABULARY, 1, 512).example(text_of(100), 0)
    assert example.weights.sum() > 0


if __name__ == "__main__":  # the subprocess of test_compiled_and_plain_python_agree
    print(hashlib.sha256(mixed_batch().tobytes()).hexdigest())
