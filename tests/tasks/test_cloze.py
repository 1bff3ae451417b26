"""Cloze samples: layouts of every form, scorings, the rules of single tasks, what is refused."""

from __future__ import annotations

import numpy as np
import pytest
from support.data.recipes import encoder_decoder
from support.tasks.task_inputs import ALL_MASKS, form, predicted, record, renderer, settings, shown, tokenizer
from support.transformer.mask_rule import allowed, leaks

from data_utils.common.batch_fields import Example
from data_utils.common.errors import ConfigError, DataError
from data_utils.objectives.blank_infilling import BlankInfilling, BlankInfillingConfig
from data_utils.tasks.templates.render import Renderer
from data_utils.tokenizers.vocabulary import Vocabulary
from megatron_lite.inference.filling import blank_context

OWN = {"template": "{text} It was [MASK] and he ran", "verbalizers": {"0": "bad", "1": "good"}}
AT_END = {"template": "{text} It was [MASK]", "verbalizers": {"0": "bad", "1": "good"}}
TEXT = record("1", text="rain falls")


def one(made, given=TEXT, number=0):
    return made.sample(given, number)


def test_restricted_scores_are_of_one_row_of_one_document():
    made = renderer(**OWN)
    sample = one(made)
    (example,) = sample.documents
    assert shown(example, made) == (
        "[CLS] rain falls it was [MASK] and he ran [PAD] <|startofpiece|>"
    )  # eos has the id of [PAD] in BERT's vocabulary
    assert [part.positions.tolist() for part in sample.target_groups] == [[12], [12]] and sample.right == 1
    assert [predicted(part, made) for part in sample.target_groups] == ["bad", "good"]
    assert example.position_ids.tolist() == [*range(12), 5] and example.block_position_ids[12] == 1
    assert example.ord.tolist() == [0] * 12 + [1] and not example.weights.any() and not example.targets.any()


@pytest.mark.parametrize("scoring", ["sum", "mean"])
def test_each_choice_is_a_document_with_its_end(scoring):
    choices = {"0": "bad", "1": "good red wet"}
    made = renderer(template=OWN["template"], verbalizers=choices, scoring=scoring, length_power=0.5)
    sample = one(made)
    assert [predicted(part, made) for part in sample.target_groups] == [
        "bad <|endofpiece|>",
        "good red wet <|endofpiece|>",
    ]
    for number, (part, example) in enumerate(zip(sample.target_groups, sample.documents, strict=True)):
        size, length = 12, len(part.positions)
        assert part.document == number and part.positions.tolist() == [*range(size, size + length)]
        assert part.divisor == (pytest.approx(length**0.5) if scoring == "mean" else 1.0)
        mask = allowed(example.doc, example.ord, example.grp)
        assert (mask == encoder_decoder(len(example.tokens), size)).all()
        assert set(example.position_ids[size:]) == {5} and not example.weights.any()
        answers = np.zeros_like(example.targets)
        answers[part.positions] = part.targets
        assert not leaks(example.tokens, answers, np.where(answers > 0, 1.0, 0.0), mask)


def test_a_cloze_has_the_form_of_pretraining_and_of_use():
    made = renderer(template="{text} [MASK]", verbalizers={"0": "bad", "1": "good wet"}, scoring="sum")
    ids = made.inputs.tokenizer.encode("rain falls good wet")
    special = made.inputs.special
    vocabulary = Vocabulary(special, made.inputs.tokenizer.vocab_size)
    text = np.array([*ids, special.eos], np.int32)
    built = BlankInfilling(BlankInfillingConfig(), vocabulary, 1, 64).build(text, [(2, 4)], [0])
    sample = one(made)
    cloze, part = sample.documents[1], sample.target_groups[1]
    for name in Example.__dataclass_fields__:
        if name not in ("targets", "weights"):
            assert (getattr(cloze, name) == getattr(built, name)).all(), name
    assert (part.targets == built.targets[part.positions]).all()
    assert (part.positions == np.flatnonzero(built.weights)).all()
    context = blank_context([*ids[:2], special.mask], special)
    assert cloze.tokens[: len(context)].tolist() == context


@pytest.mark.parametrize("mask", ALL_MASKS)
def test_the_end_of_the_context_matches_use_for_every_mask(mask):
    for masks, setting in (((mask,), "auto"), (ALL_MASKS, mask)):
        config = settings(**AT_END, mask=setting)
        made = Renderer(config, tokenizer(), form(masks=masks), 7)
        sample = one(made)
        special = made.inputs.special
        before = made.inputs.tokenizer.encode("rain falls it was")
        context = blank_context([*before, getattr(special, mask)], special)
        assert sample.documents[0].tokens.tolist() == [*context, special.sop]
        assert sample.documents[0].objective[0] == ALL_MASKS.index(mask)


