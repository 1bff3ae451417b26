"""Classes of sentences and tokens in masked text: labels by brute force, and how often each is drawn."""

import itertools
import math
from collections import Counter

import numpy as np
import pytest
from support.data.recipes import FIRST_TEXT_TOKEN, SPECIAL, collate, make, many, text_of, vocabulary

from data_utils.common.batch_fields import BLOCK_POSITION_IDS, Example
from data_utils.common.errors import ConfigError
from data_utils.common.losses import CLASS_HEADS
from data_utils.loader.loader import collate as collate_all
from data_utils.objectives import OBJECTIVES
from data_utils.objectives.mixed import Mixed

SHOWN = {"mask_token_prob": 0.0, "random_token_prob": 0.0}  # predicted tokens stay as they are
ENDS = vocabulary().sentence_end


def near(count, trials, share):
    return abs(count - trials * share) <= 3 * math.sqrt(trials * share * (1 - share)) + 1e-9


def orders(text, parts):
    """Class -> every text that it may have, by brute force over cuts and permutations."""
    body = text[:-1] if text[-1] == SPECIAL.eos else text
    ends = [i + 1 for i, token in enumerate(body[:-1]) if ENDS[token]]
    found, label = {}, 0
    for n in range(1, parts + 1):
        for order in itertools.permutations(range(n)):
            found[label] = set()
            for cuts in itertools.combinations(ends, n - 1):
                segments = [body[a:b] for a, b in itertools.pairwise([0, *cuts, len(body)])]
                moved = [token for k in order for token in segments[k]]
                found[label].add((*moved, *text[len(body) :]))
            label += 1
    return found


@pytest.mark.parametrize("parts", [3, 4])
@pytest.mark.parametrize("with_eos", [True, False])
def test_the_class_of_an_order_matches_brute_force(parts, with_eos):
    made, text = make("sentence_reordering", 60, parts=parts, **SHOWN), text_of(40, with_eos)
    expected, count = orders(text.tolist(), parts), 6000
    assert len(expected) == made.config.class_heads["sentence_reordering"] == {3: 9, 4: 33}[parts]
    found = Counter()
    for example in many(made, text, count):
        label = int(example.targets[0])
        assert example.objective[0] == CLASS_HEADS["sentence_reordering"] and example.weights[0] == 1
        assert tuple(example.tokens[1:-1].tolist()) in expected[label]
        found[label] += 1
    first = 0
    for n in range(1, parts + 1):
        for label in range(first, first + math.factorial(n)):
            assert near(found[label], count, 1 / parts / math.factorial(n)), label
        first += math.factorial(n)


def test_a_text_of_few_sentences_has_few_segments():
    text = np.array([1002, 1008, 1009], np.int32)  # 1008 ends a sentence
    labels = {int(example.targets[0]) for example in many(make("sentence_reordering", 20), text, 200)}
    assert labels == {0, 1, 2}
    assert {int(e.targets[0]) for e in many(make("sentence_reordering", 20), text[:1], 20)} == {0}


@pytest.mark.parametrize("far, wrong", [(0.25, 0.0), (1 / 3, 1 / 3), (0.0, 0.4)])
def test_distances_match_the_text(far, wrong):
    made = make("sentence_distance", 400, far_prob=far, wrong_prob=wrong, **SHOWN)
    chunks = [text_of(40, False, FIRST_TEXT_TOKEN + 40 * number) for number in range(8)]
    samples, found = 500, Counter()
    for fields in collate(made, [chunks] * samples):
        for number, example in enumerate(Example.from_fields(fields).documents()):
            assert example.objective[0] == CLASS_HEADS["sentence_distance"]
            label, middle = int(example.targets[0]), int(np.argmax(example.tokens == SPECIAL.sep))
            first, second = example.tokens[1:middle], example.tokens[middle + 1 : -1]
            own = chunks[number]
            assert first[0] == own[0] and ENDS[first[-1]]
            if label == 2:
                assert second[0] not in own
            else:
                assert second[-1] == own[-1] and (second[0] > first[-1] + 1) == (label == 1)
                assert ENDS[second[0] - 1]
            found[label] += 1
    trials = 8 * samples
    alone = trials * wrong * (1 - wrong) ** 7 / trials  # without another document to exchange with
    shares = (1 - far - wrong + alone, far, wrong - alone)
    assert all(near(found[label], trials, share) for label, share in enumerate(shares)), (found, shares)


def test_tokens_know_whether_the_other_part_has_them():
    rng = np.random.default_rng(1)
    made, seen = make("token_document", 40), Counter()
    for sample in range(200):
        text = rng.integers(FIRST_TEXT_TOKEN, FIRST_TEXT_TOKEN + 30, 34).astype(np.int32)
        example = made.example(text, sample)
        masked = (example.weights > 0) & (example.objective != CLASS_HEADS["token_document"])
        whole = np.where(masked, example.targets, example.tokens)
        parts = [whole[(example.doc == number)][1:-1] for number in (0, 1)]
        assert (np.concatenate(parts) == text).all()
        for number in (0, 1):
            here = np.flatnonzero(example.doc == number)
            labelled = here[example.objective[here] == CLASS_HEADS["token_document"]]
            assert set(labelled) == set(here[1:-1]) - set(np.flatnonzero(masked))
            expected = np.isin(example.tokens[labelled], parts[1 - number])
            assert (example.targets[labelled] == expected).all()
            seen.update(expected.tolist())
    assert min(seen.values()) > 500


