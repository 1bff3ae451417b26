"""What is particular to each recipe: its distributions, exhaustively where small, and its labels.

Chi-square tests are at level 0.001 with fixed seeds: they either pass for ever or show a change.
"""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from support.data.chi_square import chi_square, chi_square_limit
from support.data.recipes import (
    FIRST_TEXT_TOKEN,
    MODE_TOKENS,
    SENTINELS,
    SPECIAL,
    UL2_TOKENS,
    collate,
    make,
    many,
    rebuilt_in_place,
    span_boundaries,
    text_of,
    unilmv2,
    vocabulary,
    xlnet,
)
from support.transformer.mask_rule import allowed, leaks

from data_utils.common.batch_fields import Example
from data_utils.common.errors import ConfigError
from data_utils.common.settings import build
from data_utils.objectives import LOSS_NAMES, OBJECTIVES
from data_utils.objectives.ernie import Ernie, ErnieConfig, TextSegmenter, jieba_segmenter
from data_utils.objectives.fill_in_middle import FillInMiddleConfig
from data_utils.objectives.t5 import T5, T5Config
from data_utils.objectives.ul2 import PUBLISHED, DenoiserConfig, Ul2Config
from data_utils.tokenizers.vocabulary import Vocabulary


def uniform(counts: Counter, cases: int) -> bool:
    values = np.array(list(counts.values()))
    assert len(values) == cases
    return chi_square(values, np.full(cases, values.sum() / cases)) < chi_square_limit(cases - 1)


# BERT, ALBERT, UniLM


@pytest.mark.parametrize(
    ("name", "label"),
    [("masked_lm", "next_sentence"), ("ernie", "next_sentence"), ("albert", "sentence_order")],
)
def test_half_of_the_labels_are_wrong_and_true_to_the_text(name, label):
    config = {"next_sentence": True} if label == "next_sentence" else {}
    examples = many(make(name, 40, **config), text_of(30), 2000)
    wrong = 0
    for example in examples:
        assert LOSS_NAMES[example.objective[0]] == label and example.weights[0] == 1
        text = np.where(example.weights > 0, example.targets, example.tokens)
        middle = int(np.argmax(text[1:] == SPECIAL.sep)) + 1
        in_order = text[1] < text[middle + 1] or text[middle + 1] == SPECIAL.eos
        assert in_order == (example.targets[0] == 0)
        assert set(example.segment_ids[: middle + 1]) == {0} and set(example.segment_ids[middle + 1 :]) == {1}
        wrong += int(example.targets[0])
    assert abs(wrong - 1000) < 5 * np.sqrt(500)


def test_wrong_next_sentences_come_from_other_documents():
    """Three documents in a window: B of a wrong pair is never its own, and no text is lost."""
    made = make("masked_lm", 100, next_sentence=True, mask_token_prob=0.0, random_token_prob=0.0)
    window = [text_of(20, False, FIRST_TEXT_TOKEN + 100 * k) for k in range(3)]
    batch = collate(made, [window] * 1000)
    wrong_pairs = 0
    for fields in batch:
        documents = Example.from_fields(fields).documents()
        wrong = [document.targets[0] == 1 for document in documents]
        for k, document in enumerate(documents):
            text = document.tokens[1:-1][document.tokens[1:-1] != SPECIAL.sep]
            from_k = text // 100 == window[k][0] // 100
            if not wrong[k]:
                assert (rebuilt_in_place(document) == window[k]).all()
            elif sum(wrong) == 1:
                assert from_k.all()
            else:
                wrong_pairs += 1
                middle = int(np.argmax(document.tokens == SPECIAL.sep)) - 1
                assert from_k[:middle].all() and not from_k[middle:].any()
    assert wrong_pairs > 1000


def test_pairs_are_cut_at_ends_of_sentences():
    made = make("albert", 40, sentence_order=True)
    for example in many(made, text_of(30), 200):
        text = np.where(example.weights > 0, example.targets, example.tokens)
        middle = int(np.argmax(text[1:] == SPECIAL.sep)) + 1
        first_half_ends = text[middle - 1] if example.targets[0] == 0 else text[-2]
        assert first_half_ends % 7 == 0


