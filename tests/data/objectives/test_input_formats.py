"""RoBERTa's formats of inputs: five sentences by hand, and what holds of every window."""

import dataclasses
import math
from collections import Counter

import numpy as np
import pytest
from support.data.chi_square import chi_square, chi_square_limit
from support.data.recipes import SPECIAL, collate, make, vocabulary, windows
from support.project import ROOT

from data_utils.common.batch_fields import DOC, TOKENS, Example
from data_utils.common.errors import ConfigError
from data_utils.common.losses import NEXT_SENTENCE_LOSS
from data_utils.objectives import OBJECTIVES, make_one
from data_utils.objectives.masked_lm import SHORTEST
from data_utils.tokenizers.vocabulary import Vocabulary
from megatron_lite.config.tree import load_config

SHOWN = {"mask_token_prob": 0.0, "random_token_prob": 0.0}  # predicted tokens stay as they are
CLS, SEP, EOS = SPECIAL.cls, SPECIAL.sep, SPECIAL.eos
ENDS = vocabulary().sentence_end
FORMATS = ("sentences", "full", "document")


def sentence(number, length=9):
    """Distinct tokens, of which only the last ends a sentence."""
    first = 1009 + 70 * number
    inside = [token for token in range(first, first + 60) if token % 7]
    return [*inside[: length - 1], 1001 + 70 * number]


def texts_of(fields):
    """The tokens of each Example of a row."""
    return [one.tokens.tolist() for one in Example.from_fields(fields).documents()]


S = [sentence(number) for number in range(5)]
PART = sentence(5)[:4]  # a window ends within this sentence
BY_HAND = {
    # three sentences of a document that ends, two of one that goes on, and the beginning of a sixth
    "sentences": [
        [CLS, *S[0], SEP, *S[1], SEP],
        [CLS, *S[2], EOS, SEP],
        [CLS, *S[3], SEP, *S[4], *PART, SEP],  # too short for a sentence
    ],
    "full": [[CLS, *S[0], *S[1], *S[2], EOS, SEP, *S[3], *S[4], SEP], [CLS, *PART, SEP]],
    "document": [[CLS, *S[0], *S[1], *S[2], EOS, SEP], [CLS, *S[3], *S[4], SEP], [CLS, *PART, SEP]],
}


@pytest.mark.parametrize("name", FORMATS)
def test_five_sentences_by_hand(name):
    chunks = [np.array([*S[0], *S[1], *S[2], EOS], np.int32), np.array([*S[3], *S[4], *PART], np.int32)]
    (row,) = collate(make("masked_lm", 80, input=name, **SHOWN), [chunks])
    assert texts_of(row) == BY_HAND[name]
    documents = Example.from_fields(row).documents()
    for example in documents:
        assert example.position_ids.tolist() == list(range(len(example.tokens)))
        middle = example.tokens.tolist().index(SEP) + 1 if name == "sentences" else len(example.tokens)
        assert example.segment_ids.tolist() == [0] * middle + [1] * (len(example.tokens) - middle)
        predicted = example.tokens[example.weights > 0]
        assert len(predicted) == max(1, int(0.15 * len(example.tokens) + 0.5))
        assert not np.isin(predicted, [CLS, SEP, EOS]).any()


def test_a_window_that_ends_with_a_sentence_has_nothing_left():
    chunks = [np.array([*S[0], *S[1]], np.int32), np.array([*S[2], *S[3]], np.int32)]
    (row,) = collate(make("masked_lm", 80, input="full", **SHOWN), [chunks])
    assert texts_of(row) == [[CLS, *S[0], *S[1], SEP, *S[2], *S[3], SEP]]
    (row,) = collate(make("masked_lm", 80, input="full", **SHOWN), [[chunks[0], np.array(PART, np.int32)]])
    assert texts_of(row) == [[CLS, *S[0], *S[1], SEP], [CLS, *PART, SEP]]


def is_sentence_end(text, at):
    """Whether a sentence, or a document, ends before place `at` of a window's text."""
    return at in (0, len(text)) or EOS in (text[at - 1], text[at - 2]) or bool(ENDS[text[at - 1]])


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("length", [3, 40, 160])
def test_every_token_comes_once_and_examples_end_with_sentences(name, length):
    """In random windows: text is kept in its order, nothing special is predicted, and only the end of the window, or of
    a part of a document without eos, cuts a sentence."""
    made, seen = make("masked_lm", length, input=name, **SHOWN), Counter()
    all_windows = windows(200, length, 9)
    for chunks, row in zip(all_windows, collate(made, all_windows), strict=True):
        text = np.concatenate([np.zeros(0, np.int32), *chunks]).tolist()
        examples = texts_of(row)
        assert [t for tokens in examples for t in tokens if t not in (CLS, SEP)] == text
        assert (row[DOC] >= 0).sum() == sum(map(len, examples)) <= made.row_length
        boundaries = np.cumsum([0, *map(len, chunks)]).tolist()
        at = 0
        for tokens in examples:
            assert tokens[0] == CLS and tokens[-1] == SEP and tokens.count(CLS) == 1
            begin, at = at, at + sum(token not in (CLS, SEP) for token in tokens)
            inside = [boundary for boundary in boundaries if begin < boundary < at]
            if name == "full":
                assert tokens.count(SEP) == 1 + len(inside)
                assert at == len(text) or is_sentence_end(text, at) or at in boundaries
            else:
                assert not inside
                assert at in boundaries or is_sentence_end(text, at)
            if name == "sentences":
                parts = " ".join(map(str, tokens[1:-1])).split(f" {SEP} ")
                assert tokens.count(SEP) == len(parts) <= 2
                own = [list(map(int, part.split())) for part in parts]
                assert len(own) == 1 or min(map(len, own)) >= SHORTEST
                for part in own:  # one sentence, or several of which only the last has SHORTEST tokens
                    found = [i + 1 for i, token in enumerate(part) if ENDS[token]]
                    assert not [i for i in found if i >= SHORTEST and len(part) - i >= SHORTEST]
            seen[len(inside)] += 1
    assert seen[0] and (name != "full" or length == 3 or seen[1])


