"""OPTIMUS's rows: each sentence once for the encoder and once for the decoder, in one or two vocabularies."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.data.recipes import FIRST_TEXT_TOKEN, SPECIAL, collate, make, text_of, vocabulary
from support.transformer.mask_rule import allowed

from data_utils.common.batch_fields import Example
from data_utils.common.errors import ConfigError, DataError
from data_utils.loader.loader import collate as fill_rows
from data_utils.objectives import LOSS_NAMES, OBJECTIVES, ObjectiveChoice, make_objective, make_one
from data_utils.tokenizers.published_tokens import own_special_tokens
from data_utils.tokenizers.vocabulary import Vocabulary

CLS, SEP, BOS, EOS = SPECIAL.cls, SPECIAL.sep, SPECIAL.sop, SPECIAL.eop
# GPT-2 with the three tokens of OPTIMUS, and BERT as published.
GPT2, GPT2_LACKS = own_special_tokens({"eos": 50256, "pad": 50257, "sop": 50258, "eop": 50259})
BERT, BERT_LACKS = own_special_tokens({"pad": 0, "unk": 100, "cls": 101, "sep": 102, "mask": 103})
SENTENCES = st.lists(st.integers(1, 12), min_size=1, max_size=6)


def two_vocabularies(**options):
    decoder = Vocabulary(GPT2, 50260, lacking=GPT2_LACKS)
    return replace(vocabulary(), special=BERT, lacking=BERT_LACKS, **{"decoder": decoder, **options})


def optimus(length=12, words=None, row_length=None, **config):
    section = OBJECTIVES["optimus"].config_class(**config)
    return make_one("optimus", section, words or vocabulary(), 5, length, row_length)


def columns(example):
    names = ("tokens", "ord", "position_ids", "targets", "weights")
    return [getattr(example, name).tolist() for name in names]


def test_a_sentence_of_two_tokens():
    """Written out from the layout: the encoder's tokens, the slot, and the decoder's."""
    x = [1000, 1001]
    tokens, order, positions, targets, weights = columns(optimus().example(np.array([*x, SPECIAL.eos]), 3))
    assert tokens == [CLS, *x, SEP, BOS, BOS, *x]
    assert order == [0, 0, 0, 0, 1, 2, 3, 4]
    assert positions == [0, 1, 2, 3, 0, 1, 2, 3]
    assert targets == [0, 0, 0, 0, 0, *x, EOS]
    assert weights == [0, 0, 0, 0, 0, 1, 1, 1]


def test_without_memory_there_is_no_slot():
    x = [1000, 1001]
    tokens, order, positions, targets, weights = columns(optimus(memory=False).example(np.array(x), 3))
    assert tokens == [CLS, *x, SEP, BOS, *x]
    assert order == [0, 0, 0, 0, 1, 2, 3] and positions == [0, 1, 2, 3, 0, 1, 2]
    assert targets == [0, 0, 0, 0, *x, EOS] and weights == [0, 0, 0, 0, 1, 1, 1]


def test_a_row_of_two_vocabularies():
    """Two sentences; the first is longer for the decoder, the second for the encoder. Documents end with their eos."""
    encoders = [[2000, 2001, BERT.eos], [2002, BERT.eos]]
    decoders = [[30000, 30001, 30002, 50256], [30003, 50256]]
    chunks = [np.array(chunk) for pair in zip(encoders, decoders, strict=True) for chunk in pair]
    made = optimus(words=two_vocabularies(), row_length=32)
    row = Example.from_fields(collate(made, [chunks], 9)[0])
    first, second = row.documents()
    assert first.tokens.tolist() == [101, 2000, 2001, 102, 50258, 50258, 30000, 30001, 30002]
    assert first.targets.tolist() == [0] * 5 + [30000, 30001, 30002, 50259]
    assert first.ord.tolist() == [0, 0, 0, 0, 1, 2, 3, 4, 5]
    assert second.tokens.tolist() == [101, 2002, 102, 50258, 50258, 30003]
    assert second.targets.tolist() == [0, 0, 0, 0, 30003, 50259]
    assert second.position_ids.tolist() == [0, 1, 2, 0, 1, 2]
    assert (row.doc[15:] == -1).all() and (row.tokens[15:] == BERT.pad).all()


@given(st.lists(SENTENCES, min_size=1, max_size=4), st.booleans(), st.booleans())
@settings(max_examples=60, deadline=None)
def test_rows_hold_what_their_sentences_need(rows, memory, with_eos):
    """In the tightest row: every field, and who sees whom, by the definition."""
    made = optimus(memory=memory)
    needed = max(sum(made.config.tokens_needed(np.array(lengths))) for lengths in rows)
    made = optimus(memory=memory, row_length=max(needed, made.config.least_row_length(12)))
    samples = [[text_of(length, with_eos and length > 1) for length in lengths] for lengths in rows]
    for fields, chunks in zip(collate(made, samples), samples, strict=True):
        row = Example.from_fields(fields)
        mask = allowed(row.doc, row.ord, row.grp)
        assert row.doc.max() + 1 == len(chunks) and not (row.grp.any() or row.segment_ids.any())
        assert row.position_ids.max() <= made.config.max_position_needed(12)
        assert set(row.objective[row.doc >= 0]) == {LOSS_NAMES.index("reconstruction")}
        for number, chunk in enumerate(chunks):
            x = chunk[chunk != SPECIAL.eos]
            here = row.doc == number
            encoder, decoder = here & (row.ord == 0), here & (row.ord > 0)
            assert row.tokens[encoder].tolist() == [CLS, *x, SEP]
            assert row.tokens[decoder].tolist() == [BOS] * (1 + memory) + [*x]
            assert row.targets[here & (row.weights > 0)].tolist() == [*x, EOS]
            assert row.position_ids[decoder].tolist() == list(range(1 + memory + len(x)))
            assert not row.weights[encoder].any() and row.weights[decoder].sum() == len(x) + 1
            sees_text = mask[np.ix_(encoder, decoder)]
            assert not sees_text.any()  # the encoder knows nothing of the decoder
            assert (mask[np.ix_(decoder, decoder)] == np.tri(decoder.sum(), dtype=bool)).all()
            assert not mask[np.ix_(here, ~here)].any()


def test_a_row_depends_on_its_text_alone():
    made, other = optimus(), make("optimus", 12, seed=6)
    samples = [[text_of(5), text_of(9)], [text_of(12, False)], [text_of(1, False)] * 3]
    together = collate(made, samples)
    for i, sample in enumerate(samples):
        assert (collate(made, [sample], 2**33)[0] == together[i]).all()
    assert (collate(other, samples) == together).all()


def test_its_numbers():
    section = OBJECTIVES["optimus"].config_class()
    assert section.has_target and section.whole_documents and section.loss_share == 0.5
    assert [LOSS_NAMES[number] for number in (22, 23)] == ["reconstruction", "kl"]
    assert section.least_row_length(64) == 2 * 64 + 4 and section.row_length_for(64) == 528
    assert replace(section, memory=False).least_row_length(64) == 2 * 64 + 3


@pytest.mark.parametrize(
    ("words", "missing"),
    [
        (
            replace(vocabulary(), special=BERT, lacking=BERT_LACKS),
            "tokens sop, eop in .* set tokenizer.added",
        ),
        (
            two_vocabularies(decoder=Vocabulary(GPT2, 50257, lacking=frozenset({"eop"}))),
            "token eop in .* set decoder_tokenizer.added_tokens=optimus",
        ),
        (replace(vocabulary(), lacking=frozenset({"sep"})), "token sep, which the tokenizer"),
    ],
)
def test_a_vocabulary_that_lacks_its_tokens_is_refused(words, missing):
    with pytest.raises(ConfigError, match=f"optimus needs the special {missing}"):
        optimus(words=words)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"latent_size": 0}, "optimus.latent_size is 0; it must be at least 1"),
        (
            {"memory": False, "embedding": False},
            r"memory and optimus.embedding are both false, .* set one of them to true",
        ),
        ({"free_bits": -0.1}, "optimus.free_bits is -0.1; it must be at least 0"),
        ({"beta": -1.0}, "optimus.beta is -1.0; it must be at least 0"),
        ({"cycles": 0}, "optimus.cycles is 0; it must be at least 1"),
        ({"zero_share": -0.5}, "optimus.zero_share is -0.5; it must be at least 0"),
        ({"rise_share": 1.5}, "optimus.rise_share is 1.5; it must be at least 0 and at most 1"),
        (
            {"zero_share": 0.75, "rise_share": 0.5},
            r"zero_share \+ optimus.rise_share is 1.25; the sum must be at most 1",
        ),
        ({"feature": "mean"}, "optimus.feature is 'mean'; it must be one of pooler, cls"),
    ],
)
def test_settings_that_make_no_sense(settings, message):
    with pytest.raises(ConfigError, match=message):
        OBJECTIVES["optimus"].config_class(**settings)


def test_it_stands_alone():
    choices = [ObjectiveChoice(name, OBJECTIVES[name].config_class()) for name in ("causal", "optimus")]
    with pytest.raises(ConfigError, match="optimus cannot be mixed with other objectives"):
        make_objective(choices, vocabulary(), 1, 24)


def test_samples_that_cannot_be_rows_are_refused():
    two, one = optimus(words=two_vocabularies()), optimus()
    with pytest.raises(DataError, match="sample 4 has 3 chunks, but every sentence needs two"):
        collate(two, [[text_of(3)] * 3], 4)
    with pytest.raises(DataError, match="longest chunk has 13"):
        collate(one, [[text_of(13)]])
    too_many = one.row_length // 6 + 1  # a sentence of one token needs 6
    with pytest.raises(DataError, match=f"{too_many} chunks that can need {6 * too_many} tokens of a row"):
        collate(one, [[text_of(1, False)] * too_many])
    most = one.row_length // 6
    assert collate(one, [[text_of(1, False)] * most])[0, 5].max() == most - 1
    too_many = two.row_length // 6 + 1
    with pytest.raises(
        DataError, match=f"{2 * too_many} chunks that can need {6 * too_many} tokens of a row"
    ):
        collate(two, [[text_of(1, False)] * 2 * too_many])


def test_a_chunk_without_text_is_an_empty_sentence():
    """Only adopted datasets have such, whose documents may or may not end with eos."""
    made = optimus(row_length=40)
    batch = fill_rows(made, np.array([SPECIAL.eos, FIRST_TEXT_TOKEN], np.int32), [1, 1], [2], [0])
    empty, other = Example.from_fields(batch[0]).documents()
    assert columns(empty) == [[CLS, SEP, BOS, BOS], [0, 0, 1, 2], [0, 1, 0, 1], [0, 0, 0, EOS], [0, 0, 0, 1]]
    assert len(other.tokens) == 6