def test_static_masks_repeat_and_dynamic_ones_do_not():
    static = make("masked_lm", 64, static_copies=3)
    rows = [example.tokens.tobytes() for example in many(static, text_of(60), 30)]
    assert len(set(rows)) == 3 and rows[:3] * 10 == rows
    assert len({example.tokens.tobytes() for example in many(make("masked_lm", 64), text_of(60), 30)}) == 30
    other = [example.tokens for example in many(static, text_of(60, True, 1500), 3)]
    assert (other[0] - 500 != np.frombuffer(rows[0], np.int32)).any(), "another text has other masks"


def test_unilm_mixes_its_four_kinds():
    examples = many(make("unilm", 24), text_of(20), 6000)
    kinds = Counter(LOSS_NAMES[example.objective[1]] for example in examples)
    names = ("bidirectional", "seq2seq", "left_to_right", "right_to_left")
    counts = np.array([kinds[name] for name in names])
    assert chi_square(counts, np.array([2000, 2000, 1000, 1000])) < chi_square_limit(3)
    segments = {"bidirectional": {0, 1}, "seq2seq": {4, 5}, "left_to_right": {2}, "right_to_left": {3}}
    for example in examples[:500]:
        kind = LOSS_NAMES[example.objective[1]]
        assert set(example.segment_ids) == segments[kind]
        assert (LOSS_NAMES[example.objective[0]] == "next_sentence") == (kind == "bidirectional")


# SpanBERT, ERNIE


def test_span_boundaries_are_the_tokens_outside_a_span():
    for example in many(make("spanbert", 100, mask_token_prob=1.0, random_token_prob=0.0), text_of(100), 50):
        for row, before, after, place in span_boundaries(example):
            assert example.weights[before] == 0 and example.weights[after] == 0
            assert example.tokens[before] != SPECIAL.mask and example.tokens[after] != SPECIAL.mask
            assert (example.weights[before + 1 : after] == 1).all() and row == before + place
    assert len(span_boundaries(make("causal", 8).example(text_of(1), 0))) == 1


def test_ernie_masks_the_units_of_a_segmenter():
    vocabulary = Vocabulary(SPECIAL, 3000, token_texts=tuple("ab" if i % 2 else "c" for i in range(3000)))
    segmenter = TextSegmenter(
        vocabulary.token_texts, lambda text: [text[i : i + 6] for i in range(0, len(text), 6)]
    )
    chunk = text_of(40, False)  # c ab c ab: units of four tokens
    assert np.flatnonzero(segmenter(chunk)).tolist() == list(range(0, 40, 4))
    made = Ernie(ErnieConfig(segmenter="tokens"), vocabulary, 5, 60)
    made.mask_units = segmenter
    for example in many(made, chunk, 100):
        predicted = (example.weights[1:-1] > 0).reshape(-1, 4)
        assert (predicted.all(1) == predicted.any(1)).all() and predicted.any()


def test_jieba_is_optional():
    with pytest.raises(ConfigError, match="text of every token"):
        Ernie(ErnieConfig(segmenter="jieba"), Vocabulary(SPECIAL, 3000), 5, 60)
    try:
        import jieba  # noqa: F401
    except ImportError:
        with pytest.raises(ConfigError, match="pip install jieba"):
            jieba_segmenter(Vocabulary(SPECIAL, 2, token_texts=("a", "b")))


# One stack for sequence to sequence


def test_prefixes_are_uniform():
    lengths = Counter(int((e.weights == 0).sum()) for e in many(make("prefix_lm", 24), text_of(10), 5000))
    assert set(lengths) == set(range(1, 11)) and uniform(lengths, 10)


def test_t5_divides_noise_and_rest_uniformly():
    """14 tokens at 30 %: 4 noise tokens in 2 spans, 10 others in 2 parts: 3 x 9 cases, equally likely."""
    made = make("t5", 24, noise_ratio=0.3, mean_span_length=2.0)
    cases = Counter()
    for example in many(made, text_of(14, False), 6000):
        context = example.tokens[example.ord == 0]
        answers = example.targets[example.weights > 0]
        masks = np.flatnonzero(context < FIRST_TEXT_TOKEN)
        assert context[masks].tolist() == list(SENTINELS[:2])
        assert context[0] == FIRST_TEXT_TOKEN and answers[-1] == SPECIAL.eos
        second = int(np.flatnonzero(answers == SENTINELS[1])[0])
        cases[(int(masks[0]), second - 1)] += 1
    assert uniform(cases, 27)


def test_t5_sentinels_count_down_and_start_again():
    made = make("t5", 64, sentinel_first=900, sentinel_count=2, noise_ratio=0.2, mean_span_length=1.0)
    example = made.example(text_of(30, False), 0)
    context = example.tokens[example.ord == 0]
    assert context[(context < 1000)].tolist() == [900, 899, 900, 899, 900, 899]