@pytest.mark.parametrize("objective", ["masked_lm", "unilm", "unilmv2"])
def test_models_that_predict_in_place(objective):
    made = renderer(objective, **OWN)
    sample = one(made)
    assert shown(sample.documents[0], made) == "[CLS] rain falls it was [MASK] and he ran [SEP]"
    assert [part.positions.tolist() for part in sample.target_groups] == [[5], [5]]
    assert not sample.documents[0].ord.any() and not sample.documents[0].segment_ids.any()


def test_left_to_right_models_answer_after_the_pattern():
    made = renderer("causal", "gpt2", **AT_END, scoring="sum")
    sample = one(made)
    example, part = sample.documents[1], sample.target_groups[1]
    assert shown(example, made) == "<|endoftext|>rain falls It was good"
    assert predicted(part, made) == " good<|endoftext|>"
    assert (example.tokens[part.positions[1:]] == part.targets[:-1]).all() and part.positions[-1] == len(
        example.tokens
    ) - 1
    assert example.ord.tolist() == [*range(len(example.tokens))]
    short = one(renderer("causal", **AT_END))
    assert shown(short.documents[0], made, slice(1, 1)) == ""
    assert short.target_groups[0].positions.tolist() == [len(short.documents[0].tokens) - 1] == [4]
    prefix = one(renderer("prefix_lm", **AT_END))
    assert prefix.target_groups[0].positions.tolist() == [5] and prefix.documents[0].ord.tolist() == [
        0
    ] * 5 + [1]
    with pytest.raises(ConfigError, match=r"text after its blank, which a run of causal cannot read"):
        renderer("causal", **OWN)


def test_a_verbalizer_brings_its_space_unless_it_begins_the_text():
    made = renderer(
        "blank_infilling", "gpt2", template="It [MASK]", verbalizers={"a": "x", "b": " y "}, scoring="sum"
    )
    parts = made.sample(record("a"), 0).target_groups
    assert [predicted(p, made) for p in parts] == [" x<|endofpiece|>", " y<|endofpiece|>"]
    made = renderer(
        "blank_infilling", "gpt2", template="[MASK] it", verbalizers={"a": "x", "b": "y"}, scoring="sum"
    )
    sample = made.sample(record("a"), 0)
    assert [predicted(p, made) for p in sample.target_groups] == ["x<|endofpiece|>", "y<|endofpiece|>"]


def test_a_long_text_is_cut_and_the_pattern_is_not():
    made = renderer(**OWN, sequence_length=16)
    sample = one(made, record("0", text="rain " * 40))
    assert sample.cut == 35 and len(sample.documents[0].tokens) == 16
    assert shown(sample.documents[0], made).startswith("[CLS]" + " rain" * 5 + " it was [MASK] and he")
    summed = renderer(**OWN, sequence_length=16, scoring="sum")
    assert {len(e.tokens) for e in one(summed, record("0", text="rain " * 40)).documents} == {16}


def test_labels_are_found_by_name_or_by_number():
    assert one(renderer(**OWN, labels=("1", "0"))).right == 0
    true_or_false = {"template": "{text} [MASK]", "verbalizers": {False: "no", True: "yes"}}
    assert one(renderer(**true_or_false, labels=("true", "false")), record("true", text="rain")).right == 0
    by_number = renderer(name="sst2", labels=("negative", "positive"))
    assert one(by_number, record("positive", text_a="rain")).right == 1
    assert one(by_number, record(None, text_a="rain")).right is None
    with pytest.raises(ConfigError, match="the verbalizers are for contradiction, neutral, entailment, but"):
        renderer(name="cb", labels=("a", "b", "c"))
    with pytest.raises(DataError, match=r"data.jsonl:1: label 'up' is unknown; the labels are"):
        one(by_number, record("up", text_a="rain"))


# ---- rules of single tasks ----


def test_copa_trains_on_both_orders():
    made = renderer(name="copa")
    given = record(0, premise="He ran.", choice1="Rain falls.", choice2="It is red.", question="effect")
    assert made.prepare([given], training=False) == [given]
    first, second = made.prepare([given], training=True)
    assert first is given and second.label == 1
    assert made.task_type.choices(first) == ("rain falls", "it is red")
    assert made.task_type.choices(second) == ("it is red", "rain falls")
    assert "he ran, so [MASK]" in shown(one(made, second).documents[0], made)
    with pytest.raises(DataError, match=r"the question of COPA is 'why'; it must be cause or effect"):
        one(made, record(0, premise="x", choice1="a", choice2="b", question="why"))


def wsc(index, text="he runs, she (she) ran: HE'S cold", pronoun="she", label="true", **more):
    return record(
        label, text=text, span1_text="the man", span1_index=0, span2_index=index, span2_text=pronoun, **more
    )


def test_wsc_marks_the_pronoun_even_if_its_index_is_off_by_one():
    made = renderer("blank_infilling", "gpt2", name="wsc")
    text = shown(one(made, wsc(3)).documents[0], made)
    assert text.startswith("[CLS]he runs, she (*she*) ran: HE'S cold The pronoun '*she*' refers to[MASK].")
    assert "runs, *she* (she)" in shown(one(made, wsc(1)).documents[0], made)
    assert "*HE*'S cold" in shown(one(made, wsc(6, pronoun="he")).documents[0], made)
    with pytest.raises(DataError, match=r"the pronoun 'she' is not word 6"):
        one(made, wsc(6))
    with pytest.raises(DataError, match=r"data.jsonl:1: span2_index is 'x'; it must be the index of a word"):
        one(made, wsc("x"))


