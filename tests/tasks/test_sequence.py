"""Sequence to sequence in every form, and blanks: layouts, who sees whom, what is drawn, what is cut and refused."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as example_count
from hypothesis import strategies as st
from support.data.recipes import encoder_decoder
from support.tasks.task_inputs import ALL_MASKS, form, record, renderer, settings, shown, tokenizer
from support.transformer.mask_rule import allowed, leaks

from data_utils.common.batch_fields import FIELDS, Example
from data_utils.common.errors import ConfigError, DataError
from data_utils.objectives import LOSSES
from data_utils.tasks.templates.input_formats import InputFormat
from data_utils.tasks.templates.render import Renderer
from data_utils.tasks.templates.sequence import overhead
from megatron_lite.inference.filling import blank_context
from megatron_lite.transformer.batch import Batch

SOURCE, TARGET = "rain falls in wet city", "he runs north"
PAIR = record(TARGET, source=SOURCE, target=TARGET)
PLAIN = {"masked_ratio": 1.0, "target_mask_prob": 0.0}
FORMS = ["blank_infilling", "causal", "prefix_lm", "t5", "bart", "mass", "unilm", "unilmv2"]


def made_of(objective, kind_of_tokenizer="bert", **more):
    return renderer(objective, kind_of_tokenizer, kind="seq2seq", **more)


def one(made, given=PAIR, number=0, epoch=0) -> Example:
    return made.sample(given, number, epoch).documents[0]


def mask_of(example):
    return allowed(example.doc, example.ord, example.grp)


@pytest.mark.parametrize(
    ("objective", "tokens", "predicted"),
    [
        (
            "blank_infilling",
            f"[CLS] {SOURCE} [MASK] [PAD] <|startofpiece|> {TARGET}",
            f"{TARGET} <|endofpiece|>",
        ),
        ("causal", f"[PAD] {SOURCE} {TARGET}", f"{TARGET} [PAD]"),
        ("prefix_lm", f"[CLS] {SOURCE} <|startofpiece|> {TARGET}", f"{TARGET} [PAD]"),
        ("t5", f"{SOURCE} [PAD] <|startofpiece|> {TARGET}", f"{TARGET} [PAD]"),
        ("bart", f"[CLS] {SOURCE} [PAD] <|startofpiece|> {TARGET}", f"{TARGET} [PAD]"),
        ("mass", f"[CLS] {SOURCE} [SEP] [CLS] {TARGET}", f"{TARGET} [SEP]"),
    ],
)
def test_the_layout_of_every_form(objective, tokens, predicted):
    """eos has the id of [PAD] in this vocabulary."""
    made = made_of(objective)
    example = one(made)
    rows = np.flatnonzero(example.weights)
    assert made.head == "tokens" and shown(example, made) == tokens
    assert made.inputs.tokenizer.decode(example.targets[rows]) == predicted
    size, length = len(example.tokens), len(rows)
    assert rows.tolist() == [*range(size - length, size)], "the target's rows are the last ones"
    mask = (
        np.tril(np.ones((size, size), bool))
        if objective == "causal"
        else encoder_decoder(size, size - length)
    )
    assert (mask_of(example) == mask).all()
    words = np.where(example.targets > 4, example.weights, 0.0)  # a special token may stand elsewhere too
    assert not leaks(example.tokens, example.targets, words, mask_of(example))
    prompt = made.prompt(PAIR, 0)
    assert example.tokens[: len(prompt)].tolist() == prompt


def test_masks_in_an_answer():
    """The source is never masked; the answer's ends are, and count; weights and divisor are the paper's."""
    made = made_of("masked_diffusion", target_length=6)
    special, size = made.inputs.special, len(made.prompt(PAIR, 0))
    words = made.inputs.tokenizer.encode(TARGET)
    answer = [*words, *[special.eos] * (6 - len(words))]
    assert made.prompt(PAIR, 0) == made.inputs.tokenizer.encode(SOURCE) and len(words) == 3
    sums, counts = [], np.zeros(6)
    for number in range(400):
        example = one(made, number=number)
        assert example.tokens[:size].tolist() == made.prompt(PAIR, 0) and not example.weights[:size].any()
        masked = example.tokens[size:] == special.mask
        assert (example.weights[size:] > 0).tolist() == masked.tolist()
        assert np.where(masked, example.targets[size:], example.tokens[size:]).tolist() == answer
        assert len(set(example.weights[size:][masked])) <= 1 and not example.targets[:size].any()
        assert mask_of(example).all() and example.position_ids.tolist() == [*range(size + 6)]
        batch = Batch(batch_of(example))
        number_of_loss = made.inputs.input_format.loss()
        assert batch.loss_divisor == 6 == batch.loss_divisors(len(LOSSES))[number_of_loss]
        sums.append(example.weights.sum() / 6)
        counts += masked
    assert abs(np.mean(sums) - 1) < 4 * np.std(sums) / 20  # 1 / share makes it an estimate for all tokens
    assert (abs(counts / 400 - 0.5) < 0.11).all()
    assert one(made, epoch=1).tokens.tolist() != one(made, epoch=2).tokens.tolist()
    long = record(None, source=SOURCE, target="he runs north and south north and south")
    kept = one(made, long)
    words = made.inputs.tokenizer.encode("he runs north and south north")
    assert np.where(kept.weights[size:] > 0, kept.targets[size:], kept.tokens[size:]).tolist() == words


def batch_of(example):
    """int32 [1, fields, length]: the fields of one document."""
    fields = [np.asarray(getattr(example, name)) for name in FIELDS]
    return np.stack([p.view(np.int32) if p.dtype == np.float32 else p for p in fields])[None]


@pytest.mark.parametrize(
    ("objective", "first", "segment"), [("t5", 0, 1), ("bart", 0, 1), ("mass", 0, 1), ("prefix_lm", 6, 0)]
)
def test_positions_of_the_target(objective, first, segment):
    example = one(made_of(objective))
    rows = np.flatnonzero(example.weights)
    assert example.position_ids[rows].tolist() == [*range(first, first + len(rows))]
    assert set(example.segment_ids[rows]) == {segment} and not example.segment_ids[: rows[0]].any()
    assert example.grp.any() == (objective == "mass")


def test_a_published_bart_predicts_cls_and_a_published_t5_begins_with_pad():
    config = settings(kind="seq2seq")
    made = Renderer(config, tokenizer(), InputFormat("encoder_decoder", "bart", predict_cls=True), 7)
    example = one(made)
    rows = np.flatnonzero(example.weights)
    assert shown(example, made).endswith(f"<|startofpiece|> [CLS] {TARGET}")
    assert example.targets[rows[0]] == made.inputs.special.cls and len(rows) == 5
    made = Renderer(config, tokenizer("bert", "none"), form("t5"), 7)
    example = one(made)
    assert "sop" in made.inputs.tokenizer.lacking
    assert example.tokens[np.flatnonzero(example.weights)[0]] == made.inputs.special.pad


@pytest.mark.parametrize("kind_of_tokenizer", ["bert", "gpt2"])
def test_what_is_written_is_text(kind_of_tokenizer):
    made = made_of("blank_infilling", kind_of_tokenizer)
    rows = one(made).targets[one(made).weights > 0]
    assert made.written(made.prompt(PAIR, 0), [rows[:-1].tolist()]) == TARGET


def test_chinese_has_no_space_before_it():
    made = made_of("blank_infilling", "gpt2")
    tokens = made.inputs.tokenizer.encode
    assert made.inputs.continuation("\u4eca\u5929 x") == tokens("\u4eca\u5929 x")
    assert made.inputs.continuation("x") == tokens(" x") != tokens("x")


# ---- GLM ----


def test_templates_of_the_reference():
    def text(name, given=PAIR, **more):
        made = made_of("blank_infilling", "gpt2", name=name, **more)
        return shown(one(made, given), made)

    assert text("XSum").startswith(f"[CLS][MASK] Content: {SOURCE}<|endoftext|><|startofpiece|> {TARGET}")
    assert text("own") == f"[CLS]{SOURCE}[MASK]<|endoftext|><|startofpiece|> {TARGET}"
    assert text("own", template="Q {source} A [MASK].").startswith(f"[CLS]Q {SOURCE} A[MASK].<|endoftext|>")
    asked = record(("it",), question="what is wet", context="rain and it", answers=(("it", 9),))
    assert text("squad_questions", asked).startswith(
        "[CLS]rain and it Question:[MASK] Answer: it<|endoftext|>"
    )
    assert text("squad_questions", asked).endswith(" what is wet")
    assert text("squad_answers", asked).startswith("[CLS]what is wet[MASK] . rain and it<|endoftext|>")
    none = record((), question="what", context="rain", answers=())
    assert text("squad_answers", none).endswith("<|startofpiece|> N/A")


@pytest.mark.parametrize("masks", [ALL_MASKS, ("mask", "gmask"), ("mask",)])
def test_the_context_matches_use(masks):
    made = Renderer(settings(kind="seq2seq"), tokenizer(), form(masks=masks), 7)
    special, name = made.inputs.special, masks[1] if len(masks) > 1 else "mask"
    words = made.inputs.tokenizer.encode(SOURCE)
    assert made.prompt(PAIR, 0) == blank_context([*words, getattr(special, name)], special)
    example = one(made)
    assert set(example.objective) == {ALL_MASKS.index(name)}
    assert set(example.position_ids[-4:]) == {len(words) + 1}
    assert example.block_position_ids[-4:].tolist() == [1, 2, 3, 4]


def test_the_part_of_a_long_context_around_the_answer_is_kept():
    context = " ".join(["rain"] * 60 + ["the man"] + ["wet"] * 60)
    asked = record(("man",), question="who", context=context, answers=(("man", context.index("man")),))
    made = made_of("blank_infilling", name="squad_questions", sequence_length=40)
    text = shown(one(made, asked), made)
    assert "rain the man wet" in text and "Answer : man" in text.replace("answer", "Answer")
    assert len(made.prompt(asked, 0)) <= 40


def test_windows_without_the_answer_teach_that_there_is_none():
    context = " ".join(["rain"] * 60 + ["the man"] + ["wet"] * 60)
    asked = record(("man",), question="who", context=context, answers=(("man", context.index("man")),))
    made = made_of("blank_infilling", name="squad_answers", sequence_length=40)
    windows = made.prepare([asked], training=True)
    answers = [shown(one(made, window), made).partition("<|startofpiece|> ")[2] for window in windows]
    assert len(windows) > 4 and 1 <= answers.count("man") <= 2 and set(answers) == {"man", "n / a"}
    for window, answer in zip(windows, answers, strict=True):
        assert ("man" in window.fields["context"]) == (answer == "man") and made.sample(window, 0).cut == 0
    words = [word for window in windows for word in window.fields["context"].split()]
    assert set(words) == {"rain", "the", "man", "wet"} and len(words) > 122
    assert made.prepare([asked], training=False) == [asked]


# ---- lengths ----


@pytest.mark.parametrize("objective", FORMS)
def test_source_and_target_are_cut(objective):
    made = made_of(objective, sequence_length=10, target_length=3, **PLAIN)
    long = record(None, source="in " * 30 + "rain", target="he runs north and south")
    sample = made.sample(long, 0)
    example = sample.documents[0]
    prompt = made.prompt(long, 0)
    assert len(prompt) == 10 and sample.cut == 31 - (len(prompt) - overhead(made.inputs.input_format)) + 2
    kept_end = made.inputs.tokenizer.encode("rain")[0] in prompt
    assert kept_end == (objective in ("blank_infilling", "causal", "prefix_lm")), (
        "the end is next to the target"
    )
    targets = example.targets[(example.weights > 0)]
    assert made.inputs.tokenizer.decode(targets).startswith("he runs north") or objective == "unilm"
    assert len(targets) == (3 if objective == "unilm" else 4), "three words, and the end"


def test_a_summary_loses_its_end():
    made = made_of("blank_infilling", name="xsum", sequence_length=20)
    text = shown(one(made, record(None, source="rain " + "in " * 30, target="it")), made)
    assert "rain" in text


@pytest.mark.parametrize("objective", FORMS)
def test_unlabelled_records_have_no_loss(objective):
    made = made_of(objective)
    unlabelled = record(None, source=SOURCE)
    example = one(made, unlabelled)
    assert not example.weights.any() and example.tokens.tolist() == made.prompt(PAIR, 0)
    assert made.prepare([unlabelled, PAIR], training=True) == [PAIR]
    assert made.prepare([unlabelled], training=False) == [unlabelled]


# ---- UniLM ----


@pytest.mark.parametrize(("ratio", "count"), [(0.01, 1), (0.5, 2), (0.7, 2), (1.0, 3)])
def test_unilm_masks_in_place(ratio, count):
    made = made_of("unilm", masked_ratio=ratio)
    ids = made.inputs.tokenizer.encode(f"{SOURCE} {TARGET}")
    special = made.inputs.special
    seen, shares = set(), np.zeros(3)
    for number in range(400):
        example = one(made, number=number)
        chosen = np.flatnonzero(example.weights)
        assert len(chosen) == count and chosen.min() >= 7
        text = np.where(example.weights > 0, example.targets, example.tokens)
        assert text.tolist() == [special.cls, *ids[:5], special.sep, *ids[5:], special.sep]
        read = example.tokens[chosen]
        shares += [(read == special.mask).sum(), 0, (read == example.targets[chosen]).sum()]
        replaced = read[(read != special.mask) & (read != example.targets[chosen])]
        shares[1] += len(replaced)
        assert not set(replaced.tolist()) & set(made.inputs.tokenizer.special_names)
        assert (mask_of(example) == encoder_decoder(11, 7)).all()
        assert example.segment_ids.tolist() == [4] * 7 + [5] * 4
        seen.update(chosen.tolist())
    assert seen == {7, 8, 9, 10}, "every token of the target is masked at some time, its end included"
    assert np.allclose(shares / shares.sum(), [0.8, 0.1, 0.1], atol=0.06)  # 4 deviations of 400 draws


def test_draws_differ_by_sample_and_epoch_only():
    made = made_of("unilm")
    assert (one(made).tokens == one(made).tokens).all()
    texts = {tuple(one(made, number=number, epoch=epoch).tokens) for number in range(6) for epoch in range(6)}
    assert len(texts) > 5
    again = made_of("unilm")
    assert (one(again, number=3, epoch=2).tokens == one(made, number=3, epoch=2).tokens).all()


def test_pseudo_masks_predict_every_token_of_the_target():
    made = made_of("unilmv2", target_mask_prob=0.0)
    special = made.inputs.special
    target = [*made.inputs.tokenizer.encode(TARGET), special.sep]
    expected = np.zeros((15, 15), bool)
    expected[:11, :11] = encoder_decoder(11, 7)
    for j in range(4):
        expected[11 + j, : 7 + j] = True  # the source and the tokens before
        expected[11 + j, 11 + j] = True
    masked = 0
    for number in range(200):
        example = one(made, number=number)
        assert example.targets[example.weights > 0].tolist() == target
        assert example.tokens[7:11].tolist() == target
        assert (example.position_ids[11:] == example.position_ids[7:11]).all()
        assert (mask_of(example) == expected).all()
        masked += int((example.tokens[11:] == special.mask).sum())
        if (example.tokens[11:] == special.mask).all():
            words = np.where(
                example.targets != special.sep, example.weights, 0.0
            )  # [SEP] ends the source too
            assert not leaks(example.tokens, example.targets, words, mask_of(example))
    assert abs(masked / 800 - 0.8) < 0.06
    late = np.where(example.ord < 0, example.ord - 1, example.ord)
    assert leaks(example.tokens, example.targets, example.weights, allowed(example.doc, late, example.grp))


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_unilmv2_drops_words_that_others_see(share):
    made = made_of("unilmv2", target_mask_prob=share)
    target = [*made.inputs.tokenizer.encode(TARGET), made.inputs.special.sep]
    changed = [(one(made, number=number).tokens[7:11] != target).mean() for number in range(200)]
    assert abs(np.mean(changed) - 0.9 * share) < 0.06, "a tenth of the replaced ones is itself"


# ---- refusals ----


@pytest.mark.parametrize(
    ("objective", "more", "message"),
    [
        ("masked_lm", {}, "format is bert .masked_lm., which predicts single tokens"),
        ("blank_infilling", {"template": "{source}"}, r"contains \[MASK\] 0 times"),
        ("blank_infilling", {"template": "text [MASK]"}, "has no field"),
        ("blank_infilling", {"name": "xsum", "sequence_length": 10}, r"of one token need 12"),
    ],
)
def test_what_cannot_write_is_refused(objective, more, message):
    with pytest.raises(ConfigError, match=message):
        made_of(objective, **more)


def test_empty_texts_are_refused():
    for pair, what in (
        (record(None, source=" ", target="x"), "source"),
        (record(None, source="x", target=" "), "target"),
    ):
        with pytest.raises(DataError, match=rf"data.jsonl:1: the {what} has no token"):
            made_of("causal").sample(pair, 0)


# ---- blanks ----

TEXT = "rain falls in wet city he runs north and south"


def blanks(**more):
    return renderer("blank_infilling", kind="blanks", **more)


def fillings(example, made):
    """What part B predicts, span by span."""
    spans, span = [], []
    for target in example.targets[example.ord > 0]:
        if target == made.inputs.special.eop:
            spans.append(span)
            span = []
        else:
            span.append(int(target))
    return spans


def filled(example, made):
    """The text with its blanks filled, from part A and the fillings in their order."""
    special, spans = made.inputs.special, fillings(example, made)
    size = int((example.ord == 0).sum())
    out = []
    for token in example.tokens[1 : size - 1]:
        out += spans.pop(0) if token == special.mask else [int(token)]
    assert not spans
    return out


@example_count(max_examples=60, deadline=None)
@given(
    st.lists(st.sampled_from(["rain", "xyz", "city", "running", "."]), min_size=1, max_size=40),
    st.sampled_from([0.1, 0.3, 0.5, 0.9]),
    st.integers(0, 99),
)
def test_hidden_words_fill_the_text_again(words, ratio, number):
    made = blanks(blank_ratio=ratio)
    text = " ".join(words)
    ids = made.inputs.tokenizer.encode(text)
    example = one(made, record(text, text=text), number)
    assert filled(example, made) == ids
    hidden = [
        t for t, w in zip(example.targets, example.weights, strict=True) if w and t != made.inputs.special.eop
    ]
    begins = made.task_type.vocabulary.word_start[hidden].sum()
    assert begins == max(1, int(ratio * len(words) + 1e-9)), "whole words, as many as asked for"
    context = example.tokens[example.ord == 0]
    spans = fillings(example, made)
    assert made.written(context.tolist(), spans) == made.inputs.tokenizer.decode(ids)
    double = (context[1:] == made.inputs.special.mask) & (context[:-1] == made.inputs.special.mask)
    assert not double.any(), "neighbours are one blank"
    positions = example.position_ids[example.ord > 0]
    assert (np.diff(positions) >= 0).all() and (context[positions] == made.inputs.special.mask).all()
    assert made.prompt(record(text, text=text), number) == context.tolist()
    assert (example.ord[len(context) :] == np.arange(1, len(example.tokens) - len(context) + 1)).all()


def test_blanks_are_drawn_anew_in_each_epoch():
    made = blanks(blank_ratio=0.3)
    given = record(TEXT, text=TEXT)
    draws = {tuple(one(made, given, 0, epoch).tokens) for epoch in range(10)}
    assert len(draws) > 5 and tuple(one(made, given, 0, 3).tokens) in draws


@pytest.mark.parametrize("kind_of_tokenizer", ["bert", "gpt2"])
def test_blanks_of_a_file(kind_of_tokenizer):
    made = renderer("blank_infilling", kind_of_tokenizer, kind="blanks")
    given = record(TEXT, masked="<blank> in wet <blank> <blank> runs", fillings=("rain falls", "city", "he"))
    example = one(made, given)
    assert filled(example, made) == made.inputs.tokenizer.encode("rain falls in wet city he runs")
    unknown = one(made, record(None, masked="rain <blank> in"))
    assert not unknown.weights.any() and (unknown.tokens == made.inputs.special.mask).sum() == 1


def test_a_long_text_with_blanks_is_cut():
    made = blanks(sequence_length=8, blank_ratio=0.5)
    sample = made.sample(record(TEXT, text=TEXT), 0)
    assert sample.cut == 4 and filled(sample.documents[0], made) == made.inputs.tokenizer.encode(TEXT)[:6]
    with pytest.raises(ConfigError, match=r"task.kind is blanks, but the run's input format is causal"):
        renderer("causal", kind="blanks")
    with pytest.raises(DataError, match="the text has no token"):
        made.sample(record("", text=" "), 0)