@pytest.mark.parametrize("ids", [(900, 901, 902), (902, 901, 900), (7,)])
@pytest.mark.parametrize("objective", ["t5", "ul2"])
def test_the_vocabularys_own_sentinels_go_before_mask(objective, ids):
    """In the order of their names, whether their ids count up or down."""
    made_by = OBJECTIVES[objective]
    known = replace(vocabulary(), sentinels=ids)
    of = made_by(made_by.config_class(), known, 5, 64).example(text_of(60, False), 0)
    seen = [token for token in of.tokens[of.ord == 0].tolist() if token in ids]
    assert SPECIAL.mask not in of.tokens and seen
    assert seen == (list(ids) * len(seen))[: len(seen)]
    asked = made_by.config_class(sentinel_first=950, sentinel_count=2, sentinels_ascend=True)
    of = made_by(asked, known, 5, 64).example(text_of(60, False), 0)
    seen = [token for token in of.tokens[of.ord == 0].tolist() if token in (949, 950, 951)]
    assert seen == [950, 951, 950, 951, 950, 951][: len(seen)] and seen


def test_sentinels_that_neither_count_up_nor_down_are_refused():
    with pytest.raises(ConfigError, match=r"<extra_id_0>.*\(900, 905, 910, ...\).*t5.sentinel_first"):
        T5(T5Config(), replace(vocabulary(), sentinels=(900, 905, 910)), 5, 64)
    with pytest.raises(ConfigError, match="sentinels_ascend is true, but sentinel_first is null"):
        T5Config(sentinels_ascend=True)


def test_bart_removes_spans_and_permutes_sentences():
    made = make("bart", 64)
    orders, removed = set(), []
    for example in many(made, text_of(56, False), 500):
        context = example.tokens[example.ord == 0][1:]
        text = context[context != SPECIAL.mask]
        removed.append(56 - len(text))
        assert len(set(text.tolist())) == len(text) and len(context) <= 56
        sentences = (text - FIRST_TEXT_TOKEN + 6) // 7  # tokens 1001, 1008, ... end sentences
        orders.add(tuple(key for key, _ in itertools.groupby(sentences.tolist())))
        assert (example.targets[example.weights > 0] == text_of(56, False)).all()
    assert set(removed) == {int(0.3 * 56 + 0.5)}
    assert len(orders) > 400
    plain = many(make("bart", 64, permute_sentences=False), text_of(56, False), 50)
    for example in plain:
        text = example.tokens[example.ord == 0][1:]
        assert (np.diff(text[text != SPECIAL.mask]) > 0).all()


def test_bart_as_published_predicts_cls_first():
    """Decoder input </s> <s> x1 ... and labels <s> x1 ... xn."""
    text = text_of(20)
    made = make("bart", 24, row_length=60, masked_ratio=1.0, mean_span_length=0.1, predict_cls=True)
    for example in many(made, text, 20):
        assert len(example.tokens) <= made.config.most_tokens(20)
        target = example.segment_ids == 1
        assert example.tokens[target].tolist() == [SPECIAL.sop, SPECIAL.cls, *text[:-1].tolist()]
        assert example.targets[target].tolist() == [SPECIAL.cls, *text.tolist()]
        assert (
            example.position_ids[target].tolist() == list(range(21)) and (example.weights[target] == 1).all()
        )


def test_bart_inserts_masks_for_spans_without_tokens():
    """e**-3 of all spans; a mask more in the context than there are gaps in the text."""
    made = make("bart", 100, permute_sentences=False)
    inserted = spans = 0
    for example in many(made, text_of(100, False), 1000):
        context = example.tokens[example.ord == 0][1:]
        text = context[context != SPECIAL.mask]
        gaps = int((np.diff(np.r_[FIRST_TEXT_TOKEN - 1, text, FIRST_TEXT_TOKEN + 100]) > 1).sum())
        spans += gaps
        inserted += int((context == SPECIAL.mask).sum()) - gaps
    expected = np.exp(-3) / (1 - np.exp(-3))  # per span with tokens
    assert abs(inserted / spans - expected) < 5 * np.sqrt(expected * (1 + expected) / spans)