def test_wsc_trains_on_true_samples_only():
    made = renderer(name="wsc")
    true, false = wsc(2), wsc(2, label="false")
    assert made.prepare([true, false], training=True) == [true]
    assert made.prepare([true, false], training=False) == [true, false]
    assert [len(one(made, given).target_groups) for given in (true, false)] == [1, 1]
    assert (one(made, true).right, one(made, false).right) == (0, None)
    assert made.task_type.choices(wsc(2, candidates=("rain", "the river"))) == (
        "the man",
        "rain",
        "the river",
    )


ENTITIES = tuple(f"{name} city" for name in "abcdefghijklmn")
NEWS = record(
    ["b city", "c city"], passage="rain", query="the @placeholder is wet", entities=(*ENTITIES, "a city")
)


def test_record_trains_on_each_right_entity_with_wrong_ones():
    made = renderer(name="record")
    records = made.prepare([NEWS], training=True)
    assert [given.fields["answer"] for given in records] == ["b city", "c city"]
    drawn = [made.task_type.choices(given, number) for number, given in enumerate(records)]
    for choices, right in zip(drawn, ("b city", "c city"), strict=True):
        assert choices[0] == right and len(set(choices)) == 10
        assert not {"b city", "c city"} & set(choices[1:])
    assert one(made, records[0], 0).right == 0
    assert drawn[0] == made.task_type.choices(records[0], 0) != made.task_type.choices(records[0], 5)
    seen = {entity for number in range(60) for entity in made.task_type.choices(records[0], number)}
    assert seen == set(ENTITIES) - {"c city"}, "every wrong entity is drawn at some time"
    (same,) = made.prepare([NEWS], training=False)
    assert made.task_type.choices(same) == ENTITIES and one(made, same).right == 1


def test_choices_of_a_record():
    made = renderer(name="choices")
    sample = one(made, record(1, inputs="rain", choices=["falls", "is red"]))
    assert [predicted(part, made) for part in sample.target_groups] == [
        "falls <|endofpiece|>",
        "is red <|endofpiece|>",
    ]
    assert sample.right == 1
    for choices, label, message in (
        (["falls"], 0, "has fewer than 2 choices"),
        (["a", "b"], 2, "label 2 is not one of the 2 choices"),
        (["a", "b"], "x", "label 'x' is not one of the 2 choices"),
        (["a", ""], 0, "the choice '' has 0 tokens"),
    ):
        with pytest.raises(DataError, match=rf"data.jsonl:1: .*{message}"):
            one(made, record(label, inputs="rain", choices=choices))
    with pytest.raises(DataError, match=r"the choice 'is red' has 2 tokens, but task.scoring is restricted"):
        one(renderer(name="choices", scoring="restricted"), record(0, inputs="it", choices=["is", "is red"]))


# ---- what is refused at the start ----


@pytest.mark.parametrize(
    ("objective", "more", "message"),
    [
        (
            "blank_infilling",
            {"verbalizers": {"0": "bad", "1": "very bad"}, "scoring": "restricted"},
            "compares single",
        ),
        (
            "blank_infilling",
            {"verbalizers": {"0": "bad", "1": "BAD"}},
            "'bad' and 'BAD' have the same tokens",
        ),
        ("blank_infilling", {"verbalizers": {"0": "bad", "1": "bad"}}, "have the same tokens"),
        ("blank_infilling", {"verbalizers": {"0": "bad", "1": "\u2603"}}, r"gives \[UNK\]; choose"),
        ("blank_infilling", {"verbalizers": {"0": "bad"}}, "one verbalizer, 'bad'; it needs 2"),
        (
            "blank_infilling",
            {"sequence_length": 8},
            r"sequence_length is 8, but the pattern .* alone need 11 tokens",
        ),
        (
            "masked_lm",
            {"verbalizers": {"0": "bad", "1": "very bad"}},
            "has [0-9] tokens, but task.scoring restricted",
        ),
        ("masked_lm", {"scoring": "sum"}, "predicts one token per blank"),
        ("xlnet", {}, "XLNet was not trained"),
        ("t5", {}, "input format is encoder_decoder"),
    ],
)
def test_settings_that_cannot_work_are_refused(objective, more, message):
    with pytest.raises(ConfigError, match=message):
        renderer(objective, **{**OWN, **more})


def test_a_vocabulary_without_the_tokens_of_the_form_is_refused():
    made = Renderer(settings(**OWN), tokenizer("bert", "none"), form(), 7)
    with pytest.raises(ConfigError, match=r"needs the special tokens eop, sop, which the tokenizer"):
        made.check()