def test_words_know_their_capitals_and_other_objectives_do_not():
    """Those that are not masked, alone and in a mixture, whose other rows are as they are without capitals."""
    rng, chunks = np.random.default_rng(1), [40, 30, 1] * 100
    text = rng.integers(FIRST_TEXT_TOKEN, FIRST_TEXT_TOKEN + 30, sum(chunks)).astype(np.int32)
    capitals = rng.integers(-1, 2, len(text)).astype(np.int32)
    made, other = make("capitalization", 80), make("sentence_distance", 80)
    given = (np.array(chunks), np.full(100, 3), np.arange(100))
    seen, masked_words = Counter(), 0
    alone, plain = (collate_all(one, np.stack([text, capitals]), *given) for one in (made, other))
    assert np.array_equal(plain, collate_all(other, text, *given))
    without = collate_all(made, text, *given)
    for fields, unlabelled, first in zip(alone, without, range(0, len(text), 71), strict=True):
        example, before = Example.from_fields(fields), Example.from_fields(unlabelled)
        of_text = np.isin(example.position_ids, 0, invert=True) & (example.tokens != SPECIAL.sep)
        labels = np.full(len(of_text), -1)
        labels[of_text] = capitals[first : first + 71]
        masked = before.weights > 0
        labelled = (labels >= 0) & ~masked
        assert np.array_equal(example.weights > 0, masked | labelled)
        assert (example.targets[labelled] == labels[labelled]).all()
        assert (example.objective[labelled] == CLASS_HEADS["capitalization"]).all()
        assert (example.targets[masked] == before.targets[masked]).all()
        assert not fields[BLOCK_POSITION_IDS].any()
        seen.update(labels[labelled].tolist())
        masked_words += int(masked.sum())
    assert near(seen[1], seen[0] + seen[1], 0.5) and near(masked_words, 100 * 78, 0.15)
    mixed = Mixed([made, other], [1, 1], 7)
    rows, chosen = collate_all(mixed, np.stack([text, capitals]), *given), mixed.choose(np.arange(100))
    for row, kind, *both in zip(rows, chosen, alone, plain, strict=True):
        assert np.array_equal(row, both[kind])


def test_shares_of_distances_are_one_at_most():
    with pytest.raises(ConfigError, match=r"far_prob 0\.7 and wrong_prob 0\.5; their sum must be at most 1"):
        OBJECTIVES["sentence_distance"].config_class(far_prob=0.7, wrong_prob=0.5)


@pytest.mark.parametrize("name", ["discourse_relation", "relevance"])
@pytest.mark.parametrize("with_eos", [True, False])
def test_a_pair_is_two_texts_and_its_label_and_a_text_without_one_has_none(name, with_eos):
    """By brute force from A, B and label of each chunk; alone or in a window, a chunk is the same Example."""
    rng, made = np.random.default_rng(5), make(name, 120)
    shown, number = make(name, 120, **SHOWN), CLASS_HEADS[name]
    for sample in range(200):
        pairs, first = [], FIRST_TEXT_TOKEN
        for _ in range(rng.integers(1, 5)):
            lengths, label = rng.integers(1, 12, 2), int(rng.integers(-1, 3))
            text = text_of(int(lengths.sum()) + with_eos, with_eos, first)
            marks = np.full(len(text), -1, np.int32)
            marks[lengths[0]] = label
            pairs.append((np.stack([text, marks]), int(lengths[0]), label))
            first += len(text)
        given = np.array([chunk.shape[1] for chunk, *_ in pairs]), np.array([len(pairs)]), np.array([sample])
        (fields,), (plain,) = (
            collate_all(each, np.concatenate([chunk for chunk, *_ in pairs], 1), *given)
            for each in (made, shown)
        )
        documents = zip(
            Example.from_fields(fields).documents(), Example.from_fields(plain).documents(), strict=True
        )
        for (chunk, cut, label), (example, before) in zip(pairs, documents, strict=True):
            body = chunk[0].tolist()
            halves = [body[:cut], body[cut:]] if label >= 0 else [body]
            expected = [SPECIAL.cls, *(token for half in halves for token in (*half, SPECIAL.sep))]
            assert before.tokens.tolist() == expected
            segments = [0] * (len(halves[0]) + 2) + [1] * (len(expected) - len(halves[0]) - 2)
            assert example.segment_ids.tolist() == segments
            assert (example.weights[0], example.objective[0] == number) == (label >= 0, label >= 0)
            assert label < 0 or example.targets[0] == label
            masked = example.weights[1:] > 0
            assert (example.targets[1:][masked] == before.tokens[1:][masked]).all()
            assert (example.objective[1:] == number - 1).all()