def test_two_sentences_have_labels_and_exchange_seconds():
    """Half of the pairs have a wrong second sentence, of another pair; an odd sentence has no label."""
    made = make("masked_lm", 100, input="sentences", next_sentence=True, **SHOWN)
    chunk = np.array([token for number in range(5) for token in sentence(number)], np.int32)
    labels, count = Counter(), 2000
    for row in collate(made, [[chunk]] * count):
        first, second, alone = Example.from_fields(row).documents()
        assert alone.objective[0] != NEXT_SENTENCE_LOSS.number and alone.weights[0] == 0
        for number, example in enumerate((first, second)):
            assert example.objective[0] == NEXT_SENTENCE_LOSS.number and example.weights[0] == 1
            tokens = example.tokens[1:-1].tolist()
            right = [*S[2 * number], SEP, *S[2 * number + 1]]
            label = int(example.targets[0])
            assert (tokens == right) == (label == 0)
            labels[label] += 1
    assert abs(labels[1] - count) < 3 * math.sqrt(2 * count / 4)


def test_masks_are_uniform_over_the_tokens_of_joined_documents():
    """Tokens on both sides of a separator are predicted as often as all others."""
    made, found = make("masked_lm", 60, input="full"), np.zeros(40)
    chunks = [np.array([*S[0], *S[1], EOS], np.int32), np.array([*S[2], *S[3]], np.int32)]
    for row in collate(made, [chunks] * 4000):
        (example,) = Example.from_fields(row).documents()
        found[: len(example.weights)] += example.weights > 0
    text = [i for i, token in enumerate(texts_of(row)[0]) if i not in (0, 19, 20, 39)]
    assert found.sum() == found[text].sum() == 4000 * 6
    assert chi_square(found[text], np.full(36, found.sum() / 36)) < chi_square_limit(35)


def test_a_sample_has_its_row_in_any_batch():
    made = make("masked_lm", 120, input="full")
    given = windows(20, 120, 3)
    whole = collate(made, given)
    for number in (0, 7, 19):
        assert np.array_equal(collate(made, given[number : number + 1], number)[0], whole[number])
    assert not np.array_equal(collate(made, given[7:8], 8)[0][TOKENS], whole[7][TOKENS])


def test_bad_formats_are_one_line():
    section = OBJECTIVES["masked_lm"].config_class
    with pytest.raises(
        ConfigError, match=r"masked_lm.input is .pairs.*; it must be one of segments, sentences, full"
    ):
        section(input="pairs")
    with pytest.raises(
        ConfigError, match="next_sentence is true with input full, whose examples have only one segment"
    ):
        section(input="full", next_sentence=True)
    unknown = Vocabulary(SPECIAL, 3000, None, None)
    with pytest.raises(
        ConfigError, match="input is document, but the tokens that end a sentence are unknown"
    ):
        make_one("masked_lm", section(input="document"), unknown, 1, 64)


def test_a_vocabulary_whose_eos_is_sep_has_one_between_documents():
    """RoBERTa's, and BERT's where SEP ends documents."""
    special = dataclasses.replace(SPECIAL, eos=SEP)
    known = Vocabulary(special, 3000, ENDS, vocabulary().word_start)
    made = make_one("masked_lm", OBJECTIVES["masked_lm"].config_class(input="full", **SHOWN), known, 5, 80)
    chunks = [np.array([*S[0], SEP], np.int32), np.array([*S[1], SEP], np.int32), np.array(PART, np.int32)]
    (row,) = collate(made, [chunks])
    assert texts_of(row) == [[CLS, *S[0], SEP, *S[1], SEP], [CLS, *PART, SEP]]


@pytest.mark.parametrize("name", FORMATS)
def test_robertas_configuration_takes_each_format(name):
    """Rows have 512 positions, but for pairs of sentences, which have more special tokens."""
    config = load_config([ROOT / "configs/roberta-large.yaml"], [f"masked_lm.input={name}"])
    assert config.row_length == (608 if name == "sentences" else 512)