def test_mass_fragments_start_at_the_head_the_tail_or_anywhere():
    starts = []
    for example in many(make("mass", 24), text_of(20, False), 4000):
        decoder = example.segment_ids == 1
        assert decoder.sum() == 10 and (example.ord < 0).sum() == 10
        assert (np.diff(example.position_ids[decoder]) == 1).all()
        starts.append(int(example.position_ids[decoder][0]))
    expected = np.full(11, 0.6 / 11)
    expected[[0, -1]] += 0.2
    assert chi_square(np.bincount(starts, minlength=11), 4000 * expected) < chi_square_limit(10)


# UniLMv2 and XLNet, exhaustively


def test_every_ordered_partition_of_unilmv2_into_blocks():
    """Five tokens, all chosen: 261 orders of contiguous blocks, each with the paper's mask and no leak."""
    made = make("unilmv2", 8, masked_ratio=1.0)
    different = {
        (e.ord.tobytes(), e.position_ids.tobytes()): e for e in many(made, text_of(5, False), 20_000)
    }
    for example in different.values():
        mask = allowed(example.doc, example.ord, example.grp)
        assert (mask == unilmv2(example)).all()
        assert not leaks(example.tokens, example.targets, example.weights, mask)
    assert len(different) == 261


def test_unilmv2_orders_blocks_uniformly():
    """Three single tokens: 6 orders of their positions."""
    made = make("unilmv2", 12, masked_ratio=0.25, span_prob=0.0)
    orders = Counter()
    for example in many(made, text_of(10, False), 3000):
        assert (example.ord < 0).sum() == 3
        orders[tuple(np.argsort(example.position_ids[example.ord < 0]).tolist())] += 1
    assert uniform(orders, 6)


@pytest.mark.parametrize(
    ("length", "per_target", "two_texts", "cases"),
    [
        (5, 5, False, 5 * 6),
        (4, 2, False, 4 * 24),
        (3, 1, False, 120),
        (4, 4, True, 4 * 24),
        (2, 1, True, 120),
    ],
)
def test_every_choice_and_order_of_xlnet(length, per_target, two_texts, cases):
    """Targets, and the order of targets, SEP and CLS in one part: every case occurs, with the paper's mask and no leak.

    With one target in two tokens of four there are two windows of two: 4 sets of targets.
    """
    made = make("xlnet", 8, tokens_per_target=per_target, orders=1, max_ngram=1, two_texts=two_texts)
    different = {
        (e.ord.tobytes(), e.position_ids.tobytes()): e for e in many(made, text_of(length, False), 6000)
    }
    for example in different.values():
        mask = allowed(example.doc, example.ord, example.grp)
        assert (mask == xlnet(example)).all()
        assert not leaks(example.tokens, example.targets, example.weights, mask)
    assert len(different) == cases


def test_xlnet_predicts_a_sixth_in_random_order():
    """SEP and CLS have ranks, and their positions are as random as the targets'."""
    made = make("xlnet", 512)
    example = made.example(text_of(509, False), 0)
    assert (example.ord < 0).sum() == 84
    orders, marks = Counter(), Counter()
    for example in many(make("xlnet", 24, orders=1), text_of(20, False), 3000):
        queries = example.ord < 0
        assert queries.sum() == 3
        orders[tuple(np.argsort(-example.ord[queries]).tolist())] += 1
        marks[int(example.ord[example.tokens == SPECIAL.cls][0])] += 1
        ranked = np.isin(example.tokens, (SPECIAL.sep, SPECIAL.cls))
        ranks = [*example.ord[ranked], *-example.ord[queries]]
        assert sorted(ranks) == [1, 2, 3, 4, 5, 6]
    assert uniform(orders, 6) and uniform(marks, 6)


def test_segments_of_xlnet_match_its_pretraining():
    """[first half | A SEP B SEP CLS], of two documents: half of the texts B are the other one's."""
    made = make("xlnet", 120)
    window = [text_of(30, False), text_of(31, True, FIRST_TEXT_TOKEN + 100)]
    foreign = Counter()
    for fields in collate(made, [window] * 1000):
        for k, document in enumerate(Example.from_fields(fields).documents()):
            content = document.ord >= 0
            tokens, segments = document.tokens[content], document.segment_ids[content]
            first, second = np.flatnonzero(tokens == SPECIAL.sep).tolist()
            size = len(tokens)
            assert tokens[-1] == SPECIAL.cls and second == size - 2
            # The first half is never cut, and A never ends the document.
            assert len(window[k]) // 2 < first < len(window[k])
            assert (tokens[:first] == window[k][:first]).all()
            assert segments.tolist() == [0] * (first + 1) + [1] * (size - first - 2) + [2]
            b = tokens[first + 1 : second]
            whose = int(b[0] not in window[k])
            assert (b == window[1 - k if whose else k][-len(b) :]).all()
            foreign[k, whose] += 1
            assert document.position_ids[content].tolist() == list(range(size))
    # Both must be drawn, each with probability 1/2.
    assert foreign[0, 1] == foreign[1, 1] and abs(foreign[0, 1] - 250) < 5 * np.sqrt(1000 * 3 / 16)


