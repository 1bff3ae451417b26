"""The table of patterns: every one renders, has one blank and distinct verbalizers; own patterns; how text is cut."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.tasks.task_inputs import inputs, predicted, record, renderer, settings, shown

from data_utils.common.errors import ConfigError, DataError
from data_utils.tasks.templates.inputs import TokenSegment
from data_utils.tasks.templates.patterns import (
    PATTERNS,
    TextSegment,
    chosen_pattern,
    parse_template,
    rendered,
    require_one_blank,
)

GOLDEN = Path(__file__).parent / "golden" / "patterns.json"
PAIR = {"text_a": "The man is cold.", "text_b": "He runs, it is wet!"}
NLI = {"premise": "The man is cold.", "hypothesis": "It is wet!"}
QUESTION = {"passage": "Rain falls. It is wet.", "question": "is it wet"}
SPANS = {"span1_index": 1, "span1_text": "the man", "span2_index": 5, "span2_text": "he"}
# One record for each task.
RECORDS = {
    "copa": record(
        1, premise="The man ran.", choice1="He was cold.", choice2="Rain falls.", question="cause"
    ),
    "boolq": record("true", **QUESTION),
    "multirc": record("1", **QUESTION | {"question": "What is wet?"}, answer="the street"),
    "wic": record("true", word="run", sentence1="He runs north.", sentence2="The river runs."),
    "wsc": record("true", text="The man ran north as he, cold, ran.", **SPANS),
    "record": record(
        ["the man"],
        passage="Rain falls.\n@highlight\nThe man ran",
        query="In the rain @placeholder ran.",
        entities=("the man", "the city"),
    ),
    "race": record(1, context="Rain falls.", question="The street is _ .", choices=("cold", "wet")),
    "squad": record(0, context="Rain falls.", question="What falls?", choices=("rain", "he")),
    "choices": record(0, inputs="Rain", choices=("falls", "is red")),
}


def record_of(task):
    if task in RECORDS:
        return RECORDS[task]
    first = PATTERNS[task][0]
    has_premise = "{premise" in first.template and task not in ("wnli", "mnli", "mnlimm", "ax")
    return record(next(iter(first.verbalizers)), **(NLI if has_premise else PAIR))


def rendered_patterns():
    """Task -> for each pattern the documents and what each part predicts."""
    found = {}
    for task, patterns in PATTERNS.items():
        found[task] = []
        for number in range(len(patterns)):
            made = renderer(kind_of_tokenizer="gpt2", name=task, pattern=number, scoring="sum")
            sample = made.sample(record_of(task), 0)
            answers = [predicted(part, made) for part in sample.target_groups]
            contexts = [
                shown(e, made, slice(p.positions[0]))
                for e, p in zip(sample.documents, sample.target_groups, strict=True)
            ]
            found[task].append([contexts[0] if len(set(contexts)) == 1 else contexts, answers, sample.right])
    return found


def test_every_pattern_renders_as_before():
    """To write the file anew: PYTHONPATH=tests:tests/tasks python -c 'import test_patterns as t; t.write_golden()'"""
    assert rendered_patterns() == json.loads(GOLDEN.read_text(encoding="utf-8"))


def write_golden() -> None:
    GOLDEN.write_text(json.dumps(rendered_patterns(), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


@pytest.mark.parametrize("task", PATTERNS)
def test_patterns_have_one_blank_and_distinct_verbalizers(task):
    for pattern in PATTERNS[task]:
        require_one_blank(parse_template(pattern.template), pattern.template)
        words = list(pattern.verbalizers.values())
        assert len(set(words)) == len(words) and all(word.strip() == word and word for word in words)


def text_of(template, **fields):
    before, after = rendered(parse_template(template), record(**fields), settings())
    return "".join(segment.text for segment in before), "".join(segment.text for segment in after or [])


def test_options_of_a_field():
    assert text_of("{a:strip}! {b:lower} [MASK]", a="It is so?!.", b="Rain") == ("It is so! rain", "")
    assert text_of('"{a}" [MASK]. {b}', a=" x ", b="y") == ('"x"', ". y")
    assert text_of("{a}{b:exact}[MASK]{b:exact}", a="x", b=" y ") == ("x y", " y")


def test_users_text_is_never_a_blank_nor_a_pattern():
    made = renderer(
        "blank_infilling",
        "gpt2",
        template="{text} It was [MASK].",
        verbalizers={"0": "bad", "1": "good"},
        scoring="sum",
    )
    sample = made.sample(record("1", text="a [MASK] and {text} </s> <|endoftext|>"), 0)
    tokens = sample.documents[0].tokens.tolist()
    special = made.inputs.special
    assert tokens.count(special.mask) == 1 and tokens.count(special.eos) == 1
    assert "a [MASK] and {text} </s> <|endoftext|> It was[MASK]." in shown(sample.documents[0], made)


def test_only_shortenable_pieces_are_cut_the_longest_first():
    made = inputs(sequence_length=8)
    segments = [TokenSegment([1] * 5, True), TokenSegment([2] * 3, False), TokenSegment([3] * 7, True)]
    for max_tokens, expected in (
        (15, (5, 3, 7)),
        (14, (5, 3, 6)),
        (11, (4, 3, 4)),
        (5, (1, 3, 1)),
        (3, (0, 3, 0)),
    ):
        kept, cut = made.cut(segments, max_tokens, record())
        assert tuple(len(segment.ids) for segment in kept) == expected and cut == 15 - max_tokens
        assert [segment.ids for segment in kept] == [
            p.ids[: len(k.ids)] for p, k in zip(segments, kept, strict=True)
        ]
    with pytest.raises(DataError, match=r"data.jsonl:1: the sample needs 9 tokens .*sequence_length is 8"):
        made.cut(segments, 2, record())


def test_names_of_tasks_and_fields():
    assert chosen_pattern(settings(name="SST-2")) is PATTERNS["sst2"][0]
    assert text_of("{text} [MASK]", text_a="it") == ("it", "")
    before, _ = rendered(
        parse_template("{body} [MASK]"), record(text_a="it"), settings(text_fields=("body",))
    )
    assert before == [TextSegment("it", shortenable=True)]
    with pytest.raises(
        DataError, match=r"data.jsonl:1: the pattern needs the text 'body', but .* has text_a"
    ):
        text_of("{body} [MASK]", text_a="it")


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (
            {"name": "no"},
            "no patterns; set task.template and task.verbalizers, or task.name to one of agnews",
        ),
        ({"name": "wic", "pattern": 9}, r"task.pattern is 9, but wic has the patterns 0 \("),
        ({"name": "rte", "verbalizers": {"a": "b"}}, "task.verbalizers is set without task.template"),
        (
            {"template": "x [MASK]", "verbalizers": {None: "b"}},
            "task.verbalizers has the label None; write the",
        ),
        ({"template": "x [MASK]", "verbalizers": {"a": 3}}, "task.verbalizers.a is 3; it must be text"),
    ],
)
def test_a_pattern_that_does_not_exist_is_refused(more, message):
    with pytest.raises(ConfigError, match=message):
        chosen_pattern(settings(**more))


@pytest.mark.parametrize(
    "template", ["{text", "{text!r} [MASK]", "{a.b} [MASK]", "{} [MASK]", "{a:upper} [MASK]"]
)
def test_a_template_that_cannot_be_read_is_refused(template):
    with pytest.raises(ConfigError, match=r"task\.template"):
        parse_template(template)


@pytest.mark.parametrize("template", ["{text}", "[MASK] {text} [MASK]"])
def test_a_template_needs_one_blank(template):
    with pytest.raises(ConfigError, match=r"it must contain it once"):
        renderer(template=template, verbalizers={"a": "yes", "b": "no"})