def test_a_lone_chunk_of_xlnet_keeps_its_second_text():
    for example in many(make("xlnet", 40), text_of(30), 50):
        text = example.tokens[(example.ord >= 0) & (example.tokens != SPECIAL.sep)][:-1]
        assert (text == text_of(30)).all()


# Fill in the middle


def test_a_text_cut_in_three_by_hand():
    """abcdefgh cut at 2 and 6, of all cuts that are drawn: prefix, suffix, middle, or suffix, prefix, middle."""
    text = np.arange(1000, 1008)
    known = {"prefix_token": 7, "suffix_token": 8, "middle_token": 9, "rate": 1.0}
    for rate, expected in ((0.0, "7ab8gh9cdef"), (1.0, "78gh9abcdef")):
        made = make("fill_in_middle", 40, suffix_first_rate=rate, **known)
        found = {tuple(example.targets.tolist()) for example in many(made, text, 2000)}
        assert tuple(int(c) if c.isdigit() else 1000 + ord(c) - ord("a") for c in expected) in found
        assert len(found) == (45 if rate == 0.0 else 9)  # suffix first, nothing shows where the prefix ends


def test_cuts_are_uniform_and_rates_are_those_given():
    """Two places of 0 to 4 make 25 ordered pairs; unordered ones of two different places are twice as likely."""
    made = make("fill_in_middle", 40, rate=0.7, suffix_first_rate=0.3)
    pairs: Counter = Counter()
    whole = suffix_next = 0
    for example in many(made, text_of(4, False), 20000):
        answers = example.targets.tolist()
        if answers[0] != SPECIAL.cls:
            whole += 1
            continue
        suffix, middle = answers.index(SPECIAL.sep), answers.index(SPECIAL.mask)
        if suffix == 1:  # the suffix is first, or the prefix is empty
            suffix_next += 1
        else:
            pairs[suffix - 1, 4 - (middle - suffix - 1)] += 1
    for count, share in ((whole, 0.3), (suffix_next, 0.7 * (0.3 + 0.7 * 9 / 25))):
        assert abs(count - 20000 * share) < 5 * np.sqrt(20000 * share * (1 - share))
    places = [(a, b) for a in range(1, 5) for b in range(a, 5)]
    drawn = np.array([pairs[place] for place in places])
    assert drawn.sum() == sum(pairs.values())
    expected = np.array([1 if a == b else 2 for a, b in places]) * drawn.sum() / 16
    assert chi_square(drawn, expected) < chi_square_limit(len(drawn) - 1)


@pytest.mark.parametrize(("begin", "first"), [("eos", SPECIAL.eos), ("cls", SPECIAL.cls), ("none", None)])
def test_a_cut_text_begins_as_causal_ones_do(begin, first):
    made = make("fill_in_middle", 40, rate=0.5, begin=begin, prefix_token=7)
    for example in many(made, text_of(9), 40):
        answers, tokens = example.targets[example.weights > 0].tolist(), example.tokens.tolist()
        if first is None:  # the first token is not predicted
            assert answers == tokens[1:] and tokens[0] in (7, FIRST_TEXT_TOKEN) and example.weights[-1] == 0
        else:
            assert tokens == [first, *answers[:-1]]
        assert (example.ord == np.arange(len(tokens))).all()


def test_tokens_of_the_middle_are_checked():
    with pytest.raises(ConfigError, match="begin is cls, which is also the prefix token; set prefix_token"):
        make("fill_in_middle", 40, begin="cls")
    with pytest.raises(ConfigError, match=r"are \[5, 5\]; give each a different id"):
        make("fill_in_middle", 40, prefix_token=5, middle_token=5)
    with pytest.raises(ConfigError, match=r"suffix_token \(50\) must be below model.vocab_size \(50\)"):
        FillInMiddleConfig(suffix_token=50).check_vocabulary_size(50)


# UL2's mixture of denoisers


@pytest.mark.parametrize(
    ("number", "context", "target"),
    [(0, 463, 104), (1, 447, 88), (2, 343, 342), (3, 290, 289), (4, 438, 79), (5, 262, 261)],
)
def test_lengths_of_ul2_match_its_rates(number, context, target):
    """512 tokens and eos: the context with its mode's token and eos, and the target with eos."""
    made = make("ul2", 520, denoisers=(PUBLISHED[number],), **UL2_TOKENS)
    for example in many(made, text_of(513), 20):
        assert ((example.ord == 0).sum(), (example.weights > 0).sum()) == (context, target)
        kind = "regular_spans" if number < 2 else "extreme_spans"
        assert (example.objective == LOSS_NAMES.index(kind)).all() and example.tokens[0] == MODE_TOKENS[kind]
        assert example.position_ids.tolist() == [*range(context), *range(target)]
        assert example.segment_ids.tolist() == [0] * context + [1] * target
        if number == 4:  # a single span, at the end
            assert example.tokens[1:436].tolist() == text_of(435, False).tolist()


@pytest.mark.parametrize(("ratio", "most"), [(0.25, 19), (0.5, 39), (0.1, 7)])
def test_continuations_of_ul2_are_uniform_with_the_mean_that_is_asked_for(ratio, most):
    denoiser = DenoiserConfig(mode="sequential", noise_ratio=ratio)
    made = make("ul2", 60, denoisers=(denoiser,), **UL2_TOKENS)
    lengths = Counter()
    for example in many(made, text_of(40, False), 8000):
        rest = int((example.weights > 0).sum())
        lengths[rest] += 1
        context = [UL2_TOKENS["sequential_token"], *text_of(40 - rest, False).tolist(), SPECIAL.eos]
        assert example.tokens.tolist() == [
            *context,
            SPECIAL.sop,
            *text_of(40, False)[40 - rest : -1].tolist(),
        ]
        assert example.position_ids.tolist() == [*range(len(context)), *range(rest)]
    assert set(lengths) == set(range(1, most + 1)) and uniform(lengths, most)
    assert np.isclose(np.mean(list(lengths)), 40 * ratio)


def test_denoisers_of_ul2_have_their_shares_and_modes():
    """The published seven by their numbers of context tokens, and others by unequal shares."""
    sizes = {463: 0, 447: 1, 343: 2, 290: 3, 438: 4, 262: 5}
    drawn = Counter()
    for example in many(make("ul2", 520, **UL2_TOKENS), text_of(513), 3500):
        is_rest = LOSS_NAMES[example.objective[0]] == "continuations"
        drawn[6 if is_rest else sizes[int((example.ord == 0).sum())]] += 1
    assert uniform(drawn, 7)
    shares = (
        DenoiserConfig(share=3.0),
        DenoiserConfig(mode="sequential"),
        DenoiserConfig(mode="extreme", share=6.0),
    )
    made = make("ul2", 60, denoisers=shares)
    kinds = Counter(LOSS_NAMES[example.objective[0]] for example in many(made, text_of(40), 5000))
    counts = np.array([kinds[name] for name in ("regular_spans", "continuations", "extreme_spans")])
    assert chi_square(counts, np.array([1500, 500, 3000])) < chi_square_limit(2)
    assert made.example(text_of(40), 0).tokens[0] == FIRST_TEXT_TOKEN  # no token of a mode is given


def test_the_share_of_predicted_tokens_of_ul2_is_what_rows_have():
    made = make("ul2", 520, **UL2_TOKENS)
    examples = many(made, text_of(513), 3500)
    predicted = sum((example.weights > 0).sum() for example in examples)
    found = predicted / sum(len(example.tokens) for example in examples)
    assert abs(found / made.config.loss_share - 1) < 0.02


def test_settings_of_ul2_are_checked():
    with pytest.raises(ConfigError, match=r"mode tokens \[5, 5\]; give each mode a different id"):
        make("ul2", 40, regular_token=5, extreme_token=5)
    with pytest.raises(ConfigError, match=r"ul2.extreme_token \(50\) must be below model.vocab_size \(50\)"):
        Ul2Config(extreme_token=50).check_vocabulary_size(50)
    with pytest.raises(ConfigError, match=r"ul2.sentinel_first \(20\) must be at least sentinel_count - 1"):
        Ul2Config(sentinel_first=20)
    with pytest.raises(ConfigError, match=r"ul2.denoisers.*mode is 'other'"):
        build(Ul2Config, {"denoisers": [{"mode": "other"}]}, "ul2.")
